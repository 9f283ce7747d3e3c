"""A file system in memory that can lose power: what was not synced may be forgotten, torn, or there without its data.

It stands under the engine's file-system seam. Each file has its content as a process sees it, its content on disk, and
the writes between the two; each directory likewise with names. `File.fsync` brings a file's content to disk,
`fsync_dir` a directory's names. `crash(rng)` draws one of the states a power cut may leave, the same for the same
`rng`. For one thread; descriptors, locks and `sendfile` are the operating system's and are not simulated.

What a cut may leave, beyond everything synced:

    data     of each write nothing, all, a prefix (cut at a sector or anywhere) or some of its sectors; the file may
             also have grown without the data: zeros or nonsense stand there instead
    names    a prefix, in order, of the operations of each directory since it was synced; a rename is there or not, in
             both directories at once
    times    as they were
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from logstore.clock import Clock, ManualClock
from logstore.files import File, FileStat, FileSystem

if TYPE_CHECKING:
    from typing_extensions import Buffer

SECTOR_BYTES = 512


class PowerCut(BaseException):
    """The power is gone; no `except Exception` of the code under test may survive it."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One line of the trace: a call that changes the disk, or would."""

    number: int
    kind: str
    path: str
    detail: str = ""

    def __str__(self) -> str:
        return f"{self.number:5d} {self.kind:9s} {self.path} {self.detail}".rstrip()


# --- what is on disk, and what is on its way ----------------------------------------------------------------------


@dataclass(slots=True)
class _Write:
    position: int
    data: bytes


@dataclass(slots=True)
class _Truncate:
    size: int


@dataclass(slots=True, eq=False)
class _Inode:
    number: int
    is_directory: bool
    mtime_ms: int
    ctime_ms: int
    # of a file
    content: bytearray = field(default_factory=bytearray)
    on_disk: bytearray = field(default_factory=bytearray)
    unsynced: list[_Write | _Truncate] = field(default_factory=list)
    # of a directory
    names: dict[str, _Inode] = field(default_factory=dict)
    names_on_disk: dict[str, _Inode] = field(default_factory=dict)
    unsynced_names: list[_NameChange] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _NameChange:
    """One operation on names, all or nothing; a rename between directories changes two of them."""

    changes: list[tuple[_Inode, str, _Inode | None]]

    def directories(self) -> list[_Inode]:
        return [directory for directory, _, _ in self.changes]


def _apply(content: bytearray, change: _Write | _Truncate) -> None:
    if isinstance(change, _Truncate):
        if change.size < len(content):
            del content[change.size :]
        else:
            content.extend(bytes(change.size - len(content)))
        return
    if change.position > len(content) and change.data:
        content.extend(bytes(change.position - len(content)))
    content[change.position : change.position + len(change.data)] = change.data


_ContentOf = Callable[[_Inode], "tuple[bytearray, bytearray, list[_Write | _Truncate]]"]
_NamesOf = Callable[[_Inode], "tuple[dict[str, _Inode], dict[str, _Inode], list[_NameChange]]"]


# --- the file system ---------------------------------------------------------------------------------------------


