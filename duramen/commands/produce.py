"""`duramen produce`: records in, one JSON object a line, or a key and a value."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.options import Encoding, OneTopic
from duramen.commands.produce_lines import LineReader, Row, key_value_lines, table_of
from duramen.session import bad_usage, count_text, session, size_text
from logstore.errors import AppendTooLarge, DuramenError, InvalidRecord, InvalidTimestamp, RecordTooLarge

if TYPE_CHECKING:
    from logstore.commit.apps import AppBatch
    from logstore.commit.committer import Committed
    from logstore.commit.driver import Commits


KeySeparator = Annotated[
    str | None,
    typer.Option(
        "--key-separator",
        "-K",
        metavar="TEXT",
        help="Lines are KEY TEXT VALUE, not JSON: -K : takes key:value.",
        show_default=False,
    ),
]
NullMarker = Annotated[
    str | None,
    typer.Option(
        "--null-marker",
        metavar="TEXT",
        help="With --key-separator: a value that is this text is a tombstone.",
        show_default=False,
    ),
]
Properties = Annotated[
    list[str] | None,
    typer.Option(
        "--property",
        metavar="NAME=VALUE",
        help="As of Kafka's console producer: parse.key=true, key.separator=:, null.marker=…",
        show_default=False,
    ),
]


def produce(
    topic: OneTopic,
    file: Annotated[str, typer.Argument(metavar="[FILE|-]", help="One JSON object a line; - is standard input.")] = "-",
    encoding: Annotated[Encoding, typer.Option("--encoding", help="How keys and values are written.")] = Encoding.UTF8,
    compression: Annotated[
        str, typer.Option("--compression", help="none, gzip, snappy, lz4 or zstd, where the topic leaves the choice.")
    ] = "none",
    app_id: Annotated[
        str | None,
        typer.Option(
            "--app-id",
            metavar="NAME",
            help="Remember under this name how far the file was appended; the next run continues there.",
            show_default=False,
        ),
    ] = None,
    from_line: Annotated[
        int, typer.Option("--from-line", metavar="N", min=1, help="Begin at this line of the file.")
    ] = 1,
    key_separator: KeySeparator = None,
    null_marker: NullMarker = None,
    property_: Properties = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every line, append nothing.")] = False,
) -> None:
    """Append records, one JSON object a line: {"key", "value" or null, "timestamp"?, "headers"?, "partition"?}; or
    with --key-separator a key and a value a line.

    Up to 100,000 lines are appended at once, all or none of them. When a later line is wrong, the error says which
    lines are appended already, and --from-line or --app-id continue after them.
    """
    _check_options(compression, app_id, from_line)
    pairs = key_value_lines(key_separator, null_marker, property_)
    with session.open_any() as store, _lines(file) as lines:
        store.topic(topic)
        if not dry_run:
            store.check_writable()
        committer = None if dry_run else store.commits()
        reading = LineReader(lines, file, encoding, pairs)
        progress = None if committer is None or app_id is None else Progress.of(committer, app_id)
        if progress is not None:
            progress.skip(reading, file)
        else:
            reading.skip(from_line - 1)
        so_far = SoFar(file, topic, reading.number + 1, reading.number, app_id is not None)
        if not dry_run:
            so_far.note()
        note = lambda: f"{so_far.records:,} records"  # noqa: E731
        with session.progress(f"producing {topic}", size_of(lines), done=lambda: reading.size_bytes, note=note):
            for rows in reading.chunks():
                if committer is not None:
                    done = _append(committer, rows, reading, progress, so_far, compression)
                    committer.tidy(done)  # not all of a large file has to lie in staging
                    so_far.appended(done, reading.number)
                so_far.records += len(rows)
        if committer is not None and so_far.end_offsets:
            committer.finish(topic)
    _answer(so_far, reading.number, dry_run=dry_run)


def _check_options(compression: str, app_id: str | None, from_line: int) -> None:
    from logstore.records.compression import codec_by_name

    if app_id is not None and from_line != 1:
        raise bad_usage("--app-id and --from-line exclude each other: the app id knows from which line to go on")
    if app_id is not None and not app_id.strip():
        raise bad_usage("--app-id is empty; give the file's appends a name")
    try:
        codec_by_name(compression)
    except DuramenError:
        raise bad_usage(f"--compression is {compression!r}; use none, gzip, snappy, lz4 or zstd") from None


def _append(
    committer: Commits[Any], rows: list[Row], reading: LineReader, progress: Progress | None, so_far: SoFar, codec: str
) -> Committed:
    """Append all of the rows or none."""
    from logstore.commit.produce import append_table
    from logstore.commit.staging import EncodeOptions

    app = None if progress is None else progress.batch(reading)
    options = EncodeOptions(compression_type=codec)
    try:
        done = append_table(committer, so_far.topic, table_of(rows), options=options, app=app)
    except DuramenError as error:
        _name_line(error, rows)
        raise
    except KeyboardInterrupt:
        so_far.note(under_way=reading.number)
        raise
    if progress is not None and app is not None:
        progress.committed(app)
    return done


def _answer(so_far: SoFar, last_line: int, *, dry_run: bool) -> None:
    document: dict[str, Any] = {
        "topic": so_far.topic,
        "records": so_far.records,
        "bytes": so_far.size_bytes,
        "end_offsets": {str(number): end for number, end in enumerate(so_far.end_offsets)},
        "lines": {"from": so_far.first, "to": last_line},
        "dry_run": dry_run,
    }
    verb = "Would append" if dry_run else "Appended"
    size = "" if dry_run else f" ({size_text(so_far.size_bytes)})"
    skipped = f"; lines 1 to {so_far.first - 1} were skipped" if so_far.first > 1 else ""
    text = f"{verb} {count_text(so_far.records, 'record')} to {so_far.topic}{size}{skipped}"
    session.answer(document, lambda: print(text))


@dataclass(slots=True)
class SoFar:
    """What the command has done so far."""

    file: str
    topic: str
    first: int
    last: int
    has_app: bool
    records: int = 0
    size_bytes: int = 0
    end_offsets: Sequence[int] = ()

    def appended(self, done: Committed, last_line: int) -> None:
        self.size_bytes += done.bytes
        self.end_offsets = done.topics[self.topic].end_offsets
        self.last = last_line
        self.note()

    def note(self, under_way: int | None = None) -> None:
        """`under_way` is the last line of an append that has begun, and may be committed or not."""
        name = "standard input" if self.file == "-" else self.file
        some = self.last >= self.first
        text = f"Lines {self.first} to {self.last} of {name} are appended" if some else f"No line of {name} is appended"
        if under_way is not None:
            text += f"; lines {self.last + 1} to {under_way} were under way, and are all there or not at all"
        next_ = "run the same command again" if self.has_app else f"go on with --from-line {self.last + 1}"
        if under_way is not None and not self.has_app:
            next_ = f"`duramen offsets {self.topic}` tells, then {next_}, or {under_way + 1}"
        session.so_far = f"{text}: {next_}." if some or under_way is not None else f"{text}."
        session.done = {
            "topic": self.topic,
            "lines_appended": {"from": self.first, "to": self.last} if some else None,
            "lines_unsure": None if under_way is None else {"from": self.last + 1, "to": under_way},
        }


def _name_line(error: DuramenError, rows: list[Row]) -> None:
    """Lines of the file are what the user knows, not rows of a commit."""
    from logstore.commit.produce import row_renamed

    if error.row is not None:
        error.reworded(row_renamed(error, f"line {rows[error.row].line}"))
    elif isinstance(error, (InvalidRecord, RecordTooLarge, AppendTooLarge, InvalidTimestamp)):
        error.reworded(f"lines {rows[0].line} to {rows[-1].line}: {error.what}")


def _lines(file: str) -> IO[bytes]:
    if file == "-":
        return open(sys.stdin.fileno(), "rb", closefd=False)
    return open(file, "rb")


def size_of(lines: IO[bytes]) -> int | None:
    """Bytes of a regular file; a pipe does not tell."""
    found = os.fstat(lines.fileno())
    return found.st_size if stat.S_ISREG(found.st_mode) else None


class Progress:
    """How far a file was appended under an app id. The ledger has it with each commit: lines, and their digest."""

    _TEXT = re.compile(r"lines 1-([0-9]{1,18}) ([0-9a-f]{64})")

    def __init__(self, app_id: str, query_id: str | None, batch_id: int) -> None:
        self._app_id = app_id
        self._query_id = query_id
        self._batch_id = batch_id

    @classmethod
    def of(cls, committer: Commits[Any], app_id: str) -> Progress:
        last = committer.last_batch(app_id)
        return cls(app_id, None, -1) if last is None else cls(app_id, last.query_id, last.batch_id)

    def skip(self, reading: LineReader, file: str) -> None:
        """Read past what is appended already. Raises BadUsage when these are other lines."""
        if self._batch_id < 0:
            return
        found = self._TEXT.fullmatch(self._query_id or "")
        if found is None:
            raise bad_usage(f"app id {self._app_id!r} belongs to another writer, not to `produce`; choose another")
        reading.skip(int(found[1]))
        if reading.number < int(found[1]) or reading.digest.hexdigest() != found[2]:
            raise bad_usage(
                f"{file} is not the file that was appended as app id {self._app_id!r}: its first {found[1]} lines "
                "differ. Give that file, or choose another app id"
            )

    def batch(self, reading: LineReader) -> AppBatch:
        """The batch that ends with the line that was read last."""
        from logstore.commit.apps import Adopt, AppBatch

        adopt = None if self._batch_id < 0 else Adopt(self._query_id, self._batch_id)
        query_id = f"lines 1-{reading.number} {reading.digest.hexdigest()}"
        return AppBatch(self._app_id, self._batch_id + 1, query_id, adopt)

    def committed(self, app: AppBatch) -> None:
        self._query_id, self._batch_id = app.query_id, app.batch_id
