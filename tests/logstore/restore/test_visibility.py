"""What readers see: transactions by their isolation, and commits to several topics in all of them or in none."""

from __future__ import annotations

import contextlib
import gc
import os
import random
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest

from logstore.commit.committer import Committer
from logstore.commit.plan import Plan, TopicPlan, read_plan
from logstore.commit.plan_folder import Staging
from logstore.commit.staging import EncodeOptions, StagedWriter
from logstore.compaction.erasure import find_keys
from logstore.directory.ends import JointEnds, TopicEnds
from logstore.directory.state import write_state
from logstore.errors import DuramenError, InvalidConfig, LockHeld, UnknownTopic
from logstore.limits import DEFAULT_LIMITS
from logstore.partition.producer_state import AppendOrigin
from logstore.records.columns import columns_of
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.record import Record
from logstore.restore.lookup import latest_of_key
from logstore.restore.restore import plan_restore, restore
from logstore.restore.visibility import visible_ends
from logstore.store import LogStore
from logstore.topics.registry import Topic
from logstore.upkeep.retention import delete_records, retain
from reference.partition_writer import writing
from tests.logstore.restore.test_restore_half_pass import NOW_MS, compact

TOPICS = ("a", "b", "c")
COMMITS = 1500 if os.environ.get("DURAMEN_SOAK") == "1" else 40


# --- isolation --------------------------------------------------------------------------------------------------------


def transactional(key: bytes, value: bytes, producer_id: int) -> bytes:
    options = BatchOptions(transactional=True, producer_id=producer_id, producer_epoch=0, base_sequence=0)
    return encode_batch(columns_of([Record(key, value, NOW_MS)]), options)


@pytest.fixture
def mixed(store: LogStore) -> Topic:
    """Of each key a committed value; then an aborted one of `a`, and an open one of `o`."""
    topic = store.create_topic("t", configs={"cleanup.policy": "compact"})
    with writing(store, topic, 0, what="test") as log:
        log.append([Record(b"a", b"good", NOW_MS), Record(b"o", b"good", NOW_MS), Record(b"p", b"plain", NOW_MS)])
        log.append_batches(transactional(b"a", b"aborted", 1), origin=AppendOrigin.CLIENT)
        log.append_batches(transactional(b"x", b"aborted", 2), origin=AppendOrigin.CLIENT)
        log.append_marker(commit=False, producer_id=1, producer_epoch=0)
        log.append_marker(commit=False, producer_id=2, producer_epoch=0)
        log.append([Record(b"p", b"later", NOW_MS)])
        log.roll()
        log.append_batches(transactional(b"o", b"open", 3), origin=AppendOrigin.CLIENT)
    return topic


def test_state_is_of_committed_records_whoever_asks_and_whether_it_was_compacted(store: LogStore, mixed: Topic) -> None:
    def got() -> dict[bytes, bytes | None]:
        found = {key: latest_of_key(store, mixed, key) for key in (b"a", b"o", b"p", b"x")}
        return {key: None if one is None else one.record.value for key, one in found.items()}

    expected = {b"a": b"good", b"o": b"good", b"p": b"later", b"x": None}
    assert got() == expected
    restored = {
        row["key"]: row["value"] for batch in restore(store, plan_restore(store, "t")) for row in batch.to_pylist()
    }
    assert restored == {key: value for key, value in expected.items() if value is not None}
    followed = {record.key: record.value for each in store.follow("t", wait=False) for record in each.records}
    assert followed == restored
    compact(store, "t")
    assert got() == expected


def test_follow_takes_everything_when_told(store: LogStore, mixed: Topic) -> None:
    values = [record.value for each in store.follow("t", wait=False, committed=False) for record in each.records]
    assert values == [b"good", b"good", b"plain", b"aborted", b"aborted", b"later", b"open"]


def test_what_was_aborted_is_no_keys_value_for_prove_erased(store: LogStore, mixed: Topic) -> None:
    (found,) = find_keys(store, mixed, [b"x"], now_ms=NOW_MS)
    assert [place.holds for place in found.places] == ["1 superseded record"]
    (found,) = find_keys(store, mixed, [b"a"], now_ms=NOW_MS)
    assert [place.holds for place in found.places] == ["1 superseded record, its value"]


