"""The plan object of a batch: which objects hold its batches, which offsets those get, and where each piece lies.

It is put before the commit, under a key of its own for each attempt; the ledger's row names key, length and CRC. The
piece index tells a reader every range it needs without a look at the directories of the staged files. It is kept by
columns, compressed: pieces of a file follow one another without gaps, so their positions follow from their sizes.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from logstore.bucket.rows import PlanRef
from logstore.commit.plan import Plan, check_size, plan_document, plan_from
from logstore.directory.sealed import seal, unseal
from logstore.errors import CorruptState
from logstore.limits import INT32_MAX, INT64_MAX, Limits
from logstore.objects.objects import check_key

VERSION = 1
#: columns of a piece as stored: topic and partition, size, records; of each file its pieces in their order
_STORED = 4
#: columns of the index
PARTITION, FILE, POSITION, SIZE, RECORDS = range(5)


@dataclass(frozen=True, slots=True)
class PlanFile:
    """A staged object, exactly."""

    key: str
    size_bytes: int
    crc: int
    #: pieces in the order of the object: topic id, partition, size, records
    pieces: tuple[tuple[str, int, int, int], ...]


@dataclass(frozen=True, slots=True)
class PlanPiece:
    """Where some batches of one partition lie: `file` is a number among `BucketPlan.files`."""

    file: int
    position: int
    size_bytes: int
    records: int


@dataclass(frozen=True, slots=True, eq=False)
class BucketPlan:
    """A decoded plan. `plan.files` are the keys of `files`."""

    plan: Plan
    #: key, size and CRC of the staged objects, in the order in which their batches count
    files: tuple[tuple[str, int, int], ...]
    #: by topic id: PARTITION, FILE, POSITION, SIZE, RECORDS of each piece, by partition, in the order of its batches
    index: Mapping[str, npt.NDArray[np.int64]]

    def pieces(self, topic_id: str, partition: int) -> list[PlanPiece]:
        """The pieces of one partition, in the order of its batches."""
        index = self.index.get(topic_id)
        if index is None:
            return []
        first, last = np.searchsorted(index[:, PARTITION], (partition, partition + 1)).tolist()
        return [PlanPiece(*numbers) for numbers in index[first:last, 1:].tolist()]


def encode_plan(plan: Plan, files: Sequence[PlanFile], *, limits: Limits) -> bytes:
    """What is put under the plan's key. `files` are those of `plan`, in its order. Raises AppendTooLarge."""
    assert plan.files == tuple(file.key for file in files)
    numbers = {topic.topic_id: number for number, topic in enumerate(plan.topics)}
    pieces = np.array(
        [
            (numbers[topic_id] << 32 | partition, number, size, records)
            for number, file in enumerate(files)
            for topic_id, partition, size, records in file.pieces
        ],
        dtype="<i8",
    ).reshape(-1, _STORED)
    document = plan_document(plan) | {
        "sizes": [file.size_bytes for file in files],
        "crcs": [file.crc for file in files],
        "count": len(pieces),
        "pieces": base64.b64encode(zlib.compress(np.ascontiguousarray(pieces.T).tobytes(), 1)).decode(),
    }
    return check_size(seal(document, version=VERSION), limits)


def decode_plan(data: bytes, ref: PlanRef, *, limits: Limits) -> BucketPlan:
    """The plan that a row of the ledger names. Raises CorruptState, StoreVersionError."""
    if len(data) != ref.size_bytes or crc32c(data) != ref.crc:
        raise CorruptState("the plan is not the one that was committed", file=ref.key)
    return parse_plan(data, ref.key, limits=limits)


