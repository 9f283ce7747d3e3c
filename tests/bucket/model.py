"""A model of a bucket in which every order of requests can be tried, and what must hold after each of them.

Actors are generators: each yields one request and gets its answer. The explorer chooses who goes next, and whether the
answer to a write gets lost, or the write lands later. It goes through all choices; two orders that leave the same
objects and gave every actor the same answers are one state and are explored once.

The world checks the invariants by its own book-keeping. It calls no rule of `logstore.bucket`.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Generator, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from logstore.bucket.freeing import Floor, Pin
from logstore.bucket.keys import floor_key, manifest_key
from logstore.bucket.manifest import Manifest
from logstore.bucket.rows import Kind, LedgerView, TopicRow
from logstore.errors import DuramenError, ObjectChanged, ObjectExists, ObjectMissing, ObjectStoreUnavailable
from logstore.objects.objects import Head, Version

TOPIC = "t"
MANIFEST = manifest_key(TOPIC, 0)
FLOOR = floor_key(TOPIC)

#: key, value (None: a tombstone) and who wrote it
Record = tuple[str, "str | None", str]
Placed = tuple[tuple[int, Record], ...]


class Violation(AssertionError):
    """An invariant does not hold; the message has the order of requests that led there."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One version of the ledger."""

    rows: tuple[TopicRow, ...] = ()
    sweep: bool = False


@dataclass(frozen=True, slots=True)
class Plan:
    staged: str
    base: int


@dataclass(frozen=True, slots=True)
class Op:
    """A request. `value` and `seen` are for writes."""

    name: str
    key: str = ""
    value: Any = None
    seen: Version | None = None

    @property
    def is_write(self) -> bool:
        return self.name in ("put", "create", "replace", "delete")

    def __str__(self) -> str:
        return f"{self.name} {self.key}".strip()


Actor = Generator[Op, Any, None]


