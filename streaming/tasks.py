"""What the sink's tasks do on executors: encode rows into staged files, append committed plans. Imports no Spark."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pyarrow as pa
import pyarrow.compute as pc

from logstore.commit.apply import apply_partitions
from logstore.commit.plan import read_plan
from logstore.commit.plan_folder import reporting_full_disk
from logstore.commit.staged_output import Outputs
from logstore.commit.staging import EncodeOptions, StagedFile, StagedWriter, TopicTarget, target_named
from logstore.errors import DuramenError
from logstore.spark_tasks import Batches, executor_name, reported
from logstore.store import LogStore
from streaming.dead_letters import DeadLetters, could_be_topic, write_sifted, write_unknown_topic
from streaming.transfer import WideRows, Width

#: rows of a task are encoded together until they have this many bytes for each partition, so that batches fill
_BYTES_PER_PARTITION = 64 << 10
_BYTES_AT_ONCE_MAX = 32 << 20

_TWIN_WAIT_MS = 600_000


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """All an encoding task needs to know."""

    #: where staged files go
    outputs: Outputs
    targets: dict[str, TopicTarget]
    topic: str | None
    options: EncodeOptions = field(default_factory=EncodeOptions)
    #: where rows go that cannot be written; without it they are an error
    dead_letters: DeadLetters | None = None
    #: topics that rows name are created by the driver
    creates_topics: bool = False
    #: what the rows were clipped to on their way
    width: Width | None = None


def encode_rows(job: EncodeJob) -> Callable[[Batches], Batches]:
    """For `mapInArrow`: reports the StagedFile of each task, None where it had no rows."""

    def run(batches: Batches) -> Batches:
        yield reported(_task_number(), lambda: _encode(job, batches), (DuramenError, WideRows))

    return run


def _task_number() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


# --- encoding -------------------------------------------------------------------------------------------------------


def _encode(job: EncodeJob, batches: Batches) -> StagedFile | None:
    with reporting_full_disk():
        return _staged(job, batches)


def _staged(job: EncodeJob, batches: Batches) -> StagedFile | None:
    job.outputs.check()
    began = time.monotonic()
    writer: StagedWriter | None = None
    threshold = _threshold(job)
    held: list[pa.RecordBatch] = []
    size = dead = 0
    try:
        for batch in batches:
            if not batch.num_rows:
                continue
            if job.width is not None:
                job.width.check(batch)
            held.append(batch)
            size += batch.nbytes
            if size >= threshold:
                writer = writer or _writer(job)
                dead += _write(writer, job, held)
                held, size = [], 0
        if held:
            writer = writer or _writer(job)
            dead += _write(writer, job, held)
        if writer is None:
            return None
        staged = writer.finish(encode_ms=int((time.monotonic() - began) * 1000))
        return replace(staged, host=executor_name(), dead_letters=dead)
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise


def _threshold(job: EncodeJob) -> int:
    partitions = max((target.partitions for target in job.targets.values()), default=1)
    return min(partitions * _BYTES_PER_PARTITION, _BYTES_AT_ONCE_MAX)


def _writer(job: EncodeJob) -> StagedWriter:
    output, now_ms = job.outputs.open(_task_number())
    return StagedWriter(output, options=job.options, now_ms=now_ms)


def _write(writer: StagedWriter, job: EncodeJob, batches: list[pa.RecordBatch]) -> int:
    """Returns how many of the rows became dead letters."""
    rows = batches[0] if len(batches) == 1 else pa.Table.from_batches(batches).combine_chunks().to_batches()[0]
    if "topic" not in rows.schema.names:
        return _write_topic(writer, job, job.topic or "", rows)
    topics = rows.column("topic")
    if job.topic is not None:
        topics = pc.fill_null(topics, job.topic)
    rows = rows.drop_columns(["topic"])
    dead = 0
    for name in pc.unique(topics).to_pylist():
        mine = rows.filter(pc.equal(topics, name)) if name is not None else rows.filter(pc.is_null(topics))
        dead += _write_topic(writer, job, name or "", mine)
    return dead


def _write_topic(writer: StagedWriter, job: EncodeJob, topic: str, rows: pa.RecordBatch) -> int:
    partitions = None
    if "partition" in rows.schema.names:
        partitions = rows.column("partition")
        rows = rows.drop_columns(["partition"])
    letters = job.dead_letters
    if letters is None:
        writer.write(target_named(job.targets, topic), rows, partitions)
        return 0
    if topic not in job.targets and not (job.creates_topics and could_be_topic(topic)):
        return write_unknown_topic(writer, letters, topic, rows, partitions)
    return write_sifted(writer, letters, target_named(job.targets, topic), rows, partitions, job.options)


# --- appending ------------------------------------------------------------------------------------------------------


def apply_plan(store_path: str, plan_id: str, topic_name: str, numbers: list[int], boot: str) -> None:
    """Append partitions of a plan by the order of a driver on the host with that boot id."""
    # A speculative copy of this task may be at work: wait for it, since a DuramenError would count as the task's
    # result.
    with LogStore(store_path, lock_wait_ms=_TWIN_WAIT_MS) as store:
        plan = read_plan(store.fs, store.layout.plan(plan_id), limits=store.limits)
        apply_partitions(store, plan, store.topic(topic_name), numbers, boot=boot)
