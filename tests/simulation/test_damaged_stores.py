"""Stores damaged at random, recovered, and judged by an oracle that knows every batch they held.

What recovery is held to: every record whose batch is intact somewhere (in its log, in another file of the partition, in
staging) is readable at its offset; nothing is readable that was not written; the losses it reports are exactly what is
not readable any more; a dry run says the same before; `verify` says before that something is wrong, and finds nothing
afterwards; what read_committed readers see is the same where no record was lost; appends and compaction go on.
`DURAMEN_SOAK=1` (or `make soak`) tries a thousand stores.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import typer

from compaction_job import compact
from duramen import cli
from logstore.clock import ManualClock
from logstore.commit.committer import Committer
from logstore.commit.produce import append_table, table_of
from logstore.errors import DuramenError
from logstore.files import OS_FILES, File, OsFile, OsFileSystem
from logstore.partition.producer_state import AppendOrigin
from logstore.records.columns import columns_of
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.header import read_header
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.upkeep.retention import delete_records
from reference.partition_writer import writing

SOAK = os.environ.get("DURAMEN_SOAK") == "1"
STORES = int(os.environ.get("DURAMEN_DAMAGED_STORES", "1000" if SOAK else "12"))
STORES_OF_ONE_MAKE = 10
FAILURES_MAX = 5
NOW_MS = 1_700_000_000_000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


class _UnsyncedFile(OsFile):
    def fsync(self) -> None:
        pass


class UnsyncedFiles(OsFileSystem):
    """Without waiting for the disk: what recovery makes of the bytes is judged here, not durability."""

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        flags = os.O_CLOEXEC | (os.O_RDWR if writable or create else os.O_RDONLY)
        if create:
            flags |= os.O_CREAT | (os.O_EXCL if exclusive else 0)
        return _UnsyncedFile(os.open(path, flags, 0o644), path)

    def fsync_dir(self, path: str) -> None:
        pass


FILES = UnsyncedFiles()


@pytest.fixture
def seed(seed: int) -> int:
    """The short form damages the same stores in every run; new ones are for `DURAMEN_SOAK=1` and `DURAMEN_SEED=N`."""
    return seed if SOAK or "DURAMEN_SEED" in os.environ else 20261118


# --- stores -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Batch:
    """A batch of the store as it was, by the bytes that its checksum and its offset make up."""

    file: Path
    position: int
    data: bytes
    first_offset: int
    end_offset: int
    control: bool


@dataclass
class Log:
    """One partition as it was."""

    batches: list[Batch]
    records: dict[int, Record]
    committed: set[int]
    log_start: int
    high_watermark: int
    recovery_point: int


@dataclass
class Made:
    root: Path
    copy: Path
    logs: dict[tuple[str, int], Log]
    compacted: dict[str, bool]
    names: dict[str, str]  # of topics, by id


def rows(rng: random.Random, count: int, at_ms: int) -> list[Record]:
    out = []
    for number in range(count):
        value = None if rng.random() < 0.1 else rng.randbytes(rng.randrange(60)) + b"x" * rng.randrange(40)
        out.append(Record(b"key-%d" % rng.randrange(30), value, at_ms + number, (("h", b"1"),) * rng.randrange(2)))
    return out


def make_store(root: Path, rng: random.Random) -> dict[str, bool]:
    """A few topics with several segments each; the last commits are not flushed, and staged still."""
    kinds = {}
    with LogStore(root, create=True, clock=ManualClock(NOW_MS), lock_wait_ms=2000, fs=FILES) as store:
        committer = Committer(store)
        for number in range(rng.choice((2, 3))):
            name = f"t{number}"
            compacted = number == 0 or rng.random() < 0.3
            configs: dict[str, object] = {
                "segment.bytes": rng.choice((600, 1500, 4000)),
                "index.interval.bytes": rng.choice((100, 400, 4096)),
                "compression.type": rng.choice(("producer", *CODECS[1:])),
                "cleanup.policy": "compact" if compacted else "delete",
                "retention.ms": -1,
                "min.cleanable.dirty.ratio": 0,
                "file.delete.delay.ms": 0,
            }
            if rng.random() < 0.2:
                configs["message.timestamp.type"] = "LogAppendTime"
            topic = store.create_topic(name, partitions=rng.choice((1, 2)), configs=configs)
            kinds[name] = compacted
            at_ms = NOW_MS
            for batch in range(rng.randrange(4, 9)):
                at_ms += 1000
                # Not `store.append`, which flushes by itself: of some batches staging is to be the redo log still.
                append_table(committer, name, table_of(rows(rng, rng.randrange(1, 40), at_ms)))
                if rng.random() < 0.4:
                    committer.flush(topic)
                if compacted and batch == 3:
                    committer.flush(topic)
                    compact(store=store, topics=[name], force=True, roll_active=True, retention=False)
            if rng.random() < 0.3:
                committer.flush(topic)
                committer.ledger.maintain()  # a checkpoint, and fewer commits
                delete_records(store, topic, 0, before_offset=rng.randrange(store.high_watermark(topic, 0) + 1))
        if rng.random() < 0.6:
            kinds["txn"] = False
            write_transactions(store, rng)
        store.project_checkpoints()
    return kinds


def write_transactions(store: LogStore, rng: random.Random) -> None:
    """A topic as a broker leaves it: idempotent producers, transactions that committed, aborted or are open."""
    topic = store.create_topic("txn", configs={"segment.bytes": rng.choice((900, 1500)), "retention.ms": -1})
    sequences, open_ = dict.fromkeys(range(1, 5), 0), set()
    with writing(store, topic, 0, what="test") as log:
        for _ in range(rng.randrange(15, 40)):
            producer = rng.randrange(1, 5)
            if producer in open_ and rng.random() < 0.6:
                log.append_marker(commit=rng.random() < 0.5, producer_id=producer, producer_epoch=0)
                open_.discard(producer)
                continue
            batch = rows(rng, rng.randrange(1, 8), NOW_MS)
            options = BatchOptions(
                transactional=producer > 1, producer_id=producer, producer_epoch=0, base_sequence=sequences[producer]
            )
            log.append_batches(encode_batch(columns_of(batch), options), origin=AppendOrigin.CLIENT)
            sequences[producer] += len(batch)
            open_ |= {producer} - {1}
        for producer in open_ if rng.random() < 0.7 else ():
            log.append_marker(commit=True, producer_id=producer, producer_epoch=0)


def read_log(root: Path, store: LogStore, name: str, number: int) -> Log:
    topic = store.topic(name)
    state, ends = store.partition_state(topic, number), store.ends(topic)
    high_watermark = ends.high_watermarks[number]
    batches = []
    for entry in state.segments:
        path = root / "logs" / f"{name}-{number}" / f"{entry.base_offset:020d}.log"
        file, position = OS_FILES.open(str(path)), 0
        while (header := read_header(file, position, file.size())) is not None:
            data = file.pread(header.size_bytes, position)
            assert header.base_offset is not None
            batches.append(Batch(path, position, data, header.base_offset, header.next_offset, header.control))
            position = header.end_position
        file.close()
    return Log(
        batches,
        {record.offset: record for record in read_records(store, name, number)},
        {record.offset for record in read_records(store, name, number, committed=True)},
        state.log_start_offset,
        high_watermark,
        ends.recovery_points[number],
    )


def read_records(store: LogStore, name: str, number: int, *, committed: bool = False) -> Iterator[Record]:
    reader = store.reader(store.topic(name), number)
    try:
        yield from reader.records(reader.log_start_offset(), committed=committed)
    finally:
        reader.close()


def made(folder: Path, rng: random.Random) -> Made:
    root, copy = folder / "store", folder / "copy"
    kinds = make_store(root, rng)
    with LogStore(root, lock_wait_ms=2000, fs=FILES) as store:
        logs = {
            (topic.name, number): read_log(root, store, topic.name, number)
            for topic in store.topics()
            for number in range(topic.partitions)
        }
        names = {topic.id: topic.name for topic in store.topics()}
    shutil.copytree(root, copy)
    return Made(root, copy, logs, kinds, names)


def staged_offsets(store: Made, files: set[Path]) -> dict[tuple[str, int], set[int]]:
    """Offsets that staging has, as long as none of its files was touched."""
    found: dict[tuple[str, int], set[int]] = {key: set() for key in store.logs}
    # The ledger's commits say which of it is the topic's.
    if any("staging" in path.parts or {"ledger", "commits"} <= set(path.parts) for path in files):
        return found
    for key, log in store.logs.items():
        found[key] = set(range(log.recovery_point, log.high_watermark))
    return found


# --- damage -----------------------------------------------------------------------------------------------------------

Damage = Callable[[random.Random, Path], None]


def flip(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)


def block(rng: random.Random, path: Path) -> None:
    data = bytearray(path.read_bytes())
    if data:
        at, size = rng.randrange(len(data)), rng.choice((3, 20, 200, 1000))
        what = rng.choice((rng.randbytes(size), bytes(size), b"\xff" * size))
        data[at : at + size] = what[: len(data) - at]
        path.write_bytes(data)


def torn(rng: random.Random, path: Path) -> None:
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def longer(rng: random.Random, path: Path) -> None:
    with open(path, "ab") as file:
        file.write(rng.choice((bytes(300), rng.randbytes(rng.randrange(1, 300)))))


def emptied(rng: random.Random, path: Path) -> None:
    path.write_bytes(b"")


def missing(rng: random.Random, path: Path) -> None:
    path.unlink()


def swapped(rng: random.Random, path: Path) -> None:
    """With another file of its kind in the same folder."""
    others = [each for each in path.parent.iterdir() if each.suffix == path.suffix and each != path and each.is_file()]
    if others:
        _swap(path, rng.choice(sorted(others)))


def swapped_afar(rng: random.Random, path: Path) -> None:
    """With a file of its kind in another folder. Not the records: no checksum says to which partition they belong."""
    name = "[0-9]" if path.name.isdigit() else f"*{path.suffix}" if path.suffix else path.name
    others = [each for each in path.parent.parent.glob(f"*/{name}") if each.parent != path.parent and each.is_file()]
    if others and path.suffix != ".log":
        _swap(path, rng.choice(sorted(others)))


def overwritten(rng: random.Random, path: Path) -> None:
    """By another file of its kind in the same folder."""
    others = [each for each in path.parent.iterdir() if each.suffix == path.suffix and each != path and each.is_file()]
    if others:
        path.write_bytes(rng.choice(sorted(others)).read_bytes())


def _swap(path: Path, other: Path) -> None:
    mine, its = path.read_bytes(), other.read_bytes()
    path.write_bytes(its)
    other.write_bytes(mine)


DAMAGES: tuple[Damage, ...] = (flip, flip, flip, block, block, torn, torn, longer, emptied, missing)
DAMAGES += (swapped, swapped_afar, overwritten)

#: patterns below the store, and how often they are chosen
KINDS: dict[str, tuple[tuple[str, ...], int]] = {
    "log": (("logs/t*/*.log",), 10),
    "indexes": (("logs/t*/*.index", "logs/t*/*.timeindex", "logs/t*/*.txnindex"), 3),
    "snapshots": (("logs/t*/*.snapshot",), 1),
    "epochs": (("logs/t*/leader-epoch-checkpoint",), 1),
    "state": (("state/*/[0-9]",), 2),
    "tails": (("state/*/tails",), 1),
    "ends": (("state/*/ends",), 1),
    "staging": (("staging/*-plan/*",), 2),
    "checkpoints": (("logs/*-checkpoint",), 1),
    "ledger": (("ledger/*/_delta_log/*", "ledger/*/*.parquet", "ledger/*.gate"), 3),
    "metadata": (("logs/t*/partition.metadata",), 1),
    "topics": (("topics/*.t", "state/*/topic"), 1),
    "version": (("version",), 1),
    "locks": (("locks/*", "locks/*/*"), 1),
}
#: folders that may be gone with all they hold
FOLDERS = ("ledger", "ledger/*", "locks", "staging", "staging/*-plan", "state/*", "logs/t*")
FOLDER_KIND, FOLDER_WEIGHT = "folder", 2


#: a kind to look at more closely, by hand
ONLY = os.environ.get("DURAMEN_DAMAGED_KIND")


@dataclass
class Done:
    touched: set[Path] = field(default_factory=set)
    kinds: Counter[str] = field(default_factory=Counter)
    story: list[str] = field(default_factory=list)


def in_order(made: Made, paths: Iterable[Path]) -> list[Path]:
    """The same order whenever the store is made: ids of topics and plans are new each time."""

    def key(path: Path) -> tuple[str, int, int]:
        relative = path.relative_to(made.root)
        found = path.stat()
        if relative.parts[0] in ("staging", "ledger"):
            return (relative.parts[0], found.st_mtime_ns, found.st_size)
        return ("/".join(made.names.get(part, part) for part in relative.parts), 0, 0)

    return sorted(paths, key=key)


def damage(rng: random.Random, made: Made) -> Done:
    root, done = made.root, Done()
    before = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    weights = {kind: weight for kind, (_, weight) in KINDS.items()} | {FOLDER_KIND: FOLDER_WEIGHT}
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = ONLY or rng.choices(list(weights), list(weights.values()))[0]
        if kind == FOLDER_KIND:
            folders = in_order(made, (path for pattern in FOLDERS for path in root.glob(pattern) if path.is_dir()))
            folder = rng.choice(folders)
            shutil.rmtree(folder)
            done.kinds[kind] += 1
            done.story.append(f"removed {folder.relative_to(root)}")
            continue
        files = in_order(made, (path for pattern in KINDS[kind][0] for path in root.glob(pattern) if path.is_file()))
        if not files:
            continue
        path, how = rng.choice(files), rng.choice(DAMAGES)
        how(rng, path)
        if kind == "version" and path.exists() and path.read_bytes().strip().isdigit():
            path.write_bytes(before[path])  # another version is not damage that anybody can see: the store is refused
            continue
        done.kinds[kind] += 1
        done.story.append(f"{how.__name__} {path.relative_to(root)}")
    after = {path: path.read_bytes() for path in root.rglob("*") if path.is_file()}
    done.touched = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    return done


# --- the command ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    code: int
    document: dict[str, Any]

    def partition(self, key: tuple[str, int]) -> dict[str, Any]:
        return next(each for each in self.document["partitions"] if (each["topic"], each["partition"]) == key)

    def losses(self, key: tuple[str, int]) -> list[tuple[int, int, bool]]:
        return [(e["base_offset"], e["end_offset"], e["at_most"]) for e in self.partition(key)["losses"]]


@pytest.fixture(autouse=True)
def _commands_built_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Building the parser of all commands takes half as long as a recovery."""
    monkeypatch.setattr(cli, "app", typer.main.get_command(cli.app))


