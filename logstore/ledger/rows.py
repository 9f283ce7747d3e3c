"""What the ledger's rows hold: one data class and one Arrow schema a table, checked before anything is written.

Every table has the column `version`, the version of its own Delta table that wrote the row; it orders the rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import pyarrow as pa

from logstore.errors import InvalidCommit
from logstore.limits import INT64_MAX
from logstore.topic import check_topic_name

TEXT_CHARS_MAX = 4096
DETAILS_CHARS_MAX = 1 << 20

_LONG, _TEXT = pa.int64(), pa.string()

COMMITS = pa.schema(
    [
        ("version", _LONG),
        ("topic_id", _TEXT),
        ("topic", _TEXT),
        ("sequence", _LONG),  # the topic's, 1 for its first commit, without gaps
        ("plan_id", _TEXT),
        ("app_id", _TEXT),  # null with batch_id and query_id: not written by a query
        ("batch_id", _LONG),
        ("query_id", _TEXT),
        ("base_offsets", pa.list_(_LONG)),  # of each partition; end == base where the batch has nothing for it
        ("end_offsets", pa.list_(_LONG)),
        ("records", _LONG),
        ("size_bytes", _LONG),
        ("dead_letters", _LONG),  # rows of the whole batch that went to the dead-letter topic instead
        # what was known at the commit: encode and plan of this batch, commit and append of the one before; and as
        # `replays` how many batches came again since then and were not written again
        ("timings_ms", pa.map_(_TEXT, _LONG)),
        ("workers", pa.list_(_TEXT)),
        ("void", pa.bool_()),  # occupies the sequence of a plan whose outcome was unknown; no data
        ("committed_ms", _LONG),
        ("engine", _TEXT),
    ]
)

RUNS = pa.schema(
    [
        ("version", _LONG),
        ("run_id", _TEXT),
        ("kind", _TEXT),  # compaction, retention, …
        ("topic_id", _TEXT),
        ("topic", _TEXT),
        ("partition", pa.int32()),
        ("engine", _TEXT),
        ("started_ms", _LONG),
        ("ended_ms", _LONG),
        ("result", _TEXT),
        ("reason", _TEXT),
        ("before_bytes", _LONG),
        ("after_bytes", _LONG),
        ("removed", pa.map_(_TEXT, _LONG)),  # records by reason
        ("map_fill", pa.float64()),
        ("seconds", pa.float64()),
        ("workers", pa.list_(_TEXT)),
        ("airflow_run_id", _TEXT),
        ("details", _TEXT),  # JSON
    ]
)

SEGMENTS = pa.schema(
    [
        ("version", _LONG),
        ("topic_id", _TEXT),
        ("partition", pa.int32()),
        ("base_offset", _LONG),
        ("size_bytes", _LONG),
        ("records", _LONG),
        ("keys", _LONG),
        ("tombstones", _LONG),
        ("run_id", _TEXT),
    ]
)


TABLES = {"commits": COMMITS, "runs": RUNS, "segments": SEGMENTS}

#: `engine` of rows that a repair wrote. REBUILT: the batch is certain, its row was lost.
ENGINE_REBUILT = "rebuilt"
#: UNSURE: commits were lost that may have been later batches of the app
ENGINE_UNSURE = "unsure"


#: how a run ended, or that it has not
RUNNING, DONE, FAILED, SKIPPED, ABANDONED = "running", "done", "failed", "skipped", "abandoned"


@dataclass(frozen=True, slots=True)
class TopicCommit:
    """One topic's share of a commit; `sequence` is the one it was seen at, the commit makes it one more."""

    topic_id: str
    topic: str
    sequence: int
    base_offsets: tuple[int, ...]
    end_offsets: tuple[int, ...]
    records: int = 0
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class CommitRequest:
    """All topics of a batch, none for an empty one, and what the caller saw: `expected_batch_id` is the app's last one,
    None for a new app, as of version `expected_as_of` of the table.
    """

    plan_id: str
    topics: tuple[TopicCommit, ...]
    app_id: str | None = None
    batch_id: int | None = None
    query_id: str | None = None
    expected_batch_id: int | None = None
    expected_as_of: int | None = None
    timings_ms: Mapping[str, int] = field(default_factory=dict)
    workers: tuple[str, ...] = ()
    engine: str = ""
    dead_letters: int = 0


@dataclass(frozen=True, slots=True)
class CommitRow:
    """A topic's row of a commit, with the `sequence` that the commit gave. An empty batch has one row, of no topic."""

    version: int
    topic_id: str
    topic: str
    sequence: int
    plan_id: str
    app_id: str | None
    batch_id: int | None
    query_id: str | None
    base_offsets: tuple[int, ...]
    end_offsets: tuple[int, ...]
    records: int
    size_bytes: int
    dead_letters: int
    timings_ms: Mapping[str, int]
    workers: tuple[str, ...]
    void: bool
    committed_ms: int
    engine: str


@dataclass(frozen=True, slots=True)
class AppProgress:
    """An app's last batch in the ledger, and who wrote it."""

    app_id: str
    batch_id: int
    query_id: str | None
    plan_id: str
    committed_ms: int
    #: version of the table that showed it
    as_of: int | None = None
    #: commits were lost, and later batches may have been among them
    is_unsure: bool = False


