"""The ledger: versions one after the other, conflicts that say so, and a Delta table to everybody else."""

from __future__ import annotations

import random
import time
from dataclasses import replace
from pathlib import Path

import pytest
from deltalake import DeltaTable

from bucket.faulty import Fault, FaultyObjects
from logstore.bucket.commit_file import LOG, SUMMARY, Entry, commit_key, decode_summary, encode_summary
from logstore.bucket.elapsed import Elapsed
from logstore.bucket.freeing import Floor, kept_rows
from logstore.bucket.ledger import BucketLedger
from logstore.bucket.rows import NO_TOPIC, Kind, LedgerView, PlanRef, TopicRow
from logstore.clock import ManualClock
from logstore.errors import CommitConflict, CommitUnknown, LedgerError
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.objects.counted import CountedObjects
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Objects, Version
from logstore.objects.retrying import Patience, RetryingObjects
from logstore.topic import new_topic_id
from logstore.topics.registry import Topic

TOPIC = Topic("orders", new_topic_id(), 2, {"cleanup.policy": "compact"}, 1, 5, keyed=True)
DEFINED = TopicRow(TOPIC.id, 1, Kind.DEFINED, 1, (0, 0), (0, 0), 5, definition=TOPIC)


def batch(number: int, topic_id: str = TOPIC.id) -> TopicRow:
    plan = PlanRef(f"data/aa/p/plan-{number}", 10, 7, ((topic_id, number),))
    at = number - 2
    return TopicRow(
        topic_id, number, Kind.BATCH, 1, (at, 0), (at + 1, 0), 5, plan, "app", at, "query"
    )  # fmt: skip


def entry(*rows: TopicRow, nonce: str = "n") -> Entry:
    return Entry(rows, nonce, details={"records": 1})


def ledger(objects: Objects, **options: object) -> BucketLedger:
    return BucketLedger(objects, clock=ManualClock(5), limits=DEFAULT_LIMITS, **options)  # type: ignore[arg-type]


def filled(objects: Objects, commits: int) -> BucketLedger:
    writer = ledger(objects)
    writer.make()
    view = writer.commit(writer.view, entry(DEFINED))
    for number in range(2, commits + 1):
        view = writer.commit(view, entry(batch(number)))
    return writer


def test_another_process_sees_what_was_committed() -> None:
    objects = MemoryObjects()
    view = filled(objects, 7).view
    assert ledger(objects).refresh() == view
    assert view.version == 7
    assert view.named("orders") == TOPIC
    assert [row.sequence for row in view.topic(TOPIC.id)] == [*range(1, 8)]
    progress = view.app("app")
    assert progress is not None
    assert (progress.batch_id, progress.query_id) == (5, "query")


def test_a_ledger_made_twice_is_one() -> None:
    objects = MemoryObjects()
    filled(objects, 3)
    ledger(objects).make()
    assert ledger(objects).view.version == 3


def test_opening_takes_few_requests_and_an_idle_look_one() -> None:
    objects = MemoryObjects()
    writer = filled(objects, 1)
    for number in range(2, 40):
        writer.commit(writer.view, entry(batch(number)))
        counted = CountedObjects(objects)
        reader = ledger(counted)
        reader.refresh()
        assert sum(counted.requests.values()) <= 5
        reader.refresh()
        assert counted.requests.total() <= 6


def test_of_two_commits_to_one_version_one_conflicts() -> None:
    objects = MemoryObjects()
    first, second = filled(objects, 1), ledger(objects)
    seen = second.refresh()
    first.commit(first.view, entry(batch(2)))
    with pytest.raises(CommitConflict):
        second.commit(seen, entry(batch(2), nonce="other"))
    assert second.refresh() == first.view


