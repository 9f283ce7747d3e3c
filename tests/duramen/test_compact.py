"""The commands of compaction: what they say, what they do, what is refused."""

from __future__ import annotations

import base64
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from logstore.commit.committer import Committer
from logstore.commit.produce import append_table, table_of
from logstore.ledger import Ledger
from logstore.records.record import Record
from logstore.store import LogStore

Command = Callable[..., Any]
BASE_MS = 1_700_000_000_000
COMPACTED = {"cleanup.policy": "compact", "segment.bytes": 4000, "min.cleanable.dirty.ratio": 0.3}


def append(store: LogStore, topic: str, pairs: Sequence[tuple[str, str | None]], at_ms: int | None = None) -> None:
    at_ms = int(time.time() * 1000) - 60_000 if at_ms is None else at_ms
    rows = [Record(key.encode(), None if value is None else value.encode(), at_ms) for key, value in pairs]
    store.append(topic, table_of(rows))


@pytest.fixture
def accounts(store_path: Path) -> Path:
    """Compacted topic `accounts`, two partitions: 50 keys written ten times, in batches of 50."""
    with LogStore(store_path, create=True) as store:
        store.create_topic("accounts", partitions=2, configs=COMPACTED)
        store.create_topic("events")
        for turn in range(10):
            append(store, "accounts", [(f"key-{at}", f"value-{turn}-{at}" * 3) for at in range(50)])
    return store_path


def files_of(store_path: Path) -> dict[str, bytes]:
    return {
        str(path): path.read_bytes() for path in store_path.rglob("*") if path.is_file() and "locks" not in str(path)
    }


def values(store_path: Path, topic: str) -> dict[bytes, bytes | None]:
    found: dict[bytes, bytes | None] = {}
    with LogStore(store_path) as store:
        opened = store.topic(topic)
        for number in range(opened.partitions):
            for record in store.reader(opened, number).records(0):
                found[record.key or b""] = record.value
    return found


def damage(store_path: Path, partition: str) -> Path:
    """Of what was flushed: the rest would come back from staging."""
    with LogStore(store_path) as store:
        Committer(store).flush(store.topic(partition.rpartition("-")[0]))
    path = sorted((store_path / "logs" / partition).glob("*.log"))[0]
    data = bytearray(path.read_bytes())
    data[90] ^= 0xFF
    path.write_bytes(data)
    return path


# --- explain and plan ----------------------------------------------------------------------------------------------


def test_explain_says_why_and_when(accounts: Path, duramen: Command) -> None:
    found = {(each["topic"], each["partition"]): each for each in duramen("explain", output="json").json["partitions"]}
    first = found["accounts", 0]
    assert (first["due"], first["why"]) == (True, "due: its dirty ratio is above the threshold")
    assert (first["dirty_ratio"], first["first_dirty_offset"]) == (1.0, 0)
    assert 0 < first["first_uncleanable_offset"] < 500
    assert found["events", 0]["why"].startswith("not compacted")
    text = duramen("explain", "accounts")
    assert text.code == 0
    assert "accounts-1" in text.out
    assert "events" not in text.out
    assert duramen("compact").code == 0
    after = duramen("explain", "accounts", output="json").json["partitions"][0]
    assert (after["due"], after["first_dirty_offset"]) == (False, first["first_uncleanable_offset"])
    assert "with new records" in duramen("explain", "accounts").out


def test_a_tombstones_horizon_is_the_next_look(accounts: Path, duramen: Command) -> None:
    with LogStore(accounts) as store:
        append(store, "accounts", [(f"key-{at}", None) for at in range(50)])
    assert duramen("compact", "--roll-active", "--now-ms", BASE_MS).code == 0
    day_ms = 86_400_000
    before = duramen("explain", "accounts", "--now-ms", BASE_MS + 1, output="json").json["partitions"][0]
    assert (before["next_horizon_ms"], before["next_ms"], before["due"]) == (BASE_MS + day_ms, BASE_MS + day_ms, False)
    after = duramen("explain", "accounts", "--now-ms", BASE_MS + day_ms, output="json").json["partitions"][0]
    assert (after["due"], after["why"]) == (True, "due: a delete horizon has passed")