# --- get beside a writer ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["offset", "timestamp"])
def test_get_never_says_no_of_a_key_that_is_there_while_a_writer_rolls(store: LogStore, order: str) -> None:
    topic = store.create_topic(
        "t", configs={"cleanup.policy": "compact", "duramen.compaction.order": order, "segment.bytes": 400}
    )
    with writing(store, topic, 0, what="test") as log:
        log.append([Record(b"k", b"v", NOW_MS), *(Record(b"n%d" % n, b"x" * 50, NOW_MS) for n in range(30))])
    reads = store.reader
    rolled = [0]

    def busy(topic: Topic, number: int, **given: int) -> object:
        """A reader beside which another batch is appended, and rolls, at every look."""
        found = reads(topic, number, **given)
        state = found.state

        def moved() -> object:
            rolled[0] += 1
            if rolled[0] <= 5:
                with writing(store, topic, 0, what="test") as log:
                    log.append([Record(b"m%d" % rolled[0], b"y" * 300, NOW_MS)])
                    log.roll()
            else:  # as far as the list tells
                path = store.layout.partition_state(topic.id, 0)
                write_state(store.fs, path, replace(state(), generation=state().generation + 1))
            return state()

        found.state = moved  # type: ignore[method-assign]
        return found

    store.reader = busy  # type: ignore[method-assign, assignment]
    found = latest_of_key(store, topic, b"k")
    assert found is not None
    assert found.record.value == b"v"
    assert latest_of_key(store, topic, b"nobody") is None
    assert rolled[0] > 2


# --- several topics ---------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """Not an Exception: nothing may catch it and go on."""


def commit(committer: Committer, names: Sequence[str], number: int) -> None:
    """A row in each of the topics, as one commit."""
    targets = {name: committer.target(name) for name in names}
    staging = Staging(committer.store)
    try:
        writer = StagedWriter(staging.output(), options=EncodeOptions(), now_ms=NOW_MS + number)
        for name in names:
            rows = {"key": pa.array([b"%d" % number]), "value": pa.array([b"%s %d" % (name.encode(), number)])}
            writer.write(targets[name], pa.record_batch(rows))
        committer.commit(staging, [writer.finish()], {target.id: target for target in targets.values()})
    finally:
        staging.close()


class Commits:
    """What was decided, by the plans that were written: the truth that readers are held to."""

    def __init__(self) -> None:
        self.plans: list[Plan] = []

    def torn(self, visible: dict[str, tuple[int, ...]]) -> list[Plan]:
        """Plans that are seen in some of their topics and not in others."""
        found = []
        for plan in list(self.plans):
            seen = {self._seen(each, visible[each.topic_id]) for each in plan.topics}
            if len(seen) > 1:
                found.append(plan)
        return found

    @staticmethod
    def _seen(plan: TopicPlan, ends: tuple[int, ...]) -> bool:
        return all(end >= planned for end, planned in zip(ends, plan.end_offsets, strict=True))


@pytest.fixture
def three(root: Path) -> Iterator[LogStore]:
    with LogStore(root, create=True, lock_wait_ms=5000) as store:
        for name in TOPICS:
            store.create_topic(name)
        yield store


@pytest.fixture
def commits(monkeypatch: pytest.MonkeyPatch) -> Commits:
    noted = Commits()
    decide = Committer._decide

    def deciding(self: Committer, request: object, staging: Staging) -> None:
        decide(self, request, staging)  # type: ignore[arg-type]
        noted.plans.append(read_plan(self.store.fs, staging.folder, limits=DEFAULT_LIMITS))

    monkeypatch.setattr(Committer, "_decide", deciding)
    return noted