def duramen(root: Path, *arguments: str) -> Answer:
    """The command as an operator runs it, with its exit code; damage and nothing else may make that 3."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(["--store", str(root), "--output", "json", *arguments])
    assert code in (0, 3), f"{arguments}: exit {code}: {err.getvalue()}"
    if arguments == ("verify",) and code == 3 and not out.getvalue():  # so damaged that it cannot be opened
        return Answer(code, {"sound": False, "partitions": [], "error": json.loads(err.getvalue())})
    assert out.getvalue(), f"{arguments}: exit {code}: {err.getvalue()}"
    answer = Answer(code, json.loads(out.getvalue()))
    assert (code == 3) == (not answer.document["sound"]), f"{arguments}: exit {code}: {answer.document}"
    return answer


# --- the oracle -------------------------------------------------------------------------------------------------------


def survivors(log: Log, staged: set[int]) -> set[int]:
    """Offsets whose batch is intact: its bytes are in some `.log` of the partition, or in staging."""
    folder = log.batches[0].file.parent if log.batches else None
    files = [path.read_bytes() for path in sorted(folder.glob("*.log"))] if folder else []
    found = set(staged)
    for batch in log.batches:
        if any(batch.data in data for data in files):
            found |= set(range(batch.first_offset, batch.end_offset))
    return found & log.records.keys()


def check(made: Made, done: Done, planned: Answer, recovered: Answer, intact: dict[tuple[str, int], set[int]]) -> int:
    """Everything the module's first lines promise; returns how many records were lost."""
    lost_records = 0
    ledger = touched(done, "ledger")
    with LogStore(made.root, lock_wait_ms=2000, fs=FILES) as store:
        for key, log in made.logs.items():
            found = known_start(made, done, store, key)
            assert found.keys() <= log.records.keys(), f"{key}: offsets that were never written, or deleted"
            for offset, record in found.items():
                assert record == log.records[offset], f"{key}: another record at {offset}"
            must = intact[key]
            assert must <= found.keys(), f"{key}: intact records are gone: {sorted(must - found.keys())}"
            lost = log.records.keys() - found.keys()
            ranges = recovered.losses(key)
            # Without a version, or a topic's file, no more is looked at; without a ledger nobody knows what is staged.
            if not ledger and not touched(done, "version") and not touched(done, "topics"):
                assert ranges == planned.losses(key), f"{key}: the dry run said {planned.losses(key)}"
            named = {offset for low, high, _ in ranges for offset in range(low, high)}
            unknown_end = ledger and touched(done, "ends")
            unknown_gaps = made.compacted[key[0]] and state_touched(made, done, store, key) and log_shorter(made, log)
            if not unknown_gaps and not unknown_end:
                lost_records += len(lost)
                assert lost <= named, f"{key}: lost and not reported: {sorted(lost - named)}, reported {ranges}"
            assert not named & found.keys(), f"{key}: reported as lost, but there: {sorted(named & found.keys())}"
            for low, high, at_most in ranges:
                inside = {offset for offset in lost if low <= offset < high}
                if at_most:  # a batch may be kept for its offsets, without a record
                    held = any(batch.first_offset < high and low < batch.end_offset for batch in log.batches)
                    # Without a list nothing tells what compaction took out of a damaged file from what was lost.
                    unlisted = made.compacted[key[0]] and state_touched(made, done, store, key)
                    assert inside or held or unlisted, f"{key}: nothing was lost from {low} to {high}"
                else:
                    inside |= {batch.first_offset for batch in log.batches if batch.control}
                    assert inside >= set(range(low, high)), f"{key}: {low} to {high} reported, {len(inside)} lost"
            state = store.partition_state(store.topic(key[0]), key[1])
            assert {o for e in state.losses for o in range(e.base_offset, e.end_offset)} == named, f"{key}: not kept"
            if not unknown_end:
                assert store.high_watermark(store.topic(key[0]), key[1]) == log.high_watermark
            if not ranges and not lost:
                committed = {record.offset for record in read_records(store, *key, committed=True)} & found.keys()
                assert committed == log.committed, f"{key}: read_committed sees {sorted(committed ^ log.committed)}"
    assert recovered.code == 3 or not lost_records
    return lost_records


