"""What both writers of the data source do: tasks stage rows and send messages, the driver commits what those say."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committer
from logstore.commit.driver import Encoded, append_batch
from logstore.commit.folder_outputs import FolderOutputs
from logstore.commit.staging import EncodeOptions, StagedFile, TopicTarget
from logstore.errors import TopicChanged
from logstore.spark_tasks import read_report
from logstore.store import LogStore
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
    report: bytes
    #: by topic id, as the task saw them; those it wrote to
    targets: dict[str, TopicTarget]


def encode_job(
    store: LogStore, options: WriteOptions, token: str, columns: Iterable[str], plan_id: str, batch_id: int | None
) -> EncodeJob:
    """Raises UnknownTopic, InvalidConfig."""
    targets = targets_of(store, columns, options.topic, options.dead_letter_topic)
    letters = None
    if options.dead_letter_topic is not None:
        letters = dead_letters(targets[options.dead_letter_topic], options.topic, options.app_id, batch_id)
    encode = EncodeOptions(options.compression_type, options.batch_size or EncodeOptions().batch_size)
    outputs = FolderOutputs(options.store, store.layout.plan(plan_id), token)
    return EncodeJob(outputs, targets, options.topic, encode, letters)


def stage(
    job: EncodeJob, batches: Iterator[pa.RecordBatch], plan_id: str, query_id: str | None = None
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
    return StagedMessage(task, plan_id, query_id, data, named)


def staged_messages(messages: Sequence[WriterCommitMessage | None]) -> list[StagedMessage]:
    """In the order of tasks; a task that failed has none."""
    return sorted((each for each in messages if isinstance(each, StagedMessage)), key=lambda each: each.task)


def commit_staged(path: str, staged: Sequence[StagedMessage], plan_id: str | None, app: AppBatch | None) -> None:
    """On the driver: append and flush what the tasks staged. Raises what a task or the commit met."""
    files = [file for each in staged if (file := read_report(each.report)) is not None]
    with LogStore(path) as store:
        committer = Committer(store)
        done = append_batch(
            committer,
            lambda _staging: Encoded(files, _agreed(staged).values()),
            app=app,
            plan_id=plan_id,
            engine="spark",
        )
        for name in done.topics:
            committer.flush(store.topic(name))


def discard_staged(path: str, plan_ids: Iterable[str]) -> None:
    with LogStore(path) as store:
        committer = Committer(store)
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
