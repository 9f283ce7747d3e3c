"""The same log given to Kafka's cleaner and to ours: the same records at the same offsets in the same batches are left.

Every theme is a number of random logs that lean towards one rule of compaction, each cleaned several times by both with
the same clock and settings, Kafka appending the same to both in between. A failing log names its seed: DURAMEN_SEED
repeats it. DURAMEN_SURVIVOR_LOGS=N says how many logs there are over all themes, DURAMEN_SOAK=1 asks for thousands.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import os
import random
import shutil
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from conformance.broker import Broker
from conformance.compaction_logs import DAY_MS, THEMES, Round, Story, random_story
from conformance.kafka import CleanerPass, Kafka, KafkaBatch, KafkaError, LogRun, LogState, Op, record
from conformance.workload import (
    NOW_MS,
    PARTITION,
    UnsyncedFiles,
    cleaner_facts,
    cleaner_rules,
    partition_files,
    without_sizes,
)
from logstore.cleaner.eligibility import cleanable
from logstore.cleaner.filter import KEYLESS, LastRecord
from logstore.cleaner.rewrite import GroupWriter
from logstore.cleaner.work import PassReport
from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.directory.state import read_state, write_state
from logstore.records.offset_map import MapSettings
from reference.cleaning import clean_partition
from reference.partition_writer import PartitionWriter

SOAK = os.environ.get("DURAMEN_SOAK") == "1"
LOGS = int(os.environ.get("DURAMEN_SURVIVOR_LOGS", "5000" if SOAK else "208"))
LOGS_A_THEME = -(-LOGS // len(THEMES))
#: of a theme's logs, those that Kafka's dump tool looks through after each pass
DUMPED_EVERY = 4
#: each second pair of logs is cut up as large ones are
PIECE_BYTES = (GroupWriter.piece_bytes, 400)
FILES = UnsyncedFiles()

#: what each theme must have come across in all of its logs together
REACHED = {
    "anything": "removed",
    "few keys": "removed",
    "many keys": "removed",
    "tombstones": "past their horizon",
    "transactions": "markers gone",
    "idempotent": "empty batches",
    "keyless": "keyless",
    "gaps": "gaps",
    "legacy": "removed",
    "append time": "removed",
    "small map": "map was full",
    "small indexes": "removed",
    "lag": "held back",
    "log start": "removed",
    "expiry": "empty batches",
    "uncompressed": "same bytes, empty at the end",
    "no transactions": "side by side",
}

#: what Kafka's cleaner cannot do: it checks the sizes of the sources' indexes, and their batches may need more entries
#: in one; and it has no way to keep the place of a batch of the old formats
CANNOT = {
    "Attempt to append to a full": "index full",
    "Empty batches are only supported for magic v2": "emptied legacy batch",
}
#: logs on which this suite has failed: theme, seed and how keys are told apart
FAILED_ONCE = [
    # Kafka takes data for aborted there; for us a transaction that began below the log start holds everything back.
    ("log start", "1997971101818664595 177", "md5"),
    # Everything of a producer lay below the log start; Kafka had forgotten it.
    ("log start", "2791712520700781648 24", "siphash"),
]
#: themes of the logs that a broker is given
SERVED = ("uncompressed", "transactions", "tombstones", "gaps")


class KafkaGaveUp(Exception):
    """Kafka's cleaner cannot clean this log, or not rightly: there is nothing more to compare with."""