def test_keys_expire_on_an_idle_partition(store_path: Path, duramen: Command) -> None:
    ttl_ms = 3_600_000
    with LogStore(store_path, create=True) as store:
        store.create_topic("sessions", configs=COMPACTED | {"duramen.key.ttl.ms": ttl_ms})
        append(store, "sessions", [(f"key-{at}", "value") for at in range(50)], BASE_MS)
    assert duramen("compact", "--roll-active", "--force", "--now-ms", BASE_MS + 1_000).code == 0
    due_ms = BASE_MS + ttl_ms + ttl_ms // 10 + 1
    (waiting,) = duramen("explain", "--now-ms", BASE_MS + 2_000, output="json").json["partitions"]
    assert (waiting["due"], waiting["next_ms"], waiting["next_due"]) == (False, due_ms, "expired")
    assert "(duramen.key.ttl.ms)" in duramen("explain", "--now-ms", BASE_MS + 2_000).out
    assert duramen("compact", "--now-ms", due_ms - 1, output="json").json["runs"][0]["result"] == "skipped"
    (planned,) = duramen("plan", "--now-ms", due_ms, output="json").json["partitions"]
    assert (planned["due"], planned["estimate"]["removed"]) == (True, {"expired": 50})
    (run,) = duramen("compact", "--now-ms", due_ms, output="json").json["runs"]
    assert (run["result"], run["reason"]) == ("done", "due: records are older than duramen.key.ttl.ms")
    assert run["receipt"]["removed"] == {"expired": 50}
    assert set(values(store_path, "sessions").values()) == {None}
    (after,) = duramen("explain", "--now-ms", due_ms + 1, output="json").json["partitions"]
    assert (after["due"], after["next_due"]) == (False, "horizon")


def test_cold_segments_of_an_idle_partition_are_compressed_anew(store_path: Path, duramen: Command) -> None:
    cold = {"duramen.compaction.recompress.type": "zstd", "duramen.compaction.recompress.after.ms": 1_000_000}
    with LogStore(store_path, create=True) as store:
        store.create_topic("events", configs=COMPACTED | cold)
        now_ms = int(time.time() * 1000)
        append(store, "events", [(f"key-{at}", "value" * 20) for at in range(50)])
    assert duramen("compact", "--roll-active", "--force").code == 0
    (waiting,) = duramen("explain", output="json").json["partitions"]
    assert (waiting["due"], waiting["next_due"]) == (False, "recompress")
    assert now_ms + 1_099_000 <= waiting["next_ms"] <= int(time.time() * 1000) + 1_100_000
    (run,) = duramen("compact", "--now-ms", waiting["next_ms"], output="json").json["runs"]
    assert (run["result"], run["receipt"]["removed"]) == ("done", {})
    assert run["receipt"]["after_bytes"] < run["receipt"]["before_bytes"] / 2
    (after,) = duramen("explain", "--now-ms", waiting["next_ms"] + 1, output="json").json["partitions"]
    assert (after["due"], after["next_ms"]) == (False, None)


def test_a_time_to_live_set_later_is_seen_on_an_idle_partition(store_path: Path, duramen: Command) -> None:
    with LogStore(store_path, create=True) as store:
        store.create_topic("sessions", configs=COMPACTED)
        append(store, "sessions", [(f"key-{at}", "value") for at in range(50)], BASE_MS)
    assert duramen("compact", "--roll-active", "--force", "--now-ms", BASE_MS + 1_000).code == 0
    assert duramen("topics", "alter", "sessions", "--config", "duramen.key.ttl.ms=10000").code == 0
    assert duramen("compact", "--now-ms", BASE_MS + 20_000, output="json").json["runs"][0]["result"] == "done"
    assert set(values(store_path, "sessions").values()) == {None}


def test_the_plan_is_what_the_receipt_says_and_changes_nothing(accounts: Path, duramen: Command) -> None:
    before = files_of(accounts)
    planned = duramen("plan", output="json").json["partitions"]
    dry = duramen("compact", "--dry-run", output="json").json
    assert [run["reason"] for run in dry["runs"]] == ["dry run; due: its dirty ratio is above the threshold"] * 2
    assert {name: data for name, data in files_of(accounts).items() if "ledger" not in name} == {
        name: data for name, data in before.items() if "ledger" not in name
    }
    text = duramen("plan").out
    assert "superseded" in text
    assert "2 of 2 partitions are due" in text
    done = {run["partition"]: run for run in duramen("compact", "--threads", 1, output="json").json["runs"]}
    for each in planned:
        receipt = done[each["partition"]]["receipt"]
        assert each["estimate"]["removed"] == receipt["removed"]
        assert each["estimate"]["after_bytes"] == pytest.approx(receipt["after_bytes"], rel=0.25)
        assert each["groups"] == receipt["groups"]
        assert 0 < receipt["written_bytes"] <= each["extra_bytes"] * each["groups"]


