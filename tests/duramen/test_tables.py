"""Tables: no wider than the terminal, numbers to the right and never cut, nothing lost."""

from __future__ import annotations

import random
import re
from pathlib import Path

import pytest

from duramen.tables import Wrong, table_lines, text_width
from logstore.records.record import Record
from logstore.store import LogStore

from .conftest import on_a_terminal, plain_lines


def test_numbers_to_the_right_words_to_the_left() -> None:
    rows = [["orders", "12", "1.5 MiB", "sound"], ["a", "3", "-", "DAMAGED"]]
    assert table_lines(["topic", "segments", "size", "result"], rows) == [
        "topic   segments     size  result",
        "orders        12  1.5 MiB  sound",
        "a              3        -  DAMAGED",
    ]


def test_a_table_that_is_too_wide_stacks_its_headings_then_puts_the_last_column_below() -> None:
    rows = [["orders-0", "1000000", "1200000", "due: its dirty ratio is above the threshold"]]
    columns = ["partition", "first dirty offset", "first uncleanable offset", "why"]
    assert table_lines(columns, rows, width=40) == [
        "             first        first",
        "             dirty  uncleanable",
        "partition   offset       offset",
        "orders-0   1000000      1200000",
        "    due: its dirty ratio is above the",
        "    threshold",
    ]


def test_what_fits_no_other_way_is_a_list() -> None:
    rows = [["x" * 30, "123456789", "987654321"]]
    assert table_lines(["name", "one", "two"], rows, width=20) == [
        "name  xxxxxxxxxxxxxx",
        "      xxxxxxxxxxxxxx",
        "      xx",
        "one   123456789",
        "two   987654321",
    ]


@pytest.mark.parametrize("seed", range(30))
def test_nothing_is_lost_and_nothing_is_too_wide(seed: int) -> None:
    rng = random.Random(seed)
    columns = [" ".join("h" * rng.randint(1, 8) for _ in range(rng.randint(1, 3))) for _ in range(rng.randint(1, 7))]
    kinds = [rng.choice(["number", "word", "prose"]) for _ in columns]

    def cell(kind: str) -> str:
        if kind == "number":
            return str(rng.randint(0, 10 ** rng.randint(1, 9)))
        words = ["w" * rng.randint(1, 12) for _ in range(1 if kind == "word" else rng.randint(1, 12))]
        return " ".join(words)

    rows = [[cell(kind) for kind in kinds] for _ in range(rng.randint(0, 5))]
    width = rng.randint(30, 120)
    lines = table_lines(columns, rows, width=width)
    assert all(text_width(line) <= width for line in lines), lines
    squeezed = re.sub(r"\s", "", "".join(lines))
    for row in rows:
        for kind, each in zip(kinds, row, strict=True):
            if kind == "number":
                assert any(re.search(rf"(?<!\S){each}(?!\S)", line) for line in lines), (each, lines)
            assert len(squeezed) >= len(each.replace(" ", ""))
    assert squeezed.count("w") == sum(each.count("w") for row in rows for each in row)


def test_only_what_is_wrong_has_a_colour() -> None:
    rows = [["a", Wrong("DAMAGED")], ["b", "sound"]]
    lines = table_lines(["topic", "result"], rows, width=80, colour=True)
    assert lines[1] == "a      \x1b[31mDAMAGED\x1b[0m"
    assert "\x1b" not in lines[0] + lines[2]
    assert "\x1b" not in "".join(table_lines(["topic", "result"], rows, width=80))


def test_a_moment_is_broken_behind_its_day_and_words_stay_whole() -> None:
    rows = [["orders-0", "2026-11-19T17:40:32Z", "2026-11-19T17:40:32Z (max.compaction.lag.ms)", "due"]]
    columns = ["partition", "horizon", "next", "why"]
    assert table_lines(columns, rows, width=62)[1:] == [
        "orders-0   2026-11-19T17:40:32Z  2026-11-19T17:40:32Z      due",
        "                                 (max.compaction.lag.ms)",
    ]
    assert table_lines(columns, rows, width=54)[1:] == [
        "orders-0   2026-11-19T    2026-11-19T17:40:32Z     due",
        "           17:40:32Z      (max.compaction.lag.ms)",
    ]


def test_wide_characters_take_two_columns() -> None:
    assert table_lines(["key", "value"], [["日本", "x"], ["a", "y"]]) == ["key   value", "日本  x", "a     y"]


def test_the_tables_of_all_commands_fit_eighty_columns(store_path: Path) -> None:
    with LogStore(store_path, create=True) as store:
        store.create_topic("customer-changes", partitions=2, configs={"cleanup.policy": "compact,delete"})
        store.append("customer-changes", [Record(b"k%d" % (at % 9), b"v" * 50) for at in range(2000)])
    commands = [
        ["topics", "list"],
        ["describe"],
        ["offsets", "--timestamp", "-1h"],
        ["explain"],
        ["plan"],
        ["compact", "--roll-active"],
        ["describe"],
        ["explain"],
        ["runs"],
        ["top", "--once"],
        ["verify"],
        ["retain"],
        ["export", "--dry-run", str(store_path) + "-exported"],
        ["backup", "--dry-run", str(store_path) + "-copy"],
        ["config"],
    ]
    seen = [line for line in plain_lines(on_a_terminal(store_path, *commands)) if "━" not in line]
    # Sentences are wrapped by the terminal; a table is not.
    too_wide = [line for line in seen if len(line) > 80 and "  " in line.strip()]
    assert too_wide == []
    assert "topic             partitions       size  records  cleanup.policy" in seen
    assert any(re.fullmatch(r"customer-changes +2 +\d+\.\d KiB +2000  compact,delete", line) for line in seen)
