"""Many partitions in a topic: what is done once for all of them, how many files are open, how much memory is held."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from logstore.clock import ManualClock
from logstore.commit import staging
from logstore.commit.committer import Committer
from logstore.commit.produce import append_table
from logstore.directory.tails import PartitionTail, TopicTails, decode_tail, encode_tail
from logstore.files import OsFileSystem
from logstore.store import LogStore

ROOT = Path(__file__).resolve().parents[3]
PARTITIONS = 300


def rows(count: int, partitions: int, tag: bytes = b"v") -> pa.Table:
    return pa.table(
        {
            "key": [b"k%d" % row for row in range(count)],
            "value": [b"%s%d" % (tag, row) for row in range(count)],
            "partition": pa.array([row % partitions for row in range(count)], pa.int32()),
        }
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[LogStore]:
    with LogStore(tmp_path / "store", create=True) as opened:
        opened.create_topic("wide", partitions=PARTITIONS, configs={"cleanup.policy": "compact"})
        yield opened


class Counting(OsFileSystem):
    """Counts what is opened and synced, by the kind of file."""

    def __init__(self) -> None:
        self.opened: Counter[str] = Counter()
        self.synced_directories: Counter[str] = Counter()

    def open(self, path: str, **how: bool):  # type: ignore[no-untyped-def]
        self.opened[_kind(path)] += 1
        return super().open(path, **how)

    def fsync_dir(self, path: str) -> None:
        self.synced_directories[_kind(path)] += 1
        super().fsync_dir(path)


def _kind(path: str) -> str:
    folder, name = os.path.split(path)
    return "staged" if name.endswith(".batches") else name if name in ("ends", "tails", "plan", "wide.t") else folder


def test_a_batch_over_all_partitions_reads_what_they_share_once(store: LogStore) -> None:
    with LogStore(store.path, fs=Counting()) as opened:
        fs = opened.fs
        assert isinstance(fs, Counting)
        for tag in (b"a", b"b"):
            fs.opened.clear()
            fs.synced_directories.clear()
            opened.append("wide", rows(PARTITIONS, PARTITIONS, tag))
            assert fs.opened["staged"] <= 3
            assert fs.opened["ends"] <= 10
            assert fs.opened["wide.t"] <= 10
            assert sum(fs.synced_directories.values()) <= 40, "not one for each partition"
        topic = opened.topic("wide")
        assert opened.ends(topic).high_watermarks == (2,) * PARTITIONS
        Committer(opened).flush(topic)
        for number in (0, 255, 256, PARTITIONS - 1):
            found = [record.value for record in opened.reader(topic, number).records(0)]
            assert found == [b"a%d" % number, b"b%d" % number]


def test_a_few_partitions_of_many_cost_what_a_few_cost(store: LogStore) -> None:
    store.append("wide", rows(PARTITIONS, PARTITIONS))
    with LogStore(store.path, fs=Counting()) as opened:
        assert isinstance(opened.fs, Counting)
        opened.append("wide", rows(10, 10))
        logs = sum(count for path, count in opened.fs.opened.items() if "/logs/" in path)
        assert 0 < logs <= 10 * 6


def test_what_a_writer_holds_is_bounded_however_many_partitions_there_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A block of 64 KiB for each of 10,000 partitions would be 640 MB."""
    monkeypatch.setattr(staging, "_HELD_BYTES_MAX", 256 << 10)
    monkeypatch.setattr(staging, "_BLOCKS_MAX", 4)
    with LogStore(tmp_path / "store", create=True) as opened:
        opened.create_topic("wide", partitions=50)
        opened.append("wide", rows(40_000, 50))  # spills several times
        topic = opened.topic("wide")
        for number in (0, 7, 49):
            found = [record.value for record in opened.reader(topic, number).records(0)]
            assert found == [b"v%d" % row for row in range(number, 40_000, 50)]


