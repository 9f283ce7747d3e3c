"""Builds the wheel and the sdist from what git tracks: `python build.py FOLDER`.

In a copy of its own, so that nothing lying about in the checkout gets in, and nothing is left in it. Uses the packages
of the interpreter that runs it; compiling the kernels takes a minute or two.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def tracked_files() -> list[str]:
    """What git tracks, and what it would: new files of a change that is not committed yet."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in names if name and (ROOT / name).is_file()]


def build(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="duramen-build-") as folder:
        source = Path(folder) / "source"
        for name in tracked_files():
            place = source / name
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, place)
        for kind in ("sdist", "wheel"):
            made = Path(folder) / kind
            made.mkdir()
            program = f"from setuptools import build_meta; build_meta.build_{kind}({str(made)!r})"
            done = subprocess.run(
                [sys.executable, "-c", program], cwd=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
            )
            if done.returncode:
                sys.exit(f"building the {kind} failed:\n{done.stdout[-4000:]}")
            for file in made.iterdir():
                shutil.move(file, target / file.name)


if __name__ == "__main__":
    build(Path(sys.argv[1]))
