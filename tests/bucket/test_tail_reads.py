"""A cursor in the tail goes by the rows of the ledger: few requests, and never a record that was deleted."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bucket.test_arriving import LATER_MS
from bucket.test_mending import flip, overwrite
from logstore.bucket import maintaining
from logstore.bucket.elapsed import Elapsed
from logstore.bucket.maintaining import MaintenanceRules, delete_up_to, maintain
from logstore.bucket.manifest import Manifest
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.clock import ManualClock
from logstore.errors import OffsetOutOfRange
from logstore.objects.counted import CountedObjects
from logstore.objects.memory import MemoryObjects
from logstore.records.record import Record

DAY_MS = 24 * 3_600_000


class Followed:
    """A store, and a reader that has it open by itself and keeps its position."""

    def __init__(self, **configs: str) -> None:
        self.clock = ManualClock(LATER_MS)
        self.raw = MemoryObjects(self.clock)
        self.store = self._opened(create=True)
        self.topic = self.store.create_topic("t", partitions=2, configs={"retention.ms": "-1", **configs})
        self.reader = self._opened()
        self.reader.ledger._elapsed = lambda: Elapsed(self.clock.now_ms, self.clock.now_ms)
        self.reader.ledger._looked = self.reader.ledger._elapsed()
        self.position: dict[str, object] | None = None
        self.requests = self.reader.objects.requests  # type: ignore[attr-defined]

    def _opened(self, *, create: bool = False) -> BucketStore:
        objects = CountedObjects(self.raw)
        return BucketStore("memory://test", create=create, objects=objects, clock=self.clock)

    def append(self, count: int = 6) -> None:
        records = [Record(b"k%d" % number, b"v", LATER_MS) for number in range(count)]
        self.store.append("t", records)

    def read(self) -> list[tuple[int, int]]:
        found = []
        for each in self.reader.follow("t", self.position, wait=False):
            found += [(each.partition, record.offset) for record in each.records]
            self.position = each.position
        return found

    def ends(self) -> tuple[int, ...]:
        return self.store.ends(self.topic).high_watermarks

    def manifest(self, number: int) -> Manifest | None:
        return self.store.manifests.read(self.topic.id, number).manifest


SEAL = MaintenanceRules(seal=SealRules(force=True))


def between(before: tuple[int, ...], after: tuple[int, ...]) -> list[tuple[int, int]]:
    return [(n, offset) for n, (base, end) in enumerate(zip(before, after, strict=True)) for offset in range(base, end)]


def test_new_records_take_no_look_at_a_manifest() -> None:
    followed = Followed()
    followed.append()
    followed.read()
    for _ in range(3):
        before = followed.ends()
        followed.append()
        requests = followed.requests["get"]
        assert followed.read() == between(before, followed.ends())
        # The commit, that there is none behind it for each of three looks, and the plan.
        assert followed.requests["get"] - requests <= 5


def test_a_reader_sees_what_is_committed_whatever_maintenance_does(rng: random.Random) -> None:
    """Each offset once, in order: sealed, compacted away or freed in between."""
    followed = Followed(**{"cleanup.policy": "compact,delete", "min.cleanable.dirty.ratio": "0"})
    seen: list[tuple[int, int]] = []
    for _ in range(40):
        step = rng.randrange(5)
        if step < 2:
            followed.append()
        elif step == 2:
            seen += followed.read()
        elif step == 3:
            maintain(followed.store, MaintenanceRules(seal=SealRules(force=True), force_compaction=True))
        else:
            followed.clock.advance(2 * DAY_MS)
    seen += followed.read()
    assert len(set(seen)) == len(seen)
    for number, end in enumerate(followed.ends()):
        mine = [offset for partition, offset in seen if partition == number]
        assert mine == sorted(mine)
        alive = {record.offset for record in followed.store.reader("t", number).records(0)}
        assert alive <= set(mine) <= set(range(end))


def test_who_begins_reads_what_compaction_left() -> None:
    """Though the process knows the rows of what was taken out, and its objects are still there."""
    followed = Followed(**{"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0"})
    for _ in range(3):
        followed.append()
    assert len(followed.read()) == 18
    done = maintain(followed.store, MaintenanceRules(seal=SealRules(force=True), force_compaction=True))
    assert not done.failed
    left = [(number, r.offset) for number in range(2) for r in followed.store.reader("t", number).records(0)]
    assert len(left) == 6
    ends = followed.ends()
    begun = [
        (number, record.offset)
        for number, end in enumerate(ends)
        for record in followed.reader.reader(followed.topic, number, end_offset=end).records(0)
    ]
    assert begun == left
    followed.position = None
    assert sorted(followed.read()) == left


@pytest.mark.parametrize("sealed", [False, True])
def test_deleted_records_are_never_delivered(sealed: bool) -> None:
    followed = Followed()
    followed.append()
    followed.read()
    followed.append()
    if sealed:
        maintain(followed.store, SEAL)
    for number, end in enumerate(followed.ends()):
        delete_up_to(followed.store, followed.topic, number, before_offset=end)
    with pytest.raises(OffsetOutOfRange):
        followed.read()
    before = followed.ends()
    followed.position = {"topic": "t", "topic_id": followed.topic.id, "offsets": dict(enumerate(map(int, before)))}
    followed.append()
    assert followed.read() == between(before, followed.ends())


def test_without_the_row_of_a_deletion_deleted_records_are_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rule is needed."""
    monkeypatch.setattr(maintaining, "touch_topic", lambda store, topic: None)
    followed = Followed()
    followed.append()
    followed.read()
    followed.append()
    for number, end in enumerate(followed.ends()):
        delete_up_to(followed.store, followed.topic, number, before_offset=end)
    assert followed.read() != []


def test_what_a_seal_left_out_stops_nobody(rng: random.Random) -> None:
    followed = Followed()
    followed.append()
    followed.read()
    before = followed.ends()
    followed.append(40)
    row = followed.store.ledger.view.rows[-1]
    assert row.plan is not None
    ((key, _, _),) = followed.store.shelf.plans.get(row.plan).files
    overwrite(followed.store, key, flip)
    maintain(followed.store, MaintenanceRules(seal=SealRules(force=True), sweep=False))
    lost = {
        (number, offset)
        for number in range(2)
        if (manifest := followed.manifest(number)) is not None
        for loss in manifest.losses
        for offset in range(loss.base_offset, loss.end_offset)
    }
    assert lost
    assert followed.read() == [each for each in between(before, followed.ends()) if each not in lost]


def test_what_rows_do_not_say_is_asked_of_the_manifest() -> None:
    followed = Followed()
    followed.append()
    followed.read()
    followed.append()
    followed.store.alter_topic("t", configs={"segment.bytes": "4000"})
    requests = followed.requests["get"]
    assert len(followed.read()) == 6
    assert followed.requests["get"] - requests > 6
    # A transaction is open: where readers stop is not for the rows alone.
    followed.append()
    view = followed.reader.ledger.refresh()
    newest = view.topic(followed.topic.id)[-1].base_offsets[0]
    assert followed.reader.is_in_tail(followed.topic, 0, newest)
    followed.reader.ledger._view = replace(view, unstable={followed.topic.id: ((0, 0),)})
    assert not followed.reader.is_in_tail(followed.topic, 0, newest)
