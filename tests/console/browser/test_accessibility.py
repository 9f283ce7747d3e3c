"""axe-core finds nothing serious on any page: light and dark, desk and phone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Page, expect

from console.browser.served import TOKEN, Served
from console.browser.shop import HOSTILE
from console.browser.waiting import show

Open = Callable[..., Page]
PLACES = (
    "/",
    "/topics/orders",
    "/topics/accounts/1",
    "/why",
    "/runs",
    "/what-if",
    "/horizons",
    "/commits",
    f"/messages?topic={HOSTILE}",
    "/erasure?topic=orders&key=customer-00001",
    "/settings?topic=orders",
    "/nowhere",
)


#: tables that have to be scrolled sideways, and cells in which a word stands letter below letter
CRAMPED = """
() => [...document.querySelectorAll("main .table-wrap")].filter((table) => table.scrollWidth > table.clientWidth + 1)
    .map((table) => `${table.ariaLabel}: ${table.scrollWidth} in ${table.clientWidth} pixels`)
    .concat([...document.querySelectorAll("main tr:not(.extra) > *")].filter((cell) => cell.clientHeight > 300)
        .map((cell) => `${cell.textContent.slice(0, 40)}: ${cell.clientHeight} pixels high`))
"""


def serious(page: Page) -> list[str]:
    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']} at {[node['target'] for node in each['nodes']][:3]} {each['nodes'][0].get('failureSummary', '')}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("phone", [False, True], ids=["desk", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_on_any_page(shop: Served, open_page: Open, scheme: str, phone: bool) -> None:
    # axe puts its script into the page, which the page's own policy would refuse.
    page = open_page(shop.url, scheme=scheme, phone=phone, bypass_csp=True)
    for place in PLACES:
        show(page, place)
        if place.startswith("/messages"):
            page.locator("tbody button").first.click()
        assert serious(page) == [], place
        wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
        assert wider <= 0, f"{place} is wider than the screen by {wider}"
        assert page.evaluate(CRAMPED) == [], place


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_serious_in_the_dialogs(shop: Served, open_page: Open, scheme: str) -> None:
    page = open_page(f"{shop.url}#/topics/orders", scheme=scheme, bypass_csp=True)
    page.get_by_role("button", name="Compact now").click()
    expect(page.get_by_role("dialog").get_by_label("Token")).to_be_visible()
    assert serious(page) == []
    page.get_by_label("Token").fill(TOKEN)
    page.get_by_role("button", name="Go on").click()
    expect(page.locator(".plan-summary")).to_be_visible()
    assert serious(page) == []
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    expect(page.get_by_role("dialog", name="Keys")).to_be_visible()
    assert serious(page) == []


def test_the_first_key_skips_to_the_content(shop: Served, open_page: Open) -> None:
    page = open_page(shop.url)
    expect(page.locator("tbody tr").first).to_be_visible()
    page.keyboard.press("Tab")
    expect(page.get_by_text("Skip to the content")).to_be_focused()
    page.keyboard.press("Enter")
    expect(page.locator("main")).to_be_focused()
    outline = page.evaluate("getComputedStyle(document.querySelector('.nav a')).outlineStyle")
    page.locator(".nav a").first.focus()
    assert page.evaluate("getComputedStyle(document.querySelector('.nav a')).outlineStyle") != outline
