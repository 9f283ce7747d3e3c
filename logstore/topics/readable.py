"""What reading asks of an open store: of a directory and of a bucket alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Protocol

from logstore.clock import Clock
from logstore.config import BrokerConfig, LogConfig, Resolved
from logstore.directory.ends import TopicEnds
from logstore.directory.state import PartitionState
from logstore.limits import Limits
from logstore.topics.registry import Topic

if TYPE_CHECKING:
    from logstore.partition.reader import PartitionReader
    from logstore.topics.looking import PartitionLook


class ReadableStore(Protocol):
    """Implemented by `OpenStore` and `BucketStore`. Nothing that takes one asks which it is."""

    @property
    def limits(self) -> Limits: ...
    @property
    def clock(self) -> Clock: ...
    @property
    def path(self) -> str: ...

    @property
    def storage_options(self) -> Mapping[str, str]:
        """How its bucket is reached, as it was opened with; none of a directory. May have secrets in it."""

    @property
    def poll_s(self) -> float:
        """How often to look for news where nobody says otherwise."""

    def topic_names(self) -> list[str]: ...
    def topics(self) -> list[Topic]: ...

    def topic(self, name: str) -> Topic:
        """As it is now. Raises UnknownTopic."""

    def known_topic(self, name: str) -> Topic:
        """As this process knows it, for what is compared with the store afterwards in any case. Raises UnknownTopic."""

    def check_exists(self, topic: Topic) -> None:
        """Raises UnknownTopic when the topic is another one by now."""

    def topic_settings(self, topic: Topic | None = None) -> dict[str, Resolved]: ...
    def log_config(self, topic: Topic) -> LogConfig: ...
    def resolve(self, configs: Mapping[str, object]) -> dict[str, Resolved]: ...

    @property
    def broker_config(self) -> BrokerConfig: ...
    @property
    def settings_file(self) -> str:
        """Where the settings of the store as a whole are, or would be."""

    def broker_settings(self) -> dict[str, Resolved]:
        """The settings of the store as a whole, each with its source."""

    def given(self, name: str) -> Any:
        """The value of one of them where somebody gave one; None where it is the default."""

    def ends(self, topic: Topic) -> TopicEnds:
        """As of now."""

    def ends_at_once(self, topics: Sequence[Topic]) -> Mapping[str, TopicEnds] | None:
        """Of several topics as of one moment, by topic id; None where that takes more than one look."""

    def high_watermark(self, topic: Topic, number: int) -> int: ...
    def partition_state(self, topic: Topic, number: int) -> PartitionState: ...
    def partition_states(self, topic: Topic) -> list[PartitionState]:
        """Of all partitions, each as of now."""

    def look(self, topic: Topic, number: int) -> PartitionLook:
        """The partition at one moment, as planning and figures see it."""

    def reader(self, topic: Topic | str, number: int, *, end_offset: int = 0) -> PartitionReader: ...

    def is_in_tail(self, topic: Topic, number: int, offset: int) -> bool:
        """Whether it is known, without a request, that records from `offset` on are new and none was deleted."""

    def snapshot(
        self, topic: Topic, number: int, *, end_offset: int = 0, again: tuple[int, int] | None = None
    ) -> AbstractContextManager[PartitionReader]:
        """A reader for what must be read whole: while it is open, what it found at its first look stays.

        `again` are the offsets, from the first to before the second, that are read more than once from end to end.
        Where it does not (a reader that slept for too long), FileNotFoundError or SegmentsChanged: begin again.
        """
