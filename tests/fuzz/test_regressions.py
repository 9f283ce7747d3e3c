"""What fuzzing found, one test a finding, with the smallest input that shows it."""

from __future__ import annotations

import os
import struct
import tracemalloc
from pathlib import Path

import pytest
from crc32c import crc32c

from fuzz.directories import NOW_MS, PARTITION, STATE, Sound, on_disk, open_log, open_reader, sound
from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.directory.state import read_state
from logstore.errors import (
    CorruptBatch,
    CorruptState,
    DamagedLog,
    DuramenError,
    InvalidRecord,
    OffsetOverflow,
)
from logstore.files import OS_FILES
from logstore.limits import Limits
from logstore.partition import reader as reader_module
from logstore.partition.producer_state import AppendOrigin
from logstore.partition.reading import read_chunks
from logstore.records.columns import columns_of
from logstore.records.decoder import upconvert
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.legacy import decode_legacy
from logstore.records.record import Record
from logstore.records.table import LAST_OFFSET
from logstore.segment.batches import read_batches
from reference.fetching import Isolation
from reference.partition_writer import PartitionWriter


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "_LOOKS_MAX", 2)
    monkeypatch.setattr(reader_module, "_LOOK_AGAIN_S", 0.0)


def damaged(base: Sound, name: str, at: int, data: bytes) -> dict[str, bytes]:
    before = base.files[name]
    return {**base.files, name: before[:at] + data + before[at + len(data) :]}


def batch(base_offset: int, records: int = 1, **options: int) -> bytes:
    rows = [Record(b"key", b"value", NOW_MS) for _ in range(records)]
    return encode_batch(columns_of(rows), BatchOptions(base_offset=base_offset, **options))  # type: ignore[arg-type]


def resealed(data: bytes) -> bytes:
    return data[:17] + struct.pack(">I", crc32c(data[21:])) + data[21:]


# --- offsets, which no checksum covers --------------------------------------------------------------------------------


def moved(base: Sound, number: int, by: int) -> tuple[dict[str, bytes], str, int]:
    """Batch `number` of the log with another base offset, its file and position."""
    name, position, _, _ = base.batches()[number]
    (offset,) = struct.unpack_from(">q", base.files[name], position)
    return damaged(base, name, position, struct.pack(">q", offset + by)), name, position


@pytest.mark.parametrize("by", [1, 5, 1 << 13, 1 << 40, -1, -7])
@pytest.mark.parametrize("start_at_the_batch", [False, True])
def test_a_batch_with_a_moved_offset_is_neither_delivered_nor_passed_over(by: int, start_at_the_batch: bool) -> None:
    base = sound("own")
    number = 20
    files, name, _ = moved(base, number, by)
    (offset,) = struct.unpack_from(">q", base.files[name], base.batches()[number][1])
    with on_disk(files) as root:
        reader = open_reader(root, base)
        got = []
        with pytest.raises(DuramenError) as caught:  # noqa: PT012 (what came before counts)
            for record in reader.records(offset if start_at_the_batch else 0):
                got.append(record)
        assert caught.value.file == os.path.join(root, str(PARTITION), name)
        assert caught.value.position is not None
        assert all(record == base.records[record.offset] for record in got)
        reader.close()


@pytest.mark.parametrize("by", [1, 1 << 13, 1 << 40, -1])
def test_recovery_does_not_keep_a_batch_with_a_moved_offset(by: int) -> None:
    base = sound("own")
    files, name, position = moved(base, 20, by)
    with on_disk(files) as root, open_log(root, base.config, clean=False) as log:
        kept = list(log.records())
        assert kept == list(base.records.values())[: len(kept)]
        assert 0 < len(kept) < len(base.records)
        assert [os.path.basename(cut.file) for cut in log.recovery.cuts] == [name]
        assert log.recovery.cuts[0].position <= position
        assert log.recovery.quarantined


