"""The report: the same pages from one file, without a server and without a single request."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from console.browser.served import ROOT, Served
from console.browser.shop import SCRIPT
from console.browser.test_drawing import PIXELS
from console.browser.waiting import show, wait_until

Open = Callable[..., Page]
PAGES = {
    "/": "Topics",
    "/topics/orders": "orders",
    "/topics/orders/0": "partition 0",
    "/why": "Why and when",
    "/runs": "Runs",
    "/what-if": "What if",
    "/horizons": "Horizons",
    "/commits": "Commits",
    "/messages?topic=edge-cases": "Messages",
    "/erasure": "Erasure",
    "/settings": "Settings",
}


@pytest.fixture(scope="module")
def report(shop: Served, memory: Path) -> str:
    path = memory / "report.html"
    command = [sys.executable, "-m", "duramen", "--store", str(shop.store), "report", str(path), "--messages", "20"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return path.as_uri()


def test_the_report_has_the_same_panels_and_asks_for_nothing(report: str, open_page: Open) -> None:
    page = open_page(report)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for place, title in PAGES.items():
        show(page, place)
        expect(page.get_by_role("heading", level=1)).to_contain_text(title)
        assert page.locator("main .note-error").count() == 0, place
    assert asked == []
    expect(page.get_by_text("Report of")).to_be_visible()


def test_its_strip_is_to_scale_its_lists_sort_and_nothing_acts(report: str, open_page: Open) -> None:
    page = open_page(f"{report}#/topics/orders/0")
    expect(page.locator(".strip-main canvas")).to_be_visible()
    wait_until(page, "document.querySelector('.strip-main canvas').width > 300")
    drawn = page.evaluate(PIXELS)
    assert drawn["bytes"] == drawn["width_bytes"] > 0
    assert drawn["other"] <= 8
    page.evaluate("location.hash = '#/'")
    expect(page.locator("tbody tr")).to_have_count(7)
    page.get_by_label("Search topics").fill("pay")
    expect(page.locator("tbody tr")).to_have_count(1)
    assert page.locator("[data-action]").count() == 0
    page.evaluate("location.hash = '#/messages?topic=edge-cases'")
    expect(page.locator("tbody").get_by_text(SCRIPT).first).to_be_visible()
    page.evaluate("location.hash = '#/runs'")
    page.locator("tbody tr a").first.click()
    expect(page.get_by_role("heading", name="Receipt", exact=True)).to_be_visible()
