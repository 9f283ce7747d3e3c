"""The sink: a callable for `foreachBatch` that appends every micro-batch exactly once.

Rows are encoded where they are, by the tasks of one Spark job, into staged files; the driver sees only counts. One
ledger transaction decides, then the batches are appended. A batch that Spark runs again is recognised by (app_id,
batch_id).
"""

from __future__ import annotations

import difflib
import logging
import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa

from logstore.commit.apps import Adopt, AppBatch
from logstore.commit.committer import Committed, Committer, target_of
from logstore.commit.plan import Plan
from logstore.commit.plan_folder import Staging
from logstore.commit.staging import EncodeOptions, StagedFile, TopicTarget
from logstore.errors import (
    CommitConflict,
    InvalidConfig,
    InvalidRecord,
    ReplayMismatch,
    TopicChanged,
    UnknownTopic,
)
from logstore.python_workers import explained, use_this_python
from logstore.store import LogStore
from logstore.topics.creating import create_topic
from logstore.topics.opened import OpenStore
from logstore.topics.registry import Topic
from streaming.connect import calling_query, leave_mark
from streaming.dead_letters import DeadLetters
from streaming.flusher import flush_later
from streaming.options import SinkOptions
from streaming.progress import BATCHES_MAX, OBSERVED, BatchProgress, batch_progress
from streaming.tasks import REPORT_SCHEMA, EncodeJob, apply_plans, encode_rows, read_report, staged_file
from streaming.transfer import ROWS_WORTHWHILE, WideRows, not_adding_up, width_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

EXPECTED = """key binary|string (optional), value binary|string, timestamp timestamp|bigint ms (optional),
headers array<struct<key:string,value:binary>> (optional), topic string (optional), partition int (optional)"""

OUTPUT_MODES = """Of an aggregation make key and value, e.g. selectExpr("cast(id as string) as key",
"to_json(struct(*)) as value"). Update mode sends the rows that changed, so that a key's latest value is its state;
complete mode sends all rows again with every batch, and none for a key that is gone; append mode sends each row once,
when it is final"""

_TYPES: dict[str, tuple[str, ...]] = {
    "key": ("binary", "string", "void"),
    "value": ("binary", "string", "void"),
    "timestamp": ("timestamp", "timestamp_ntz", "bigint", "int"),
    "headers": ("array<struct<key:string,value:binary>>",),
    "topic": ("string",),
    "partition": ("int", "smallint", "tinyint", "bigint"),
}
_ARROW = {
    "binary": pa.binary(),
    "string": pa.string(),
    "void": pa.null(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "array<struct<key:string,value:binary>>": pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())])),
}
_ENCODE_TRIES_MAX = 5
_log = logging.getLogger("duramen")
#: above this a batch is appended by executors, below by the driver itself
APPLY_ON_DRIVER_BYTES = 16 << 20