def touched(done: Done, name: str) -> bool:
    return any(name in path.parts for path in done.touched)


def known_start(made: Made, done: Done, store: LogStore, key: tuple[str, int]) -> dict[int, Record]:
    """The partition's records; where nothing tells its log start any more, without those that were deleted before."""
    found = {record.offset: record for record in read_records(store, *key)}
    if state_touched(made, done, store, key) and touched(done, "log-start-offset-checkpoint"):
        return {offset: record for offset, record in found.items() if offset >= made.logs[key].log_start}
    return found


def log_shorter(made: Made, log: Log) -> bool:
    """A file of the log lacks its end or is gone: in a compacted topic nothing but the list tells what it held."""
    for path in {batch.file for batch in log.batches}:
        original = made.copy / path.relative_to(made.root)
        if not path.exists() or path.stat().st_size < original.stat().st_size:
            return True
    return False


def state_touched(made: Made, done: Done, store: LogStore, key: tuple[str, int]) -> bool:
    path = Path(store.layout.partition_state(store.topic(key[0]).id, key[1]))
    return path in done.touched


def give_settings(made: Made, done: Done) -> None:
    """Nothing of a topic is compacted whose settings nobody knows: both files that had them were damaged."""
    with LogStore(made.root, lock_wait_ms=2000, fs=FILES) as store:
        unknown = [topic for topic in store.topics() if topic.settings_unknown]
    for topic in unknown:
        for path in (made.root / "topics" / f"{topic.name}.t", made.root / "state" / topic.id / "topic"):
            assert path in done.touched, f"{topic.name}: its settings were in {path}"
        policy = "compact" if made.compacted[topic.name] else "delete"
        settings = [f"cleanup.policy={policy}", "retention.ms=-1"]
        with contextlib.redirect_stdout(io.StringIO()):
            arguments = ["topics", "alter", topic.name, *(word for each in settings for word in ("--config", each))]
            assert cli.run(["--store", str(made.root), *arguments]) == 0


