"""The page over a store in a bucket: every panel is drawn, the strip to scale, and what a bucket has not is said."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest
from playwright.sync_api import Page, expect

from compaction_job import compact
from console.asking import TOKEN
from console.browser.test_drawing import answer, assert_strip_is_to_scale, settle
from console.browser.test_report import PAGES
from console.browser.waiting import show
from console.conftest import fill_orders
from console.test_bucket import seal
from duramen.console.opened import OpenConsole, Token
from logstore.bucket.store import BucketStore

Open = Callable[..., Page]


@pytest.fixture(scope="module")
def bucket() -> Iterator[OpenConsole]:
    url = f"memory://{uuid.uuid4().hex}/shop"
    with BucketStore(url, create=True) as store:
        configs = {"cleanup.policy": "compact", "segment.bytes": "4096", "min.cleanable.dirty.ratio": "0.1"}
        store.create_topic("orders", partitions=2, configs=configs)
        fill_orders(store, batches=4)
        seal(store)
        compact(store, force=True)
        fill_orders(store, batches=4, first=4)
        seal(store)
        fill_orders(store, batches=1, first=8)
        with OpenConsole(url, token=Token(TOKEN, False)) as served:
            yield served


def test_every_panel_of_a_bucket_is_there(bucket: OpenConsole, open_page: Open) -> None:
    page = open_page(bucket.url)
    expect(page.locator(".store-name")).to_contain_text("bucket")
    expect(page.locator(".top")).to_contain_text("free space unknown")
    expect(page.locator(".jobs")).to_contain_text("does not tell")
    expect(page.locator(".hero-history")).to_contain_text("None is kept in a bucket")
    for place, title in PAGES.items():
        show(page, place.replace("edge-cases", "orders"))
        expect(page.get_by_role("heading", level=1)).to_contain_text(title)
        assert page.locator("main .note-error").count() == 0, place
    show(page, "/erasure?topic=orders&key=key-3")
    expect(page.get_by_role("alert")).to_contain_text("in a bucket")


def test_its_strip_is_to_scale_and_a_record_is_found_by_its_key(bucket: OpenConsole, open_page: Open) -> None:
    page = open_page(f"{bucket.url}#/topics/orders/1")
    expect(page.locator(".strip-main canvas")).to_be_visible()
    settle(page)
    log = answer(page, "/topics/orders/partitions/1")
    assert {"clean", "dirty", "active"} <= {each["section"] for each in log["segments"]}
    assert_strip_is_to_scale(page, log)
    expect(page.locator("tbody .pill-done")).not_to_have_count(0)
    show(page, "/messages?topic=orders")
    page.get_by_text("key", exact=True).click()
    page.get_by_label("Key", exact=True).fill("key-7")
    page.get_by_role("button", name="Show").click()
    expect(page.locator("tbody tr").filter(has_text="value-8-")).not_to_have_count(0)
