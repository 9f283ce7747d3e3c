"""The wheel, built once, in environments of its own outside the checkout."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it, and an empty folder to work in."""

    environment: Path
    work: Path

    @property
    def python(self) -> Path:
        return self.environment / "bin" / "python"

    def run(self, *command: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run it there, with nothing of the checkout in reach; the caller judges the exit code."""
        ours = ("PYTHON", "DURAMEN_", "SPARK_", "PYSPARK_", "VIRTUAL_ENV")
        inherited = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        path = f"{self.environment / 'bin'}{os.pathsep}{inherited.get('PATH', '')}"
        return subprocess.run(
            list(map(str, command)),
            cwd=self.work,
            env={**inherited, "PATH": path, **variables},
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def script(self, text: str, **variables: str) -> str:
        """What a program prints that must succeed."""
        done = self.run(self.python, "-c", text, **variables)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built now, unless `DURAMEN_DIST` names a folder that has both."""
    if "DURAMEN_DIST" in os.environ:
        return Path(os.environ["DURAMEN_DIST"])
    folder = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, HERE / "build.py", folder], check=True)
    return folder


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (found,) = dist.glob("*.whl")
    return found


def _pins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The locked versions as constraints: pip checks no hashes of what it builds itself."""
    text = (ROOT / "requirements-dev.lock").read_text()
    pins = tmp_path_factory.mktemp("pins") / "constraints.txt"
    pins.write_text("".join(f"{line}\n" for line in re.findall(r"^[a-z0-9][^\s\\]*==[^\\\n]*", text, re.MULTILINE)))
    return pins


def _install(environment: Path, wheel: Path, extras: str, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """Into an environment that is made, or into one that has less."""
    if not environment.exists():
        venv.create(environment, with_pip=True)
    command = [environment / "bin" / "python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["-c", _pins(tmp_path_factory), f"duramen{extras} @ {wheel.as_uri()}"]
    subprocess.run(list(map(str, command)), check=True)
    return Installed(environment, tmp_path_factory.mktemp("work"))


# Each extra by itself: an environment gets the next one when the tests without it are over, so their order in the file
# counts.


@pytest.fixture(scope="session")
def base(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The engine and the command, no extra."""
    return _install(tmp_path_factory.mktemp("base") / "environment", wheel, "", tmp_path_factory)


@pytest.fixture(scope="session")
def scheduled(base: Installed, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return _install(base.environment, wheel, "[schedule]", tmp_path_factory)


@pytest.fixture(scope="session")
def compiler(base: Installed, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return _install(base.environment, wheel, "[compile]", tmp_path_factory)


@pytest.fixture(scope="session")
def spark(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return _install(tmp_path_factory.mktemp("spark") / "environment", wheel, "[spark]", tmp_path_factory)


@pytest.fixture(scope="session")
def delta(spark: Installed, wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return _install(spark.environment, wheel, "[spark,delta]", tmp_path_factory)
