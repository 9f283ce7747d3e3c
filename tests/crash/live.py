"""What the live mix writes, and what must be found: the pure part.

Every batch follows from (seed, writer, batch number), so whoever checks can rebuild what was written from its number
alone. A writer owns its keys and sends batch after batch, the same one again until it is acknowledged. So the state of
a key at any moment is the one after some batch between the last acknowledged and the last begun.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STATE, EVENTS, LEFT, RIGHT, ORDERS = "state", "events", "left", "right", "orders"
TOPICS: dict[str, tuple[int, dict[str, str]]] = {
    STATE: (
        3,
        {
            "cleanup.policy": "compact",
            "segment.bytes": "20000",
            "min.cleanable.dirty.ratio": "0.1",
            "delete.retention.ms": "1500",
            "file.delete.delay.ms": "700",
        },
    ),
    EVENTS: (2, {"segment.bytes": "20000", "retention.bytes": "120000", "file.delete.delay.ms": "700"}),
    LEFT: (2, {"segment.bytes": "30000", "retention.ms": "-1"}),
    RIGHT: (1, {"segment.bytes": "30000", "retention.ms": "-1", "compression.type": "zstd"}),
    ORDERS: (2, {"segment.bytes": "100000", "retention.ms": "-1"}),
}
#: `alter` moves the setting between these; the oracle goes by the smaller
RETENTION_BYTES = (120_000, 200_000)
WRITERS = ("one", "two")
STREAM = "stream"
KEYS = 40


@dataclass(frozen=True, slots=True)
class Batch:
    topic: str
    rows: tuple[tuple[bytes, bytes | None], ...]


def batch_of(seed: int, writer: str, number: int) -> Batch:
    """What batch `number` of a writer holds."""
    rng = random.Random(f"{seed}/{writer}/{number}")
    rows = []
    topic = EVENTS if number % 3 == 2 else STATE
    for at in range(rng.randrange(1, 60)):
        key = f"{writer}-{rng.randrange(KEYS)}"
        value = f"{writer}/{number}/{at}/" + "x" * rng.randrange(120)
        rows.append((key.encode(), None if topic == STATE and rng.random() < 0.12 else value.encode()))
    return Batch(topic, tuple(rows))


def stream_rows(seed: int, number: int) -> tuple[tuple[bytes, bytes], ...]:
    """What the stream writes to both its topics in one commit."""
    rng = random.Random(f"{seed}/stream/{number}")
    return tuple((b"k%d" % rng.randrange(9), b"stream/%d/%d" % (number, at)) for at in range(rng.randrange(1, 20)))


@dataclass(slots=True)
class History:
    """The values of a writer's keys, batch by batch, as far as somebody asked."""

    seed: int
    writer: str
    upto: int = -1
    values: dict[bytes, list[tuple[int, bytes | None]]] = field(default_factory=dict)

    def allowed(self, acknowledged: int, begun: int) -> dict[bytes, set[bytes | None]]:
        """For each key the values it may have: those after batch `acknowledged`, up to those after batch `begun`."""
        while self.upto < begun:
            self.upto += 1
            batch = batch_of(self.seed, self.writer, self.upto)
            if batch.topic == STATE:
                for key, value in batch.rows:
                    self.values.setdefault(key, []).append((self.upto, value))
        found: dict[bytes, set[bytes | None]] = {}
        for number in range(KEYS):
            key = f"{self.writer}-{number}".encode()
            last: bytes | None = None
            later: dict[int, bytes | None] = {}
            for batch_number, value in self.values.get(key, []):
                if batch_number <= acknowledged:
                    last = value
                elif batch_number <= begun:
                    later[batch_number] = value  # a batch appears as a whole: its last record of the key counts
            found[key] = {last, *later.values()}
        return found


class Diary:
    """What one role says, a JSON object a line, for good once it is written: a kill takes nothing of it."""

    def __init__(self, folder: Path, role: str) -> None:
        self.path = folder / f"{role}.jsonl"
        self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115 (until it is killed)

    def say(self, **line: Any) -> None:
        self._file.write(json.dumps(line).encode() + b"\n")


def lines_of(folder: Path, role: str) -> Iterator[dict[str, Any]]:
    path = folder / f"{role}.jsonl"
    if path.exists():
        yield from map(json.loads, path.read_bytes().splitlines())


@dataclass(slots=True)
class Progress:
    """How far a writer is, from its diary; it reads on where it stopped."""

    folder: Path
    writer: str
    acknowledged: int = -1
    begun: int = -1
    _position: int = 0

    def look(self) -> Progress:
        path = self.folder / f"{self.writer}.jsonl"
        if not path.exists():
            return self
        with open(path, "rb") as file:
            file.seek(self._position)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._position += len(whole)
        for line in map(json.loads, whole.splitlines()):
            self.acknowledged = max(self.acknowledged, line.get("done", -1))
            self.begun = max(self.begun, line.get("begins", -1))
        return self


def state_mistakes(found: dict[bytes, bytes], allowed: dict[bytes, set[bytes | None]]) -> list[str]:
    """What a restored state has that it must not, or lacks."""
    mistakes = [f"{key!r} was never written" for key in found.keys() - allowed.keys()]
    for key, values in allowed.items():
        value = found.get(key)
        if value not in values:
            mistakes.append(f"{key!r} is {_short(value)}, not one of {sorted(map(_short, values))}")
    return mistakes


def _short(value: bytes | None) -> str:
    return "deleted" if value is None else value.decode().rpartition("/")[0]