@pytest.mark.parametrize("fault", [Fault.BEFORE, Fault.AFTER, Fault.LATE, Fault.TWICE, Fault.CONFLICT, Fault.BUSY])
def test_a_lost_answer_is_settled_by_trying_again(fault: Fault) -> None:
    objects = MemoryObjects()
    filled(objects, 1)
    faulty = FaultyObjects(objects)
    patience = Patience(sleep=lambda _: None)
    writer = ledger(RetryingObjects(faulty, patience))
    view = writer.refresh()
    faulty.faults[len(faulty.calls)] = fault
    after = writer.commit(view, entry(batch(2)))
    faulty.land()
    assert ledger(objects).refresh() == after


def test_an_outcome_that_stays_open_is_said_to_be_unknown() -> None:
    objects = MemoryObjects()
    filled(objects, 1)
    faulty = FaultyObjects(objects)
    writer = ledger(faulty)
    view = writer.refresh()
    faulty.faults[len(faulty.calls)] = Fault.AFTER
    with pytest.raises(CommitUnknown):
        writer.commit(view, entry(batch(2)))
    assert writer.refresh().version == 2


def slept_through_a_clean_up() -> tuple[BucketLedger, LedgerView, BucketLedger]:
    """A ledger that was last looked at before its next version was made, summarized and deleted; what it saw; and the
    writer of all that.
    """
    objects = MemoryObjects()
    now = [0]
    sleeper = ledger(objects, elapsed=lambda: Elapsed(lambda: now[0], lambda: 0))
    writer = filled(objects, 2)
    seen = sleeper.refresh()
    for number in range(3, 12):
        writer.commit(writer.view, entry(batch(number)))
    objects.delete([commit_key(version) for version in range(8)])
    now[0] += 3_600_001
    return sleeper, seen, writer


def test_who_slept_and_put_a_version_that_was_cleaned_up_has_not_committed() -> None:
    sleeper, seen, writer = slept_through_a_clean_up()
    with pytest.raises(CommitConflict):
        sleeper.commit(seen, entry(replace(batch(3), clock_ms=9)))
    assert sleeper.view == writer.view


def test_who_slept_begins_from_the_summary() -> None:
    objects = MemoryObjects()
    now = [0]
    sleeper = ledger(objects, elapsed=lambda: Elapsed(lambda: 0, lambda: now[0]))
    writer = filled(objects, 2)
    sleeper.refresh()
    for number in range(3, 12):
        writer.commit(writer.view, entry(batch(number)))
    objects.delete([commit_key(version) for version in range(8)])
    now[0] += 3_600_001
    assert sleeper.refresh() == writer.view


def test_who_slept_while_it_looked_looks_again() -> None:
    """It read the summary, slept for a day, and asked for a version that was cleaned up meanwhile."""
    now = [0]
    inner = MemoryObjects()
    writer = filled(inner, 2)

    class Sleeping(CountedObjects):
        def get(self, key: str) -> tuple[bytes, Version]:
            answer = super().get(key) if key == SUMMARY else None
            if key == SUMMARY and not now[0]:
                for number in range(3, 12):
                    writer.commit(writer.view, entry(batch(number)))
                inner.delete([commit_key(version) for version in range(8)])
                now[0] = 24 * 3_600_000
            return answer or super().get(key)

    sleeper = ledger(Sleeping(inner), elapsed=lambda: Elapsed(lambda: now[0], lambda: 0))
    assert sleeper.refresh() == writer.view


def test_a_view_that_another_thread_left_behind_takes_no_commit() -> None:
    """The version behind it was taken, and may be cleaned up: nothing is sent."""
    objects = MemoryObjects()
    writer = filled(objects, 3)
    old = writer.view
    writer.commit(old, entry(batch(4)))
    objects.delete([commit_key(old.version + 1)])
    with pytest.raises(CommitConflict):
        writer.commit(old, entry(replace(batch(4), clock_ms=9)))
    assert commit_key(old.version + 1) not in [head.key for head in objects.list(LOG)]