def parse_plan(data: bytes, key: str, *, limits: Limits) -> BucketPlan:
    """A plan that nobody named. Raises CorruptState, StoreVersionError."""
    if len(data) > limits.side_file_bytes:
        raise CorruptState(f"a plan of {len(data)} bytes; the limit is {limits.side_file_bytes}", file=key)
    document = unseal(data, version=VERSION, file=key)
    plan = plan_from(document, file=key, name_of=_key)
    try:
        sizes = _numbers(document["sizes"], len(plan.files), INT64_MAX)
        crcs = _numbers(document["crcs"], len(plan.files), (1 << 32) - 1)
        stored = _pieces(document["pieces"], document["count"], limits)
        index = _index(plan, sizes, stored)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptState(f"malformed plan: {error}", file=key) from None
    return BucketPlan(plan, tuple(zip(plan.files, sizes, crcs, strict=True)), index)


def _index(plan: Plan, sizes: Sequence[int], stored: npt.NDArray[np.int64]) -> dict[str, npt.NDArray[np.int64]]:
    """Raises ValueError where pieces and counts do not agree with each other."""
    where, file, size, records = stored
    if len(file) and (np.any(np.diff(file) < 0) or file[0] < 0 or file[-1] >= len(sizes)):
        raise ValueError("pieces of a file that the plan does not have")
    if len(file) and min(size.min(), records.min()) <= 0:
        raise ValueError("a piece with nothing in it")
    ends = np.cumsum(size)
    firsts = np.searchsorted(file, np.arange(len(sizes) + 1))
    starts = np.concatenate(([0], ends))[firsts[:-1]]
    lengths = np.concatenate(([0], ends))[firsts[1:]] - starts
    if np.any(lengths > np.array(sizes, dtype=np.int64)):
        raise ValueError("pieces that do not fit their file")
    columns = np.column_stack((where & INT32_MAX, file, ends - size - starts[file], size, records))
    topics = where >> 32
    if len(topics) and not 0 <= topics.min() <= topics.max() < len(plan.topics):
        raise ValueError("pieces of a topic that the plan does not have")
    found = {}
    for number, topic in enumerate(plan.topics):
        if not len(topic.base_offsets) == len(topic.end_offsets) == topic.partitions:
            raise ValueError(f"offsets of another number of partitions than {topic.topic} has")
        mine = columns[topics == number]
        if len(mine) and mine[:, PARTITION].max() >= topic.partitions:
            raise ValueError(f"pieces of a partition that {topic.topic} does not have")
        mine = mine[np.argsort(mine[:, PARTITION], kind="stable")]
        counted = np.bincount(mine[:, PARTITION], weights=mine[:, RECORDS], minlength=topic.partitions)
        if counted.astype(np.int64).tolist() != [
            end - base for base, end in zip(topic.base_offsets, topic.end_offsets, strict=True)
        ]:
            raise ValueError(f"pieces of {topic.topic} that do not fill its offsets")
        found[topic.topic_id] = mine
    return found


def _pieces(value: object, count: object, limits: Limits) -> npt.NDArray[np.int64]:
    """The stored columns, bounded before anything is unpacked."""
    if type(count) is not int or not 0 <= count <= limits.side_file_bytes // (8 * _STORED):
        raise ValueError("no count of pieces, or too many")
    if not isinstance(value, str):
        raise ValueError("pieces are not a text")
    size = 8 * _STORED * count
    unpacker = zlib.decompressobj()
    try:
        data = unpacker.decompress(base64.b64decode(value, validate=True), size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if len(data) != size or not unpacker.eof:
        raise ValueError("another number of pieces than was said")
    return np.frombuffer(data, dtype="<i8").astype(np.int64, copy=False).reshape(_STORED, count)


def _numbers(value: object, count: int, high: int) -> list[int]:
    if not isinstance(value, list) or len(value) != count:
        raise ValueError("not a list of a number for each file")
    if any(type(each) is not int or not 0 <= each <= high for each in value):
        raise ValueError("a number that is out of range")
    return value


def _key(name: object) -> str:
    if not isinstance(name, str):
        raise ValueError(f"{name!r} is not a key")
    return check_key(name)