class SimulatedFileSystem:
    """A `FileSystem`; `/` is there from the start and durable, relative paths are taken from it."""

    def __init__(self, clock: Clock | None = None) -> None:
        self.clock: Clock = clock or ManualClock(1_700_000_000_000)
        #: every call that changes the disk, in order
        self.trace: list[Operation] = []
        #: files together hold no more than this; a write beyond fails with ENOSPC after what fits
        self.capacity_bytes: int | None = None
        self._inodes = 0
        self._root = self._new_inode(is_directory=True)
        self._power_left: int | None = None
        self._powered = True
        self._fault: tuple[int, int, int | None] | None = None  # operations left, errno, how often (None: always)

    # ----- faults

    def fail_after(self, operations: int) -> None:
        """Cut the power in the middle of the operation after the next `operations`; every later call fails as well.

        Whether that last operation reached the disk is for `crash` to draw.
        """
        self._power_left = operations

    def fail_with(self, error_number: int, *, after: int = 0, times: int | None = 1) -> None:
        """Let `times` operations (None: all) after the next `after` fail with OSError; a failed write got half way."""
        self._fault = (after, error_number, times)

    def heal(self) -> None:
        """Take back `fail_after` and `fail_with`."""
        self._power_left = self._fault = None

    @property
    def operations(self) -> int:
        """How many operations there have been, for choosing where to cut."""
        return len(self.trace)

    def _begin(self, kind: str, path: str, detail: str = "") -> bool:
        """Count an operation. True when the power fails during it: do it, as far as it is to get, then call `_cut`."""
        self._check_power()
        self.trace.append(Operation(len(self.trace), kind, path, detail))
        if self._fault is not None:
            after, error_number, times = self._fault
            self._fault = (max(after - 1, 0), error_number, times)
            if after == 0 and times != 0:
                self._fault = (0, error_number, None if times is None else times - 1)
                raise OSError(error_number, os.strerror(error_number), path)
        if self._power_left is None:
            return False
        self._power_left -= 1
        return self._power_left < 0

    def _cut(self, failing: bool) -> None:
        if failing:
            self._powered = False
            raise PowerCut(f"during {self.trace[-1]}")

    def _check_power(self) -> None:
        if not self._powered:
            raise PowerCut("the power is gone")

    # ----- paths

    def _new_inode(self, *, is_directory: bool) -> _Inode:
        self._inodes += 1
        now_ms = self.clock.now_ms()
        return _Inode(self._inodes, is_directory, now_ms, now_ms)

    @staticmethod
    def _parts(path: str) -> list[str]:
        return [part for part in os.path.normpath("/" + path).split("/") if part]

    def _find(self, path: str) -> _Inode:
        self._check_power()
        found = self._root
        for part in self._parts(path):
            if not found.is_directory:
                raise _os_error(errno.ENOTDIR, path)
            if part not in found.names:
                raise _os_error(errno.ENOENT, path)
            found = found.names[part]
        return found

    def _parent(self, path: str) -> tuple[_Inode, str]:
        parts = self._parts(path)
        if not parts:
            raise _os_error(errno.EBUSY, path)
        parent = self._find("/".join(parts[:-1]))
        if not parent.is_directory:
            raise _os_error(errno.ENOTDIR, path)
        return parent, parts[-1]

    def _change_names(self, *changes: tuple[_Inode, str, _Inode | None]) -> None:
        now_ms = self.clock.now_ms()
        change = _NameChange(list(changes))
        for directory, name, inode in changes:
            if inode is None:
                directory.names.pop(name, None)
            else:
                directory.names[name] = inode
            directory.mtime_ms = directory.ctime_ms = now_ms
        for directory in dict.fromkeys(change.directories()):
            directory.unsynced_names.append(change)

    # ----- FileSystem

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        parent, name = self._parent(path)
        inode = parent.names.get(name)
        if inode is None:
            if not create:
                raise _os_error(errno.ENOENT, path)
            failing = self._begin("create", path)
            inode = self._new_inode(is_directory=False)
            self._change_names((parent, name, inode))
            self._cut(failing)
        elif create and exclusive:
            raise _os_error(errno.EEXIST, path)
        elif inode.is_directory:
            raise _os_error(errno.EISDIR, path)
        return _SimulatedFile(self, inode, path, writable or create)

    def exists(self, path: str) -> bool:
        try:
            self._find(path)
        except OSError:
            return False
        return True

    def stat(self, path: str) -> FileStat:
        inode = self._find(path)
        return FileStat(len(inode.content), inode.mtime_ms, inode.ctime_ms, self._links(inode))

    def _links(self, inode: _Inode) -> int:
        """How many names a file has."""
        folders, found = [self._root], 0
        while folders:
            for each in folders.pop().names.values():
                found += each is inode
                if each.is_directory:
                    folders.append(each)
        return found

    def listdir(self, path: str) -> list[str]:
        inode = self._find(path)
        if not inode.is_directory:
            raise _os_error(errno.ENOTDIR, path)
        return sorted(inode.names)

    def mkdir(self, path: str) -> None:
        self._check_power()
        at, parts = self._root, self._parts(path)
        for depth, part in enumerate(parts):
            if part not in at.names:
                failing = self._begin("mkdir", "/" + "/".join(parts[: depth + 1]))
                self._change_names((at, part, self._new_inode(is_directory=True)))
                self._cut(failing)
            at = at.names[part]
            if not at.is_directory:
                raise _os_error(errno.EEXIST if depth == len(parts) - 1 else errno.ENOTDIR, path)

    def rename(self, source: str, target: str) -> None:
        source_parent, source_name = self._parent(source)
        target_parent, target_name = self._parent(target)
        inode = source_parent.names.get(source_name)
        if inode is None:
            raise _os_error(errno.ENOENT, source)
        above_source, above_target = self._parts(source)[:-1], self._parts(target)[:-1]
        if above_target[: len(above_source) + 1] == [*above_source, source_name]:
            raise _os_error(errno.EINVAL, source)  # into itself
        if above_source[: len(above_target) + 1] == [*above_target, target_name]:
            raise _os_error(errno.ENOTEMPTY, target)  # onto a directory above it
        replaced = target_parent.names.get(target_name)
        if replaced is inode:
            return  # two names of one file: POSIX leaves both
        if replaced is not None:
            if replaced.is_directory and not inode.is_directory:
                raise _os_error(errno.EISDIR, target)
            if inode.is_directory and not replaced.is_directory:
                raise _os_error(errno.ENOTDIR, target)
            if replaced.names:
                raise _os_error(errno.ENOTEMPTY, target)
        failing = self._begin("rename", source, f"-> {target}")
        inode.ctime_ms = self.clock.now_ms()
        self._change_names((source_parent, source_name, None), (target_parent, target_name, inode))
        self._cut(failing)

    def link(self, source: str, target: str) -> None:
        inode = self._find(source)
        parent, name = self._parent(target)
        if name in parent.names:
            raise _os_error(errno.EEXIST, target)
        if inode.is_directory:
            raise _os_error(errno.EPERM, source)
        failing = self._begin("link", source, f"-> {target}")
        inode.ctime_ms = self.clock.now_ms()
        self._change_names((parent, name, inode))
        self._cut(failing)

    def unlink(self, path: str) -> None:
        parent, name = self._parent(path)
        inode = parent.names.get(name)
        if inode is None:
            raise _os_error(errno.ENOENT, path)
        if inode.is_directory:
            raise _os_error(errno.EISDIR, path)
        failing = self._begin("unlink", path)
        inode.ctime_ms = self.clock.now_ms()
        self._change_names((parent, name, None))
        self._cut(failing)

    def rmdir(self, path: str) -> None:
        parent, name = self._parent(path)
        inode = parent.names.get(name)
        if inode is None:
            raise _os_error(errno.ENOENT, path)
        if not inode.is_directory:
            raise _os_error(errno.ENOTDIR, path)
        if inode.names:
            raise _os_error(errno.ENOTEMPTY, path)
        failing = self._begin("rmdir", path)
        self._change_names((parent, name, None))
        self._cut(failing)

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        inode = self._find(path)
        failing = self._begin("set_mtime", path, str(mtime_ms))
        inode.mtime_ms, inode.ctime_ms = mtime_ms, self.clock.now_ms()
        self._cut(failing)

    def fsync_dir(self, path: str) -> None:
        inode = self._find(path)
        if not inode.is_directory:
            raise _os_error(errno.ENOTDIR, path)
        self._cut(self._begin("fsync_dir", path))
        for directory, count in _closure({inode: len(inode.unsynced_names)}).items():
            for change in directory.unsynced_names[:count]:
                _apply_names(directory.names_on_disk, directory, change)
            del directory.unsynced_names[:count]

    # ----- looking at it

    def files(self) -> dict[str, bytes]:
        """The content of every file by path, as a process sees it."""
        return {path: bytes(inode.content) for path, inode in self._walk() if not inode.is_directory}

    def directories(self) -> list[str]:
        return [path for path, inode in self._walk() if inode.is_directory]

    def copy_to(self, directory: str) -> None:
        """Write everything below a real directory, for tools that need one."""
        for path, inode in self._walk():
            target = os.path.join(directory, path.lstrip("/"))
            if inode.is_directory:
                os.makedirs(target, exist_ok=True)
            else:
                with open(target, "wb") as file:
                    file.write(inode.content)
                os.utime(target, ns=(inode.mtime_ms * 1_000_000,) * 2)

    def _walk(self) -> Iterator[tuple[str, _Inode]]:
        todo = [("/", self._root)]
        while todo:
            path, inode = todo.pop()
            yield path, inode
            todo.extend((os.path.join(path, name), inode.names[name]) for name in sorted(inode.names, reverse=True))

    def _used_bytes(self) -> int:
        return sum(len(inode.content) for inode in {inode.number: inode for _, inode in self._walk()}.values())

    # ----- what comes after

    def kill(self) -> SimulatedFileSystem:
        """The file system after the process died and the power stayed: nothing is lost, nothing more is synced."""
        return self._survivor(
            lambda inode: (bytearray(inode.content), bytearray(inode.on_disk), list(inode.unsynced)),
            lambda directory: (directory.names, directory.names_on_disk, directory.unsynced_names),
        )

    def crash(self, rng: random.Random) -> SimulatedFileSystem:
        """The file system after a power cut now. This one stays as it is, so that many cuts can be drawn from it."""
        mood = rng.choice(("forget", "keep", "mixed", "mixed", "mixed"))
        wanted = {
            directory: {"forget": 0, "keep": len(directory.unsynced_names)}.get(
                mood, _drawn_count(rng, len(directory.unsynced_names))
            )
            for directory in self._reachable()
            if directory.is_directory
        }
        counts = _closure(wanted)

        def names_of(directory: _Inode) -> tuple[dict[str, _Inode], dict[str, _Inode], list[_NameChange]]:
            names = dict(directory.names_on_disk)
            for change in directory.unsynced_names[: counts.get(directory, 0)]:
                _apply_names(names, directory, change)
            return names, names, []

        def content_of(inode: _Inode) -> tuple[bytearray, bytearray, list[_Write | _Truncate]]:
            if mood == "forget":
                content = bytearray(inode.on_disk)
            elif mood == "keep":
                content = bytearray(inode.content)
            else:
                content = _drawn_content(rng, inode)
            return content, bytearray(content), []

        return self._survivor(content_of, names_of)

    def _reachable(self) -> list[_Inode]:
        """Every inode that some outcome may still name, in the order they were made."""
        found: dict[int, _Inode] = {}
        todo = [self._root]
        while todo:
            inode = todo.pop()
            if inode.number in found:
                continue
            found[inode.number] = inode
            todo.extend(inode.names.values())
            todo.extend(inode.names_on_disk.values())
            todo.extend(target for change in inode.unsynced_names for _, _, target in change.changes if target)
        return [found[number] for number in sorted(found)]

    def _survivor(self, content_of: _ContentOf, names_of: _NamesOf) -> SimulatedFileSystem:
        """A new file system over copies of the inodes, with the content and names that the two functions give."""
        other = SimulatedFileSystem(self.clock)
        other.capacity_bytes = self.capacity_bytes
        other._inodes = self._inodes
        originals = self._reachable()
        copies = {
            inode: _Inode(inode.number, inode.is_directory, inode.mtime_ms, inode.ctime_ms) for inode in originals
        }
        changes: dict[_NameChange, _NameChange] = {}

        def copied(change: _NameChange) -> _NameChange:
            if change not in changes:
                changes[change] = _NameChange(
                    [
                        (copies[directory], name, None if target is None else copies[target])
                        for directory, name, target in change.changes
                        if directory in copies
                    ]
                )
            return changes[change]

        for inode, copy in copies.items():
            if inode.is_directory:
                names, on_disk, unsynced = names_of(inode)
                copy.names = {name: copies[target] for name, target in names.items()}
                copy.names_on_disk = {name: copies[target] for name, target in on_disk.items()}
                copy.unsynced_names = [copied(change) for change in unsynced]
            else:
                copy.content, copy.on_disk, copy.unsynced = content_of(inode)
        other._root = copies[self._root]
        return other


