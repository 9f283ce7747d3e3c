"""What is drawn is what is there: segments to scale, a compaction before the eyes, records found by their key."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from console.browser.served import Served
from console.browser.waiting import wait_until
from duramen.console.actions import PAUSED
from logstore.records.record import Record
from logstore.store import LogStore

Open = Callable[..., Page]

#: Reads the strip's lowest row of pixels, where every section is its plain colour.
PIXELS = """
() => {
  const canvas = document.querySelector(".strip-main canvas");
  const rgb = (name) => {
    const probe = document.createElement("canvas").getContext("2d");
    probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
    probe.fillRect(0, 0, 1, 1);
    return probe.getImageData(0, 0, 1, 1).data.slice(0, 3).join();
  };
  const names = Object.fromEntries(["clean", "dirty", "uncleanable", "active"].map((name) => [rgb(name), name]));
  const row = canvas.getContext("2d").getImageData(0, canvas.height - 3, canvas.width, 1).data;
  const found = {clean: 0, dirty: 0, uncleanable: 0, active: 0, other: 0};
  for (let i = 0; i < row.length; i += 4) found[names[[row[i], row[i + 1], row[i + 2]].join()] || "other"] += 1;
  const settled = document.querySelector(".strip-main canvas").dataset;
  return {...found, width: canvas.width, bytes: Number(settled.bytes), width_bytes: Number(settled.widthBytes)};
}
"""


def answer(page: Page, path: str) -> Any:
    return page.evaluate("(path) => fetch('/api/v1' + path).then((answer) => answer.json())", path)


def settle(page: Page) -> None:
    """A strip that turns into another one is not to scale; when it stands still, it is."""
    before, drawn = None, page.evaluate(PIXELS)
    while drawn != before:
        page.wait_for_timeout(300)
        before, drawn = drawn, page.evaluate(PIXELS)


def assert_strip_is_to_scale(page: Page, log: Any) -> None:
    drawn = page.evaluate(PIXELS)
    assert drawn["bytes"] == log["size_bytes"] == sum(each["size_bytes"] for each in log["segments"])
    per_pixel = drawn["width_bytes"] / drawn["width"]
    for section in ("clean", "dirty", "uncleanable", "active"):
        there = sum(each["size_bytes"] for each in log["segments"] if each["section"] == section)
        assert abs(drawn[section] * per_pixel - there) <= 3 * per_pixel, (section, drawn)
    free = drawn["width_bytes"] - drawn["bytes"]
    assert abs(drawn["other"] * per_pixel - free) <= 5 * per_pixel


@pytest.mark.parametrize(("topic", "number"), [("orders", 0), ("accounts", 3), ("payments", 1), ("clicks", 0)])
def test_the_strip_adds_up_to_the_logs_bytes(shop: Served, open_page: Open, topic: str, number: int) -> None:
    page = open_page(f"{shop.url}#/topics/{topic}/{number}")
    expect(page.locator(".strip-main canvas")).to_be_visible()
    wait_until(page, "document.querySelector('.strip-main canvas').width > 300")
    log = answer(page, f"/topics/{topic}/partitions/{number}")
    assert_strip_is_to_scale(page, log)
    legend = page.locator(".strip-foot .legend").inner_text()
    assert {"clean", "dirty", "uncleanable", "active"} <= set(legend.split())


def test_keys_walk_over_the_segments_and_say_what_they_are(shop: Served, open_page: Open) -> None:
    page = open_page(f"{shop.url}#/topics/orders/1")
    strip = page.get_by_role("slider", name="Segments of orders-1")
    strip.focus()
    segments = answer(page, "/topics/orders/partitions/1")["segments"]
    page.keyboard.press("End")
    expect(strip).to_have_attribute("aria-valuetext", re.compile(f"offset {segments[-1]['base_offset']:,}, active"))
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    expect(page.locator(".strip-detail")).to_contain_text(f"{segments[1]['base_offset']:,}")
    page.keyboard.press("+")
    expect(page.locator(".strip-mini")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator(".strip-mini")).to_be_hidden()


def test_a_stream_and_the_daemons_compaction_change_the_strip_before_the_eyes(memory: Path, open_page: Open) -> None:
    path = memory / "stream"
    with LogStore(path, create=True) as store:
        configs = {"cleanup.policy": "compact", "segment.bytes": 16 << 10, "min.cleanable.dirty.ratio": 0.2}
        store.create_topic("stream", configs=configs | {PAUSED: "true"})
        append(store, 40)
    with Served(path, delay_ms=1_000, compaction_ms=2_000) as served:
        page = open_page(f"{served.url}#/topics/stream/0")
        expect(page.locator(".strip-main canvas")).to_be_visible()
        before = page.evaluate(PIXELS)
        assert before["dirty"] > before["width"] / 2
        with LogStore(path) as store:
            store.alter_topic("stream", unset=[PAUSED])
        stop = threading.Event()

        def stream() -> None:
            with LogStore(path) as store:
                while not stop.wait(0.3):
                    append(store, 1)

        writer = threading.Thread(target=stream)
        writer.start()
        try:
            # Nothing is reloaded: the freed part shows up on the page that is open.
            expect(page.locator(".strip-freed")).to_be_visible(timeout=45_000)
            wait_until(page, "Number(document.querySelector('.strip-main canvas').dataset.bytes) > 0")
            expect(page.locator("tbody .pill-done").first).to_be_visible()
        finally:
            stop.set()
            writer.join()
        # The old strip turns into the new one for a second; then it is to scale again. The clean part is some 6 KB, of
        # all that was there when the log was largest: on a slow machine that is a lot.
        wait_until(page, f"() => {{ const drawn = ({PIXELS})(); return drawn.clean > 4 && drawn.other > 200; }}")
        after = page.evaluate(PIXELS)
        assert after["bytes"] < before["bytes"] / 2
        assert after["dirty"] < before["dirty"]
        assert page.locator(".job").count() == 4


def append(store: LogStore, rounds: int) -> None:
    for _ in range(rounds):
        store.append("stream", [Record(b"key-%d" % n, b"v" * 90) for n in range(60)])


def test_a_record_is_found_by_its_key(shop: Served, open_page: Open) -> None:
    with LogStore(shop.store) as store:
        store.append("orders", [Record(b"customer-by-hand", b'{"name":"Ada","note":"found me"}')])
    page = open_page(f"{shop.url}#/messages?topic=orders")
    expect(page.locator("tbody tr").first).to_be_visible()
    page.get_by_text("key", exact=True).click()
    page.get_by_label("Key", exact=True).fill("customer-by-hand")
    page.get_by_role("button", name="Show").click()
    row = page.locator("tbody tr").filter(has_text="customer-by-hand")
    expect(row).to_have_count(1)
    row.get_by_role("button").click()
    expect(page.locator(".record pre").last).to_contain_text('"note": "found me"')


def test_records_are_found_by_offset_and_time(shop: Served, open_page: Open) -> None:
    page = open_page(f"{shop.url}#/messages?topic=accounts&partition=2")
    expect(page.locator("tbody tr").first).to_be_visible()
    newest = int(page.locator("tbody tr button").first.inner_text().replace(",", ""))
    page.get_by_text("offset", exact=True).click()
    page.get_by_label("Offset", exact=True).fill(str(newest - 5))
    expect(page.locator("tbody tr button").first).to_have_text(f"{newest - 5:,}")
    page.get_by_text("time", exact=True).click()
    page.get_by_label("Time", exact=True).fill("2001-01-01T00:00:00")
    first = answer(page, "/topics/accounts/messages?partition=2&at_offset=0&limit=1")["messages"][0]["offset"]
    expect(page.locator("tbody tr button").first).to_have_text(f"{first:,}")


def test_sliders_change_what_is_due(shop: Served, open_page: Open) -> None:
    page = open_page(f"{shop.url}#/what-if")
    due = page.locator("[data-then='due partitions']")
    expect(due).to_be_visible()
    slider = page.get_by_role("slider", name="Dirty ratio")
    slider.fill("0")
    wanted = answer(page, "/what-if?ratio=0")["then"]["due"]
    expect(due).to_have_text(str(wanted))
    slider.fill("100")
    expect(due).to_have_text(str(answer(page, "/what-if?ratio=1")["then"]["due"]))
    assert answer(page, "/what-if?ratio=1")["then"]["due"] < wanted
    page.get_by_role("button", name="reset all").click()
    expect(due).to_have_text(str(answer(page, "/what-if")["then"]["due"]))
    page.get_by_label("Read records to estimate").check()
    expect(page.locator("[data-then='bytes saved']")).to_contain_text("B")


def test_topics_are_searched_sorted_and_opened_by_keys(shop: Served, open_page: Open) -> None:
    page = open_page(shop.url)
    rows = page.locator("tbody tr")
    expect(rows).to_have_count(7)
    page.keyboard.press("/")
    page.keyboard.type("ord")
    expect(rows).to_have_count(1)
    page.get_by_label("Search topics").fill("")
    page.get_by_role("button", name="Size").click()
    sizes = [each["size_bytes"] for each in answer(page, "/topics?sort=size&order=desc")["topics"]]
    assert sizes == sorted(sizes, reverse=True)
    expect(page.locator("th[aria-sort=descending]")).to_contain_text("Size")
    rows.first.get_by_role("link").focus()
    page.keyboard.press("ArrowDown")
    name = page.evaluate("document.activeElement.textContent")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", level=1)).to_have_text(name)
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()


def test_one_click_leads_from_a_run_to_its_receipt(shop: Served, open_page: Open) -> None:
    page = open_page(f"{shop.url}#/runs")
    rows = page.locator("tbody tr")
    expect(rows.first).to_be_visible()
    total = answer(page, "/runs?limit=1")["total"]
    expect(page.locator(".figure-value").first).to_have_text(f"{total:,}")
    rows.first.get_by_role("link").click()
    expect(page.get_by_role("heading", name="Receipt", exact=True)).to_be_visible()
    expect(page.get_by_text("superseded")).to_be_visible()


def test_a_key_is_looked_for_everywhere(shop: Served, open_page: Open) -> None:
    page = open_page(f"{shop.url}#/erasure?topic=orders&key=customer-00001")
    expect(page.locator(".verdict")).to_contain_text("may still hold this key")
    page.get_by_label("Key", exact=True).fill("nobody-ever")
    page.get_by_role("button", name="Look for it").click()
    expect(page.locator(".verdict")).to_contain_text("Nothing in this store holds this key")


def test_commits_horizons_and_settings_say_what_the_api_says(shop: Served, open_page: Open) -> None:
    page = open_page(f"{shop.url}#/commits")
    expect(page.get_by_role("heading", name="orders-cdc")).to_be_visible()
    expect(page.locator(".timing").first).to_be_visible()
    page.goto(f"{shop.url}#/horizons")
    days = answer(page, f"/horizons?utc_offset_minutes={-page.evaluate('new Date().getTimezoneOffset()')}")["days"]
    expect(page.locator(".day.full")).to_have_count(len(days))
    page.goto(f"{shop.url}#/settings?topic=orders")
    expect(page.locator("tbody tr").first).to_be_visible()
    page.get_by_label("Search settings").fill("min.cleanable")
    expect(page.locator("tbody tr").first).to_contain_text("0.45")
    expect(page.locator("tbody .pill").first).to_contain_text("topic")


def test_it_says_when_the_console_is_gone(shop: Served, open_page: Open) -> None:
    page = open_page(shop.url)
    expect(page.locator("tbody tr")).to_have_count(7)
    page.route("**/api/v1/**", lambda route: route.abort())
    expect(page.get_by_role("alert").first).to_contain_text("does not answer")
    page.unroute("**/api/v1/**")
    expect(page.locator(".banner-error")).to_have_count(0)