class Twins:
    """One story told in two directories: Kafka appends to both, each cleaner cleans one."""

    def __init__(self, kafka: Kafka, story: Story, root: Path, algorithm: str) -> None:
        self.kafka = kafka
        self.story = story
        self.algorithm = algorithm
        self.theirs = root / "kafka" / str(PARTITION)
        self.ours = root / "ours" / str(PARTITION)
        self.checkpoint: int | None = None
        self.log_start_offset = 0
        self.dated: dict[Path, int] = {}
        self.forgotten: set[int] = set()
        self.left: list[KafkaBatch] = []
        self.markers = 0
        self.seen: Counter[str] = Counter()

    def tell(self, *, dump: bool) -> None:
        for number, turn in enumerate(self.story.rounds):
            try:
                self.append(turn)
                self.date_new_files()
                if turn.checkpoint is not None:
                    self.checkpoint = turn.checkpoint
                self.clean(turn)
                self.compare(turn)
                if dump:
                    assert self.kafka.dump_findings(self.ours, compacted=True) == []
                    self.seen["dumped"] += 1
            except KafkaGaveUp as reason:
                self.seen[str(reason)] += 1
                return
            except BaseException as error:
                raise AssertionError(f"round {number}: {dataclasses.replace(turn, operations=())}") from error

    # ----- appending

    def append(self, turn: Round) -> None:
        theirs = self._append(self.theirs, turn)
        if not self.ours.exists():
            shutil.copytree(self.theirs, self.ours)
        else:
            ours = self._append(self.ours, turn)
            assert ours.results == theirs.results
            for mine, kafkas in ((ours.opened, theirs.opened), (ours.closed, theirs.closed)):
                for name in ("log_start_offset", "log_end_offset", "last_stable_offset", "producers", "leader_epochs"):
                    assert getattr(mine, name) == getattr(kafkas, name), name
        self.log_start_offset = turn.log_start_offset
        self.markers += sum(op["do"] == "marker" for op in turn.operations)

    def _append(self, directory: Path, turn: Round) -> LogRun:
        run = self.kafka.append(
            directory,
            turn.operations,
            self.story.config,
            now_ms=turn.opened_ms,
            log_start_offset=self.log_start_offset,
            producer_id_expiration_ms=self.story.producer_id_expiration_ms,
        )
        refused = [result for result in run.results if result.error is not None]
        assert not refused, refused[0]
        return run

    def date_new_files(self) -> None:
        """Files that nobody appended to keep the times the cleaners gave them."""
        for directory in self.both():
            for path in directory.glob("*.log"):
                if self.dated.get(path) != path.stat().st_size:
                    mtime_ns = (NOW_MS + int(path.stem) % 2**31 * self.story.mtime_step_ms) * 1_000_000
                    os.utime(path, ns=(mtime_ns, mtime_ns))

    # ----- cleaning

    def clean(self, turn: Round) -> None:
        self.same_sizes = sizes(self.theirs) == sizes(self.ours)
        before = list(self.kafka.read(self.theirs))
        self.transactions = any(b.transactional or b.control for b in before)
        entries = self.kafka.indexes(self.theirs)
        try:
            self.passed = self.kafka.clean(
                self.theirs,
                turn.config,
                now_ms=turn.now_ms,
                checkpoint=self.checkpoint,
                dedupe_buffer_bytes=turn.dedupe_buffer_bytes,
                load_factor=turn.load_factor,
                io_buffer_bytes=turn.io_buffer_bytes,
                log_start_offset=turn.log_start_offset,
                producer_id_expiration_ms=self.story.producer_id_expiration_ms,
            )
        except KafkaError as error:
            reason = next((reason for text, reason in CANNOT.items() if text in str(error)), None)
            if reason is None:
                raise
            self.outlast(turn, before)
            raise KafkaGaveUp(reason) from None
        self.forgotten |= aborted_before(entries, turn.log_start_offset)
        mistakes = {
            "mistaken for aborted": mistaken_for_aborted(before, entries, self.passed.first_dirty_offset),
            "mistaken for committed": mistaken_for_committed(before, self.forgotten, turn.log_start_offset),
        }
        for reason, made in mistakes.items():
            if made and self.passed.cleaned:
                self.outlast(turn, before)
                raise KafkaGaveUp(reason)
        self.report = self.clean_ours(turn, self.passed)
        self.checkpoint = self.passed.end_offset

    def outlast(self, turn: Round, before: Sequence[KafkaBatch]) -> None:
        """Ours cleans what Kafka cannot, and Kafka reads what is left. Below the log start the twins may differ."""
        known = {r.offset: r for b in self.kafka.read(self.ours) for r in b.records or ()}
        report = self.clean_ours(turn, None)
        kept = [r for b in self.kafka.read(self.ours) for r in b.records or ()]
        assert all(known[r.offset] == r for r in kept)
        state = self.kafka.load(
            self.ours,
            self.story.config,
            now_ms=turn.now_ms,
            log_start_offset=turn.log_start_offset,
            producer_id_expiration_ms=self.story.producer_id_expiration_ms,
        )
        assert state.log_end_offset > before[-1].last_offset
        assert report is not None or open_below(state, turn.log_start_offset)

    def clean_ours(self, turn: Round, theirs: CleanerPass | None) -> PassReport | None:
        """A pass of ours over a directory that Kafka has closed; None when there was nothing to clean.

        Where there are no transactions, two threads work side by side.
        """
        config = LogConfig.from_mapping(turn.config)
        state_path = str(self.ours.parent / "state")
        Path(state_path).unlink(missing_ok=True)  # Kafka appended since
        with PartitionWriter.open(
            str(self.ours),
            partition=PARTITION,
            config=config,
            clean=True,
            state_path=state_path,
            log_start_offset=turn.log_start_offset,
            clock=ManualClock(turn.now_ms),
            fs=FILES,
            background_flush=False,
            producer_expiration_ms=self.story.producer_id_expiration_ms,
        ) as log:
            found = cleanable(cleaner_facts(log, self.checkpoint), cleaner_rules(config), now_ms=turn.now_ms)
            producers = {producer_id: LastRecord(*last) for producer_id, last in log.last_records.items()}
        if theirs is not None:
            expected = (theirs.first_dirty_offset, theirs.first_uncleanable_offset, theirs.cleaned)
            actual = (found.first_dirty_offset, found.first_uncleanable_offset, found.cleanable_bytes > 0)
            if actual[1] < expected[1] and open_below(theirs.state, turn.log_start_offset):
                raise KafkaGaveUp("open below the log start")
            assert actual == expected
        if not found.cleanable_bytes:
            return None
        state = read_state(FILES, state_path)
        assert state is not None
        state = dataclasses.replace(state, first_dirty_offset=found.first_dirty_offset, transactions=self.transactions)
        write_state(FILES, state_path, state)
        report = clean_partition(
            FILES,
            str(self.ours),
            partition=PARTITION,
            config=config,
            state_path=state_path,
            first_uncleanable_offset=found.first_uncleanable_offset,
            now_ms=turn.now_ms,
            map_settings=MapSettings(turn.dedupe_buffer_bytes, turn.load_factor, self.algorithm),
            producers=producers,
            threads=1 if self.transactions else 2,
        )
        for path in self.ours.glob("*.deleted"):
            path.unlink()
        return report

    # ----- judging

    def compare(self, turn: Round) -> None:
        ours, theirs = (self.batches(directory) for directory in self.both())
        assert_same_batches(ours, theirs)
        if self.report is not None:
            stats = self.passed.stats
            assert (self.report.map_keys, self.report.end_offset) == (stats["map_entries"], self.passed.end_offset)
            assert self.report.removed.get(KEYLESS, 0) == stats["invalid_messages_read"]
        assert self.aborted_transactions(self.ours) == self.aborted_transactions(self.theirs)
        if self.same_sizes:
            # Where recompression gave other sizes, segments may be grouped in another way from the next pass on.
            mine, kafkas = (
                {path.name: path.stat().st_mtime_ns // 1_000_000 for path in directory.glob("*.log")}
                for directory in self.both()
            )
            assert mine == kafkas
        if self.log_start_offset == 0 and all(b.codec == "none" for b in theirs):
            self.compare_bytes()
            self.seen["same bytes"] += self.passed.cleaned
            self.seen["same bytes, empty at the end"] += self.passed.cleaned and self.has_empty_last_batch(theirs)
        self.dated = {path: path.stat().st_size for directory in self.both() for path in directory.glob("*.log")}
        self.seen["side by side"] += self.report is not None and not self.transactions
        self.observe(theirs, turn)

    def has_empty_last_batch(self, batches: Sequence[KafkaBatch]) -> bool:
        """Whether some segment ends with one: it leaves a time index entry that Kafka's dump tool calls a mismatch."""
        bases = sorted(int(path.stem) for path in self.theirs.glob("*.log"))
        last = {bisect.bisect(bases, batch.base_offset): batch for batch in batches}
        return any(batch.count == 0 for batch in last.values())

    def compare_bytes(self) -> None:
        ours, theirs = (
            {name: data for name, data in partition_files(directory).items() if not name.endswith(".snapshot")}
            for directory in self.both()
        )
        # What we found unchanged keeps its indexes; Kafka writes them anew, and a log opened twice has sparser ones.
        left_alone = (
            {f"{done.base_offset:020}" for done in self.report.cleaned if not done.changed} if self.report else set()
        )
        for name, data in theirs.items():
            if name.endswith(".log") or name.split(".")[0] not in left_alone:
                assert ours.get(name) == data, name

    def batches(self, directory: Path) -> list[KafkaBatch]:
        """Those that can still be read. Below the log start Kafka's cleaner forgets which transactions were aborted."""
        return [b for b in self.kafka.read(directory) if b.last_offset >= self.log_start_offset]

    def aborted_transactions(self, directory: Path) -> list[Any]:
        found = self.kafka.indexes(directory)
        entries = [entry for name in sorted(found) if name.endswith(".txnindex") for entry in found[name]]
        return [entry for entry in entries if entry[2] >= self.log_start_offset]

    def both(self) -> tuple[Path, Path]:
        return self.ours, self.theirs

    def observe(self, left: list[KafkaBatch], turn: Round) -> None:
        stats, seen = self.passed.stats, self.seen
        seen["passes"] += 1
        seen["cleaned"] += self.passed.cleaned
        seen["removed"] += stats.get("messages_read", 0) - stats.get("messages_written", 0)
        seen["keyless"] += stats.get("invalid_messages_read", 0)
        seen["map was full"] += self.passed.cleaned and self.passed.end_offset < self.passed.first_uncleanable_offset
        seen["held back"] += self.passed.first_uncleanable_offset < self.passed.state.segments[-1][0]
        seen["empty batches"] += sum(b.count == 0 for b in left)
        seen["gaps"] += any(b.base_offset > a.last_offset + 1 for a, b in itertools.pairwise(left))
        markers = sum(b.control for b in left)
        seen["markers gone"] += self.markers - markers
        self.markers = markers
        counts = {b.base_offset: b.count for b in left}
        seen["past their horizon"] += sum(
            b.delete_horizon_ms is not None and b.count != counts.get(b.base_offset)
            for b in self.left
            if b.delete_horizon_ms is not None and b.delete_horizon_ms <= turn.now_ms
        )
        self.left = left


def sizes(directory: Path) -> dict[str, int]:
    """Of all that segments are grouped by."""
    paths = (path for suffix in ("log", "index", "timeindex") for path in directory.glob(f"*.{suffix}"))
    return {path.name: path.stat().st_size for path in paths}


def mistaken_for_aborted(before: Sequence[KafkaBatch], entries: dict[str, list[Any]], first_dirty_offset: int) -> bool:
    """Whether Kafka took data for aborted while it filled its map: where the first dirty offset lies inside a segment,
    it also reads of transactions that were aborted further up in it, and does not see their end; a commit of the same
    producer does not end them either.
    """
    base_offset = max((int(name[:20]) for name in entries if int(name[:20]) <= first_dirty_offset), default=0)
    ended = {p for p, _, last, _ in entries.get(f"{base_offset:020}.txnindex", ()) if last < first_dirty_offset}
    for found in before:
        if found.transactional and found.last_offset >= first_dirty_offset and found.producer_id in ended:
            if not found.control:
                return True
            if any(marker.key is not None and marker.key[3] == 0 for marker in found.records or ()):  # an abort
                ended.remove(found.producer_id)
    return False


def aborted_before(entries: dict[str, list[Any]], offset: int) -> set[int]:
    """Producers that had a transaction aborted below an offset."""
    indexes = (found for name, found in entries.items() if name.endswith(".txnindex"))
    return {producer_id for found in indexes for producer_id, _, last, _ in found if last < offset}


def mistaken_for_committed(before: Sequence[KafkaBatch], forgotten: set[int], log_start_offset: int) -> bool:
    """Whether Kafka may keep a marker for nothing: it does not read of transactions that were aborted below the log
    start, takes their data for committed, and so finds that the producer's next commit has some.
    """
    return any(b.control and b.last_offset >= log_start_offset and b.producer_id in forgotten for b in before)


def open_below(state: LogState, log_start_offset: int) -> bool:
    """Whether a transaction is open that began below the log start: for Kafka the first batch behind the log start is
    the last stable offset then, for us the log start itself. No record lies between them, but perhaps a segment's end.
    """
    begun = (producer["current_txn_first_offset"] for producer in state.producers)
    return any(offset is not None and 0 <= offset < log_start_offset for offset in begun)


def described(found: KafkaBatch) -> dict[str, Any]:
    """All of a batch that both sides must agree on; compressed bytes may differ."""
    fields = without_sizes(found)
    if found.codec == "none":
        fields |= {"crc": found.crc, "size_bytes": found.size_bytes}
    return fields


def assert_same_batches(ours: Sequence[KafkaBatch], theirs: Sequence[KafkaBatch]) -> None:
    for mine, kafkas in zip(ours, theirs, strict=False):
        if described(mine) != described(kafkas):
            differing = {k: (v, o) for k, v in described(mine).items() if v != (o := described(kafkas).get(k))}
            where = {k: v for k, v in described(kafkas).items() if k != "records"}
            raise AssertionError(f"(ours, Kafka's): {differing}\nin Kafka's batch {where} of {kafkas.file}")
    assert [b.base_offset for b in ours] == [b.base_offset for b in theirs]


def told(kafka: Kafka, story: Story, root: Path, algorithm: str, *, dump: bool = False) -> Twins:
    twins = Twins(kafka, story, root, algorithm)
    try:
        twins.tell(dump=dump)
    except BaseException as error:
        raise AssertionError(f"{story.theme!r} of seed {story.seed!r}, {algorithm}, {story.config}") from error
    return twins


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.timeout(24 * 3600 if SOAK else 300)
def test_same_survivors_as_kafka(
    kafka: Kafka, scratch: Path, seed: int, theme: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Counter[str] = Counter()
    for number in range(LOGS_A_THEME):
        monkeypatch.setattr(GroupWriter, "piece_bytes", PIECE_BYTES[number // 2 % 2])
        root = scratch / str(number)
        # Both ways to tell keys apart leave the same, on every log of the soak and on each second one otherwise.
        algorithms = ("siphash", "md5") if SOAK else (("siphash", "md5")[number % 2],)
        for algorithm in algorithms:
            story = random_story(f"{seed} {number}", theme)
            seen += told(kafka, story, root / algorithm, algorithm, dump=number % DUMPED_EVERY == 0).seen
        shutil.rmtree(root)
    print(f"{theme}: {LOGS_A_THEME} logs, {dict(sorted(seen.items()))}")
    assert seen["dumped"] > 0
    assert seen[REACHED[theme]] > 0
    assert seen["index full"] == 0 or theme == "small indexes"


@pytest.mark.parametrize(("theme", "seed", "algorithm"), FAILED_ONCE)
def test_same_survivors_of_a_log_that_failed_once(
    kafka: Kafka, scratch: Path, theme: str, seed: str, algorithm: str
) -> None:
    told(kafka, random_story(seed, theme), scratch, algorithm, dump=True)


@pytest.mark.parametrize("codec", ["none", "lz4"])
def test_same_survivors_of_a_log_of_many_keys(kafka: Kafka, scratch: Path, seed: int, codec: str) -> None:
    """More keys than our map begins with, and more batches than are read at once; in the first pass the map fills."""
    rng = random.Random(seed)
    key_bytes, value_bytes, records = 8, 40, 120_000
    source = scratch / "source"
    source.write_bytes(b"".join(b"%08d" % rng.randrange(90_000) + rng.randbytes(value_bytes) for _ in range(records)))
    config = {"segment.bytes": 5 << 20, "cleanup.policy": "compact"}
    cleaned_with = [
        Round(NOW_MS, (Op.roll(),), NOW_MS + 1000, config, 0, 24 * 60_000, 0.9, 256 << 10, None),
        Round(NOW_MS, (), NOW_MS + 2000, config, 0, 24 * 120_000, 0.9, 256 << 10, None),
    ]
    story = Story(str(seed), "many keys", config, DAY_MS, 0, tuple(cleaned_with))
    twins = Twins(kafka, story, scratch, "siphash")
    kafka.bench_append(
        twins.theirs,
        source,
        records=records,
        key_bytes=key_bytes,
        value_bytes=value_bytes,
        codec=codec,
        now_ms=NOW_MS,
        config=config,
    )
    twins.tell(dump=False)
    print({**twins.seen, "keys": twins.passed.stats["map_entries"]})
    assert twins.seen["map was full"] == 1
    assert twins.seen["side by side"] == 2
    assert twins.seen["removed"] > 20_000


@pytest.mark.timeout(300)
def test_a_broker_serves_what_our_cleaner_left(kafka: Kafka, scratch: Path, tmp_path: Path, seed: int) -> None:
    """Record for record, also after it has recovered everything; then it appends."""
    stories = {f"survivors-{at}": random_story(f"{seed} broker {at}", theme) for at, theme in enumerate(SERVED)}
    twins = {topic: told(kafka, story, scratch / topic, "siphash") for topic, story in stories.items()}
    assert sum(each.seen["cleaned"] for each in twins.values()) > 0
    cleaned = {topic: each.ours for topic, each in twins.items()}
    expected = {topic: list(kafka.records(directory)) for topic, directory in cleaned.items()}
    with Broker(kafka, tmp_path / "broker") as broker:
        ids = {topic: broker.create_topic(topic, config={"retention.ms": -1}) for topic in stories}
        for clean in (True, False):
            broker.stop()
            for topic, directory in cleaned.items():
                broker.mount(directory, topic, ids[topic], clean=clean)
            broker.start()
            for topic, records in expected.items():
                end = records[-1].offset + 1 if records else 0
                assert kafka.consume(broker.bootstrap, topic, await_end_offset=end) == records, topic
        for topic in stories:
            [[offset]] = kafka.produce(broker.bootstrap, topic, [record(b"more", b"v", NOW_MS)])
            [more] = kafka.consume(broker.bootstrap, topic, offset=offset, await_end_offset=offset + 1)
            assert more.key == b"more"
