"""`duramen cost`: what the estimate is made of, and the page that shows it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duramen.commands import cost
from duramen.commands.cost import Load, Prices, Requests, money, requests_a_day

Command = Callable[..., Any]
PAGE = Path(__file__).parents[2] / "docs" / "bucket.md"
HOUR_MS = 3_600_000
PLAIN = Load(10, 60_000, 4, 1 << 20, HOUR_MS, 24 * HOUR_MS, readers=2, poll_ms=1000)


def test_commits_seals_passes_and_readers_are_counted_by_what_makes_them() -> None:
    found = requests_a_day(PLAIN)
    assert found["commit"] == Requests(writes=1440 * (4 + 2.25), reads=1440 * 2)
    assert found["seal"] == Requests(writes=24 * 10 * 2, reads=24 * 10 * 8 + 1440 * (1 + 4))
    assert found["compaction"] == Requests(writes=40, reads=130)
    assert found["maintenance"] == Requests(writes=144 * 3, reads=144 * (12 + 10))
    assert found["readers"] == Requests(reads=2 * (86_400 + 1440 * (4 + 4)))


def test_a_large_object_is_sent_in_parts() -> None:
    large = Load(10, 60_000, 4, 4 * (20 << 20), HOUR_MS, 24 * HOUR_MS, readers=0, poll_ms=1000)
    assert requests_a_day(large)["commit"].writes == 1440 * (4 * (3 + 2) + 2.25)


def test_no_more_seals_than_batches() -> None:
    seldom = Load(10, 24 * HOUR_MS, 4, 1, HOUR_MS, 24 * HOUR_MS, readers=0, poll_ms=1000)
    assert requests_a_day(seldom)["seal"].writes == 20


def test_money_is_requests_by_their_prices() -> None:
    assert money(Requests(writes=2000, reads=10_000), Prices(0.005, 0.0004, 0)) == pytest.approx(0.014)


def test_the_document_says_what_was_assumed(duramen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DURAMEN_STORE")
    document = duramen("cost", "--partitions", "10", "--trigger", "1m", "--stored", "3000g", output="json").json
    assert document["dollars"] == pytest.approx(document["request_dollars"] + document["storage_dollars"], abs=1e-3)
    assert document["storage_dollars"] == pytest.approx(3000 * 0.023 / 30)
    assert document["assumed"]["trigger_ms"] == 60_000
    assert document["prices"]["as_of"] == cost.PRICES_AS_OF
    assert sum(each["writes"] for each in document["a_day"]) == document["writes"]
    given = ("cost", "--partitions", "10", "--trigger", "1m", "--write-price", "0.01")
    assert duramen(*given, output="json").json["prices"]["as_of"] is None
    assert "The prices are yours." in duramen(*given).out


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("--trigger", "10"), "--trigger is '10'; write a duration with its unit, such as 10s, 5m, 1h or 1d"),
        (("--trigger", "0s"), "--trigger is '0s'"),
        (("--trigger", "10s", "--stored", "much"), "--stored is 'much'; write a size with its unit"),
        (("--trigger", "10s", "--readers", "-1"), "--readers"),
        ((), "Missing option '--trigger'"),
    ],
)
def test_what_is_wrong_is_said(duramen: Command, given: tuple[str, ...], message: str) -> None:
    done = duramen("cost", "--partitions", "3", *given)
    assert (done.code, message in done.err) == (2, True)


def test_the_page_has_the_requests_that_are_counted() -> None:
    """Its table names writes and reads of each step."""
    rows = dict(re.findall(r"^\| (commit|seal|pass|run|read|poll)\b[^|]*\| ([^|]*\|[^|]*) \|", PAGE.read_text(), re.M))
    numbers = {name: tuple(float(each) for each in re.findall(r"[\d.]+", cells)) for name, cells in rows.items()}
    steps = {
        "commit": cost.COMMIT,
        "seal": cost.SEAL,
        "pass": cost.COMPACTION,
        "run": cost.RUN,
        "read": cost.READING,
        "poll": cost.POLL,
    }
    assert numbers == {name: (step.writes, step.reads) for name, step in steps.items()}
