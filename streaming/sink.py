"""The sink: a callable for `foreachBatch` that appends every micro-batch exactly once.

Rows are encoded where they are, by the tasks of one Spark job, into staged files; the driver sees only counts. One
ledger transaction decides, then the batches are appended. A batch that Spark runs again is recognised by (app_id,
batch_id).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from logstore.commit.apps import Adopt, AppBatch
from logstore.commit.committer import Committed, Committer
from logstore.commit.driver import Batch, Commits, EncodeAgain, Encoded, append_batch
from logstore.commit.plan import Plan
from logstore.commit.staging import EncodeOptions, StagedFile, TopicTarget
from logstore.commit.store_face import Store
from logstore.directory.tails import boot_id
from logstore.errors import InvalidConfig, UnknownTopic
from logstore.objects.opening import is_url
from logstore.objects.remote import plain_options
from logstore.python_workers import use_this_python
from logstore.spark_tasks import cores_of, run_rows, run_tasks
from logstore.topics.registry import Topic
from streaming.connect import calling_query, leave_mark
from streaming.dead_letters import DeadLetters
from streaming.flusher import flush_later
from streaming.opened import kept_open
from streaming.options import SinkOptions
from streaming.progress import BATCHES_MAX, OBSERVED, BatchProgress, batch_progress
from streaming.record_columns import check_schema, columns_text, known_columns, warn_left_out
from streaming.targets import dead_letters, targets_of
from streaming.tasks import EncodeJob, apply_plan, encode_rows
from streaming.transfer import ROWS_WORTHWHILE, WideRows, bounded_by_rows, width_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: above this a batch is appended by executors, below by the driver itself
APPLY_ON_DRIVER_BYTES = 16 << 20


class LogSink:
    """Appends the micro-batches of a streaming query, each exactly once.

        df.writeStream.foreachBatch(LogSink("/data/store", "orders", app_id="orders-v1")).start()

    Args:
        store: path of the store, the same on driver and executors, or the URL of one in a bucket
            (`s3://bucket/prefix`); created with `create_topics`
        topic: for rows that name none in a `topic` column
        app_id: the name under which batches are counted; keep it when the query changes, choose another for another
            query
        create_topics: partitions and settings for topics that do not exist, e.g. `{"partitions": 4, "configs": {…}}`
        dead_letter_topic: for records that their topic refuses, with headers that say why; without it they fail the
            batch before anything is committed
        order_by: sort each micro-batch by this column first, any of the DataFrame's
        adopt: take over an app_id that another query wrote, or whose batch ids went back or have a gap: the query and
            batch that the ledger shows as its last, as `QUERY_ID:BATCH_ID`; the error that asks for it has the text.
            It works only while the ledger shows exactly that, so it may stay in the code
        options: compression and the like, and how a bucket is reached; see SinkOptions
    """

    def __init__(
        self,
        store: str | os.PathLike[str],
        topic: str | None = None,
        *,
        app_id: str,
        create_topics: dict[str, Any] | None = None,
        dead_letter_topic: str | None = None,
        order_by: str | None = None,
        adopt: Adopt | str | bool | None = None,
        options: SinkOptions | None = None,
    ) -> None:
        """Raises InvalidConfig for an empty app_id."""
        if not app_id:
            raise InvalidConfig(
                "a sink needs an app_id",
                hint="It names the query for exactly-once; a lost checkpoint silently gives a query a new id",
            )
        self.store = os.fspath(store) if is_url(store) else os.path.abspath(os.fspath(store))
        self.topic = topic
        self.app_id = app_id
        self.options = options or SinkOptions()
        self.create_topics = create_topics
        self.dead_letter_topic = dead_letter_topic
        self.order_by = order_by
        self.adopt = adopt
        self._mark: str | None = None
        self._has_wide_rows = False
        self._has_warned = False
        #: of the batch before
        self._rows: int | None = None
        #: the last micro-batch's receipt
        self.last: Committed | None = None
        #: commit and append of the batch before: a ledger row is written before its own are known
        self._previous_ms: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {
            "last": None,
            "_previous_ms": {},
            "_mark": leave_mark(),
            "options": replace(self.options, storage_options=plain_options(self.options.storage_options)),
        }

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        self.write(df, batch_id)

    def write(self, df: DataFrame, batch_id: int) -> Committed:
        """Append one micro-batch; returns its receipt. Raises DuramenError; what it says about the batch is true."""
        previous_ms, self._previous_ms = self._previous_ms, {}
        done = self._written(df, batch_id, previous_ms)
        self._previous_ms = done.for_next_row(previous_ms)
        self.last = done
        return done

    def observed(self, df: DataFrame) -> DataFrame:
        """The stream with rows and bytes of each micro-batch observed, for the query's `observedMetrics`."""
        from pyspark.sql import functions as f

        lengths = [f.coalesce(f.octet_length(name), f.lit(0)) for name in ("key", "value") if name in df.columns]
        size = f.coalesce(f.sum(sum(lengths[1:], lengths[0])), f.lit(0)) if lengths else f.lit(0)
        return df.observe(f"{OBSERVED}.{self.app_id}", f.count(f.lit(1)).alias("rows"), size.alias("bytes"))

    def progress(self, query: Any = None) -> list[BatchProgress]:
        """The newest committed batches of the app, oldest first, each with what `query` reports about it."""
        own = {int(each["batchId"]): each for each in query.recentProgress} if query is not None else {}
        rows = self._opened().commits.batches_of(self.app_id, BATCHES_MAX)
        return batch_progress(rows, self.last, own)

    def _written(self, df: DataFrame, batch_id: int, previous_ms: dict[str, int]) -> Committed:
        check_schema(df, self.topic)
        self._check_columns(df.columns)
        use_this_python(df.sparkSession)
        opened = self._opened(create=self.create_topics is not None)
        app = AppBatch(self.app_id, batch_id, self.options.query_id or query_id_of(df, self._mark), self.adopt)
        has_run = False

        def encode(staging: Batch) -> Encoded:
            nonlocal has_run
            has_run = True
            try:
                targets = self._targets(opened.store, df)
                letters = None
                if self.dead_letter_topic is not None:
                    letters = dead_letters(targets[self.dead_letter_topic], self.topic, self.app_id, batch_id)
                return Encoded(self._encode(df, staging, targets, letters), targets.values())
            except WideRows as error:
                self._has_wide_rows = True
                raise EncodeAgain from error
            except UnknownTopic as error:
                if error.topic is None or self.create_topics is None:
                    raise
                self._ensure(opened.store, error.topic)
                raise EncodeAgain from error

        done = append_batch(
            opened.commits,
            encode,
            app=app,
            apply_many=lambda plan, topic, numbers: apply_many(df, self.store, plan, topic, numbers),
            timings_ms=previous_ms,
            engine="spark",
        )
        if not has_run:
            drain(df)
        if not done.replayed:
            self.adopt = None
            flush_later(opened.commits, done.topics.values(), self.options.flush_ms)
        return done

    def _opened(self, *, create: bool = False) -> _Opened:
        return _opened(self.store, create=create, storage_options=self.options.storage_options)

    def _check_columns(self, names: Sequence[str]) -> None:
        """Raises InvalidConfig for an `order_by` that is not a column; says once which columns are left out."""
        if self.order_by is not None and self.order_by.lower() not in map(str.lower, names):
            raise InvalidConfig(f"order_by is {self.order_by!r}, and there is no such column", hint=columns_text(names))
        if not self._has_warned:
            self._has_warned = True
            warn_left_out(names, but=self.order_by)

    def _encode(
        self,
        df: DataFrame,
        staging: Batch,
        targets: dict[str, TopicTarget],
        letters: DeadLetters | None = None,
    ) -> list[StagedFile]:
        if self.order_by is not None:
            df = df.orderBy(self.order_by)
        rows = df.select(*known_columns(df.columns))
        job = EncodeJob(
            staging.outputs(),
            targets,
            self.topic,
            EncodeOptions(self.options.compression_type, self.options.batch_size),
            letters,
            self.create_topics is not None,
        )
        is_small = self._rows is not None and self._rows < ROWS_WORTHWHILE
        width = None if is_small or self._has_wide_rows else width_of(rows)
        if width is None:
            files = _run(rows, job)
        else:
            with bounded_by_rows(df.sparkSession, width):
                files = _run(width.clipped(rows), replace(job, width=width))
        self._rows = sum(file.records for file in files)
        return files

    def _targets(self, store: Store, df: DataFrame) -> dict[str, TopicTarget]:
        for name in (self.topic, self.dead_letter_topic):
            if name is not None:
                self._ensure(store, name)
        return targets_of(store, df.columns, self.topic, self.dead_letter_topic)

    def _ensure(self, store: Store, name: str) -> None:
        try:
            store.topic(name)
        except UnknownTopic as error:
            if self.create_topics is None:
                error.with_hint("Create it with `duramen topics create`, or give create_topics")
                raise
            store.create_topic(name, **self.create_topics)


