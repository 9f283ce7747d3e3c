"""From staged files to a plan, and what must hold before it is committed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from logstore.clock import Clock
from logstore.commit.apps import AppBatch
from logstore.commit.plan import Plan, TopicPlan
from logstore.commit.staging import StagedFile
from logstore.config import Resolved
from logstore.directory.ends import TopicEnds
from logstore.directory.state import read_state, segments_max
from logstore.errors import AppendTooLarge, DiskFull
from logstore.ledger import AppProgress, CommitRequest, TopicCommit
from logstore.setting import format_value
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic

_SEGMENTS_LOOK = 1000  # a batch that makes fewer segments is not looked at
_ROOM_FACTOR = 1.1  # indexes and rounding beside the batches themselves


class HasSettings(Protocol):
    """As much of a store as a plan needs."""

    @property
    def clock(self) -> Clock: ...
    def topic_settings(self, topic: Topic | None = None) -> dict[str, Resolved]: ...


def plan_of(
    store: HasSettings,
    plan_id: str,
    files: Sequence[StagedFile],
    topics: Mapping[str, Topic],
    ends: Mapping[str, TopicEnds],
    app: AppBatch | None,
    stable_offsets: Mapping[str, Mapping[int, int]],
) -> Plan:
    records: dict[str, list[int]] = {topic.id: [0] * topic.partitions for topic in topics.values()}
    sizes = dict.fromkeys(topics, 0)
    for file in files:
        for count in file.counts:
            records[count.topic_id][count.partition] += count.records
            sizes[count.topic_id] += count.bytes
    plans = []
    for topic_id, topic in topics.items():
        bases = ends[topic_id].high_watermarks
        settings = store.topic_settings(topic)
        plans.append(
            TopicPlan(
                topic.name,
                topic_id,
                topic.partitions,
                topic.config_version,
                {name: format_value(one.value) for name, one in settings.items()},
                ends[topic_id].applied_sequence + 1,
                bases,
                tuple(base + more for base, more in zip(bases, records[topic_id], strict=True)),
                sum(records[topic_id]),
                sizes[topic_id],
                dict(stable_offsets.get(topic_id, {})),
            )
        )
    names = tuple(file.name for file in files if file.records)
    return Plan(
        plan_id,
        store.clock.now_ms(),
        names,
        tuple(plans),
        app_id=app.app_id if app else None,
        batch_id=app.batch_id if app else None,
        query_id=app.query_id if app else None,
    )


def check_room(store: OpenStore, plan: Plan) -> None:
    needed = int(sum(topic.bytes for topic in plan.topics) * _ROOM_FACTOR)
    available = store.free_bytes()
    if available is not None and needed > available:
        raise DiskFull(
            f"the batch needs about {needed} bytes, {available} are free",
            file=store.layout.logs,
            hint="Nothing was committed; make room and run the batch again",
        )


def check_segments(store: OpenStore, plan: Plan, files: Sequence[StagedFile]) -> None:
    """A segment list that no state file holds must not result."""
    bytes_of: dict[tuple[str, int], int] = {}
    for count in (count for file in files for count in file.counts):
        key = (count.topic_id, count.partition)
        bytes_of[key] = bytes_of.get(key, 0) + count.bytes
    segment_bytes = {topic.topic_id: topic.log_config().segment_bytes for topic in plan.topics}
    for (topic_id, number), size in bytes_of.items():
        segments = 2 * size // segment_bytes[topic_id] + 1  # two neighbours together hold at least one segment's bytes
        if segments < _SEGMENTS_LOOK:
            continue
        path = store.layout.partition_state(topic_id, number)
        state = read_state(store.fs, path, limits=store.limits)
        most = segments_max(store.limits)
        if segments + len(state.segments if state else ()) > most:
            raise AppendTooLarge(
                f"about {segments} segments of {segment_bytes[topic_id]} bytes would come of the batch; "
                f"a partition has at most {most}",
                partition=f"partition {number}",
                hint="Raise segment.bytes of the topic, or send smaller batches",
            )


def request_of(
    plan: Plan,
    app: AppBatch | None,
    last: AppProgress | None,
    timings_ms: Mapping[str, int],
    engine: str,
    files: Sequence[StagedFile],
) -> CommitRequest:
    return CommitRequest(
        plan_id=plan.plan_id,
        topics=tuple(
            TopicCommit(
                topic.topic_id,
                topic.topic,
                topic.sequence - 1,
                topic.base_offsets,
                topic.end_offsets,
                topic.records,
                topic.bytes,
            )
            for topic in plan.topics
        ),
        app_id=app.app_id if app else None,
        batch_id=app.batch_id if app else None,
        query_id=app.query_id if app else None,
        expected_batch_id=None if last is None else last.batch_id,
        expected_as_of=None if last is None else last.as_of,
        timings_ms=timings_ms,
        workers=tuple(sorted({file.host for file in files})),
        engine=engine,
        dead_letters=sum(file.dead_letters for file in files),
    )
