"""Segments in a file of this machine, for a reader that goes through them more than once.

A restore reads all of its segments twice, or more often. So they are fetched from the beginning on, by large requests
side by side, into a file that has no name, and the reader follows: no byte is asked for twice. In memory there are only
the requests that are on their way. What has no room in the file is read as other readers read it. Nothing here judges:
an object that is gone is ObjectMissing, when its bytes are needed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
import threading
from bisect import bisect_right
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from logstore.bucket.manifest import Segment
from logstore.bucket.segment_object import object_bytes
from logstore.errors import DuramenError
from logstore.files import spark_local_dir
from logstore.objects.objects import Objects


@dataclass(frozen=True, slots=True)
class Piece:
    """Some bytes of an object that come by one request, and where they lie in the file."""

    key: str
    begin: int
    end: int
    position: int


def pieces_to_read(
    segments: Sequence[Segment], start: int, end: int, *, piece_bytes: int, bytes_max: int
) -> list[Piece]:
    """What a reader of the offsets [start, end) needs, in the order in which it does, as far as there is room.

    Whoever opens a log opens all its segments, so indexes come first, and objects that one request fetches.
    """
    small: list[tuple[str, int, int]] = []
    large: list[tuple[str, int, int]] = []
    for segment in segments:
        size = object_bytes(segment)
        part = _part_read(segment, start, end, piece_bytes)
        if size <= piece_bytes and part:
            small.append((segment.key, 0, size))
        elif part:
            small.append((segment.key, segment.log_bytes, size))
            large += [(segment.key, at, min(at + piece_bytes, part.stop)) for at in part]
    pieces, position = [], 0
    for key, begin, stop in small + large:
        if begin < stop:
            if position + stop - begin > bytes_max:
                break
            pieces.append(Piece(key, begin, stop, position))
            position += stop - begin
    return pieces


def _part_read(segment: Segment, start: int, end: int, piece_bytes: int) -> range:
    """Where the pieces of its log begin that have the offsets [start, end), if all records are of a size.

    Where that is less than a piece there is none: blocks do, and memory keeps them.
    """
    offsets = segment.next_offset - segment.base_offset
    first, last = max(start - segment.base_offset, 0), min(end - segment.base_offset, offsets)
    if first >= last:
        return range(0)
    begin, stop = segment.log_bytes * first // offsets, segment.log_bytes * last // offsets
    if last - first < offsets and stop - begin < piece_bytes:
        return range(0)
    begin = begin // piece_bytes * piece_bytes
    return range(begin, min(-(-stop // piece_bytes) * piece_bytes, segment.log_bytes), piece_bytes)


class LocalCopy:
    """The pieces of one reader. Fetching goes on in threads; reading and closing are for one thread."""

    def __init__(self, objects: Objects, threads: Executor, pieces: Sequence[Piece]) -> None:
        """Begin to fetch. Raises OSError where no file can be made."""
        self._objects = objects
        self._file = tempfile.TemporaryFile(buffering=0, prefix="duramen-", dir=spark_local_dir())  # noqa: SIM115
        pieces = _with_room(pieces, self._file.fileno())
        self._pieces: dict[str, list[Piece]] = {}
        for piece in sorted(pieces, key=lambda piece: piece.begin):
            self._pieces.setdefault(piece.key, []).append(piece)
        #: those that are not known to be there; None: nobody fetches it
        self._coming: dict[Piece, Future[None] | None] = dict.fromkeys(pieces)
        with contextlib.suppress(RuntimeError):  # while the interpreter ends, there are no new threads
            for piece in pieces:
                self._coming[piece] = threads.submit(self._fetch, piece)

    def read_into(self, key: str, view: memoryview, position: int) -> bool:
        """Fill `view` with what an object has at `position`; False, and it has to be read elsewhere.

        Raises ObjectMissing, ObjectTruncated, and what else fails.
        """
        end = position + len(view)
        pieces = self._covering(key, position, end)
        try:
            for piece in pieces:
                self._wait(piece)
            for piece in pieces:
                begin, stop = max(piece.begin, position), min(piece.end, end)
                self._read(view[begin - position : stop - position], piece.position + begin - piece.begin)
        except OSError:  # the disk is full, or fails: what is here is of no more use
            self.close()
            return False
        return bool(pieces)

    def close(self) -> None:
        """Fetch no more, and let go of the file once nobody writes to it any more. Idempotent."""
        self._pieces.clear()
        left = {each for each in self._coming.values() if each is not None and not each.cancel() and not each.done()}
        lock = threading.Lock()
        if not left:
            self._file.close()

        def end(future: Future[None]) -> None:
            with lock:
                left.discard(future)
                if not left:
                    self._file.close()

        for future in tuple(left):
            future.add_done_callback(end)

    def _covering(self, key: str, begin: int, end: int) -> list[Piece]:
        """The pieces that have these bytes; none where some are in no piece."""
        pieces = self._pieces.get(key, [])
        first = max(bisect_right(pieces, begin, key=lambda piece: piece.begin) - 1, 0)
        found = []
        for piece in pieces[first:]:
            if begin >= end or not piece.begin <= begin < piece.end:
                break
            found.append(piece)
            begin = piece.end
        return found if begin >= end else []

    def _wait(self, piece: Piece) -> None:
        """What failed, or was not begun, is asked for at once."""
        if piece not in self._coming:
            return
        future = self._coming[piece]
        if future is None or future.cancel() or isinstance(future.exception(), DuramenError):
            self._fetch(piece)
        else:
            future.result()
        del self._coming[piece]

    def _fetch(self, piece: Piece) -> None:
        (data,) = self._objects.ranges(piece.key, [(piece.begin, piece.end)])
        view, position = memoryview(data), piece.position
        while len(view):
            written = os.pwrite(self._file.fileno(), view, position)
            view, position = view[written:], position + written

    def _read(self, view: memoryview, position: int) -> None:
        while len(view):
            got = os.preadv(self._file.fileno(), [view], position)
            if not got:
                raise OSError(errno.EIO, "the local copy is cut")
            view, position = view[got:], position + got


def _with_room(pieces: Sequence[Piece], fd: int) -> list[Piece]:
    """Those that fit half of what is free: others need room as well."""
    disk = os.fstatvfs(fd)
    room = disk.f_bavail * disk.f_frsize // 2
    return [piece for piece in pieces if piece.position + piece.end - piece.begin <= room]
