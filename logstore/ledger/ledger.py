"""The ledger of a store: the table `commits` that decides, and the tables `runs` and `segments` that remember.

A commit is one Delta transaction for all topics of a batch. It carries the application transactions
`app:APP_ID → batch_id` and, for each topic, `topic:TOPIC_ID → sequence`; it happens only on a version that shows the
values the caller saw, so of two commits that touch the same app or topic one gets CommitConflict, whoever holds which
lease. Replay and fencing look at the transaction log alone. The ledger never looks at logs, plans or state files.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict

import pyarrow as pa
import pyarrow.compute as pc

from logstore.address_space import check_address_space
from logstore.clock import SYSTEM_CLOCK, Clock
from logstore.errors import CommitConflict, DuramenError, InvalidCommit, LedgerError
from logstore.files import OS_FILES, FileSystem
from logstore.ledger import receipts
from logstore.ledger.data_file import DataFile, empty_table
from logstore.ledger.delta_log import RECOVER
from logstore.ledger.rows import (
    COMMITS,
    DETAILS_CHARS_MAX,
    ENGINE_UNSURE,
    RUNS,
    SEGMENTS,
    AppProgress,
    CommitRequest,
    CommitRow,
    RunRow,
    SegmentRow,
    check_number,
    check_request,
    check_text,
    commit_row,
    commit_rows,
    run_row,
)
from logstore.ledger.table import Change, LedgerTable

#: names of the application transactions: APP + app_id -> batch id, TOPIC + topic id -> sequence
APP, TOPIC = "app:", "topic:"
#: COUNTED + app_id -> batch id, with every commit since empty batches are committed too: up to there none is missing
COUNTED = "counted:"
#: when commits of unknown apps were lost: an app that is not known may not be new
APPS_LOST = "apps-lost"

#: runs recorded between two checks of how many there are
_PRUNE_EVERY = 64
_UNUSABLE = re.compile(r"%[0-9A-Fa-f]{2}|[\\\x00-\x1f\x7f]")


class Ledger:
    """The ledger in directory `path`, made when missing. For any number of threads and processes."""

    def __init__(self, path: str | os.PathLike[str], *, fs: FileSystem = OS_FILES, clock: Clock = SYSTEM_CLOCK) -> None:
        self.path = os.path.abspath(path)
        self._clock = clock
        if _UNUSABLE.search(self.path):
            raise LedgerError(
                "delta-rs cannot open a path with a backslash, a control character or % and two hex digits",
                file=self.path,
                hint="Move the store.",
            )
        check_address_space()
        if not fs.exists(self.path):
            fs.mkdir(self.path)
            fs.fsync_dir(os.path.dirname(self.path))

        def table(name: str, schema: pa.Schema, upkeep_every: int, spare_files: int) -> LedgerTable:
            return LedgerTable(
                os.path.join(self.path, name),
                schema,
                fs=fs,
                clock=clock,
                upkeep_every=upkeep_every,
                spare_files=spare_files,
            )

        # The figures keep the whole directory below 300 files however fast it is written.
        self.commits_table = table("commits", COMMITS, 20, 48)
        self.runs_table = table("runs", RUNS, 10, 12)
        self._recorded = 0
        self.segments_table = table("segments", SEGMENTS, 10, 12)

    def maintain(self) -> None:
        """Merge small files, checkpoint, delete what is superseded; commits do the same every so often."""
        for table in (self.commits_table, self.runs_table, self.segments_table):
            table.maintain()

    # --- commits ------------------------------------------------------------------------------------------------

    def commit(self, request: CommitRequest) -> int:
        """Commit; returns the table version once it is durable.

        Raises InvalidCommit, CommitConflict (nothing happened, look again), CommitUnknown (call `resolve`), OSError
        (nothing happened).
        """
        check_request(request)
        return self._commit(request, void=False)

    def commit_void(self, request: CommitRequest) -> int:
        """Occupy the request's sequences without data, so that a commit of it still on its way must fail."""
        check_request(request)
        return self._commit(request, void=True)

    def resolve(self, request: CommitRequest) -> int | None:
        """After CommitUnknown: the version at which the plan was committed, or None once it never will be."""
        while True:
            rows = self.find_plan(request.plan_id)
            if rows:
                return None if rows[0].void else rows[0].version
            if any(self.sequence(topic.topic_id) != topic.sequence for topic in request.topics):
                # Another writer took a sequence, after which the plan cannot be committed; it may have been committed
                # just before.
                rows = self.find_plan(request.plan_id)
                return rows[0].version if rows and not rows[0].void else None
            try:
                self.commit_void(request)
                return None
            except CommitConflict:
                continue

    def _commit(self, request: CommitRequest, *, void: bool) -> int:
        table = self.commits_table
        transactions = {_topic(topic.topic_id): topic.sequence + 1 for topic in request.topics}
        if not void and request.app_id is not None and request.batch_id is not None:
            transactions[_app(request.app_id)] = request.batch_id
            transactions[COUNTED + request.app_id] = request.batch_id

        def prepare() -> Change:
            if not void and request.app_id is not None:
                seen = table.transaction(_app(request.app_id))
                if seen != request.expected_batch_id or self._has_newer(request.app_id, request.expected_as_of):
                    raise CommitConflict(
                        f"app_id {request.app_id!r} is at batch {seen}, expected {request.expected_batch_id}",
                        file=table.path,
                        hint="Another query commits under this app_id; look again.",
                    )
            for topic in request.topics:
                sequence = table.transaction(_topic(topic.topic_id)) or 0
                if sequence != topic.sequence:
                    raise CommitConflict(
                        f"topic {topic.topic} is at sequence {sequence}, expected {topic.sequence}",
                        file=table.path,
                        hint="Another writer committed to the topic; settle it and look again.",
                    )
            return Change(commit_rows(request, void=void, now_ms=self._clock.now_ms()), transactions)

        return table.write(prepare)

    def _has_newer(self, app_id: str, as_of: int | None) -> bool:
        """Whether the app committed after a version: batch ids can go back, so the same one may not be the same."""
        table = self.commits_table
        if as_of is None or table.version == as_of:
            return False
        for file in reversed(table.files()):
            if int(file.name[:20]) <= as_of:
                break
            if self._matching(file, (pc.field("app_id") == app_id) & (pc.field("version") > as_of)):
                return True
        return False

    def sequence(self, topic_id: str) -> int:
        """The topic's last committed sequence, 0 before its first."""
        table = self.commits_table
        return table.run(lambda: table.transaction(_topic(topic_id)) or 0)

    def last_batch(self, app_id: str) -> AppProgress | None:
        """The app's last batch and who wrote it; None for an app the ledger does not know."""
        table = self.commits_table

        def look() -> AppProgress | None:
            batch_id = table.transaction(_app(app_id))
            if batch_id is None:
                return None
            of_batch = (pc.field("app_id") == app_id) & (pc.field("batch_id") == batch_id) & ~pc.field("void")
            for row in self._newest_first(of_batch, 1):
                return AppProgress(
                    app_id,
                    batch_id,
                    row.query_id,
                    row.plan_id,
                    row.committed_ms,
                    as_of=table.version,
                    is_unsure=row.engine == ENGINE_UNSURE,
                )
            raise LedgerError(
                f"the row of batch {batch_id} of app_id {app_id!r} is missing", file=table.path, hint=RECOVER
            )

        return table.run(look)

    def apps(self) -> list[AppProgress]:
        """How far every app has come, by name."""
        table = self.commits_table

        def look() -> list[AppProgress]:
            names = {name for name in table.read_all(["app_id"]).column("app_id").to_pylist() if name is not None}
            found = [self.last_batch(name) for name in sorted(names)]
            return [each for each in found if each is not None]

        return table.run(look)

    def is_counted(self, app_id: str) -> bool:
        """Whether the app's last commit is by a release that commits empty batches too."""
        table = self.commits_table
        return table.run(lambda: table.transaction(COUNTED + app_id) == table.transaction(_app(app_id)))

    def are_apps_lost(self) -> bool:
        """Whether commits of unknown apps were lost."""
        table = self.commits_table
        return table.run(lambda: table.transaction(APPS_LOST) is not None)

    def commits_after(self, topic_id: str, applied_sequence: int) -> list[CommitRow]:
        """The topic's rows above `applied_sequence`, in order, none missing. Raises LedgerError otherwise."""
        table = self.commits_table

        def look() -> list[CommitRow]:
            last = table.transaction(_topic(topic_id)) or 0
            if last < applied_sequence:
                raise LedgerError(
                    f"sequence {applied_sequence} of topic {topic_id} was applied, but the ledger ends at {last}",
                    file=table.path,
                    hint="The ledger lost commits, or is from an older copy of the store. "
                    "`duramen recover` brings it up to what the logs hold",
                )
            if last == applied_sequence:
                return []
            newer = (pc.field("topic_id") == topic_id) & (pc.field("sequence") > applied_sequence)
            rows = sorted(self._newest_first(newer, last - applied_sequence), key=lambda row: row.sequence)
            if [row.sequence for row in rows] != list(range(applied_sequence + 1, last + 1)):
                raise LedgerError(
                    f"rows of topic {topic_id} between sequence {applied_sequence} and {last} are missing",
                    file=table.path,
                    hint=RECOVER,
                )
            return rows

        return table.run(look)

    def find_plan(self, plan_id: str) -> list[CommitRow]:
        """The rows of a plan, one a topic; empty when it was never committed."""
        table = self.commits_table

        def look() -> list[CommitRow]:
            for file in reversed(table.files()):  # a commit's rows lie in one file
                rows = self._matching(file, pc.field("plan_id") == plan_id)
                if rows:
                    return rows
            return []

        return table.run(look)

    def commits(self) -> list[CommitRow]:
        """Every row, oldest first."""
        table = self.commits_table
        return table.run(lambda: [commit_row(row) for row in table.read_all().to_pylist()])

    def commits_of_app(self, app_id: str, count: int) -> list[CommitRow]:
        """The app's newest rows, at most `count`, oldest first."""
        mine = pc.field("app_id") == app_id
        return self.commits_table.run(lambda: self._newest_first(mine, count))[::-1]

    def _newest_first(self, condition: pc.Expression, count: int) -> list[CommitRow]:
        found: list[CommitRow] = []
        for file in reversed(self.commits_table.files()):
            found += reversed(self._matching(file, condition))
            if len(found) >= count:
                break
        return found[:count]

    def _matching(self, file: DataFile, condition: pc.Expression) -> list[CommitRow]:
        rows = self.commits_table.read(file).filter(condition).sort_by("version")
        return [commit_row(row) for row in rows.to_pylist()]

    # --- runs and segments ----------------------------------------------------------------------------------------

    def record_run(self, run: RunRow) -> int:
        """Append a run's state; a later row with the same run id replaces it in `runs()`."""
        check_text("run id", run.run_id)
        check_text("kind", run.kind)
        for name, text in (("result", run.result), ("reason", run.reason), ("details", run.details)):
            check_text(name, text, empty=True, chars_max=DETAILS_CHARS_MAX)
        for name, number in run.removed.items():
            check_text("reason of a removal", name)
            check_number(name, number)
        if run.kind == receipts.SUMMARY:
            raise InvalidCommit(f"no run is of the kind {run.kind!r}")
        row = asdict(run) | {"removed": list(run.removed.items()), "workers": list(run.workers)}
        version = self.runs_table.write(lambda: Change([row]))
        self._recorded += 1
        if self._recorded % _PRUNE_EVERY == 1:
            # What cannot be tidied up now is tidied up later; the run is recorded.
            with contextlib.suppress(DuramenError, OSError, pa.ArrowException):
                self.prune_runs()
        return version

    def runs(self, where: pc.Expression | None = None, *, latest: bool = True) -> list[RunRow]:
        """The runs in the order they were first recorded, each as it was last recorded; or every row.

        `where` chooses among the rows; what it goes by should be the same in all rows of a run.
        """
        table = self.runs_table
        chosen = pc.field("kind") != receipts.SUMMARY
        chosen = chosen if where is None else chosen & where
        found = table.run(lambda: table.read_all().filter(chosen).sort_by("version").to_pylist())
        rows = [run_row(row) for row in found]
        return list({row.run_id: row for row in rows}.values()) if latest else rows

    def run_rows(self, columns: Sequence[str], where: pc.Expression) -> pa.Table:
        """These columns of the rows that `where` chooses by them, oldest first."""
        table = self.runs_table
        names = list(dict.fromkeys(["version", *columns]))
        found: pa.Table = table.run(lambda: table.read_all(names).filter(where).sort_by("version"))
        return found

    def unfinished_runs(self, kind: str, running: str) -> list[RunRow]:
        """Runs of a kind whose newest row says `running`."""
        rows = self.run_rows(["run_id", "kind", "result"], pc.field("kind") == kind)
        last = dict(zip(rows["run_id"].to_pylist(), rows["result"].to_pylist(), strict=True))
        ids = [run_id for run_id, result in last.items() if result == running]
        return self.runs(pc.field("run_id").isin(ids)) if ids else []

    def prune_runs(self) -> None:
        """Sum up receipts that are not needed one by one, when there are many of them; see `receipts`."""
        table = self.runs_table
        count = table.run(lambda: sum(file.rows for file in table.files()))
        if count < receipts.ROWS_MIN:
            return
        summary = self.run_rows(["kind", "details"], pc.field("kind") == receipts.SUMMARY)["details"].to_pylist()
        if receipts.is_due(count, receipts.kept_before(summary[-1] if summary else None)):
            table.write(
                lambda: Change(
                    receipts.pruned(table.read_all(), version=table.version + 1), removes=tuple(table.files())
                )
            )

    def replace_segments(self, topic_id: str, partition: int, segments: Sequence[SegmentRow]) -> int:
        """Put these statistics in place of all the partition had."""
        return self.replace_segments_of({(topic_id, partition): segments})

    def replace_segments_of(self, partitions: Mapping[tuple[str, int], Sequence[SegmentRow]]) -> int:
        """The same for several partitions, by topic id and number, in one commit."""
        for topic_id, _ in partitions:
            check_text("topic id", topic_id)
        table = self.segments_table

        def prepare() -> Change:
            removes, rest = [], [empty_table(SEGMENTS)]
            for file in table.files():
                rows = table.read(file).cast(SEGMENTS)
                keys = zip(rows["topic_id"].to_pylist(), rows["partition"].to_pylist(), strict=True)
                others = rows.filter(pa.array([key not in partitions for key in keys], pa.bool_()))
                if others.num_rows < rows.num_rows:
                    removes.append(file)
                    rest.append(others)
            new = [
                {"version": table.version + 1, "topic_id": topic_id, "partition": number} | asdict(segment)
                for (topic_id, number), segments in partitions.items()
                for segment in segments
            ]
            rows = pa.Table.from_pylist(new, schema=SEGMENTS)
            return Change(pa.concat_tables([*rest, rows]), removes=tuple(removes))

        return table.write(prepare)

    def segments(self, topic_id: str, partition: int) -> list[SegmentRow]:
        """A partition's statistics by base offset."""
        return self.segments_of(topic_id).get(partition, [])

    def segments_of(self, topic_id: str) -> dict[int, list[SegmentRow]]:
        """A topic's statistics by partition, by base offset in each."""
        table = self.segments_table
        names = ["partition", "base_offset", "size_bytes", "records", "keys", "tombstones", "run_id"]
        rows: pa.Table = table.run(table.read_all)
        found: dict[int, list[SegmentRow]] = {}
        # Runs of rows by hand: an expression or a sort of PyArrow's loads pandas where it is installed.
        wanted, mine, at = rows.select(names), [], 0
        for topic, run in itertools.groupby(rows["topic_id"].to_pylist()):
            length = len(list(run))
            if topic == topic_id:
                mine += wanted.slice(at, length).to_pylist()
            at += length
        for row in sorted(mine, key=lambda row: row["base_offset"]):
            found.setdefault(row.pop("partition"), []).append(SegmentRow(**row))
        return found


def _app(app_id: str) -> str:
    return APP + app_id


def _topic(topic_id: str) -> str:
    return TOPIC + topic_id
