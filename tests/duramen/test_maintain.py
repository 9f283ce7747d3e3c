"""`duramen verify`, `recover`, `retain`, `delete-records`."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logstore.files import OsFileSystem
from logstore.store import LogStore
from logstore.upkeep.retention import delete_records

Command = Callable[..., Any]
BASE_MS = 1_700_000_000_000
WEEK_MS = 604_800_000


def damage(orders: Path) -> Path:
    path = sorted((orders / "logs" / "orders-0").glob("*.log"))[1]
    data = bytearray(path.read_bytes())
    data[90] ^= 0xFF
    path.write_bytes(data)
    return path


def test_verify_finds_nothing_then_something(duramen: Command, orders: Path) -> None:
    sound = duramen("verify", output="json")
    assert (sound.code, sound.json["sound"]) == (0, True)
    assert [each["sound"] for each in sound.json["partitions"]] == [True, True]
    path = damage(orders)
    broken = duramen("verify", output="json")
    assert (broken.code, broken.json["sound"]) == (3, False)
    assert broken.json["partitions"][0]["findings"][0]["file"] == str(path)
    text = duramen("verify", "orders", "--partition", 0)
    assert text.code == 3
    assert "DAMAGED" in text.out
    assert str(path) in text.out
    assert duramen("verify", "orders", "--partition", 1).code == 0


class _DiesAtRename(OsFileSystem):
    """Dies when the first file or directory from a folder of that name gets its name."""

    def __init__(self, folder: str, passed: int = 0) -> None:
        self._folder, self._passed = folder, passed

    def rename(self, source: str, target: str) -> None:
        if f"/{self._folder}/" in source:
            self._passed -= 1
            if self._passed < 0:
                raise KeyboardInterrupt
        super().rename(source, target)


# Three files of metadata get their names before the first of the directories.
@pytest.mark.parametrize(("folder", "passed", "first"), [("state", 1, 2), ("staging", 0, 2), ("staging", 4, 3)])
def test_a_topic_widened_half_way_is_not_damaged(
    duramen: Command, orders: Path, folder: str, passed: int, first: int
) -> None:
    with LogStore(orders, fs=_DiesAtRename(folder, passed)) as dying, pytest.raises(KeyboardInterrupt):
        dying.alter_topic("orders", partitions=5)
    found = duramen("verify", output="json")
    assert (found.code, found.json["sound"]) == (0, True)
    unplaced = [each["partition"] for each in found.json["partitions"] if each["unplaced"]]
    assert unplaced == list(range(first, 5))
    text = duramen("verify")
    assert f"orders: not made yet, partitions {', '.join(map(str, unplaced))}: a process died" in text.out
    assert "DAMAGED" not in text.out
    recovered = duramen("recover", output="json")
    assert (recovered.code, recovered.json["sound"]) == (0, True)
    assert not any(each["unplaced"] for each in duramen("verify", output="json").json["partitions"])
    assert (orders / "logs" / "orders-4" / "partition.metadata").exists()


def test_a_topic_created_half_way_is_not_damaged(duramen: Command, orders: Path) -> None:
    with LogStore(orders, fs=_DiesAtRename("staging")) as dying, pytest.raises(KeyboardInterrupt):
        dying.create_topic("more", partitions=2)
    found = duramen("verify", output="json")
    assert (found.code, found.json["sound"]) == (0, True)
    assert [each["topic"] for each in found.json["partitions"] if each["unplaced"]] == ["more", "more"]
    assert duramen("recover", output="json").code == 0


def test_a_lost_directory_of_a_partition_with_records_is_damage(duramen: Command, orders: Path) -> None:
    shutil.rmtree(orders / "logs" / "orders-1")
    found = duramen("verify", output="json")
    assert found.code == 3
    assert not any(each["unplaced"] for each in found.json["partitions"])


def test_damage_below_the_log_start_is_none(duramen: Command, orders: Path) -> None:
    with LogStore(orders) as store:
        delete_records(store, store.topic("orders"), 0, before_offset=None)
    damage(orders)
    assert duramen("verify").code == 0
    assert duramen("recover", "--dry-run").code == 0


def test_recover_says_that_an_index_was_damaged_as_verify_does(duramen: Command, orders: Path) -> None:
    path = sorted((orders / "logs" / "orders-0").glob("*.timeindex"))[1]
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert duramen("verify").code == 3
    planned = duramen("recover", "--dry-run", output="json")
    assert planned.code == 3
    assert planned.json["partitions"][0]["findings"][0]["file"] == str(path)
    text = duramen("recover")
    assert text.code == 3
    assert str(path) in text.out
    assert [duramen(*command).code for command in (["verify"], ["recover", "--dry-run"])] == [0, 0]


def test_recover_names_what_would_be_lost_asks_and_keeps_the_rest(duramen: Command, orders: Path) -> None:
    path = damage(orders)
    before = path.read_bytes()
    planned = duramen("recover", "--dry-run", output="json")
    assert (planned.code, planned.json["recovered"]) == (3, False)
    (loss,) = planned.json["partitions"][0]["losses"]
    assert loss["base_offset"] == int(path.stem)
    assert loss["end_offset"] < 100
    text = duramen("recover", "--dry-run")
    assert f"offsets {loss['base_offset']} to {loss['end_offset'] - 1} would be lost" in text.out
    assert str(path) in text.out
    refused = duramen("recover")  # nobody to ask
    assert refused.code == 2
    assert "--yes" in refused.err
    assert path.read_bytes() == before
    recovered = duramen("recover", "--yes", output="json")
    assert recovered.code == 3
    report = recovered.json["partitions"][0]
    assert report["cuts"][0]["file"] == str(path)
    assert [(each["base_offset"], each["end_offset"]) for each in report["losses"]] == [
        (loss["base_offset"], loss["end_offset"])
    ]
    assert report["quarantined"]
    assert duramen("verify").code == 0
    again = duramen("recover")  # nothing is lost: nobody is asked
    assert again.code == 0
    left = duramen("consume", "orders", "--partition", 0).lines
    assert len(left) == 100 - (loss["end_offset"] - loss["base_offset"])
    assert duramen("offsets", "orders", "--partition", 0, output="json").json["offsets"][0]["high_watermark"] == 100


def test_losses_are_shown_wherever_health_is_asked_for(duramen: Command, orders: Path, tmp_path: Path) -> None:
    damage(orders)
    (loss,) = duramen("recover", "--yes", output="json").json["partitions"][0]["losses"]
    words = f"offsets {loss['base_offset']} to {loss['end_offset'] - 1}"
    for command in ("verify", "describe", "explain"):
        assert words in duramen(command).out, command
    assert duramen("verify", output="json").json["partitions"][0]["losses"] == [loss]
    assert duramen("describe", output="json").json["topics"][0]["partitions"][0]["losses"] == [loss]
    assert duramen("explain", output="json").json["partitions"][0]["losses"] == [loss]
    exported = duramen("export", tmp_path / "out", output="json").json
    assert exported["partitions"][0]["losses"] == [loss]
    duramen("backup", tmp_path / "copy")
    copied = duramen("--store", tmp_path / "copy", "describe", output="json").json
    assert copied["topics"][0]["partitions"][0]["losses"] == [loss]
    past = loss["end_offset"]
    duramen("delete-records", "orders", "--partition", 0, "--before-offset", past, "--yes")
    assert duramen("describe", output="json").json["topics"][0]["partitions"][0]["losses"] == []


def test_quarantine_is_dumped_and_put_back(duramen: Command, orders: Path) -> None:
    path = damage(orders)
    whole = duramen("consume", "orders", "--partition", 1).lines
    (loss,) = duramen("recover", "--yes", output="json").json["partitions"][0]["losses"]
    (region,) = (orders / "logs" / "orders-0" / "quarantine").glob("*/*.from-*")
    dumped = duramen("dump", region)
    assert dumped.code == 3
    assert "no intact batch" in dumped.out
    nothing = duramen("recover", "--readmit", output="json")
    assert (nothing.code, nothing.json["partitions"][0]["readmitted"]) == (0, [])
    data = bytearray(region.read_bytes())
    data[90] ^= 0xFF  # a person mends it
    region.write_bytes(data)
    assert duramen("dump", region).code == 0
    assert f"baseOffset: {loss['base_offset']} " in duramen("dump", region.parent).out
    done = duramen("recover", "--readmit", output="json")
    assert done.code == 0
    assert done.json["partitions"][0]["readmitted"] == [
        {"source": "quarantine", "base_offset": loss["base_offset"], "end_offset": loss["end_offset"]}
    ]
    assert [each["offset"] for each in duramen("consume", "orders", "--partition", 0).lines] == list(range(100))
    assert duramen("consume", "orders", "--partition", 1).lines == whole
    assert duramen("describe", output="json").json["topics"][0]["partitions"][0]["losses"] == []
    assert duramen("verify").code == 0
    assert path.exists()


def test_a_damaged_topic_file_is_damage(duramen: Command, orders: Path) -> None:
    (orders / "topics" / "orders.t").write_bytes(b"garbage")
    for arguments in (["topics", "list"], ["verify"], ["consume", "orders"]):
        assert duramen(*arguments).code == 3


def test_damaged_ends_are_found_and_recovered(duramen: Command, orders: Path) -> None:
    (path,) = (orders / "state").glob("*/ends")
    path.write_bytes(b"garbage")
    assert duramen("consume", "orders").code == 3
    verified = duramen("verify", output="json")
    assert verified.code == 3
    assert verified.json["partitions"][0]["findings"][-1]["file"] == str(path)
    assert duramen("recover").code == 3
    assert duramen("recover").code == 0
    assert len(duramen("consume", "orders").lines) == 150


def test_retain(duramen: Command, orders: Path) -> None:
    now_ms = BASE_MS + WEEK_MS + 60
    planned = duramen("retain", "--now-ms", now_ms, "--dry-run", output="json").json
    assert len(duramen("consume", "orders").lines) == 150
    done = duramen("retain", "--now-ms", now_ms, output="json").json
    assert planned["partitions"] == done["partitions"]
    first = done["partitions"][0]
    assert first["deleted"][0]["policy"] == "time"
    assert duramen("consume", "orders", "--partition", 0).lines[0]["offset"] == first["log_start_offset"] > 0
    assert "segments" in duramen("retain", "--now-ms", now_ms).out
    starts = (orders / "logs" / "log-start-offset-checkpoint").read_text()
    assert starts.startswith("0\n")


def test_delete_records(duramen: Command, orders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["delete-records", "orders", "--partition", 0, "--before-offset"]
    assert duramen(*arguments, 33, "--dry-run", output="json").json["deleted"] is False
    monkeypatch.setattr("sys.stdin", __import__("io").StringIO(""))
    assert duramen(*arguments, 33).code == 2
    assert len(duramen("consume", "orders", "--partition", 0).lines) == 100
    done = duramen(*arguments, 33, "--yes", output="json")
    assert done.json == {
        "topic": "orders",
        "partition": 0,
        "log_start_offset_before": 0,
        "log_start_offset": 33,
        "deleted": True,
    }
    assert duramen("consume", "orders", "--partition", 0).lines[0]["offset"] == 33
    assert duramen("consume", "orders", "--partition", 0, "--from-offset", 3).code == 1
    assert "orders 0 33" in (orders / "logs" / "log-start-offset-checkpoint").read_text()
    assert duramen(*arguments, 101, "--yes").code == 1
    assert duramen(*arguments, "all", "--yes").code == 2
    assert duramen(*arguments, "latest", "--yes").code == 0
    assert duramen("consume", "orders", "--partition", 0).lines == []


def test_partition_needs_one_topic(duramen: Command, orders: Path) -> None:
    for name in ("verify", "recover", "retain"):
        assert duramen(name, "--partition", 0).code == 2