def check_goes_on(made: Made, done: Done, rng: random.Random) -> None:
    """Verify, append, read, compact; verify and recover again, of some stores: that finds what it found before."""
    check_sound(made.root)
    give_settings(made, done)
    with LogStore(made.root, clock=ManualClock(NOW_MS + 10_000_000), lock_wait_ms=2000, fs=FILES) as store:
        ends = {topic.name: store.ends(topic).high_watermarks for topic in store.topics()}
        for name, high_watermarks in ends.items():
            given = rows(rng, 20, NOW_MS + 5_000_000)
            store.append(name, given)
            topic = store.topic(name)
            found = [
                record
                for number, base in enumerate(high_watermarks)
                for record in store.reader(topic, number).records(base)
            ]
            assert sorted(r.value or b"" for r in found) == sorted(r.value or b"" for r in given)
        losses = {key: store.partition_state(store.topic(key[0]), key[1]).losses for key in made.logs}
        for name, compacted in made.compacted.items():
            if compacted:
                report = compact(store=store, topics=[name], force=True, roll_active=True, retention=False)
                assert not report.failed, [run.reason for run in report.failed]
        for key, before in losses.items():
            assert store.partition_state(store.topic(key[0]), key[1]).losses == before
    if rng.random() < 0.3:
        check_sound(made.root)
        assert duramen(made.root, "recover").code == 0


