"""A pass under way is seen with its step, bytes and rate; one that failed with its reason and its next try; and a key
with the run that removed it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from playwright.sync_api import Page, expect

from compaction_job import compact
from console.browser.served import Served
from duramen.console.actions import PAUSED
from logstore.commit.committer import Committer
from logstore.records.record import Record
from logstore.store import LogStore

Open = Callable[..., Page]
CONFIGS = {"cleanup.policy": "compact", "segment.bytes": 16 << 10, "min.cleanable.dirty.ratio": 0.1}


def fill(store: LogStore, topic: str, rounds: int) -> None:
    for _ in range(rounds):
        store.append(topic, [Record(b"key-%d" % n, b"v" * 90) for n in range(60)])


def test_a_pass_under_way_is_in_the_header_and_on_its_partitions_page(memory: Path, open_page: Open) -> None:
    path = memory / "passes"
    with LogStore(path, create=True) as store:
        store.create_topic("slow", configs=CONFIGS | {PAUSED: "true"})
        fill(store, "slow", 60)
    # The limit on bytes a second makes the pass long enough to be looked at.
    slowly = {"log.cleaner.io.max.bytes.per.second": 60_000}
    with Served(path, delay_ms=1_000, compaction_ms=1_000, settings=slowly) as served:
        page = open_page(f"{served.url}#/topics/slow/0")
        expect(page.locator(".job")).to_have_count(4)
        with LogStore(path) as store:
            store.alter_topic("slow", unset=[PAUSED])
        expect(page.locator(".job-running").filter(has_text="compaction")).to_be_visible(timeout=45_000)
        running = page.locator(".passes li")
        expect(running).to_contain_text("slow-0")
        expect(running.locator(".pass-step")).to_have_text(re.compile("index|rewrite"))
        expect(running).to_contain_text(re.compile(r"KiB of 360 KiB · [\d.]+ KiB/s"), timeout=30_000)
        assert page.locator(".passes .meter").count() == 1
        expect(page.locator(".running-line")).to_contain_text("compacting")
        # It ends before the eyes.
        expect(page.locator("tbody .pill-done").first).to_be_visible(timeout=60_000)
        expect(running).to_have_count(0)


def test_a_partition_that_failed_says_why_and_when_it_is_tried_again(memory: Path, open_page: Open) -> None:
    path = memory / "aside"
    with LogStore(path, create=True) as store:
        topic = store.create_topic("broken", configs=CONFIGS)
        fill(store, "broken", 20)
        Committer(store).flush(topic)  # the rest would come back from staging
        first = store.partition_state(topic, 0).segments[0].base_offset
        log = Path(store.layout.partition(topic.partition(0))) / f"{first:020d}.log"
        data = bytearray(log.read_bytes())
        data[90] ^= 0xFF
        log.write_bytes(data)
        assert compact(store).failed
    with Served(path) as served:
        page = open_page(f"{served.url}#/why")
        row = page.locator("tbody tr").filter(has_text="broken-0")
        expect(row.locator(".pill-set_aside")).to_be_visible()
        expect(row).to_contain_text(re.compile(r"in \d+ s|in 1 m"))
        page.goto(f"{served.url}#/topics/broken/0")
        expect(page.locator(".why .note-error")).to_contain_text("Set aside after 1 failure.")
        expect(page.locator(".why .note-error")).to_contain_text(re.compile("CRC|checksum", re.IGNORECASE))
        expect(page.locator(".countdowns")).to_contain_text("tried again")
        page.locator(".pop summary").click()
        expect(page.locator(".pop-body")).to_contain_text("broken-0")
        page.goto(f"{served.url}#/horizons")
        expect(page.locator("tbody")).to_contain_text("retry")


def test_a_key_that_is_gone_leads_to_the_run_that_removed_it(memory: Path, open_page: Open) -> None:
    path = memory / "gone"
    with LogStore(path, create=True) as store:
        soon = {"delete.retention.ms": 0, "file.delete.delay.ms": 0}
        store.create_topic("people", configs=CONFIGS | soon)
        store.append("people", [Record(b"ada", b"1"), Record(b"bob", b"2")])
        store.append("people", [Record(b"ada", None)])
        runs = [compact(store, force=True, roll_active=True) for _ in range(3)]
        assert any(run.report.removed.get("tombstone") for report in runs for run in report.done if run.report)
    with Served(path) as served:
        page = open_page(f"{served.url}#/erasure?topic=people&key=ada")
        expect(page.locator(".verdict")).to_contain_text("Nothing in this store holds this key.")
        page.locator(".verdict a").click()
        expect(page.get_by_role("heading", name="Receipt", exact=True)).to_be_visible()
        expect(page.locator("main .legend")).to_contain_text("tombstone 1")
