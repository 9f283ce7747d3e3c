"""What runs on executors: encoding rows into staged files, and appending committed plans. Imports no Spark.

Both are plain functions over Arrow batches, as `mapInArrow` wants them. An error that is ours travels back as a row,
not as a failed task: Spark would run the task again three times for nothing and bury the message.
"""

from __future__ import annotations

import json
import os
import pickle
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc

from logstore.commit.apply import apply_partitions
from logstore.commit.plan import read_plan
from logstore.commit.plan_folder import disk_full
from logstore.commit.staging import (
    EncodeOptions,
    PartitionCount,
    StagedFile,
    StagedWriter,
    TopicTarget,
    target_named,
)
from logstore.directory.shared_clock import agreed_ms
from logstore.errors import DuramenError, UnsuitableFileSystem, is_disk_full
from logstore.files import OS_FILES
from logstore.store import LogStore
from streaming.dead_letters import DeadLetters, could_be_topic, write_sifted, write_unknown_topic
from streaming.transfer import WideRows, Width

#: rows of a task are encoded together until they have this many bytes for each partition, so that batches fill
_BYTES_PER_PARTITION = 64 << 10
_BYTES_AT_ONCE_MAX = 32 << 20

_TWIN_WAIT_MS = 600_000

REPORT_SCHEMA = "task int, report binary"
_REPORT = pa.schema([("task", pa.int32()), ("report", pa.binary())])

Batches = Iterator[pa.RecordBatch]


@dataclass(frozen=True, slots=True)
class EncodeJob:
    """All an encoding task needs to know."""

    store: str
    folder: str
    token: str
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
    def run(batches: Batches) -> Batches:
        yield from _reported(lambda: _encode(job, batches))

    return run


def apply_plans(store: str, plan_id: str, topic: str, groups: list[list[int]]) -> Callable[[Batches], Batches]:
    """Each row of the input is the number of a group of partitions to append."""

    def run(batches: Batches) -> Batches:
        for batch in batches:
            for group in batch.column(0).to_pylist():
                yield from _reported(partial(_apply, store, plan_id, topic, groups[group]))

    return run


def _reported(work: Callable[[], dict[str, object]]) -> Batches:
    try:
        report = work()
    except (DuramenError, WideRows) as error:
        report = {"error": pickle.dumps(error).hex()}
    except OSError as error:
        if not is_disk_full(error):
            raise
        report = {"error": pickle.dumps(disk_full(error)).hex()}
    data = zlib.compress(json.dumps(report).encode())
    yield pa.RecordBatch.from_arrays(
        [pa.array([_task_number()], pa.int32()), pa.array([data], pa.binary())], schema=_REPORT
    )


def read_report(data: bytes) -> dict[str, object]:
    """What a task reported; raises the error it met."""
    report: dict[str, object] = json.loads(zlib.decompress(data))
    if "error" in report:
        raise pickle.loads(bytes.fromhex(str(report["error"])))
    return report


def staged_file(report: dict[str, object]) -> StagedFile | None:
    if report.get("name") is None:
        return None
    counts = tuple(PartitionCount(**count) for count in report["counts"])  # type: ignore[attr-defined]
    return StagedFile(
        report["name"],  # type: ignore[arg-type]
        counts,
        report["host"],  # type: ignore[arg-type]
        report["encode_ms"],  # type: ignore[arg-type]
        tuple(report["placed"]),  # type: ignore[arg-type]
        report["dead_letters"],  # type: ignore[arg-type]
    )


def worker_name() -> str:
    """The executor this process works for, host:pid: executors may share a host, its processes have one parent."""
    return f"{os.uname().nodename}:{os.getppid()}"


def _task_number() -> int:
    from pyspark import TaskContext

    context = TaskContext.get()
    return context.partitionId() if context is not None else 0


# --- encoding -------------------------------------------------------------------------------------------------------


def _encode(job: EncodeJob, batches: Batches) -> dict[str, object]:
    check_sees_store(job.store, job.token)
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
            return {"name": None}
        staged = writer.finish(encode_ms=int((time.monotonic() - began) * 1000))
        return asdict(replace(staged, host=worker_name(), dead_letters=dead))
    except BaseException:
        if writer is not None:
            writer.abandon()
        raise


def check_sees_store(store: str, token: str) -> None:
    """Raises UnsuitableFileSystem when this process does not see the store the driver sees."""
    try:
        with open(os.path.join(store, "locks", "token")) as file:
            found = file.read()
    except (FileNotFoundError, NotADirectoryError):
        found = ""  # another error is the system's, and says nothing about the store
    if found != token:
        raise UnsuitableFileSystem(
            f"executor {os.uname().nodename} does not see the driver's store",
            file=store,
            hint="Put the store on a file system that all executors share, under the same path",
        )


def _threshold(job: EncodeJob) -> int:
    partitions = max((target.partitions for target in job.targets.values()), default=1)
    return min(partitions * _BYTES_PER_PARTITION, _BYTES_AT_ONCE_MAX)


def _writer(job: EncodeJob) -> StagedWriter:
    own_ms = time.time_ns() // 1_000_000
    writer = StagedWriter(OS_FILES, job.folder, options=job.options, now_ms=own_ms)
    writer.now_ms = agreed_ms(own_ms, OS_FILES.stat(os.path.join(job.folder, writer.name)).mtime_ms)
    return writer


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


def _apply(store_path: str, plan_id: str, topic_name: str, numbers: list[int]) -> dict[str, object]:
    # A twin of this task may be at it: it is waited for, since an error of ours would count as the task's result.
    with LogStore(store_path, lock_wait_ms=_TWIN_WAIT_MS) as store:
        plan = read_plan(store.fs, store.layout.plan(plan_id), limits=store.limits)
        topic = store.topic(topic_name)
        apply_partitions(store, plan, topic, numbers)
    return {"host": worker_name(), "partitions": len(numbers)}