def check_sound(root: Path) -> None:
    answer = duramen(root, "verify")
    assert answer.code == 0, answer.document


def check_readmitted(made: Made, done: Done) -> None:
    """Somebody finds the undamaged bytes (in an old backup, say) and puts them into quarantine."""
    back: dict[tuple[str, int], set[int]] = {key: set() for key in made.logs}
    for key, log in made.logs.items():
        for region in (made.root / "logs" / f"{key[0]}-{key[1]}").glob("quarantine/*/*.from-*"):
            origin, position = region.name.split(".from-")
            whole = (made.copy / "logs" / f"{key[0]}-{key[1]}" / origin).read_bytes()
            region.write_bytes(whole[int(position) : int(position) + region.stat().st_size])
            for batch in log.batches:
                if batch.data in region.read_bytes():
                    back[key] |= set(range(batch.first_offset, batch.end_offset)) & log.records.keys()
    answer = duramen(made.root, "recover", "--readmit")
    assert not any(each["losses"] or each["held_back"] for each in answer.document["partitions"])
    with LogStore(made.root, lock_wait_ms=2000, fs=FILES) as store:
        for key, log in made.logs.items():
            found = known_start(made, done, store, key)
            assert found.items() <= log.records.items()
            assert back[key] <= found.keys(), f"{key}: not put back: {sorted(back[key] - found.keys())}"
            losses = store.partition_state(store.topic(key[0]), key[1]).losses
            assert not {o for e in losses for o in range(e.base_offset, e.end_offset)} & found.keys()


