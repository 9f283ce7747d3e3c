"""The store as a whole: does its ledger hold, and does it agree with the topics; and the repair when it does not.

`examine` looks and changes nothing. `repair` brings the ledger back from what is left of it, from `ends` and from the
plans in staging. What is replaced is set aside in `ledger/torn/`. Partitions are not looked at here: commits whose
staged files are gone are handled by their recovery.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.compute as pc

from logstore.commit.plan import Plan, read_plan
from logstore.directory.ends import stored_ends
from logstore.directory.finding import Finding, StoreReport
from logstore.directory.layout import Layout
from logstore.directory.origin import read_origin
from logstore.directory.version import looks_like_a_store, read_version, write_version
from logstore.errors import CorruptState, DuramenError, NotAStore
from logstore.files import FileSystem
from logstore.ledger import CommitRow
from logstore.ledger.ledger import APPS_LOST, TOPIC
from logstore.ledger.rebuild import Contents, rebuild_table
from logstore.ledger.rows import TABLES, commit_row, commits_table
from logstore.ledger.salvage import Salvage, salvage
from logstore.topics.opened import OpenStore
from logstore.upkeep.reconstruct import Applied, Reconstruction, reconstruct

_PLAN_SUFFIX = "-plan"


@dataclass(slots=True)
class _Ledger:
    tables: dict[str, Salvage]
    applied: dict[str, Applied]


def restore_version(fs: FileSystem, root: str, *, dry_run: bool = False) -> StoreReport:
    """Write the version file of a store that lost it, before it is opened. Raises NotAStore, StoreVersionError."""
    layout, report = Layout(os.path.abspath(root)), StoreReport()
    try:
        read_version(fs, layout.version)
    except CorruptState as error:
        if not looks_like_a_store(fs, layout):
            raise NotAStore("no store here", file=layout.root) from error
        report.findings.append(Finding(error.what, error.file))
        report.actions.append(f"{'would write' if dry_run else 'wrote'} the version file from the store's layout")
        if not dry_run:
            write_version(fs, layout.version)
    return report


def examine(store: OpenStore, *, deep: bool = True) -> StoreReport:
    """Check the ledger's files, and that ledger and topics agree. Changes nothing. Unless `deep`, rows are not read."""
    report = StoreReport()
    _check_origin(store, report)
    ledger = _read(store, data=deep)
    _note_damage(report, ledger)
    _note_disagreement(store, report, ledger)
    return report


def repair(store: OpenStore, *, dry_run: bool = False) -> StoreReport:
    """Bring the ledger back. Raises LockHeld."""
    report = StoreReport()
    _check_origin(store, report)
    if report.findings:
        report.actions.append(f"{'would set' if dry_run else 'set'} the damaged origin file aside")
        if not dry_run:
            store.fs.rename(store.layout.origin, store.layout.work("stray"))
    ledger = _read(store, others=True)
    _note_damage(report, ledger)
    _note_disagreement(store, report, ledger)
    if report.sound:
        return report
    _repair_commits(store, report, ledger, dry_run)
    for name in ("runs", "segments"):
        _repair_others(store, report, ledger.tables[name], name, dry_run)
    if not dry_run:
        store.ledger()  # sets aside what a power cut left torn
    return report


# --- looking ----------------------------------------------------------------------------------------------------------


def _check_origin(store: OpenStore, report: StoreReport) -> None:
    try:
        read_origin(store.fs, store.layout)
    except CorruptState as error:
        report.findings.append(Finding(f"the file that says what the store is a copy of: {error.what}", error.file))


def _read(store: OpenStore, *, data: bool = True, others: bool = False) -> _Ledger:
    applied = _applied(store)  # before the ledger: what is applied then was committed before
    tables = {
        name: salvage(store.fs, os.path.join(store.layout.ledger, name), schema, data=data, others=others)
        for name, schema in TABLES.items()
    }
    return _Ledger(tables, applied)


