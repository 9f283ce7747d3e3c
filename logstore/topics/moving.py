"""Topics on their way out of a store and into one, of either kind: a partition travels as the files of a directory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from logstore.clock import Clock
from logstore.config import LogConfig, Resolved
from logstore.directory.state import PartitionState
from logstore.files import FileSystem
from logstore.ledger.rows import AppProgress
from logstore.limits import Limits
from logstore.partition.environment import LogEnvironment
from logstore.topics.registry import Topic


@dataclass(frozen=True, slots=True)
class Moved:
    """A partition whose files are whole, synced and closed."""

    state: PartitionState
    high_watermark: int
    last_stable_offset: int
    #: files in the folder that are no part of the log: what damage left
    aside: tuple[str, ...] = ()


class Arrivals(Protocol):
    """Topics that come into a store. Nothing of them is visible before `publish`, and then all of it is."""

    @property
    def fs(self) -> FileSystem:
        """Of the folders that partitions are built in."""

    def begin(self, topic: Topic) -> None:
        """Before anything of the topic arrives. Its id is one that no store has."""

    def directory(self, topic: Topic, number: int) -> str:
        """An empty folder to build the partition in."""

    def state_path(self, topic: Topic, number: int) -> str:
        """Where the log's state file belongs meanwhile."""

    def place(self, topic: Topic, number: int, moved: Moved) -> tuple[str, ...]:
        """The folder is whole; returns where `moved.aside` is kept. Nothing below the folder is used afterwards."""

    def publish(self) -> None:
        """Make everything visible. Raises TopicExists, CommitUnknown."""


class Receiving(Protocol):
    """What is asked of a store that topics come into. Implemented by `LogStore` and `BucketStore`."""

    @property
    def limits(self) -> Limits: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def path(self) -> str: ...

    def topics(self) -> list[Topic]: ...
    def log_config(self, topic: Topic) -> LogConfig: ...
    def resolve(self, configs: Mapping[str, object]) -> dict[str, Resolved]: ...
    def log_environment(self) -> LogEnvironment: ...

    def check_free(self, topic: Topic) -> None:
        """Raises TopicExists, and StrayDirectory where something lies in its place. Changes nothing."""

    def arrivals(self) -> AbstractContextManager[Arrivals]:
        """What was begun and not published is taken back."""


class Departures(Protocol):
    """Some topics as of one moment, which stays to be read while the context lasts."""

    @property
    def topics(self) -> Sequence[Topic]: ...
    @property
    def apps(self) -> Sequence[AppProgress]:
        """Of every app that the store knows."""

    @property
    def taken_ms(self) -> int: ...

    def log_bytes(self, topic: Topic, number: int) -> int: ...

    def take(
        self, topic: Topic, number: int, directory: str, progress: Callable[[int], None], *, link: bool = False
    ) -> Taken:
        """Put the partition's files into a folder. Raises DamagedLog, SegmentsChanged."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A partition's files up to its high watermark, in a directory of their own; the last segment needs no indexes."""

    state: PartitionState
    high_watermark: int
    linked_bytes: int
    copied_bytes: int


class Take(Protocol):
    """Puts a partition's files into a directory, as hard links if `link`, and tells `progress` of the bytes."""

    def __call__(
        self, topic: Topic, number: int, directory: str, progress: Callable[[int], None], *, link: bool = False
    ) -> Taken: ...