def one_store(made: Made, rng: random.Random) -> tuple[Done, int]:
    shutil.rmtree(made.root)
    shutil.copytree(made.copy, made.root)
    done = damage(rng, made)
    try:
        staged = staged_offsets(made, done.touched)
        intact = {key: survivors(log, staged[key]) for key, log in made.logs.items()}
        before = content(made.root)
        found = duramen(made.root, "verify")
        assert content(made.root) == before, "verify changed files"
        planned = duramen(made.root, "recover", "--dry-run")
        assert content(made.root) == before, "a dry run changed files"
        assert planned.code == found.code, f"verify exits {found.code}, recover --dry-run {planned.code}"
        recovered = duramen(made.root, "recover", "--yes")
        assert recovered.code == found.code, f"verify exits {found.code}, recover {recovered.code}"
        lost = check(made, done, planned, recovered, intact)
        if not any(path.suffix == ".log" for path in done.touched):
            assert not lost
        if rng.random() < 0.3:
            check_readmitted(made, done)
        check_goes_on(made, done, rng)
    except (AssertionError, DuramenError, OSError, LookupError) as error:
        raise AssertionError(f"{'; '.join(done.story)}: {type(error).__name__}: {error}") from error
    return done, lost


def content(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in root.rglob("*")
        if path.is_file() and "locks" not in path.parts and path.suffix != ".gate"  # locks say nothing
    }


