"""What every implementation of `Objects` promises: in memory, on ministack, on versitygw, behind retries and faults."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from bucket.faulty import Fault, FaultyObjects
from bucket.servers import chosen
from logstore.errors import ObjectChanged, ObjectExists, ObjectMissing, ObjectTruncated, RequestConflict
from logstore.objects.counted import CountedObjects
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Objects, Version, check_key
from logstore.objects.opening import open_objects
from logstore.objects.remote import RemoteObjects
from logstore.objects.retrying import Patience, RetryingObjects

SERVERS = chosen("ministack", "versitygw")
KINDS = ("memory", "retrying", "faulty", *SERVERS)


@pytest.fixture(params=KINDS)
def objects(request: pytest.FixtureRequest) -> Objects:
    if request.param == "memory":
        return MemoryObjects()
    if request.param == "retrying":
        return RetryingObjects(CountedObjects(MemoryObjects()))
    if request.param == "faulty":
        # Every second answer is lost: retries must make it look like one that is always there.
        faults = {number: Fault.AFTER if number % 4 else Fault.LATE for number in range(0, 400, 2)}
        return RetryingObjects(FaultyObjects(MemoryObjects(), faults), Patience(sleep=lambda _: None))
    server = request.getfixturevalue(request.param)
    return open_objects(server.url(uuid.uuid4().hex), server.options)


def test_an_object_is_created_once(objects: Objects) -> None:
    version = objects.create("a/b", b"one")
    with pytest.raises(ObjectExists):
        objects.create("a/b", b"two")
    assert objects.get("a/b") == (b"one", version)


def test_an_object_is_replaced_only_as_it_was_seen(objects: Objects) -> None:
    first = objects.create("a", b"one")
    second = objects.replace("a", b"two", first)
    assert second != first
    with pytest.raises(ObjectChanged):
        objects.replace("a", b"three", first)
    assert objects.get("a") == (b"two", second)
    assert objects.replace("a", b"three", second) not in (first, second)


def test_what_is_not_there_cannot_be_replaced(objects: Objects) -> None:
    seen = objects.create("there", b"one")
    with pytest.raises(ObjectChanged):
        objects.replace("not-there", b"two", seen)
    with pytest.raises(ObjectMissing):
        objects.get("not-there")


def test_a_deleted_object_can_be_created_and_not_replaced(objects: Objects) -> None:
    seen = objects.create("a", b"one")
    objects.delete(["a"])
    with pytest.raises(ObjectChanged):
        objects.replace("a", b"two", seen)
    objects.create("a", b"three")
    assert objects.get("a")[0] == b"three"


@pytest.mark.parametrize("sizes", [(), (0,), (10,), (3, 0, 5), (9 << 20,), (5 << 20, 5 << 20, 7)])
def test_parts_become_one_object(objects: Objects, sizes: tuple[int, ...]) -> None:
    parts = [bytes([number + 1]) * size for number, size in enumerate(sizes)]
    objects.put("data/once", parts)
    assert objects.get("data/once")[0] == b"".join(parts)
    assert objects.head("data/once").size_bytes == sum(sizes)


def test_parts_that_fail_leave_nothing(objects: Objects) -> None:
    class Parts:
        def __iter__(self) -> Iterator[bytes]:
            yield b"x" * (6 << 20)
            yield b"y" * (6 << 20)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        objects.put("data/never", Parts())
    with pytest.raises(ObjectMissing):
        objects.head("data/never")


def test_ranges_come_in_the_order_they_were_asked(objects: Objects) -> None:
    data = bytes(range(256)) * 20
    objects.put("r", [data])
    spans = [(4000, 5000), (0, 0), (0, 7), (5, 300), (5119, 5120)]
    assert [bytes(each) for each in objects.ranges("r", spans)] == [data[begin:end] for begin, end in spans]
    assert objects.ranges("r", []) == []


@pytest.mark.parametrize("span", [(0, 11), (9, 12), (10, 11), (20, 30)])
def test_a_range_beyond_the_end_is_an_error_and_never_short(objects: Objects, span: tuple[int, int]) -> None:
    objects.put("r", [b"0123456789"])
    with pytest.raises(ObjectTruncated):
        objects.ranges("r", [span])


def test_nothing_is_not_read(objects: Objects) -> None:
    for read in (objects.get, objects.head, lambda key: objects.ranges(key, [(0, 1)])):
        with pytest.raises(ObjectMissing):
            read("no/such/key")


def test_a_head_has_size_time_and_version(objects: Objects) -> None:
    version = objects.put("h", [b"12345"])
    head = objects.head("h")
    assert (head.key, head.size_bytes, head.version) == ("h", 5, version)
    assert head.modified_ms > 1_600_000_000_000


def test_a_listing_has_all_below_the_prefix_in_order(objects: Objects) -> None:
    keys = [f"l/{number:03}" for number in range(23)]
    for key in (*reversed(keys), "l2/x", "k/x", "l-x"):
        objects.put(key, [b"1"])
    assert [head.key for head in objects.list("l")] == keys
    assert [head.key for head in objects.list("l", after="l/004")] == keys[5:]
    assert [*objects.list("none")] == []


def test_deleting_is_idempotent(objects: Objects) -> None:
    objects.put("d/1", [b"1"])
    objects.put("d/2", [b"2"])
    objects.delete(["d/1", "d/none", "d/2"])
    objects.delete(["d/1"])
    objects.delete([])
    assert [*objects.list("d")] == []


@pytest.mark.parametrize("server", SERVERS)
def test_of_many_writers_one_wins(server: str, request: pytest.FixtureRequest) -> None:
    """The rule that all else rests on."""
    if server == "memory":
        objects: Objects = MemoryObjects()
    else:
        found = request.getfixturevalue(server)
        objects = RemoteObjects(found.url(uuid.uuid4().hex), found.options)
    with ThreadPoolExecutor(8) as pool:
        for turn in range(20):
            key = f"race/{turn}"
            assert _winners(pool, lambda body, key=key: objects.create(key, body)) == [objects.get(key)[0]]
            seen = objects.get(key)[1]
            won = _winners(pool, lambda body, key=key, seen=seen: objects.replace(key, body, seen))
            assert won == [objects.get(key)[0]]


def _winners(pool: ThreadPoolExecutor, write: Callable[[bytes], Version]) -> list[bytes]:
    start = threading.Barrier(8, timeout=30)

    def attempt(_: int) -> bytes | None:
        body = uuid.uuid4().bytes * 100
        start.wait()
        try:
            write(body)
        except (ObjectExists, ObjectChanged, RequestConflict):
            return None
        return body

    return [body for body in pool.map(attempt, range(8)) if body is not None]


@pytest.mark.parametrize("key", ["", "/a", "a/", "a//b", "a/../b", ".", "ü", "a\nb", "x" * 1025])
def test_keys_that_some_storage_would_change_are_refused(key: str) -> None:
    with pytest.raises(ValueError, match="key"):
        check_key(key)
