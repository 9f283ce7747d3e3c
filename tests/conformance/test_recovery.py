"""The same damaged directory given to Kafka's loader and to ours: the same log comes out, to the byte.

Where we lose less on purpose the difference is stated: what is cut off above the recovery point, and intact segments
behind it, are set aside in `quarantine/`, where Kafka deletes them; and `recover` keeps every intact batch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import shutil
import struct
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.kafka import Kafka, KafkaError, LogState, Op, batch, record
from conformance.workload import (
    CODECS,
    NOW_MS,
    PARTITION,
    UnsyncedFiles,
    as_kafka,
    assert_same_files,
    assert_same_state,
    for_kafka,
    partition_files,
    random_records,
    state_of,
)
from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.limits import DEFAULT_LIMITS
from logstore.partition.recovery_report import RecoveryReport
from logstore.partition.salvage import Partition
from logstore.partition.salvage_planning import plan_salvage
from logstore.partition.salvage_writing import carry_out
from logstore.records.header import read_header
from reference.fetching import Isolation
from reference.partition_writer import PartitionWriter

SOAK = os.environ.get("DURAMEN_SOAK") == "1"
DIRECTORIES = 400 if SOAK else 12
LATER_MS = NOW_MS + 60_000
CONFIG: dict[str, Any] = {"segment.bytes": 2500, "index.interval.bytes": 200, "segment.index.bytes": 4096}


def write(kafka: Kafka, directory: Path, rng: random.Random, *, crash: bool) -> LogState:
    """A log of several segments with transactions and all codecs."""
    while len((written := _write(kafka, directory, rng, crash=crash)).segments) <= 2:
        shutil.rmtree(directory)  # few and small records, by chance
    return written


def _write(kafka: Kafka, directory: Path, rng: random.Random, *, crash: bool) -> LogState:
    sequences = dict.fromkeys(range(1, 4), 0)
    ops: list[dict[str, Any]] = []
    for at in range(rng.randint(40, 90)):
        now_ms = NOW_MS + 10 * at
        ops.append(Op.clock(now_ms))
        producer = rng.choice(list(sequences))
        kind = rng.random()
        records = random_records(rng, now_ms)
        if kind < 0.15:
            ops.append(Op.marker(rng.choice(("commit", "abort")), producer, 0, leader_epoch=at // 20))
        elif kind < 0.6:
            ops.append(Op.append_records(for_kafka(records), at // 20, codec=rng.choice(CODECS)))
        else:
            fields: dict[str, Any] = {"producer_id": producer, "producer_epoch": 0, "transactional": True}
            fields["base_sequence"] = sequences[producer]
            records = random_records(rng, now_ms, no_timestamp=0)  # without a time a producer expires at once
            sequences[producer] += len(records)
            ops.append(Op.append_records(for_kafka(records), at // 20, codec=rng.choice(CODECS), **fields))
    run = kafka.append(directory, ops, CONFIG, now_ms=NOW_MS, crash=crash)
    assert {result.error for result in run.results} == {None}
    return run.closed


def logs(directory: Path, recovery_point: int) -> list[Path]:
    """The `.log` files an unclean start looks through."""
    found = sorted(directory.glob("*.log"))
    first = max((at for at, path in enumerate(found) if int(path.stem) <= recovery_point), default=0)
    return found[first:]


def numbered(directory: Path, recovery_point: int, suffix: str) -> list[Path]:
    bases = {path.stem for path in logs(directory, recovery_point)}
    return [path for path in sorted(directory.glob(f"*.{suffix}")) if path.stem in bases]


# --- damage -----------------------------------------------------------------------------------------------------------

Damage = Callable[[random.Random, Path, int], None]


def truncate_a_log(rng: random.Random, directory: Path, recovery_point: int) -> None:
    path = rng.choice(logs(directory, recovery_point))
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def truncate_the_last_log(rng: random.Random, directory: Path, recovery_point: int) -> None:
    path = logs(directory, recovery_point)[-1]
    os.truncate(path, rng.randrange(path.stat().st_size + 1))


def overwrite(path: Path, position: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(position)
        file.write(data)


def nonsense(rng: random.Random, directory: Path, recovery_point: int) -> None:
    path = rng.choice(logs(directory, recovery_point))
    size = path.stat().st_size
    if size > 200:
        length = rng.randrange(120, 1000)
        position = rng.randrange(size)
        kind = rng.randrange(3)
        data = rng.randbytes(length) if kind == 0 else bytes(length) if kind == 1 else b"\xff" * length
        overwrite(path, position, data)


def nonsense_behind_the_end(rng: random.Random, directory: Path, recovery_point: int) -> None:
    path = rng.choice(logs(directory, recovery_point))
    with open(path, "ab") as file:
        file.write(rng.choice((bytes(500), rng.randbytes(rng.randrange(1, 300)), b"\xff" * 80)))


def flipped_bit(rng: random.Random, directory: Path, recovery_point: int) -> None:
    """Of something a checksum covers, or the checksum; what no checksum covers is the neighbours' to contradict."""
    path = rng.choice(logs(directory, recovery_point))
    starts = batch_positions(path)
    if starts:
        begin, end = rng.choice(starts)
        at = rng.randrange(begin + 17, end)
        overwrite(path, at, bytes([path.read_bytes()[at] ^ (1 << rng.randrange(8))]))


