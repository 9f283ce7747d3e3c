"""Due partitions in shares: what one Spark application compacts, so that small partitions do not cost a JVM each.

A share is written as Spark's command line takes it: `orders:0-49,52` are partitions 0 to 49 and 52 of topic orders.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

SHARE_BYTES = 4 << 30
#: as many mapped tasks as Airflow allows for by default, with room to spare
SHARES_MAX = 500
_RANGES = re.compile(r"[0-9]{1,10}(-[0-9]{1,10})?(,[0-9]{1,10}(-[0-9]{1,10})?)*")
_PARTITIONS_MAX = 1_000_000

Partition = tuple[str, int]


def shares(sizes: Mapping[Partition, int], share_bytes: int = SHARE_BYTES) -> list[list[Partition]]:
    """Cut the partitions, in the order given, into shares of at most `share_bytes`; a larger one has its own."""
    most = max(share_bytes, 2 * sum(sizes.values()) // SHARES_MAX)
    cut: list[list[Partition]] = []
    filled = 0
    for partition, size in sizes.items():
        if not cut or filled + size > most:
            cut.append([])
            filled = 0
        cut[-1].append(partition)
        filled += size
    return cut


def written(partitions: Iterable[Partition]) -> list[str]:
    """One word for each topic."""
    numbers: dict[str, set[int]] = {}
    for topic, number in partitions:
        numbers.setdefault(topic, set()).add(number)
    return [f"{topic}:{','.join(_ranges(sorted(found)))}" for topic, found in numbers.items()]


def _ranges(numbers: Sequence[int]) -> Iterable[str]:
    first = last = numbers[0]
    for number in [*numbers[1:], None]:
        if number == last + 1:
            last = number
            continue
        yield str(first) if first == last else f"{first}-{last}"
        if number is not None:
            first = last = number


def read(words: Iterable[str]) -> dict[str, set[int]]:
    """The partitions of each topic. Raises ValueError."""
    found: dict[str, set[int]] = {}
    for word in words:
        topic, colon, ranges = word.partition(":")
        if not topic or not colon or not _RANGES.fullmatch(ranges):
            raise ValueError(f"{word!r} names no partitions; write orders:0-49,52")
        for part in ranges.split(","):
            first, _, last = part.partition("-")
            low, high = int(first), int(last or first)
            if not low <= high < _PARTITIONS_MAX:
                raise ValueError(f"{part} in {word!r} is not a range of partitions; write orders:0-49,52")
            found.setdefault(topic, set()).update(range(low, high + 1))
    return found