@dataclass(frozen=True, slots=True)
class RunRow:
    """One state of a run; the newest row of a run id is its state now."""

    run_id: str
    kind: str
    topic_id: str | None = None
    topic: str | None = None
    partition: int | None = None
    engine: str = ""
    started_ms: int | None = None
    ended_ms: int | None = None
    result: str = ""
    reason: str = ""
    before_bytes: int | None = None
    after_bytes: int | None = None
    removed: Mapping[str, int] = field(default_factory=dict)
    map_fill: float | None = None
    seconds: float | None = None
    workers: tuple[str, ...] = ()
    airflow_run_id: str | None = None
    details: str = "{}"


@dataclass(frozen=True, slots=True)
class SegmentRow:
    base_offset: int
    size_bytes: int
    records: int
    keys: int
    tombstones: int
    run_id: str | None = None


def check_request(request: CommitRequest) -> None:
    """Raises InvalidCommit for a request whose numbers or texts cannot be a commit's."""
    check_text("plan id", request.plan_id)
    if (request.app_id is None) != (request.batch_id is None):
        raise InvalidCommit("an app_id and a batch_id come together")
    if request.app_id is not None:
        check_text("app_id", request.app_id)
    if request.query_id is not None:
        check_text("query id", request.query_id)
    for name, number in (("batch_id", request.batch_id), ("expected batch_id", request.expected_batch_id)):
        if number is not None:
            check_number(name, number)
    if not request.topics and request.app_id is None:
        raise InvalidCommit("a commit names a topic, or an app whose batch is empty")
    if len({topic.topic_id for topic in request.topics}) != len(request.topics):
        raise InvalidCommit("a commit names each topic once")
    for topic in request.topics:
        check_text("topic id", topic.topic_id)
        check_topic_name(topic.topic)
        if not 0 <= topic.sequence < INT64_MAX:
            raise InvalidCommit(f"topic {topic.topic}: sequence {topic.sequence} is out of range")
        if len(topic.base_offsets) != len(topic.end_offsets):
            raise InvalidCommit(f"topic {topic.topic}: base and end offsets are of different partition counts")
        for partition, (base, end) in enumerate(zip(topic.base_offsets, topic.end_offsets, strict=True)):
            if not 0 <= base <= end <= INT64_MAX:
                raise InvalidCommit(
                    f"offsets {base} to {end} are not a range", partition=f"{topic.topic}-{partition}", offset=base
                )
        check_number("records", topic.records)
        check_number("bytes", topic.size_bytes)
    check_number("dead letters", request.dead_letters)
    check_text("engine", request.engine, empty=True)
    for name, number in request.timings_ms.items():
        check_text("name of a timing", name)
        check_number(name, number)
    for worker in request.workers:
        check_text("worker", worker)


def check_number(name: str, number: int) -> None:
    if not 0 <= number <= INT64_MAX:
        raise InvalidCommit(f"{name} {number} is out of range (0 to 2^63 - 1)")


def check_text(name: str, text: str, *, empty: bool = False, chars_max: int = TEXT_CHARS_MAX) -> None:
    """Texts go into JSON and Parquet, so they must be UTF-8 and of a sane length."""
    if not text and not empty:
        raise InvalidCommit(f"the {name} must not be empty")
    if len(text) > chars_max:
        raise InvalidCommit(f"the {name} has at most {chars_max} characters, this one has {len(text)}")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidCommit(f"the {name} is not valid Unicode: {text[:80]!r}") from error


#: an empty batch has a row of no topic
_NO_TOPIC: dict[str, Any] = {
    "topic_id": "",
    "topic": "",
    "sequence": 0,
    "base_offsets": [],
    "end_offsets": [],
    "records": 0,
    "size_bytes": 0,
}


def commit_rows(request: CommitRequest, *, void: bool, now_ms: int) -> list[dict[str, Any]]:
    """The rows of a request, without their version."""
    shared = {
        "plan_id": request.plan_id,
        "app_id": request.app_id,
        "batch_id": request.batch_id,
        "query_id": request.query_id,
        "dead_letters": 0 if void else request.dead_letters,
        "timings_ms": list(request.timings_ms.items()),
        "workers": list(request.workers),
        "void": void,
        "committed_ms": now_ms,
        "engine": request.engine,
    }
    if not request.topics:  # a row that says who wrote the empty batch
        return [shared | _NO_TOPIC]
    return [
        shared
        | {
            "topic_id": topic.topic_id,
            "topic": topic.topic,
            "sequence": topic.sequence + 1,
            "base_offsets": list(topic.base_offsets),
            "end_offsets": list(topic.base_offsets if void else topic.end_offsets),
            "records": 0 if void else topic.records,
            "size_bytes": 0 if void else topic.size_bytes,
        }
        for topic in request.topics
    ]


def commits_table(rows: Sequence[CommitRow]) -> pa.Table:
    """Rows as they lie in the table."""
    return pa.Table.from_pylist(
        [asdict(row) | {"timings_ms": list(row.timings_ms.items())} for row in rows], schema=COMMITS
    )


def commit_row(row: dict[str, Any]) -> CommitRow:
    tuples = {name: tuple(row[name] or ()) for name in ("base_offsets", "end_offsets", "workers")}
    return CommitRow(**(row | tuples | {"timings_ms": dict(row["timings_ms"] or ())}))


def run_row(row: dict[str, Any]) -> RunRow:
    values = {name: value for name, value in row.items() if name != "version"}
    return RunRow(**(values | {"removed": dict(row["removed"] or ()), "workers": tuple(row["workers"] or ())}))