def _applied(store: OpenStore) -> dict[str, Applied]:
    """What the topics' ends say, by topic id; a topic whose ends are damaged is left out."""
    names = {}
    for name in store.topic_names():
        try:
            names[store.topic(name).id] = name
        except DuramenError:
            continue  # its state still says
    found = {}
    for topic_id in store.fs.listdir(store.layout.state):
        try:
            ends = stored_ends(store.fs, store.layout.ends(topic_id), limits=store.limits)
        except (CorruptState, ValueError, FileNotFoundError, NotADirectoryError):
            continue
        found[topic_id] = Applied(names.get(topic_id, ""), ends.applied_sequence, ends.high_watermarks)
    return found


def _is_new(ledger: _Ledger) -> bool:
    """Nothing was ever committed here: the ledger comes with the first commit."""
    return all(table.is_missing for table in ledger.tables.values()) and not any(
        each.sequence for each in ledger.applied.values()
    )


def _note_damage(report: StoreReport, ledger: _Ledger) -> None:
    if not _is_new(ledger):
        for name, table in ledger.tables.items():
            report.findings += [Finding(f"ledger table {name}: {each.what}", each.file) for each in table.damage]


def _note_disagreement(store: OpenStore, report: StoreReport, ledger: _Ledger) -> None:
    commits = ledger.tables["commits"]
    for topic_id, facts in ledger.applied.items():
        _, sequence = commits.transactions.get(TOPIC + topic_id, (0, 0))
        if sequence < facts.sequence:
            report.findings.append(
                Finding(
                    f"topic {facts.topic or topic_id}: {facts.sequence} commits were applied, the ledger knows "
                    f"{sequence}; it lost commits, or is from an older copy of the store",
                    file=commits.path,
                )
            )
    for row in _unappliable(store, commits):
        report.findings.append(
            Finding(
                f"topic {row.topic}: commit {row.sequence} was never applied and its staged files are gone; the store "
                "is from an older copy, or was copied while it was written",
                file=store.layout.plan(row.plan_id),
            )
        )


def _unappliable(store: OpenStore, commits: Salvage) -> list[CommitRow]:
    """Commits above what their topic applied, without a plan to apply."""
    found = []
    for name in store.topic_names():
        try:
            topic = store.topic(name)
            applied = store.ends(topic).applied_sequence
        except DuramenError:
            continue
        if commits.transactions.get(TOPIC + topic.id, (0, 0))[1] <= applied:
            continue
        if not commits.named:  # only the log was read
            commits = salvage(store.fs, commits.path, TABLES["commits"])
        assert commits.named is not None
        newer = (pc.field("topic_id") == topic.id) & (pc.field("sequence") > applied) & ~pc.field("void")
        rows = [row for row in _commit_rows(commits.named.filter(newer)) if not _has_plan(store, row)]
        # Staging goes once it is applied and flushed, or with the topic: look again, it may have been just now.
        try:
            store.check_exists(topic)
            applied = store.ends(topic).applied_sequence
        except DuramenError:
            continue
        found += sorted((row for row in rows if row.sequence > applied), key=lambda row: row.sequence)
    return found


def _has_plan(store: OpenStore, row: CommitRow) -> bool:
    try:
        plan = read_plan(store.fs, store.layout.plan(row.plan_id), limits=store.limits)
    except (FileNotFoundError, CorruptState):
        return False
    return plan.topic(row.topic_id) is not None


def _commit_rows(table: pa.Table | None) -> list[CommitRow]:
    return [] if table is None else [commit_row(row) for row in table.to_pylist()]


def _plans(store: OpenStore) -> list[Plan]:
    found = []
    for name in store.fs.listdir(store.layout.staging):
        if name.endswith(_PLAN_SUFFIX):
            try:
                folder = store.layout.plan(name[: -len(_PLAN_SUFFIX)])
                found.append(read_plan(store.fs, folder, limits=store.limits))
            except (FileNotFoundError, NotADirectoryError, CorruptState):
                continue
    return found


