"""`duramen verify`, `recover`, `retain` and `delete-records`: looking after partitions."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.health import examined, print_store, store_document
from duramen.commands.offsets import Topics, chosen_topics
from duramen.losses import loss_documents, loss_text, print_losses
from duramen.session import DAMAGE, bad_usage, key_values, print_table, session, size_text, stop

if TYPE_CHECKING:
    from logstore.directory.finding import StoreReport
    from logstore.store import LogStore
    from logstore.topics.registry import Topic
    from logstore.upkeep.maintenance import Recovery, RecoveryLedger
    from logstore.upkeep.strays import Stray
    from logstore.upkeep.topic_repair import TopicRepair
    from logstore.upkeep.verify import Verification

Partition = Annotated[int | None, typer.Option("--partition", min=0, help="Only this partition.", show_default=False)]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")]


def _readable(store: LogStore) -> list[Topic]:
    from logstore.upkeep.strays import readable_topics

    return readable_topics(store)[0]


def _partitions(
    store: LogStore, names: list[str] | None, partition: int | None, *, tolerant: bool = False
) -> list[tuple[Topic, int]]:
    """Unless `tolerant`, a topic whose file is damaged is an error."""
    if partition is not None and (not names or len(names) != 1):
        raise bad_usage("--partition needs exactly one topic")
    found = []
    for topic in _readable(store) if tolerant and not names else chosen_topics(store, names):
        numbers = range(topic.partitions) if partition is None else [topic.partition(partition).partition]
        found += [(topic, number) for number in numbers]
    return found


# --- verify --------------------------------------------------------------------------------------------------------


def verify(topics: Topics = None, partition: Partition = None) -> None:
    """Check every committed byte: checksums, order, indexes, segment lists, the ledger. Changes nothing; exit 3 on
    damage.
    """
    from logstore.upkeep.strays import find_strays

    with session.open() as store:
        whole = examined(store)
        strays = find_strays(store, topics)
        results = _verify_all(store, _partitions(store, topics, partition, tolerant=True))
    _answer_verify(results, strays, {}, whole)
    if not whole.sound or strays or not all(result.sound for result in results):
        stop(DAMAGE)


def _verify_all(store: LogStore, partitions: list[tuple[Topic, int]]) -> list[Verification]:
    from logstore.upkeep.verify import verify_partition

    total = sum(
        segment.size_bytes for topic, number in partitions for segment in _state_or_nothing(store, topic, number)
    )
    results = []
    with session.progress("verifying", total) as step:
        for topic, number in partitions:
            try:
                high_watermark = store.high_watermark(topic, number)
                damage = None
            except _damage() as error:
                high_watermark, damage = 0, error
            result = verify_partition(
                store.fs,
                store.layout.partition(topic.partition(number)),
                partition=topic.partition(number),
                topic_id=topic.id,
                state_path=store.layout.partition_state(topic.id, number),
                high_watermark=high_watermark,
                limits=store.limits,
                progress=step,
            )
            if damage is not None:
                from logstore.directory.finding import Finding

                result.findings.append(Finding(damage.what, damage.file, damage.position, damage.offset))
            results.append(result)
    return results


def _damage() -> Any:
    from logstore.errors import CorruptState

    return CorruptState


def _state_or_nothing(store: LogStore, topic: Topic, number: int) -> Any:
    try:
        return store.partition_state(topic, number).segments
    except _damage():
        return ()


def _damaged(result: Verification) -> str:
    return f"DAMAGED, {len(result.findings)} findings"


def _unplaced(results: list[Verification]) -> dict[str, list[int]]:
    """By topic, the partitions that a creation or widening did not get to."""
    found: dict[str, list[int]] = {}
    for result in results:
        if result.unplaced:
            found.setdefault(result.partition.topic, []).append(result.partition.partition)
    return found


def _stray(stray: Stray) -> dict[str, Any]:
    return {
        "kind": stray.kind.value,
        "what": stray.what,
        "file": stray.file,
        "topic": stray.name,
        "partition": stray.partition,
        "topic_id": stray.topic_id,
    }


def _answer_verify(results: list[Verification], strays: list[Stray], more: dict[str, Any], whole: StoreReport) -> None:
    documents = [
        {
            "topic": result.partition.topic,
            "partition": result.partition.partition,
            "sound": result.sound,
            "segments": result.segments,
            "batches": result.batches,
            "size_bytes": result.size_bytes,
            "findings": [
                {"what": each.what, "file": each.file, "position": each.position, "offset": each.offset}
                for each in result.findings
            ],
            "losses": loss_documents(result.losses),
            "unplaced": result.unplaced,
        }
        for result in results
    ]

    def text() -> None:
        print_table(
            ["partition", "segments", "batches", "size", "result"],
            [
                [
                    result.partition,
                    result.segments,
                    result.batches,
                    size_text(result.size_bytes),
                    "not made yet" if result.unplaced else "sound" if result.sound else _damaged(result),
                ]
                for result in results
            ],
        )
        for result in results:
            for each in result.findings:
                places = [
                    f"{name} {value}"
                    for name, value in (("file", each.file), ("position", each.position), ("offset", each.offset))
                    if value is not None
                ]
                print(f"{result.partition}: {each.what}" + (f" ({', '.join(places)})" if places else ""))
            print_losses(str(result.partition), result.losses)
        for name, numbers in _unplaced(results).items():
            named = ", ".join(map(str, numbers[:10])) + (f" and {len(numbers) - 10} more" if len(numbers) > 10 else "")
            print(
                f"{name}: not made yet, partitions {named}: a process died while it created or widened the topic. "
                "No record is missing; the first write or `duramen recover` makes them."
            )
        for stray in strays:
            print(f"{stray.what} (file {stray.file})")
        for topic in more.get("topics", ()):
            for note in topic["notes"]:
                print(f"{topic['name']}: {note}")
        print_store(whole)

    sound = whole.sound and not strays and all(result.sound for result in results)
    document = {
        **more,
        "sound": sound,
        "store": store_document(whole),
        "partitions": documents,
        "strays": list(map(_stray, strays)),
    }
    session.answer(document, text)


# --- recover -------------------------------------------------------------------------------------------------------


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
    from logstore.directory.identity import restore_identity
    from logstore.files import OS_FILES
    from logstore.upkeep.maintenance import RecoveryLedger
    from logstore.upkeep.repair import repair, restore_version
    from logstore.upkeep.side_files import restore_side_files
    from logstore.upkeep.strays import find_strays
    from logstore.upkeep.topic_repair import repair_partition, repair_topics

    whole = restore_version(OS_FILES, session.path, dry_run=dry_run)
    if dry_run and not whole.sound:  # nothing more can be looked at without it
        _answer_verify([], [], {"recovered": False}, whole)
        stop(DAMAGE)
    with session.open() as store:
        strays = find_strays(store, topics)
        # Indexes are rebuilt without a question: only a look before tells that they were damaged.
        looked = _verify_all(store, _readable_partitions(store, topics, partition, dry_run=True))
        repairs = repair_topics(store, topics, configs=key_values(topic_config, "--topic-config"), dry_run=dry_run)
        whole.add(restore_identity(store.fs, store.layout, dry_run=dry_run))
        whole.add(restore_side_files(store, dry_run=dry_run))
        whole.add(repair(store, dry_run=dry_run))
        partitions = _readable_partitions(store, topics, partition, dry_run=dry_run)
        # Nothing is given up by this, so nobody is asked; what comes after looks at whole files.
        repaired = {
            topic.partition(number): repair_partition(store, topic, number, dry_run=dry_run)
            for topic, number in partitions
        }
        ledger = RecoveryLedger(store)
        reports = _recover_all(store, partitions, ledger, readmit=readmit, dry_run=True)
        if not dry_run:
            lost = [(report.partition, loss) for report in reports for loss in report.losses]
            if lost:
                if not session.json:
                    _recovery_text(reports, dry_run=True)
                session.confirm(_question([(str(where), loss_text(loss)) for where, loss in lost]), yes=yes)
            reports = _recover_all(store, partitions, ledger, readmit=readmit, dry_run=False, agreed=reports)
            store.project_checkpoints()
    for report in reports if not dry_run else ():
        report.repaired += repaired[report.partition]
    found = {result.partition: result.findings for result in looked}
    for report in reports:
        report.findings += found.get(report.partition, ())
    damaged = bool(repairs or strays) or not whole.sound or any(report.found_damage for report in reports)

    def text() -> None:
        _recovery_text(reports, dry_run=dry_run)
        for each in repairs:
            for note in each.notes:
                print(f"{each.name}: {note}")
        for stray in strays:
            print(f"{stray.what} (file {stray.file})")
        print_store(whole)

    document = {
        "recovered": not dry_run,
        "sound": not damaged,
        "store": store_document(whole),
        "partitions": [_recovery(report) for report in reports],
        "topics": list(map(_repair, repairs)),
        "strays": list(map(_stray, strays)),
    }
    session.answer(document, text)
    if damaged:
        stop(DAMAGE)


def _readable_partitions(
    store: LogStore, names: list[str] | None, partition: int | None, *, dry_run: bool
) -> list[tuple[Topic, int]]:
    """Without those of topics that are only going to be brought back."""
    if dry_run and names:
        found = {topic.name for topic in _readable(store)}
        names = [name for name in names if name in found]
        if not names:
            return []
    return _partitions(store, names, partition, tolerant=True)


def _recover_all(
    store: LogStore,
    partitions: list[tuple[Topic, int]],
    ledger: RecoveryLedger,
    *,
    readmit: bool,
    dry_run: bool,
    agreed: list[Recovery] | None = None,
) -> list[Recovery]:
    from logstore.upkeep.maintenance import recover as recover_topic

    allowed = None if agreed is None else {report.partition: report.losses for report in agreed}
    reports: list[Recovery] = []
    with session.progress("looking" if dry_run else "recovering", len(partitions)) as step:
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


def _recovery_text(reports: list[Recovery], *, dry_run: bool) -> None:
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
        title="Would recover" if dry_run else None,
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


def joined_ranges(found: list[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """Neighbouring ranges of one source as one."""
    out: list[tuple[str, int, int]] = []
    for source, first, end in sorted(found):
        if out and (out[-1][0], out[-1][2]) == (source, first):
            out[-1] = (source, out[-1][1], end)
        else:
            out.append((source, first, end))
    return out


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
        "findings": [
            {"what": each.what, "file": each.file, "position": each.position, "offset": each.offset}
            for each in report.findings
        ],
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


# --- retain --------------------------------------------------------------------------------------------------------


def retain(
    topics: Topics = None,
    partition: Partition = None,
    now_ms: Annotated[
        int | None,
        typer.Option("--now-ms", metavar="MS", min=0, help="Decide as if it were this time.", show_default="now"),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Delete segments that retention.ms, retention.bytes or the log start give up."""
    with session.open() as store:
        from logstore.directory.shared_clock import doubt_of
        from logstore.upkeep.maintenance import flush_before_retention
        from logstore.upkeep.maintenance import retain as retain_partition

        partitions = _partitions(store, topics, partition)
        doubt = doubt_of(store.clock) if now_ms is None else None
        now_ms = store.clock.now_ms() if now_ms is None else now_ms
        results = []
        if not dry_run:
            for topic in {topic.id: topic for topic, _ in partitions}.values():
                flush_before_retention(store, topic)
        with session.progress("retaining", len(partitions)) as step:
            for topic, number in partitions:
                found = retain_partition(store, topic, number, now_ms=now_ms, dry_run=True)
                if not dry_run and found.passes:
                    found = retain_partition(store, topic, number, now_ms=now_ms)
                elif not dry_run:
                    store.sweep_deleted(topic, number, now_ms=now_ms)
                results.append(found)
                step(1)
        unknown = {topic.name for topic, _ in partitions if topic.settings_unknown}
        if not dry_run:
            store.sweep()
            store.project_checkpoints()
    documents = [
        {
            "topic": result.partition.topic,
            "partition": result.partition.partition,
            "log_start_offset": result.log_start_offset,
            "settings_unknown": result.partition.topic in unknown,
            "deleted": [
                {"policy": each.policy, "base_offsets": list(each.base_offsets), "size_bytes": each.size_bytes}
                for each in result.passes
            ],
        }
        for result in results
    ]

    def text() -> None:
        if doubt:
            print(doubt, file=sys.stderr)
        print_table(
            ["partition", "log start", "would delete" if dry_run else "deleted", "size", "because of"],
            [
                [
                    result.partition,
                    result.log_start_offset,
                    f"{sum(len(each.base_offsets) for each in result.passes)} segments",
                    size_text(sum(each.size_bytes for each in result.passes)),
                    ", ".join(each.policy for each in result.passes)
                    or ("- (settings unknown)" if result.partition.topic in unknown else "-"),
                ]
                for result in results
            ],
        )

    document = {"now_ms": now_ms, "dry_run": dry_run, "clock": doubt, "partitions": documents}
    session.answer(document, text)


