"""Whole partition directories with damage anywhere: readers give what was written or a typed error, recovery gives a
sound log, and an append that is refused leaves no trace.

What the format itself cannot show is left out here, and nothing else: a change of the offset in front of the last
batch (no checksum covers it and no batch follows that would contradict it), and of the leader epoch behind it, which
is no part of a record. Index files have no checksums either: they may make a lookup by time miss, never a read by
offset.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from fuzz.directories import (
    NAMES,
    NOW_MS,
    PARTITION,
    Damage,
    Sound,
    damages,
    on_disk,
    open_log,
    open_reader,
    sound,
)
from logstore.errors import CorruptBatch, DamagedLog, DuramenError
from logstore.partition import reader as reader_module
from logstore.partition.producer_state import AppendOrigin
from logstore.records.record import Record
from reference.fetching import Isolation
from reference.partition_writer import PartitionWriter

OFFSET_BYTES = 8


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader looks again for a second before it believes in damage; here nobody else is at work."""
    monkeypatch.setattr(reader_module, "_LOOKS_MAX", 2)
    monkeypatch.setattr(reader_module, "_LOOK_AGAIN_S", 0.0)


def damaged(base: Sound, data: st.DataObject, names: list[str] | None = None) -> dict[str, bytes]:
    files = dict(base.files)
    changes: list[Damage] = data.draw(damages(sorted(names or files)))
    for change in changes:
        change.apply(files)
    assume(not hides_last_offset(base, files))
    return files


def hides_last_offset(base: Sound, files: dict[str, bytes]) -> bool:
    """Whether the last batch still stands where it stood, with another offset."""
    name, position, size, _ = base.batches()[-1]
    before, after = base.files[name], files.get(name, b"")
    rest = before[position + OFFSET_BYTES : position + size]
    at = after.find(rest)
    while at >= 0:
        if at < OFFSET_BYTES or after[at - OFFSET_BYTES : at] != before[position : position + OFFSET_BYTES]:
            return True
        at = after.find(rest, at + 1)
    return False


def collected(records: Iterator[Record]) -> tuple[list[Record], DuramenError | None]:
    """Records up to the first error; anything but a typed one fails the test."""
    got = []
    try:
        for record in records:
            got.append(record)
    except DuramenError as error:
        return got, error
    return got, None


def check_originals(got: list[Record], originals: dict[int, Record]) -> None:
    offsets = [record.offset for record in got]
    assert offsets == sorted(set(offsets))
    for record in got:
        assert record == originals[record.offset]


def check_place(error: DuramenError, root: str) -> None:
    """Errors about a file's content say which and where."""
    if isinstance(error, CorruptBatch | DamagedLog):
        assert error.file is not None, error
        assert error.file.startswith(root)
        assert error.position is not None, error
        assert error.position >= 0
    else:
        assert error.where(), error


# --- readers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_a_reader_gives_every_record_or_an_error(name: str, data: st.DataObject) -> None:
    base = sound(name)
    files = damaged(base, data)
    start = data.draw(st.sampled_from([0, *base.records]))
    with on_disk(files) as root:
        reader = open_reader(root, base)
        got, error = collected(reader.records(start))
        check_originals(got, base.records)
        if error is None:
            assert [record.offset for record in got] == [offset for offset in base.records if offset >= start]
        else:
            check_place(error, root)
        reader.close()


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_damaged_offset_and_time_indexes_never_change_what_is_read(name: str, data: st.DataObject) -> None:
    base = sound(name)
    hints = [file for file in base.files if file.endswith((".index", ".timeindex", ".snapshot"))]
    files = damaged(base, data, hints)
    start = data.draw(st.sampled_from([0, *base.records]))
    with on_disk(files) as root:
        reader = open_reader(root, base)
        assert list(reader.records(start)) == [record for record in base.records.values() if record.offset >= start]
        reader.close()


@given(data=st.data())
def test_a_committed_reader_gives_only_what_was_written(data: st.DataObject) -> None:
    base = sound("transactions-0")
    files = damaged(base, data)
    with on_disk(files) as root:
        reader = open_reader(root, base)
        got, error = collected(reader.records(0, committed=True))
        check_originals(got, base.records)
        if error is not None:
            check_place(error, root)
        elif all(files.get(file) == base.files[file] for file in base.files if file.endswith(".txnindex")):
            assert {record.offset: record for record in got} == base.committed
        reader.close()


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_lookups_by_time_name_a_record_that_is_there(name: str, data: st.DataObject) -> None:
    base = sound(name)
    files = damaged(base, data)
    times = sorted({record.timestamp_ms for record in base.records.values()})
    timestamp_ms = data.draw(st.sampled_from([-3, -2, -1, 0, *times, times[-1] + 1]))
    with on_disk(files) as root:
        reader = open_reader(root, base)
        try:
            found = reader.offset_for_timestamp(timestamp_ms)
        except DuramenError as error:
            check_place(error, root)
        else:
            if found is not None and timestamp_ms not in (-1, -2):
                assert base.times_ms[found.offset] == found.timestamp_ms >= timestamp_ms
        reader.close()


# --- opening ----------------------------------------------------------------------------------------------------------


