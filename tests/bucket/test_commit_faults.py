"""Every call of a commit, of a definition change and of a deletion fails in every way: then the ledger is asked.

Nothing acknowledged is lost or doubled, and what was said not to be committed is never visible later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from bucket.faulty import EVERY, Fault, FaultyObjects
from logstore import errors
from logstore.bucket.rows import check_chain
from logstore.bucket.store import BucketStore
from logstore.clock import ManualClock
from logstore.commit.apps import AppBatch
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Objects
from logstore.objects.retrying import Patience, RetryingObjects
from logstore.records.record import Record
from logstore.topics.registry import Topic

NOW_MS = 1_700_000_000_000
CALLS = 16


def fixture() -> MemoryObjects:
    objects = MemoryObjects(ManualClock(NOW_MS))
    store = opened(objects)
    store.create_topic("orders", configs={"cleanup.policy": "compact"})
    store.append("orders", [Record(b"k", b"0")], app=AppBatch("app", 0, "query"))
    return objects


def opened(objects: Objects) -> BucketStore:
    return BucketStore("memory://test", create=True, objects=objects, clock=ManualClock(NOW_MS))


def values(objects: Objects) -> list[bytes | None]:
    return [record.value for record in opened(objects).reader("orders", 0).records(0)]


def tried(objects: Objects, work: Callable[[BucketStore], object]) -> str:
    try:
        work(opened(objects))
    except errors.CommitUnknown:
        return "unknown"
    except errors.ObjectStoreError as error:
        return "unknown" if error.may_be_applied else "no"
    except errors.DuramenError:
        return "no"
    return "yes"


def append(store: BucketStore) -> object:
    return store.append("orders", [Record(b"k", b"1")], app=AppBatch("app", 1, "query"))


@pytest.mark.parametrize("fault", EVERY, ids=lambda fault: fault.name)
@pytest.mark.parametrize("patience", ["retries", "gives up at once"])
def test_a_commit_with_a_fault_at_any_call(fault: Fault, patience: str) -> None:
    for call in range(CALLS):
        inner = fixture()
        faulty = FaultyObjects(inner, {call: fault})
        eyes: Objects = faulty
        if patience == "retries":
            eyes = RetryingObjects(faulty, Patience(sleep=lambda _: None))
        said = tried(eyes, append)
        seen = values(inner)
        faulty.land()
        later = values(inner)
        where = f"{fault} at call {call}: {faulty.calls}"
        assert seen[:1] == later[:1] == [b"0"], where
        assert later in ([b"0"], [b"0", b"1"]), where
        if said == "yes":
            assert seen == later == [b"0", b"1"], where
        elif said == "no":
            assert seen == later == [b"0"], where
        if patience == "retries" and fault is not Fault.LATE:
            assert said == "yes", where
        # Whatever was said, the batch can come again.
        append(opened(inner))
        assert values(inner) == [b"0", b"1"], where
        view = opened(inner).ledger.view
        check_chain(view.topic(view.rows[0].topic_id))


@pytest.mark.parametrize("fault", [Fault.AFTER, Fault.LATE, Fault.BEFORE], ids=lambda fault: fault.name)
def test_a_batch_without_app_with_two_faults(fault: Fault) -> None:
    """Nobody can recognise it, so what was said must be true."""
    for first in range(CALLS):
        for second in range(first + 1, CALLS):
            inner = fixture()
            faulty = FaultyObjects(inner, {first: fault, second: fault})
            said = tried(faulty, lambda store: store.append("orders", [Record(b"k", b"1")]))
            faulty.land()
            found = values(inner)
            where = f"{fault} at calls {first} and {second}: {faulty.calls}"
            assert found in ([b"0"], [b"0", b"1"]), where
            if said != "unknown":
                assert (found == [b"0", b"1"]) == (said == "yes"), where


CHANGES: dict[str, Callable[[BucketStore], Topic]] = {
    "alter": lambda store: store.alter_topic("orders", configs={"segment.bytes": "5000"}),
    "widen": lambda store: store.alter_topic("orders", partitions=3),
    "create": lambda store: store.create_topic("other", partitions=3),
}


@pytest.mark.parametrize("fault", EVERY, ids=lambda fault: fault.name)
@pytest.mark.parametrize("change", CHANGES)
def test_a_definition_change_with_a_fault_at_any_call(fault: Fault, change: str) -> None:
    for call in range(CALLS):
        inner = fixture()
        faulty = FaultyObjects(inner, {call: fault})
        said = tried(RetryingObjects(faulty, Patience(sleep=lambda _: None)), CHANGES[change])
        faulty.faults.clear()
        faulty.land()
        store = opened(inner)
        versions = {topic.name: (topic.config_version, topic.partitions) for topic in store.topics()}
        before = {"orders": (1, 1)}
        after = {
            "alter": {"orders": (2, 1)},
            "widen": {"orders": (2, 3)},
            "create": {"orders": (1, 1), "other": (1, 3)},
        }
        if fault is Fault.MISSING and said == "no":  # it looked as if there were no store, or no ledger
            assert versions == before, (fault, call)
        else:
            assert (said, versions) == ("yes", after[change]), (fault, call)
        assert values(inner) == [b"0"]
        check_chain(store.ledger.view.topic(store.topic("orders").id))


@pytest.mark.parametrize("fault", EVERY, ids=lambda fault: fault.name)
def test_a_deletion_with_a_fault_at_any_call(fault: Fault) -> None:
    for call in range(CALLS):
        inner = fixture()
        faulty = FaultyObjects(inner, {call: fault})
        said = tried(RetryingObjects(faulty, Patience(sleep=lambda _: None)), lambda s: s.delete_topic("orders"))
        faulty.land()
        store = opened(inner)
        assert (said, store.topic_names()) == ("yes", []), (fault, call)
        created = store.create_topic("orders")
        assert list(store.reader(created, 0).records(0)) == []


class Expired(FaultyObjects):
    """From some call on everything is refused."""

    def __init__(self, inner: Objects, first: int) -> None:
        super().__init__(inner)
        self.first = first

    def _begin(self, name: str, key: str) -> Fault | None:
        fault = super()._begin(name, key)
        if len(self.calls) > self.first:
            raise errors.AccessDenied(f"{name} was refused (400 ExpiredToken)", file=key)
        return fault


@pytest.mark.parametrize("change", ["append", "delete", *CHANGES])
def test_credentials_that_expire_at_any_call(change: str) -> None:
    """Whoever is told no has changed nothing: what is refused behind a commit says nothing about it."""
    works: dict[str, Callable[[BucketStore], object]] = {
        "append": append, "delete": lambda store: store.delete_topic("orders"), **CHANGES,
    }  # fmt: skip
    answers = []
    for call in range(40):
        inner = fixture()
        inner_before = opened(inner).ledger.view.version
        said = tried(RetryingObjects(Expired(inner, call), Patience(sleep=lambda _: None)), works[change])
        assert (opened(inner).ledger.view.version > inner_before) == (said == "yes"), (change, call, said)
        answers.append(said)
    assert answers[0] == "no"
    assert answers[-1] == "yes"
    assert "unknown" not in answers


def test_credentials_that_expire_behind_a_lost_answer_leave_the_outcome_open() -> None:
    inner = fixture()

    class Expiring(FaultyObjects):
        def create(self, key: str, data: bytes) -> Any:
            if self.faults.get(-1):
                raise errors.AccessDenied("create was refused (403 ExpiredToken)", file=key)
            if "_delta_log" in key:
                self.faults[-1] = Fault.BUSY
                self._inner.create(key, data)
                raise errors.ObjectStoreUnavailable("create was not answered", file=key, may_be_applied=True)
            return super().create(key, data)

        def get(self, key: str) -> Any:
            if self.faults.get(-1):
                raise errors.AccessDenied("get was refused (403 ExpiredToken)", file=key)
            return super().get(key)

    eyes = RetryingObjects(Expiring(inner), Patience(sleep=lambda _: None))
    with pytest.raises(errors.CommitUnknown, match="ExpiredToken"):
        append(opened(eyes))
    assert opened(inner).append("orders", [Record(b"k", b"1")], app=AppBatch("app", 1, "query")).replayed
