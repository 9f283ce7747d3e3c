"""Waiting for a state of the page. Playwright's own way evaluates strings in the page, which its policy refuses."""

from __future__ import annotations

import json
import time

from playwright.sync_api import Page, expect

LIMIT_S = 30.0


def show(page: Page, place: str) -> None:
    """Go to a place of the page, and wait until that is what it shows, with all that it asked for."""
    page.evaluate("(place) => { location.hash = place; }", place)
    page.locator(f"main[data-place={json.dumps('#' + place)}]").wait_for()
    expect(page.get_by_role("heading", level=1)).to_be_attached()
    expect(page.locator("main .card, main .empty").first).to_be_visible()
    expect(page.locator("main .loading")).to_have_count(0)


def wait_until(page: Page, expression: str, argument: object = None) -> None:
    """Until the expression, or the function of the argument, is true in the page."""
    end = time.monotonic() + LIMIT_S
    while not page.evaluate(expression, argument):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(100)