def check_goes_on(root: str, base: Sound, log: PartitionWriter, kept: list[Record]) -> None:
    """The log takes another record, and shows the same after a clean and an unclean stop."""
    end = log.log_end_offset
    info = log.append([Record(b"next", b"value", NOW_MS)])
    assert info.first_offset == end
    expected = [*kept, Record(b"next", b"value", NOW_MS, offset=end)]
    if base.config.message_timestamp_type == "CreateTime":
        assert list(log.records(isolation=Isolation.LOG_END)) == expected
    log.close()
    with open_log(root, base.config, clean=True) as again:
        assert list(again.records())[:-1] == kept
        assert again.log_end_offset == end + 1
    with open_log(root, base.config, clean=False) as again:
        assert not again.recovery.found_damage, again.recovery
        assert list(again.records())[:-1] == kept
        assert again.log_end_offset == end + 1


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_recovery_always_gives_a_sound_log_of_what_was_written(name: str, data: st.DataObject) -> None:
    base = sound(name)
    files = damaged(base, data)
    with on_disk(files) as root:
        log = open_log(root, base.config, clean=False)
        kept = list(log.records())
        check_originals(kept, base.records)
        logs = [file for file in base.files if file.endswith(".log")]
        if all(files.get(file) == base.files[file] for file in logs):
            assert kept == list(base.records.values())
            assert log.log_end_offset == base.log_end_offset
        for timestamp_ms in (-3, -2, -1, 0, NOW_MS):
            found = log.offset_for_timestamp(timestamp_ms)
            if found is not None and timestamp_ms not in (-1, -2):
                assert base.times_ms[found.offset] == found.timestamp_ms
        check_goes_on(root, base, log, kept)


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
def test_a_clean_opening_of_damage_shows_originals_or_an_error(name: str, data: st.DataObject) -> None:
    base = sound(name)
    files = damaged(base, data)
    offset = data.draw(st.integers(0, base.log_end_offset + 1))
    max_bytes = data.draw(st.sampled_from([0, 1, 100, 1 << 20]))
    with on_disk(files) as root:
        try:
            log = open_log(root, base.config, clean=True)
        except DuramenError as error:
            check_place(error, root)
            return
        got, error = collected(log.records())
        check_originals(got, base.records)
        if error is not None:
            check_place(error, root)
        try:
            fetched = log.fetch(offset, max_bytes)
        except DuramenError as error:
            check_place(error, root)
        else:
            size = 0 if fetched.file is None else fetched.file.size()
            assert 0 <= fetched.position <= fetched.position + fetched.size_bytes <= max(size, fetched.position)
        # Whatever it did not notice, appending makes nothing worse.
        end = log.log_end_offset
        try:
            log.append([Record(b"next", b"value", NOW_MS)])
        except DuramenError as error:
            check_place(error, root)
        after, _ = collected(log.records())
        assert [record.offset for record in after if record.key != b"next"] == [record.offset for record in got]
        check_originals([record for record in after if record.key != b"next"], base.records)
        assert all(record.offset == end for record in after if record.key == b"next")
        log.close()


# --- appending hostile bytes ------------------------------------------------------------------------------------------


def contents(root: str) -> dict[str, bytes]:
    """What an append adds to. (As in Kafka a refused one may still roll the log and tell of a leader epoch.)"""
    lasting = (".log", ".txnindex")
    found = {path.name: path.read_bytes() for path in Path(root, str(PARTITION)).iterdir() if path.is_file()}
    return {name: data for name, data in found.items() if data and name.endswith(lasting)}


@pytest.mark.parametrize("origin", [AppendOrigin.CLIENT, AppendOrigin.REPLICATION, AppendOrigin.COORDINATOR])
@given(data=st.data())
def test_a_refused_append_leaves_no_trace(origin: AppendOrigin, data: st.DataObject) -> None:
    from fuzz import mutation, targets

    base = sound("transactions-0")
    target = next(each for each in _targets() if each.name == "records")
    words = data.draw(st.lists(st.integers(0, (1 << 32) - 1), min_size=mutation.WORDS, max_size=mutation.WORDS))
    hostile = bytearray(mutation.mutate(target, words))
    if origin is AppendOrigin.REPLICATION and data.draw(st.booleans()):
        hostile[:8] = base.log_end_offset.to_bytes(8, "big")  # otherwise nearly all are refused for their offset
    if data.draw(st.booleans()):
        hostile = targets.repair_v2(hostile, words[0])
    with on_disk(base.files) as root:
        log = open_log(root, base.config, clean=True)
        before, end = contents(root), log.log_end_offset
        try:
            info = log.append_batches(bytes(hostile), origin=origin)
        except DuramenError:
            assert log.log_end_offset == end
            assert contents(root) == before
        else:
            assert log.log_end_offset == info.last_offset + 1 or info.duplicate
        got, error = collected(log.records())
        check_originals([record for record in got if record.offset < end], base.records)
        assert len(got) >= len(base.records)
        if origin is AppendOrigin.CLIENT:
            assert error is None, error
            check_goes_on(root, base, log, got)
        log.close()


_TARGETS: list[object] = []


def _targets() -> tuple[object, ...]:
    from fuzz.targets import all_targets

    if not _TARGETS:
        _TARGETS.extend(all_targets())
    return tuple(_TARGETS)
