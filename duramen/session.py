"""What all commands share: opening the store, answering, asking.

Text is for people and JSON a contract (docs/cli.md); a command builds its JSON document first and draws its text from
the same values, so the two never differ. Progress and questions go to stderr, answers to stdout.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from duramen.tables import Wrong, pair_lines, table_lines
from duramen.terminal import SafeStream, json_text, printable

if TYPE_CHECKING:
    from collections.abc import Callable

    from logstore.bucket.store import BucketStore
    from logstore.compaction.maintenance import MaintainedStore
    from logstore.store import LogStore

DONE, FAILED, BAD_USAGE, DAMAGE = 0, 1, 2, 3
INTERRUPTED = 130


class Output(str, Enum):
    TEXT = "text"
    JSON = "json"


@dataclass(slots=True)
class Session:
    store_path: str | None = None
    output: Output = Output.TEXT
    debug: bool = False
    #: what is done and what is not, should the command end here; None: nothing was changed
    so_far: str | None = None
    #: the same for programs
    done: dict[str, Any] | None = None
    #: the command chose its exit code itself
    stopped: bool = False

    def open(self, *, create: bool = False) -> LogStore:
        """The store the command is about, in a directory. Raises InvalidConfig for one in a bucket."""
        directory = self.directory
        from logstore.store import LogStore

        return LogStore(directory, create=create)

    @property
    def directory(self) -> str:
        """The store's path, for commands of a store in a directory. Raises InvalidConfig for a URL."""
        path = self.path
        from logstore.store import directory_of

        return directory_of(path)

    def open_any(self, *, create: bool = False) -> MaintainedStore:
        """The store the command is about, in a directory or in a bucket."""
        path = self.path
        from logstore.store import open_store

        return open_store(path, create=create)

    @property
    def is_in_bucket(self) -> bool:
        from logstore.objects.opening import is_url

        return is_url(self.path)

    def open_bucket(self) -> BucketStore:
        """The store the command is about, in a bucket. Raises BadUsage for one in a directory."""
        from logstore.bucket.store import BucketStore

        if not self.is_in_bucket:
            raise bad_usage(f"{self.path} is a directory; `duramen schedule` and `duramen compact` maintain it")
        return BucketStore(self.path)

    @property
    def path(self) -> str:
        if not self.store_path:
            raise bad_usage("no store given: use --store DIR or --store URL before the command, or set DURAMEN_STORE")
        return self.store_path

    @property
    def json(self) -> bool:
        return self.output is Output.JSON

    def answer(self, document: dict[str, Any], text: Callable[[], None]) -> None:
        """Print the document, or call `text` to draw it."""
        if self.json:
            print_json(document)
        else:
            text()

    def confirm(self, question: str, *, yes: bool) -> None:
        """Ask before something is destroyed; without a person at the keyboard, only `--yes` will do."""
        if yes:
            return
        if not sys.stdin.isatty():
            raise bad_usage(f"{question} Not a terminal; pass --yes to confirm, or look first with --dry-run")
        typer.confirm(question, abort=True, err=True)

    @property
    def is_watched(self) -> bool:
        """Whether a person sees what is written to stderr, and wants text."""
        return not self.json and sys.stderr.isatty()

    @contextlib.contextmanager
    def progress(
        self,
        what: str,
        total: int | None,
        *,
        unit: str = "bytes",
        done: Callable[[], int] | None = None,
        note: Callable[[], str] = str,
    ) -> Iterator[Callable[[int], None]]:
        """A bar on stderr while a person is watching. The function it gives takes the steps done since last time;
        work that counts by itself passes `done` instead.
        """
        if not self.is_watched:
            yield lambda steps: None
            return
        from duramen.progress import Bars, Counter

        counter = Counter()
        with Bars() as bars:
            bars.watch(what, lambda: total, done or (lambda: counter.count), unit=unit, note=note)
            yield counter.add


session = Session()


