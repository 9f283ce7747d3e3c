"""What both writers of the data source do: tasks stage rows and send messages, the driver commits what those say."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from logstore.commit.apps import AppBatch
from logstore.commit.driver import Encoded, append_batch
from logstore.commit.staged_output import Filled, Outputs
from logstore.commit.staging import EncodeOptions, StagedFile, TopicTarget
from logstore.errors import TopicChanged
from logstore.spark_tasks import read_report
from logstore.topics.readable import ReadableStore
from streaming.opened import opened
from streaming.options import WriteOptions
from streaming.record_columns import known_columns
from streaming.targets import dead_letters, targets_of
from streaming.tasks import EncodeJob, encode_rows


@dataclass
class StagedMessage(WriterCommitMessage):
    """What one task staged, and all that the commit must know."""

    task: int
    plan_id: str
    query_id: str | None
    #: wall time before the task's files had names
    since_ms: int
    report: bytes
    #: by topic id, as the task saw them; those it wrote to
    targets: dict[str, TopicTarget]


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def encode_job(
    store: ReadableStore, options: WriteOptions, outputs: Outputs, columns: Iterable[str], batch_id: int | None
) -> EncodeJob:
    """Raises UnknownTopic, InvalidConfig."""
    targets = targets_of(store, columns, options.topic, options.dead_letter_topic)
    letters = None
    if options.dead_letter_topic is not None:
        letters = dead_letters(targets[options.dead_letter_topic], options.topic, options.app_id, batch_id)
    encode = EncodeOptions(options.compression_type, options.batch_size or EncodeOptions().batch_size)
    return EncodeJob(outputs, targets, options.topic, encode, letters)


def stage(
    job: EncodeJob, batches: Iterator[pa.RecordBatch], filled: Filled, query_id: str | None = None
) -> StagedMessage:
    """On an executor: encode the rows of one task. A DuramenError travels in the message."""
    rows = (batch.select(known_columns(batch.schema.names)) for batch in batches)
    report = next(iter(encode_rows(job)(rows)))
    task, data = report.column(0)[0].as_py(), report.column(1)[0].as_py()
    try:
        file: StagedFile | None = read_report(data)
    except Exception:
        file = None  # the commit raises it
    written = set() if file is None else {count.topic_id for count in file.counts}
    named = {target.id: target for target in job.targets.values() if target.id in written}
    return StagedMessage(task, filled.plan_id, query_id, filled.since_ms, data, named)


def staged_messages(messages: Sequence[WriterCommitMessage | None]) -> list[StagedMessage]:
    """In the order of tasks; a task that failed has none."""
    return sorted((each for each in messages if isinstance(each, StagedMessage)), key=lambda each: each.task)


def commit_staged(
    options: WriteOptions, staged: Sequence[StagedMessage], filled: Filled | None, app: AppBatch | None
) -> None:
    """On the driver: append and finish what the tasks staged. Raises what a task or the commit met."""
    files = [file for each in staged if (file := read_report(each.report)) is not None]
    with opened(options.store, options.storage) as store:
        committer = store.commits()
        done = append_batch(
            committer,
            lambda _staging: Encoded(files, _agreed(staged).values()),
            app=app,
            filled=filled,
            engine="spark",
        )
        for name in done.topics:
            committer.finish(name)


def discard_staged(options: WriteOptions, plan_ids: Iterable[str]) -> None:
    with opened(options.store, options.storage) as store:
        committer = store.commits()
        for plan_id in plan_ids:
            committer.discard(plan_id)


def _agreed(staged: Iterable[StagedMessage]) -> dict[str, TopicTarget]:
    """The topics as all tasks saw them. Raises TopicChanged."""
    found: dict[str, TopicTarget] = {}
    for message in staged:
        for topic_id, target in message.targets.items():
            if found.setdefault(topic_id, target).config_version != target.config_version:
                raise TopicChanged(
                    f"topic {target.name} was altered while the batch was written", hint="Start the query again"
                )
    return found
