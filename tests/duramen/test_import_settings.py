"""Import: the topics' settings come along, are given, or are unknown; until they are known nothing is deleted."""

from __future__ import annotations

from pathlib import Path

import pytest

from logstore.directory.checkpoint import MetaProperties, write_meta_properties
from logstore.files import OS_FILES
from metadata_log import config

from .conftest import BASE_MS, Command, with_metadata

MUCH_LATER = BASE_MS + 10**12


def count(duramen: Command) -> int:
    return len(duramen("consume", "orders").lines)


def clean_up(duramen: Command) -> None:
    """All that deletes by itself, long after."""
    duramen("retain", "--now-ms", MUCH_LATER)
    duramen("compact", "--engine", "local", "--force", "--now-ms", MUCH_LATER)


def test_a_topic_kept_for_ever_is_kept_for_ever(duramen: Command, orders: Path, broker: Path) -> None:
    with_metadata(orders, broker, config(2, "orders", "retention.ms", "-1"))
    found = duramen("import", broker, output="json")
    assert found.code == 0
    (imported,) = found.json["topics"]
    assert (imported["configs"], imported["settings_unknown"]) == ({"retention.ms": "-1"}, False)
    clean_up(duramen)
    assert count(duramen) == 150


def test_settings_that_delete_come_along_too(duramen: Command, orders: Path, broker: Path) -> None:
    with_metadata(orders, broker, config(4, "", "log.retention.ms", "1000"))
    assert "retention.ms=1000" in duramen("import", broker).out
    clean_up(duramen)
    assert count(duramen) == 0


def test_a_compacted_topic_is_compacted(duramen: Command, orders: Path, broker: Path) -> None:
    with_metadata(orders, broker, config(2, "orders", "cleanup.policy", "compact"))
    assert duramen("import", broker).code == 0
    clean_up(duramen)
    assert 0 < count(duramen) < 150


@pytest.mark.parametrize("metadata", ["none", "silent", "damaged"])
def test_without_settings_nothing_is_deleted_until_they_are_given(
    duramen: Command, orders: Path, broker: Path, metadata: str
) -> None:
    if metadata != "none":
        with_metadata(orders, broker)
    if metadata == "damaged":
        (path,) = (broker / "__cluster_metadata-0").glob("*.log")
        path.write_bytes(path.read_bytes()[:-2])
    found = duramen("import", broker)
    assert found.code == 0
    assert "orders: settings unknown" in found.out
    clean_up(duramen)
    assert count(duramen) == 150
    assert "settings unknown" in duramen("explain", "orders").out
    assert "unknown" in duramen("describe", "orders").out
    assert duramen("topics", "alter", "orders", "--defaults").code == 0
    clean_up(duramen)
    assert count(duramen) == 0


def test_a_topic_that_is_kept_is_not_taken_for_its_neighbour(duramen: Command, orders: Path, broker: Path) -> None:
    """Both have no settings of their own; one has the store's, of the other nobody knows."""
    assert duramen("topics", "create", "accounts").code == 0
    assert "orders: settings unknown" in duramen("import", broker).out
    clean_up(duramen)
    assert count(duramen) == 150


@pytest.mark.parametrize("given", [["--defaults"], ["--topic-config", "retention.ms=5"]])
def test_settings_can_be_given(duramen: Command, broker: Path, given: list[str]) -> None:
    assert duramen("import", broker, *given, output="json").json["topics"][0]["settings_unknown"] is False
    clean_up(duramen)
    assert count(duramen) == 0


def test_server_properties_tell_the_brokers_defaults(
    duramen: Command, orders: Path, broker: Path, tmp_path: Path
) -> None:
    with_metadata(orders, broker, config(4, "1", "log.segment.bytes", "2000"))
    write_meta_properties(OS_FILES, str(broker / "meta.properties"), MetaProperties(node_id=1, cluster_id="c"))
    (tmp_path / "server.properties").write_text("log.retention.hours=-1\nlog.segment.bytes=1000\nbroker.rack=a\n")
    found = duramen("import", broker, "--server-properties", tmp_path / "server.properties", output="json")
    assert found.code == 0, found.err
    (imported,) = found.json["topics"]
    assert imported["configs"] == {"segment.bytes": "2000", "retention.ms": "-1"}
    assert imported["settings_unknown"] is False


def test_the_metadata_log_may_lie_elsewhere(duramen: Command, orders: Path, broker: Path, tmp_path: Path) -> None:
    with_metadata(orders, tmp_path / "elsewhere", config(2, "orders", "retention.ms", "-1"))
    assert duramen("import", broker, "--metadata-dir", tmp_path / "nowhere", "--dry-run").code == 1
    found = duramen("import", broker, "--metadata-dir", tmp_path / "elsewhere", output="json")
    assert found.json["topics"][0]["configs"] == {"retention.ms": "-1"}