# --- delete-records ------------------------------------------------------------------------------------------------


def delete_records(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False)],
    partition: Annotated[int, typer.Option("--partition", min=0, help="The partition.", show_default=False)],
    before_offset: Annotated[
        str,
        typer.Option(
            "--before-offset",
            metavar="N|latest",
            help="The first offset that stays; latest deletes all there are.",
            show_default=False,
        ),
    ],
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Delete the records of a partition below an offset."""
    if before_offset != "latest" and not (
        before_offset.isascii() and before_offset.isdigit() and len(before_offset) <= 19
    ):
        raise bad_usage(f"--before-offset takes a number or latest, not {before_offset!r}")
    with session.open() as store:
        from logstore.upkeep import maintenance

        found = store.topic(topic)
        target = None if before_offset == "latest" else int(before_offset)
        # The dry run checks the range, so that nobody is asked about something impossible.
        result = maintenance.delete_records(store, found, partition, before_offset=target, dry_run=True)
        if not dry_run:
            session.confirm(
                f"Delete the records of {result.partition} from {result.log_start_offset_before} "
                f"up to (not including) {result.log_start_offset}?",
                yes=yes,
            )
            result = maintenance.delete_records(store, found, partition, before_offset=result.log_start_offset)
            store.project_checkpoints()
    document = {
        "topic": topic,
        "partition": partition,
        "log_start_offset_before": result.log_start_offset_before,
        "log_start_offset": result.log_start_offset,
        "deleted": not dry_run,
    }
    verb = "would move" if dry_run else "moved"
    session.answer(
        document,
        lambda: print(
            f"{result.partition}: log start {verb} from {result.log_start_offset_before} to {result.log_start_offset}"
        ),
    )