def test_an_idle_active_segment_that_is_due_is_in_the_plan_and_rolled(store_path: Path, duramen: Command) -> None:
    with LogStore(store_path, create=True) as store:
        store.create_topic("idle", configs={"cleanup.policy": "compact"})
        append(store, "idle", [("k", str(at)) for at in range(100)], BASE_MS)
    (planned,) = duramen("plan", output="json").json["partitions"]
    assert (planned["rolls_active"], planned["due"], planned["estimate"]["removed"]) == (True, True, {"superseded": 99})
    (done,) = duramen("compact", output="json").json["runs"]
    assert (done["rolled"], done["result"], done["receipt"]["removed"]) == (True, "done", {"superseded": 99})


def test_what_if(accounts: Path, duramen: Command) -> None:
    def due(*options: object) -> list[bool]:
        return [each["due"] for each in duramen("plan", *options, output="json").json["partitions"]]

    assert due("--config", "min.compaction.lag.ms=100000000000000") == [False, False]
    assert due("--topic", "accounts", "--config", "min.cleanable.dirty.ratio=1") == [False, False]
    assert due("--topic", "accounts", "--config", "min.cleanable.dirty.ratio=1", "--force") == [True, True]
    assert due("--config", "cleanup.policy=compact") == [True, True, False]


def test_keyless_records_are_counted_before_they_go(store_path: Path, duramen: Command) -> None:
    with LogStore(store_path, create=True) as store:
        store.create_topic("was-deleted", configs={"segment.bytes": 2000})
        store.append("was-deleted", table_of([Record(None, b"x" * 30, BASE_MS) for _ in range(40)]))
        store.append("was-deleted", table_of([Record(b"k", b"v" * 900, BASE_MS) for _ in range(3)]))
    assert duramen("topics", "alter", "was-deleted", "--config", "cleanup.policy=compact").code == 0
    planned = duramen("plan", "--force", output="json").json["partitions"][0]
    assert planned["estimate"]["removed"]["keyless"] == 40
    assert "40 records have no key and would be removed" in duramen("plan", "--force").out
    done = duramen("compact", "--force")
    assert done.code == 0
    assert "40 keyless" in done.out


def test_a_map_that_is_too_small_names_the_one_that_would_do(store_path: Path, duramen: Command) -> None:
    with LogStore(store_path, create=True) as store:
        store.create_topic("many", configs={"cleanup.policy": "compact", "segment.bytes": 400_000})
        keys = [b"%08d" % at for at in range(60_000)]
        store.append("many", pa.table({"key": keys, "value": [b"v"] * len(keys)}))
    (store_path / "duramen.toml").write_text("log.cleaner.dedupe.buffer.size = 1_048_600\n")
    wanted = duramen("plan", output="json").json["partitions"][0]["estimate"]
    assert wanted["map_full"]
    assert wanted["map_buffer_wanted"] > 1_048_600
    assert f"log.cleaner.dedupe.buffer.size = {wanted['map_buffer_wanted']} would do" in duramen("plan").out
    done = duramen("compact")
    assert done.code == 0
    assert "the offset map was full at offset" in done.out
    (store_path / "duramen.toml").write_text(f"log.cleaner.dedupe.buffer.size = {wanted['map_buffer_wanted']}\n")
    assert not duramen("plan", "--force", output="json").json["partitions"][0]["estimate"]["map_full"]


# --- compact -------------------------------------------------------------------------------------------------------


def test_compaction_leaves_the_latest_values_and_a_receipt(accounts: Path, duramen: Command) -> None:
    truth = values(accounts, "accounts")
    done = duramen("compact", "--roll-active", output="json")
    assert done.code == 0
    assert [run["result"] for run in done.json["runs"]] == ["done", "done"]
    assert all(run["rolled"] for run in done.json["runs"])
    assert values(accounts, "accounts") == truth
    removed = sum(run["receipt"]["removed"]["superseded"] for run in done.json["runs"])
    assert removed == 450
    with LogStore(accounts) as store:
        rows = {row.run_id: row for row in Ledger(store.layout.ledger).runs()}
    assert {run["run_id"] for run in done.json["runs"]} == set(rows)
    assert {row.engine for row in rows.values()} == {"local"}
    described = duramen("describe", "accounts", output="json").json["topics"][0]["partitions"]
    assert sum(each["records"] for each in described) == sum(each["keys"] for each in described) == 50
    assert [each["tombstones"] for each in described] == [0, 0]
    assert re.search(r"\d of \d ", duramen("describe", "accounts").out)
    again = duramen("compact")
    assert again.code == 0
    assert "0 compacted, 0 failed, 2 left alone" in again.out


