"""`duramen backup`: a copy that verifies and takes appends."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

Command = Callable[..., object]


def test_a_backup_verifies_and_goes_on_as_a_store(
    orders: Path, duramen: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    done = duramen("backup", copy, output="json")
    assert done.code == 0
    assert done.json["backed_up"] is True
    assert [(each["partition"], each["log_end_offset"]) for each in done.json["partitions"]] == [(0, 100), (1, 50)]
    assert all(each["linked_bytes"] > 0 for each in done.json["partitions"])
    before = duramen("consume", "orders").lines
    monkeypatch.setenv("DURAMEN_STORE", str(copy))
    assert duramen("verify", output="json").json["sound"] is True
    assert duramen("consume", "orders").lines == before
    lines = tmp_path / "lines"
    lines.write_text('{"key": "new", "value": "x"}\n')
    assert duramen("produce", "orders", lines).code == 0
    assert len(duramen("consume", "orders").lines) == 151
    assert duramen("verify", output="json").json["sound"] is True
    monkeypatch.setenv("DURAMEN_STORE", str(orders))
    assert duramen("consume", "orders").lines == before
    assert duramen("verify", output="json").json["sound"] is True


def test_without_links_and_as_a_table(orders: Path, duramen: Command, tmp_path: Path) -> None:
    done = duramen("backup", tmp_path / "copy", "--copy")
    assert done.code == 0
    assert "Backed up to" in done.out
    assert done.out.count("0 B") >= 2  # nothing linked


def test_a_dry_run_makes_nothing(orders: Path, duramen: Command, tmp_path: Path) -> None:
    done = duramen("backup", tmp_path / "copy", "--dry-run", output="json")
    assert done.json["backed_up"] is False
    assert all(each["size_bytes"] > 0 for each in done.json["partitions"])
    assert not (tmp_path / "copy").exists()


def test_a_directory_that_is_taken_is_refused(orders: Path, duramen: Command, tmp_path: Path) -> None:
    for arguments in ([tmp_path], [tmp_path, "--dry-run"], [orders / "logs"]):
        done = duramen("backup", *arguments)
        assert done.code == 1
        assert "the target" in done.err
