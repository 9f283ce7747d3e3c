from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from logstore.errors import CorruptIndex, OffsetsOutOfOrder
from logstore.files import OS_FILES
from logstore.segment.txn_index import ENTRY_BYTES, AbortedTransaction, TxnIndex, encode_entry

GOLDEN = bytes.fromhex("00000000000000000058000000000000001a000000000000001b000000000000001c")
GOLDEN_ENTRY = AbortedTransaction(producer_id=88, first_offset=26, last_offset=27, last_stable_offset=28)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("txnindex")


def index_at(directory: Path, base_offset: int = 0, name: str = "00000000000000000000.txnindex") -> TxnIndex:
    return TxnIndex(OS_FILES, str(directory / name), base_offset)


def filled(directory: Path, *entries: AbortedTransaction) -> TxnIndex:
    index = index_at(directory)
    for entry in entries:
        index.append(entry)
    return index


def test_an_entry_is_written_as_kafka_writes_it(tmp_path: Path) -> None:
    index = filled(tmp_path, GOLDEN_ENTRY)
    assert Path(index.path).read_bytes() == GOLDEN
    assert list(index_at(tmp_path).entries()) == [GOLDEN_ENTRY]


def test_the_file_comes_into_being_with_its_first_entry(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    assert list(index.entries()) == []
    assert index.collect_aborted(0, 100) == ([], False)
    index.truncate_to(0)
    index.reset()
    index.flush()
    index.sanity_check()
    index.close()
    assert os.listdir(tmp_path) == []
    index.append(GOLDEN_ENTRY)
    assert os.listdir(tmp_path) == ["00000000000000000000.txnindex"]


def test_markers_must_come_in_order_also_after_opening_again(tmp_path: Path) -> None:
    index = filled(tmp_path, GOLDEN_ENTRY)
    with pytest.raises(OffsetsOutOfOrder) as caught:
        index.append(AbortedTransaction(89, 20, 27, 28))
    assert caught.value.offset == 27
    index.close()
    with pytest.raises(OffsetsOutOfOrder):
        index_at(tmp_path).append(AbortedTransaction(89, 20, 26, 28))
    assert Path(index.path).read_bytes() == GOLDEN


def test_aborted_transactions_that_overlap_the_range_are_collected(tmp_path: Path) -> None:
    one, two, three = (
        AbortedTransaction(1, 0, 10, 5),
        AbortedTransaction(2, 5, 20, 15),
        AbortedTransaction(3, 15, 30, 31),
    )
    index = filled(tmp_path, one, two, three)
    assert index.collect_aborted(0, 100) == ([one, two, three], False)
    assert index.collect_aborted(11, 100) == ([two, three], False)
    assert index.collect_aborted(0, 5) == ([one], True)
    assert index.collect_aborted(10, 15) == ([one, two], True)
    assert index.collect_aborted(21, 31) == ([three], True)
    assert index.collect_aborted(31, 40) == ([], False)


def test_truncation_drops_markers_at_and_above_the_offset(tmp_path: Path) -> None:
    entries = [AbortedTransaction(1, n, n + 5, n + 6) for n in range(0, 100, 10)]
    index = filled(tmp_path, *entries)
    index.truncate_to(1000)
    assert list(index.entries()) == entries
    index.truncate_to(35)
    assert list(index.entries()) == entries[:3]
    index.append(AbortedTransaction(9, 30, 31, 32))
    index.truncate_to(0)
    assert list(index.entries()) == []
    assert os.path.getsize(index.path) == 0
    index.append(entries[0])
    assert list(index.entries()) == entries[:1]


def test_a_torn_last_entry_is_ignored_and_overwritten(tmp_path: Path) -> None:
    index = filled(tmp_path, GOLDEN_ENTRY)
    index.close()
    with open(index.path, "ab") as file:
        file.write(b"\xff" * (ENTRY_BYTES - 1))
    assert list(index.entries()) == [GOLDEN_ENTRY]
    with pytest.raises(CorruptIndex, match="multiple") as caught:
        index.sanity_check()
    assert caught.value.position == ENTRY_BYTES
    later = AbortedTransaction(1, 30, 40, 41)
    index.append(later)
    assert list(index.entries()) == [GOLDEN_ENTRY, later]
    assert os.path.getsize(index.path) == 2 * ENTRY_BYTES


def test_an_entry_outside_the_segment_fails_the_sanity_check(tmp_path: Path) -> None:
    index = filled(tmp_path, GOLDEN_ENTRY)
    index.sanity_check()
    for base_offset in (28, 27 - 2**31):
        with pytest.raises(CorruptIndex, match="outside the segment") as caught:
            TxnIndex(OS_FILES, index.path, base_offset).sanity_check()
        assert caught.value.position == 0


@pytest.mark.parametrize(
    "bad",
    [
        GOLDEN[:1] + b"\x01" + GOLDEN[2:],
        b"\x01" + GOLDEN[1:],
        encode_entry(AbortedTransaction(-1, 26, 28, 29)),
        encode_entry(AbortedTransaction(1, -1, 28, 29)),
        encode_entry(AbortedTransaction(1, 30, 28, 29)),
        encode_entry(AbortedTransaction(1, 28, 28, 29)),
        encode_entry(AbortedTransaction(1, 26, 28, -1)),
        encode_entry(AbortedTransaction(1, 26, 27, 28)),
    ],
    ids=[
        "version 1",
        "version 256",
        "producer",
        "first offset",
        "first above last",
        "no data",
        "stable offset",
        "not increasing",
    ],
)
def test_a_bad_entry_is_named_with_its_position(tmp_path: Path, bad: bytes) -> None:
    index = index_at(tmp_path)
    Path(index.path).write_bytes(GOLDEN + bad)
    for attempt in (lambda: list(index.entries()), index.sanity_check, lambda: index.collect_aborted(0, 1000)):
        with pytest.raises(CorruptIndex) as caught:
            attempt()
        assert (caught.value.file, caught.value.position) == (index.path, ENTRY_BYTES)


def test_a_reader_sees_what_the_writer_adds(tmp_path: Path) -> None:
    reader = TxnIndex(OS_FILES, str(tmp_path / "00000000000000000000.txnindex"), 0, writable=False)
    assert (list(reader.entries()), reader.last_offset) == ([], None)
    writer = filled(tmp_path, GOLDEN_ENTRY)
    assert (list(reader.entries()), reader.last_offset) == ([GOLDEN_ENTRY], 27)
    later = AbortedTransaction(1, 30, 40, 41)
    writer.append(later)
    assert (list(reader.entries()), reader.last_offset) == ([GOLDEN_ENTRY, later], 40)


def test_the_index_follows_its_segment_to_another_name(tmp_path: Path) -> None:
    index = filled(tmp_path, GOLDEN_ENTRY)
    index.rename(str(tmp_path / "00000000000000000000.txnindex.deleted"))
    assert os.listdir(tmp_path) == ["00000000000000000000.txnindex.deleted"]
    assert list(index.entries()) == [GOLDEN_ENTRY]
    absent = index_at(tmp_path, name="00000000000000000009.txnindex")
    absent.rename(str(tmp_path / "00000000000000000009.txnindex.deleted"))
    assert os.listdir(tmp_path) == ["00000000000000000000.txnindex.deleted"]


@given(st.binary(max_size=5 * ENTRY_BYTES))
@example(b"\x00" * ENTRY_BYTES)
@example(b"\x00" * 2 * ENTRY_BYTES)
def test_any_bytes_give_entries_or_a_typed_error(shared: Path, data: bytes) -> None:
    index = index_at(shared)
    Path(index.path).write_bytes(data)
    try:
        entries = list(index.entries())
        index.sanity_check()
    except CorruptIndex as error:
        found = error.where()
    else:
        found = None
        assert b"".join(map(encode_entry, entries)) == data
    finally:
        index.close()
    assert found is None or found.keys() == {"file", "position"}


@given(st.integers(0, 200), st.integers(0, 200), st.data())
def test_collecting_agrees_with_a_plain_filter(shared: Path, fetch: int, upper: int, data: st.DataObject) -> None:
    lasts = sorted(data.draw(st.sets(st.integers(1, 200), max_size=12)))
    entries = [
        AbortedTransaction(n, data.draw(st.integers(0, last - 1)), last, data.draw(st.integers(0, last + 1)))
        for n, last in enumerate(lasts)
    ]
    name = "00000000000000000001.txnindex"
    (shared / name).unlink(missing_ok=True)
    index = index_at(shared, name=name)
    for entry in entries:
        index.append(entry)
    stop = next((n for n, entry in enumerate(entries) if entry.last_stable_offset >= upper), None)
    looked_at = entries if stop is None else entries[: stop + 1]
    expected = [entry for entry in looked_at if entry.last_offset >= fetch and entry.first_offset < upper]
    assert index.collect_aborted(fetch, upper) == (expected, stop is not None)
    index.close()


def test_a_zero_filled_index_is_refused(tmp_path: Path) -> None:
    index = index_at(tmp_path)
    Path(index.path).write_bytes(bytes(ENTRY_BYTES))
    with pytest.raises(CorruptIndex):
        list(index.entries())
