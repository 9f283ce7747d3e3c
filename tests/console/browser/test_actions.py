"""Actions: never without the token, never before their dry run was shown."""

from __future__ import annotations

from collections.abc import Callable

from playwright.sync_api import Page, Request, expect

from console.browser.served import TOKEN, Served
from console.browser.waiting import wait_until

Open = Callable[..., Page]


def posts(page: Page) -> list[Request]:
    seen: list[Request] = []
    page.on("request", lambda asked: seen.append(asked) if asked.method == "POST" else None)
    return seen


def test_compact_now_asks_for_the_token_shows_the_dry_run_and_then_does_it(shop: Served, open_page: Open) -> None:
    page = open_page(f"{shop.url}#/topics/inventory/0")
    sent = posts(page)
    page.get_by_role("button", name="Compact now").click()
    dialog = page.get_by_role("dialog")
    field = dialog.get_by_label("Token")
    field.fill("not the token at all")
    dialog.get_by_role("button", name="Go on").click()
    expect(dialog.get_by_role("alert")).to_contain_text("not the token")
    assert sent == []
    field.fill(TOKEN)
    dialog.get_by_role("button", name="Go on").click()
    dialog.get_by_label("whatever the dirty ratio").check()
    dialog.get_by_label("close active segments first").check()
    expect(dialog.get_by_role("region", name="What it would do")).to_contain_text("inventory-0")
    assert all("dry_run=true" in each.url for each in sent)
    before = int(page.locator(".strip-main canvas").get_attribute("data-bytes") or 0)
    dialog.locator("[data-confirm]").click()
    expect(dialog.locator("[data-state=done]")).to_be_visible(timeout=30_000)
    assert "dry_run=false" in sent[-1].url
    assert sent[-1].headers["authorization"] == f"Bearer {TOKEN}"
    dialog.get_by_role("button", name="Close").last.click()
    wait_until(page, "(old) => Number(document.querySelector('.strip-main canvas').dataset.bytes) < old", before)
    assert page.evaluate("localStorage.getItem('duramen.token')") is None


def test_pause_and_resume_with_a_token_from_the_address(shop: Served, open_page: Open) -> None:
    page = open_page(f"{shop.url}#token={TOKEN}")
    wait_until(page, "location.hash === '#/'")
    page.evaluate("location.hash = '#/topics/payments'")
    for name, after in (("Pause", "Resume"), ("Resume", "Pause")):
        page.get_by_role("button", name=name, exact=True).click()
        dialog = page.get_by_role("dialog")
        expect(dialog).to_contain_text("payments")
        expect(dialog).to_contain_text("duramen.compaction.paused")
        dialog.locator("[data-confirm]").click()
        expect(dialog.locator("[data-state=done]")).to_be_visible()
        page.keyboard.press("Escape")
        expect(dialog).to_have_count(0)
        expect(page.get_by_role("button", name=after, exact=True)).to_be_visible()


def test_cancel_changes_nothing(shop: Served, open_page: Open) -> None:
    page = open_page(f"{shop.url}#token={TOKEN}")
    sent = posts(page)
    page.get_by_role("button", name="Retain").click()
    dialog = page.get_by_role("dialog")
    expect(dialog.locator(".plan-summary")).to_be_visible()
    dialog.get_by_role("button", name="Cancel").click()
    expect(dialog).to_have_count(0)
    assert [each.url.rpartition("?")[2] for each in sent] == ["dry_run=true"]
