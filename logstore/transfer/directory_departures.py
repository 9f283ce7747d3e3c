"""Topics of a store in a directory as of one moment, to be copied while appends go on above it.

Under the maintenance locks of the topics nothing is compacted or deleted while the moment lasts. Under their leases,
shortly, whatever is committed is brought into the logs, and ends, segment lists and apps are read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from logstore.commit.committer import Committer
from logstore.directory.ends import TopicEnds
from logstore.directory.state import PartitionState
from logstore.errors import BackupRefused, DamagedLog, UnknownTopic
from logstore.ledger.rows import AppProgress
from logstore.topics.moving import Taken
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic
from logstore.transfer.kafka_export import take_files


@dataclass(frozen=True, slots=True)
class TopicMoment:
    """A topic at one moment."""

    topic: Topic
    ends: TopicEnds
    states: tuple[PartitionState, ...]


@dataclass(frozen=True, slots=True)
class DirectoryDepartures:
    """Implements `Departures`."""

    store: OpenStore
    moments: tuple[TopicMoment, ...]
    apps: tuple[AppProgress, ...]
    taken_ms: int

    @property
    def topics(self) -> list[Topic]:
        return [moment.topic for moment in self.moments]

    def log_bytes(self, topic: Topic, number: int) -> int:
        return self.store.log_bytes(topic, number)

    def take(
        self, topic: Topic, number: int, directory: str, progress: Callable[[int], None], *, link: bool = False
    ) -> Taken:
        (moment,) = (each for each in self.moments if each.topic.id == topic.id)
        state, ends = moment.states[number], moment.ends
        end = ends.high_watermarks[number]
        partition = topic.partition(number)
        linked, copied = take_files(self.store, partition, state, end, directory, progress, link=link)
        return Taken(state, end, linked, copied)


@contextlib.contextmanager
def directory_departures(
    store: OpenStore,
    topics: Sequence[Topic],
    *,
    what: str,
    at_that_moment: Callable[[Committer], None] = lambda committer: None,
) -> Iterator[DirectoryDepartures]:
    """`at_that_moment` is called while nothing can be committed.

    Raises LockHeld (compaction is at work), BackupRefused, DamagedLog, CorruptState.
    """
    committer = Committer(store)
    topics = sorted(topics, key=lambda topic: topic.id)
    with contextlib.ExitStack() as maintenance:
        for topic in topics:
            maintenance.enter_context(store.locks.maintenance_of(topic.id, what=what))
        for topic in topics:
            with contextlib.suppress(UnknownTopic):
                committer.flush(topic)  # so that little is left to do under the leases
        taken_ms = store.clock.now_ms()
        with contextlib.ExitStack() as leases:
            for topic in topics:
                leases.enter_context(store.locks.lease(topic.id, what=what))
            moments = tuple(_moment(store, committer, topic) for topic in topics)
            apps = tuple(committer.ledger.apps())
            at_that_moment(committer)
        yield DirectoryDepartures(store, moments, apps, taken_ms)


def _moment(store: OpenStore, committer: Committer, listed: Topic) -> TopicMoment:
    topic = store.topic(listed.name)
    if topic.id != listed.id or topic.partitions != listed.partitions:
        raise BackupRefused(f"topic {topic.name} was altered just now", hint="Try again.")
    ends = committer.settle(topic)
    states = tuple(store.partition_state(topic, number) for number in range(topic.partitions))
    for number, state in enumerate(states):
        if state.swap is not None:
            raise DamagedLog(
                "a replacement of segments was interrupted",
                partition=topic.partition(number),
                hint="Run `duramen recover` first",
            )
    return TopicMoment(topic, ends, states)
