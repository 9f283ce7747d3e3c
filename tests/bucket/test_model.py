"""All orders of requests of those who work on a bucket, with lost answers and late writes, over the real rules.

A scenario is a world and a few actors. `explore` goes through every order of their requests (see `model.py`) and checks
the invariants after each one. The second half takes single rules out: the model must find what goes wrong then, or it
would prove nothing.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import cache

import pytest

from bucket.actors import (
    SOUND,
    Rules,
    clock,
    collector,
    committer,
    compactor,
    cursor,
    definer,
    ender,
    freer,
    retention,
    sealer,
    snapshot,
    sweeper,
    world_with_topic,
)
from bucket.model import Actor, Record, Violation, World, explore, finish
from logstore.bucket import replacing
from logstore.bucket.freeing import CLOCK_OFF_MS_MAX, GRACE_MS, ORPHAN_MS
from logstore.bucket.manifest import Garbage, Manifest, Segment

SOAK = bool(os.environ.get("DURAMEN_SOAK"))
Scenario = tuple[World, dict[str, Actor]]

PUT_A: tuple[Record, ...] = (("a", "1", "first"), ("b", "1", "first"))
NEW_A: tuple[Record, ...] = (("a", "2", "second"),)
NO_A: tuple[Record, ...] = (("a", None, "second"),)


def begun(*batches: tuple[Record, ...], sealed: int = 0) -> World:
    """A topic with some batches committed, the first `sealed` of them as one segment each."""
    return _begun(batches, sealed).copy()


@cache
def _begun(batches: tuple[tuple[Record, ...], ...], sealed: int) -> World:
    world = world_with_topic()
    for number, records in enumerate(batches):
        finish(world, committer(world, f"begun{number}", records, app="begun", batch=number))
        if number < sealed:
            finish(world, sealer(f"begun{number}"))
    return world


# --- scenarios -------------------------------------------------------------------------------------------------------


def same_batch_twice(rules: Rules = SOUND) -> Scenario:
    """A driver that stalled and the one that took its place write the same batch."""
    world = begun()
    return world, {
        "driver": committer(world, "one", PUT_A, rules=rules),
        "zombie": committer(world, "two", PUT_A, rules=rules),
    }


def two_writers(rules: Rules = SOUND) -> Scenario:
    world = begun()
    return world, {
        "first": committer(world, "one", PUT_A, app="x", clock_ms=50, rules=rules),
        "second": committer(world, "two", NEW_A, app="y", clock_ms=20, rules=rules),
    }


def next_batch_meanwhile(rules: Rules = SOUND) -> Scenario:
    world = begun()
    return world, {
        "batch 0": committer(world, "one", PUT_A, batch=0, rules=rules),
        "batch 1": committer(world, "two", NEW_A, batch=1, attempts=2, rules=rules),
    }


def gives_up(rules: Rules = SOUND) -> Scenario:
    world = begun()
    return world, {
        "writer": committer(world, "one", PUT_A, attempts=1, rules=rules),
        "other": committer(world, "two", NEW_A, app="y", attempts=1, rules=rules),
    }


def altered_while_written(rules: Rules = SOUND) -> Scenario:
    world = begun()
    return world, {"writer": committer(world, "one", PUT_A, rules=rules), "definer": definer()}


def deleted_while_written(rules: Rules = SOUND) -> Scenario:
    world = begun(PUT_A)
    return world, {
        "writer": committer(world, "one", NEW_A, rules=rules),
        "ender": ender(world, rules=rules),
        "sealer": sealer("s", rounds=1, rules=rules),
    }


def two_sealers_and_a_writer(rules: Rules = SOUND) -> Scenario:
    world = begun(PUT_A)
    return world, {
        "sealer": sealer("s", rules=rules),
        "other": sealer("o", rules=rules),
        "writer": committer(world, "one", NEW_A, attempts=2, rules=rules),
    }


def compacted_and_sealed(rules: Rules = SOUND) -> Scenario:
    world = begun(PUT_A, NO_A, NEW_A, sealed=2)
    return world, {
        "compactor": compactor("c", rules=rules),
        "sealer": sealer("s", rules=rules),
        "retention": retention("r", 2, rules=rules),
    }


def two_compactors(rules: Rules = SOUND) -> Scenario:
    world = begun(PUT_A, NO_A, NEW_A, sealed=2)
    return world, {
        "compactor": compactor("c", rules=rules),
        "other": compactor("d", rules=rules),
        "sealer": sealer("s", rounds=1, rules=rules),
    }


def read_by_position(rules: Rules = SOUND) -> Scenario:
    world = begun(PUT_A, NO_A, sealed=2)
    return world, {
        "cursor": cursor(world, "cursor", rounds=3, rules=rules),
        "compactor": compactor("c", rules=rules),
        "collector": collector("g", rules=rules),
        "clock": clock(GRACE_MS),
    }


def read_while_written(rules: Rules = SOUND) -> Scenario:
    world = begun(PUT_A)
    return world, {
        "cursor": cursor(world, "cursor", rounds=2, rules=rules),
        "snapshot": snapshot(world, "snapshot", rules=rules),
        "writer": committer(world, "one", NEW_A, attempts=2, rules=rules),
        "sealer": sealer("s", rounds=1, rules=rules),
    }


def restored_without_pin(rules: Rules = SOUND) -> Scenario:
    """A pin that expired: only starting again keeps a deleted key from coming back."""
    world = begun(PUT_A, NO_A, sealed=2)
    return world, {
        "snapshot": snapshot(world, "snapshot", pinned=False, rules=rules),
        "compactor": compactor("c", rules=rules),
        "collector": collector("g", rules=rules),
        "clock": clock(GRACE_MS),
    }


def restored_under_a_pin(rules: Rules = SOUND) -> Scenario:
    world = begun(PUT_A, NO_A, sealed=2)
    return world, {
        "snapshot": snapshot(world, "snapshot", rules=rules),
        "compactor": compactor("c", rules=rules),
        "collector": collector("g", rules=rules),
        "clock": clock(GRACE_MS + 2 * CLOCK_OFF_MS_MAX),
    }


def freed_while_read(rules: Rules = SOUND) -> Scenario:
    world = begun(PUT_A)
    return world, {
        "sealer": sealer("s", rounds=1, rules=rules),
        "freer": freer("f", rounds=2, rules=rules),
        "clock": clock(GRACE_MS + 2 * CLOCK_OFF_MS_MAX),
        "snapshot": snapshot(world, "snapshot", rules=rules),
    }


def swept_while_written(rules: Rules = SOUND) -> Scenario:
    world = begun()
    return world, {
        "writer": committer(world, "one", PUT_A, attempts=2, rules=rules),
        "sweeper": sweeper("w", rules=rules),
        "clock": clock(ORPHAN_MS),
    }


def swept_while_sealed(rules: Rules = SOUND) -> Scenario:
    """The first seal of a partition, which has no manifest yet."""
    world = begun(PUT_A)
    return world, {
        "sealer": sealer("s", rules=rules),
        "sweeper": sweeper("w", rules=rules),
        "clock": clock(ORPHAN_MS),
    }


def swept_while_compacted(rules: Rules = SOUND) -> Scenario:
    world = begun(PUT_A, NO_A, sealed=2)
    return world, {
        "compactor": compactor("c", tries=2, rules=rules),
        "retention": retention("r", 1, tries=1, rules=rules),
        "sweeper": sweeper("w", rules=rules),
        "clock": clock(ORPHAN_MS),
    }


def all_at_once(rules: Rules = SOUND) -> Scenario:
    world = begun(PUT_A, NO_A, sealed=1)
    return world, {
        "first": committer(world, "one", NEW_A, app="x", rules=rules),
        "second": committer(world, "two", PUT_A, app="y", attempts=2, rules=rules),
        "sealer": sealer("s", rules=rules),
        "compactor": compactor("c", rules=rules),
        "retention": retention("r", 1, rules=rules),
        "definer": definer(),
        "collector": collector("g", rules=rules),
        "freer": freer("f", rounds=2, rules=rules),
        "sweeper": sweeper("w", rules=rules),
        "cursor": cursor(world, "cursor", rules=rules),
        "snapshot": snapshot(world, "snapshot", rules=rules),
        "clock": clock(GRACE_MS, ORPHAN_MS),
    }


#: a scenario, and how many answers get lost or late in it
SCENARIOS: list[tuple[Callable[[Rules], Scenario], int]] = [
    (same_batch_twice, 1),
    (two_writers, 1),
    (next_batch_meanwhile, 1),
    (gives_up, 2),
    (altered_while_written, 1),
    (deleted_while_written, 0),
    (two_sealers_and_a_writer, 0),
    (compacted_and_sealed, 0),
    (two_compactors, 0),
    (read_by_position, 0),
    (read_while_written, 0),
    (restored_without_pin, 0),
    (restored_under_a_pin, 0),
    (freed_while_read, 0),
    (swept_while_written, 1),
    (swept_while_sealed, 0),
    (swept_while_compacted, 0),
]


@pytest.mark.parametrize(("scenario", "faults"), SCENARIOS, ids=lambda each: getattr(each, "__name__", each))
def test_the_invariants_hold_in_every_order(scenario: Callable[[Rules], Scenario], faults: int) -> None:
    found = explore(lambda: scenario(SOUND), faults=faults + SOAK)
    print(f"{scenario.__name__}: {found}")
    assert found.orders > 10


def test_the_invariants_hold_with_everybody_at_work() -> None:
    """All actors in one world: every order of the first requests, and one by chance behind each, with lost answers."""
    seed = int(os.environ.get("DURAMEN_SEED", "0")) or random.randrange(1, 1 << 32)
    found = explore(lambda: all_at_once(SOUND), faults=2, depth_max=5 if SOAK else 3, seed=seed)
    print(f"all_at_once: {found}")
    assert found.orders > 100


# --- rules taken out --------------------------------------------------------------------------------------------------

#: which rule, where it is missed, with how many lost answers, and what goes wrong
HOLES: list[tuple[str, Callable[[Rules], Scenario], int, str]] = [
    ("commits_to_the_next_version", two_writers, 0, "1: "),
    ("looks_for_its_own_plan", next_batch_meanwhile, 1, "14: "),
    ("judges_the_replay_again", same_batch_twice, 0, "2: "),
    ("judges_the_replay_again", two_writers, 1, "2: "),
    ("names_each_plan_anew", two_writers, 0, "a name is used twice"),
    ("says_no_only_when_settled", gives_up, 1, "14: "),
    ("plan_clock_never_goes_back", two_writers, 0, "clock goes back"),
    ("ends_partitions_without_manifest", deleted_while_written, 0, "13: "),
    ("losers_delete_nothing", two_sealers_and_a_writer, 1, "7: "),
    ("sweeps_behind_a_fence", swept_while_written, 0, "7: "),
    ("fences_manifests", swept_while_sealed, 0, "7: "),
    ("fences_absent_manifests", swept_while_sealed, 0, "7: "),
    ("checks_ages_of_what_it_names", swept_while_written, 0, "7: "),
    ("ages_count_from_the_name", swept_while_written, 1, "7: "),
    ("snapshots_start_again", restored_without_pin, 0, "10: "),
    ("replaces_what_was_just_read", compacted_and_sealed, 0, "6: |5: |3, 11: "),
    ("passes_are_void_when_segments_changed", two_compactors, 0, "5: |3, 11: |6: "),
    ("reads_the_manifest_first", read_while_written, 0, "15: .* is sealed up to"),
    ("frees_before_it_deletes", freed_while_read, 0, "7: "),
    ("honours_pins", restored_under_a_pin, 0, "has a pin"),
    ("cursors_look_again", read_by_position, 0, "15: .*damaged"),
    ("manifests_are_never_equal", swept_while_compacted, 0, "7: "),
]


@pytest.mark.parametrize(
    ("rule", "scenario", "faults", "wrong"), HOLES, ids=lambda each: getattr(each, "__name__", str(each))
)
def test_without_a_rule_the_model_finds_what_goes_wrong(
    rule: str, scenario: Callable[[Rules], Scenario], faults: int, wrong: str
) -> None:
    with pytest.raises(Violation, match=wrong):
        explore(lambda: scenario(replace(SOUND, **{rule: False})), faults=faults)


def test_every_rule_is_missed_somewhere() -> None:
    assert {rule for rule, *_ in HOLES} == {each.name for each in fields(Rules)}


def test_garbage_that_has_its_time_from_its_maker_goes_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compactor that looks at the clock, sleeps for a day and then replaces the manifest."""

    def stamped(manifest: Manifest, gone: Iterable[Segment], now_ms: int) -> tuple[Garbage, ...]:
        return (*manifest.garbage, *(Garbage(segment.key, now_ms) for segment in gone))

    monkeypatch.setattr(replacing, "_more", stamped)
    with pytest.raises(Violation, match="has a pin"):
        explore(lambda: restored_under_a_pin(SOUND))