def test_tails_say_nothing_when_they_are_torn_or_foreign(tmp_path: Path) -> None:
    fs, path = OsFileSystem(), str(tmp_path / "tails")
    from logstore.directory.tail import Tail

    tail = PartitionTail.of_now(7, 42, Tail(1, 2, -1, 4, 5, 6, 7), 3)
    assert decode_tail(encode_tail(tail)) == tail
    assert decode_tail(encode_tail(PartitionTail.of_now(7, 42, Tail()))) == PartitionTail.of_now(7, 42, Tail())
    with TopicTails(fs, path) as tails:
        assert tails.read_many([0, 9]) == [None, None]
        tails.write(9, tail)
        assert tails.read_many([0, 9, 10]) == [None, tail, None]
        assert tails.not_of_this_boot([8, 9, 10]) == [8, 10]
        tails.forget(9)
        assert tails.read(9) is None
    torn = bytearray(encode_tail(tail))
    torn[20] ^= 1
    assert decode_tail(bytes(torn)) is None
    assert decode_tail(b"") is None


@pytest.mark.parametrize("length", [12, 60, 100, 110])
def test_a_torn_slot_is_as_good_as_none(store: LogStore, length: int) -> None:
    """Whatever a kill leaves of it, the end is looked for, also where the log has lost what staging still has."""
    topic = store.topic("wide")
    Committer(store)
    for tag in (b"a", b"b"):
        append_table(Committer(store), "wide", rows(3, 3, tag))
    with store.tails(topic) as tails:
        known = tails.read_many([0, 1, 2])
    path = Path(store.layout.tails(topic.id))
    slots = bytearray(path.read_bytes())
    assert len(slots) >= 3 * 128
    for number, tail in enumerate(known):
        assert tail is not None
        newer = encode_tail(PartitionTail.of_now(tail.sequence + 1, tail.end_offset + 1, tail.tail, 0))
        slots[number * 128 : number * 128 + length] = newer[:length]
    path.write_bytes(slots)
    assert decode_tail(bytes(slots[:128])) is None
    log = Path(store.layout.partition(topic.partition(1)), "0" * 20 + ".log")
    os.truncate(log, log.stat().st_size // 2)
    append_table(Committer(store), "wide", rows(3, 3, b"c"))
    for number in range(3):
        found = [record.value for record in store.reader(topic, number).records(0)]
        assert found == [b"%s%d" % (tag, number) for tag in (b"a", b"b", b"c")]


def test_a_tail_file_of_an_older_release_is_removed_when_the_end_was_looked_for(store: LogStore) -> None:
    topic = store.topic("wide")
    store.append("wide", rows(1, 1))
    old = Path(store.layout.topic_state(topic.id), "0.tail")
    old.write_bytes(b"an older release believes this")
    store.forget_tail(topic, 0)
    store.append("wide", rows(1, 1))
    assert not old.exists()
    assert store.ends(topic).high_watermarks[0] == 2


FEW_FILES = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
from compaction_job.job import compact, plan
from logstore.upkeep.backup import backup
from logstore.upkeep.recovery import recover
from logstore.store import LogStore

with LogStore(sys.argv[1]) as store:
    topic = store.topic("wide")
    plan(store)
    report = compact(store, force=True, roll_active=False)
    assert not report.problems and not report.failed, report
    backup(store, sys.argv[2])
    assert not any(found.found_damage for found in recover(store, topic))
    store.project_checkpoints()
    for name in store.topic_names():
        store.delete_topic(name)
"""


def test_nothing_needs_more_open_files_because_there_are_many_partitions_or_segments(tmp_path: Path) -> None:
    """With a lock file a partition, or the files of every segment open, 100 descriptors are not enough."""
    with LogStore(tmp_path / "store", create=True) as store:
        store.create_topic("wide", partitions=110)
        store.append("wide", rows(110, 110))
        store.create_topic("long", configs={"segment.bytes": 200})
        long = (
            rows(60, 1)
            .append_column("pad", [[b"x" * 60] * 60])
            .drop_columns(["value"])
            .rename_columns(["key", "partition", "value"])
        )
        append_table(Committer(store), "long", long, options=staging.EncodeOptions(batch_size=100))
        assert len(store.partition_state(store.topic("long"), 0).segments) == 60
    done = subprocess.run(
        [sys.executable, "-c", FEW_FILES, str(tmp_path / "store"), str(tmp_path / "copy")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with LogStore(tmp_path / "copy") as copy:
        assert copy.ends(copy.topic("wide")).high_watermarks == (1,) * 110


FEW_FILES_MANY_TOPICS = """
import resource, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
from logstore.upkeep.backup import backup
from logstore.store import LogStore

with LogStore(sys.argv[1]) as store:
    backup(store, sys.argv[2])
"""


def test_a_backup_holds_the_leases_of_many_topics_with_one_descriptor(tmp_path: Path) -> None:
    with LogStore(tmp_path / "store", create=True) as opened:
        for number in range(120):
            opened.create_topic(f"t{number}")
    command = [sys.executable, "-c", FEW_FILES_MANY_TOPICS, str(tmp_path / "store"), str(tmp_path / "copy")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    with LogStore(tmp_path / "copy") as copy:
        assert len(copy.topic_names()) == 120


def test_small_appends_write_what_the_usual_way_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Byte for byte, over rolls, index entries, partitions that were never written to, and times that go back."""
    found = []
    for least in (1, 1 << 30):
        rng = random.Random(seed)
        monkeypatch.setattr("logstore.commit.apply.PARTITIONS_MIN", least)
        monkeypatch.setattr("logstore.commit.small_appends.PARTITIONS_MIN", least)
        root = tmp_path / str(least)
        clock = ManualClock(1_700_000_000_000)
        with LogStore(root, create=True, clock=clock) as opened:
            configs = {"segment.bytes": 3_000, "index.interval.bytes": 300, "segment.ms": 50_000}
            opened.create_topic("wide", partitions=20, configs=configs)
            for _ in range(12):
                count = rng.choice((3, 25, 60))
                table = pa.table(
                    {
                        "key": [b"k%d" % rng.randrange(9) for _ in range(count)],
                        "value": [bytes(rng.randrange(120)) for _ in range(count)],
                        "timestamp": pa.array(
                            [clock.now_ms() - rng.randrange(40_000) for _ in range(count)], pa.int64()
                        ),
                        "partition": pa.array([rng.randrange(20) for _ in range(count)], pa.int32()),
                    }
                )
                append_table(Committer(opened), "wide", table, options=staging.EncodeOptions(batch_size=200))
                clock.advance(rng.choice((10, 10_000, 60_000)))
                if rng.random() < 0.2:
                    Committer(opened).flush(opened.topic("wide"))
            topic = opened.topic("wide")
            ends = opened.ends(topic).high_watermarks
            with opened.tails(topic) as tails:
                slots = [
                    tail and (tail.end_offset, tail.tail, tail.leader_epoch) for tail in tails.read_many(range(20))
                ]
            files = {
                f"{path.parent.name}/{path.name}": path.read_bytes()
                for path in Path(opened.layout.logs).glob("wide-*/*")
                if path.name != "partition.metadata" and not (path.suffix.endswith("index") and not path.stat().st_size)
            }
            found.append((ends, slots, files))
            read = [[record.offset for record in opened.reader(topic, number).records(0)] for number in range(20)]
            assert read == [list(range(end)) for end in ends]
    assert found[0] == found[1]
    assert len(found[0][2]) > 60


def test_a_flush_of_many_partitions_leaves_no_mark_of_a_failed_sync(store: LogStore) -> None:
    store.append("wide", rows(PARTITIONS, PARTITIONS))
    topic = store.topic("wide")
    ends = Committer(store).flush(topic)
    assert ends.recovery_points == ends.high_watermarks == (1,) * PARTITIONS
    assert not [name for name in os.listdir(store.layout.topic_state(topic.id)) if name.endswith(".unsynced")]