@pytest.mark.parametrize("is_pruned", [True, False])
def test_who_slept_behind_its_commit_does_not_say_that_it_is_none(is_pruned: bool) -> None:
    """It was committed, and the answer came two days later, when the ledger may have forgotten the row."""
    now = [0]
    inner = MemoryObjects()
    others = filled(inner, 2)

    class Sleeping(CountedObjects):
        def create(self, key: str, data: bytes) -> Version:
            version = super().create(key, data)
            for number in range(4, 12):
                others.commit(others.refresh(), entry(batch(number)))
            if is_pruned:
                others.prune({TOPIC.id: Floor(sealed=9, freed=9, cleared=9)}, {})
            now[0] = 48 * 3_600_000
            return version

    sleeper = ledger(Sleeping(inner), elapsed=lambda: Elapsed(lambda: now[0], lambda: 0))
    if is_pruned:
        with pytest.raises(CommitUnknown, match="forgotten"):
            sleeper.commit(sleeper.refresh(), entry(batch(3)))
    else:
        sleeper.commit(sleeper.refresh(), entry(batch(3)))


def test_a_fence_put_by_one_who_slept_is_none() -> None:
    sleeper, seen, _ = slept_through_a_clean_up()
    with pytest.raises(CommitConflict):
        sleeper.commit(seen, Entry((), "fence", is_sweep=True))


def test_a_summary_that_cannot_be_written_fails_no_commit() -> None:
    objects = MemoryObjects()
    writer = filled(objects, 6)
    tight = BucketLedger(objects, clock=ManualClock(5), limits=Limits(side_file_bytes=1500))
    tight._view, tight._summary = writer.refresh(), writer._summary
    for number in range(7, 20):
        tight.commit(tight.view, entry(batch(number)))
    assert len(ledger(objects).refresh().rows) == 19


def test_a_summary_that_is_gone_is_written_again() -> None:
    objects = MemoryObjects()
    writer = filled(objects, 6)
    objects.delete([SUMMARY])
    again = ledger(objects)
    again.refresh()
    again.commit(again.view, entry(batch(7)))
    assert ledger(objects).summarized() == again.view.version
    assert writer.refresh() == again.view


@pytest.mark.parametrize("partitions", [1, 3, 1000])
def test_offsets_of_many_partitions_come_back_from_a_summary(partitions: int) -> None:
    rng = random.Random(partitions)
    topic = Topic("wide", new_topic_id(), partitions, {}, 1, 5, keyed=True)
    ends = tuple(rng.choice([0, 5, 255, 256, 1 << 20, 1 << 40]) for _ in range(partitions))
    rows = [TopicRow(topic.id, 1, Kind.DEFINED, 1, (0,) * partitions, (0,) * partitions, 5, definition=topic)]
    for sequence in range(2, 9):
        bases, ends = ends, tuple(end + rng.choice([0, 0, 1, 300, 1 << 33]) for end in ends)
        rows.append(replace(batch(sequence, topic.id), base_offsets=bases, end_offsets=ends))
    view = LedgerView(8, tuple(rows), 0, {topic.id: topic})
    assert decode_summary(encode_summary(view, "n", limits=DEFAULT_LIMITS), limits=DEFAULT_LIMITS) == view


def test_the_summary_of_many_partitions_is_small() -> None:
    """A tail as long as maintenance lets it be, over 10,000 partitions, all of which got records in each commit."""
    rng, count = random.Random(1), 10_000
    topic = Topic("wide", new_topic_id(), count, {}, 1, 5, keyed=True)
    ends = (0,) * count
    rows = []
    for sequence in range(1, 257):
        bases, ends = (
            ends,
            tuple(end + more for end, more in zip(ends, rng.choices(range(1, 60), k=count), strict=True)),
        )
        rows.append(replace(batch(sequence + 1, topic.id), base_offsets=bases, end_offsets=ends))
    view = LedgerView(8, tuple(rows), 0, {topic.id: topic})
    data = encode_summary(view, "n", limits=DEFAULT_LIMITS)
    assert len(data) < 4 << 20
    began = time.process_time()
    decode_summary(data, limits=DEFAULT_LIMITS)
    assert time.process_time() - began < 5
    sealed = LedgerView(8, kept_rows(view, {}, {topic.id: 257}), 0, {topic.id: topic})
    assert len(encode_summary(sealed, "n", limits=DEFAULT_LIMITS)) < 100_000