@pytest.mark.timeout(0 if SOAK or STORES > 12 else 900)
def test_recover_costs_what_was_damaged_and_nothing_else(tmp_path: Path, seed: int) -> None:
    kinds: Counter[str] = Counter()
    failures: list[str] = []
    lost = 0
    store: Made | None = None
    first = int(os.environ.get("DURAMEN_DAMAGED_FIRST", "0"))
    for number in range(first, first + STORES):
        group, rng = number // STORES_OF_ONE_MAKE, random.Random(f"{seed} {number}")
        if store is None or number % STORES_OF_ONE_MAKE == 0:
            shutil.rmtree(tmp_path / "made", ignore_errors=True)
            store = made(tmp_path / "made", random.Random(f"{seed} make {group}"))
        try:
            done, cost = one_store(store, rng)
        except AssertionError as error:
            failures.append(f"store {number} of DURAMEN_SEED={seed}: {error}")
            print(failures[-1], flush=True)
            if len(failures) >= FAILURES_MAX:
                break
            continue
        kinds += done.kinds
        lost += cost
        if SOAK and (number + 1) % 50 == 0:
            print(f"{number + 1 - first} of {STORES} stores of seed {seed}, {len(failures)} failures", flush=True)
    assert not failures, "\n".join(failures)
    if STORES >= 12 and not ONLY:
        assert lost, "no store lost anything: the damage is too gentle to show something"
    print(f"{STORES} stores of seed {seed}: damaged {dict(kinds)}, {lost} records lost and reported")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("log", "staging")])
def test_damage_beside_the_logs_costs_nothing(tmp_path: Path, seed: int, kind: str) -> None:
    """One file of the kind, damaged in some ways, one after the other."""
    rng = random.Random(f"{seed} {kind}")
    store = made(tmp_path / "made", rng)
    ways = list(dict.fromkeys(DAMAGES))
    for how in ways if SOAK else rng.sample(ways, 3):
        shutil.rmtree(store.root)
        shutil.copytree(store.copy, store.root)
        files = sorted(path for pattern in KINDS[kind][0] for path in store.root.glob(pattern) if path.is_file())
        if not files:
            return
        path = rng.choice(files)
        how(rng, path)
        answer = duramen(store.root, "recover")
        assert not any(each["losses"] for each in answer.document["partitions"]), f"{how.__name__} {path}"
        with LogStore(store.root, lock_wait_ms=2000, fs=FILES) as opened:
            for key, log in store.logs.items():
                assert {r.offset: r for r in read_records(opened, *key)} == log.records, f"{how.__name__} {path}"
