"""What all commands share: which store, how to answer, how to ask.

Text is for people and JSON a contract (docs/cli.md); a command builds its JSON document first and draws its text from
the same values, so the two never differ. Progress and questions go to stderr, answers to stdout.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any, NoReturn

import typer

from duramen.terminal import json_text, printable, raw

if TYPE_CHECKING:
    from collections.abc import Callable

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
        """The store the command is about."""
        path = self.path
        from logstore.store import LogStore

        return LogStore(path, create=create)

    @property
    def path(self) -> str:
        if not self.store_path:
            raise bad_usage("no store given: use --store DIR before the command, or set DURAMEN_STORE")
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

    @contextlib.contextmanager
    def progress(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        """Progress on stderr while a person is watching; the function it gives takes the steps done since last time."""
        if self.json or not sys.stderr.isatty():
            yield lambda steps: None
            return
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(file=raw(sys.stderr)), transient=True) as bar:
            task = bar.add_task(printable(what), total=total)
            yield lambda steps: bar.advance(task, steps)


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
    """Rows in columns; drawn for a terminal, plainly aligned for a pipe."""
    cells = [["" if cell is None else printable(str(cell)) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
        for row in cells:
            table.add_row(*(Text(cell) for cell in row))
        Console(file=raw(sys.stdout)).print(table)
        return
    if title:
        print(title)
    widths = [max(len(line[at]) for line in [list(columns), *cells]) for at in range(len(columns))]
    for line in [list(columns), *cells]:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())


def print_pairs(pairs: Iterable[tuple[str, object]]) -> None:
    """Names and values, a line each."""
    shown = [(name, "" if value is None else printable(str(value))) for name, value in pairs]
    width = max((len(name) for name, _ in shown), default=0)
    for name, value in shown:
        print(f"{name.ljust(width)}  {value}".rstrip())


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
