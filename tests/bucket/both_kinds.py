"""The same things done to a store in a directory and to one in a bucket, and a plain list of what was committed.

A bucket is sealed where a directory rolls, so both make the same segments, and a pass has to leave the same records.
The bucket is looked at through several stores in turns, as several processes would have it open.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from compaction_job.due import explain
from compaction_job.job import compact
from logstore.bucket.examining import examine
from logstore.bucket.freeing import HOUR_MS
from logstore.bucket.maintaining import MaintenanceRules, Step, delete_up_to, maintain
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.bucket.verifying import verify_partition
from logstore.clock import ManualClock
from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committed
from logstore.commit.driver import Batch, Encoded, append_batch
from logstore.commit.produce import table_of
from logstore.commit.staging import EncodeOptions, StagedWriter
from logstore.compaction.passes import roll
from logstore.errors import DuramenError
from logstore.objects.memory import MemoryObjects
from logstore.records.record import Record
from logstore.restore.lookup import latest_of_key
from logstore.store import LogStore
from logstore.topics.registry import Topic
from logstore.upkeep import retention

NOW_MS = 1_700_000_000_000
DAY_MS = 24 * HOUR_MS
Key = tuple[str, int]


@dataclass(frozen=True)
class Failed:
    """What a call raised, to be compared."""

    kind: str


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except DuramenError as error:
        return Failed(type(error).__name__)


def append_many(store: Any, rows: dict[str, list[Record]], app: AppBatch | None, tasks: int = 1) -> Committed:
    """One batch of several topics, by several tasks."""
    committer = store.commits()

    def encode(staging: Batch) -> Encoded:
        targets, files = [committer.target(name) for name in rows], []
        for task in range(tasks):
            output, _ = staging.outputs().open(task)
            writer = StagedWriter(output, options=EncodeOptions(), now_ms=committer.clock.now_ms())
            try:
                for target, name in zip(targets, rows, strict=True):
                    for batch in table_of(rows[name][task::tasks]).to_batches():
                        if batch.num_rows:
                            writer.write(target, batch, None)
            except BaseException:
                writer.abandon()
                raise
            files.append(writer.finish())
        return Encoded(files, targets)

    return append_batch(committer, encode, app=app, timings_ms={})


def plain(record: Record) -> tuple[object, ...]:
    return record.offset, record.key, record.value, record.timestamp_ms, record.headers


@dataclass
class BothKinds:
    folder: Path
    seed: int
    clock: ManualClock = field(default_factory=lambda: ManualClock(NOW_MS))
    views: int = 2
    rng: random.Random = None  # type: ignore[assignment]
    #: by topic id of the bucket and partition, every record that was committed
    committed: dict[Key, list[tuple[object, ...]]] = field(default_factory=dict)
    positions: dict[str, dict[str, Any] | None] = field(default_factory=dict)
    done: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.rng = random.Random(self.seed)
        self.objects = MemoryObjects(self.clock)
        self.directory = LogStore(self.folder / "directory", create=True, clock=self.clock)
        self.buckets = [self.opened(create=True) for _ in range(self.views)]
        self.apps: dict[str, int] = {}

    def opened(self, *, create: bool = False) -> BucketStore:
        return BucketStore("memory://both", create=create, objects=self.objects, clock=self.clock)

    @property
    def bucket(self) -> BucketStore:
        return self.rng.choice(self.buckets)

    def both(self, call: Callable[[Any], Any]) -> Any:
        """Ask both; the answers are the same."""
        one, other = outcome(lambda: call(self.directory)), outcome(lambda: call(self.bucket))
        assert one == other, f"directory: {one}\nbucket: {other}"
        return one

    def close(self) -> None:
        self.directory.close()
        for each in self.buckets:
            each.close()

    # --- what is done -----------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return self.directory.topic_names()

    def a_topic(self) -> str:
        return self.rng.choice(["a", "b", "c"])

    def create(self) -> None:
        rng, name, partitions = self.rng, self.a_topic(), self.rng.choice([1, 1, 2, 3])
        configs: dict[str, object] = {
            "segment.bytes": rng.choice([400, 1000, 3000, 100_000]),
            "cleanup.policy": rng.choice(["compact", "compact", "delete", "compact,delete", ""]),
            "delete.retention.ms": rng.choice([0, HOUR_MS, DAY_MS]),
            "retention.ms": rng.choice([-1, 5 * HOUR_MS, 3 * DAY_MS]),
            "retention.bytes": rng.choice([-1, -1, 2000]),
            "min.cleanable.dirty.ratio": rng.choice(["0.01", "0.5"]),
            "max.message.bytes": rng.choice([1_048_588, 1_048_588, 600]),
        }
        for setting, values in {
            "duramen.compaction.order": ["offset", "timestamp", "version"],
            "duramen.key.ttl.ms": [4 * HOUR_MS, DAY_MS],
            "duramen.compaction.merge.bytes": [2000, 20_000],
            "message.timestamp.type": ["LogAppendTime"],
            "compression.type": ["gzip", "zstd", "lz4", "snappy"],
            "min.compaction.lag.ms": [HOUR_MS],
            "max.compaction.lag.ms": [5 * HOUR_MS],
            "segment.ms": [HOUR_MS],
            "index.interval.bytes": [0, 100],
            "segment.index.bytes": [48],
        }.items():
            if rng.random() < 0.2:
                configs[setting] = rng.choice(values)
        self._note(f"create {name} {partitions} {configs}")
        self.both(lambda store: _definition(store.create_topic(name, partitions=partitions, configs=configs)))

    def delete(self) -> None:
        name = self.a_topic()
        self._note(f"delete {name}")
        self.both(lambda store: store.delete_topic(name).name)

    def alter(self) -> None:
        name, rng = self.a_topic(), self.rng
        configs = {
            rng.choice(["segment.bytes", "retention.bytes"]): rng.choice([500, 1500, 5000]),
            "cleanup.policy": rng.choice(["compact", "compact", "delete", "compact,delete"]),
            "duramen.compaction.order": rng.choice(["offset", "offset", "timestamp", "version"]),
        }
        wider = rng.random() < 0.3 and name in self.names()
        partitions = self.directory.topic(name).partitions + 1 if wider else None
        self._note(f"alter {name} {configs} {partitions}")
        self.both(lambda store: _definition(store.alter_topic(name, configs=configs, partitions=partitions)))

    def records(self, name: str) -> list[Record]:
        rng, rows = self.rng, []
        for _ in range(rng.choice([0, 1, 3, 20, 60])):
            at_ms = self.clock.now_ms() - rng.choice([0, 0, rng.randrange(2 * HOUR_MS), rng.randrange(3 * DAY_MS)])
            headers = (("version", b"%d" % rng.randrange(50)),) if rng.random() < 0.5 else ()
            value = None if rng.random() < 0.15 else rng.randbytes(rng.choice([0, 5, 40, 90]))
            rows.append(Record(b"k%d" % rng.randrange(12), value, at_ms, headers))
        if rng.random() < 0.05 and self.directory.topic(name).partitions == 1:  # else any partition will do
            rows.append(Record(None, b"no key", self.clock.now_ms()))
        if rng.random() < 0.05:
            rows.append(Record(b"big", rng.randbytes(700), self.clock.now_ms()))
        return rows

    def append(self) -> None:
        rng = self.rng
        names = rng.sample(["a", "b", "c"], rng.choice([1, 1, 2, 3]))
        if rng.random() < 0.95:
            names = [name for name in names if name in self.names()]
        if not names:
            return
        rows = {name: self.records(name) for name in names}
        app = None
        if rng.random() < 0.5:
            app_id = rng.choice(["one", "two"])
            number = max(self.apps.get(app_id, -1) + rng.choice([1, 1, 1, 1, 0, 2]), 0)
            app = AppBatch(app_id, number, rng.choice(["query", "query", "query", "query", "other"]))
        tasks = rng.choice([1, 2])
        self._note(f"append { {name: len(each) for name, each in rows.items()} } {app}")

        def spans(store: Any) -> object:
            done = append_many(store, rows, app, tasks)
            topics = {
                name: (each.base_offsets, each.end_offsets, each.records)
                for name, each in done.topics.items()
                if each.records
            }
            return done.replayed, topics, done.records

        found = self.both(spans)
        if isinstance(found, Failed):
            self.counts[found.kind] += 1
            return
        replayed, topics, _ = found
        if app is not None and not replayed:
            self.apps[app.app_id] = app.batch_id
        if not replayed:
            self._note_committed(topics, rows)

    def _note_committed(self, topics: dict[str, Any], rows: dict[str, list[Record]]) -> None:
        """The oracle is what a fresh look at the directory finds of the batch, if it is what was given."""
        for name, (bases, ends, _) in topics.items():
            topic, mine = self.directory.topic(name), self.bucket.topic(name)
            stamps = self.directory.log_config(topic).message_timestamp_type == "LogAppendTime"
            found = []
            for number, (base, end) in enumerate(zip(bases, ends, strict=True)):
                got = [plain(r) for r in self.directory.reader(topic, number).records(base, end)] if base < end else []
                assert [each[0] for each in got] == list(range(base, end))
                self.committed.setdefault((mine.id, number), []).extend(got)
                found += got
            wanted = Counter((r.key, r.value, 0 if stamps else r.timestamp_ms, r.headers) for r in rows[name])
            assert Counter((k, v, 0 if stamps else t, h) for _, k, v, t, h in found) == wanted

    def wait(self) -> None:
        self.clock.advance(self.rng.choice([1000, 60_000, HOUR_MS, 5 * HOUR_MS, 2 * DAY_MS, 8 * DAY_MS]))
        self._note(f"now {self.clock.now_ms() - NOW_MS}")

    def roll(self, only: str | None = None) -> None:
        """Close what is open: the tail becomes segments."""
        self._note("roll")
        for topic in self.directory.topics():
            if only in (None, topic.name):
                for number in range(topic.partitions):
                    roll(self.directory, topic, number, what="test")
        self._maintain(MaintenanceRules(seal=SealRules(force=True), steps=frozenset({Step.SEAL})))

    def _maintain(self, rules: MaintenanceRules) -> None:
        done = maintain(self.bucket, rules)
        assert not done.failed, done.failed
        assert not done.lost_records

    def compact(self) -> None:
        """Whatever is due is, in both; retention comes with it."""
        force, retains = self.rng.random() < 0.5, self.rng.random() < 0.3
        self.roll()
        self._note(f"compact force={force} retention={retains}")
        now_ms = self.clock.now_ms()
        found = []
        for store in (self.directory, self.bucket):
            report = compact(store, force=force, retention=retains, threads=1, now_ms=now_ms, roll_active=True)
            assert not report.problems, report.problems
            assert not report.failed, [(run.plan.name, run.reason) for run in report.failed]
            found.append(
                sorted(
                    (run.plan.topic, run.plan.partition, dict(run.report.removed))  # type: ignore[union-attr]
                    for run in report.done
                    # Below the log start records go with a segment or with a pass: segments of both differ there.
                    if run.report.removed and not self._log_start(run.plan.topic, run.plan.partition)  # type: ignore[union-attr]
                )
            )
        assert found[0] == found[1], found

    def _log_start(self, name: str, number: int) -> int:
        return self.directory.partition_state(self.directory.topic(name), number).log_start_offset

    def explain(self) -> None:
        now_ms = self.clock.now_ms()
        self._note("explain")
        self.roll()
        plans = [explain(store, now_ms=now_ms) for store in (self.directory, self.bucket)]
        # Of one with nothing to do the words differ: what was deleted leaves an empty segment in one of them.
        one, other = (
            sorted(
                (each.name, each.is_due, each.is_due and each.why)
                for each in some
                if not self._log_start(each.topic, each.partition)
            )
            for some in plans
        )
        assert one == other, "\n".join(f"{x}\n{y}" for x, y in zip(one, other, strict=False) if x != y)

    def retain(self) -> None:
        self.roll()
        self._note("retain")
        for topic in self.directory.topics():
            for number in range(topic.partitions):
                now_ms = self.clock.now_ms()

                def run(store: Any, name: str = topic.name, number: int = number, now_ms: int = now_ms) -> object:
                    maintenance, mine = store.maintenance(), store.topic(name)
                    maintenance.prepare_retention(mine)
                    done = maintenance.retain(mine, number, now_ms=now_ms)
                    return done.log_start_offset

                self.both(run)

    def delete_records(self) -> None:
        if not self.names():
            return
        name = self.rng.choice(self.names())
        number = self.rng.randrange(self.directory.topic(name).partitions)
        end = self.directory.ends(self.directory.topic(name)).high_watermarks[number]
        before = self.rng.choice([None, end, end + 1, self.rng.randrange(end + 1), self.rng.randrange(end + 1)])
        self._note(f"delete-records {name} {number} {before}")

        def run(store: Any) -> object:
            topic = store.topic(name)
            delete = retention.delete_records if store is self.directory else delete_up_to
            return delete(store, topic, number, before_offset=before).log_start_offset

        self.both(run)

    def clean_up(self) -> None:
        """What only a bucket has: garbage, floors, the ledger, the sweep."""
        self._note("clean up")
        self._maintain(MaintenanceRules(steps=frozenset({Step.COLLECT, Step.CLEAN_UP})))

    def reopen(self) -> None:
        number = self.rng.randrange(self.views)
        self.buckets[number].close()
        self.buckets[number] = self.opened()

    # --- what is asked ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Both say the same, and nothing but what was committed."""
        bucket = self.bucket
        assert self.directory.topic_names() == bucket.topic_names()
        for topic in self.directory.topics():
            mine = bucket.topic(topic.name)
            assert _definition(topic) == _definition(mine)
            assert self.directory.ends(topic).high_watermarks == bucket.ends(mine).high_watermarks
            for number in range(topic.partitions):
                self.check_partition(topic, mine, number)

    def check_partition(self, topic: Topic, mine: Topic, number: int) -> None:
        one, other = self.directory.reader(topic, number), self.bucket.reader(mine, number)
        state, other_state = self.directory.partition_state(topic, number), other.state()
        assert state.log_start_offset == other_state.log_start_offset, (topic.name, number, state, other_state)
        if not state.log_start_offset:
            assert state.dropped_tombstones == other_state.dropped_tombstones, (topic.name, number, state, other_state)
        dirty = [max(each.first_dirty_offset, each.log_start_offset) for each in (state, other_state)]
        assert dirty[0] == dirty[1], (topic.name, number, state, other_state)
        found = [plain(each) for each in one.records(one.log_start_offset())]
        mine_found = [plain(each) for each in other.records(other.log_start_offset())]
        assert found == mine_found, (topic.name, number)
        known = self.committed.get((mine.id, number), [])
        ttl = "duramen.key.ttl.ms" in topic.configs  # makes tombstones of values
        for each in mine_found:
            before = known[each[0]]  # type: ignore[index]
            assert each in (before, (*before[:2], None, *before[3:]) if ttl else before), (
                topic.name,
                number,
                before,
                each,
            )
        if found:
            low, high = min(each[3] for each in found), max(each[3] for each in found)  # type: ignore[type-var]
            times = [low - 1, low, high, high + 1, -1, -2, *(self.rng.randint(low, high) for _ in range(3))]  # type: ignore[operator,call-overload]
            times += [each[3] + self.rng.choice([-1, 0, 1]) for each in self.rng.sample(found, min(3, len(found)))]  # type: ignore[operator]
            for at_ms in times:
                # Kafka's own answer goes by the times of files where a segment is empty.
                asked = outcome(lambda at=at_ms: one.offset_for_timestamp(at, exact=True))  # type: ignore[misc]
                answered = outcome(lambda at=at_ms: other.offset_for_timestamp(at, exact=True))  # type: ignore[misc]
                assert asked == answered, (topic.name, number, at_ms, asked, answered)
                if at_ms >= 0:
                    first = next(((each[3], each[0]) for each in found if each[3] >= at_ms), None)  # type: ignore[operator]
                    assert first == (answered and (answered.timestamp_ms, answered.offset)), (topic.name, number, at_ms)
        one.close()
        other.close()

    def restore(self) -> None:
        """Now, as of offsets and as of a time."""
        if not self.names():
            return
        name = self.rng.choice(self.names())
        ends = self.directory.ends(self.directory.topic(name)).high_watermarks
        some: dict[str, Any] = self.rng.choice(
            [
                {},
                {"as_of_offsets": {n: self.rng.randrange(end + 1) for n, end in enumerate(ends)}},
                {"as_of_timestamp_ms": self.clock.now_ms() - self.rng.randrange(4 * DAY_MS)},
                {"since_offsets": {n: self.rng.randrange(end + 1) for n, end in enumerate(ends)}},
            ]
        )
        tombstones = self.rng.random() < 0.5
        self._note(f"restore {name} {some}")

        def run(store: Any) -> object:
            batches = list(store.restore(name, tombstones=tombstones, **some))
            rows = [tuple(row.values()) for batch in batches for row in batch.to_pylist()]
            return sorted(rows, key=lambda row: (row[0] or b"", row[2], row[3]))

        found = self.both(run)
        self.counts["restore " + (found.kind if isinstance(found, Failed) else "done")] += 1

    def get(self) -> None:
        if not self.names():
            return
        name, key = self.rng.choice(self.names()), b"k%d" % self.rng.randrange(13)
        self._note(f"get {name} {key!r}")

        def run(store: Any) -> object:
            found = latest_of_key(store, store.topic(name), key)
            return None if found is None else (found.partition, plain(found.record))

        self.both(run)

    def follow(self) -> None:
        """Cursors that are kept: of the bucket and of the directory, they see the same."""
        name = self.a_topic()
        self._note(f"follow {name}")
        seen = []
        for kind, store in (("directory", self.directory), ("bucket", self.bucket)):
            place = f"{kind} {name}"
            found: Any = []

            def run(store: Any = store, place: str = place, found: list[Any] = found) -> None:
                for each in store.follow(name, self.positions.get(place), wait=False):
                    found += [(each.partition, *plain(record)) for record in each.records]
                    self.positions[place] = each.position

            failed = outcome(run)
            if isinstance(failed, Failed):
                self.positions.pop(place, None)
            seen.append((failed, sorted(found, key=lambda row: row[:2])))
        # A cursor in a bucket may read staged objects that are sealed and compacted: it sees superseded records, too.
        assert seen[0][0] == seen[1][0], (seen[0][0], seen[1][0])
        if "duramen.key.ttl.ms" not in (self.directory.topic(name).configs if name in self.names() else {}):
            assert {str(row) for row in seen[0][1]} <= {str(row) for row in seen[1][1]}

    def verify(self) -> None:
        self._note("verify")
        store = self.bucket
        problems = examine(store)
        assert not problems, problems
        for topic in store.topics():
            for number in range(topic.partitions):
                findings = verify_partition(store, store.source(topic, number)).findings
                assert not findings, findings

    def set_file_times(self) -> None:
        """Where a record's own time does not decide, that of its segment's file does: it goes by our clock, too."""
        now_s = self.clock.now_ms() / 1000
        for path in (self.folder / "directory" / "logs").rglob("*.log"):
            if path.stat().st_mtime > now_s:
                os.utime(path, (now_s, now_s))

    def _note(self, what: str) -> None:
        self.done.append(what)

    def run(self, steps: int) -> None:
        weights: dict[Callable[[], None], int] = {
            self.append: 14,
            self.create: 3,
            self.wait: 4,
            self.compact: 3,
            self.roll: 2,
            self.restore: 5,
            self.get: 3,
            self.follow: 3,
            self.explain: 2,
            self.delete_records: 1,
            self.retain: 1,
            self.alter: 2,
            self.clean_up: 3,
            self.reopen: 2,
            self.verify: 1,
            self.delete: 1,
        }
        steps_of = list(weights)
        for _ in range(2):
            self.create()
        for _ in range(steps):
            step = self.rng.choices(steps_of, list(weights.values()))[0]
            step()
            self.set_file_times()
            self.counts[step.__name__] += 1
            self.check()
        self.verify()


def _definition(topic: Topic) -> tuple[object, ...]:
    return topic.name, topic.partitions, dict(topic.configs)
