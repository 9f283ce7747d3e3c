"""Rules of rows, replacements, floors, pins and sweeps, one by one. `test_model.py` has them all at once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest

from logstore.bucket.freeing import (
    CLOCK_OFF_MS_MAX,
    GRACE_MS,
    ORPHAN_MS,
    Floor,
    Pin,
    check_age,
    cleared_floor,
    collectable,
    free_plans,
    kept_rows,
    named,
    orphan_candidates,
    orphans,
    raise_floor,
    sealed_sequence,
)
from logstore.bucket.judging import Attempt, Verdict, check_clock, is_settled, judge, plan_clock
from logstore.bucket.manifest import Garbage, Manifest, Segment
from logstore.bucket.replacing import (
    CompactionPass,
    Group,
    Sealed,
    apply_pass,
    check_successor,
    collected,
    end_partition,
    fence_partition,
    has_won,
    plan_seal,
    raise_log_start,
    seal_segments,
)
from logstore.bucket.rows import Kind, LedgerView, PlanRef, TopicRow, check_chain, concerning, view_partition
from logstore.commit.apps import AppBatch
from logstore.errors import (
    LedgerError,
    OffsetOutOfRange,
    ReplayMismatch,
    SegmentsChanged,
    StaleObjects,
    UnknownTopic,
    UnsuitableObjectStore,
)
from logstore.objects.objects import Head, Version


def row(sequence: int, base: tuple[int, ...], end: tuple[int, ...], **more: object) -> TopicRow:
    kind = more.pop("kind", Kind.BATCH)
    plan = PlanRef(f"plan-{sequence}", 1, 0, (("t", sequence),)) if kind is Kind.BATCH else None
    return replace(TopicRow("t", sequence, kind, 1, base, end, 100, plan), **more)  # type: ignore[arg-type]


#: made with two partitions, two batches, widened to three, one more batch
ROWS = (
    row(1, (0, 0), (0, 0), kind=Kind.DEFINED),
    row(2, (0, 0), (5, 0)),
    row(3, (5, 0), (5, 7)),
    row(4, (5, 7, 0), (5, 7, 0), kind=Kind.DEFINED, config_version=2),
    row(5, (5, 7, 0), (9, 8, 1), config_version=2),
)


def segment(base: int, end: int, name: str = "") -> Segment:
    return Segment(f"logs/t/0/{base}{name}", base, end)


LISTED = tuple(segment(base, base + 10) for base in range(0, 50, 10))
MANIFEST = Manifest(7, "seven", 50, LISTED, first_dirty_offset=20)


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_that_chain_are_taken() -> None:
    check_chain(ROWS)
    check_chain(ROWS[2:])


@pytest.mark.parametrize(
    "wrong",
    [
        (ROWS[0], ROWS[2]),
        (ROWS[0], replace(ROWS[1], base_offsets=(1, 0))),
        (ROWS[1], replace(ROWS[2], base_offsets=(5, 0, 0), end_offsets=(5, 7, 0))),
        (ROWS[3], replace(ROWS[4], base_offsets=(5, 7), end_offsets=(9, 8))),
        (ROWS[3], replace(ROWS[4], config_version=1)),
        (ROWS[3], replace(ROWS[4], clock_ms=99)),
        (replace(ROWS[0], kind=Kind.ENDED), ROWS[1]),
        (replace(ROWS[1], end_offsets=(0, -1)),),
        (replace(ROWS[1], end_offsets=(5,)),),
    ],
)
def test_rows_that_do_not_chain_are_refused(wrong: tuple[TopicRow, ...]) -> None:
    with pytest.raises(LedgerError):
        check_chain(wrong)


def test_a_partition_has_its_segments_and_then_the_rows_above_them() -> None:
    assert [each.sequence for each in concerning(ROWS, 0, 0)] == [2, 5]
    assert [each.sequence for each in concerning(ROWS, 0, 5)] == [5]
    assert [each.sequence for each in concerning(ROWS, 2, 0)] == [5]
    view = view_partition(Manifest(1, "n", 5, (segment(0, 5),)), ROWS, 0)
    assert view is not None
    assert (view.sealed_offset, view.high_watermark, [each.sequence for each in view.tail]) == (5, 9, [5])
    unsealed = view_partition(None, ROWS, 1)
    assert unsealed is not None
    assert (unsealed.high_watermark, [each.sequence for each in unsealed.tail]) == (8, [3, 5])


def test_what_the_ledger_does_not_know_is_not_there() -> None:
    with pytest.raises(LedgerError, match="sealed up to 10"):
        view_partition(Manifest(1, "n", 10, (segment(0, 10),)), ROWS, 0)
    with pytest.raises(LedgerError, match="no row"):
        view_partition(None, (), 0)
    with pytest.raises(LedgerError, match="no row"):
        view_partition(None, ROWS, 3)


def test_rows_that_were_pruned_since_the_manifest_was_read_mean_look_again() -> None:
    assert view_partition(None, ROWS[4:], 0) is None
    assert view_partition(None, ROWS[4:], 2) is not None


def test_a_row_that_stays_for_its_app_does_not_break_the_chain() -> None:
    kept = LedgerView(9, (replace(ROWS[1], app_id="a", batch_id=3), ROWS[3], ROWS[4]))
    assert kept.topic("t") == (ROWS[3], ROWS[4])
    check_chain(kept.topic("t"))


# --- replacements -----------------------------------------------------------------------------------------------------


def test_whole_commits_are_sealed_from_the_sealed_offset_on() -> None:
    plan = plan_seal(None, ROWS, 0, commits_max=10)
    assert plan is not None
    assert (plan.from_offset, plan.end_offset, len(plan.rows)) == (0, 9, 2)
    assert plan_seal(None, ROWS, 0, commits_max=1).end_offset == 5  # type: ignore[union-attr]
    after = seal_segments(None, plan, Sealed((segment(0, 4), segment(4, 9))), now_ms=1, nonce="n")
    assert (after.generation, after.sealed_offset) == (1, 9)
    assert plan_seal(after, ROWS, 0, commits_max=10) is None
    with pytest.raises(SegmentsChanged):
        seal_segments(after, plan, Sealed((segment(0, 9),)), now_ms=1, nonce="m")


@pytest.mark.parametrize("bases", [(0, 4), (0, 9, 12), (1, 9), (0, 5, 4, 9), ()])
def test_segments_that_are_not_what_was_planned_are_never_listed(bases: tuple[int, ...]) -> None:
    plan = plan_seal(None, ROWS, 0, commits_max=10)
    assert plan is not None
    made = tuple(Segment(f"s{base}", base, end) for base, end in pairwise(bases))
    with pytest.raises(LedgerError):
        seal_segments(None, plan, Sealed(made), now_ms=1, nonce="n")


def test_what_is_sealed_below_the_log_start_is_garbage_at_once() -> None:
    started = raise_log_start(None, 6, high_watermark=9, now_ms=1, nonce="n")
    assert started is not None
    plan = plan_seal(started, ROWS, 0, commits_max=10)
    assert plan is not None
    after = seal_segments(started, plan, Sealed((segment(0, 4), segment(4, 9))), now_ms=5, nonce="m")
    assert (after.segments, after.garbage) == ((segment(4, 9),), (Garbage(segment(0, 4).key),))
    assert (after.log_start_offset, after.sealed_offset) == (6, 9)


def a_pass(**changes: object) -> CompactionPass:
    done = CompactionPass(
        LISTED[:4],
        (Group(LISTED[:2], (segment(0, 20, "new"),)), Group(LISTED[3:4], (segment(30, 40, "new"),))),
        20,
        40,
        3,
    )
    return replace(done, **changes)  # type: ignore[arg-type]


def test_a_pass_replaces_all_its_groups_at_once() -> None:
    after = apply_pass(MANIFEST, a_pass(), now_ms=9, nonce="n")
    assert [each.key for each in after.segments] == ["logs/t/0/0new", "logs/t/0/20", "logs/t/0/30new", "logs/t/0/40"]
    assert {each.key for each in after.garbage} == {LISTED[0].key, LISTED[1].key, LISTED[3].key}
    assert (after.first_dirty_offset, after.dropped_tombstones, after.generation) == (40, 3, 8)


def test_a_seal_meanwhile_does_not_void_a_pass() -> None:
    sealed = replace(MANIFEST, segments=(*LISTED, segment(50, 60)), sealed_offset=60)
    assert apply_pass(sealed, a_pass(), now_ms=9, nonce="n").sealed_offset == 60


@pytest.mark.parametrize(("start", "left"), [(10, ["0new", "20", "30new", "40"]), (20, ["20", "30new", "40"]),
    (35, ["30new", "40"]), (40, ["40"]), (50, [])])  # fmt: skip
def test_a_prefix_that_retention_took_away_does_not_void_the_rest(start: int, left: list[str]) -> None:
    retained = raise_log_start(MANIFEST, start, high_watermark=60, now_ms=1, nonce="r")
    assert retained is not None
    after = apply_pass(retained, a_pass(), now_ms=9, nonce="n")
    assert [each.key.removeprefix("logs/t/0/") for each in after.segments] == left
    assert len({each.key for each in after.garbage}) == len(after.garbage)


@pytest.mark.parametrize(
    "meanwhile",
    [
        lambda it: replace(it, first_dirty_offset=30),
        lambda it: replace(it, segments=(*LISTED[:2], segment(20, 30, "other"), *LISTED[3:])),
        lambda it: replace(it, segments=(segment(0, 10, "other"), *LISTED[1:])),
        lambda it: end_partition(it, now_ms=1, nonce="e"),
    ],
)
def test_a_pass_whose_segments_changed_is_void(meanwhile: Callable[[Manifest], Manifest]) -> None:
    with pytest.raises(SegmentsChanged):
        apply_pass(meanwhile(MANIFEST), a_pass(), now_ms=9, nonce="n")


def test_a_log_start_only_rises_and_never_above_what_is_committed() -> None:
    after = raise_log_start(MANIFEST, 25, high_watermark=60, now_ms=4, nonce="n")
    assert after is not None
    assert (after.segments, after.log_start_offset) == (LISTED[2:], 25)
    assert [each.key for each in after.garbage] == [LISTED[0].key, LISTED[1].key]
    assert raise_log_start(after, 10, high_watermark=60, now_ms=4, nonce="n") is None
    with pytest.raises(OffsetOutOfRange):
        raise_log_start(MANIFEST, 61, high_watermark=60, now_ms=4, nonce="n")


def test_an_ended_partition_takes_nothing_any_more() -> None:
    ended = end_partition(MANIFEST, now_ms=3, nonce="n")
    assert (ended.segments, len(ended.garbage), ended.sealed_offset) == ((), 5, 50)
    assert end_partition(None, now_ms=3, nonce="n").ended
    assert plan_seal(ended, ROWS, 0, commits_max=1) is None
    plan = plan_seal(None, ROWS, 0, commits_max=1)
    assert plan is not None
    for attempt in (
        lambda: seal_segments(ended, plan, Sealed((segment(0, 5),)), now_ms=1, nonce="m"),
        lambda: raise_log_start(ended, 60, high_watermark=60, now_ms=1, nonce="m"),
    ):
        with pytest.raises(SegmentsChanged):
            attempt()


def test_who_finds_outputs_listed_or_as_garbage_has_won() -> None:
    after = apply_pass(MANIFEST, a_pass(), now_ms=9, nonce="n")
    mine = ["logs/t/0/30new", "logs/t/0/0new"]
    assert has_won(after, mine)
    assert has_won(end_partition(after, now_ms=10, nonce="e"), mine)
    assert not has_won(MANIFEST, mine)
    assert not has_won(None, mine)


@pytest.mark.parametrize(
    "wrong",
    [
        {"generation": 8, "nonce": "seven"},
        {"generation": 7, "nonce": "n"},
        {"generation": 9, "nonce": "n"},
        {"generation": 8, "nonce": "n", "first_dirty_offset": 19},
        {"generation": 8, "nonce": "n", "segments": LISTED[:4], "sealed_offset": 40},
    ],
)
def test_nothing_falls_from_one_manifest_to_the_next(wrong: dict[str, object]) -> None:
    check_successor(MANIFEST, fence_partition(MANIFEST, nonce="n"))
    check_successor(None, end_partition(None, now_ms=1, nonce="n"))
    with pytest.raises(LedgerError):
        check_successor(MANIFEST, replace(MANIFEST, **wrong))  # type: ignore[arg-type]
    ended = end_partition(MANIFEST, now_ms=1, nonce="e")
    with pytest.raises(LedgerError):
        check_successor(ended, replace(ended, generation=9, nonce="n", ended=False, log_start_offset=50))


# --- freeing ----------------------------------------------------------------------------------------------------------

NOW = 10 * ORPHAN_MS


def test_garbage_goes_after_its_grace_and_not_below_a_live_pin() -> None:
    since = NOW - GRACE_MS
    manifest = replace(MANIFEST, garbage=(Garbage("old", since), Garbage("young", since + 1)))
    assert [each.key for each in collectable(manifest, now_ms=NOW, pins=())] == ["old"]
    before, behind = Pin(since - 1, NOW + 1), Pin(since + CLOCK_OFF_MS_MAX + 1, NOW + 1)
    assert collectable(manifest, now_ms=NOW, pins=(before,)) == ()
    assert len(collectable(manifest, now_ms=NOW, pins=(behind,))) == 1
    expired = Pin(since - 1, NOW - CLOCK_OFF_MS_MAX - 1)
    assert len(collectable(manifest, now_ms=NOW, pins=(expired,))) == 1
    after = collected(manifest, ["old"], now_ms=NOW, nonce="n")
    assert after is not None
    assert after.garbage == (Garbage("young", since + 1),)
    assert collected(after, [], now_ms=NOW, nonce="m") is None


def test_garbage_gets_its_time_from_whoever_finds_it_there() -> None:
    """Whoever makes it cannot know when the manifest is written: its process may sleep for a day before that."""
    made = raise_log_start(MANIFEST, 10, high_watermark=60, now_ms=NOW, nonce="n")
    assert made is not None
    assert made.garbage == (Garbage(LISTED[0].key),)
    assert collectable(made, now_ms=NOW + 2 * GRACE_MS, pins=()) == ()
    found = collected(made, [], now_ms=NOW + GRACE_MS, nonce="m")
    assert found is not None
    assert found.garbage == (Garbage(LISTED[0].key, NOW + GRACE_MS),)
    more = raise_log_start(made, 20, high_watermark=60, now_ms=NOW + 5, nonce="m")
    assert more is not None
    assert more.garbage == (Garbage(LISTED[0].key, NOW + 5), Garbage(LISTED[1].key))


def test_a_row_is_sealed_when_all_its_partitions_are() -> None:
    def sealed(*offsets: int) -> list[Manifest | None]:
        return [Manifest(1, "n", at, (segment(0, at),) if at else ()) for at in offsets]

    assert sealed_sequence(ROWS, []) == 1
    assert sealed_sequence(ROWS, sealed(5)) == 2
    assert sealed_sequence(ROWS, sealed(9, 6)) == 2
    assert sealed_sequence(ROWS, sealed(5, 7)) == 4
    assert sealed_sequence(ROWS, [*sealed(9, 8), None]) == 4
    assert sealed_sequence(ROWS, sealed(9, 8, 1)) == 5
    assert sealed_sequence((), []) == 0


def test_a_floor_rises_in_two_steps_with_the_grace_between_them() -> None:
    first = raise_floor(None, 3, now_ms=NOW, pins=(), nonce="a")
    assert first is not None
    assert (first.sealed, first.freed) == (3, 0)
    assert raise_floor(first, 8, now_ms=NOW + GRACE_MS - 1, pins=(), nonce="b") is None
    later = NOW + GRACE_MS
    assert raise_floor(first, 8, now_ms=later, pins=(Pin(NOW - 5, later),), nonce="b") is None
    second = raise_floor(first, 8, now_ms=later, pins=(), nonce="b")
    assert second is not None
    assert (second.freed, second.sealed, second.sealed_since_ms, second.generation) == (3, 8, later, 2)
    assert cleared_floor(second, 8, nonce="c").cleared == 3
    assert raise_floor(second, 8, now_ms=later, pins=(), nonce="d") is None


def test_a_plan_goes_with_the_last_of_its_topics() -> None:
    both = PlanRef("plan", 1, 0, (("t", 2), ("u", 9)))
    rows = (replace(ROWS[1], plan=both),)
    mine = Floor(freed=2, sealed=2)
    assert free_plans(rows, mine, {"t": mine}, ()) == ()
    assert free_plans(rows, mine, {"t": mine, "u": Floor(freed=8)}, ()) == ()
    assert free_plans(rows, mine, {"t": mine, "u": Floor(freed=9)}, ()) == (both,)
    assert free_plans(rows, mine, {"t": mine}, ("u",)) == (both,)
    assert free_plans(rows, replace(mine, cleared=2), {"t": mine, "u": Floor(freed=9)}, ()) == ()


def test_the_ledger_forgets_no_newest_row_and_none_above_the_floor() -> None:
    rows = (ROWS[0], replace(ROWS[1], app_id="a", batch_id=1), ROWS[2], ROWS[3], ROWS[4])
    view = LedgerView(5, rows)
    assert kept_rows(view, {}, {}) == rows
    kept = kept_rows(view, {"t": Floor(freed=5, cleared=3)}, {})
    assert [(each.sequence, each.kind) for each in kept] == [
        (2, Kind.SEALED), (4, ROWS[3].kind), (5, ROWS[4].kind),
    ]  # fmt: skip
    assert kept_rows(view, {"t": Floor(freed=5, cleared=5)}, {})[-1] is rows[-1]


def test_what_is_sealed_keeps_its_plan_and_its_app_and_no_offsets() -> None:
    rows = (ROWS[0], replace(ROWS[1], app_id="a", batch_id=1), ROWS[2], ROWS[3], ROWS[4])
    kept = LedgerView(5, kept_rows(LedgerView(5, rows), {"t": Floor(freed=1, cleared=1)}, {"t": 3}))
    assert [(each.sequence, each.end_offsets != ()) for each in kept.rows] == [
        (2, False), (3, False), (4, True), (5, True),
    ]  # fmt: skip
    assert [each.plan for each in kept.rows] == [each.plan for each in rows[1:]]
    progress = kept.app("a")
    assert progress is not None
    assert progress.batch_id == 1
    assert kept.topic("t") == rows[3:]  # the chain goes on behind them
    assert kept_rows(kept, {}, {"t": 3}) == kept.rows


def test_an_ended_topic_keeps_its_partitions_until_nothing_is_left_of_them() -> None:
    ended = row(6, (9, 8, 1), (9, 8, 1), kind=Kind.ENDED, config_version=2)
    view = LedgerView(6, (*ROWS, ended))
    for floor, sealed in ((6, 0), (5, 6)):
        assert kept_rows(view, {"t": Floor(freed=6, cleared=floor)}, {"t": sealed})[-1] is ended
    (left,) = kept_rows(view, {"t": Floor(freed=6, cleared=6)}, {"t": 6})
    assert (left.kind, left.sequence, left.end_offsets) == (Kind.ENDED, 6, ())


def head(key: str, age_ms: int) -> Head:
    return Head(key, 1, NOW - age_ms, Version("v"))


def test_a_sweep_takes_what_is_old_and_unnamed() -> None:
    listed = [head("a", ORPHAN_MS), head("b", ORPHAN_MS - 1), head("plan-2", ORPHAN_MS * 2), head("f", ORPHAN_MS)]
    candidates = orphan_candidates(listed, now_ms=NOW)
    assert candidates == ("a", "plan-2", "f")
    names = named(LedgerView(9, ROWS), {}, [MANIFEST], lambda plan: ["f"] if plan.key == "plan-2" else [])
    assert orphans(candidates, names) == ("a",)
    assert {each.key for each in LISTED} <= names
    freed = named(LedgerView(9, ROWS), {"t": Floor(freed=2)}, [], lambda plan: [plan.key + "/f"])
    assert freed == {"plan-3", "plan-3/f", "plan-5", "plan-5/f"}
    ended = LedgerView(9, (*ROWS, row(6, (9, 8, 1), (9, 8, 1), kind=Kind.ENDED, config_version=2)))
    assert named(ended, {}, [], lambda plan: [plan.key]) == frozenset()


def test_what_a_sweep_may_take_is_not_named_any_more() -> None:
    check_age(ORPHAN_MS // 2 - 1)
    with pytest.raises(StaleObjects):
        check_age(ORPHAN_MS // 2)


# --- judging ----------------------------------------------------------------------------------------------------------


def attempt(batch_id: int = 3, **more: object) -> Attempt:
    app = AppBatch("app", batch_id, "query")
    return Attempt(app, {"t": 2}, **more)  # type: ignore[arg-type]


def by(plan: str, batch_id: int, query_id: str = "query") -> LedgerView:
    last = replace(ROWS[4], plan=PlanRef(plan, 1, 0, (("t", 5),)), app_id="app", batch_id=batch_id, query_id=query_id)
    return LedgerView(9, (*ROWS[:4], last))


def test_after_a_conflict_ones_own_plan_is_looked_for_first() -> None:
    assert judge(by("mine", 3), attempt(plans=("older", "mine"))) is Verdict.COMMITTED
    assert judge(by("theirs", 3), attempt(plans=("mine",))) is Verdict.REPLAYED
    assert judge(by("theirs", 2), attempt(plans=("mine",))) is Verdict.PLAN_AGAIN
    assert judge(LedgerView(9, ROWS), attempt()) is Verdict.PLAN_AGAIN
    with pytest.raises(ReplayMismatch):
        judge(by("theirs", 2, "another query"), attempt(plans=("mine",)))
    with pytest.raises(ReplayMismatch):
        judge(by("theirs", 4), attempt(plans=("mine",)))


def test_a_topic_that_moved_is_encoded_again_and_one_that_ended_is_refused() -> None:
    altered = row(6, (9, 8, 1), (9, 8, 1), kind=Kind.DEFINED, config_version=3)
    assert judge(LedgerView(9, (*ROWS, altered)), attempt()) is Verdict.ENCODE_AGAIN
    ended = replace(altered, kind=Kind.ENDED)
    with pytest.raises(UnknownTopic):
        judge(LedgerView(9, (*ROWS, ended)), attempt())
    with pytest.raises(UnknownTopic):
        judge(LedgerView(9), attempt())


def test_not_committed_is_said_when_no_attempt_can_land_any_more() -> None:
    assert is_settled(LedgerView(9), [7, 9])
    assert not is_settled(LedgerView(9), [7, 10])


def test_clocks() -> None:
    assert plan_clock(50, LedgerView(9, ROWS), ["t"]) == 100
    assert plan_clock(150, LedgerView(9, ROWS), ["t"]) == 150
    assert plan_clock(50, LedgerView(9, ROWS), ["u"]) == 50
    assert check_clock(NOW, NOW - CLOCK_OFF_MS_MAX) == NOW - CLOCK_OFF_MS_MAX
    with pytest.raises(UnsuitableObjectStore):
        check_clock(NOW, NOW - CLOCK_OFF_MS_MAX - 1)
