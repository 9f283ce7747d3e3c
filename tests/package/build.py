"""Builds the sdist from what git tracks, and the wheel from the sdist: `python build.py FOLDER`.

In a copy of its own, so that nothing lying about in the checkout gets in, and nothing is left in it. Uses the packages
of the interpreter that runs it; compiling the kernels takes a minute or two.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
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
        sdist = _run_backend("sdist", source, Path(folder) / "sdist")
        with tarfile.open(sdist) as archive:
            archive.extractall(Path(folder) / "unpacked", filter="data")
        (unpacked,) = (Path(folder) / "unpacked").iterdir()
        wheel = _run_backend("wheel", unpacked, Path(folder) / "wheel")
        for file in (sdist, wheel):
            shutil.move(file, target / file.name)


def _run_backend(kind: str, source: Path, made: Path) -> Path:
    """What the build backend makes of the tree at `source`."""
    made.mkdir()
    program = f"from setuptools import build_meta; build_meta.build_{kind}({str(made)!r})"
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=source, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    if done.returncode:
        sys.exit(f"building the {kind} failed:\n{done.stdout[-4000:]}")
    (file,) = made.iterdir()
    return file


if __name__ == "__main__":
    build(Path(sys.argv[1]))
