"""The console of a store that a Spark stream writes to and a daemon compacts."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from console.browser.served import ROOT, Served
from console.browser.test_drawing import answer, assert_strip_is_to_scale, settle
from console.browser.waiting import wait_until
from logstore.store import LogStore

#: Spark has to start, and the machine may be busy
SPARK_MS = 120_000


@contextlib.contextmanager
def spark_stream(store: Path, topic: str, checkpoint: Path) -> Iterator[None]:
    command = [sys.executable, str(Path(__file__).with_name("spark_stream.py")), str(store), topic, str(checkpoint)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
    try:
        yield
        _, errors = process.communicate("stop\n", timeout=SPARK_MS / 1000)
        assert process.returncode == 0, errors[-3000:]
    finally:
        process.kill()
        process.wait()


@pytest.mark.timeout(600)
def test_a_spark_stream_and_the_daemon_are_seen_at_work(
    memory: Path, tmp_path: Path, open_page: Callable[..., Page]
) -> None:
    path = memory / "spark"
    with LogStore(path, create=True) as store:
        configs = {"cleanup.policy": "compact", "segment.bytes": 16 << 10, "min.cleanable.dirty.ratio": 0.2}
        store.create_topic("rates", configs=configs)
    with Served(path, delay_ms=1_000, compaction_ms=3_000) as served, spark_stream(path, "rates", tmp_path / "check"):
        page = open_page(f"{served.url}#/topics/rates/0")
        # Nothing is reloaded: segments come, and the daemon's passes free what later records superseded.
        expect(page.locator(".strip-main canvas")).to_be_visible(timeout=SPARK_MS)
        expect(page.locator("tbody .pill-done").first).to_be_visible(timeout=SPARK_MS)
        expect(page.locator(".strip-freed")).to_be_visible(timeout=SPARK_MS)
        page.goto(f"{served.url}#/commits")
        expect(page.get_by_role("heading", name="rates")).to_be_visible()
        page.goto(f"{served.url}#/messages?topic=rates")
        page.get_by_text("key", exact=True).click()
        page.get_by_label("Key", exact=True).fill("key-7")
        page.get_by_role("button", name="Show").click()
        expect(page.locator("tbody tr").filter(has_text=re.compile("key-7"))).not_to_have_count(0)
    with LogStore(path) as store:
        left = sum(1 for _ in store.reader("rates", 0).records(0))
        assert store.high_watermark(store.topic("rates"), 0) > left  # the daemon's passes removed some
    with Served(path) as served:
        page = open_page(f"{served.url}#/topics/rates/0")
        wait_until(page, "(document.querySelector('.strip-main canvas') || {width: 0}).width > 300")
        settle(page)
        assert_strip_is_to_scale(page, answer(page, "/topics/rates/partitions/0"))
