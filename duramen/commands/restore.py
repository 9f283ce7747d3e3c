"""`duramen restore`: the latest value of every key of a topic, now or as of a moment, as JSON lines or as Parquet."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.consume import text_of
from duramen.commands.options import Encoding, OneTopic
from duramen.losses import loss_documents, loss_text
from duramen.moments import moment_ms
from duramen.session import bad_usage, file_path, session
from duramen.terminal import json_text

if TYPE_CHECKING:
    import pyarrow as pa

    from logstore.commit.store_face import Store
    from logstore.restore.restore import RestorePlan

Write = Callable[["pa.RecordBatch"], None]


class Format(str, Enum):
    JSONL = "jsonl"
    PARQUET = "parquet"


def restore(
    topic: OneTopic,
    as_of_offsets: Annotated[
        str | None,
        typer.Option(
            "--as-of-offsets",
            metavar="JSON",
            help='The state below these offsets: {"0": 23, "1": 42}, one for each partition.',
            show_default=False,
        ),
    ] = None,
    as_of_timestamp: Annotated[
        int | None,
        typer.Option(
            "--as-of-timestamp",
            metavar="TIME",
            parser=moment_ms,
            help="The state before the first record that is later than this time.",
            show_default=False,
        ),
    ] = None,
    output_file: Annotated[
        str, typer.Option("--output-file", metavar="FILE|-", help="Where rows go; - is standard output.")
    ] = "-",
    format_: Annotated[
        Format, typer.Option("--format", help="One JSON object a line, or a Parquet file.")
    ] = Format.JSONL,
    encoding: Annotated[
        Encoding, typer.Option("--encoding", help="How keys and values are written in JSON.")
    ] = Encoding.UTF8,
    allow_thinned: Annotated[
        bool, typer.Option("--allow-thinned", help="Accept what compaction left, where the exact state is gone.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show what would be read, and how; read nothing.")] = False,
) -> None:
    """Print the latest value of every key, now or as of a moment, or write it to a file. Deleted keys are left out."""
    from logstore.restore.restore import restore as restored

    if as_of_offsets is not None and as_of_timestamp is not None:
        raise bad_usage("--as-of-offsets and --as-of-timestamp exclude each other")
    if format_ is Format.PARQUET and output_file == "-" and not dry_run:
        raise bad_usage("Parquet is not for standard output: give --output-file FILE")
    folder = os.path.dirname(file_path(output_file))
    if folder and not os.path.isdir(folder):
        raise bad_usage(f"--output-file {output_file}: there is no directory {folder}")
    rows = 0
    with session.open_any() as store:
        plan = _plan(store, topic, as_of_offsets, as_of_timestamp, allow_thinned=allow_thinned)
        if not dry_run:
            opened = _parquet(output_file) if format_ is Format.PARQUET else _lines(output_file, encoding)
            with session.progress(f"restoring {topic}", plan.offsets, unit="offsets") as step, opened as write:
                for batch in restored(store, plan, progress=step):
                    write(batch)
                    rows += batch.num_rows
    document: dict[str, Any] = {
        "topic": topic,
        "rows": None if dry_run else rows,
        "end_offsets": {str(number): end for number, end in enumerate(plan.end_offsets)},
        "by_partition": plan.by_partition,
        "losses": _losses(plan),
        "plan": plan.explain(),
        "file": None if dry_run or output_file == "-" else os.path.abspath(output_file),
        "restored": not dry_run,
    }
    if dry_run or output_file != "-":
        session.answer(document, lambda: print(plan.explain() if dry_run else f"restored {rows} keys of {topic}"))
    elif not session.json:  # stdout has the rows
        print(f"restored {rows} keys of {topic}", file=sys.stderr)
    _warn_of_losses(topic, document["losses"])


def _warn_of_losses(topic: str, losses: list[dict[str, Any]]) -> None:
    for each in losses:
        name = f"{topic}-{each['partition']}"
        print(f"{name}: {loss_text(each)} were lost to damage: older values may show", file=sys.stderr)


def _losses(plan: RestorePlan) -> list[dict[str, Any]]:
    return [
        {"partition": number, **each} for number, losses in enumerate(plan.losses) for each in loss_documents(losses)
    ]


def _plan(
    store: Store, topic: str, as_of_offsets: str | None, as_of_timestamp: int | None, *, allow_thinned: bool
) -> RestorePlan:
    from logstore.errors import DuramenError
    from logstore.restore.restore import plan_restore

    try:
        return plan_restore(
            store,
            topic,
            as_of_offsets=None if as_of_offsets is None else _offsets(as_of_offsets),
            as_of_timestamp_ms=as_of_timestamp,
            allow_thinned=allow_thinned,
        )
    except DuramenError as error:  # the names of options, not of Python's arguments
        hint = (error.hint or "").replace("allow_thinned=True", "--allow-thinned")
        error.reworded(error.what.replace("as_of_offsets", "--as-of-offsets")).with_hint(hint)
        raise


def _offsets(text: str) -> dict[int, int]:
    example = '{"0": 23, "1": 42}'
    try:
        found = {int(number): offset for number, offset in json.loads(text).items()}
    except (ValueError, AttributeError, TypeError, RecursionError):
        raise bad_usage(f"--as-of-offsets is not JSON of the form {example}") from None
    if any(type(offset) is not int for offset in found.values()):
        raise bad_usage(f"--as-of-offsets has an offset that is not a whole number; expected {example}")
    return found


@contextlib.contextmanager
def _lines(path: str, encoding: Encoding) -> Iterator[Write]:
    text = text_of(encoding)
    with contextlib.ExitStack() as opened:
        out = sys.stdout if path == "-" else open(opened.enter_context(_whole(path)), "w", encoding="utf-8")  # noqa: SIM115
        if path != "-":
            opened.callback(out.close)

        def write(batch: pa.RecordBatch) -> None:
            times = batch.column("timestamp").cast("int64").to_pylist()
            for row, micros in zip(batch.drop_columns(["timestamp"]).to_pylist(), times, strict=True):
                document = {
                    "partition": row["partition"],
                    "offset": row["offset"],
                    "timestamp": micros // 1000,
                    "key": text(row["key"], "key", row["offset"]),
                    "value": text(row["value"], "value", row["offset"]),
                }
                out.write(json_text(document) + "\n")

        yield write


@contextlib.contextmanager
def _parquet(path: str) -> Iterator[Write]:
    import pyarrow.parquet as pq

    from logstore.restore.restore import RESTORED

    with _whole(path) as draft, pq.ParquetWriter(draft, RESTORED) as writer:
        yield writer.write_batch


@contextlib.contextmanager
def _whole(path: str) -> Iterator[str]:
    """A file that has its name only once it is complete."""
    draft = f"{path}.part"
    try:
        yield draft
        os.replace(draft, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        raise
