"""Stores that a process keeps open for its tasks: few requests, and never another store's answers."""

from __future__ import annotations

import uuid

import pytest

from logstore.bucket.store import BucketStore
from logstore.errors import NotAStore, UnknownTopic
from logstore.objects.opening import open_raw
from logstore.records.record import Record
from streaming import opened as opened_stores
from streaming.opened import opened, polled
from streaming.options import read_options
from streaming.source import CAN_LIMIT, LogStreamReader

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


@pytest.mark.parametrize("subscription", [{"subscribe": "t"}, {"subscribe": "t,u"}, {"assign": '{"t": [1]}'}], ids=str)
def test_an_idle_trigger_takes_one_request_and_a_new_batch_one_more(subscription: dict[str, str]) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    options = read_options({"store": url, **subscription}, streaming=True)
    with BucketStore(url, create=True) as writer:
        for name in ("t", "u"):
            writer.create_topic(name, partitions=2)
        reader = LogStreamReader(options)
        begin = reader.latestOffset()
        with opened(url) as store:
            assert isinstance(store, BucketStore)
        before = store.requests.copy()
        assert [reader.latestOffset() for _ in range(3)] == [begin] * 3
        assert store.requests - before == {"get": 3}
        writer.append("t", [Record(b"%d" % n, b"v") for n in range(9)])
        before = store.requests.copy()
        assert reader.latestOffset() != begin
        assert store.requests - before == {"get": 2}


def test_a_trigger_sees_a_topic_that_was_created_again() -> None:
    url = f"memory://{uuid.uuid4().hex}"
    with BucketStore(url, create=True) as writer:
        first = writer.create_topic("t")
        reader = LogStreamReader(read_options({"store": url, "subscribe": "t"}, streaming=True))
        begin = reader.latestOffset()
        writer.delete_topic("t")
        assert writer.create_topic("t").id != first.id
        assert reader.latestOffset() != begin
        writer.delete_topic("t")
        with pytest.raises(UnknownTopic):
            reader.latestOffset()


@pytest.mark.skipif(not CAN_LIMIT, reason="Spark 4.2 or newer")
def test_what_a_trigger_reports_is_what_it_found() -> None:
    from streaming.admission import LimitingStreamReader

    url = f"memory://{uuid.uuid4().hex}"
    with BucketStore(url, create=True) as writer:
        writer.create_topic("t")
        reader = LimitingStreamReader(read_options({"store": url, "subscribe": "t"}, streaming=True))
        begin = reader.reportLatestOffset()
        with opened(url) as store:
            assert isinstance(store, BucketStore)
        before = store.requests.copy()
        for _ in range(3):
            assert reader.latestOffset(begin, reader.getDefaultReadLimit()) == begin
            assert reader.reportLatestOffset() == begin
        assert store.requests - before == {"get": 3}


def test_a_store_that_took_anothers_place_is_seen_by_a_trigger_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    url = f"memory://{uuid.uuid4().hex}"
    BucketStore(url, create=True).create_topic("old")
    with polled(url) as first, polled(url) as second:
        assert first is second
    raw = open_raw(url)
    raw.delete(["duramen.json", "ledger/summary", *(f"ledger/commits/_delta_log/{n:020d}.json" for n in range(3))])
    BucketStore(url, create=True).create_topic("new")
    monkeypatch.setattr(opened_stores, "_BELIEVED_S", 0.0)
    with polled(url) as third:
        assert third is not first
        assert third.topic_names() == ["new"]


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
