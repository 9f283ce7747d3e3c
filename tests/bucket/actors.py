"""Those who work on a bucket, as the model runs them: the steps of each protocol, with the rules of `logstore.bucket`.

`Rules` takes single rules out. A test shows for each of them that the model finds what goes wrong without it.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, replace
from typing import Any

from bucket.model import FLOOR, MANIFEST, RECORDS, TOPIC, Actor, Commit, Op, Placed, Plan, Record, Violation, World
from bucket.model import state_of as latest
from logstore.bucket import freeing, judging, replacing
from logstore.bucket.freeing import Floor, Pin
from logstore.bucket.judging import Attempt, Verdict
from logstore.bucket.keys import pin_key, plan_key, segment_key, staged_key
from logstore.bucket.manifest import Garbage, Manifest, Segment
from logstore.bucket.replacing import CompactionPass, Group, Sealed
from logstore.bucket.rows import Kind, LedgerView, PlanRef, TopicRow, view_partition
from logstore.commit.apps import AppBatch
from logstore.errors import (
    LedgerError,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ObjectStoreUnavailable,
    ReplayMismatch,
    SegmentsChanged,
    StaleObjects,
    UnknownTopic,
)
from logstore.objects.objects import Version

Step = Generator[Op, Any, Any]
FAILED = (ObjectExists, ObjectChanged, ObjectStoreUnavailable)


@dataclass(frozen=True, slots=True)
class Rules:
    """What the protocol says; False takes the rule out. Numbers are those of the holes in the design."""

    commits_to_the_next_version: bool = True  # 2
    looks_for_its_own_plan: bool = True  # 3
    judges_the_replay_again: bool = True  # 3
    names_each_plan_anew: bool = True  # 5
    says_no_only_when_settled: bool = True  # 14 of the invariants
    plan_clock_never_goes_back: bool = True  # 14
    ends_partitions_without_manifest: bool = True  # 7
    losers_delete_nothing: bool = True  # 8
    sweeps_behind_a_fence: bool = True  # 9
    fences_manifests: bool = True  # 9
    fences_absent_manifests: bool = True  # 9
    checks_ages_of_what_it_names: bool = True  # 9
    ages_count_from_the_name: bool = True  # found by this model: a late put makes an object look young
    snapshots_start_again: bool = True  # 11
    replaces_what_was_just_read: bool = True  # 12
    passes_are_void_when_segments_changed: bool = True  # 12, 23
    reads_the_manifest_first: bool = True  # 19, 21
    frees_before_it_deletes: bool = True  # 22
    honours_pins: bool = True  # 11
    cursors_look_again: bool = True  # 27
    manifests_are_never_equal: bool = True  # 35


SOUND = Rules()


def world_with_topic() -> World:
    world = World()
    world.commits.append(Commit((TopicRow(TOPIC, 1, Kind.DEFINED, 1, (0,), (0,), 0),)))
    return world


# --- writing ----------------------------------------------------------------------------------------------------------


def committer(
    world: World,
    uid: str,
    records: tuple[Record, ...],
    *,
    app: str = "app",
    batch: int = 0,
    clock_ms: int = 0,
    attempts: int = 3,
    rules: Rules = SOUND,
) -> Actor:
    RECORDS[uid] = records
    made_ms = yield Op("now")
    staged = staged_key(uid, 0, "staged")
    yield from _put(staged, records)
    view = yield Op("load")
    attempt = Attempt(AppBatch(app, batch, "query"), {TOPIC: view.newest(TOPIC).config_version})
    tried: list[int] = []
    for number in range(attempts):
        view = yield Op("load")
        word = _judged(view, attempt, rules) if number == 0 or rules.judges_the_replay_again else None
        if word is not None:
            _say(world, uid, word, view, tried, rules)
            return
        if rules.checks_ages_of_what_it_names:
            begun_ms = made_ms if rules.ages_count_from_the_name else (yield Op("head", staged))
            try:
                freeing.check_age((yield Op("now")) - (begun_ms or 0))
            except StaleObjects:
                break
        newest: TopicRow = view.newest(TOPIC)
        attempt = replace(
            attempt, config_versions={TOPIC: newest.config_version}
        )  # the model's batches fit all of them
        key = plan_key(uid, f"plan{number if rules.names_each_plan_anew else 0}")
        plan = Plan(staged, newest.end_offsets[0])
        yield from _put(key, plan)
        clock = judging.plan_clock(clock_ms, view, [TOPIC]) if rules.plan_clock_never_goes_back else clock_ms
        ref = PlanRef(key, 1, hash(plan), ((TOPIC, newest.sequence + 1),))
        row = TopicRow(
            TOPIC, newest.sequence + 1, Kind.BATCH, newest.config_version, newest.end_offsets,
            (newest.end_offsets[0] + len(records),), clock, ref, app, batch, "query",
        )  # fmt: skip
        attempt = replace(attempt, plans=(*attempt.plans, key))
        version = view.version + 1
        for later in range(1 if rules.commits_to_the_next_version else 3):
            tried.append(version + later)
            try:
                yield Op("create", str(version + later), Commit((row,)))
            except ObjectExists:
                continue  # without the rule the library rebases: the same rows for the next version
            except ObjectStoreUnavailable:
                break
            world.said[uid] = "committed"
            return
    view = yield Op("load")
    _say(world, uid, _judged(view, attempt, rules) or "not committed", view, tried, rules)


def _judged(view: LedgerView, attempt: Attempt, rules: Rules) -> str | None:
    known = attempt if rules.looks_for_its_own_plan else replace(attempt, plans=())
    try:
        verdict = judging.judge(view, known)
    except (ReplayMismatch, UnknownTopic):
        return "not committed"
    if verdict is Verdict.COMMITTED:
        return "committed"
    return "replayed" if verdict is Verdict.REPLAYED else None


def _say(world: World, uid: str, word: str, view: LedgerView, tried: list[int], rules: Rules) -> None:
    if word == "not committed" and rules.says_no_only_when_settled and not judging.is_settled(view, tried):
        word = "unknown"
    world.said[uid] = word


def definer(*, attempts: int = 3) -> Actor:
    """Alters the topic: a row of its own, so that every commit planned before conflicts."""
    for _ in range(attempts):
        view = yield Op("load")
        newest = view.newest(TOPIC)
        if newest.kind is Kind.ENDED:
            return
        row = replace(
            newest, sequence=newest.sequence + 1, kind=Kind.DEFINED, config_version=newest.config_version + 1,
            base_offsets=newest.end_offsets, plan=None, app_id=None, batch_id=None, query_id=None,
        )  # fmt: skip
        try:
            yield Op("create", str(view.version + 1), Commit((row,)))
        except FAILED:
            continue
        return


def ender(world: World, *, attempts: int = 4, rules: Rules = SOUND) -> Actor:
    """Deletes the topic: its end in the ledger, then the end of its manifest."""
    for _ in range(attempts):
        view = yield Op("load")
        newest = view.newest(TOPIC)
        if newest.kind is Kind.ENDED:
            break
        row = replace(
            newest, sequence=newest.sequence + 1, kind=Kind.ENDED, base_offsets=newest.end_offsets,
            plan=None, app_id=None, batch_id=None, query_id=None,
        )  # fmt: skip
        try:
            yield Op("create", str(view.version + 1), Commit((row,)))
        except FAILED:
            continue
        break
    else:
        return
    for number in range(attempts):
        manifest, seen = yield from _manifest()
        if manifest is None and not rules.ends_partitions_without_manifest:
            break
        if manifest is not None and manifest.ended:
            break
        now_ms = yield Op("now")
        ended = replacing.end_partition(manifest, now_ms=now_ms, nonce=f"end{number}")
        if (yield from _replaced(ended, seen)) is True:
            break
    else:
        return
    world.checks.append(_nothing_is_listed)


def _nothing_is_listed(world: World) -> None:
    if world.manifest.segments:
        raise Violation("13: a topic that has ended lists segments")


# --- maintenance ------------------------------------------------------------------------------------------------------


def sealer(name: str, *, rounds: int = 2, rules: Rules = SOUND) -> Actor:
    outputs: list[str] = []
    for number in range(rounds):
        manifest, seen = yield from _manifest()
        view = yield Op("load")
        if replacing.has_won(manifest, outputs):
            return
        try:
            plan = replacing.plan_seal(manifest, view.topic(TOPIC), 0, commits_max=9)
        except SegmentsChanged:
            continue
        if plan is None or view.newest(TOPIC).kind is Kind.ENDED:
            return
        try:
            records = yield from _tail(plan.rows)
        except ObjectMissing:
            continue
        key = segment_key(TOPIC, 0, plan.from_offset, f"{name}{number}")
        yield from _put(key, records)
        outputs.append(key)
        now_ms = yield Op("now")
        sealed = Sealed((Segment(key, plan.from_offset, plan.end_offset),))
        after = replacing.seal_segments(manifest, plan, sealed, now_ms=now_ms, nonce=f"{name}{number}")
        done = yield from _replaced(after, seen)
        if done is True:
            return
        if not rules.losers_delete_nothing:
            again, _ = yield from _manifest()
            if not replacing.has_won(again, [key]):
                yield Op("delete", key)


def compactor(name: str, *, tries: int = 3, rules: Rules = SOUND) -> Actor:
    """One pass over all segments. Tombstones go at once: whatever is older was read with them."""
    manifest, seen = yield from _manifest()
    if manifest is None or not manifest.segments:
        return
    try:
        records = yield from _segments(manifest.segments)
    except ObjectMissing:
        return
    state = latest({at: record for at, record in records if at >= manifest.log_start_offset})
    newest = {record[0]: at for at, record in records}
    kept = tuple((at, record) for at, record in records if newest[record[0]] == at and record[0] in state)
    base, end = manifest.segments[0].base_offset, manifest.segments[-1].next_offset
    key = segment_key(TOPIC, 0, base, name)
    made_ms = yield Op("now")
    yield from _put(key, kept)
    dropped = sum(record[1] is None for _, record in records)
    group = Group(manifest.segments, (Segment(key, base, end),))
    done = CompactionPass(manifest.segments, (group,), manifest.first_dirty_offset, end, dropped)
    stored: Manifest | None = None
    for number in range(tries):
        now_ms = yield Op("now")
        try:
            if stored is None or rules.replaces_what_was_just_read:
                apply = replacing.apply_pass if rules.passes_are_void_when_segments_changed else _applied_blindly
                stored = apply(manifest, done, now_ms=now_ms, nonce=f"{name}{number}")
        except SegmentsChanged:
            return
        if (yield from _replaced(stored, seen)) is True:
            return
        manifest, seen = yield from _manifest()
        if replacing.has_won(manifest, [key]):
            return
        if rules.checks_ages_of_what_it_names:
            try:
                freeing.check_age((yield Op("now")) - made_ms)
            except StaleObjects:
                return


def _applied_blindly(manifest: Manifest, done: CompactionPass, *, now_ms: int, nonce: str) -> Manifest:
    """`apply_pass` without its questions: outputs take the place of whatever covers their offsets."""
    output = done.groups[0].outputs[0]
    rest = [segment for segment in manifest.segments if segment.base_offset >= output.next_offset]
    garbage = tuple(Garbage(each.key) for each in manifest.segments if each not in rest)
    return replace(
        manifest, generation=manifest.generation + 1, nonce=nonce, segments=(output, *rest),
        first_dirty_offset=done.first_dirty_after, garbage=(*manifest.garbage, *garbage),
    )  # fmt: skip


def retention(name: str, to_offset: int, *, tries: int = 3, rules: Rules = SOUND) -> Actor:
    stored: Manifest | None = None
    for number in range(tries):
        manifest, seen = yield from _manifest()
        view = yield Op("load")
        now_ms = yield Op("now")
        if view.newest(TOPIC).kind is Kind.ENDED:
            return
        if stored is None or rules.replaces_what_was_just_read:
            try:
                stored = replacing.raise_log_start(
                    manifest, min(to_offset, view.newest(TOPIC).end_offsets[0]),
                    high_watermark=view.newest(TOPIC).end_offsets[0], now_ms=now_ms, nonce=f"{name}{number}",
                )  # fmt: skip
            except SegmentsChanged:
                return
        if stored is None or (yield from _replaced(stored, seen)) is True:
            return


def collector(name: str, *, rounds: int = 2, rules: Rules = SOUND) -> Actor:
    """Garbage of the manifest, after its grace."""
    for number in range(rounds):
        manifest, seen = yield from _manifest()
        if manifest is None:
            return
        pins = (yield Op("pins")) if rules.honours_pins else ()
        now_ms = yield Op("now")
        gone = [each.key for each in freeing.collectable(manifest, now_ms=now_ms, pins=pins)]
        for key in gone:
            yield from _deleted(key)
        after = replacing.collected(manifest, gone, now_ms=now_ms, nonce=f"{name}{number}")
        if after is not None:
            yield from _replaced(after, seen)


def freer(name: str, *, rounds: int = 1, rules: Rules = SOUND) -> Actor:
    """Level 0 that is sealed: note it, free it after the grace, delete it, and say that it is cleared."""
    for number in range(rounds):
        manifest, _ = yield from _manifest()
        view = yield Op("load")
        pins = (yield Op("pins")) if rules.honours_pins else ()
        now_ms = yield Op("now")
        floor, seen = yield from _get(FLOOR)
        rows = view.topic(TOPIC)
        sealed = freeing.sealed_sequence(rows, [manifest])
        after = freeing.raise_floor(floor, sealed, now_ms=now_ms, pins=pins, nonce=f"{name}{number}")
        current = floor or Floor()
        if after is not None and rules.frees_before_it_deletes:
            if (yield from _replaced(after, seen, FLOOR)) is not True:
                continue
            current = after
        target = after or current
        plans = freeing.free_plans(rows, target, {TOPIC: target}, ())
        yield from _delete_plans(plans)
        if after is not None and not rules.frees_before_it_deletes:
            yield from _replaced(after, seen, FLOOR)


def _delete_plans(plans: Iterable[PlanRef]) -> Step:
    for ref in plans:
        try:
            plan = (yield Op("get", ref.key))[0]
        except ObjectMissing:
            continue
        yield from _deleted(plan.staged)
        yield from _deleted(ref.key)


def sweeper(name: str, *, tries: int = 3, rules: Rules = SOUND) -> Actor:
    """Orphans: list, fence, read all names again, delete what is unnamed."""
    listed = (yield Op("list", "data/")) + (yield Op("list", "logs/"))
    candidates = freeing.orphan_candidates(listed, now_ms=(yield Op("now")))
    if not candidates:
        return
    if rules.sweeps_behind_a_fence and not (yield from _commit_fence(tries)):
        return
    if rules.fences_manifests and not (yield from _manifest_fence(name, tries, rules)):
        return
    manifest, _ = yield from _manifest()
    floor, _ = yield from _get(FLOOR)
    view = yield Op("load")
    files: dict[str, tuple[str, ...]] = {}
    for row in view.rows:
        if row.plan is not None and row.sequence > (floor.freed if floor else 0):
            try:
                files[row.plan.key] = ((yield Op("get", row.plan.key))[0].staged,)
            except ObjectMissing:
                return  # freed meanwhile: what it named is not known, so nothing is swept this time
    names = freeing.named(
        view, {TOPIC: floor} if floor else {}, [manifest] if manifest else [], lambda ref: files.get(ref.key, ())
    )
    for key in freeing.orphans(candidates, names):
        yield from _deleted(key)


def _commit_fence(tries: int) -> Step:
    for _ in range(tries):
        view = yield Op("load")
        try:
            yield Op("create", str(view.version + 1), Commit(sweep=True))
        except FAILED:
            continue
        return True
    return False


def _manifest_fence(name: str, tries: int, rules: Rules) -> Step:
    for number in range(tries):
        manifest, seen = yield from _manifest()
        if manifest is None and not rules.fences_absent_manifests:
            return True
        fenced = replacing.fence_partition(manifest, nonce=f"{name}{number}")
        if manifest is not None and not rules.manifests_are_never_equal:
            return True  # the same content again: nothing is written that could be told apart
        if (yield from _replaced(fenced, seen)) is True:
            return True
    return False


def clock(*steps_ms: int) -> Actor:
    """Time goes by, whenever it likes."""
    for step_ms in steps_ms:
        yield Op("tick", value=step_ms)


# --- reading ----------------------------------------------------------------------------------------------------------


def cursor(world: World, name: str, *, rounds: int = 2, rules: Rules = SOUND) -> Actor:
    """Holds a position. An object that is gone means: read the manifest again and go on."""
    position = 0
    delivered: list[tuple[int, Record]] = []
    missing = ""
    for _ in range(rounds):
        read = yield from _view(rules)
        if read is None:
            continue
        view, _ = read
        if view is None:
            break
        if missing and missing in {segment.key for segment in view.segments}:
            raise Violation(f"7: {name} finds an object named that is gone: {missing}")
        position = max(position, view.log_start_offset)
        try:
            for segment in view.segments:
                if segment.next_offset > position:
                    missing = segment.key
                    found = (yield Op("get", segment.key))[0]
                    delivered += [each for each in found if each[0] >= position]
                    position = segment.next_offset
            missing = ""
            tail = yield from _tail(view.tail)
            delivered += [each for each in tail if each[0] >= position]
            position = max(position, view.high_watermark)
        except ObjectMissing:
            if not rules.cursors_look_again:
                raise LedgerError("the log is damaged") from None

    def check(world: World) -> None:
        offsets = [at for at, _ in delivered]
        if offsets != sorted(set(offsets)):
            raise Violation(f"9: {name} was given offsets {offsets}")
        history = world.history()
        newest = {record[0]: at for at, record in sorted(history.items())}
        for at, record in history.items():
            may_lack = newest[record[0]] != at or record[1] is None or at < world.manifest.log_start_offset
            if at < position and at not in offsets and not may_lack:
                raise Violation(f"9: {name} never got offset {at}")
        if any(history[at] != record for at, record in delivered):
            raise Violation(f"12: {name} was given another record")

    world.checks.append(check)


def snapshot(
    world: World, name: str, *, tries: int = 2, pinned: bool = True, expires_ms: int = 10**13, rules: Rules = SOUND
) -> Actor:
    """Reads exactly the objects of one manifest and one version, under a pin."""
    if pinned:
        now_ms = yield Op("now")
        yield from _put(pin_key(name), Pin(now_ms, now_ms + expires_ms))
    records: list[tuple[int, Record]] = []
    for _ in range(tries):
        read = yield from _view(rules)
        if read is None:
            continue
        view, rows = read
        if view is None:
            return
        position = 0
        if rules.snapshots_start_again:
            records = []
        else:
            position = max((at for at, _ in records), default=-1) + 1
        try:
            for segment in view.segments:
                records += [each for each in (yield Op("get", segment.key))[0] if each[0] >= position]
            records += [each for each in (yield from _tail(view.tail)) if each[0] >= position]
        except ObjectMissing as error:
            if pinned:
                raise Violation(f"{name} has a pin, and {error.file} is gone") from None
            continue
        start = view.log_start_offset
        wanted = latest({at: each for at, each in world.history(rows).items() if at >= start})
        found = latest({at: each for at, each in records if at >= start})
        if wanted != found:
            raise Violation(f"10: {name} restores {found}, not {wanted}")
        return


def _view(rules: Rules) -> Step:
    """What a reader goes by: a view and the rows it is of; a view of None: the topic has ended; None: look again."""
    if rules.reads_the_manifest_first:
        manifest, _ = yield from _manifest()
        ledger = yield Op("load")
    else:
        ledger = yield Op("load")
        manifest, _ = yield from _manifest()
    rows = ledger.topic(TOPIC)
    if rows[-1].kind is Kind.ENDED or (manifest is not None and manifest.ended):
        return None, rows
    view = view_partition(manifest, rows, 0)
    return None if view is None else (view, ledger.rows)


# --- requests ---------------------------------------------------------------------------------------------------------


def _get(key: str) -> Step:
    try:
        return (yield Op("get", key))
    except ObjectMissing:
        return None, None


def _manifest() -> Generator[Op, Any, tuple[Manifest | None, Version | None]]:
    return (yield from _get(MANIFEST))


def _put(key: str, value: object) -> Step:
    """Until it is there: a name that is written once can be put again."""
    for _ in range(3):
        try:
            yield Op("put", key, value)
        except ObjectStoreUnavailable:
            continue
        return


def _deleted(key: str) -> Step:
    try:
        yield Op("delete", key)
    except ObjectStoreUnavailable:
        yield Op("delete", key)


def _replaced(after: object, seen: Version | None, key: str = MANIFEST) -> Step:
    """True when it is done, False when others were first, None when nobody knows."""
    try:
        if seen is None:
            yield Op("create", key, after)
        else:
            yield Op("replace", key, after, seen)
    except (ObjectExists, ObjectChanged):
        return False
    except ObjectStoreUnavailable:
        return None
    return True


def _segments(segments: Iterable[Segment]) -> Generator[Op, Any, Placed]:
    found: Placed = ()
    for segment in segments:
        found += (yield Op("get", segment.key))[0]
    return found


def _tail(rows: Iterable[TopicRow]) -> Generator[Op, Any, Placed]:
    found: Placed = ()
    for row in rows:
        assert row.plan is not None
        plan = (yield Op("get", row.plan.key))[0]
        records = (yield Op("get", plan.staged))[0]
        found += tuple((plan.base + at, record) for at, record in enumerate(records))
    return found
