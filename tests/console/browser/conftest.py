"""A real Chromium, a console that is served from a process of its own, and a page that tells of everything unwanted."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

from console.browser.served import Served
from console.browser.shop import make_shop

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
#: Listens before any script of the page: what the policy refused is a finding, even when nobody noticed.
LISTENER = """
window.__violations = [];
document.addEventListener("securitypolicyviolation", (event) => window.__violations.push(event.violatedDirective));
"""
WAIT_MS = 30_000


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    path = next(filter(None, map(shutil.which, CHROMIUM)), None)
    assert path is not None, "no browser: apt-get install chromium"
    expect.set_options(timeout=WAIT_MS)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


@pytest.fixture(scope="session")
def memory() -> Iterator[Path]:
    """A folder in memory where there is one: the stores are small and many times synced."""
    base = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="duramen-console-", dir=base) as folder:
        yield Path(folder)


@pytest.fixture(scope="session")
def shop(memory: Path) -> Iterator[Served]:
    """The shop's store, served; its scheduler waits, so that only a test changes it."""
    path = memory / "shop"
    make_shop(path)
    with Served(path) as served:
        yield served


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Opens an address in a new context, and at the end looks for errors, violations and requests to elsewhere."""
    contexts: list[BrowserContext] = []
    problems: list[str] = []

    def opened(url: str, *, scheme: str = "light", phone: bool = False, **options: Any) -> Page:
        size = {"width": 390, "height": 844} if phone else {"width": 1440, "height": 900}
        context = chromium.new_context(color_scheme=scheme, viewport=size, **options)  # type: ignore[arg-type]
        context.add_init_script(LISTENER)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT_MS)
        origin = url.partition("#")[0]
        page.on("pageerror", lambda error: problems.append(f"error: {error}"))
        page.on(
            "request",
            lambda asked: asked.url.startswith((origin, "data:", "about:")) or problems.append(f"asked {asked.url}"),
        )
        page.on("dialog", lambda dialog: (problems.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        for page in context.pages:
            problems += [f"refused: {each}" for each in page.evaluate("window.__violations || []")]
            if page.evaluate("window.__pwned !== undefined"):
                problems.append("a record ran as a script")
        context.close()
    assert problems == []
