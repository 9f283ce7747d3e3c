"""Times as people write them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from duramen.moments import moment_ms
from duramen.session import BadUsage

from .conftest import BASE_MS, Command


@pytest.mark.parametrize(
    ("text", "wanted_ms"),
    [
        ("0", 0),
        ("1700000000000", BASE_MS),
        ("2023-11-14T22:13:20Z", BASE_MS),
        ("2023-11-14T22:13:20.000z", BASE_MS),
        ("2023-11-14T23:13:20+01:00", BASE_MS),
        ("2023-11-14 22:13:20", BASE_MS),
        ("2023-11-14T22:13Z", BASE_MS - 20_000),
        ("2023-11-14", 1_699_920_000_000),
        ("2023-11-14T22:13:20.123456Z", BASE_MS + 123),
        ("1970-01-01T00:00Z", 0),
    ],
)
def test_moments(text: str, wanted_ms: int) -> None:
    assert moment_ms(text) == wanted_ms


@pytest.mark.parametrize(
    ("text", "ago_ms"), [("now", 0), ("-90s", 90_000), ("-15m", 900_000), ("-1h", 3_600_000), ("-7d", 604_800_000)]
)
def test_how_long_ago(text: str, ago_ms: int) -> None:
    before = time.time() * 1000
    found = moment_ms(text)
    assert before - ago_ms - 1 <= found <= time.time() * 1000 - ago_ms + 1


@pytest.mark.parametrize(
    "text", ["", "soon", "-1y", "-h", "1969-12-31", "2023-13-01", "2023-11-14T25:00Z", "9" * 19, "-1", "1.5", "٣"]
)
def test_no_moments(text: str) -> None:
    with pytest.raises(BadUsage, match="is not a time; write milliseconds"):
        moment_ms(text)


def test_wherever_a_time_is_taken(duramen: Command, orders: Path) -> None:
    iso = "2023-11-14T22:13:20.045Z"
    lines = duramen("consume", "orders", "--partition", "1", "--from-timestamp", iso).lines
    assert [each["offset"] for each in lines] == [45, 46, 47, 48, 49]
    assert duramen("consume", "orders", "--from-timestamp", "-1h").lines == []
    found = duramen("offsets", "orders", "--timestamp", iso, output="json").json["offsets"]
    assert [each["found_offset"] for each in found] == [45, 45]
    assert "2023-11-14T22:13:20.045Z" in duramen("offsets", "orders", "--timestamp", iso).out
    restored = duramen("restore", "orders", "--as-of-timestamp", "2023-11-14T22:13:20.002Z").lines
    assert {each["offset"] for each in restored} == {0, 1, 2}
    assert duramen("explain", "--now-ms", "2026-01-01T00:00Z", output="json").json["now_ms"] == 1_767_225_600_000
    for wrong in (["consume", "orders", "--from-timestamp"], ["offsets", "--timestamp"], ["retain", "--now-ms"]):
        refused = duramen(*wrong, "soon")
        assert (refused.code, "2026-11-01T10:00Z" in refused.err) == (2, True)
