"""What no file of the repository may carry: index addresses, registry hosts and paths of somebody's machine."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
IGNORED = {".git", ".venv", "build", "dist", "target", "__pycache__", "node_modules"}

# Put together from pieces, or this file would find itself.
MACHINE_PATH = re.compile(rb"(?<![\w.~-])/" + rb"(?:work|root|home|Users)/" + rb"[\w.-]")
REGISTRY_HOST = re.compile(
    rb"(?:pypi|pythonhosted|npmjs|anaconda|rubygems|repo1?\.maven(?:\.apache)?|crates)" + rb"\.(?:org|com|io)\b"
)
INDEX_OPTION = re.compile(rb"--(?:extra-)?index-url|--find-links|--trusted-host|\bhttps?:|\bfile:|@ ")


def repository_files() -> list[Path]:
    """What git tracks or would add; in a copy without git, everything but what is built."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    try:
        listing = subprocess.run(command, capture_output=True, check=True).stdout.decode()
        files = [ROOT / name for name in listing.split("\0") if name]
    except (OSError, subprocess.CalledProcessError):
        files = [path for path in ROOT.rglob("*") if not IGNORED.intersection(path.relative_to(ROOT).parts)]
    return [path for path in files if path.is_file()]


def matches(pattern: re.Pattern[bytes], path: Path) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}:{number}: {line.decode(errors='replace').strip()[:160]}"
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_file_names_a_path_of_this_machine_or_a_registry() -> None:
    files = repository_files()
    assert ROOT / "pyproject.toml" in files
    found = [hit for path in files for pattern in (MACHINE_PATH, REGISTRY_HOST) for hit in matches(pattern, path)]
    assert not found, "\n".join(found)


def test_lock_files_have_hashes_and_no_index_addresses() -> None:
    locks = [path for path in repository_files() if path.suffix == ".lock"]
    assert {"requirements.lock", "requirements-dev.lock"} <= {path.name for path in locks}
    found = [hit for path in locks for hit in matches(INDEX_OPTION, path)]
    assert not found, "\n".join(found)
    for path in locks:
        for requirement in re.split(r"\n(?=\S)", path.read_text()):
            assert requirement.startswith("#") or "--hash=sha256:" in requirement, f"{path.name}: {requirement}"


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (MACHINE_PATH, "open('/" + "home/someone/data')"),
        (MACHINE_PATH, "see /" + "work/main/x"),
        (REGISTRY_HOST, "https://files.python" + "hosted.org/packages/x"),
        (REGISTRY_HOST, "https://repo.maven." + "apache.org/maven2"),
        (REGISTRY_HOST, "https://repo1.maven." + "org/maven2"),
        (INDEX_OPTION, "--index" + "-url something"),
        (INDEX_OPTION, "duramen @ file:///tmp/x"),
    ],
)
def test_what_must_not_be_there_would_be_seen(pattern: re.Pattern[bytes], line: str) -> None:
    assert pattern.search(line.encode())


@pytest.mark.parametrize(
    "line", ["http://www.apache.org/licenses/", "org.apache.maven.plugins", "a/" + "home/b", "~/" + "work/x"]
)
def test_ordinary_text_is_left_alone(line: str) -> None:
    assert not MACHINE_PATH.search(line.encode())
    assert not REGISTRY_HOST.search(line.encode())
