"""`duramen config` and `describe`: every value with its source."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logstore.settings import SETTINGS, TOPIC_SETTINGS
from logstore.settings_file import store_file_template

Command = Callable[..., Any]


def test_all_settings_without_a_store(duramen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DURAMEN_STORE")
    listed = duramen("config", output="json").json["settings"]
    assert [each["name"] for each in listed] == [setting.name for setting in SETTINGS]
    assert {each["source"] for each in listed} == {"default"}
    assert len(duramen("config").out.splitlines()) == len(SETTINGS) + 1


def test_one_setting_is_explained_under_any_of_its_names(duramen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DURAMEN_STORE")
    document = duramen("config", "log.retention.hours", output="json").json["setting"]
    assert document["name"] == "retention.ms"
    assert document["broker_names"] == ["log.retention.ms", "log.retention.minutes", "log.retention.hours"]
    text = duramen("config", "retention.ms").out
    assert "604800000" in text
    assert document["doc"] in text


def test_unknown_settings_get_the_nearest_name(duramen: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DURAMEN_STORE")
    found = duramen("config", "retention.mss")
    assert found.code == 2
    assert "Did you mean retention.ms?" in found.err


def test_the_template_is_the_shipped_file(duramen: Command) -> None:
    assert duramen("config", "--template").out == store_file_template()


def test_values_come_with_their_source(duramen: Command, orders: Path) -> None:
    (orders / "duramen.toml").write_text("log.retention.hours = 1\nlog.segment.bytes = 5000\n")
    settings = {
        each["name"]: each for each in duramen("describe", "orders", output="json").json["topics"][0]["settings"]
    }
    assert len(settings) == len(TOPIC_SETTINGS)
    assert (settings["segment.bytes"]["value"], settings["segment.bytes"]["source"]) == ("1000", "topic override")
    assert settings["retention.ms"] == {
        "name": "retention.ms",
        "value": "3600000",
        "source": "store file",
        "source_name": "log.retention.hours",
    }
    assert settings["flush.ms"]["source"] == "default"
    text = duramen("describe").out
    assert "store file (log.retention.hours)" in text
    assert "topic override" in text


def test_describe_shows_what_partitions_hold(duramen: Command, orders: Path) -> None:
    partitions = duramen("describe", "orders", output="json").json["topics"][0]["partitions"]
    assert [(each["log_start_offset"], each["high_watermark"]) for each in partitions] == [(0, 100), (0, 50)]
    assert partitions[0]["segments"] > 2
    logs = (orders / "logs" / "orders-0").glob("*.log")
    assert partitions[0]["size_bytes"] == sum(path.stat().st_size for path in logs)
    assert partitions[0]["largest_timestamp_ms"] == 1_700_000_000_099


def test_a_broken_store_file_is_bad_usage(duramen: Command, orders: Path) -> None:
    (orders / "duramen.toml").write_text("log.retention.hours =\n")
    broken = duramen("describe")
    assert broken.code == 2
    assert "line 1" in broken.err
    assert "duramen.toml" in broken.err