def test_a_damaged_partition_is_set_aside_and_the_others_go_on(accounts: Path, duramen: Command) -> None:
    path = damage(accounts, "accounts-1")
    before = path.read_bytes()
    done = duramen("compact")
    assert done.code == 1
    assert "1 compacted, 1 failed" in done.out
    assert str(path) in done.out
    assert path.read_bytes() == before
    found = duramen("explain", "accounts", output="json").json["partitions"][1]
    assert found["set_aside"]["failures"] == 1
    assert found["set_aside"]["retry_ms"] == found["set_aside"]["failed_ms"] + 60_000
    assert "set aside after 1 failures" in duramen("explain").out
    later = duramen("compact", output="json")
    assert later.code == 0
    assert {run["partition"]: run["result"] for run in later.json["runs"]} == {0: "skipped", 1: "skipped"}
    assert duramen("compact", "--force").code == 1
    assert duramen("explain", "accounts", output="json").json["partitions"][1]["set_aside"]["failures"] == 2


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        (["compact", "--topic", "nothing"], 1, "no topic is called nothing"),
        (["compact", "--topic", "events"], 1, "topic events is not compacted"),
        (["plan", "--topic", "events"], 1, "topic events is not compacted"),
        (["compact", "--partition", "0"], 2, "--partition needs exactly one --topic"),
        (["compact", "--topic", "accounts", "--partition", "7"], 1, "has partitions 0 to 1"),
        (["compact", "--threads", "0"], 2, "--threads"),
        (["compact", "--engine", "flink"], 2, "--engine"),
        (["plan", "--config", "min.cleanable.dirty.ratios=1"], 2, "min.cleanable.dirty.ratio?"),
        (["plan", "--config", "min.cleanable.dirty.ratio=2"], 2, "0..1"),
        (["explain", "nothing"], 1, "no topic is called nothing"),
        (["pause", "nothing"], 1, "no topic is called nothing"),
        (["prove-erased", "accounts"], 2, "KEY"),
        (["prove-erased", "accounts", "%", "--encoding", "base64"], 2, "not base64"),
    ],
)
def test_what_is_refused(accounts: Path, duramen: Command, arguments: list[str], code: int, expected: str) -> None:
    done = duramen(*arguments)
    assert (done.code, done.out) == (code, "")
    assert expected in done.err


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ("log.cleaner.threads = [", "malformed TOML on line 2"),
        ("log.cleaner.dedupe.buffer.size = 20", "gives each of 1 cleaner threads too little"),
        ("log.cleaner.backoff.ms = -1", "log.cleaner.backoff.ms = -1"),
    ],
)
def test_bad_settings_are_plain_errors(accounts: Path, duramen: Command, settings: str, expected: str) -> None:
    (accounts / "duramen.toml").write_text(settings + "\n")
    done = duramen("compact")
    assert (done.code, done.out) == (2, "")
    assert expected in done.err
    assert str(accounts / "duramen.toml") in done.err


def test_a_map_without_room_for_one_key_fails_the_partition_plainly(accounts: Path, duramen: Command) -> None:
    (accounts / "duramen.toml").write_text("log.cleaner.io.buffer.load.factor = 0.000000001\n")
    done = duramen("compact")
    assert (done.code, "has no room for a single key" in done.out) == (1, True)


def test_a_paused_topic_is_left_alone_until_it_is_resumed(accounts: Path, duramen: Command) -> None:
    assert duramen("pause", "accounts", "--dry-run", output="json").json["altered"] is False
    assert duramen("pause", "accounts").out == "Paused compaction of accounts\n"
    assert "paused; `duramen resume`" in duramen("explain", "accounts").out
    done = duramen("compact", "--force", output="json")
    assert (done.code, {run["result"] for run in done.json["runs"]}) == (0, {"skipped"})
    assert duramen("resume", "accounts", output="json").json == {"topic": "accounts", "paused": False, "altered": True}
    assert {run["result"] for run in duramen("compact", output="json").json["runs"]} == {"done"}


# --- prove-erased --------------------------------------------------------------------------------------------------