def batch_positions(path: Path) -> list[tuple[int, int]]:
    file = UnsyncedFiles().open(str(path))
    out = []
    position = 0
    while (header := read_header(file, position, path.stat().st_size)) is not None:
        out.append((position, header.end_position))
        position = header.end_position
    file.close()
    return out


def lost_files(*suffixes: str) -> Damage:
    def lose(rng: random.Random, directory: Path, recovery_point: int) -> None:
        for suffix in suffixes:
            for path in numbered(directory, recovery_point, suffix):
                if rng.random() < 0.5:
                    path.unlink()

    return lose


def spoilt_files(*suffixes: str) -> Damage:
    def spoil(rng: random.Random, directory: Path, recovery_point: int) -> None:
        for suffix in suffixes:
            for path in numbered(directory, recovery_point, suffix):
                if rng.random() < 0.6:
                    size = path.stat().st_size
                    path.write_bytes(rng.randbytes(rng.choice((size, size // 2, size + 3, 7))))

    return spoil


def stray_files(rng: random.Random, directory: Path, recovery_point: int) -> None:
    """Index files without a log, deleted files, a snapshot of what lies behind the end."""
    (directory / f"{77777:020}.index").write_bytes(bytes(16))
    (directory / f"{77777:020}.timeindex").write_bytes(bytes(24))
    (directory / f"{3:020}.txnindex").write_bytes(bytes(34))
    first = logs(directory, 0)[0]
    shutil.copy(first, directory / f"{5:020}.log.deleted")
    snapshots = sorted(directory.glob("*.snapshot"))
    if snapshots:
        shutil.copy(snapshots[-1], directory / f"{88888:020}.snapshot")


def lost_epochs(rng: random.Random, directory: Path, recovery_point: int) -> None:
    if recovery_point == 0:  # else what is below it would have to be scanned for them
        (directory / "leader-epoch-checkpoint").unlink(missing_ok=True)


DAMAGES: dict[str, Damage] = {
    "nothing": lambda rng, directory, recovery_point: None,
    "a log cut short": truncate_a_log,
    "the last log cut short": truncate_the_last_log,
    "a block of nonsense": nonsense,
    "nonsense behind the end": nonsense_behind_the_end,
    "a flipped bit": flipped_bit,
    "lost offset indexes": lost_files("index"),
    "lost time indexes": lost_files("timeindex"),
    "lost transaction indexes": lost_files("txnindex"),
    "lost indexes and snapshots": lost_files("index", "timeindex", "txnindex", "snapshot"),
    "lost snapshots": lost_files("snapshot"),
    "spoilt indexes": spoilt_files("index", "timeindex"),
    "spoilt snapshots": spoilt_files("snapshot"),
    "stray files": stray_files,
    "lost epochs": lost_epochs,
}


# --- both loaders -----------------------------------------------------------------------------------------------------


def opened(directory: Path, *, clean: bool = False, **options: Any) -> PartitionWriter:
    return PartitionWriter.open(
        str(directory),
        partition=PARTITION,
        config=LogConfig.from_mapping(CONFIG),
        clean=clean,
        clock=ManualClock(LATER_MS),
        fs=UnsyncedFiles(),
        **options,
    )


def recover(
    kafka: Kafka, damaged: Path, root: Path, *, recovery_point: int = 0, unclean: bool = True, log_start_offset: int = 0
) -> tuple[Path, Path, RecoveryReport]:
    """Both load a copy of `damaged`; what they make of it must be the same. Returns our directory, Kafka's and our
    report.
    """
    ours, theirs = root / "ours" / str(PARTITION), root / "kafka" / str(PARTITION)
    shutil.copytree(damaged, ours)
    shutil.copytree(damaged, theirs)
    options: dict[str, Any] = {"recovery_point": recovery_point, "log_start_offset": log_start_offset}
    loaded = kafka.load(theirs, CONFIG, now_ms=LATER_MS, unclean=unclean, **options)
    log = opened(ours, clean=not unclean, **options)
    records = [as_kafka(r) for r in log.records(isolation=Isolation.LOG_END)]
    if not any(log.last_stable_offset <= r.offset < loaded.last_stable_offset for r in records):
        # In a gap Kafka names the batch behind it.
        loaded = dataclasses.replace(loaded, last_stable_offset=log.last_stable_offset)
    assert_same_state(state_of(log), loaded, restored_at_ms=LATER_MS)
    log.close()
    assert records == [r for r in kafka.records(theirs) if r.offset >= loaded.log_start_offset]
    assert_same_files(ours, theirs, fewer_snapshots=not unclean)
    return ours, theirs, log.recovery


def assert_nothing_lost(damaged: Path, ours: Path, report: RecoveryReport) -> None:
    """Whatever is no longer in the log is in the quarantine folder: the bytes cut off, and the segments behind."""
    before = {path.name: path.read_bytes() for path in damaged.glob("*.log")}
    after = {path.name: path.read_bytes() for path in ours.glob("*.log")}
    aside = {path.name: path.read_bytes() for path in ours.glob("quarantine/*/*") if path.name != "reason.json"}
    for name, data in before.items():
        if name not in after:
            assert aside[name] == data
        elif len(after[name]) < len(data):
            cut = data[len(after[name]) :]
            assert data.startswith(after[name])
            kept = cut.rstrip(b"\0")  # what preallocation leaves is no loss
            assert not kept or aside[f"{name}.from-{len(after[name])}"] == kept
    assert report.found_damage == (before != after)
    assert report.dropped_bytes == sum(len(before[name]) - len(data) for name, data in after.items())


@pytest.mark.parametrize("damage", DAMAGES)
def test_unclean_start_makes_the_log_kafka_makes(kafka: Kafka, tmp_path: Path, seed: int, damage: str) -> None:
    outcomes: Counter[str] = Counter()
    for number in range(max(DIRECTORIES // 3, 4)):
        rng = random.Random(f"{seed} {damage} {number}")
        damaged = tmp_path / str(number) / "damaged" / str(PARTITION)
        written = write(kafka, damaged, rng, crash=rng.random() < 0.7)
        recovery_point = rng.choice((0, 0, *written.base_offsets, written.log_end_offset))
        DAMAGES[damage](rng, damaged, recovery_point)
        try:
            ours, _, report = recover(kafka, damaged, tmp_path / str(number), recovery_point=recovery_point)
        except BaseException as error:
            raise AssertionError(f"directory {number}, recovery point {recovery_point}, DURAMEN_SEED={seed}") from error
        assert_nothing_lost(damaged, ours, report)
        outcomes["cut"] += bool(report.cuts)
        outcomes["set aside"] += bool(report.quarantined)


@pytest.mark.parametrize("damage", ["a log cut short", "a block of nonsense", "a flipped bit"])
def test_several_damages_at_once(kafka: Kafka, tmp_path: Path, seed: int, damage: str) -> None:
    for number in range(max(DIRECTORIES // 3, 3)):
        rng = random.Random(f"{seed} {damage} {number}")
        damaged = tmp_path / str(number) / "damaged" / str(PARTITION)
        written = write(kafka, damaged, rng, crash=True)
        recovery_point = rng.choice((0, *written.base_offsets))
        for each in (damage, "lost time indexes", "lost transaction indexes", "lost snapshots", "stray files"):
            DAMAGES[each](rng, damaged, recovery_point)
        log_start = rng.choice((0, 0, written.base_offsets[0] + 3))
        ours, _, report = recover(
            kafka, damaged, tmp_path / str(number), recovery_point=recovery_point, log_start_offset=log_start
        )
        assert_nothing_lost(damaged, ours, report)


def test_intact_segments_behind_a_cut_are_set_aside(kafka: Kafka, tmp_path: Path, seed: int) -> None:
    damaged = tmp_path / "damaged" / str(PARTITION)
    written = write(kafka, damaged, random.Random(seed), crash=True)
    first = sorted(damaged.glob("*.log"))[0]
    overwrite(first, 150, b"\0" * 100)
    ours, theirs, report = recover(kafka, damaged, tmp_path)
    assert len(list(theirs.glob("*.log"))) == 1
    aside = sorted(path.name for path in ours.glob("quarantine/*/*.log"))
    assert aside == [f"{base:020}.log" for base in written.base_offsets[1:]]
    assert list(ours.glob("quarantine/*/reason.json"))
    assert [cut.file for cut in report.cuts] == [str(ours / first.name)]
    assert_nothing_lost(damaged, ours, report)


def test_hole_that_kafka_leaves_in_the_log_is_its_end_for_us(kafka: Kafka, tmp_path: Path, seed: int) -> None:
    """A damaged segment without an offset index: Kafka cuts it while making the index, and goes on behind the hole."""
    damaged = tmp_path / "damaged" / str(PARTITION)
    written = write(kafka, damaged, random.Random(seed), crash=True)
    first = sorted(damaged.glob("*.log"))[0]
    overwrite(first, 150, b"\0" * 100)
    first.with_suffix(".index").unlink()
    ours, theirs = tmp_path / "ours" / str(PARTITION), tmp_path / "kafka" / str(PARTITION)
    shutil.copytree(damaged, ours)
    shutil.copytree(damaged, theirs)
    with contextlib.suppress(KafkaError):  # it cannot start where the hole swallowed the end of a transaction
        assert kafka.load(theirs, CONFIG, now_ms=LATER_MS, unclean=True).log_end_offset == written.log_end_offset
    with opened(ours) as log:
        assert log.log_end_offset < written.base_offsets[1]
        assert len(log.segments) == 1
        assert_nothing_lost(damaged, ours, log.recovery)


@pytest.mark.parametrize(
    "damage",
    ["a log cut short", "the last log cut short", "a block of nonsense", "nonsense behind the end", "a flipped bit"],
)
def test_recover_keeps_whatever_kafka_keeps_and_every_intact_batch(
    kafka: Kafka, tmp_path: Path, seed: int, damage: str
) -> None:
    """What `duramen recover` does to a partition, on directories that Kafka recovers, too."""
    for number in range(max(DIRECTORIES // 3, 3)):
        rng = random.Random(f"{seed} {damage} {number}")
        damaged = tmp_path / str(number) / "damaged" / str(PARTITION)
        written = write(kafka, damaged, rng, crash=True)
        before = {r.offset: r for r in kafka.records(damaged)}
        batches = {
            each.stem: [each.read_bytes()[a:b] for a, b in batch_positions(each)] for each in damaged.glob("*.log")
        }
        DAMAGES[damage](rng, damaged, 0)
        ours, theirs = (
            tmp_path / str(number) / "ours" / str(PARTITION),
            tmp_path / str(number) / "kafka" / str(PARTITION),
        )
        shutil.copytree(damaged, ours)
        shutil.copytree(damaged, theirs)
        partition = Partition(
            UnsyncedFiles(),
            str(ours),
            str(PARTITION),
            None,
            written.log_end_offset,
            LogConfig.from_mapping(CONFIG),
            DEFAULT_LIMITS,
            LATER_MS,
        )
        plan = plan_salvage(partition)
        carry_out(partition, plan, str(ours.parent / "state"))
        with opened(ours, keep_offset=written.log_end_offset) as log:
            found = {r.offset: as_kafka(r) for r in log.records(isolation=Isolation.LOG_END)}
            assert log.log_end_offset == written.log_end_offset
        assert found.items() <= before.items()
        lost = {offset for each in plan.losses for offset in range(each.base_offset, each.end_offset)}
        assert before.keys() - found.keys() <= lost
        assert not lost & found.keys()
        whole = sum(each in path.read_bytes() for path in damaged.glob("*.log") for each in batches[path.stem])
        kept = sum(len(batch_positions(each)) for each in ours.glob("*.log"))
        assert kept >= whole, f"directory {number}, DURAMEN_SEED={seed}"
        with contextlib.suppress(KafkaError):  # it cannot start where the end of a transaction is gone
            kafka.load(theirs, CONFIG, now_ms=LATER_MS, unclean=True)
            assert {r.offset for r in kafka.records(theirs)} <= found.keys()


def test_log_that_ends_below_its_start_begins_anew(kafka: Kafka, tmp_path: Path, seed: int) -> None:
    damaged = tmp_path / "damaged" / str(PARTITION)
    written = write(kafka, damaged, random.Random(seed), crash=True)
    start = written.log_end_offset + 100
    ours, theirs = tmp_path / "ours" / str(PARTITION), tmp_path / "kafka" / str(PARTITION)
    shutil.copytree(damaged, ours)
    shutil.copytree(damaged, theirs)
    loaded = kafka.load(theirs, CONFIG, now_ms=LATER_MS, unclean=True, log_start_offset=start)
    with opened(ours, log_start_offset=start) as log:
        assert_same_state(state_of(log), loaded)
        assert (log.log_start_offset, log.log_end_offset) == (start, start)
    assert [path.name for path in ours.glob("*.log")] == [path.name for path in theirs.glob("*.log")]


def test_clean_start_makes_the_log_kafka_makes(kafka: Kafka, tmp_path: Path, seed: int) -> None:
    """Where Kafka rebuilds after a clean stop too: no offset index, a transaction index below its base."""
    rng = random.Random(seed)
    for number, damage in enumerate(("nothing", "lost offset indexes", "spoilt snapshots", "stray files", "epochs")):
        damaged = tmp_path / str(number) / "damaged" / str(PARTITION)
        write(kafka, damaged, rng, crash=False)
        if damage == "epochs":
            (damaged / "leader-epoch-checkpoint").write_text("0\n1\n9 5000\n")  # beyond the log
        else:
            DAMAGES[damage](rng, damaged, 0)
        recover(kafka, damaged, tmp_path / str(number), unclean=False)


def test_transaction_index_of_another_segment_is_rebuilt(kafka: Kafka, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    damaged = tmp_path / "damaged" / str(PARTITION)
    indexes: list[Path] = []
    while len(indexes) < 2:
        shutil.rmtree(damaged, ignore_errors=True)
        write(kafka, damaged, rng, crash=False)
        indexes = sorted(damaged.glob("*.txnindex"))
    indexes[-1].write_bytes(indexes[0].read_bytes())
    recover(kafka, damaged, tmp_path, unclean=False)


# --- what no checksum covers ------------------------------------------------------------------------------------------


def test_overlapping_offsets_are_cut_where_kafka_takes_them(kafka: Kafka, tmp_path: Path) -> None:
    """A batch's offset is outside its checksum. Kafka keeps a batch that repeats offsets; we end the log before it."""
    damaged = tmp_path / "damaged" / str(PARTITION)
    kafka.append(damaged, [Op.append_records([record(b"k", b"v" * 20, NOW_MS + i)]) for i in range(6)], now_ms=NOW_MS)
    path = damaged / f"{0:020}.log"
    begin, _ = batch_positions(path)[4]
    overwrite(path, begin, struct.pack(">q", 1))
    ours, theirs = tmp_path / "ours" / str(PARTITION), tmp_path / "kafka" / str(PARTITION)
    shutil.copytree(damaged, ours)
    shutil.copytree(damaged, theirs)
    kafka.load(theirs, now_ms=LATER_MS, unclean=True)
    assert [r.offset for r in kafka.records(theirs)] == [0, 1, 2, 3, 1, 5]
    with opened(ours) as log:
        assert [r.offset for r in log.records()] == [0, 1, 2, 3]
        assert log.recovery.cuts[0].reason
        assert_nothing_lost(damaged, ours, log.recovery)


# --- interrupted replacements -----------------------------------------------------------------------------------------


def replacements(kafka: Kafka, root: Path, directory: Path, bases: list[int], rng: random.Random) -> dict[str, bytes]:
    """The files compaction would put in place of the segments: every other batch of each, indexed by Kafka."""
    out: dict[str, bytes] = {}
    for base in bases:
        data = (directory / f"{base:020}.log").read_bytes()
        kept = [data[a:b] for at, (a, b) in enumerate(batch_positions(directory / f"{base:020}.log")) if at % 2 == 0]
        scratch = root / f"{base}" / str(PARTITION)
        run = kafka.append(
            scratch,
            [Op.truncate_fully(base), *(Op.append(each, origin="replication", leader_epoch=99) for each in kept)],
            CONFIG | {"segment.bytes": 1 << 20},
            now_ms=LATER_MS,
        )
        assert {result.error for result in run.results} == {None}
        out |= {n: d for n, d in partition_files(scratch).items() if not n.endswith(".snapshot")}
        for kind in ("index", "timeindex"):
            out.setdefault(f"{base:020}.{kind}", b"")
    return out


KINDS = ("log", "index", "timeindex", "txnindex")


def crash_points(new: list[int], old: list[int]) -> dict[str, list[tuple[str, str]]]:
    """States of a directory at which replacing `old` by `new` can stop: renames to do, in order, on a directory that
    holds the old segments and complete `.cleaned` ones.
    """
    cleaned_to_swap = [(f"{b:020}.{k}.cleaned", f"{b:020}.{k}.swap") for b in sorted(new, reverse=True) for k in KINDS]
    to_deleted = [(f"{b:020}.{k}", f"{b:020}.{k}.deleted") for b in sorted(old) for k in KINDS]
    swap_to_plain = [(f"{b:020}.{k}.swap", f"{b:020}.{k}") for b in sorted(new) for k in KINDS]
    every = [*cleaned_to_swap, *to_deleted, *swap_to_plain]
    return {f"after {done} renames": every[:done] for done in range(len(every) + 1)}


@pytest.mark.parametrize("shape", ["one for one", "one for two", "two for two", "emptied"])
def test_interrupted_replacement_is_finished_or_undone_as_by_kafka(
    kafka: Kafka, tmp_path: Path, seed: int, shape: str
) -> None:
    rng = random.Random(seed)
    whole = tmp_path / "whole" / str(PARTITION)
    written = write(kafka, whole, rng, crash=False)
    bases = written.base_offsets
    old = bases[:1] if shape == "one for one" else bases[:2]
    new = old[:1] if shape == "one for two" else old
    if shape == "emptied":
        new, files = old[:1], {f"{old[0]:020}.{kind}": b"" for kind in KINDS[:3]}
        # Kafka would leave it beside the emptied log: a segment without offsets covers no file, it finds. We remove it.
        (whole / f"{old[0]:020}.txnindex").unlink(missing_ok=True)
    else:
        files = replacements(kafka, tmp_path / "scratch", whole, new, rng)
    points = crash_points(new, old)
    names = list(points)
    chosen = names if SOAK else sorted({*rng.sample(names, min(9, len(names))), names[0], names[-1]}, key=names.index)
    for at, name in enumerate(chosen):
        interrupted = tmp_path / str(at) / "damaged" / str(PARTITION)
        shutil.copytree(whole, interrupted)
        for file, data in files.items():
            (interrupted / f"{file}.cleaned").write_bytes(data)
        for source, target in points[name]:
            if (interrupted / source).exists():
                (interrupted / source).rename(interrupted / target)
        try:
            recover(kafka, interrupted, tmp_path / str(at), unclean=rng.random() < 0.5)
        except BaseException as error:
            raise AssertionError(f"{name} of {list(points.values())[-1]}") from error


# --- offset overflow --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unclean", [True, False])
def test_segment_whose_offsets_overflow_is_split_as_by_kafka(kafka: Kafka, tmp_path: Path, unclean: bool) -> None:
    """An old release could leave one; both split it where the offsets no longer fit."""
    offsets = [0, 3, 2**31 - 1, 2**31, 2**31 + 5, 2**32 + 2, 2**32 + 9]
    batches = kafka.build_batches(
        [
            batch([record(b"k", b"v" * 90, NOW_MS + i)], base_offset=offset, leader_epoch=0)
            for i, offset in enumerate(offsets)
        ]
    )
    damaged = tmp_path / "damaged" / str(PARTITION)
    damaged.mkdir(parents=True)
    (damaged / f"{0:020}.log").write_bytes(b"".join(batches))
    if not unclean:  # the index is missing, so the segment is looked through all the same
        (damaged / "leader-epoch-checkpoint").write_text("0\n1\n0 0\n")
    _, theirs, report = recover(kafka, damaged, tmp_path, unclean=unclean)
    assert len(list(theirs.glob("*.log"))) == 3
    assert report.split
    assert not report.found_damage


def test_directory_kafka_cannot_open_is_opened_by_us(kafka: Kafka, tmp_path: Path, seed: int) -> None:
    """Nonsense in a transaction index stops Kafka's loader; it is derived data, so we make it anew."""
    rng = random.Random(seed)
    damaged = tmp_path / "damaged" / str(PARTITION)
    write(kafka, damaged, rng, crash=False)
    expected = [r.offset for r in kafka.records(damaged)]
    for path in damaged.glob("*.log"):
        (damaged / f"{path.stem}.txnindex").write_bytes(b"\x7f" * 34)
    ours, theirs = tmp_path / "ours" / str(PARTITION), tmp_path / "kafka" / str(PARTITION)
    shutil.copytree(damaged, ours)
    shutil.copytree(damaged, theirs)
    with pytest.raises(KafkaError):
        kafka.load(theirs, CONFIG, now_ms=LATER_MS, unclean=True)
    with opened(ours) as log:
        assert not log.recovery.found_damage
        assert [r.offset for r in log.records()] == expected
    for leftover in ours.glob("*.deleted"):
        leftover.unlink()
    assert kafka.dump_findings(ours) == []