def test_a_wrapper_with_a_moved_offset_is_not_delivered() -> None:
    """Only opening an old compressed message tells where its records begin."""
    base = sound("formats-0")
    wrappers = [
        number
        for number, (name, position, _, magic) in enumerate(base.batches()[:-1])
        if magic == 1 and base.files[name][position + 17] & 7
    ]
    for number in wrappers:
        files, _, _ = moved(base, number, -1)
        with on_disk(files) as root:
            reader = open_reader(root, base)
            got = []
            with pytest.raises(DuramenError):  # noqa: PT012 (what came before counts)
                for record in reader.records(0):
                    got.append(record)
            assert all(record == base.records[record.offset] for record in got)
            reader.close()
    assert wrappers


@pytest.mark.parametrize("start", [0, 1])
def test_a_segment_is_not_passed_over_when_a_length_hides_its_batches(start: int) -> None:
    """A length beyond the end makes a batch look like one that is still being written."""
    base = sound("own")
    name, position, _, _ = base.batches()[0]
    with on_disk(damaged(base, name, position + 8, b"\x7f")) as root:
        reader = open_reader(root, base)
        with pytest.raises(CorruptBatch) as caught:
            list(reader.records(start))
        assert caught.value.where() == {
            "file": os.path.join(root, str(PARTITION), name),
            "position": position,
            "offset": 0,
        }
        reader.close()


def test_a_lookup_by_time_does_not_answer_with_a_moved_batch() -> None:
    base = sound("own")
    files, _, _ = moved(base, 20, 1)
    with on_disk(files) as root:
        reader = open_reader(root, base)
        for timestamp_ms in base.times_ms.values():
            try:
                found = reader.offset_for_timestamp(timestamp_ms)
            except CorruptBatch:
                continue
            assert found is not None
            assert base.times_ms[found.offset] == found.timestamp_ms
        reader.close()


# --- files cut between two batches ------------------------------------------------------------------------------------


@pytest.mark.parametrize("last_segment", [False, True])
def test_a_reader_notices_a_file_cut_between_two_batches(last_segment: bool) -> None:
    base = sound("own")
    names = sorted({name for name, _, _, _ in base.batches()})
    name = names[-1] if last_segment else names[2]
    position = [position for file, position, _, _ in base.batches() if file == name][-1]
    with on_disk({**base.files, name: base.files[name][:position]}) as root:
        reader = open_reader(root, base)
        with pytest.raises(DamagedLog) as caught:
            list(reader.records(0))
        assert caught.value.file == os.path.join(root, str(PARTITION), name)
        assert caught.value.position == position
        reader.close()


def test_a_log_said_to_be_closed_that_ends_inside_a_batch_is_recovered_before_it_grows() -> None:
    base = sound("own")
    name = base.batches()[-1][0]
    with on_disk({**base.files, name: base.files[name][:-3]}) as root:
        with open_log(root, base.config, clean=True) as log:
            assert not log.recovery.clean
            kept = list(log.records())
            log.append([Record(b"next", b"value", NOW_MS)])
        with open_log(root, base.config, clean=False) as log:
            assert not log.recovery.found_damage
            assert list(log.records())[:-1] == kept
        assert kept == list(base.records.values())[: len(kept)]


def test_a_time_index_that_knows_of_offsets_behind_the_end_is_made_anew() -> None:
    """It was believed, and the log could then not be closed."""
    base = sound("own")
    name = base.batches()[-1][0].replace(".log", ".timeindex")
    entry = base.files[name][:8] + struct.pack(">i", 1 << 30)
    with on_disk({**base.files, name: entry}) as root:
        with open_log(root, base.config, clean=True) as log:
            log.append([Record(b"next", b"value", NOW_MS)])
        assert Path(root, str(PARTITION), name).read_bytes() != entry


def test_a_lookup_by_time_does_not_pass_over_a_damaged_batch() -> None:
    base = sound("own")
    name, position, size, _ = base.batches()[0]
    files = damaged(base, name, position + size - 1, b"\xff")
    with on_disk(files) as root:
        reader = open_reader(root, base)
        with pytest.raises(CorruptBatch) as caught:
            reader.offset_for_timestamp(0)
        assert caught.value.where()["position"] == position
        reader.close()


