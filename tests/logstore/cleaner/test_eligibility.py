"""When a log is due by time alone, and which rule says so: tables over pure rules, and passes that keep the facts."""

from __future__ import annotations

import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from compaction.lab import NOW_MS, Lab
from logstore.cleaner.eligibility import (
    CleanerFacts,
    CleanerRules,
    Due,
    Lookups,
    NotDue,
    SegmentAge,
    cleanable,
    slack_ms,
)
from logstore.cleaner.work import CleaningOptions
from logstore.records.record import Record

DAY_MS = 86_400_000
TTL_MS = 10_000
AFTER_MS = 20_000
ZSTD = 4
RULES = CleanerRules(0.5)
EXPIRING = CleanerRules(0.5, key_ttl_ms=TTL_MS)
COLD = CleanerRules(0.5, recompress_after_ms=AFTER_MS)

#: three segments that were compacted, and an empty active one
CLEAN = CleanerFacts(
    (SegmentAge(0, 100, 50), SegmentAge(10, 100, 60), SegmentAge(20, 100, 70), SegmentAge(30, 0, -1)), 0, 30, 30, 30
)
#: the last one of them is dirty, but not dirty enough
DIRTY = replace(CLEAN, first_dirty_offset=20)

EXPIRES_MS = TTL_MS + TTL_MS // 10 + 1
COLD_MS = AFTER_MS + AFTER_MS // 10


#: a compacted segment, two dirty ones, and an active one with records
LOG = CleanerFacts(
    (SegmentAge(0, 100, 10), SegmentAge(10, 100, 20), SegmentAge(20, 100, 30), SegmentAge(30, 100, 40)), 0, 35, 35, 10
)
EMPTY_ACTIVE = (*LOG.segments[:3], SegmentAge(30, 0, -1))
#: at this moment
AT_MS = 100


@pytest.mark.parametrize(
    ("facts", "rules", "dirty", "end", "sizes", "why"),
    [
        pytest.param(LOG, CleanerRules(0.5), 10, 30, (100, 200), Due.RATIO, id="below the active segment"),
        pytest.param(LOG, CleanerRules(200 / 300), 10, 30, (100, 200), NotDue.RATIO, id="the ratio must be above it"),
        pytest.param(
            replace(LOG, first_dirty_offset=None), CleanerRules(0.9), 0, 30, (0, 300), Due.RATIO, id="never compacted"
        ),
        pytest.param(
            replace(LOG, first_dirty_offset=30), RULES, 30, 30, (300, 0), NotDue.ACTIVE_ONLY, id="only the active one"
        ),
        pytest.param(
            replace(LOG, first_dirty_offset=30, segments=EMPTY_ACTIVE),
            RULES,
            30,
            30,
            (300, 0),
            NotDue.NOTHING_NEW,
            id="nothing new",
        ),
        pytest.param(replace(LOG, segments=()), RULES, 10, 10, (0, 0), NotDue.EMPTY, id="no segments"),
        pytest.param(
            replace(LOG, segments=(SegmentAge(10, 0, -1),)), RULES, 10, 10, (0, 0), NotDue.EMPTY, id="no records"
        ),
        # first uncleanable offset: a segment is cleaned as a whole or not at all
        pytest.param(
            replace(LOG, last_stable_offset=25), RULES, 10, 20, (100, 100), NotDue.RATIO, id="an open transaction in it"
        ),
        pytest.param(
            replace(LOG, last_stable_offset=15), RULES, 10, 10, (100, 0), NotDue.OPEN_TRANSACTION, id="or before it"
        ),
        pytest.param(
            replace(LOG, recovery_point=25), CleanerRules(0.4), 10, 20, (100, 100), Due.RATIO, id="partly on disk"
        ),
        pytest.param(
            replace(LOG, recovery_point=10), RULES, 10, 10, (100, 0), NotDue.NOT_FLUSHED, id="nothing of it on disk"
        ),
        pytest.param(
            replace(LOG, last_stable_offset=15, recovery_point=25),
            RULES,
            10,
            10,
            (100, 0),
            NotDue.OPEN_TRANSACTION,
            id="the lowest of both holds it back",
        ),
        pytest.param(
            replace(LOG, last_stable_offset=5), RULES, 10, 10, (100, 0), NotDue.OPEN_TRANSACTION, id="below the dirty"
        ),
        # min.compaction.lag.ms, by the newest record of a segment
        pytest.param(LOG, CleanerRules(0.5, 50), 10, 30, (100, 200), Due.RATIO, id="all of it old enough"),
        pytest.param(LOG, CleanerRules(0.4, 80), 10, 20, (100, 100), Due.RATIO, id="just as old as the lag"),
        pytest.param(LOG, CleanerRules(0.4, 81), 10, 10, (100, 0), NotDue.MIN_LAG, id="a millisecond too young"),
        pytest.param(
            replace(LOG, segments=(SegmentAge(0, 100, 99), *LOG.segments[1:])),
            CleanerRules(0.5, 50),
            10,
            30,
            (100, 200),
            Due.RATIO,
            id="compacted ones are not asked",
        ),
    ],
)
def test_what_may_be_cleaned_and_what_holds_it_back(
    facts: CleanerFacts, rules: CleanerRules, dirty: int, end: int, sizes: tuple[int, int], why: Due | NotDue
) -> None:
    found = cleanable(facts, rules, now_ms=AT_MS)
    assert (found.first_dirty_offset, found.first_uncleanable_offset) == (dirty, end)
    assert (found.clean_bytes, found.cleanable_bytes) == sizes
    assert (found.due, found.not_due) == ((why, None) if isinstance(why, Due) else (None, why))
    assert not found.checkpoint_reset


