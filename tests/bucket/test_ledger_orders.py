"""All orders of requests of those who follow the ledger while its commit files are deleted: the engine's own code.

Somebody slept with an old view, somebody is in the middle of a look, and a day goes by whenever it likes.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from dataclasses import replace

import pytest

from bucket.interleaved import InTurn, WorldClock, WorldObjects, acting, new_world, repeatable_names
from bucket.model import Actor, Violation, World, explore
from bucket.test_ledger import DEFINED, batch, entry
from logstore.bucket import collecting, ledger
from logstore.bucket.collecting import Ages, Collector
from logstore.bucket.elapsed import Elapsed
from logstore.bucket.freeing import GRACE_MS
from logstore.bucket.ledger import BucketLedger
from logstore.bucket.rows import TopicRow
from logstore.errors import CommitConflict, CommitUnknown, ObjectStoreError
from logstore.limits import DEFAULT_LIMITS
from logstore.objects.objects import Objects

#: what the sleeper saw, and what is there when the scenario begins
SEEN, THERE = 3, 5


@pytest.fixture(autouse=True)
def repeatable(monkeypatch: pytest.MonkeyPatch) -> None:
    repeatable_names(monkeypatch)
    monkeypatch.setattr(ledger, "_SUMMARY_EVERY", 1)


def opened(world: World, objects: Objects) -> BucketLedger:
    clock = WorldClock(world)
    return BucketLedger(objects, clock=clock, limits=DEFAULT_LIMITS, elapsed=clock.elapsed)  # type: ignore[arg-type]


def begun(*, noted: bool = True) -> tuple[World, BucketLedger]:
    """A ledger of some commits, and somebody who saw a part of it. The upkeep has noted what it may delete a day on."""
    world = new_world()
    direct = opened(world, WorldObjects(world))
    direct.make()
    direct.commit(direct.view, entry(DEFINED))
    sleeper = opened(world, WorldObjects(world))
    for number in range(2, THERE + 1):
        direct.commit(direct.view, entry(batch(number)))
        if number == SEEN:
            sleeper.refresh()
    if noted:
        keeper(world, WorldObjects(world)).clean_log()
    sleeper._objects = InTurn(world)
    return world, sleeper


def keeper(world: World, objects: Objects) -> Collector:
    """Without the look at the server's clock."""
    found = Collector.__new__(Collector)
    found._objects, found._ages, found._ahead_ms, found._sealed = objects, Ages(), 0, {}
    found._store = type(
        "Store", (), {"ledger": opened(world, objects), "clock": WorldClock(world), "limits": DEFAULT_LIMITS}
    )()
    return found


def day(world: World) -> Actor:
    return acting("day", lambda: InTurn(world, ("tick",)).tick(GRACE_MS))


def upkeep(world: World) -> Actor:
    objects = InTurn(world, ("tick", "replace", "delete"))

    def work() -> None:
        objects.tick()
        with contextlib.suppress(ObjectStoreError):
            keeper(world, objects).clean_log()

    return acting("upkeep", work)


def writer(world: World, own: BucketLedger, name: str, *, tries: int = 3) -> Actor:
    """Commits a row of its own behind whatever it sees."""

    def work() -> None:
        tried: dict[int, TopicRow] = {}
        said = "unknown"
        for _ in range(tries):
            view = own.view
            if said == "committed" or any(row in view.rows for row in tried.values()):
                said = "committed"
                break
            row = following(view.rows[-1], name)
            try:
                own.commit(view, entry(row, nonce=name))
                said = "committed"
            except CommitConflict:
                own.refresh()
            except CommitUnknown:
                tried[view.version + 1] = row
                own.refresh()
        if said == "unknown" and all(version <= own.view.version for version in tried):
            said = "committed" if any(row in own.view.rows for row in tried.values()) else "not committed"
        world.checks.append(judged(name, said))

    return acting(name, work)


def following(newest: TopicRow, name: str) -> TopicRow:
    row = batch(newest.sequence + 1)
    assert row.plan is not None
    key = f"data/aa/{name}/plan"
    return replace(row, base_offsets=newest.end_offsets, end_offsets=newest.end_offsets, app_id=name, batch_id=0,
                   plan=replace(row.plan, key=key))  # fmt: skip


