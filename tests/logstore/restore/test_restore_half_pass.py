"""Restores as of a moment after a pass that stopped half way: right or refused, never wrong."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from logstore.compaction.budget import budget_of
from logstore.compaction.local_workers import LocalWorkers
from logstore.compaction.maintenance import Context
from logstore.compaction.passes import PassRoom, compact_partition
from logstore.compaction.planning import PlanOptions, plan_partition
from logstore.compaction.segment_counts import SegmentCounts
from logstore.directory import swap
from logstore.directory.state import PartitionState
from logstore.errors import HistoryCompacted
from logstore.files import OS_FILES
from logstore.ledger import Ledger
from logstore.limits import DEFAULT_LIMITS
from logstore.records.record import Record
from logstore.restore.restore import plan_restore, restore
from logstore.store import LogStore
from logstore.transfer.kafka_export import export_topics
from logstore.transfer.kafka_import import import_topics
from logstore.transfer.kafka_source import examine, stopped_source
from logstore.upkeep.recovery import recover
from reference.partition_writer import writing

NOW_MS = 1_700_000_000_000
State = dict[bytes, bytes]


class Killed(BaseException):
    """Not an error that anybody handles."""


def compact(store: LogStore, name: str, *, swaps: int | None = None) -> None:
    """A forced pass; with `swaps` it is told to stop once that many groups are in."""
    done: list[object] = []
    ledger = Ledger(store.layout.ledger)
    context = Context(
        LocalWorkers(1, lambda _name, _step, _size: None),
        PlanOptions(NOW_MS, force=True),
        budget_of(store),
        swapped=lambda _plan, group: done.append(group) if group.changed else None,
        stopping=lambda: swaps is not None and len(done) >= swaps,
    )
    room = PassRoom(store, ledger, SegmentCounts(ledger))
    compact_partition(room, context, plan_partition(store, store.topic(name), 0, context.planning))
    room.counts.write()


def state_as_of(store: LogStore, name: str, offset: int) -> State | None:
    """None when it is refused."""
    try:
        plan = plan_restore(store, name, as_of_offsets={0: offset})
        return {row["key"]: row["value"] for batch in restore(store, plan) for row in batch.to_pylist()}
    except HistoryCompacted:
        return None


class Truth:
    """What was appended, and so the state at every offset."""

    def __init__(self, store: LogStore, name: str, seed: int, **configs: object) -> None:
        self.store, self.name = store, name
        self.chance = random.Random(seed)
        self.records: list[Record] = []
        store.create_topic(name, configs={"cleanup.policy": "compact", "segment.bytes": 600, **configs})

    def append(self, batches: int, *, new_keys: bool = False) -> None:
        topic = self.store.topic(self.name)
        with writing(self.store, topic, 0, what="test") as log:
            for _ in range(batches):
                records = []
                for _ in range(5):
                    at = len(self.records) + len(records)
                    key = b"new-%d" % at if new_keys else b"k%d" % self.chance.randrange(12)
                    value = None if self.chance.random() < 0.1 and not new_keys else b"v%d" % at
                    records.append(Record(key, value, NOW_MS - 10_000 + at))
                log.append(records)
                self.records += records

    def as_of(self, offset: int) -> State:
        state: dict[bytes, bytes | None] = {}
        for record in self.records[:offset]:
            assert record.key is not None
            state[record.key] = record.value
        return {key: value for key, value in state.items() if value is not None}

    def check(self, step: int = 1) -> tuple[int, int]:
        """How many moments were answered, and refused; all answers are right."""
        answered = refused = 0
        for offset in range(0, len(self.records) + 1, step):
            found = state_as_of(self.store, self.name, offset)
            if found is None:
                refused += 1
            else:
                assert found == self.as_of(offset), f"as of {offset}"
                answered += 1
        return answered, refused


@pytest.mark.parametrize("swaps", [1, 2, 3])
def test_a_pass_that_was_told_to_stop_half_way(store: LogStore, seed: int, swaps: int) -> None:
    truth = Truth(store, "t", seed)
    truth.append(20)
    assert truth.check() == (101, 0)
    plan = plan_restore(store, "t", as_of_offsets={0: 60})
    compact(store, "t", swaps=swaps)
    state = store.partition_state(store.topic("t"), 0)
    assert state.first_dirty_offset == 0
    answered, refused = truth.check()
    assert refused > 0
    assert answered >= 101 - state.thinned_offset
    with pytest.raises(HistoryCompacted):
        list(restore(store, plan))
    # The next pass finishes it; then a half pass over what is clean and what came since.
    compact(store, "t")
    truth.append(8)
    compact(store, "t", swaps=swaps)
    answered, _ = truth.check(step=3)
    assert answered > 1


def test_a_pass_killed_at_every_step_of_its_swaps(root: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = 0
    refused = 0
    while True:
        with LogStore(root / f"s{steps}", create=True) as store:
            truth = Truth(store, "t", seed)
            truth.append(10)
            left = [steps]

            def step(name: str, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed(name)

            with monkeypatch.context() as patched:
                for name in ("write_state", "_rename", "mark_deleted"):
                    real = getattr(swap, name)
                    patched.setattr(swap, name, lambda *a, real=real, name=name, **k: (step(name), real(*a, **k))[1])
                try:
                    compact(store, "t")
                    finished = True
                except Killed:
                    finished = False
            refused += truth.check(step=7)[1]
            if finished:
                break
        steps += 1
    assert steps > 4
    assert refused > 0


def test_moments_before_the_first_group_that_changed_are_still_had(store: LogStore, seed: int) -> None:
    truth = Truth(store, "t", seed)
    truth.append(6, new_keys=True)  # nothing of these is ever superseded
    truth.append(14)
    compact(store, "t", swaps=1)
    state = store.partition_state(store.topic("t"), 0)
    assert state.is_half_thinned
    assert state.thinned_base_offset > 0
    answered, _ = truth.check()
    assert answered >= state.thinned_base_offset + 1 + len(truth.records) + 1 - state.thinned_offset


def test_a_log_that_lost_its_state_is_not_taken_for_a_whole_one(store: LogStore, seed: int) -> None:
    truth = Truth(store, "t", seed)
    truth.append(20)
    compact(store, "t", swaps=2)
    topic = store.topic("t")
    OS_FILES.unlink(store.layout.partition_state(topic.id, 0))
    recover(store, topic)
    assert truth.check()[1] > 0


@pytest.mark.parametrize("compacted", [False, True])
def test_an_imported_log_is_exact_where_it_has_every_record(
    store: LogStore, tmp_path: Path, seed: int, compacted: bool
) -> None:
    truth = Truth(store, "t", seed)
    truth.append(20)
    if compacted:
        compact(store, "t", swaps=2)
    broker = str(tmp_path / "kafka")
    export_topics(store, broker, [store.topic("t")])
    with LogStore(tmp_path / "other", create=True) as other:
        with stopped_source(OS_FILES, broker):
            source = examine(OS_FILES, broker, limits=DEFAULT_LIMITS)
            import_topics(other, source, {"cleanup.policy": "compact"})
        truth.store = other
        assert (truth.check()[1] > 0) == compacted


def test_exact_from() -> None:
    whole = PartitionState(first_dirty_offset=100)
    assert [whole.exact_from(at) for at in (50, 99, 100, 150)] == [100, 100, None, None]
    half = whole.thinned(0, 200)
    assert [half.exact_from(at) for at in (50, 100, 199, 200)] == [200, 200, 200, None]
    later = whole.thinned(120, 200)
    assert [later.exact_from(at) for at in (50, 100, 120, 121, 200)] == [100, None, None, 200, None]
    assert later.thinned(110, 180).thinned_base_offset == 110
    assert later.thinned(110, 180).thinned_offset == 200
    assert not whole.is_half_thinned