@pytest.mark.parametrize(("log_start", "checkpoint"), [(10, 9), (0, 36), (20, 0)])
def test_a_checkpoint_outside_the_log_does_not_count(log_start: int, checkpoint: int) -> None:
    found = cleanable(replace(LOG, log_start_offset=log_start, first_dirty_offset=checkpoint), RULES, now_ms=AT_MS)
    assert (found.first_dirty_offset, found.checkpoint_reset) == (log_start, True)


@pytest.mark.parametrize(("log_start", "checkpoint"), [(10, 10), (0, 35)])
def test_one_at_the_edge_of_the_log_counts(log_start: int, checkpoint: int) -> None:
    found = cleanable(replace(LOG, log_start_offset=log_start, first_dirty_offset=checkpoint), RULES, now_ms=AT_MS)
    assert (found.first_dirty_offset, found.checkpoint_reset) == (checkpoint, False)


def test_a_log_held_back_by_the_lag_says_until_when() -> None:
    found = cleanable(LOG, CleanerRules(0.5, 81), now_ms=AT_MS)
    assert (found.next_ms, found.next_due) == (20 + 81, None)


@pytest.mark.parametrize(("now_ms", "due", "late_ms"), [(65, None, 0), (66, Due.MAX_LAG, 1), (165, Due.MAX_LAG, 100)])
def test_max_compaction_lag_counts_from_the_first_dirty_batch(now_ms: int, due: Due | None, late_ms: int) -> None:
    rules = CleanerRules(0.9, max_compaction_lag_ms=50)
    found = cleanable(LOG, rules, now_ms=now_ms, looks=Lookups(lambda base: 5 + base))
    assert (found.due, found.late_ms) == (due, late_ms)
    unknown = cleanable(LOG, rules, now_ms=now_ms, looks=Lookups(lambda base: 0))
    assert (unknown.due, unknown.late_ms) == (None, 0)
    held = cleanable(replace(LOG, last_stable_offset=15), rules, now_ms=now_ms, looks=Lookups(lambda base: 5 + base))
    assert (held.due, held.not_due, held.late_ms) == (None, NotDue.OPEN_TRANSACTION, 0)


@pytest.mark.parametrize(
    ("first_dirty", "last_stable", "due"),
    [(10, 35, Due.FORCED), (30, 35, Due.FORCED), (None, 5, None)],
    ids=["dirty ones", "only compacted ones", "nothing that may be touched"],
)
def test_a_pass_that_is_asked_for_needs_something_to_clean(
    first_dirty: int | None, last_stable: int, due: Due | None
) -> None:
    facts = replace(LOG, first_dirty_offset=first_dirty, last_stable_offset=last_stable)
    assert cleanable(facts, CleanerRules(0.99), now_ms=AT_MS, forced=True).due is due
    assert cleanable(facts, CleanerRules(0.99), now_ms=AT_MS).due is None


