"""Topics from one open store into another, of whichever kinds: records, offsets, settings, and how far apps have come.

A partition travels as files in a folder: whole segments, below the high watermark of one moment of the source. There
the log itself rebuilds what the last segment came without, as an import does; then the target takes it in. Its topics
become visible at once, behind the apps, so that a query that goes on in the copy doubles nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from logstore.commit.apps import Adopt, AppBatch
from logstore.commit.store_face import Store
from logstore.config import Source
from logstore.directory.state import read_state, write_state
from logstore.errors import BackupRefused, DamagedLog
from logstore.ledger.rows import AppProgress
from logstore.partition.environment import LastKnown
from logstore.setting import format_value
from logstore.topic import TopicPartition, new_topic_id
from logstore.topics.moving import Arrivals, Departures, Moved
from logstore.topics.registry import Topic, spelled


@dataclass(frozen=True, slots=True)
class CopiedPartition:
    partition: TopicPartition
    log_start_offset: int
    log_end_offset: int
    copied_bytes: int


@dataclass(frozen=True, slots=True)
class Copied:
    topics: tuple[Topic, ...]
    partitions: tuple[CopiedPartition, ...]
    #: apps whose progress the target took over
    apps: tuple[AppProgress, ...]
    taken_ms: int


def plan_copy(source: Store, target: Store, topics: Sequence[Topic]) -> list[Topic]:
    """The topics as they would be in the target. Raises TopicExists, StrayDirectory, BackupRefused."""
    if source.path == target.path:
        raise BackupRefused("a store is not copied into itself", file=target.path)
    for topic in topics:
        target.check_free(topic)
    return [_copy_of(source, target, topic) for topic in topics]


def _copy_of(source: Store, target: Store, topic: Topic, *, same_id: bool = False) -> Topic:
    """Kafka's id comes along; ours is another, since an id never names two topics. So do settings of the source as a
    whole, as the topic's own, where the target has others.
    """
    there = target.resolve({})
    configs = {
        name: format_value(one.value)
        for name, one in source.resolve(topic.configs).items()
        if name not in topic.configs and one.source is not Source.DEFAULT and one.value != there[name].value
    }
    copy = replace(topic, configs=spelled({**configs, **topic.configs}))
    return copy if same_id else replace(copy, id=new_topic_id(), kafka_id=topic.export_id)


def copy_topics(
    source: Store,
    target: Store,
    topics: Sequence[Topic],
    *,
    same_ids: bool = False,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> Copied:
    """Copy topics as of one moment. `same_ids` is for a target that was made for this copy.

    Raises what `plan_copy` raises, ReplayMismatch where the target knows an app by another query, LockHeld, DamagedLog.
    """
    plan_copy(source, target, topics)
    with source.departures(topics, what=f"copy to {target.path}") as leaving, target.arrivals() as arrivals:
        partitions, copies = [], []
        for topic in leaving.topics:
            copy = _copy_of(source, target, topic, same_id=same_ids)
            copies.append(copy)
            arrivals.begin(copy)
            for number in range(topic.partitions):
                partitions.append(_copy_partition(source, leaving, arrivals, topic, copy, number, progress))
        apps = take_over_apps(target, leaving.apps)
        arrivals.publish()
    return Copied(tuple(copies), tuple(partitions), apps, leaving.taken_ms)


def _copy_partition(
    source: Store,
    leaving: Departures,
    arrivals: Arrivals,
    topic: Topic,
    copy: Topic,
    number: int,
    progress: Callable[[int], None],
) -> CopiedPartition:
    from logstore.partition.log import PartitionLog

    partition, directory = topic.partition(number), arrivals.directory(copy, number)
    taken = leaving.take(topic, number, directory, progress)
    end, state_path = taken.high_watermark, arrivals.state_path(copy, number)
    committed = tuple(entry for entry in taken.state.segments if entry.base_offset <= end)
    write_state(arrivals.fs, state_path, replace(taken.state, segments=committed, closed=False))
    log = PartitionLog.open(
        directory,
        partition=partition,
        config=source.log_config(topic),
        known=LastKnown(clean=True, recovery_point=end, high_watermark=end),
        environment=source.log_environment(),
        state_path=state_path,
    )
    reached, stable = log.log_end_offset, log.last_stable_offset
    log.close(clean=reached == end)
    if reached != end:
        raise DamagedLog(
            f"committed up to {end}, but the log ends at {reached}",
            partition=partition,
            offset=reached,
            hint="Run `duramen verify`, then `duramen recover`",
        )
    state = read_state(arrivals.fs, state_path, limits=source.limits)
    assert state is not None
    arrivals.place(copy, number, Moved(state, end, stable))
    return CopiedPartition(partition, state.log_start_offset, end, taken.copied_bytes)


def take_over_apps(store: Store, apps: Sequence[AppProgress]) -> tuple[AppProgress, ...]:
    """Bring the store's apps up to `apps` by empty batches; returns those that were behind.

    An app that the store knows further, by whatever query, stays as it is.
    """
    commits, taken = store.commits(), []
    for each in apps:
        last = commits.last_batch(each.app_id)
        if last is not None and last.batch_id >= each.batch_id:
            continue
        adopt = None if last is None else Adopt(last.query_id, last.batch_id)
        batch = commits.begin()
        try:
            commits.commit(batch, [], {}, app=AppBatch(each.app_id, each.batch_id, each.query_id, adopt))
        finally:
            batch.close()
        taken.append(each)
    return tuple(taken)
