"""`duramen retain` and `duramen delete-records`: records go from the beginning of partitions."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.options import DryRun, NowMs, OneTopic, Partition, Topics, chosen_partitions
from duramen.session import bad_usage, print_table, session, size_text

if TYPE_CHECKING:
    from logstore.partition.retention import DeletedRecords, Retention
    from logstore.store import LogStore
    from logstore.topics.registry import Topic


def retain(topics: Topics = None, partition: Partition = None, now_ms: NowMs = None, dry_run: DryRun = False) -> None:
    """Delete segments that retention.ms, retention.bytes or the log start give up."""
    from logstore.directory.shared_clock import clock_warning

    if session.is_in_bucket:
        return _retain_bucket(topics, partition, now_ms, dry_run=dry_run)
    with session.open() as store:
        partitions = chosen_partitions(store, topics, partition)
        doubt = clock_warning(store.clock) if now_ms is None else None
        now_ms = store.clock.now_ms() if now_ms is None else now_ms
        results = _retain_all(store, partitions, now_ms, dry_run=dry_run)
        unknown = {topic.name for topic, _ in partitions if topic.settings_unknown}
        if not dry_run:
            store.sweep()
            store.project_checkpoints()
    documents = [_document(result, unknown) for result in results]
    document = {"now_ms": now_ms, "dry_run": dry_run, "clock": doubt, "partitions": documents}
    session.answer(document, lambda: _print(results, unknown, doubt, dry_run=dry_run))


def _retain_bucket(topics: list[str] | None, partition: int | None, now_ms: int | None, *, dry_run: bool) -> None:
    """The same of a store in a bucket; what goes is deleted by `duramen maintain`, after a day."""
    from logstore.bucket.maintaining import retain

    with session.open_bucket() as store:
        partitions = chosen_partitions(store, topics, partition)
        unknown = {topic.name for topic, _ in partitions if topic.settings_unknown}
        results = retain(store, partitions, now_ms=now_ms, dry_run=dry_run)
        at_ms = store.clock.now_ms() if now_ms is None else now_ms
    documents = [_document(result, unknown) for result in results]
    document = {"now_ms": at_ms, "dry_run": dry_run, "clock": None, "partitions": documents}
    session.answer(document, lambda: _print(results, unknown, None, dry_run=dry_run))


def _retain_all(store: LogStore, partitions: list[tuple[Topic, int]], now_ms: int, *, dry_run: bool) -> list[Retention]:
    from logstore.upkeep.retention import flush_before_retention
    from logstore.upkeep.retention import retain as retain_partition

    results = []
    if not dry_run:
        for topic in {topic.id: topic for topic, _ in partitions}.values():
            flush_before_retention(store, topic)
    with session.progress("retaining", len(partitions), unit="partitions") as step:
        for topic, number in partitions:
            found = retain_partition(store, topic, number, now_ms=now_ms, dry_run=True)
            if not dry_run and found.passes:
                found = retain_partition(store, topic, number, now_ms=now_ms)
            elif not dry_run:
                store.sweep_deleted(topic, number, now_ms=now_ms)
            results.append(found)
            step(1)
    return results


def _document(result: Retention, unknown: set[str]) -> dict[str, Any]:
    return {
        "topic": result.partition.topic,
        "partition": result.partition.partition,
        "log_start_offset": result.log_start_offset,
        "settings_unknown": result.partition.topic in unknown,
        "deleted": [
            {"policy": each.policy, "base_offsets": list(each.base_offsets), "size_bytes": each.size_bytes}
            for each in result.passes
        ],
    }


def _print(results: list[Retention], unknown: set[str], doubt: str | None, *, dry_run: bool) -> None:
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


def _delete(store: Any, topic: Topic, number: int, before_offset: int | None, *, dry_run: bool) -> DeletedRecords:
    if session.is_in_bucket:
        from logstore.bucket.maintaining import delete_up_to

        return delete_up_to(store, topic, number, before_offset=before_offset, dry_run=dry_run)
    from logstore.upkeep import retention

    done = retention.delete_records(store, topic, number, before_offset=before_offset, dry_run=dry_run)
    if not dry_run:
        store.project_checkpoints()
    return done


def delete_records(
    topic: OneTopic,
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
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Delete the records of a partition below an offset."""
    if before_offset != "latest" and not (
        before_offset.isascii() and before_offset.isdigit() and len(before_offset) <= 19
    ):
        raise bad_usage(f"--before-offset takes a number or latest, not {before_offset!r}")
    with session.open_any() as store:
        found = store.topic(topic)
        target = None if before_offset == "latest" else int(before_offset)
        # The dry run checks the range, so that nobody is asked about something impossible.
        result = _delete(store, found, partition, target, dry_run=True)
        if not dry_run:
            session.confirm(
                f"Delete the records of {result.partition} from {result.log_start_offset_before} "
                f"up to (not including) {result.log_start_offset}?",
                yes=yes,
            )
            result = _delete(store, found, partition, result.log_start_offset, dry_run=False)
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