def test_pollers_of_three_topics_see_a_commit_in_all_or_in_none(
    three: LogStore, root: Path, commits: Commits, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chance = random.Random(seed)
    publish, apply = Committer.publish, Committer._apply
    done = threading.Event()
    failed: list[BaseException] = []

    def trouble(what: str) -> None:
        kind = chance.random()
        if kind < 0.15:
            raise Killed(what)
        if kind < 0.5:
            time.sleep(chance.random() * 0.004)

    def slowly(self: Committer, *given: object) -> TopicEnds:
        trouble("before")
        found = publish(self, *given)  # type: ignore[arg-type]
        trouble("after")
        return found

    def applying(self: Committer, *given: object, **more: object) -> None:
        apply(self, *given, **more)  # type: ignore[arg-type]
        if chance.random() < 0.05:
            raise Killed("applied")

    def work() -> None:
        try:
            with LogStore(root, lock_wait_ms=60_000) as store:
                for number in count():
                    if number >= COMMITS and torn_alone:
                        break
                    committer = Committer(store)
                    names = chance.choice([TOPICS, TOPICS, ("a", "b"), ("b", "c"), ("a", "c"), ("b",)])
                    with contextlib.suppress(Killed):
                        commit(committer, names, number)
                    if chance.random() < 0.3:
                        with contextlib.suppress(Killed):
                            committer.settle_topic(store.topic(chance.choice(TOPICS)))
                        time.sleep(0.002)
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    monkeypatch.setattr(Committer, "publish", slowly)
    monkeypatch.setattr(Committer, "_apply", applying)
    polls = torn_alone = 0
    writer = threading.Thread(target=work)
    writer.start()
    topics = [three.topic(name) for name in TOPICS]
    while not done.is_set() or polls < 200:
        time.sleep(0.0005)
        alone = {topic.id: three.ends(topic).high_watermarks for topic in topics}
        ends = visible_ends(three, topics)
        polls += 1
        torn_alone += bool(commits.torn(alone))
        assert not commits.torn({topic_id: each.high_watermarks for topic_id, each in ends.items()})
        if polls % 50 == 0:  # and what is seen can be read
            counts = dict.fromkeys(TOPICS, 0)
            for each in three.follow(TOPICS, wait=False):
                counts[each.topic] += len(each.records)
            for topic in topics:
                assert counts[topic.name] >= ends[topic.id].high_watermarks[0]
    writer.join()
    assert not failed, failed
    assert torn_alone > 0, "nothing was ever between two publishes"
    monkeypatch.undo()
    committer = Committer(three)
    for topic in topics:
        committer.settle_topic(topic)
    for topic in topics:
        values = [record.value for each in three.follow(topic.name, wait=False) for record in each.records]
        expected = [plan for plan in commits.plans if plan.topic(topic.id) is not None]
        assert len(values) == len(set(values)) == len(expected)
    print(f"{polls} polls, {torn_alone} of them between two publishes")


@pytest.mark.parametrize("settled", TOPICS)
@pytest.mark.parametrize("published", [0, 1, 2])
def test_after_a_kill_whoever_settles_one_topic_first_shows_all(
    three: LogStore, monkeypatch: pytest.MonkeyPatch, published: int, settled: str
) -> None:
    committer = Committer(three)
    left = [published]
    publish, apply = Committer.publish, Committer._apply

    def dying(self: Committer, *given: object, **_: object) -> TopicEnds:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return publish(self, *given)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Committer, "publish", dying)
        if not published:  # nor appended
            patched.setattr(Committer, "_apply", dying)
        with pytest.raises(Killed):
            commit(committer, TOPICS, 1)
    gc.collect()
    assert Committer._apply is apply
    topics = [three.topic(name) for name in TOPICS]

    def seen() -> list[int]:
        return [ends.high_watermarks[0] for ends in visible_ends(three, topics).values()]

    def read() -> list[str]:
        return sorted(each.topic for each in three.follow(TOPICS, wait=False))

    def restored() -> list[int]:
        """One after the other, each at a moment of its own."""
        plans = [plan_restore(three, name) for name in TOPICS]
        return [sum(batch.num_rows for batch in restore(three, plan)) for plan in plans]

    assert seen() == ([1, 1, 1] if published else [0, 0, 0])
    assert read() == (list(TOPICS) if published else [])
    assert restored() == seen()
    Committer(three).settle_topic(three.topic(settled))
    assert seen() == [1, 1, 1] == restored()
    assert read() == list(TOPICS)
    commit(Committer(three), TOPICS, 2)
    commit(Committer(three), ("a",), 3)
    assert seen() == [3, 2, 2]
    assert three.ends(three.topic("a")).joint == {}  # nothing is said of topics that have caught up