def test_pruned_rows_do_not_come_back_with_the_summary_of_another_writer() -> None:
    objects = MemoryObjects()
    writer = filled(objects, 9)
    floors = {TOPIC.id: Floor(sealed=6, freed=6, cleared=6)}
    assert ledger(objects).prune(floors, {}) == 6
    assert ledger(objects).prune(floors, {}) == 0
    assert ledger(objects).prune(floors, {TOPIC.id: 8}) == 0
    for number in range(10, 20):
        writer.commit(writer.view, entry(batch(number)))
    for view in (writer.view, ledger(objects).refresh()):
        assert [row.sequence for row in view.rows] == [*range(7, 20)]
        assert [row.sequence for row in view.topic(TOPIC.id)] == [*range(9, 20)]
        assert view.named("orders") == TOPIC
        assert view.version == 19


def test_an_empty_batch_counts_for_its_app() -> None:
    objects = MemoryObjects()
    writer = filled(objects, 2)
    row = TopicRow(NO_TOPIC, 0, Kind.EMPTY, 0, (), (), 5, None, "app", 1, "query")
    writer.commit(writer.view, entry(row))
    progress = ledger(objects).view.app("app")
    assert progress is not None
    assert progress.batch_id == 1


def test_an_ended_topic_has_no_name() -> None:
    objects = MemoryObjects()
    writer = filled(objects, 1)
    writer.commit(writer.view, entry(TopicRow(TOPIC.id, 2, Kind.ENDED, 1, (0, 0), (0, 0), 5)))
    assert ledger(objects).view.named("orders") is None


def test_it_is_a_delta_table_to_other_readers(tmp_path: Path) -> None:
    objects = MemoryObjects()
    writer = filled(objects, 5)
    writer.commit(writer.view, Entry((), "sweep", is_sweep=True))
    for head in objects.list("ledger/commits"):
        path = tmp_path / head.key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(objects.get(head.key)[0])
    table = DeltaTable(str(tmp_path / "ledger" / "commits"))
    assert table.version() == 6
    assert table.transaction_version(f"topic:{TOPIC.id}") == 5
    assert table.transaction_version("app:app") == 3
    assert table.transaction_version("name:orders") == 1
    assert table.transaction_version("sweep") == 1
    assert table.to_pyarrow_table().num_rows == 0
    assert "base_offsets" in table.to_pyarrow_table().column_names


@pytest.mark.parametrize(
    "change", [(b'"sequence', b'"sequel'), (b"orders", b"others"), (b"{", b""), (b"ledger_v", b"v")]
)
def test_a_damaged_commit_is_told(change: tuple[bytes, bytes]) -> None:
    objects = MemoryObjects()
    filled(objects, 1)
    data, version = objects.get(commit_key(1))
    objects.replace(commit_key(1), data.replace(*change), version)
    with pytest.raises(LedgerError, match="malformed"):
        ledger(objects).refresh()


def test_a_ledger_that_is_gone_is_told() -> None:
    with pytest.raises(LedgerError, match="no ledger"):
        ledger(MemoryObjects()).refresh()


def test_a_summary_is_bounded_before_it_is_unpacked() -> None:
    view = LedgerView(3, tuple(batch(number) for number in range(2, 200)), 0, {TOPIC.id: TOPIC})
    data = encode_summary(view, "n", limits=DEFAULT_LIMITS)
    assert decode_summary(data, limits=DEFAULT_LIMITS) == view
    with pytest.raises(LedgerError, match="unpacked"):
        decode_summary(data, limits=Limits(decompressed_bytes=100))
    with pytest.raises(LedgerError, match="limit"):
        decode_summary(data, limits=Limits(side_file_bytes=100))


def test_every_commit_lies_below_the_delta_log() -> None:
    objects = MemoryObjects()
    filled(objects, 1)
    assert [head.key for head in objects.list("ledger")] == [commit_key(0), commit_key(1), SUMMARY]
    assert commit_key(0).startswith(LOG)
