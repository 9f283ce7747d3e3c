"""The pictures of README and docs, taken here from a real store, so that they cannot go stale.

They land in build/screenshots; `make screenshots` copies them to docs/images.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from console.browser.served import ROOT, Served

Open = Callable[..., Page]
FOLDER = ROOT / "build" / "screenshots"
BYTES_MAX = 300 * 1024

#: name: place, scheme, phone, what has to be there
PICTURES = {
    "console-light": ("/", "light", False, "tbody .spark"),
    "console-dark": ("/", "dark", False, "tbody .spark"),
    "topic": ("/topics/orders", "light", False, ".chart canvas"),
    "partition": ("/topics/orders/1", "light", False, ".strip-main canvas"),
    "partition-dark": ("/topics/orders/1", "dark", False, ".strip-main canvas"),
    "runs": ("/runs", "light", False, ".timeline canvas"),
    "whatif": ("/what-if", "light", False, ".compare-then"),
    "horizons": ("/horizons", "light", False, ".day.full"),
    "commits": ("/commits", "light", False, ".chart canvas"),
    "messages": ("/messages?topic=orders", "light", False, "tbody tr"),
    "erasure": ("/erasure?topic=accounts&key=customer-00001", "light", False, ".verdict"),
    "phone": ("/topics/orders/1", "dark", True, ".strip-main canvas"),
}


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_taken(shop: Served, open_page: Open, name: str) -> None:
    place, scheme, phone, sign = PICTURES[name]
    page = open_page(f"{shop.url}#{place}", scheme=scheme, phone=phone)
    page.locator(sign).first.wait_for()
    expect(page.locator("main .loading")).to_have_count(0)
    if name == "whatif":
        page.get_by_role("slider", name="Dirty ratio").fill("20")
        page.get_by_label("Read records to estimate").check()
        expect(page.locator("[data-then='bytes saved']")).to_contain_text("B")
    # Where the store lies on this machine is nobody's business.
    page.evaluate("document.querySelector('.store-path').textContent = '/data/shop'")
    page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.png"
    page.screenshot(path=path)
    assert 10_000 < path.stat().st_size < BYTES_MAX