class BadUsage(typer.BadParameter):
    """An argument that makes no sense; `where` has the place in the file it came from, if any."""

    def __init__(self, message: str, where: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.where = where


def bad_usage(message: str, *, where: dict[str, object] | None = None) -> BadUsage:
    return BadUsage(message, where)


def stop(code: int) -> NoReturn:
    """End the command with this exit code; it has said why."""
    session.stopped = True
    raise typer.Exit(code)


def print_json(document: object) -> None:
    sys.stdout.write(json_text(document) + "\n")


def print_table(columns: Sequence[str], rows: Iterable[Sequence[object]], *, title: str | None = None) -> None:
    """Rows in columns; no wider than the terminal, and plainly aligned for a pipe."""
    if title:
        print(title)
    cells = [[printable_cell(cell) for cell in row] for row in rows]
    is_terminal = sys.stdout.isatty()
    width = shutil.get_terminal_size().columns if is_terminal else None
    colour = is_terminal and has_colour()
    for line in table_lines(columns, cells, width=width, colour=colour):
        _write_drawn(line, colour)


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Names and values, a line each."""
    colour = sys.stdout.isatty() and has_colour()
    for line in pair_lines([(name, printable_cell(value)) for name, value in pairs], colour=colour):
        _write_drawn(line, colour)


def printable_cell(value: object) -> str:
    text = "" if value is None else printable(str(value))
    return Wrong(text) if isinstance(value, Wrong) else text


def has_colour() -> bool:
    """Whether colours are wanted: see no-color.org."""
    return not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def _write_drawn(line: str, colour: bool) -> None:
    """The cells are printable by now; the escapes are ours."""
    stream = sys.stdout
    if colour and isinstance(stream, SafeStream):
        stream.write_exactly(line + "\n")
    else:
        print(line)


def file_path(path: str) -> str:
    """The path as it is. Raises BadUsage for a URL, which would become a directory of that name."""
    if "://" in path:
        raise bad_usage(f"{path} is a URL; give the path of a file or directory on this machine")
    return path


def key_values(given: Iterable[str] | None, option: str) -> dict[str, str]:
    """`k=v` arguments as a mapping; a repeated key is a mistake."""
    found: dict[str, str] = {}
    for item in given or ():
        key, equals, value = item.partition("=")
        if not equals or not key:
            raise bad_usage(f"{option} takes name=value, not {item!r}")
        if key in found:
            raise bad_usage(f"{option} gives {key} twice")
        found[key.strip()] = value
    return found


def size_text(size_bytes: int) -> str:
    """A size for people."""
    size, unit = float(size_bytes), "B"
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if size < 1024 or unit == "TiB":
            break
        size /= 1024
    return f"{size_bytes} B" if unit == "B" else f"{size:.1f} {unit}"


def count_text(count: int, noun: str, plural: str | None = None) -> str:
    """How many of something, for people: 1 record, 2,000 records."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def duration_text(duration_ms: int) -> str:
    """A length of time in the largest unit that has it in whole numbers."""
    for unit, size_ms in (("d", 86_400_000), ("h", 3_600_000), ("min", 60_000), ("s", 1_000)):
        if duration_ms and duration_ms % size_ms == 0:
            return f"{duration_ms // size_ms} {unit}"
    return f"{duration_ms} ms"


def time_text(timestamp_ms: int | None) -> str:
    """A timestamp for people, in UTC."""
    if timestamp_ms is None or timestamp_ms < 0:
        return "-"
    import datetime

    try:
        moment = datetime.datetime.fromtimestamp(timestamp_ms / 1000, tz=datetime.timezone.utc)
    except (ValueError, OverflowError, OSError):
        return str(timestamp_ms)
    return moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def seconds_text(timestamp_ms: int | None) -> str:
    """A moment without its milliseconds."""
    return time_text(None if timestamp_ms is None else timestamp_ms // 1000 * 1000).replace(".000Z", "Z")


def minutes_text(timestamp_ms: int | None) -> str:
    """A moment without its seconds, for tables of 80 columns."""
    return re.sub(r":\d\dZ$", "Z", seconds_text(timestamp_ms))