@pytest.mark.parametrize(
    ("facts", "rules", "looks", "due_ms", "due"),
    [
        # nothing to wait for
        (CLEAN, RULES, Lookups(), None, None),
        (replace(CLEAN, oldest_value_ms=-1), EXPIRING, Lookups(), None, None),
        (replace(CLEAN, oldest_other_codec_ms=-1), COLD, Lookups(), None, None),
        (replace(CLEAN, oldest_value_ms=500), RULES, Lookups(), None, None),
        # a record's time to live
        (replace(CLEAN, oldest_value_ms=500), EXPIRING, Lookups(), 500 + EXPIRES_MS, Due.EXPIRED),
        (replace(CLEAN, oldest_value_ms=0), EXPIRING, Lookups(), EXPIRES_MS, Due.EXPIRED),
        # not known: what the first segment begins with
        (CLEAN, EXPIRING, Lookups(lambda base: 700 + base), 700 + EXPIRES_MS, Due.EXPIRED),
        (CLEAN, EXPIRING, Lookups(), None, None),
        # dirty segments that are not due by their ratio
        (replace(DIRTY, oldest_value_ms=900), EXPIRING, Lookups(lambda base: 40 + base), 60 + EXPIRES_MS, Due.EXPIRED),
        (replace(DIRTY, oldest_value_ms=-1), EXPIRING, Lookups(), 70 + EXPIRES_MS, Due.EXPIRED),
        (replace(DIRTY, oldest_value_ms=30), EXPIRING, Lookups(lambda base: 40), 30 + EXPIRES_MS, Due.EXPIRED),
        # what must not be touched does not count
        (replace(DIRTY, oldest_value_ms=-1, last_stable_offset=15), EXPIRING, Lookups(lambda base: 40), None, None),
        (replace(DIRTY, oldest_value_ms=-1, recovery_point=20), EXPIRING, Lookups(lambda base: 40), None, None),
        # cold segments
        (replace(CLEAN, oldest_other_codec_ms=500), COLD, Lookups(), 500 + COLD_MS, Due.RECOMPRESS),
        (replace(CLEAN, oldest_other_codec_ms=500), RULES, Lookups(), None, None),
        (CLEAN, COLD, Lookups(other_codec_ms=lambda base: {10: 800}.get(base)), 800 + COLD_MS, Due.RECOMPRESS),
        (CLEAN, COLD, Lookups(), None, None),
        (
            replace(DIRTY, oldest_other_codec_ms=-1),
            COLD,
            Lookups(other_codec_ms=lambda base: 300 + base),
            320 + COLD_MS,
            Due.RECOMPRESS,
        ),
        # the first of several
        (
            replace(CLEAN, oldest_value_ms=500, next_horizon_ms=900),
            EXPIRING,
            Lookups(),
            900,
            Due.HORIZON,
        ),
        (
            replace(CLEAN, oldest_value_ms=500, next_horizon_ms=90_000),
            EXPIRING,
            Lookups(),
            500 + EXPIRES_MS,
            Due.EXPIRED,
        ),
    ],
)
def test_when_a_log_is_due_although_nothing_new_comes(
    facts: CleanerFacts, rules: CleanerRules, looks: Lookups, due_ms: int | None, due: Due | None
) -> None:
    if due_ms is None:
        found = cleanable(facts, rules, now_ms=1 << 60, looks=looks)
        assert (found.due, found.next_ms, found.next_due) == (None, None, None)
        return
    before = cleanable(facts, rules, now_ms=due_ms - 1, looks=looks)
    assert (before.due, before.next_ms, before.next_due) == (None, due_ms, due)
    then = cleanable(facts, rules, now_ms=due_ms, looks=looks)
    assert (then.due, then.next_ms) == (due, None)


def test_nothing_is_looked_at_where_no_rule_asks() -> None:
    def never(base: int) -> int:
        raise AssertionError("looked")

    cleanable(DIRTY, RULES, now_ms=99, looks=Lookups(never, never))
    cleanable(replace(CLEAN, oldest_value_ms=5), EXPIRING, now_ms=99, looks=Lookups(never, never))
    cleanable(replace(CLEAN, oldest_other_codec_ms=5), COLD, now_ms=99, looks=Lookups(never, never))


