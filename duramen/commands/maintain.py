"""`duramen maintain`: one run of maintenance over a store in a bucket, or one after the other."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.options import Topics
from duramen.session import DAMAGE, FAILED, count_text, print_table, session, size_text, stop

if TYPE_CHECKING:
    from logstore.bucket.maintaining import Maintained, MaintenanceRules


def maintain(
    topics: Topics = None,
    seal_all: Annotated[
        bool, typer.Option("--seal-all", help="Seal every tail now, not only long, old and large ones.")
    ] = False,
    compact: Annotated[bool, typer.Option("--compact/--no-compact", help="Compact what is due.")] = True,
    sweep: Annotated[
        bool, typer.Option("--sweep/--no-sweep", help="List the bucket and delete objects that no commit ever named.")
    ] = True,
    every: Annotated[
        float | None, typer.Option("--every", min=1, help="Run again and again, this many seconds apart.")
    ] = None,
) -> None:
    """Seal, retain, compact and clean up a store in a bucket. Several may run at once; exit 3: records were lost."""
    from logstore.bucket.maintaining import MaintenanceRules
    from logstore.bucket.sealing import SealRules

    rules = MaintenanceRules(seal=SealRules(force=seal_all), compact=compact, sweep=sweep, topics=tuple(topics or ()))
    while True:
        done = _run(rules)
        session.answer(_document(done), lambda done=done: _print(done))  # type: ignore[misc]
        if every is None:
            break
        time.sleep(every)
    if done.lost_records:
        stop(DAMAGE)
    if done.failed:
        stop(FAILED)


def _run(rules: MaintenanceRules) -> Maintained:
    from logstore.bucket.maintaining import maintain as run

    with session.open_bucket() as store:
        for name in rules.topics:
            store.topic(name)
        return run(store, rules)


def _document(done: Maintained) -> dict[str, Any]:
    return {
        "sealed": [
            {
                "topic": each.partition.topic,
                "partition": each.partition.partition,
                "from_offset": each.from_offset,
                "end_offset": each.end_offset,
                "commits": each.commits,
                "segments": len(each.segments),
                "size_bytes": sum(segment.log_bytes for segment in each.segments),
            }
            for each in done.sealed
        ],
        "retained": [
            {
                "topic": each.partition.topic,
                "partition": each.partition.partition,
                "log_start_offset": each.log_start_offset,
            }
            for each in done.retained
        ],
        "compacted": [
            {
                "topic": each.plan.topic,
                "partition": each.plan.partition,
                "run_id": each.run_id,
                "before_bytes": each.report.before_bytes,
                "after_bytes": each.report.after_bytes,
                "removed": each.report.removed,
                "first_dirty_offset": each.report.end_offset,
            }
            for each in done.compacted
            if each.report is not None
        ],
        "lost": [
            {
                "topic": lost.partition.topic,
                "partition": lost.partition.partition,
                "base_offset": lost.base_offset,
                "end_offset": lost.end_offset,
                "reason": lost.reason,
                "kept": lost.quarantine,
            }
            for each in done.sealed
            for lost in each.lost
        ],
        "garbage": done.garbage,
        "plans": done.plans,
        "pruned": done.pruned,
        "commits": done.commits,
        "swept": len(done.swept),
        "failed": [{"what": what, "error": str(error)} for what, error in done.failed],
    }


def _print(done: Maintained) -> None:
    rows = [
        [
            each.partition,
            "sealed",
            count_text(each.commits, "commit"),
            size_text(sum(s.log_bytes for s in each.segments)),
        ]
        for each in done.sealed
    ]
    rows += [[each.partition, "retained", f"log start {each.log_start_offset}", ""] for each in done.retained]
    rows += [
        [each.plan.name, "compacted", f"to {size_text(each.report.after_bytes)}", size_text(each.report.written_bytes)]
        for each in done.compacted
        if each.report is not None
    ]
    rows += [
        [lost.partition, "lost", f"offsets {lost.base_offset} to {lost.end_offset}", lost.reason]
        for each in done.sealed
        for lost in each.lost
    ]
    rows += [[what, "failed", str(error), ""] for what, error in done.failed]
    if rows:
        print_table(["partition", "what", "how much", "written"], rows)
    else:
        print("No partition had anything to seal, retain or compact")
    print(
        f"Deleted {count_text(done.garbage, 'replaced segment')}, the staged files of "
        f"{count_text(done.plans, 'batch', 'batches')}, {count_text(len(done.swept), 'orphan')}, "
        f"{count_text(done.commits, 'commit file')}; the ledger forgot {count_text(done.pruned, 'row')}"
    )
