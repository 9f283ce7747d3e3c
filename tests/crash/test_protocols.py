"""docs/protocols.md names a test for each crash point; here it is kept to tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docs" / "protocols.md").read_text()


def test_every_test_the_page_names_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", TEXT)
    assert len(named) > 20
    for path, name in named:
        assert not name or f"def {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_every_script_the_page_names_exists() -> None:
    scripts = (ROOT / "tests" / "simulation" / "test_partition_crash.py").read_text()
    named = {
        name
        for names in re.findall(r"step ((?:\*[\w ]+\*(?:, )?)+)", TEXT)
        for name in re.findall(r"\*([\w ]+)\*", names)
    }
    assert len(named) > 5
    for name in named:
        assert f'"{name}":' in scripts, name