@dataclass(slots=True)
class World:
    objects: dict[str, tuple[Any, int, int]] = field(default_factory=dict)
    commits: list[Commit] = field(default_factory=list)
    pending: tuple[Op, ...] = ()
    now_ms: int = 10**12
    #: what actors say of themselves: a batch's uid → committed, not committed, unknown
    said: dict[str, str] = field(default_factory=dict)
    checks: list[Callable[[World], None]] = field(default_factory=list)
    #: actors read the time without asking for it
    timed: bool = False

    def copy(self) -> World:
        return World(dict(self.objects), list(self.commits), self.pending, self.now_ms)

    # --- requests --------------------------------------------------------------------------------------------------

    def ask(self, op: Op) -> Any:
        """The honest answer; raises what object storage would."""
        if op.name == "get":
            if op.key not in self.objects:
                raise ObjectMissing("404", file=op.key)
            value, _, digest = self.objects[op.key]
            return value, Version(str(digest))
        if op.name == "head":
            return self.objects[op.key][1] if op.key in self.objects else None
        if op.name == "list":
            found = sorted((key, self.objects[key]) for key in self.objects if key.startswith(op.key))
            return tuple(Head(key, 1, modified, Version("head")) for key, (_, modified, _) in found)
        if op.name == "pins":
            return tuple(value for value, *_ in self.objects.values() if isinstance(value, Pin))
        if op.name == "load":
            rows = tuple(row for commit in self.commits for row in commit.rows)
            return LedgerView(len(self.commits) - 1, rows, sum(commit.sweep for commit in self.commits))
        if op.name == "now":
            return self.now_ms
        if op.name == "tick":
            self.now_ms += op.value
            return None
        return self._write(op)

    def _write(self, op: Op) -> Version | None:
        if op.name == "delete":
            self.objects.pop(op.key, None)
            self.check_names()
            return None
        if isinstance(op.value, Commit):
            if int(op.key) != len(self.commits):
                raise ObjectExists("412", file=op.key)
            self.check_commit(op.value)
            self.commits.append(op.value)
            return _version(op.value)
        old = self.objects.get(op.key)
        if op.name == "create" and old is not None:
            raise ObjectExists("412", file=op.key)
        if op.name == "replace" and (old is None or Version(str(old[2])) != op.seen):
            raise ObjectChanged("412", file=op.key)
        if op.name == "put" and old is not None and old[0] != op.value and not isinstance(op.value, Pin):
            raise Violation(f"a name is used twice: {op.key}")
        if isinstance(op.value, Manifest):
            self.check_manifest(old[0] if old else None, op.value)
        if isinstance(op.value, Floor) and old is not None:
            for name in ("sealed", "freed", "cleared"):
                _must(getattr(op.value, name) >= getattr(old[0], name), f"the floor's {name} falls")
        self.objects[op.key] = (op.value, self.now_ms, hash(op.value))
        self.check_names()
        return _version(op.value)

    # --- what must hold --------------------------------------------------------------------------------------------

    @property
    def rows(self) -> list[TopicRow]:
        return [row for commit in self.commits for row in commit.rows]

    @property
    def manifest(self) -> Manifest:
        found = self.objects.get(MANIFEST)
        return found[0] if found else Manifest(0, "")

    def history(self, rows: Sequence[TopicRow] | None = None) -> dict[int, Record]:
        """Every record that was ever committed, by offset, from the rows and what they named when they came."""
        return {
            offset: record
            for row in (self.rows if rows is None else rows)
            if row.plan is not None
            for offset, record in _records_of(row).items()
        }

    def check_commit(self, commit: Commit) -> None:
        last = self.rows[-1] if self.rows else None
        for row in commit.rows:
            if last is not None:
                _must(row.sequence == last.sequence + 1, "1: a sequence is left out or doubled")
                _must(row.base_offsets == last.end_offsets, "1: a row does not begin where the one before ended")
                _must(last.kind is not Kind.ENDED, "13: a row after the end of its topic")
                _must(row.clock_ms >= last.clock_ms, "a plan's clock goes back")
                if row.kind is Kind.BATCH:
                    _must(row.config_version == last.config_version, "a batch for a definition that is gone")
            if row.app_id is not None:
                taken = {(each.app_id, each.batch_id) for each in self.rows}
                _must((row.app_id, row.batch_id) not in taken, "2: a batch is committed twice")
            if row.plan is not None:
                plan = self.objects.get(row.plan.key)
                _must(plan is not None, "7: a commit names a plan that is gone")
                assert plan is not None
                _must(hash(plan[0]) == row.plan.crc, "a commit's plan is not the one it names")
                _must(plan[0].staged in self.objects, "7: a commit names a staged object that is gone")
            last = row

    def check_manifest(self, old: Manifest | None, new: Manifest) -> None:
        if old is not None:
            for name in ("generation", "log_start_offset", "sealed_offset", "dropped_tombstones", "first_dirty_offset"):
                _must(getattr(new, name) >= getattr(old, name), f"6: {name} falls")
            _must(new.ended or not old.ended, "13: an ended partition lives again")
            _must(hash(new) != hash(old), "35: a manifest's content comes back")
        ended = bool(self.rows) and self.rows[-1].kind is Kind.ENDED
        end = self.rows[-1].end_offsets[0] if self.rows else 0
        _must(new.sealed_offset <= end, "5: sealed beyond the ends")
        if new.ended:
            _must(ended and not new.segments, "13: a partition ends before its topic, or lists segments")
            return
        _must(
            not new.segments or new.segments[-1].next_offset == new.sealed_offset, "5: the list does not reach the end"
        )
        found: dict[int, Record] = {}
        for segment in new.segments:
            _must(segment.key in self.objects, "7: a manifest names a segment that is gone")
            found.update(self.objects[segment.key][0])
        whole = {at: record for at, record in self.history().items() if at < new.sealed_offset}
        _must(all(whole.get(at) == record for at, record in found.items()), "4, 12: an offset names another record")
        start = new.log_start_offset
        wanted, got = (state_of({at: each for at, each in some.items() if at >= start}) for some in (whole, found))
        _must(wanted == got, f"3, 11: sealed segments hold {got}, not {wanted}")

    def check_names(self) -> None:
        """7 and 8: everything that is named is there."""
        floor = self.objects.get(FLOOR)
        freed = floor[0].freed if floor else 0
        is_over = bool(self.rows) and self.rows[-1].kind is Kind.ENDED
        for row in self.rows:
            if row.plan is not None and row.sequence > freed and not is_over:
                plan = self.objects.get(row.plan.key)
                _must(plan is not None and plan[0].staged in self.objects, f"7: row {row.sequence} lost its objects")
            if row.sequence <= freed and not is_over:
                _must(row.end_offsets[0] <= self.manifest.sealed_offset, "7: the floor passes a row that is not sealed")
        for segment in self.manifest.segments:
            _must(segment.key in self.objects, "7: a listed segment is gone")

    def check_said(self) -> None:
        """When every actor is done: 2, 3 and 14."""
        committed = [row.plan.key.split("/")[2] for row in self.rows if row.plan is not None]
        for uid, word in self.said.items():
            count = committed.count(uid)
            if word == "not committed":
                _must(count == 0, f"14: {uid} was said not to be committed")
            if word == "committed":
                _must(count == 1, f"3: {uid} was said to be committed, and is {count} times")
        for check in self.checks:
            check(self)


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise Violation(what)


