"""`duramen runs`: what compaction did, newest first, and the receipt of each pass."""

from __future__ import annotations

import json
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.compact import reasons_text
from duramen.commands.options import OnlyTopics, Partition
from duramen.moments import moment_ms
from duramen.session import bad_usage, minutes_text, print_pairs, print_table, session, size_text, time_text
from duramen.tables import Wrong

if TYPE_CHECKING:
    from logstore.ledger.rows import RunRow

app = typer.Typer(
    help="What compaction did: its runs, newest first, and the receipt of each.",
    rich_markup_mode=None,
    add_completion=False,
)

_ID_SHOWN = 8
_SHOWN_MAX = 100


class Result(str, Enum):
    DONE = "done"
    FAILED = "failed"
    ABANDONED = "abandoned"
    RUNNING = "running"


@app.callback(invoke_without_command=True)
def list_(
    context: typer.Context,
    topic: OnlyTopics = None,
    partition: Partition = None,
    result: Annotated[
        list[Result] | None,
        typer.Option("--result", help="Only runs with this result; may be given again.", show_default=False),
    ] = None,
    since: Annotated[
        int | None,
        typer.Option(
            "--since", metavar="TIME", parser=moment_ms, help="Only runs that began since: -1d, …", show_default=False
        ),
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, help="At most this many, the newest.")] = 20,
) -> None:
    """List the runs, newest first. Of each partition the store keeps the newest receipts only."""
    if context.invoked_subcommand is not None:
        return
    if partition is not None and (topic is None or len(topic) != 1):
        raise bad_usage("--partition needs exactly one --topic")
    chosen = None if result is None else {each.value for each in result}
    with session.open_any() as store:
        for name in topic or ():
            store.topic(name)
        found = [
            each
            for each in store.maintenance().runs()
            if (not topic or each.topic in topic)
            and (partition is None or each.partition == partition)
            and (chosen is None or each.result in chosen)
            and (since is None or (each.started_ms or 0) >= since)
        ]
    newest = sorted(found, key=lambda each: each.started_ms or 0, reverse=True)
    documents = [run_document(each) for each in newest[:limit]]
    session.answer(
        {"runs": documents, "left_out": len(newest) - len(documents)}, lambda: _print(documents, len(newest))
    )


@app.command()
def show(
    run: Annotated[str, typer.Argument(metavar="RUN", help="A run's id, or the beginning of one.", show_default=False)],
) -> None:
    """Show the receipts of a run: of the pass with this id, or of all whose ids begin so, as those of one job do."""
    with session.open_any() as store:
        found = [each for each in store.maintenance().runs() if each.run_id.startswith(run)] if run else []
    exact = [each for each in found if each.run_id == run] or found[-_SHOWN_MAX:]
    documents = [run_document(each) for each in exact]

    def text() -> None:
        for number, document in enumerate(documents):
            if number:
                print()
            print_pairs(_pairs(document))

    if documents:
        session.answer({"runs": documents}, text)
        return
    from logstore.errors import UnknownRun

    raise UnknownRun(f"no run has an id that begins with {run!r}", hint="`duramen runs` lists them.")


def run_document(run: RunRow) -> dict[str, Any]:
    """A receipt as JSON."""
    try:
        details = json.loads(run.details or "{}")
    except ValueError:
        details = {}
    return {
        "run_id": run.run_id,
        "kind": run.kind,
        "topic": run.topic,
        "partition": run.partition,
        "engine": run.engine,
        "result": run.result,
        "reason": run.reason,
        "started_ms": run.started_ms,
        "ended_ms": run.ended_ms,
        "before_bytes": run.before_bytes,
        "after_bytes": run.after_bytes,
        "removed": dict(run.removed),
        "map_fill": run.map_fill,
        "seconds": run.seconds,
        "workers": list(run.workers),
        "airflow_run_id": run.airflow_run_id,
        "details": details,
    }


def _print(documents: list[dict[str, Any]], count: int) -> None:
    print_table(
        ["started", "partition", "result", "before", "after", "removed", "run"],
        [
            [
                minutes_text(each["started_ms"]),  # its seconds are in the receipt
                f"{each['topic']}-{each['partition']}" if each["topic"] else "-",
                _result(each["result"]),
                _size(each["before_bytes"]),
                _size(each["after_bytes"]),
                sum(each["removed"].values()) if each["result"] == Result.DONE.value else "-",
                each["run_id"][:_ID_SHOWN],
            ]
            for each in documents
        ],
    )
    if count > len(documents):
        print(f"{count - len(documents)} older ones are not shown; --limit shows more")


def _result(result: str) -> str:
    return Wrong(result) if result in (Result.FAILED.value, Result.ABANDONED.value) else result


def _size(size_bytes: int | None) -> str:
    return "-" if size_bytes is None else size_text(size_bytes)


def _pairs(document: dict[str, Any]) -> list[tuple[str, object]]:
    details = document["details"]
    seconds = document["seconds"]
    pairs: list[tuple[str, object]] = [
        ("run", document["run_id"]),
        ("partition", f"{document['topic']}-{document['partition']}"),
        ("result", document["result"]),
        ("why", document["reason"]),
        ("started", time_text(document["started_ms"])),
        ("ended", time_text(document["ended_ms"])),
        ("engine", document["engine"]),
    ]
    if document["airflow_run_id"]:
        pairs.append(("Airflow run", document["airflow_run_id"]))
    if document["result"] == Result.DONE.value:
        pairs += [
            ("before", size_text(document["before_bytes"] or 0)),
            ("after", size_text(document["after_bytes"] or 0)),
            ("removed", reasons_text(document["removed"])),
            ("seconds", "-" if seconds is None else f"{seconds:.2f}"),
            ("map fill", f"{document['map_fill'] or 0:.0%}"),
            ("workers", ", ".join(document["workers"])),
        ]
    pairs += [(name.replace("_", " "), value) for name, value in details.items() if not isinstance(value, dict)]
    return pairs
