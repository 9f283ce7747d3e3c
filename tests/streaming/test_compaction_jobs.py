"""A pass by Spark's tasks: jobs of some groups each leave the files that one process leaves."""

from __future__ import annotations

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from compaction.lab import NOW_MS, Lab
from compaction_job import spark_engine
from compaction_job.spark_engine import SparkEngine
from logstore.cleaner.cleaner import run_pass
from logstore.cleaner.engine import Engine, LocalEngine
from logstore.cleaner.grouping import SourceSegment
from logstore.cleaner.work import Cleaned, CleaningOptions
from logstore.errors import CorruptBatch
from logstore.files import OS_FILES
from logstore.partition.producer_state import AppendOrigin
from logstore.records.columns import columns_of
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.offset_map import MapSettings
from logstore.records.record import Record

SEGMENT_BYTES = 1_000
PRODUCERS = 3


def records(rng: random.Random) -> list[Record]:
    keys = (b"k%d" % rng.randrange(30) for _ in range(rng.randint(1, 5)))
    return [Record(key, None if rng.random() < 0.1 else rng.randbytes(20), NOW_MS) for key in keys]


def lab_of(root: Path, rng: random.Random, *, transactions: bool) -> Lab:
    """Many small segments; transactions are open across several of them, and a good part is aborted."""
    root.mkdir(exist_ok=True)
    lab = Lab(root, segment_bytes=SEGMENT_BYTES, message_timestamp_before_max_ms=1 << 62)
    sequences = dict.fromkeys(range(PRODUCERS), 0)
    opened: set[int] = set()
    with lab.open() as log:
        for _ in range(150):
            producer = rng.randrange(PRODUCERS)
            if not transactions or rng.random() < 0.4:
                log.append(records(rng))
            elif producer in opened and rng.random() < 0.3:
                log.append_marker(commit=rng.random() < 0.5, producer_id=producer, producer_epoch=0)
                opened.discard(producer)
            else:
                batch = records(rng)
                options = BatchOptions(
                    transactional=True, producer_id=producer, producer_epoch=0, base_sequence=sequences[producer]
                )
                log.append_batches(encode_batch(columns_of(batch), options), origin=AppendOrigin.CLIENT)
                sequences[producer] += len(batch)
                opened.add(producer)
        for producer in sorted(opened):
            log.append_marker(commit=False, producer_id=producer, producer_epoch=0)
        log.roll()
        lab.end = log.log_end_offset
    return lab


def compact(
    lab: Lab, engine: Engine, swapped: list[Cleaned], options: CleaningOptions | None = None
) -> dict[str, bytes]:
    """The files a pass leaves; the groups that were swapped in are added, also when it fails."""
    os.makedirs(lab.folder)
    work = replace(lab.work(MapSettings(buffer_bytes=1 << 20)), options=options or CleaningOptions())
    run_pass(OS_FILES, work, engine=engine, state_path=lab.state_path, folder=lab.folder, swapped=swapped.append)
    return {path.name: path.read_bytes() for path in Path(lab.directory).iterdir() if path.suffix != ".deleted"}


def again(lab: Lab, root: Path) -> Lab:
    """A copy of it."""
    shutil.copytree(Path(lab.directory).parent, root)
    twin = Lab(root, segment_bytes=SEGMENT_BYTES)
    twin.end = lab.end
    return twin


@pytest.mark.parametrize("transactions", [False, True])
def test_the_same_files_whatever_the_jobs(
    spark: Any, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, transactions: bool
) -> None:
    lab = lab_of(tmp_path / "first", random.Random(seed), transactions=transactions)
    groups: list[Cleaned] = []
    expected = compact(again(lab, tmp_path / "local"), LocalEngine(OS_FILES), groups)
    assert len(groups) > 8
    for job_bytes, at_once in ((1, 1), (1, 3), (SEGMENT_BYTES * 3, 9), (1 << 30, 1000)):
        monkeypatch.setattr(spark_engine, "JOB_BYTES", job_bytes)
        engine = SparkEngine(spark, groups_at_once=at_once)
        swapped: list[Cleaned] = []
        assert compact(again(lab, tmp_path / f"{job_bytes}-{at_once}"), engine, swapped) == expected
        assert [each.counts for each in swapped] == [each.counts for each in groups]


def test_a_group_of_several_segments_is_the_same_from_spark(spark: Any, tmp_path: Path) -> None:
    lab = Lab(tmp_path / "first", segment_bytes=SEGMENT_BYTES)
    lab.append(*([Record(b"k%d" % number, b"v" * 300, NOW_MS)] * 3 for number in range(60)), codec_id=4, roll=True)
    opened = CleaningOptions(recompress_codec_id=0)
    groups: list[Cleaned] = []
    expected = compact(again(lab, tmp_path / "local"), LocalEngine(OS_FILES), groups, opened)
    assert any(len(each.outputs) > 1 for each in groups)
    swapped: list[Cleaned] = []
    engine = SparkEngine(spark, groups_at_once=4)
    assert compact(again(lab, tmp_path / "spark"), engine, swapped, opened) == expected
    assert [each.outputs for each in swapped] == [each.outputs for each in groups]


def test_what_a_job_did_before_a_group_failed_is_swapped_in(spark: Any, tmp_path: Path) -> None:
    lab = Lab(tmp_path, segment_bytes=SEGMENT_BYTES)
    lab.append(*([Record(b"k%d" % number, b"old" * 30, NOW_MS)] for number in range(60)), roll=True)
    compact(lab, LocalEngine(OS_FILES), [])
    shutil.rmtree(lab.folder)
    lab.append([Record(b"k%d" % number, b"new", NOW_MS) for number in range(0, 60, 3)], roll=True)
    damaged = sorted(Path(lab.directory).glob("*.log"))[3]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    base = int(damaged.stem)
    swapped: list[Cleaned] = []
    with pytest.raises(CorruptBatch, match=damaged.stem):
        compact(lab, SparkEngine(spark, groups_at_once=1000), swapped)
    assert [each.changed for each in swapped] == [True] * 3
    assert swapped[-1].base_offset < base


@pytest.mark.parametrize(
    ("sizes", "cores", "at_once", "expected"),
    [
        ([100] * 9, 2, 9, [5, 4]),  # a job for each core
        ([100] * 9, 1, 9, [9]),
        ([100] * 9, 2, 2, [1] * 9),  # so little room for outputs
        ([100] * 20, 2, 7, [3] * 6 + [2]),  # two fit
        ([600] * 3, 1, 9, [1, 1, 1]),
        ([200] * 10, 2, 10, [4, 3, 3]),
        ([1000, 10, 10, 10], 2, 8, [1, 3]),
        ([], 2, 1, []),
    ],
)
def test_how_groups_become_jobs(
    monkeypatch: pytest.MonkeyPatch, sizes: list[int], cores: int, at_once: int, expected: list[int]
) -> None:
    monkeypatch.setattr(spark_engine, "JOB_BYTES", 512)
    groups = [(SourceSegment(number, size, 0, 0),) for number, size in enumerate(sizes)]
    jobs = spark_engine._jobs(groups, cores, at_once)
    assert [group for job in jobs for group in job] == groups
    assert [len(job) for job in jobs] == expected