@pytest.mark.parametrize(
    ("age_ms", "expected"), [(0, 0), (9, 0), (1000, 100), (10 * DAY_MS, DAY_MS), (1 << 60, DAY_MS)]
)
def test_what_reaches_an_age_waits_for_more_but_not_for_long(age_ms: int, expected: int) -> None:
    assert slack_ms(age_ms) == expected


@pytest.mark.parametrize("codec_id", [0, ZSTD])
def test_a_pass_notes_the_oldest_value_it_leaves(tmp_path: Path, seed: int, codec_id: int) -> None:
    rng = random.Random(seed)
    lab = Lab(tmp_path, segment_bytes=2_000)
    options = CleaningOptions(key_ttl_ms=1_000)
    for turn in range(3):
        now_ms = NOW_MS + turn * 700
        batches = [
            [
                Record(
                    b"k%d" % rng.randrange(40),
                    None if rng.random() < 0.2 else b"v",
                    rng.choice((-1, now_ms - rng.randrange(1_500))),
                )
                for _ in range(rng.randint(1, 5))
            ]
            for _ in range(20)
        ]
        lab.append(*batches, codec_id=codec_id, roll=True)
        lab.compact(now_ms, options=options)
        valued = [r.timestamp_ms for r in lab.records() if r.value is not None and r.timestamp_ms >= 0]
        assert lab.state.oldest_value_ms == min(valued, default=-1)
        assert min(valued, default=now_ms) >= now_ms - 1_000
        found = cleanable(lab.facts(), replace(EXPIRING, key_ttl_ms=1_000), now_ms=now_ms)
        assert found.due is None
        assert found.next_due in (None, Due.EXPIRED, Due.HORIZON)
    lab.compact(NOW_MS + DAY_MS)
    assert lab.state.oldest_value_ms is None, "nobody looked"


def test_markers_of_transactions_never_expire(tmp_path: Path) -> None:
    lab = Lab(tmp_path, segment_bytes=2_000)
    with lab.open() as log:
        log.append([Record(b"k", b"v", NOW_MS)])
        log.append_marker(commit=True, producer_id=7, producer_epoch=0)
        log.roll()
        lab.end = log.log_end_offset
    lab.compact(NOW_MS + DAY_MS, options=CleaningOptions(key_ttl_ms=1_000))
    assert [r.value for r in lab.records()] == [None]
    assert lab.state.oldest_value_ms == -1


def test_a_pass_notes_what_was_too_young_to_be_compressed(tmp_path: Path) -> None:
    lab = Lab(tmp_path, segment_bytes=1_000)
    for number in range(12):
        lab.append([Record(b"k%d-%d" % (number, at), b"v" * 40, NOW_MS) for at in range(10)], roll=True)
    for path in Path(lab.directory).glob("*.log"):
        mtime_ms = NOW_MS + int(path.stem) * 1_000
        os.utime(path, ns=(mtime_ms * 1_000_000,) * 2)
    options = CleaningOptions(recompress_codec_id=ZSTD, recompress_after_ms=AFTER_MS)
    rules = CleanerRules(0.5, recompress_after_ms=AFTER_MS)
    lab.compact(NOW_MS, options=options)
    assert (lab.state.wanted_codec_id, lab.state.oldest_other_codec_ms) == (ZSTD, NOW_MS)
    moments = []
    while (found := cleanable(lab.facts(), rules, now_ms=NOW_MS)).next_ms is not None:
        assert found.next_due is Due.RECOMPRESS
        assert cleanable(lab.facts(), rules, now_ms=found.next_ms).due is Due.RECOMPRESS
        moments.append(found.next_ms)
        lab.compact(found.next_ms, options=options)
        assert len(moments) < 20
    assert moments == sorted(set(moments))
    assert len(moments) > 2
    assert lab.state.oldest_other_codec_ms == -1
    with lab.open() as log:
        codecs = {header.attributes & 7 for segment in log.segments[:-1] for header in segment.headers()}
    assert codecs == {ZSTD}