class LogSink:
    """Appends the micro-batches of a streaming query, each exactly once.

        df.writeStream.foreachBatch(LogSink("/data/store", "orders", app_id="orders-v1")).start()

    Parameters
    ----------
    store: path of the store, the same on driver and executors; made with `create_topics`
    topic: where rows go that name none in a `topic` column
    app_id: the name under which batches are counted; keep it when the query changes, choose another for another query
    create_topics: partitions and settings for topics that do not exist, e.g. `{"partitions": 4, "configs": {…}}`
    dead_letter_topic: where records go that their topic does not take, with headers that say why; without it they fail
        the batch before anything is committed
    order_by: sort each micro-batch by this column first, any of the DataFrame's
    adopt: take over an app_id that another query wrote, or whose batch ids went back or leave some out: the query and
        batch that the ledger shows as its last, as `QUERY_ID:BATCH_ID`; the error that asks for it has the text. It
        holds only while the ledger shows exactly that, so it may stay in the code
    options: compression and the like, see SinkOptions
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
        self.store = os.path.abspath(os.fspath(store))
        self.topic = topic
        self.app_id = app_id
        self.options = options or SinkOptions()
        self.create_topics = create_topics
        self.dead_letter_topic = dead_letter_topic
        self.order_by = order_by
        self.adopt = adopt
        self._mark: str | None = None
        self._has_wide_rows = False
        self._has_told = False
        #: of the batch before
        self._rows: int | None = None
        #: the last micro-batch's receipt
        self.last: Committed | None = None
        #: commit and append of the batch before: a ledger row is written before its own are known
        self._previous_ms: dict[str, int] = {}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"last": None, "_previous_ms": {}, "_mark": leave_mark()}

    def __call__(self, df: DataFrame, batch_id: int) -> None:
        self.write(df, batch_id)

    def write(self, df: DataFrame, batch_id: int) -> Committed:
        """Append one micro-batch; returns its receipt. Raises DuramenError; what it says about the batch is true."""
        previous_ms, self._previous_ms = self._previous_ms, {}
        done = self._written(df, batch_id, previous_ms)
        if not done.replayed:
            known = {f"previous_{name}": done.timings_ms[name] for name in ("commit", "append") if done.timings_ms}
            self._previous_ms = known
        self.last = done
        return done

    def observed(self, df: DataFrame) -> DataFrame:
        """The stream with rows and bytes of each micro-batch observed, for the query's `observedMetrics`."""
        from pyspark.sql import functions as f

        lengths = [f.coalesce(f.octet_length(name), f.lit(0)) for name in ("key", "value") if name in df.columns]
        size = f.coalesce(f.sum(sum(lengths[1:], lengths[0])), f.lit(0)) if lengths else f.lit(0)
        return df.observe(f"{OBSERVED}.{self.app_id}", f.count(f.lit(1)).alias("rows"), size.alias("bytes"))

    def progress(self, query: Any = None) -> list[BatchProgress]:
        """The newest committed batches of the app, oldest first, each with what `query` tells of it."""
        own = {int(each["batchId"]): each for each in query.recentProgress} if query is not None else {}
        rows = committer_of(self.store).ledger.commits_of_app(self.app_id, BATCHES_MAX)
        return batch_progress(rows, self.last, own)

    def _written(self, df: DataFrame, batch_id: int, previous_ms: dict[str, int]) -> Committed:
        check_schema(df, self.topic)
        self._check_columns(df.columns)
        use_this_python(df.sparkSession)
        committer = committer_of(self.store, create=self.create_topics is not None)
        app = AppBatch(self.app_id, batch_id, self.options.query_id or query_id_of(df, self._mark), self.adopt)
        for attempt in range(_ENCODE_TRIES_MAX + 1):  # once more for wide rows
            if committer.check_replay(app):
                committer.finish_replay(app)
                if attempt == 0:
                    drain(df)
                return Committed("", replayed=True)
            targets = self._targets(committer, df)
            letters = self._dead_letters(committer, batch_id)
            staging = Staging(committer.store)
            try:
                began = time.monotonic()
                files = self._encode(df, committer, staging, targets, letters)
                done = committer.commit(
                    staging,
                    files,
                    {target.id: target for target in targets.values()},
                    app=app,
                    apply_many=lambda plan, topic, numbers: apply_many(df, self.store, plan, topic, numbers),
                    timings_ms={"encode": int((time.monotonic() - began) * 1000)} | previous_ms,
                    engine="spark",
                )
            except (TopicChanged, CommitConflict):  # nothing happened: look again
                if attempt + 1 >= _ENCODE_TRIES_MAX:
                    raise
                continue
            except WideRows:
                self._has_wide_rows = True
                continue
            except UnknownTopic as error:
                if error.topic is None or self.create_topics is None or attempt + 1 >= _ENCODE_TRIES_MAX:
                    raise
                self._ensure(committer, error.topic)
                continue
            finally:
                staging.close()
            self.adopt = None
            flush_later(committer, list(done.topics), self.options.flush_ms)
            return done
        raise AssertionError("unreachable")

    def _check_columns(self, names: Sequence[str]) -> None:
        """Raises InvalidConfig for an `order_by` that is no column; says once which columns are left out."""
        if self.order_by is not None and self.order_by.lower() not in map(str.lower, names):
            raise InvalidConfig(f"order_by is {self.order_by!r}, and there is no such column", hint=_columns(names))
        if not self._has_told:
            self._has_told = True
            tell_left_out(names, but=self.order_by)

    def _encode(
        self,
        df: DataFrame,
        committer: Committer,
        staging: Staging,
        targets: dict[str, TopicTarget],
        letters: DeadLetters | None = None,
    ) -> list[StagedFile]:
        if self.order_by is not None:
            df = df.orderBy(self.order_by)
        rows = df.select(*known_columns(df.columns))
        job = EncodeJob(
            self.store,
            staging.folder,
            store_token(committer.store),
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
            with not_adding_up(df.sparkSession, width):
                files = _run(width.clipped(rows), replace(job, width=width))
        self._rows = sum(file.records for file in files)
        return files

    def _targets(self, committer: Committer, df: DataFrame) -> dict[str, TopicTarget]:
        """The topics rows may go to: the one named, or any of the store when the rows name theirs."""
        names = committer.store.topic_names() if "topic" in df.columns else []
        if self.topic is not None:
            if self.topic not in names:
                self._ensure(committer, self.topic)
            names = [*names, self.topic]
        if self.dead_letter_topic is not None:
            if self.dead_letter_topic not in names:
                self._ensure(committer, self.dead_letter_topic)
            names = [*names, self.dead_letter_topic]
        return {name: committer.target(name) for name in dict.fromkeys(names)}

    def _dead_letters(self, committer: Committer, batch_id: int) -> DeadLetters | None:
        if self.dead_letter_topic is None:
            return None
        return dead_letters(committer.target(self.dead_letter_topic), self.topic, self.app_id, batch_id)

    def _ensure(self, committer: Committer, name: str) -> None:
        try:
            committer.store.topic(name)
        except UnknownTopic as error:
            if self.create_topics is None:
                error.with_hint("Create it with `duramen topics create`, or give create_topics")
                raise
            create_topic(committer.store, name, **self.create_topics)


def _run(rows: DataFrame, job: EncodeJob) -> list[StagedFile]:
    with explained():
        done = rows.mapInArrow(encode_rows(job), REPORT_SCHEMA).collect()
    reports = [read_report(bytes(row.report)) for row in sorted(done, key=lambda row: row.task)]
    return [file for file in map(staged_file, reports) if file is not None]


# --- what driver and sink share -------------------------------------------------------------------------------------


def dead_letters(target: TopicTarget, topic: str | None, app_id: str | None, batch_id: int | None) -> DeadLetters:
    """Raises InvalidConfig for a topic that could refuse dead letters itself."""
    name = target.name
    if name == topic:
        raise InvalidConfig(f"topic {name} cannot take its own dead letters", hint="Give them a topic of their own")
    if target.config.compact:
        raise InvalidConfig(
            f"the dead-letter topic {name} is compacted; records without key and all but the last of a key would go",
            hint="Create it with cleanup.policy=delete",
        )
    return DeadLetters(target, app_id, batch_id)


def targets_of(
    store: LogStore, columns: Iterable[str], topic: str | None, dead_letter_topic: str | None
) -> dict[str, TopicTarget]:
    """The topics rows may go to: the one named, or any of the store when rows name theirs. Raises UnknownTopic."""
    names = store.topic_names() if "topic" in columns else []
    names += [name for name in (topic, dead_letter_topic) if name is not None]
    return {name: target_of(store, name) for name in dict.fromkeys(names)}


_open_stores: dict[tuple[str, int], Committer] = {}
_open_lock = threading.Lock()


def committer_of(store: str, *, create: bool = False) -> Committer:
    """One open store a process; opened again after a fork, because locks do not survive one."""
    with _open_lock:
        key = (store, os.getpid())
        if key not in _open_stores:
            _open_stores[key] = Committer(LogStore(store, create=create))
        return _open_stores[key]


def store_token(store: OpenStore) -> str:
    """The secret of the store's own file system, by which executors show that they see it."""
    path = os.path.join(store.layout.locks, "token")
    if not store.fs.exists(path):
        draft = f"{path}.{uuid.uuid4().hex}"
        file = store.fs.open(draft, create=True)
        try:
            file.pwrite(uuid.uuid4().hex.encode(), 0)
            file.fsync()
        finally:
            file.close()
        try:
            store.fs.link(draft, path)
        except FileExistsError:
            pass
        finally:
            store.fs.unlink(draft)
    file = store.fs.open(path)
    try:
        return file.pread(64, 0).decode("ascii")
    finally:
        file.close()


def check_schema(df: DataFrame, topic: str | None) -> None:
    """Raises InvalidRecord with the expected schema for columns that cannot become records."""
    problems = check_types(dict(df.dtypes), topic)
    if problems:
        hint = f"{_columns(df.columns)}. Expected: {EXPECTED}"
        if "key" not in df.columns or "value" not in df.columns:
            hint += f". {OUTPUT_MODES}"
        raise InvalidRecord("; ".join(problems), hint=hint)


def known_columns(names: Iterable[str]) -> list[str]:
    return [name for name in names if name in _TYPES]


def tell_left_out(names: Sequence[str], but: str | None = None) -> None:
    """Warn of columns that no record has; they are left out, as Spark's Kafka sink does it."""
    left_out = [name for name in names if name not in _TYPES and name != but]
    if not left_out:
        return
    near = {name: difflib.get_close_matches(name.lower(), _TYPES, n=1) for name in left_out}
    meant = "".join(f" Did you mean {found[0]} by {name}?" for name, found in near.items() if found)
    _log.warning("columns that are no part of a record are left out: %s.%s", ", ".join(left_out), meant)


def arrow_schema(types: Mapping[str, str]) -> pa.Schema:
    """Columns that have passed `check_types`, as Arrow has them."""
    return pa.schema([(name, _ARROW[types[name]]) for name in known_columns(types)])


def _columns(names: Sequence[str]) -> str:
    return f"The columns are {', '.join(names)}"


def check_types(types: dict[str, str], topic: str | None) -> list[str]:
    """What is wrong with columns of these types; empty when nothing is."""
    problems = []
    for name, kind in types.items():
        if name in _TYPES and kind not in _TYPES[name]:
            problems.append(f"column {name!r} is {kind}, expected {' or '.join(_TYPES[name])}")
    if "value" not in types:
        problems.append("there is no column 'value'")
    if topic is None and "topic" not in types:
        problems.append("no topic: neither the sink nor a column names one")
    return problems


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
    try:
        cores = session.sparkContext.defaultParallelism
    except Exception:
        cores = 4
    tasks = min(len(numbers), max(cores, 1))
    groups = [list(numbers[start::tasks]) for start in range(tasks)]
    job = session.range(0, tasks, 1, tasks).mapInArrow(
        apply_plans(store, plan.plan_id, topic.name, groups), REPORT_SCHEMA
    )
    for row in job.collect():
        read_report(bytes(row.report))


__all__ = ["LogSink", "ReplayMismatch"]