def _version(value: Hashable) -> Version:
    """By content alone, as an MD5 is: equal contents have equal versions."""
    return Version(str(hash(value)))


def _records_of(row: TopicRow) -> dict[int, Record]:
    """Known by the plan's id, since its objects may be gone by now."""
    records: tuple[Record, ...] = RECORDS[row.plan.key.split("/")[2]] if row.plan else ()
    return {row.base_offsets[0] + at: record for at, record in enumerate(records)}


#: what each batch of a scenario holds, by the plan's id
RECORDS: dict[str, tuple[Record, ...]] = {}


def state_of(records: dict[int, Record]) -> dict[str, str]:
    """The latest value of each key."""
    latest = {key: value for _, (key, value, _) in sorted(records.items())}
    return {key: value for key, value in latest.items() if value is not None}


# --- exploring --------------------------------------------------------------------------------------------------------


class Run:
    """One order of requests, up to here."""

    def __init__(self, world: World, actors: dict[str, Actor], faults: int) -> None:
        self.world = world
        self.actors = actors
        self.faults = faults
        self.trace: list[str] = []
        self._next: dict[str, Op | None] = {}
        self._seen = dict.fromkeys(actors, 0)
        for name, actor in actors.items():
            self._advance(name, lambda actor=actor: next(actor))

    def choices(self) -> list[tuple[str, str]]:
        found = []
        for name, op in self._next.items():
            if op is not None:
                found.append((name, "ok"))
                if op.is_write and self.faults:
                    found += [(name, "lost"), (name, "late")]
        return found + [(str(at), "land") for at in range(len(self.world.pending))]

    @property
    def is_over(self) -> bool:
        return all(op is None for op in self._next.values())

    def key(self) -> Hashable:
        world = self.world
        objects = frozenset((key, digest, modified) for key, (_, modified, digest) in world.objects.items())
        seen = tuple(self._seen.values())
        return objects, hash(tuple(world.commits)), world.pending, world.now_ms, seen, self.faults

    def step(self, choice: tuple[str, str]) -> None:
        name, how = choice
        if how == "land":
            op = self.world.pending[int(name)]
            self.world.pending = tuple(each for at, each in enumerate(self.world.pending) if at != int(name))
            self.trace.append(f"(lands) {op}")
            with contextlib.suppress(ObjectExists, ObjectChanged):
                self.world.ask(op)
            return
        op = self._next[name]
        assert op is not None
        self.trace.append(f"{name}: {op}{'' if how == 'ok' else f' ({how})'}")
        actor = self.actors[name]
        try:
            if how == "late":
                self.world.pending = (*self.world.pending, op)
            answer = None if how == "late" else self.world.ask(op)
            if how != "ok":
                self.faults -= 1
                raise ObjectStoreUnavailable("lost", may_be_applied=True)
        except (ObjectExists, ObjectChanged, ObjectMissing, ObjectStoreUnavailable) as error:
            if how == "lost" and not isinstance(error, ObjectStoreUnavailable):
                self.faults -= 1
                error = ObjectStoreUnavailable("lost", may_be_applied=True)
            self._note(name, type(error).__name__)
            self._advance(name, lambda error=error: actor.throw(error))
        else:
            self._note(name, answer)
            self._advance(name, lambda: actor.send(answer))

    def _note(self, name: str, answer: Hashable) -> None:
        self._seen[name] = hash((self._seen[name], answer, self.world.now_ms if self.world.timed else 0))

    def _advance(self, name: str, resume: Callable[[], Op]) -> None:
        try:
            self._next[name] = resume()
        except StopIteration:
            self._next[name] = None
        except DuramenError as error:
            raise Violation(f"15: {name} ends with {type(error).__name__}: {error}") from error