def test_every_place_of_a_key_until_nothing_holds_it(accounts: Path, duramen: Command) -> None:
    def places(*options: object) -> list[dict[str, Any]]:
        return duramen("prove-erased", "accounts", "key-7", *options, output="json").json["keys"][0]["places"]

    with LogStore(accounts) as store:
        store.alter_topic("accounts", configs={"delete.retention.ms": 1000, "file.delete.delay.ms": 5000})
        # Not through the store, which would flush it when it is closed.
        at_ms = int(time.time() * 1000) - 60_000
        append_table(Committer(store), "accounts", table_of([Record(b"key-7", b"value-10-7", at_ms)]))
    found = places()
    assert {each["kind"] for each in found} == {"segment", "staging"}
    assert [each["holds"] for each in found if "its value" in each["holds"]]
    assert any(each["goes"].startswith("stays: it is the key's value") for each in found)
    assert any(each["goes"].startswith("with the next flush") for each in found if each["kind"] == "staging")

    with LogStore(accounts) as store:
        append(store, "accounts", [("key-7", None)])
    now_ms = int(time.time() * 1000)
    assert duramen("compact", "--roll-active", "--now-ms", now_ms).code == 0
    found = places()
    assert {each["kind"] for each in found} == {"segment", "deleted"}
    (tombstone,) = [each for each in found if each["kind"] == "segment"]
    assert (tombstone["holds"], tombstone["goes_ms"]) == ("its tombstone", now_ms + 1000)
    deleted = [each for each in found if each["kind"] == "deleted"]
    assert all(now_ms < each["goes_ms"] < now_ms + 60_000 for each in deleted)

    assert duramen("compact", "--now-ms", now_ms + 1000).code == 0
    assert {each["kind"] for each in places()} == {"deleted"}
    assert duramen("prove-erased", "accounts", "key-7").code == 1
    assert duramen("compact", "--now-ms", now_ms + 100_000).code == 0
    done = duramen("prove-erased", "accounts", "key-7", "never", output="json")
    assert done.code == 0
    gone, never = done.json["keys"]
    assert (gone["erased"], gone["removed_by"]["removed"]["tombstone"]) == (True, 1)
    text = duramen("prove-erased", "accounts", "key-7").out
    assert gone["removed_by"]["run_id"] in text
    assert never["erased"]
    assert b"key-7\x00" not in b"".join(path.read_bytes() for path in (accounts / "logs").rglob("*") if path.is_file())


def test_quarantine_runs_and_what_cannot_be_read_are_places_too(accounts: Path, duramen: Command) -> None:
    assert duramen("compact", "--roll-active").code == 0
    key = base64.b64encode(b"key-7").decode()

    def kinds() -> dict[str, str]:
        done = duramen("prove-erased", "accounts", key, "--encoding", "base64", output="json")
        assert done.code == 1
        return {each["kind"]: each["goes"] for each in done.json["keys"][0]["places"]}

    holder = next(path for path in sorted(accounts.glob("logs/accounts-*/*.log")) if b"key-7" in path.read_bytes())
    quarantine = holder.parent / "quarantine" / "000001"
    quarantine.mkdir(parents=True)
    (quarantine / holder.name).write_bytes(holder.read_bytes())
    assert kinds()["quarantine"] == f"never by itself: look at it, then remove {quarantine}"
    run = accounts / "staging" / ("0" * 32 + "-run")
    run.mkdir()
    (run / "owner").write_text("")
    (run / f"{holder.name}.cleaned").write_bytes(holder.read_bytes())
    assert kinds()["run"] == "left by a killed compaction: with the next one"
    (run / "owner").write_text(json.dumps({"partition": "others-0", "what": f"compact {holder.parent.name}"}))
    assert "run" not in kinds()
    (run / "owner").write_text(json.dumps({"partition": holder.parent.name, "what": "in other words"}))
    assert kinds()["run"] == "left by a killed compaction: with the next one"
    (quarantine / f"{holder.name}.from-100").write_bytes(b"garbage" * 20)
    done = duramen("prove-erased", "accounts", "no such key", output="json")
    (place,) = done.json["keys"][0]["places"]
    assert (done.code, place["unreadable"], place["kind"]) == (1, True, "quarantine")
    assert duramen("compact").code == 0
    assert "run" not in kinds()


# --- a person at the keyboard --------------------------------------------------------------------------------------


def test_progress_is_live_and_an_interrupt_ends_the_run_at_its_next_step(accounts: Path, duramen: Command) -> None:
    truth = values(accounts, "accounts")
    (accounts / "duramen.toml").write_text("log.cleaner.io.max.bytes.per.second = 2000.0\n")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "duramen", "--store", str(accounts), "compact", "--threads", "1"],
        stdout=subprocess.PIPE,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "200"},
    )
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + 60
    try:
        while not (b"accounts-0" in seen and b"B/s" in seen and b"2 partitions" in seen):
            assert time.monotonic() < deadline, seen.decode(errors="replace")
            assert process.poll() is None, seen.decode(errors="replace")
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 65536)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    assert process.returncode == 130, out.decode()
    assert b"abandoned" in out
    assert b"the run was stopped" in out
    assert not list((accounts / "staging").glob("*-run"))
    (accounts / "duramen.toml").unlink()
    assert duramen("compact").code == 0
    assert values(accounts, "accounts") == truth