def _run(rows: DataFrame, job: EncodeJob) -> list[StagedFile]:
    return [file for file in run_rows(rows, encode_rows(job)) if file is not None]


@dataclass(frozen=True, slots=True)
class _Opened:
    store: Store
    commits: Commits[Any]


def _opened(path: str, *, create: bool = False, storage_options: Mapping[str, str] | None = None) -> _Opened:
    store = kept_open(path, storage_options, create=create)
    return _Opened(store, store.commits())


def committer_of(path: str) -> Committer:
    """Of a store in a directory."""
    committer = _opened(path).commits
    assert isinstance(committer, Committer)
    return committer


def query_id_of(df: DataFrame, mark: str | None = None) -> str | None:
    """The streaming query this micro-batch belongs to; None for a batch that no query wrote. Raises InvalidConfig."""
    session = df.sparkSession
    try:
        context = session.sparkContext
    except Exception:  # Spark Connect has none
        return calling_query(session, mark)
    return context.getLocalProperty("sql.streaming.queryId")


def drain(df: DataFrame) -> None:
    """Run the rows to nowhere: a stateful query must see its batch consumed even when we have it."""
    df.write.format("noop").mode("append").save()


def apply_many(df: DataFrame, store: str, plan: Plan, topic: Topic, numbers: Sequence[int]) -> None:
    """Append a committed plan: by the driver when it is small, else by about one task a core."""
    committer = committer_of(store)
    topic_plan = plan.topic(topic.id)
    assert topic_plan is not None
    if topic_plan.bytes <= APPLY_ON_DRIVER_BYTES or len(numbers) == 1:
        from logstore.commit.apply import apply_partitions

        apply_partitions(committer.store, plan, topic, numbers)
        return
    session = df.sparkSession
    tasks = min(len(numbers), cores_of(session))
    groups = [list(numbers[start::tasks]) for start in range(tasks)]
    plan_id, name, boot = plan.plan_id, topic.name, boot_id()
    run_tasks(session, lambda group: apply_plan(store, plan_id, name, groups[group], boot), tasks)
