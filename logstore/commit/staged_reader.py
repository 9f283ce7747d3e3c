"""Reading staged files: the batches of one topic, by partition, in the order of the rows."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from logstore.commit.staging import TRAILER, TRAILER_MAGIC
from logstore.errors import CorruptState, UnappliablePlan
from logstore.files import File, FileSystem
from logstore.limits import Limits
from logstore.records.memory import Memory
from logstore.segment.batches import Chunk, read_batches

#: files that are open at once
_READERS_MAX = 64
_DROP_BYTES_MIN = 64 << 10


@dataclass(frozen=True, slots=True)
class Piece:
    position: int
    size_bytes: int
    records: int


class StagedReader:
    """The pieces of one staged file for one topic. Raises CorruptState when the file is not whole.

    `release` closes the file; the next one who asks for batches opens it again.
    """

    def __init__(self, fs: FileSystem, path: str, *, topic_id: str, limits: Limits) -> None:
        self._fs = fs
        self._path = path
        self._limits = limits
        self._file: File | None = fs.open(path)
        try:
            self._pieces = self._load(self._file, topic_id)
            partitions, starts = np.unique(self._pieces[:, 0], return_index=True)
            # A file may hold nothing of this topic.
            ends = np.append(starts, len(self._pieces))[1:]
            self._of = dict(zip(partitions.tolist(), zip(starts.tolist(), ends.tolist(), strict=True), strict=True))
        except BaseException:
            self.release()
            raise

    def _load(self, file: File, topic_id: str) -> npt.NDArray[np.int64]:
        """Partition, position, size and records of the topic's pieces: by partition, in the order of the rows."""
        path = self._path
        size = file.size()
        trailer = file.pread(TRAILER.size, max(size - TRAILER.size, 0))
        if len(trailer) < TRAILER.size:
            raise CorruptState("a staged file without its trailer", file=path)
        position, length, checksum, magic = TRAILER.unpack(trailer)
        if magic != TRAILER_MAGIC or position < 0 or position + length + TRAILER.size != size:
            raise CorruptState("a staged file that is not whole", file=path)
        directory = file.pread(length, position)
        if crc32c(directory) != checksum:
            raise CorruptState("the directory of a staged file is damaged", file=path)
        try:
            document = json.loads(directory)
            if topic_id not in document["topics"]:
                return np.empty((0, 4), dtype=np.int64)
            pieces = np.array(document["pieces"], dtype=np.int64).reshape(-1, 5)
            mine = pieces[pieces[:, 0] == document["topics"].index(topic_id), 1:5]
        except (KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            raise CorruptState(f"a malformed directory of a staged file: {error}", file=path) from None
        return mine[np.argsort(mine[:, 0], kind="stable")]

    def file(self) -> File:
        self._file = self._file or self._fs.open(self._path)
        return self._file

    def pieces(self, partition: int) -> list[Piece]:
        """Where the batches of one partition lie, in the order of the rows."""
        first, last = self._of.get(partition, (0, 0))
        return [Piece(*numbers) for numbers in self._pieces[first:last, 1:].tolist()]

    def pieces_of(self, partitions: Sequence[int]) -> npt.NDArray[np.int64]:
        """Of each piece of these partitions: which of them it belongs to, position and size, in their order."""
        spans = [self._of.get(partition, (0, 0)) for partition in partitions]
        rows = [np.arange(first, last) for first, last in spans if last > first]
        if not rows:
            return np.empty((0, 3), dtype=np.int64)
        mine = self._pieces[np.concatenate(rows)]
        counts = [last - first for first, last in spans]
        return np.column_stack((np.repeat(np.arange(len(spans)), counts), mine[:, 1], mine[:, 2]))

    def chunks(self, partition: int, memory: Memory | None = None) -> Iterator[Chunk]:
        """The batches of one partition in the order of the rows, checksums verified. Raises CorruptBatch."""
        memory = memory or Memory()
        first, last = self._of.get(partition, (0, 0))
        for _, position, size, _ in self._pieces[first:last].tolist():
            file = self.file()
            yield from read_batches(file, position, position + size, limits=self._limits, memory=memory)
            if size >= _DROP_BYTES_MIN:
                file.drop_cached(position, size)  # the log it was copied into serves reads from now on

    def release(self) -> None:
        file, self._file = self._file, None
        if file is not None:
            file.close()


class StagedReaders:
    """The staged files of a plan in their order, for one topic: opened once, a limited number at a time."""

    def __init__(self, fs: FileSystem, folder: str, names: Sequence[str], *, topic_id: str, limits: Limits) -> None:
        self._open = [
            partial(StagedReader, fs, os.path.join(folder, name), topic_id=topic_id, limits=limits) for name in names
        ]
        self._readers: list[StagedReader] | None = None
        self._memory = Memory()

    def __enter__(self) -> StagedReaders:
        return self

    def __exit__(self, *_: object) -> None:
        for reader in self._readers or ():
            reader.release()

    def chunks(self, partition: int) -> Iterator[Chunk]:
        """The partition's batches in the order of the rows. Raises CorruptState, CorruptBatch."""
        readers = self._opened()
        for reader in readers:
            yield from reader.chunks(partition, self._memory)
            if len(readers) > _READERS_MAX:
                reader.release()

    def gather(self, partitions: Sequence[int], *, bytes_max: int) -> tuple[npt.NDArray[np.uint8], list[int]] | None:
        """The bytes of several partitions, one after the other, each in the order of the rows, and the size of each.

        Nothing of them is checked. None where they are more than `bytes_max`. Raises CorruptState.
        """
        readers = self._opened()
        pieces = [reader.pieces_of(partitions) for reader in readers]
        sizes = np.zeros(len(partitions), dtype=np.int64)
        for found in pieces:
            np.add.at(sizes, found[:, 0], found[:, 2])
        if int(sizes.sum()) > bytes_max:
            return None
        data = np.empty(int(sizes.sum()), dtype=np.uint8)
        filled = (np.cumsum(sizes) - sizes).tolist()
        for reader, found in zip(readers, pieces, strict=True):
            for run in _runs(found):
                begin, end = run[0][1], run[-1][1] + run[-1][2]
                block = np.empty(end - begin, dtype=np.uint8)
                if reader.file().pread_into(block.data, begin) < len(block):
                    return None  # reading the pieces one by one says what is missing
                for at, position, size in run:
                    to = filled[at]
                    data[to : to + size] = block[position - begin : position - begin + size]
                    filled[at] = to + size
            if len(readers) > _READERS_MAX:
                reader.release()
        return data, sizes.tolist()

    def _opened(self) -> list[StagedReader]:
        if self._readers is None:  # only when they are needed: a late task finds them gone, and has nothing to do
            self._readers = []
            for make in self._open:
                try:
                    self._readers.append(make())
                except FileNotFoundError as error:
                    raise UnappliablePlan("a staged file is gone before it was appended", file=error.filename) from None
                if len(self._open) > _READERS_MAX:
                    self._readers[-1].release()
        return self._readers


def _runs(pieces: npt.NDArray[np.int64]) -> Iterator[list[tuple[int, int, int]]]:
    """Pieces that follow one another in their file, together."""
    run: list[tuple[int, int, int]] = []
    for at, position, size in pieces.tolist():
        if run and position != run[-1][1] + run[-1][2]:
            yield run
            run = []
        run.append((at, position, size))
    if run:
        yield run