# --- the ledger -------------------------------------------------------------------------------------------------------


def _repair_commits(store: OpenStore, report: StoreReport, ledger: _Ledger, dry_run: bool) -> None:
    table = ledger.tables["commits"]
    sequences = {topic_id: table.transactions.get(TOPIC + topic_id, (0, 0))[1] for topic_id in ledger.applied}
    is_behind = any(sequences[topic_id] < facts.sequence for topic_id, facts in ledger.applied.items())
    if not is_behind and all(each.is_torn for each in table.damage):
        if table.damage:
            report.actions.append(f"{'would set' if dry_run else 'set'} aside what a power cut left torn in commits")
        return
    made = reconstruct(
        _commit_rows(table.named),
        _commit_rows(table.others),
        _plans(store),
        transactions=table.transactions,
        is_chained=table.is_chained,
        applied=ledger.applied,
        version=table.version,
        now_ms=store.clock.now_ms(),
    )
    _tell(report, made, ledger, dry_run)
    if not dry_run:
        _replace(store, report, "commits", table.version, commits_table(made.rows), made)


def _tell(report: StoreReport, made: Reconstruction, ledger: _Ledger, dry_run: bool) -> None:
    report.actions.append(
        f"{'would rebuild' if dry_run else 'rebuilt'} the ledger of {len(made.rows)} rows; "
        f"{len(made.regained)} of them came from data files and plans that no commit names any more"
    )
    for topic_id, sequences in made.lost.items():
        name = (ledger.applied[topic_id].topic if topic_id in ledger.applied else "") or topic_id
        report.lost.append(
            f"topic {name}: who wrote commits {_ranges(sequences)} is not known any more; the records are not touched"
        )
    for row in made.unsure:
        report.lost.append(
            f"exactly-once bookkeeping lost: app {row.app_id!r} last known batch {row.batch_id}; the next batch of "
            "that query needs adopt"
        )
    if APPS_LOST in made.transactions:
        report.lost.append(
            "exactly-once bookkeeping lost: an app_id that the ledger does not know may not be new; it needs adopt, "
            "unless it begins with batch 0"
        )


def _ranges(numbers: Sequence[int]) -> str:
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][1] == number - 1:
            found[-1][1] = number
        else:
            found.append([number, number])
    return ", ".join(str(low) if low == high else f"{low} to {high}" for low, high in found)


def _repair_others(store: OpenStore, report: StoreReport, table: Salvage, name: str, dry_run: bool) -> None:
    """Receipts of runs come back from every file that can be read; statistics are counted again by the next passes."""
    if all(each.is_torn for each in table.damage) or table.named is None or table.others is None:
        return
    rows = table.named
    if name == "runs":
        rows = _distinct(pa.concat_tables([table.named, table.others]))
    report.actions.append(f"{'would rebuild' if dry_run else 'rebuilt'} ledger table {name} of {rows.num_rows} rows")
    if not dry_run:
        _replace(store, report, name, table.version, rows, None)


def _distinct(rows: pa.Table) -> pa.Table:
    first: dict[tuple[object, object], int] = {}
    pairs = zip(rows["version"].to_pylist(), rows["run_id"].to_pylist(), strict=True)
    for at, key in enumerate(pairs):
        first.setdefault(key, at)
    return rows.take(pa.array(first.values(), pa.int64())).sort_by("version")


def _replace(
    store: OpenStore, report: StoreReport, name: str, version: int, rows: pa.Table, made: Reconstruction | None
) -> None:
    aside = rebuild_table(
        store.fs,
        store.clock,
        os.path.join(store.layout.ledger, name),
        Contents(
            TABLES[name],
            rows,
            transactions=made.transactions if made else {},
            version=max([version, *rows["version"].to_pylist()]),
        ),
    )
    if aside is not None:
        report.actions.append(f"the ledger table as it was is in {aside}")
