"""What this process is doing on a store, for other processes to see: its jobs, its passes and how far they are.

One small file a process in `locks/`, replaced about once a second while there is something to say and removed at the
end. Nothing depends on it: a file that was not renewed for a while belongs to a process that is gone, and is ignored
and later removed. Never raises; a store that cannot be written shows nothing. Not through the store's file-system seam:
what is written by the clock would make a simulation differ from run to run.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from logstore.compaction.maintenance import MaintainedStore
from logstore.compaction.planning import PartitionPlan
from logstore.directory.sealed import read_sealed, write_sealed
from logstore.errors import DuramenError
from logstore.files import OS_FILES

_VERSION = 1
_PREFIX = "activity."
_EVERY_S = 1.0
_BYTES_MAX = 1 << 20
_FILES_MAX = 256
_PASSES_MAX = 256
#: a file that was not renewed for this long is ignored; after the second it is removed
STALE_MS, _REMOVED_MS = 15_000, 600_000
#: the rate is measured over this long
_RATE_S = 5.0
#: bytes written are part of the rewriting that reads them
_STEPS = {"write": "rewrite", "wait": None}

Jobs = Callable[[], dict[str, Any]]


@dataclass(slots=True)
class _Pass:
    plan: PartitionPlan
    run_id: str
    engine: str
    started_ms: int
    step: str = "index"
    done_bytes: int = 0
    moments: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=64))

    def moved(self, step: str, size_bytes: int) -> None:
        known = _STEPS.get(step, step)
        if known is None:
            return
        if known != self.step:
            self.step, self.done_bytes = known, 0
            self.moments.clear()
        self.done_bytes += 0 if step == "write" else size_bytes
        now = time.monotonic()
        if not self.moments or now - self.moments[-1][0] >= 0.2:
            self.moments.append((now, self.done_bytes))

    @property
    def total_bytes(self) -> int:
        """Of this step: indexing reads what is dirty, rewriting all that is cleanable."""
        dirty = self.plan.cleanable.cleanable_bytes
        return dirty if self.step == "index" else max(self.plan.read_bytes - dirty, 0)

    def rate(self) -> float | None:
        now = time.monotonic()
        recent = [each for each in self.moments if now - each[0] <= _RATE_S] or list(self.moments)[:1]
        if not recent or now - recent[0][0] < 0.1:
            return None
        return (self.done_bytes - recent[0][1]) / (now - recent[0][0])

    def as_dict(self) -> dict[str, Any]:
        rate = self.rate()
        left = max(self.total_bytes - self.done_bytes, 0)
        return {
            "run_id": self.run_id,
            "topic": self.plan.topic,
            "partition": self.plan.partition,
            "engine": self.engine,
            "started_ms": self.started_ms,
            "step": self.step,
            "done_bytes": self.done_bytes,
            "total_bytes": self.total_bytes,
            "bytes_per_second": None if rate is None else round(rate, 1),
            "left_ms": int(left / rate * 1000) if rate else None,
        }


class Activity:
    """The file of this process. `jobs` returns what the daemon's jobs are doing."""

    def __init__(self, store: MaintainedStore, *, jobs: Jobs | None = None) -> None:
        self._store = store
        self._jobs = jobs
        folder = store.maintenance().activity_folder
        self._path = None if folder is None else os.path.join(folder, _PREFIX + uuid.uuid4().hex)
        self._lock = threading.Lock()
        self._passes: dict[str, _Pass] = {}
        self._written = False
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start writing the file; nothing is written while there is no pass and no job."""
        if self._thread is None and self._path is not None and not self._store.is_read_only:
            self._thread = threading.Thread(target=self._run, name="duramen-activity", daemon=True)
            self._thread.start()

    def close(self) -> None:
        self._stop.set()
        thread, self._thread = self._thread, None
        if thread is not None and self._path is not None:
            thread.join(5)
            with contextlib.suppress(OSError):
                OS_FILES.unlink(self._path)

    def __enter__(self) -> Activity:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begun(self, plan: PartitionPlan, run_id: str, engine: str) -> None:
        with self._lock:
            if len(self._passes) < _PASSES_MAX:
                self._passes[plan.name] = _Pass(plan, run_id, engine, self._store.clock.now_ms())
        self.start()

    def moved(self, name: str, step: str, size_bytes: int) -> None:
        with self._lock:
            known = self._passes.get(name)
            if known is not None:
                known.moved(step, size_bytes)

    def ended(self, name: str) -> None:
        with self._lock:
            self._passes.pop(name, None)

    def _run(self) -> None:
        while not self._stop.is_set():
            with contextlib.suppress(OSError, DuramenError):
                self._write()
            self._stop.wait(_EVERY_S)

    def _write(self) -> None:
        with self._lock:
            passes = [each.as_dict() for each in self._passes.values()]
        jobs = None if self._jobs is None else self._jobs()
        if self._path is None or (not passes and jobs is None and not self._written):
            return
        document = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "seen_ms": self._store.clock.now_ms(),
            "jobs": jobs,
            "passes": passes,
        }
        write_sealed(OS_FILES, self._path, document, version=_VERSION, durable=False)
        self._written = bool(passes)


def read_activities(store: MaintainedStore, *, now_ms: int) -> list[dict[str, Any]]:
    """What processes say they are doing, as of the last seconds. Reads only."""
    found = []
    for path in _files(store):
        try:
            document = read_sealed(OS_FILES, path, version=_VERSION, limit=_BYTES_MAX)
        except (DuramenError, OSError):
            continue
        seen_ms = document.get("seen_ms")
        if isinstance(seen_ms, int) and abs(now_ms - seen_ms) <= STALE_MS and not _has_ended(document):
            found.append(document)
    return found


def _has_ended(document: dict[str, Any]) -> bool:
    """Whether a process of this host is known to be gone; of others only time tells."""
    pid = document.get("pid")
    if document.get("host") != socket.gethostname() or not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except OSError as error:
        return error.errno == errno.ESRCH
    return False


def remove_stale(store: MaintainedStore) -> None:
    """Remove the files of killed processes."""
    now_ms = store.clock.now_ms()
    for path in _files(store):
        with contextlib.suppress(OSError):
            if now_ms - OS_FILES.stat(path).mtime_ms > _REMOVED_MS:
                OS_FILES.unlink(path)


def _files(store: MaintainedStore) -> Iterator[str]:
    folder = store.maintenance().activity_folder
    if folder is None:
        return
    try:
        names: Sequence[str] = OS_FILES.listdir(folder)
    except OSError:
        return
    for name in [each for each in names if each.startswith(_PREFIX)][:_FILES_MAX]:
        yield os.path.join(folder, name)