def judged(name: str, said: str) -> Callable[[World], None]:
    def check(world: World) -> None:
        view = opened(world, WorldObjects(world)).refresh()
        count = sum(row.plan is not None and row.plan.key == f"data/aa/{name}/plan" for row in view.rows)
        wanted = {"committed": (1,), "not committed": (0,), "unknown": (0, 1)}[said]
        if count not in wanted:
            raise Violation(f"{name} says {said}, and its row is there {count} times")

    return check


def reader(world: World) -> Actor:
    """What it finds at its second look is as new as what is there when that begins."""

    def work() -> None:
        own = opened(world, InTurn(world))
        own.refresh()
        there = opened(world, WorldObjects(world)).refresh().version
        found = own.refresh().version
        if found < there:
            raise Violation(f"a reader finds version {found}, where {there} was when it began")

    return acting("reader", work)


def slept() -> tuple[World, dict[str, Actor]]:
    world, sleeper = begun()
    return world, {"sleeper": writer(world, sleeper, "sleeper"), "day": day(world), "upkeep": upkeep(world)}


def in_the_middle() -> tuple[World, dict[str, Actor]]:
    """Another writer goes on meanwhile, so that there is something behind the summary that is read."""
    world, _ = begun()
    other = opened(world, WorldObjects(world))
    other.refresh()
    other._objects = InTurn(world)
    actors = {"reader": reader(world), "other": writer(world, other, "other"), "day": day(world)}
    return world, actors | {"upkeep": upkeep(world)}


def read_meanwhile() -> tuple[World, dict[str, Actor]]:
    """Others commit, a day goes by, and what they committed is cleaned up, while somebody looks for the first time."""
    world, _ = begun(noted=False)
    direct, turns = WorldObjects(world), InTurn(world, ("tick",))

    def work() -> None:
        turns.tick()
        other = opened(world, direct)
        for _ in range(3):
            other.commit(other.refresh(), entry(following(other.view.rows[-1], "other")))
        keeper(world, direct).clean_log()
        turns.tick(GRACE_MS)
        keeper(world, direct).clean_log()

    return world, {"reader": reader(world), "others": acting("others", work)}


def two_writers() -> tuple[World, dict[str, Actor]]:
    world, sleeper = begun()
    other = opened(world, WorldObjects(world))
    other.refresh()
    other._objects = InTurn(world)
    return world, {
        "sleeper": writer(world, sleeper, "sleeper", tries=2),
        "other": writer(world, other, "other", tries=2),
        "day": day(world),
        "upkeep": upkeep(world),
    }


SCENARIOS = [(slept, 1), (read_meanwhile, 0)]
if os.environ.get("DURAMEN_SOAK"):
    SCENARIOS += [(in_the_middle, 0), (two_writers, 0)]


@pytest.mark.parametrize(("scenario", "faults"), SCENARIOS)
def test_nobody_is_fooled_by_commit_files_that_are_gone(
    scenario: Callable[[], tuple[World, dict[str, Actor]]], faults: int
) -> None:
    found = explore(scenario, faults=faults)
    print(f"{scenario.__name__}: {found}")
    assert found.orders > 5


def test_without_the_look_after_a_sleep_a_commit_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BucketLedger, "_check_in_force", lambda self, version, entry: None)
    with pytest.raises(Violation, match="says committed"):
        explore(slept)


def test_without_beginning_anew_after_a_sleep_a_commit_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_STALE_MS", 1 << 60)
    with pytest.raises(Violation, match="says committed"):
        explore(slept)


def test_without_a_grace_a_commit_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def at_once(*arguments: object, **more: object) -> object:
        return raise_floor(*arguments, **more | {"grace_ms": 0})  # type: ignore[arg-type]

    raise_floor = collecting.raise_floor
    monkeypatch.setattr(collecting, "raise_floor", at_once)
    with pytest.raises(Violation, match="says committed"):
        explore(slept)


def test_a_look_that_slept_and_is_believed_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    class Awake(Elapsed):
        def ms(self) -> int:
            return 0

    monkeypatch.setattr(WorldClock, "elapsed", lambda self: Awake(self.now_ms, self.now_ms))
    with pytest.raises(Violation, match="a reader finds version"):
        explore(read_meanwhile)