# --- appends that never ended -----------------------------------------------------------------------------------------


def test_an_old_message_from_a_coordinator_is_refused() -> None:
    """It rolled to a new segment for ever."""
    base = sound("transactions-0")
    message = bytes.fromhex("00000000000000640000001257e7496e0000000000026b31000000027631")
    with on_disk(base.files) as root, open_log(root, base.config, clean=True) as log:
        with pytest.raises(InvalidRecord):
            log.append_batches(message, origin=AppendOrigin.COORDINATOR)
        assert log.log_end_offset == base.log_end_offset


def test_an_append_for_which_no_offsets_are_left_is_refused(tmp_path: Path) -> None:
    """It rolled to a new segment for ever."""
    with PartitionWriter.open(str(tmp_path / "t-0"), partition=PARTITION, clean=True, long_lived=False) as log:
        last = (1 << 63) - 3
        log.append_batches(batch(last), origin=AppendOrigin.REPLICATION)
        with pytest.raises(OffsetOverflow) as caught:
            log.append([Record(b"key", b"value", NOW_MS)] * 2)
        assert caught.value.offset == last + 1
        assert log.log_end_offset == last + 1
        assert [record.offset for record in log.records()] == [last]


# --- recovery ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec_id", [0, 4, 6])
def test_a_marker_nobody_can_read_ends_a_recovered_log(codec_id: int, tmp_path: Path) -> None:
    """Its checksum holds; the index had entries behind the cut, or the log could not be opened at all."""
    config = LogConfig.from_mapping({"index.interval.bytes": "0"})
    marker = bytearray(batch(4, producer_id=7, producer_epoch=0, transactional=True, control=True))
    marker[22] |= codec_id
    directory = tmp_path / str(PARTITION)
    directory.mkdir()
    good = b"".join(batch(offset) for offset in range(4))
    (directory / "00000000000000000000.log").write_bytes(good + resealed(bytes(marker)) + batch(5))
    log = PartitionWriter.open(
        str(directory), partition=PARTITION, config=config, clean=False, clock=ManualClock(NOW_MS), long_lived=False
    )
    assert [record.offset for record in log.records()] == [0, 1, 2, 3]
    assert [cut.position for cut in log.recovery.cuts] == [len(good)]
    assert log.segments[0].offset_index.last_offset() <= 3
    log.close()


# --- limits -----------------------------------------------------------------------------------------------------------


def test_a_state_file_above_the_limit_is_a_typed_error(tmp_path: Path) -> None:
    path = tmp_path / STATE
    path.write_bytes(b"x" * 5000)
    with pytest.raises(CorruptState) as caught:
        read_state(OS_FILES, str(path), limits=Limits(side_file_bytes=100_000))
    assert caught.value.file == str(path)


def test_the_read_buffer_is_never_larger_than_the_limit() -> None:
    base = sound("own")
    limits = Limits(read_buffer_bytes=500)
    with on_disk(base.files) as root, open_log(root, base.config, clean=True) as log:
        view = log._view(Isolation.LOG_END)
        ends = []
        for chunk in read_chunks(view, 0, limits=limits):
            assert len(chunk.data) <= limits.read_buffer_bytes
            ends.append(int(chunk.table[-1, LAST_OFFSET]) + 1)
        assert ends[-1] == base.log_end_offset
        for segment in log.segments:
            for chunk in read_batches(segment.log, 0, segment.size_bytes, limits=limits):
                assert len(chunk.data) <= limits.read_buffer_bytes


def test_one_old_message_does_not_cost_a_buffer_of_a_quarter_gibibyte() -> None:
    message = bytes.fromhex("00000000000000640000001257e7496e0000000000026b31000000027631")
    legacy = decode_legacy(message, limits=Limits())
    tracemalloc.start()
    try:
        upconvert(legacy)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