@dataclass(slots=True)
class Explored:
    states: int = 0
    orders: int = 0
    longest: int = 0


def explore(
    build: Callable[[], tuple[World, dict[str, Actor]]],
    *,
    faults: int = 0,
    depth_max: int | None = None,
    seed: int = 0,
    states_max: int = 2_000_000,
) -> Explored:
    """Every order of the actors' requests, with up to `faults` answers lost. Raises Violation.

    With `depth_max` every order of that many requests, and one order by chance of all that come behind each of them.
    """
    seen: set[Hashable] = set()
    result = Explored()
    stack: list[tuple[tuple[str, str], ...]] = [()]
    while stack:
        prefix = stack.pop()
        run = Run(*build(), faults)
        try:
            for choice in prefix:
                run.step(choice)
            _go_on(run, prefix, seen, stack, depth_max, result)
        except Violation as violation:
            raise Violation(f"{violation}\n  (seed {seed})\n  " + "\n  ".join(run.trace)) from None
        if depth_max is not None and len(run.trace) == depth_max:
            _by_chance(run, random.Random(f"{seed} {run.trace}"), result, seed)
        result.longest = max(result.longest, len(run.trace))
        assert len(seen) <= states_max, f"more than {states_max} states"
    result.states = len(seen)
    return result


def _go_on(
    run: Run,
    prefix: tuple[tuple[str, str], ...],
    seen: set[Hashable],
    stack: list[tuple[tuple[str, str], ...]],
    depth_max: int | None,
    result: Explored,
) -> None:
    """To the end, or to a state that was seen before; the choices that are not taken go onto the stack."""
    while True:
        key = run.key()
        if key in seen:
            return
        seen.add(key)
        if run.is_over:
            run.world.check_said()
        choices = run.choices()
        if not choices:
            result.orders += 1
        if not choices or len(prefix) == depth_max:
            return
        stack.extend((*prefix, choice) for choice in choices[1:])
        prefix = (*prefix, choices[0])
        run.step(choices[0])


def _by_chance(run: Run, rng: random.Random, result: Explored, seed: int) -> None:
    try:
        while choices := run.choices():
            run.step(rng.choice(choices))
        run.world.check_said()
    except Violation as violation:
        raise Violation(f"{violation}\n  (seed {seed})\n  " + "\n  ".join(run.trace)) from None
    result.orders += 1


def finish(world: World, actor: Actor) -> None:
    """Let one actor run alone, to make what a scenario begins with."""
    run = Run(world, {"alone": actor}, 0)
    while run.choices():
        run.step(run.choices()[0])
