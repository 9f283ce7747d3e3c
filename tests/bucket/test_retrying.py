"""Doubts are settled: whatever is lost or late, a call that returns has happened once, and no error claims too much."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from bucket.faulty import READS, WRITES, Fault, FaultyObjects
from logstore.errors import (
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ObjectStoreError,
    ObjectStoreThrottled,
    ObjectStoreUnavailable,
    ObjectTruncated,
)
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Head, Objects
from logstore.objects.retrying import Patience, RetryingObjects

PAIRS = [*itertools.product(WRITES, repeat=2)]


class Time:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.sleeps: list[float] = []

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        self.sleeps.append(seconds)

    def patience(self, deadline_s: float = 60.0) -> Patience:
        return Patience(deadline_s, sleep=self.sleep, monotonic=lambda: self.now_s, jitter=lambda: 1.0)


def over(faults: dict[int, Fault], deadline_s: float = 60.0) -> tuple[RetryingObjects, FaultyObjects, MemoryObjects]:
    memory = MemoryObjects()
    faulty = FaultyObjects(memory, faults)
    return RetryingObjects(faulty, Time().patience(deadline_s)), faulty, memory


@pytest.mark.parametrize("faults", PAIRS, ids=lambda each: "-".join(fault.name for fault in each))
def test_a_creation_that_returns_has_happened(faults: tuple[Fault, Fault]) -> None:
    objects, faulty, memory = over(dict(enumerate(faults)))
    version = objects.create("k", b"mine")
    faulty.land()
    assert memory.get("k") == (b"mine", version)


@pytest.mark.parametrize("faults", PAIRS, ids=lambda each: "-".join(fault.name for fault in each))
def test_a_replacement_that_returns_has_happened_once(faults: tuple[Fault, Fault]) -> None:
    objects, faulty, memory = over(dict(enumerate(faults)))
    seen = memory.create("k", b"old")
    version = objects.replace("k", b"mine", seen)
    faulty.land()
    assert memory.get("k") == (b"mine", version)


@pytest.mark.parametrize("fault", WRITES)
def test_who_comes_second_is_told_so(fault: Fault) -> None:
    objects, faulty, memory = over({0: fault})
    memory.create("k", b"theirs")
    with pytest.raises(ObjectExists):
        objects.create("k", b"mine")
    seen = memory.get("k")[1]
    faulty.faults = {len(faulty.calls): fault}
    memory.replace("k", b"theirs again", seen)
    with pytest.raises(ObjectChanged):
        objects.replace("k", b"mine", seen)
    faulty.land()
    assert memory.get("k")[0] == b"theirs again"


def test_a_creation_that_was_replaced_at_once_is_not_said_to_have_failed() -> None:
    """Ours was applied and its answer lost; somebody replaced it. "Exists" alone would be a lie."""

    class Replaced(FaultyObjects):
        def get(self, key: str) -> tuple[bytes, object]:  # type: ignore[override]
            self._inner.replace(key, b"theirs", self._inner.get(key)[1])
            return super().get(key)

    objects = RetryingObjects(Replaced(MemoryObjects(), {0: Fault.AFTER}), Time().patience())
    with pytest.raises(ObjectExists) as caught:
        objects.create("k", b"mine")
    assert caught.value.may_be_applied


def test_a_conflict_of_nobody_is_tried_again() -> None:
    """S3 answers 409 to two creations that meet, and then neither object may be there."""
    objects, faulty, memory = over({0: Fault.CONFLICT, 2: Fault.CONFLICT})
    objects.create("k", b"mine")
    assert [name for name, _ in faulty.calls] == ["create", "get", "create", "get", "create"]
    assert memory.get("k")[0] == b"mine"


@pytest.mark.parametrize(("fault", "maybe"), [(Fault.LATE, True), (Fault.AFTER, True), (Fault.BUSY, False)])
def test_an_error_at_the_deadline_says_whether_it_may_be_applied(fault: Fault, maybe: bool) -> None:
    busy = dict.fromkeys(range(1, 100), Fault.BUSY)
    objects, _, memory = over({0: fault} | busy, deadline_s=2.0)
    with pytest.raises(ObjectStoreThrottled) as caught:
        objects.create("k", b"mine")
    assert caught.value.may_be_applied is maybe
    with pytest.raises(ObjectStoreUnavailable) as caught_put:
        RetryingObjects(FaultyObjects(memory, dict.fromkeys(range(100), Fault.BEFORE)), Time().patience()).put(
            "p", [b""]
        )
    assert caught_put.value.may_be_applied


def test_waits_grow_and_end_at_the_deadline() -> None:
    time = Time()
    faulty = FaultyObjects(MemoryObjects(), dict.fromkeys(range(1000), Fault.BUSY))
    with pytest.raises(ObjectStoreThrottled):
        RetryingObjects(faulty, time.patience(30.0)).get("k")
    assert time.sleeps[:4] == [0.1, 0.2, 0.4, 0.8]
    assert max(time.sleeps) <= 10.0
    assert time.now_s <= 30.0
    assert len(faulty.calls) == len(time.sleeps) + 1


def test_an_object_that_is_said_to_be_gone_is_an_answer() -> None:
    objects, faulty, memory = over({0: Fault.MISSING})
    memory.put("k", [b"v"])
    with pytest.raises(ObjectMissing):
        objects.get("k")
    assert len(faulty.calls) == 1


@pytest.mark.parametrize("fault", sorted({*READS} - {Fault.MISSING}, key=READS.index))
def test_a_read_that_fails_is_repeated(fault: Fault) -> None:
    objects, faulty, memory = over(dict.fromkeys(range(0, 12, 2), fault))
    memory.put("k", [b"0123456789"])
    assert objects.get("k")[0] == b"0123456789"
    assert objects.head("k").size_bytes == 10
    assert [bytes(each) for each in objects.ranges("k", [(2, 4)])] == [b"23"]
    assert len(faulty.calls) > 3


def test_what_stays_short_is_short() -> None:
    objects, faulty, memory = over(dict.fromkeys(range(100), Fault.SHORT))
    memory.put("k", [b"0123456789"])
    with pytest.raises(ObjectTruncated):
        objects.ranges("k", [(0, 5)])
    assert len(faulty.calls) == 3


def test_a_404_is_not_repeated() -> None:
    objects, faulty, _ = over({})
    with pytest.raises(ObjectMissing):
        objects.get("k")
    assert len(faulty.calls) == 1


def test_a_listing_goes_on_where_a_page_failed() -> None:
    class Pages:
        def __init__(self, inner: Objects) -> None:
            self.inner, self.asked = inner, list[str]()

        def list(self, prefix: str, after: str = "") -> Iterator[Head]:
            self.asked.append(after)
            for number, head in enumerate(self.inner.list(prefix, after)):
                if number == 3:
                    raise ObjectStoreUnavailable("the page was lost")
                yield head

    memory = MemoryObjects()
    keys = [f"l/{number}" for number in range(8)]
    for key in keys:
        memory.put(key, [b""])
    pages = Pages(memory)
    objects = RetryingObjects(pages, Time().patience())  # type: ignore[arg-type]
    assert [head.key for head in objects.list("l")] == keys
    assert pages.asked == ["", "l/2", "l/5"]


def test_parts_that_can_be_read_once_are_refused() -> None:
    objects, *_ = over({})
    with pytest.raises(TypeError, match="generator"):
        objects.put("k", (part for part in [b"1"]))


def test_a_put_sends_everything_again() -> None:
    objects, faulty, memory = over({0: Fault.BEFORE, 1: Fault.CONFLICT})
    objects.put("k", [b"12", b"34"])
    assert memory.get("k")[0] == b"1234"
    assert len(faulty.calls) == 3


def test_errors_of_object_storage_keep_what_they_know_across_processes() -> None:
    import pickle

    error = pickle.loads(pickle.dumps(ObjectStoreUnavailable("lost", may_be_applied=True, file="k")))
    assert isinstance(error, ObjectStoreError)
    assert (error.may_be_applied, error.file) == (True, "k")


def test_a_long_wait_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    objects, _, memory = over(dict.fromkeys(range(8), Fault.BUSY))
    memory.create("k", b"there")
    assert objects.get("k")[0] == b"there"
    (told,) = [record.getMessage() for record in caplog.records if record.name == "duramen.objects"]
    assert "trying again for up to" in told


def test_a_short_wait_is_not_worth_a_word(caplog: pytest.LogCaptureFixture) -> None:
    objects, _, memory = over({0: Fault.BUSY})
    memory.create("k", b"there")
    assert objects.get("k")[0] == b"there"
    assert not caplog.records
