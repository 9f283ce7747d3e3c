"""A group that no longer fits a segment once it is rewritten goes on in the next one, as appends do."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from compaction.lab import NOW_MS, Lab
from logstore.cleaner.filter import FilterSettings
from logstore.cleaner.outputs import first_base, output_bytes_max
from logstore.cleaner.rewrite import GroupWriter
from logstore.cleaner.work import CleaningOptions
from logstore.limits import INT32_MAX, Limits
from logstore.partition.producer_state import AppendOrigin
from logstore.records.columns import columns_of
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.record import Record
from logstore.records.table import BASE_OFFSET, LAST_OFFSET, MAGIC, new_table

ZSTD = 4
OPENED = CleaningOptions(recompress_codec_id=0)


def packed_lab(root: Path, *, batches: int = 60, segment_bytes: int = 20_000, transactions: bool = False) -> Lab:
    """Compressed to a small part of what it is: opened, it fills many segments."""
    root.mkdir(exist_ok=True)
    lab = Lab(root, segment_bytes=segment_bytes, message_timestamp_before_max_ms=1 << 62)
    with lab.open() as log:
        for number in range(batches):
            records = [Record(b"%d-%d" % (number, at), b"v" * 400, NOW_MS + number) for at in range(20)]
            if not transactions:
                log.append(records, codec_id=ZSTD)
                continue
            options = BatchOptions(
                codec_id=ZSTD, transactional=True, producer_id=number, producer_epoch=0, base_sequence=0
            )
            log.append_batches(encode_batch(columns_of(records), options), origin=AppendOrigin.CLIENT)
            if number >= 5:  # each is open across some others
                log.append_marker(commit=number % 2 == 0, producer_id=number - 5, producer_epoch=0)
        for number in range(max(batches - 5, 0), batches) if transactions else ():
            log.append_marker(commit=False, producer_id=number, producer_epoch=0)
        log.roll()
        lab.end = log.log_end_offset
    return lab


def files_of(lab: Lab) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(lab.directory).iterdir()) if path.suffix != ".deleted"}


def test_what_is_opened_stays_within_segment_bytes(tmp_path: Path) -> None:
    lab = packed_lab(tmp_path)
    before = lab.records()
    assert sum(s.size_bytes for s in lab.state.segments) < 20_000
    report = lab.compact(options=OPENED)
    sizes = [s.size_bytes for s in lab.state.segments[:-1]]
    assert sum(sizes) > 400_000
    assert max(sizes) <= 20_000
    assert report.groups == 1
    assert report.segments_after == len(sizes)
    assert report.after_bytes == report.written_bytes == sum(sizes)
    assert sum(each.records for done in report.cleaned for each in done.outputs) == len(before)
    for name, data in files_of(lab).items():
        assert not name.endswith((".cleaned", ".swap"))
        entry = {int(s.base_offset): s.size_bytes for s in lab.state.segments[:-1]}
        if name.endswith(".log") and int(name[:20]) in entry:
            assert len(data) == entry[int(name[:20])]
    assert lab.records() == before
    for start in range(0, lab.end, 37):
        assert lab.records(start) == [r for r in before if r.offset >= start]
    with lab.open() as log:
        assert list(log.records()) == before
    # the next pass finds nothing to do: neither to open, nor to join what was just apart
    assert lab.compact(NOW_MS + 1, options=OPENED).groups_changed == 0


def test_a_batch_larger_than_a_segment_has_one_for_itself(tmp_path: Path) -> None:
    lab = packed_lab(tmp_path, batches=6)
    before = lab.records()
    lab.reconfigure(segment_bytes=4_000)
    lab.compact(options=OPENED)
    assert [s.size_bytes > 4_000 for s in lab.state.segments[:-1]] == [True] * 6
    assert lab.records() == before


def test_a_batch_no_reader_could_hold_unpacked_keeps_its_codec(tmp_path: Path) -> None:
    """It came from elsewhere: this store packs nothing so large."""
    limits = Limits(batch_bytes=6_000, read_buffer_bytes=6_000, decompressed_bytes=64 << 10)
    lab = packed_lab(tmp_path, batches=6)
    with lab.open() as log:
        log.append([Record(b"small", b"v", NOW_MS)], codec_id=ZSTD)
        log.roll()
        lab.end = log.log_end_offset
    before = lab.records()
    lab.compact(options=OPENED, limits=limits)
    assert lab.records() == before
    with lab.open() as log:
        headers = [header for segment in log.segments for header in segment.headers()]
    assert max(header.size_bytes for header in headers) < 6_000
    assert {header.attributes & 7 for header in headers[:6]} == {ZSTD}
    assert lab.state.oldest_other_codec_ms == -1, "it would be due for ever"


@pytest.mark.parametrize("transactions", [False, True], ids=["plain", "transactions"])
def test_the_same_segments_whatever_the_threads_and_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transactions: bool
) -> None:
    first = packed_lab(tmp_path / "first", transactions=transactions)
    left = []
    for piece_bytes, threads in ((1 << 30, 1), (1, 1), (1, 3), (700, 2), (5_000, 4)):
        monkeypatch.setattr(GroupWriter, "piece_bytes", piece_bytes)
        folder = tmp_path / f"{piece_bytes}-{threads}"
        shutil.copytree(tmp_path / "first", folder)
        lab = Lab(folder, segment_bytes=20_000)
        lab.end = first.end
        lab.compact(threads=threads, options=OPENED)
        left.append(files_of(lab))
    assert len(left[0]) > 30
    assert all(each == left[0] for each in left[1:])


def test_an_aborted_transaction_is_listed_beside_its_marker(tmp_path: Path) -> None:
    lab = packed_lab(tmp_path, transactions=True)
    committed = list(lab.reader().records(0, committed=True))
    lab.compact(options=OPENED)
    assert len(lab.state.segments) > 10
    # aborted data went at once; all of its markers stay, each listed in the segment that has it
    listed: dict[int, list[int]] = {}
    with lab.open() as log:
        bases = [segment.base_offset for segment in log.segments]
        for segment in log.segments:
            listed[segment.base_offset] = [entry.last_offset for entry in segment.txn_index.entries()]
    assert sum(map(len, listed.values())) > 5
    for at, base in enumerate(bases[:-1]):
        assert all(base <= offset < bases[at + 1] for offset in listed[base])
    for start in (0, lab.end // 3, lab.end // 2):
        found = list(lab.reader().records(start, committed=True))
        assert found == [r for r in committed if r.offset >= start]


def test_a_full_index_begins_a_new_segment(tmp_path: Path) -> None:
    """Written with sparse indexes, rewritten with dense ones: a segment has more batches than an index has entries."""
    lab = Lab(tmp_path, segment_bytes=10_000, index_interval_bytes=4_096, segment_index_bytes=96)
    for number in range(40):
        lab.append([Record(b"k%d" % (number % 30), b"v" * 100, NOW_MS + number)])
    lab.append([Record(b"last", b"v", NOW_MS + 99)], roll=True)
    before = lab.records()
    lab.reconfigure(index_interval_bytes=0)
    lab.compact()
    assert len(lab.state.segments) > 3
    for path in Path(lab.directory).glob("*index"):
        if int(path.name[:20]) != lab.state.segments[-1].base_offset:
            assert path.stat().st_size <= 96
    assert lab.records() == [r for r in before if r.key not in {b"k%d" % n for n in range(10)} or r.offset >= 30]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, INT32_MAX),  # as Kafka's: a group by its rules stays one segment
        ({"codec_id": 0}, 1_000),
        ({"codec_id": ZSTD}, 1_000),
        ({"merge_bytes": 5}, 1_000),
        ({"expired_before_ms": 5}, INT32_MAX),
    ],
)
def test_how_large_an_output_may_become(options: dict[str, int], expected: int) -> None:
    settings = FilterSettings(0, 0, 0, 0, **options)
    assert output_bytes_max(settings, 1_000) == expected


@pytest.mark.parametrize(
    ("magic", "base", "last", "next_offset", "expected"),
    [
        (2, 70, 90, 50, 70),
        (1, -1, 90, 50, 50),
        (0, -1, INT32_MAX + 90, 50, 90),  # too far from what was written before
    ],
)
def test_where_a_segment_begins(magic: int, base: int, last: int, next_offset: int, expected: int) -> None:
    table = new_table(1)
    table[:] = np.int64(0)
    table[0, MAGIC], table[0, BASE_OFFSET], table[0, LAST_OFFSET] = magic, base, last
    assert first_base(table, next_offset) == expected
