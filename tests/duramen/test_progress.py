"""Bars: on a terminal only, on stderr only, never in JSON, with totals that are true, and within its width."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from logstore.records.record import Record
from logstore.restore.restore import plan_restore, restore
from logstore.store import LogStore

from .conftest import ROOT, Command, on_a_terminal, plain_lines

BAR = re.compile(
    r"^(?P<what>.*?) +[━╸╺ ]{3,} +(?P<percent>[0-9]+)% +"
    r"(?P<count>\S.* of [0-9.,]+( [KMG]?i?B)?)( +\S+( [KMG]?i?B)?/s)? +\S*:\S\S$"
)


@pytest.fixture
def accounts(store_path: Path) -> Path:
    with LogStore(store_path, create=True) as store:
        store.create_topic("accounts", partitions=2, configs={"cleanup.policy": "compact", "segment.bytes": 20_000})
        for start in range(0, 3000, 1000):
            store.append("accounts", [Record(b"k%d" % (at % 100), b"v%d" % at) for at in range(start, start + 1000)])
    return store_path


def test_every_long_command_has_a_bar_that_ends_at_its_total(accounts: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"key": f"k{at % 100}", "value": "v" * 50}) + "\n" for at in range(2000)))
    exported, backup, out = (str(tmp_path / name) for name in ("exported", "backup", "out.jsonl"))
    seen = on_a_terminal(
        accounts,
        ["produce", "accounts", str(lines)],
        ["compact", "--roll-active"],
        ["restore", "accounts", "--output-file", out],
        ["verify"],
        ["export", exported],
        ["backup", backup, "--copy"],
        ["--store", str(tmp_path / "second"), "import", exported, "--defaults"],
    )
    bars = [found for line in plain_lines(seen) if (found := BAR.match(line))]
    last = {found["what"].split()[0]: found for found in bars}
    assert {"producing", "2", "restoring", "verifying", "exporting", "backing", "importing"} <= set(last)
    for name, found in last.items():
        if name.startswith("accounts-"):  # of one pass; goes when the pass ends
            continue
        done, total = found["count"].split(" of ")
        # What the very last look of a bar shows depends on when it was; the counter is at its end by then.
        assert (done.split()[0], found["percent"]) == (total.split()[0], "100"), (name, found[0])
    size = os.path.getsize(lines)
    assert f"{size / 1024:.1f} of {size / 1024:.1f} KiB" in last["producing"]["count"]
    assert last["restoring"]["count"] == "5,000 of 5,000"
    assert all(len(line) <= 80 for line in plain_lines(seen) if BAR.match(line))


def test_no_bar_without_a_terminal_and_none_in_json(accounts: Path, tmp_path: Path) -> None:
    for output in ("text", "json"):
        done = subprocess.run(
            [sys.executable, "-m", "duramen", "verify", "--output", output],
            env=os.environ | {"PYTHONPATH": str(ROOT), "DURAMEN_STORE": str(accounts)},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stderr == ""
    seen = on_a_terminal(accounts, ["--output", "json", "verify"])
    assert json.loads(seen)["sound"]


def test_no_colour_where_none_is_wanted(accounts: Path) -> None:
    seen = on_a_terminal(accounts, ["verify"], NO_COLOR="1", TERM="dumb")
    assert "\x1b[3" not in seen


def test_restoring_counts_every_offset_once_whatever_the_way(accounts: Path) -> None:
    with LogStore(accounts) as store:
        plan = plan_restore(store, "accounts")
        told: list[int] = []
        assert sum(batch.num_rows for batch in restore(store, plan, progress=told.append)) == 100
        assert sum(told) == plan.offsets
        assert len(told) > 2  # both passes say how far they are
        merged: list[int] = []
        store.alter_topic("accounts", partitions=3)
        plan = plan_restore(store, "accounts")
        assert not plan.by_partition
        assert sum(batch.num_rows for batch in restore(store, plan, progress=merged.append)) == 100
        assert sum(merged) == plan.offsets
        assert all(each >= 0 for each in told + merged)


def test_produce_shows_no_total_for_a_pipe(duramen: Command, accounts: Path) -> None:
    read, write = os.pipe()
    os.write(write, b'{"key": "a", "value": "b"}\n')
    os.close(write)
    from duramen.commands.produce import size_of

    with os.fdopen(read, "rb") as lines:
        assert size_of(lines) is None
    with open(__file__, "rb") as lines:
        assert size_of(lines) == os.path.getsize(__file__)
