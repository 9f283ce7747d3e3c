"""Opening a store, and its topics: their definitions and settings, and the ledger.

Opening one holds a shared lock that keeps brokers out.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, ParamSpec, Protocol

from logstore.clock import SYSTEM_CLOCK, Clock
from logstore.directory.ends import TopicEnds, read_applied_sequence
from logstore.directory.layout import BROKER_GUARD, Layout
from logstore.directory.locks import DEFAULT_WAIT_MS, StoreLocks
from logstore.directory.making import make_store
from logstore.directory.probe import probe_file_system
from logstore.directory.sealed import Parsed
from logstore.directory.shared_clock import shared_clock
from logstore.directory.tails import boot_id
from logstore.directory.version import read_version
from logstore.errors import (
    AccessDenied,
    CorruptState,
    InvalidConfig,
    UnknownTopic,
    is_disk_full,
)
from logstore.files import OS_FILES, FileSystem
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.read_only import ReadOnlyFiles, check_writable, is_refusal, refused
from logstore.settings_file import load_toml
from logstore.topic import TopicPartition
from logstore.topics.marks import TopicMarks
from logstore.topics.registry import Topic, TopicRegistry
from logstore.topics.store_settings import StoreSettings

if TYPE_CHECKING:
    from typing_extensions import Self

    from logstore.ledger import Ledger


Given = ParamSpec("Given")


def _names_missing_rights(opens: Callable[Given, None]) -> Callable[Given, None]:
    """Turns a PermissionError while a store is opened into AccessDenied."""

    @functools.wraps(opens)
    def opening(*given: Given.args, **named: Given.kwargs) -> None:
        try:
            opens(*given, **named)
        except PermissionError as error:
            raise AccessDenied(
                "this user has no right to read the store",
                file=error.filename,
                hint="Use the owner's account, or give this user's group access to the store.",
            ) from error

    return opening


class Settles(Protocol):
    """What finishes commits of a topic; the commit path has it."""

    def settle(self, topic: Topic) -> TopicEnds: ...


class OpenTopics(StoreSettings):
    """Close it, or use it as a context manager."""

    @_names_missing_rights
    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        create: bool = False,
        fs: FileSystem = OS_FILES,
        clock: Clock = SYSTEM_CLOCK,
        limits: Limits = DEFAULT_LIMITS,
        lock_wait_ms: int = DEFAULT_WAIT_MS,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        """Open the store at `path`; with `create`, make it when there is none.

        Where nothing can be written (a read-only mount, no right to write), it is open for reading: `is_read_only`.
        It then shows what is published, and whatever would write raises ReadOnlyStore.

        Raises NotAStore, AccessDenied, StoreVersionError, UnsuitableFileSystem, StoreInUse; for its settings file
        UnknownConfig and InvalidConfig.
        """
        if storage_options:
            raise InvalidConfig("storage options are for a store in a bucket, and this one is a path")
        self.layout = Layout(os.path.abspath(os.fspath(path)))
        self.fs: FileSystem = fs
        self.clock = shared_clock(fs, self.layout.locks, clock, boot_id())
        self.limits = limits
        if create:
            make_store(fs, self.layout)
        read_version(fs, self.layout.version)
        settings = self.layout.settings
        self._take_settings(load_toml(settings, fs=fs) if fs.exists(settings) else {}, settings)
        self.locks = StoreLocks(fs, self.layout, clock=self.clock, wait_ms=lock_wait_ms)
        try:
            for directory in (
                self.layout.locks,
                self.layout.staging,
            ):  # both may be missing: nothing in them is permanent
                fs.mkdir(directory)
            _probe(fs, self.layout.locks)
            fs.mkdir(os.path.join(self.layout.logs, BROKER_GUARD))
            self.locks.enter()
        except OSError as error:
            if not is_refusal(error):
                raise
            self.fs = ReadOnlyFiles(fs, refused(error, self.layout.root))
            self.locks = StoreLocks(self.fs, self.layout, clock=self.clock, wait_ms=lock_wait_ms)
            # Without the file no broker runs here; without the right to read it, that cannot be known.
            with contextlib.suppress(FileNotFoundError, PermissionError):
                self.locks.enter(create=False)
        self.registry = TopicRegistry(self.fs, self.layout)
        self.marks = TopicMarks(self.fs, self.layout)
        #: kept by `commit.writing`, which would open the ledger for every partition otherwise
        self.settler: Settles | None = None
        self._ends: Parsed[TopicEnds] = Parsed()

    def close(self) -> None:
        """Give the store up. Idempotent."""
        self.settler = None
        self.locks.leave()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # --- settings ------------------------------------------------------------------------------------------------

    @property
    def path(self) -> str:
        return self.layout.root

    @property
    def storage_options(self) -> Mapping[str, str]:
        return {}

    @property
    def is_read_only(self) -> bool:
        """Whether it could be opened for reading only."""
        return isinstance(self.fs, ReadOnlyFiles)

    def check_writable(self) -> None:
        """Raises ReadOnlyStore where nothing can be written, for those who would notice only after much work."""
        check_writable(self.fs)

    # --- the ledger ----------------------------------------------------------------------------------------------

    @property
    def has_ledger(self) -> bool:
        """Whether anything was ever committed here. Looking makes no ledger, and starts faster."""
        return self.fs.exists(self.layout.ledger)

    def is_unwritten(self) -> bool:
        """Nothing was ever committed here, and the store is not a copy: there is no ledger, and no topic misses one."""
        if self.has_ledger or self.fs.exists(self.layout.origin):
            return False
        for topic_id in self.fs.listdir(self.layout.state):
            try:
                if read_applied_sequence(self.fs, self.layout.ends(topic_id), limits=self.limits):
                    return False
            except (CorruptState, ValueError, NotADirectoryError):
                continue  # reported with the topic
        return True

    def ledger(self) -> Ledger:
        """The store's ledger, made where there is none; each caller has one of its own."""
        from logstore.ledger import Ledger

        return Ledger(self.layout.ledger, fs=self.fs, clock=self.clock)

    # --- topics --------------------------------------------------------------------------------------------------

    def topic_names(self) -> list[str]:
        return self.registry.names()

    def topics(self) -> list[Topic]:
        """All topics by name. Raises CorruptState for one whose file is damaged."""
        found = []
        for name in self.registry.names():
            with contextlib.suppress(UnknownTopic):  # deleted since it was listed
                found.append(self.registry.read(name))
        return found

    def topic(self, name: str) -> Topic:
        """Raises InvalidTopic, UnknownTopic, CorruptState."""
        try:
            return self.registry.read(name)
        except UnknownTopic as error:
            if self.fs.exists(self.layout.partition(TopicPartition(name, 0))):
                error.reworded(f"{error.what}, but a directory in `logs/` is")
                error.with_hint("`duramen recover --dry-run` says whether the topic can be brought back.")
            raise

    def known_topic(self, name: str) -> Topic:
        """The same: nothing is kept of it."""
        return self.topic(name)

    def check_exists(self, topic: Topic) -> None:
        """Raises UnknownTopic when the topic is another one by now."""
        if self.registry.read(topic.name).id != topic.id:
            raise UnknownTopic(f"topic {topic.name} was deleted and created again meanwhile")

    def free_bytes(self) -> int | None:
        """Room for logs; None where the file system does not tell, as a simulated one."""
        try:
            found = os.statvfs(self.layout.logs)
        except OSError:
            return None
        return found.f_bavail * found.f_frsize


def _probe(fs: FileSystem, directory: str) -> None:
    """A full disk tells nothing: it was tried when the store was made, and reading needs no room."""
    try:
        probe_file_system(fs, directory)
    except OSError as error:
        if not is_disk_full(error):
            raise
