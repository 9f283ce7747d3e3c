"""Bars for work that takes a while: how much is done and of what, how fast, how long it will take.

The work counts, and the bars look at its counters a few times a second; nothing is drawn or computed when a counter
moves. Import it only while a person is watching: the module loads rich.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TaskID, TaskProgressColumn, TimeRemainingColumn
from rich.table import Column
from rich.text import Text

from duramen.session import size_text
from duramen.terminal import printable, raw

BYTES = "bytes"
_LOOKS_PER_SECOND = 5


class Counter:
    """Steps done, counted by any number of threads."""

    __slots__ = ("_lock", "count")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.count = 0

    def add(self, steps: int) -> None:
        with self._lock:
            self.count += steps


class Bars(Progress):
    """Live bars on stderr, gone when the work is done. `watch` adds one."""

    def __init__(self) -> None:
        self._watched: dict[TaskID, tuple[Callable[[], int | None], Callable[[], int], Callable[[], str]]] = {}
        super().__init__(
            _Name(table_column=Column(no_wrap=True, ratio=3)),
            BarColumn(bar_width=None, table_column=Column(ratio=1, min_width=6)),
            TaskProgressColumn(),
            _Count(table_column=Column(no_wrap=True, justify="right")),
            _Rate(table_column=Column(no_wrap=True, justify="right")),
            TimeRemainingColumn(compact=True),
            console=Console(file=raw(sys.stderr)),
            transient=True,
            expand=True,
            refresh_per_second=_LOOKS_PER_SECOND,
        )

    def watch(
        self,
        what: str,
        total: Callable[[], int | None],
        done: Callable[[], int],
        *,
        unit: str = BYTES,
        note: Callable[[], str] = str,
    ) -> TaskID:
        """A bar that shows what `done` counts, and after its name what `note` says."""
        task = self.add_task(printable(what), total=total() or None, unit=unit, note="")
        self._watched[task] = (total, done, note)
        return task

    def forget(self, task: TaskID) -> None:
        self._watched.pop(task, None)
        self.remove_task(task)

    def get_renderables(self) -> Iterable[RenderableType]:
        for task, (total, done, note) in list(self._watched.items()):
            if task in self.task_ids:
                most, now = total() or None, done()
                self.update(task, total=most, completed=min(now, most or now), note=printable(note()))
        yield from super().get_renderables()


class _Name(ProgressColumn):
    def render(self, task: Task) -> Text:
        return Text(" ".join(filter(None, (task.description, task.fields["note"]))), overflow="ellipsis")


class _Count(ProgressColumn):
    def render(self, task: Task) -> Text:
        done, total = int(task.completed), None if task.total is None else int(task.total)
        if task.fields["unit"] == BYTES:
            return Text(size_text(done) if total is None else _of(size_text(done), size_text(total)))
        return Text(f"{done:,}" if total is None else f"{done:,} of {total:,}")


def _of(done: str, total: str) -> str:
    """Both with their units, unless they have the same: a line is short."""
    unit = done.rpartition(" ")[2]
    return f"{done.removesuffix(' ' + unit)} of {total}" if total.endswith(f" {unit}") else f"{done} of {total}"


class _Rate(ProgressColumn):
    def render(self, task: Task) -> Text:
        if task.speed is None:
            return Text("")
        return Text(f"{size_text(int(task.speed))}/s" if task.fields["unit"] == BYTES else f"{task.speed:,.0f}/s")
