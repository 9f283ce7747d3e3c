"""Waiting for a state of the page. Playwright's own way evaluates strings in the page, which its policy refuses."""

from __future__ import annotations

import time

from playwright.sync_api import Page

LIMIT_S = 15.0


def wait_until(page: Page, expression: str, argument: object = None) -> None:
    """Until the expression, or the function of the argument, is true in the page."""
    end = time.monotonic() + LIMIT_S
    while not page.evaluate(expression, argument):
        assert time.monotonic() < end, f"never true: {expression}"
        page.wait_for_timeout(100)