class _SimulatedFile:
    """An open file; it stays usable when its name goes, and dies with the power."""

    def __init__(self, fs: SimulatedFileSystem, inode: _Inode, path: str, writable: bool) -> None:
        self.path = path
        self._fs = fs
        self._inode: _Inode | None = inode
        self._writable = writable

    def _opened(self) -> _Inode:
        self._fs._check_power()
        if self._inode is None:
            raise _os_error(errno.EBADF, self.path)
        return self._inode

    def pread(self, size: int, position: int) -> bytes:
        return bytes(memoryview(self._opened().content)[position : position + size])

    def pread_into(self, buffer: Buffer, position: int) -> int:
        view = memoryview(buffer).cast("B")
        data = self.pread(len(view), position)
        view[: len(data)] = data
        return len(data)

    def pwrite(self, data: Buffer, position: int) -> None:
        content = bytes(memoryview(data).cast("B"))
        if not content:
            return  # as the operating system's file: nothing to write, nothing to call
        inode = self._opened()
        if not self._writable:
            raise _os_error(errno.EBADF, self.path)
        fits = self._fits(inode, position, len(content))
        try:
            failing = self._fs._begin("pwrite", self.path, f"{len(content)} bytes at {position}")
        except OSError:
            self._write(inode, _Write(position, content[: len(content) // 2]))
            raise
        self._write(inode, _Write(position, content[:fits]))
        self._fs._cut(failing)
        if fits < len(content):
            raise _os_error(errno.ENOSPC, self.path)

    def _fits(self, inode: _Inode, position: int, size: int) -> int:
        if self._fs.capacity_bytes is None:
            return size
        free = max(self._fs.capacity_bytes - self._fs._used_bytes(), 0)
        return max(min(size, len(inode.content) + free - position), 0)

    def _write(self, inode: _Inode, change: _Write | _Truncate) -> None:
        _apply(inode.content, change)
        inode.unsynced.append(change)
        inode.mtime_ms = inode.ctime_ms = self._fs.clock.now_ms()

    def start_writeback(self, position: int, size: int) -> None:
        """Promises nothing: a power cut keeps any part of what was not synced anyway."""

    def drop_cached(self, position: int, size: int) -> None:
        """Nothing that could be seen."""

    def size(self) -> int:
        return len(self._opened().content)

    def truncate(self, size: int) -> None:
        inode = self._opened()
        if not self._writable:
            raise _os_error(errno.EINVAL, self.path)
        failing = self._fs._begin("truncate", self.path, f"to {size}")
        self._write(inode, _Truncate(size))
        self._fs._cut(failing)

    def fsync(self) -> None:
        inode = self._opened()
        self._fs._cut(self._fs._begin("fsync", self.path))
        for change in inode.unsynced:
            _apply(inode.on_disk, change)
        inode.unsynced.clear()

    def fileno(self) -> int:
        raise _os_error(errno.EBADF, self.path)

    def close(self) -> None:
        self._inode = None


def _os_error(number: int, path: str) -> OSError:
    return OSError(number, os.strerror(number), path)


# --- drawing what survives ---------------------------------------------------------------------------------------


def _apply_names(names: dict[str, _Inode], directory: _Inode, change: _NameChange) -> None:
    for changed, name, inode in change.changes:
        if changed is directory:
            if inode is None:
                names.pop(name, None)
            else:
                names[name] = inode


def _closure(wanted: dict[_Inode, int]) -> dict[_Inode, int]:
    """How many name changes of each directory must be on disk if the wanted ones are: renames reach across."""
    counts = dict(wanted)
    todo = list(wanted)
    while todo:
        directory = todo.pop()
        for change in directory.unsynced_names[: counts[directory]]:
            for other in change.directories():
                needed = other.unsynced_names.index(change) + 1
                if counts.get(other, 0) < needed:
                    counts[other] = needed
                    todo.append(other)
    return counts


def _drawn_count(rng: random.Random, count: int) -> int:
    return rng.choice((0, count, rng.randint(0, count)))


def _drawn_content(rng: random.Random, inode: _Inode) -> bytearray:
    content = bytearray(inode.on_disk)
    if not inode.unsynced:
        return content
    kept = _drawn_count(rng, len(inode.unsynced))
    any_order = rng.random() < 0.5
    for at, change in enumerate(inode.unsynced):
        chance = 0.5 if any_order else float(at < kept)
        if rng.random() < chance:
            _apply(content, change)
        elif isinstance(change, _Write) and (at == kept or any_order) and rng.random() < 0.7:
            _tear(rng, content, change)
    if len(content) < len(inode.content) and rng.random() < 0.5:
        size = rng.choice((len(inode.content), rng.randint(len(content), len(inode.content))))
        content.extend(_filling(rng, size - len(content)))
    return content


def _tear(rng: random.Random, content: bytearray, write: _Write) -> None:
    """Let part of a write reach the disk."""
    end = write.position + len(write.data)
    if rng.random() < 0.5:
        cut = rng.randint(write.position, end)
        if rng.random() < 0.5:
            cut = max(cut - cut % SECTOR_BYTES, write.position)
        _apply(content, _Write(write.position, write.data[: cut - write.position]))
        return
    first = write.position - write.position % SECTOR_BYTES
    for sector in range(first, end, SECTOR_BYTES):
        if rng.random() < 0.5:
            start, stop = max(sector, write.position), min(sector + SECTOR_BYTES, end)
            content.extend(_filling(rng, max(start - len(content), 0)))
            _apply(content, _Write(start, write.data[start - write.position : stop - write.position]))


def _filling(rng: random.Random, size: int) -> bytes:
    """What stands where data never came: zeros or nonsense."""
    return rng.randbytes(size) if rng.random() < 0.5 else bytes(size)


if TYPE_CHECKING:
    _satisfies_the_seam: FileSystem = SimulatedFileSystem()
