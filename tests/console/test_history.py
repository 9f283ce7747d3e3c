"""The ring of samples: bounded for ever, and whatever happens to the file, readers see true samples or none."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from compaction_job.activity import Activity, read_activities, remove_stale
from compaction_job.job import explain
from compaction_job.sampling import take_samples
from console.conftest import fill_orders
from duramen.cli import run
from logstore.directory.history import FILE_BYTES, TIERS, Sample, read_samples, write_sample
from logstore.files import OS_FILES
from logstore.store import LogStore
from logstore.upkeep.strays import find_strays
from simulation.filesystem import SimulatedFileSystem

START_MS = 1_790_000_000_000


def sample(time_ms: int) -> Sample:
    return Sample(time_ms, time_ms % 1000, 2, 3, 4)


@settings(max_examples=50)
@given(st.lists(st.integers(0, 40 * 86_400_000), min_size=1, max_size=60))
def test_readers_see_the_last_sample_of_each_step_and_the_file_never_grows(times: list[int]) -> None:
    fs = SimulatedFileSystem()
    fs.mkdir("/h")
    now_ms = START_MS
    written: list[Sample] = []
    for after in sorted(times):
        now_ms = START_MS + after
        written.append(sample(now_ms))
        write_sample(fs, "/h/history", "topic", written[-1])
    assert fs.stat("/h/history").size_bytes <= FILE_BYTES
    for tier in TIERS:
        last = {each.time_ms // tier.step_ms: each for each in written}
        wanted = [each for each in last.values() if each.time_ms > now_ms - tier.span_ms]
        found = read_samples(fs, "/h/history", "topic", tier, now_ms=now_ms)
        # A slot that was used again took the older sample with it.
        assert found == [each for each in wanted if each in found]
        slots = {each.time_ms // tier.step_ms % tier.slots for each in wanted}
        assert len(found) == len(slots)
        assert found[-1] == written[-1]


def test_torn_and_foreign_bytes_are_no_samples_and_the_next_sample_begins_anew(tmp_path: Path, seed: int) -> None:
    path = str(tmp_path / "history")
    chosen = random.Random(seed)
    written = {sample(START_MS + n * 60_000) for n in range(200)}
    for each in sorted(written, key=lambda each: each.time_ms):
        write_sample(OS_FILES, path, "topic", each)
    now_ms = START_MS + 199 * 60_000
    assert len(read_samples(OS_FILES, path, "topic", TIERS[0], now_ms=now_ms)) == 180
    assert read_samples(OS_FILES, path, "another", TIERS[0], now_ms=now_ms) == []
    whole = Path(path).read_bytes()
    for _ in range(100):
        data = bytearray(whole[: chosen.randrange(len(whole) + 1)])
        for _ in range(chosen.randrange(20)):
            if data:
                data[chosen.randrange(len(data))] = chosen.randrange(256)
        Path(path).write_bytes(data)
        for tier in TIERS:
            assert set(read_samples(OS_FILES, path, "topic", tier, now_ms=now_ms)) <= written
    Path(path).write_bytes(b"rubbish" * 10_000)
    write_sample(OS_FILES, path, "topic", sample(now_ms))
    assert read_samples(OS_FILES, path, "topic", TIERS[0], now_ms=now_ms) == [sample(now_ms)]
    assert Path(path).stat().st_size <= FILE_BYTES


def test_samples_are_kept_in_the_store_go_with_the_topic_and_disturb_nobody(shop: LogStore) -> None:
    for _ in range(3):
        take_samples(shop)
    topic = shop.topic("orders")
    path = Path(shop.layout.history(topic.id))
    assert path.stat().st_size <= FILE_BYTES
    assert Path(shop.layout.history(None)).exists()
    [found] = read_samples(shop.fs, str(path), topic.id, TIERS[2], now_ms=shop.clock.now_ms())
    assert found.size_bytes == sum(shop.log_bytes(topic, number) for number in range(2))
    assert find_strays(shop) == []
    assert run(["--store", shop.path, "verify"]) == 0
    fill_orders(shop, batches=1, first=8)
    path.write_bytes(b"")
    explain(shop)
    shop.delete_topic("orders")
    assert not path.exists()


def said_of_pass(store: LogStore, step: str, done_bytes: int) -> dict[str, Any]:
    """What the process says of its one pass, once it says that it is so far."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for each in read_activities(store, now_ms=store.clock.now_ms()):
            found: dict[str, Any] = each["passes"][0] if each["passes"] else {}
            if (found.get("step"), found.get("done_bytes")) == (step, done_bytes):
                return found
        time.sleep(0.05)
    raise AssertionError(f"nothing was said of {step}")


def test_a_process_says_what_it_does_while_it_lives(shop: LogStore) -> None:
    plan = next(each for each in explain(shop) if each.topic == "orders")
    with Activity(shop) as activity:
        activity.begun(plan, "run-orders-0", "local")
        activity.moved(plan.name, "index", 100)
        assert said_of_pass(shop, "index", 100)["run_id"] == "run-orders-0"
        activity.moved(plan.name, "rewrite", 50)
        activity.moved(plan.name, "write", 5)
        said_of_pass(shop, "rewrite", 50)
        assert read_activities(shop, now_ms=shop.clock.now_ms() + 3_600_000) == []
        remove_stale(shop)
        assert read_activities(shop, now_ms=shop.clock.now_ms())
    assert read_activities(shop, now_ms=shop.clock.now_ms()) == []


def test_the_history_of_a_store_is_no_stray(shop: LogStore) -> None:
    """`state/` has a folder for each topic and nothing else: what reads it takes every name for a topic's id."""
    take_samples(shop)
    assert Path(shop.layout.history(None)).exists()
    assert sorted(os.listdir(shop.layout.state)) == sorted(topic.id for topic in shop.topics())
    assert find_strays(shop) == []
