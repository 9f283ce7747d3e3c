"""A console of its own process, with the scheduler beside it, as an operator runs it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

ROOT = Path(__file__).resolve().parents[3]
TOKEN = "a-token-of-the-tests-0123"
START_S = 60.0


class Served:
    """`duramen schedule --console` on a free port until it is closed; `delay_ms` before its jobs run first."""

    def __init__(
        self,
        store: Path,
        *,
        delay_ms: int = 3_600_000,
        compaction_ms: int = 3_600_000,
        settings: Mapping[str, object] | None = None,
    ) -> None:
        lines = {"log.initial.task.delay.ms": delay_ms, **(settings or {})}
        (store / "duramen.toml").write_text("".join(f'"{name}" = {value}\n' for name, value in lines.items()))
        self.store = store
        command = [sys.executable, "-m", "duramen", "--store", str(store), "schedule", "--console"]
        options = ["--console-port", "0", "--metrics-port", "0", "--interval", f"compaction={compaction_ms}"]
        environment = {**os.environ, "DURAMEN_CONSOLE_TOKEN": TOKEN}
        self._process = subprocess.Popen(
            [*command, *options], cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True
        )
        self._lines: list[str] = []
        self._found = threading.Event()
        self._url = ""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            match = re.search(r"console on (http://\S+)", line)
            if match:
                self._url = match[1].partition("#")[0]
                self._found.set()
        self._found.set()

    @property
    def url(self) -> str:
        self._found.wait(START_S)
        assert self._url, "".join(self._lines)
        return self._url

    def __enter__(self) -> Served:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(5)
        assert self._process.stderr is not None
        self._process.stderr.close()
