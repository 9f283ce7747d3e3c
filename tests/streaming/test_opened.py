"""Stores that a process keeps open for its tasks: few requests, and never another store's answers."""

from __future__ import annotations

import pytest

from logstore.bucket.store import BucketStore
from logstore.errors import NotAStore
from logstore.objects.opening import open_raw
from logstore.records.record import Record
from streaming.opened import opened

URL = "memory://reopened"


def test_a_task_asks_for_what_is_new_alone() -> None:
    with BucketStore(URL, create=True) as writer:
        writer.create_topic("t")
        with opened(URL) as first:
            assert isinstance(first, BucketStore)
        writer.append("t", [Record(b"k", b"v")])
        before = first.requests.total()
        with opened(URL) as second:
            assert second is first
            assert first.requests.total() - before == 3, "which store it is, the new commit, and that there is no newer"
            assert [record.value for record in second.reader("t", 0).records(0)] == [b"v"]


def test_another_store_in_its_place_is_opened() -> None:
    url = f"{URL}-twice"
    BucketStore(url, create=True)
    with opened(url) as first:
        assert isinstance(first, BucketStore)
    raw = open_raw(url)
    raw.delete(["duramen.json", "ledger/summary", *(f"ledger/commits/_delta_log/{n:020d}.json" for n in range(3))])
    with pytest.raises(NotAStore), opened(url):
        pass
    BucketStore(url, create=True).create_topic("new")
    with opened(url) as second:
        assert second is not first
        assert second.topic_names() == ["new"]