@pytest.mark.parametrize("slot", ["known", "forgotten"])
@pytest.mark.parametrize("who", ["delete-records", "retain"])
def test_after_a_kill_between_two_publishes_no_command_cuts_what_readers_see(
    three: LogStore, monkeypatch: pytest.MonkeyPatch, who: str, slot: str
) -> None:
    commit(Committer(three), TOPICS, 1)
    topics = sorted((three.topic(name) for name in TOPICS), key=lambda topic: topic.id)
    left, publish = [1], Committer.publish

    def dying(self: Committer, *given: object) -> TopicEnds:
        if not left[0]:
            raise Killed
        left[0] -= 1
        return publish(self, *given)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(Committer, "publish", dying)
        with pytest.raises(Killed):
            commit(Committer(three), TOPICS, 2)
    gc.collect()
    behind = topics[-1]
    if slot == "forgotten":
        three.forget_tail(behind, 0)
    if who == "delete-records":
        delete_records(three, behind, 0, before_offset=1)
    else:
        retain(three, behind, 0, now_ms=NOW_MS)
    found = sorted(record.value for each in three.follow(TOPICS, wait=False) for record in each.records)
    expected = sorted(b"%s %d" % (topic.name.encode(), number) for topic in topics for number in (1, 2))
    if who == "delete-records":
        expected.remove(b"%s 1" % behind.name.encode())
    assert found == expected


def test_a_position_of_several_topics_goes_on_where_it_was(three: LogStore) -> None:
    committer = Committer(three)
    commit(committer, TOPICS, 1)
    position = [each.position for each in three.follow(TOPICS, wait=False)][-1]
    commit(committer, ("a", "c"), 2)
    more = [(each.topic, each.records[0].value) for each in three.follow(TOPICS, position, wait=False)]
    assert more == [("a", b"a 2"), ("c", b"c 2")]
    assert [each.topic for each in three.follow("b", wait=False)] == ["b"]
    with pytest.raises(InvalidConfig):
        next(three.follow(TOPICS, {"offsets": {}}, wait=False))
    three.delete_topic("c")
    three.create_topic("c")
    with pytest.raises(UnknownTopic, match="created again"):
        next(three.follow(TOPICS, position, wait=False))


def test_ends_that_never_stand_still_are_an_error_and_no_torn_answer(
    three: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads, count = three.ends, [0]

    def moving(topic: Topic) -> TopicEnds:
        count[0] += 1
        return replace(reads(topic), high_watermarks=(count[0],))

    monkeypatch.setattr(three, "ends", moving)
    monkeypatch.setattr("logstore.restore.visibility._LOOK_AGAIN_S", 0)
    with pytest.raises(LockHeld, match="changed during each of"):
        visible_ends(three, [three.topic(name) for name in TOPICS])
    assert issubclass(LockHeld, DuramenError)


def test_ends_without_the_field_are_read(three: LogStore, tmp_path: Path) -> None:
    """As an older version wrote them."""
    from logstore.directory.ends import read_ends, write_ends
    from logstore.directory.sealed import write_sealed
    from logstore.files import OS_FILES

    old = {
        "applied_sequence": 2,
        "flushed_sequence": 1,
        "high_watermarks": [3],
        "last_stable_offsets": [3],
        "recovery_points": [1],
    }
    path = str(tmp_path / "ends")
    write_sealed(OS_FILES, path, old, version=1)
    found = read_ends(OS_FILES, path, partitions=1)
    assert found == TopicEnds((3,), (3,), (1,), 2, 1)
    told = replace(found, joint={"other": JointEnds(4, (5, 6))})
    write_ends(OS_FILES, path, told)
    assert read_ends(OS_FILES, path, partitions=1) == told
