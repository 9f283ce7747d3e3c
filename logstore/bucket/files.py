"""Objects as files: a read-only `FileSystem` over sealed segments, and the cache of blocks that lies under it.

The engine reads small pieces, one after the other; object storage answers a few large requests well. So objects are
fetched in blocks: what a read lacks is merged into one request, a reader that goes on where it ended gets more with
each, and what was fetched stays in memory; of what is read more than once there is a local copy. Objects are written
once, so a block never becomes stale. Nothing here retries or judges: an object that is gone is ObjectMissing.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, NoReturn

from logstore.bucket.local_copy import LocalCopy, pieces_to_read
from logstore.bucket.manifest import Segment
from logstore.bucket.segment_object import object_bytes, part_spans
from logstore.errors import DuramenError, ObjectMissing
from logstore.files import File, FileStat
from logstore.objects.objects import Objects
from logstore.segment.names import file_name

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True, slots=True)
class CacheLimits:
    """How much a cache keeps, and how it asks."""

    memory_bytes: int = 64 << 20
    block_bytes: int = 512 << 10
    #: how far a reader that goes on is ahead of itself at most
    ahead_bytes: int = 16 << 20
    #: what is ahead by more than a reader waits for comes by requests of this size, beside the reader
    piece_bytes: int = 4 << 20
    #: of a partition that is read more than once, in a file of this machine; and the size of the requests for it
    copy_bytes: int = 1 << 30
    copy_piece_bytes: int = 8 << 20


_PIECES_AT_ONCE = 4
#: of local copies: enough to be on their way where an answer takes some ten milliseconds to begin
_COPIED_AT_ONCE = 8


class BlockCache:
    """Blocks of write-once objects. Safe for threads."""

    def __init__(self, objects: Objects, *, limits: CacheLimits | None = None) -> None:
        self._objects = objects
        self.limits = limits or CacheLimits()
        self._lock = threading.Lock()
        self._memory: OrderedDict[tuple[str, int], bytes] = OrderedDict()
        self._memory_bytes = 0
        #: blocks that are on their way
        self._coming: dict[tuple[str, int], Future[None]] = {}
        self._threads: ThreadPoolExecutor | None = None
        self._copying: ThreadPoolExecutor | None = None

    def clear(self) -> None:
        """Let go of what is in memory."""
        with self._lock:
            self._memory.clear()
            self._memory_bytes = 0

    def begin(self, key: str, size: int, numbers: range) -> None:
        """Have blocks fetched meanwhile. What fails here is asked for again by whoever needs it."""
        step = max(self.limits.piece_bytes // self.limits.block_bytes, 1)
        for first in range(numbers.start, numbers.stop, step):
            piece = range(first, min(first + step, numbers.stop))
            with self._lock:
                wanted = [n for n in piece if (key, n) not in self._memory and (key, n) not in self._coming]
                if not wanted:
                    continue
                if self._threads is None:
                    self._threads = ThreadPoolExecutor(_PIECES_AT_ONCE, thread_name_prefix="duramen-ahead")
                try:
                    future = self._threads.submit(self._come, key, size, wanted)
                except RuntimeError:  # while the interpreter ends, there are no new threads
                    return
                self._coming.update({(key, number): future for number in wanted})

    def local_copy(self, segments: Sequence[Segment], start: int, end: int) -> LocalCopy | None:
        """Begin to fetch what a reader of these offsets needs more than once; None where there is nothing to keep."""
        limits = self.limits
        pieces = pieces_to_read(segments, start, end, piece_bytes=limits.copy_piece_bytes, bytes_max=limits.copy_bytes)
        if not pieces:
            return None
        with self._lock:
            if self._copying is None:
                self._copying = ThreadPoolExecutor(_COPIED_AT_ONCE, thread_name_prefix="duramen-copy")
        with contextlib.suppress(OSError):
            return LocalCopy(self._objects, self._copying, pieces)
        return None

    def _come(self, key: str, size: int, numbers: Sequence[int]) -> None:
        try:
            with contextlib.suppress(DuramenError):
                self._fetch(key, size, numbers)
        finally:
            with self._lock:
                for number in numbers:
                    self._coming.pop((key, number), None)

    def read_into(self, key: str, size: int, buffer: memoryview, position: int, *, ahead: int = 0) -> None:
        """Fill `buffer` with what an object of `size` bytes has at `position`, and fetch up to `ahead` bytes more."""
        block_bytes = self.limits.block_bytes
        first, last = position // block_bytes, (position + len(buffer) - 1) // block_bytes
        blocks = self.load(key, size, range(first, last + 1), ahead=ahead)
        for number, block in zip(range(first, last + 1), blocks, strict=True):
            begin = max(position, number * block_bytes)
            end = min(position + len(buffer), number * block_bytes + len(block))
            at = number * block_bytes
            buffer[begin - position : end - position] = memoryview(block)[begin - at : end - at]

    def warm(self, key: str, size: int, spans: Iterable[tuple[int, int]]) -> None:
        """Fetch all blocks of these spans by one request: whoever needs pieces of one object for many readers."""
        block_bytes = self.limits.block_bytes
        numbers = sorted({n for begin, end in spans for n in range(begin // block_bytes, -(-end // block_bytes))})
        self.load(key, size, numbers)

    def load(self, key: str, size: int, numbers: Sequence[int], *, ahead: int = 0) -> list[bytes]:
        """Blocks of an object, those that are not here by one request. Raises ObjectMissing, ObjectTruncated."""
        found = {number: self._find(key, number) for number in numbers}
        missing = [number for number, block in found.items() if block is None]
        if missing:
            beyond = numbers[-1] + 1
            more = range(beyond, min(beyond + ahead // self.limits.block_bytes, -(-size // self.limits.block_bytes)))
            wanted = missing
            if missing[-1] == numbers[-1]:
                wanted = missing + [number for number in more if self._find(key, number) is None]
            found.update(self._fetch(key, size, wanted))
        return [block for number in numbers if (block := found[number]) is not None]

    def forget(self, key: str) -> None:
        """Fetch the object again: what was fetched of it is not sound."""
        with self._lock:
            gone = [each for each in self._memory if each[0] == key]
            for each in gone:
                self._memory_bytes -= len(self._memory.pop(each))

    def _find(self, key: str, number: int) -> bytes | None:
        with self._lock:
            coming = self._coming.get((key, number))
        if coming is not None:
            coming.result()
        with self._lock:
            block = self._memory.get((key, number))
            if block is not None:
                self._memory.move_to_end((key, number))
            return block

    def _fetch(self, key: str, size: int, numbers: Sequence[int]) -> dict[int, bytes]:
        block_bytes = self.limits.block_bytes
        spans: list[tuple[int, int]] = []
        for number in numbers:
            begin, end = number * block_bytes, min((number + 1) * block_bytes, size)
            if spans and spans[-1][1] == begin:
                spans[-1] = (spans[-1][0], end)
            else:
                spans.append((begin, end))
        fetched = {}
        for (begin, _), data in zip(spans, self._objects.ranges(key, spans), strict=True):
            for at in range(0, len(data), block_bytes):
                number = (begin + at) // block_bytes
                fetched[number] = block = bytes(data[at : at + block_bytes])
                self._keep(key, number, block)
        return fetched

    def _keep(self, key: str, number: int, block: bytes) -> None:
        with self._lock:
            before = self._memory.pop((key, number), b"")
            self._memory[key, number] = block
            self._memory_bytes += len(block) - len(before)
            while self._memory_bytes > self.limits.memory_bytes and len(self._memory) > 1:
                _, gone = self._memory.popitem(last=False)
                self._memory_bytes -= len(gone)


@contextlib.contextmanager
def as_missing_file(path: str) -> Iterator[None]:
    """An object that is gone is to a reader what a file that is gone is: the list has moved on."""
    try:
        yield
    except ObjectMissing as error:
        raise FileNotFoundError(errno.ENOENT, "the object is gone", error.file or path) from None


@dataclass(frozen=True, slots=True)
class LazyFile:
    """A file that is made when it is opened."""

    open: Callable[[], File]
    mtime_ms: int


class ReadOnlyFile:
    """Implements `File` for reading, but for `size` and `pread_into`."""

    def __init__(self, path: str) -> None:
        self.path = path

    def size(self) -> int:
        raise NotImplementedError

    def pread_into(self, buffer: Buffer, position: int) -> int:
        raise NotImplementedError

    def pread(self, size: int, position: int) -> bytes:
        buffer = bytearray(max(min(size, self.size() - position), 0))
        self.pread_into(buffer, position)
        return bytes(buffer)

    def view_of(self, buffer: Buffer, position: int) -> memoryview:
        """As much of the buffer as there are bytes for."""
        view = memoryview(buffer).cast("B")
        return view[: max(min(len(view), self.size() - position), 0)]

    def pwrite(self, data: Buffer, position: int) -> None:
        _refuse(self.path)

    def truncate(self, size: int) -> None:
        _refuse(self.path)

    def fsync(self) -> None:
        """What was read is where it was."""

    def start_writeback(self, position: int, size: int) -> None:
        """Nothing was written."""

    def drop_cached(self, position: int, size: int) -> None:
        """The cache has its own order."""

    def fileno(self) -> int:
        raise OSError(errno.EBADF, "an object has no descriptor", self.path)

    def close(self) -> None:
        """Nothing is held."""


class BytesFile(ReadOnlyFile):
    """Bytes that are known as a file."""

    def __init__(self, path: str, data: bytes) -> None:
        super().__init__(path)
        self._data = data

    def size(self) -> int:
        return len(self._data)

    def pread_into(self, buffer: Buffer, position: int) -> int:
        view = self.view_of(buffer, position)
        view[:] = self._data[position : position + len(view)]
        return len(view)


class ObjectFile(ReadOnlyFile):
    """Some bytes of an object as a file."""

    def __init__(
        self,
        cache: BlockCache,
        key: str,
        object_size: int,
        span: tuple[int, int],
        path: str,
        *,
        copy: LocalCopy | None = None,
    ) -> None:
        super().__init__(path)
        self._cache = cache
        self._copy = copy
        self._key = key
        self._object_size = object_size
        self._begin, self._end = span
        #: where the last read began and ended
        self._last = self._next = -1
        self._ahead = 0

    def pread_into(self, buffer: Buffer, position: int) -> int:
        view = self.view_of(buffer, position)
        if not len(view):
            return 0
        if self._copy is not None:
            with as_missing_file(self.path):
                if self._copy.read_into(self._key, view, self._begin + position):
                    return len(view)
        limits = self._cache.limits
        end = position + len(view)
        # A reader goes on where the last whole batch ended, a little before it stopped.
        if not self._last <= position <= self._next:
            self._ahead = self._begun = 0
        elif end > self._next:  # twice as far ahead as before
            self._ahead = min(2 * max(self._ahead, len(view), limits.block_bytes), limits.ahead_bytes)
        self._last, self._next = position, end
        blocks = -(-min(self._ahead, self.size() - end) // limits.block_bytes)
        is_beside = self._ahead >= 2 * limits.piece_bytes
        begin = self._begin + position
        with as_missing_file(self.path):
            if is_beside:
                self._begin_ahead((begin + len(view)) // limits.block_bytes, blocks)
            ahead = 0 if is_beside else blocks * limits.block_bytes
            self._cache.read_into(self._key, self._object_size, view, begin, ahead=ahead)
        return len(view)

    def _begin_ahead(self, first: int, blocks: int) -> None:
        """Fetch beside the reader, by requests of a good size: not before half of what is ahead was read."""
        begin, end = max(first, self._begun), min(first + blocks + 1, -(-self._end // self._cache.limits.block_bytes))
        if end - begin >= blocks // 2 or (end - begin > 0 and end * self._cache.limits.block_bytes >= self._end):
            self._cache.begin(self._key, self._object_size, range(begin, end))
            self._begun = end

    def size(self) -> int:
        return self._end - self._begin


def _refuse(path: str) -> NoReturn:
    raise OSError(errno.EROFS, "objects are not changed", path)


class SegmentFiles:
    """The segments of one partition as the files of a directory. Implements `FileSystem` for reading."""

    def __init__(
        self,
        cache: BlockCache,
        directory: str,
        segments: Iterable[Segment],
        more: Mapping[str, LazyFile] | None = None,
        copy: LocalCopy | None = None,
    ) -> None:
        """`more` has files by path that are no parts of sealed segments; `copy` has some of their bytes."""
        self._cache = cache
        self._copy = copy
        self._segments = {
            os.path.join(directory, file_name(segment.base_offset, kind)): (segment, span)
            for segment in segments
            for kind, span in part_spans(segment).items()
        }
        self._more = more or {}

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        if writable or create or exclusive:
            _refuse(path)
        if path in self._more:
            return self._more[path].open()
        segment, span = self._find(path)
        return ObjectFile(self._cache, segment.key, object_bytes(segment), span, path, copy=self._copy)

    def exists(self, path: str) -> bool:
        return path in self._segments or path in self._more

    def stat(self, path: str) -> FileStat:
        if path in self._more:
            more = self._more[path]
            return FileStat(more.open().size(), more.mtime_ms, more.mtime_ms)
        segment, (begin, end) = self._find(path)
        return FileStat(end - begin, segment.appended_ms, segment.appended_ms)

    def listdir(self, path: str) -> list[str]:
        names = (*self._segments, *self._more)
        return sorted(os.path.basename(name) for name in names if os.path.dirname(name) == path)

    def mkdir(self, path: str) -> None:
        _refuse(path)

    def rename(self, source: str, target: str) -> None:
        _refuse(source)

    def link(self, source: str, target: str) -> None:
        _refuse(source)

    def unlink(self, path: str) -> None:
        _refuse(path)

    def rmdir(self, path: str) -> None:
        _refuse(path)

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        _refuse(path)

    def fsync_dir(self, path: str) -> None:
        """No name was changed."""

    def _find(self, path: str) -> tuple[Segment, tuple[int, int]]:
        found = self._segments.get(path)
        if found is None:
            raise FileNotFoundError(errno.ENOENT, "no segment of this list", path)
        return found
