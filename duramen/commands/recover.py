"""`duramen recover`: repair of the store, its topics and its partitions, and what it costs."""

from __future__ import annotations

import contextlib
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.health import print_store, store_document
from duramen.commands.options import DryRun, Partition, Topics, chosen_partitions, readable_topics
from duramen.commands.verify import (
    finding_documents,
    print_verification,
    stray_document,
    verification_document,
    verify_all,
)
from duramen.losses import joined_ranges, loss_documents, loss_text
from duramen.session import DAMAGE, key_values, print_table, session, size_text, stop

if TYPE_CHECKING:
    from logstore.directory.finding import StoreReport
    from logstore.store import LogStore
    from logstore.topics.registry import Topic
    from logstore.upkeep.recovery import Recovery, RecoveryLedger
    from logstore.upkeep.strays import Stray
    from logstore.upkeep.topic_repair import TopicRepair


def recover(
    topics: Topics = None,
    partition: Partition = None,
    topic_config: Annotated[
        list[str] | None,
        typer.Option(
            "--topic-config",
            metavar="NAME=VALUE",
            help="A setting of the topics whose file is lost or damaged; may be given again.",
            show_default=False,
        ),
    ] = None,
    readmit: Annotated[
        bool, typer.Option("--readmit", help="Put intact batches from quarantine back where they are missing.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask before records are given up.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Repair the ledger and partitions: take out damaged batches, keep all others, rebuild the rest; exit 3 when there
    was damage.
    """
    if session.is_in_bucket:
        from duramen.commands.recover_bucket import recover_bucket

        return recover_bucket(topics, partition, readmit=readmit, yes=yes, dry_run=dry_run)
    from logstore.files import OS_FILES
    from logstore.upkeep.repair import restore_version
    from logstore.upkeep.strays import find_strays
    from logstore.upkeep.topic_repair import repair_topics

    whole = restore_version(OS_FILES, session.directory, dry_run=dry_run)
    if dry_run and not whole.sound:  # nothing more can be looked at without it
        missing = {"recovered": False} | verification_document([], [], whole)
        session.answer(missing, lambda: print_verification([], [], whole))
        stop(DAMAGE)
    with session.open() as store:
        strays = find_strays(store, topics)
        # Indexes are rebuilt without a question: only a look before tells that they were damaged.
        looked = verify_all(store, _readable_partitions(store, topics, partition, dry_run=True))
        repairs = repair_topics(store, topics, configs=key_values(topic_config, "--topic-config"), dry_run=dry_run)
        _repair_whole(store, whole, dry_run=dry_run)
        partitions = _readable_partitions(store, topics, partition, dry_run=dry_run)
        reports = _recover_partitions(store, partitions, readmit=readmit, yes=yes, dry_run=dry_run)
    found = {result.partition: result.findings for result in looked}
    for report in reports:
        report.findings += found.get(report.partition, ())
    damaged = bool(repairs or strays) or not whole.sound or any(report.found_damage for report in reports)
    document = {
        "recovered": not dry_run,
        "sound": not damaged,
        "store": store_document(whole),
        "partitions": [_recovery(report) for report in reports],
        "topics": list(map(_repair, repairs)),
        "strays": list(map(stray_document, strays)),
    }
    session.answer(document, lambda: _print(reports, repairs, strays, whole, dry_run=dry_run))
    if damaged:
        stop(DAMAGE)


def _repair_whole(store: LogStore, whole: StoreReport, *, dry_run: bool) -> None:
    """What belongs to no partition; `whole` collects what was found."""
    from logstore.directory.identity import restore_identity
    from logstore.upkeep.repair import repair
    from logstore.upkeep.side_files import restore_side_files

    whole.add(restore_identity(store.fs, store.layout, dry_run=dry_run))
    whole.add(restore_side_files(store, dry_run=dry_run))
    whole.add(repair(store, dry_run=dry_run))


def _recover_partitions(
    store: LogStore, partitions: list[tuple[Topic, int]], *, readmit: bool, yes: bool, dry_run: bool
) -> list[Recovery]:
    """Looks first, and asks before records are given up."""
    from logstore.errors import CorruptState
    from logstore.upkeep.recovery import RecoveryLedger, repair_partitions

    ledger = RecoveryLedger(store)
    # This gives nothing up, so it does not ask; what comes after looks at whole files.
    repaired = {
        topic.partition(number): done
        for topic, chosen in groupby(partitions, key=itemgetter(0))
        for number, done in repair_partitions(
            store, topic, [number for _, number in chosen], ledger=ledger, dry_run=dry_run
        ).items()
    }
    reports = _recover_all(store, partitions, ledger, readmit=readmit, dry_run=True)
    if dry_run:
        return reports
    lost = [(str(report.partition), loss_text(loss)) for report in reports for loss in loss_documents(report.losses)]
    if lost:
        if not session.json:
            _print_partitions(reports, dry_run=True)
        session.confirm(_question(lost), yes=yes)
    reports = _recover_all(store, partitions, ledger, readmit=readmit, dry_run=False, agreed=reports)
    with contextlib.suppress(CorruptState):  # of a topic that is not brought back: then Kafka's files stay as they are
        store.project_checkpoints()
    for report in reports:
        report.repaired += repaired[report.partition]
    return reports


def _readable_partitions(
    store: LogStore, names: list[str] | None, partition: int | None, *, dry_run: bool
) -> list[tuple[Topic, int]]:
    """Without those of topics that are only going to be brought back."""
    if dry_run and names:
        found = {topic.name for topic in readable_topics(store)}
        names = [name for name in names if name in found]
        if not names:
            return []
    return chosen_partitions(store, names, partition, tolerant=True)


def _recover_all(
    store: LogStore,
    partitions: list[tuple[Topic, int]],
    ledger: RecoveryLedger,
    *,
    readmit: bool,
    dry_run: bool,
    agreed: list[Recovery] | None = None,
) -> list[Recovery]:
    from logstore.upkeep.recovery import recover as recover_topic

    allowed = None if agreed is None else {report.partition: report.losses for report in agreed}
    reports: list[Recovery] = []
    with session.progress("looking" if dry_run else "recovering", len(partitions), unit="partitions") as step:
        for topic in {topic.id: topic for topic, _ in partitions}.values():
            numbers = [number for other, number in partitions if other.id == topic.id]
            reports += recover_topic(
                store,
                topic,
                numbers,
                done=lambda _: step(1),
                dry_run=dry_run,
                readmit=readmit,
                allowed=allowed,
                ledger=ledger,
            )
    return reports


def _question(lost: list[tuple[str, str]]) -> str:
    named = "; ".join(f"{where}: {what}" for where, what in lost[:5])
    more = f" and {len(lost) - 5} more ranges" if len(lost) > 5 else ""
    return f"Go on without the records of {named}{more}? Their bytes are kept in quarantine."


def _print(
    reports: list[Recovery], repairs: list[TopicRepair], strays: list[Stray], whole: StoreReport, *, dry_run: bool
) -> None:
    _print_partitions(reports, dry_run=dry_run)
    for each in repairs:
        for note in each.notes:
            print(f"{each.name}: {note}")
    for stray in strays:
        print(f"{stray.what} (file {stray.file})")
    print_store(whole)


def _print_partitions(reports: list[Recovery], *, dry_run: bool) -> None:
    print_table(
        ["partition", "log end", "segments scanned", "scanned", "taken out", "lost offsets", "result"],
        [
            [
                report.partition,
                report.log_end_offset,
                report.segments_scanned,
                size_text(report.bytes_scanned),
                size_text(report.dropped_bytes),
                sum(loss.end_offset - loss.base_offset for loss in report.losses),
                "DAMAGED" if report.found_damage else "sound",
            ]
            for report in reports
        ],
        title="Would recover" if dry_run and any(report.found_damage for report in reports) else None,
    )
    would = "would be " if dry_run else ""
    for report in reports:
        for cut in report.cuts:
            lost = ""
            if cut["lost_from"] is not None:
                most = "at most " if cut["at_most"] else ""
                lost = f"; {most}offsets {cut['lost_from']} to {int(str(cut['lost_to'])) - 1} {would}lost"
            print(
                f"{report.partition}: {cut['reason']} (file {cut['file']}, position {cut['position']}, "
                f"{cut['dropped_bytes']} bytes){lost}"
            )
        for path in report.quarantined:
            print(f"{report.partition}: set aside in {path}")
        for source, first, end in joined_ranges(report.readmitted):
            print(f"{report.partition}: offsets {first} to {end - 1} {would}put back from {source}")
        for first, end, why in report.held_back:
            print(f"{report.partition}: offsets {first} to {end - 1} stay in quarantine: {why}")
        for note in [*report.repaired, *report.rebuilt, *report.notes]:
            print(f"{report.partition}: {note}")
        for each in report.findings if not report.cuts else ():  # cuts say the same, with what it costs
            print(f"{report.partition}: {each.what}" + (f" (file {each.file})" if each.file else ""))


def _repair(repair: TopicRepair) -> dict[str, Any]:
    topic = repair.topic
    return {
        "name": repair.name,
        "id": topic.id if topic else None,
        "partitions": topic.partitions if topic else None,
        "settings_unknown": topic.settings_unknown if topic else None,
        "notes": list(repair.notes),
    }


def _recovery(report: Recovery) -> dict[str, Any]:
    return {
        "topic": report.partition.topic,
        "partition": report.partition.partition,
        "sound": not report.found_damage,
        "log_end_offset": report.log_end_offset,
        "segments_scanned": report.segments_scanned,
        "bytes_scanned": report.bytes_scanned,
        "dropped_bytes": report.dropped_bytes,
        "cuts": report.cuts,
        "quarantined": report.quarantined,
        "findings": finding_documents(report.findings),
        "repaired": report.repaired,
        "rebuilt": report.rebuilt,
        "notes": report.notes,
        "losses": loss_documents(report.losses),
        "readmitted": [
            {"source": source, "base_offset": first, "end_offset": end}
            for source, first, end in joined_ranges(report.readmitted)
        ],
        "held_back": [{"base_offset": first, "end_offset": end, "reason": why} for first, end, why in report.held_back],
    }
