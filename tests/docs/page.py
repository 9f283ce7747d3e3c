"""A page's blocks of code, a shell that runs them one after the other, and what a page shows as their output."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r'^```([a-z]*)(?: title="([^"]+)")?\n(.*?)^```$', re.DOTALL | re.MULTILINE)
_SENTINEL = "--- the block is done ---"
COMMAND_S = 600


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    #: the name of a file to save it as; empty for a block to type
    title: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def is_shell(self) -> bool:
        return self.language in ("bash", "sh")


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [
        Block(page, text[: each.start()].count("\n") + 1, each[1], each[2] or "", each[3])
        for each in _BLOCK.finditer(text)
    ]


def check_output(name: str, shown: str, output: str) -> None:
    """Each line that is shown is one of the output's, in this order; `…` stands for anything, spaces for spaces."""
    lines = iter(output.splitlines())
    for line in filter(None, map(str.strip, shown.splitlines())):
        words = [".*".join(map(re.escape, word.split("…"))) for word in line.split()]
        pattern = re.compile(r"\s*" + r"\s*".join(words) + r"\s*")
        assert any(pattern.fullmatch(each) for each in lines), f"{name}: {line!r} is not (or not here) in\n{output}"


class Shell:
    """One bash in an empty folder that keeps its variables from block to block, as a reader's does."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._errors = (folder / ".stderr").open("w+")
        bin_folder = Path(sys.executable).parent  # without resolving links: the environment's own
        self._process = subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-euo", "pipefail"],
            cwd=folder,
            env={name: value for name, value in os.environ.items() if not name.startswith("DURAMEN_")}
            | {"PATH": f"{bin_folder}:{os.environ['PATH']}"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def run(self, text: str) -> str:
        """What the block prints. A command that fails fails the test, with what it said."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        # The commands read nothing but what the page gives them.
        self._process.stdin.write(f"{{\n{text}\n}} < /dev/null\necho '{_SENTINEL}'\n")
        self._process.stdin.flush()
        out: list[str] = []
        limit = threading.Timer(COMMAND_S, self._process.kill)
        limit.start()
        try:
            for line in self._process.stdout:
                if line.strip() == _SENTINEL:
                    return "".join(out)
                out.append(line)
        finally:
            limit.cancel()
        self._errors.seek(0)
        raise AssertionError(f"{text}\nfailed. It printed:\n{''.join(out)}\n{self._errors.read()[-4000:]}")

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(30)
        assert self._process.stdout is not None
        self._process.stdout.close()
        self._errors.close()
