from __future__ import annotations

import json
from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from logstore.clock import ManualClock
from logstore.directory.state import (
    PartitionState,
    SegmentEntry,
    SwapNote,
    decode_state,
    encode_state,
    read_state,
    write_state,
)
from logstore.errors import CorruptState
from logstore.files import OS_FILES, replace_file
from logstore.limits import INT64_MAX, Limits
from logstore.records.record import Record
from logstore.topic import TopicPartition, new_topic_id
from reference.partition_writer import PartitionWriter
from simulation.filesystem import SimulatedFileSystem

STATE = PartitionState(
    generation=7,
    log_start_offset=3,
    first_dirty_offset=5,
    dropped_tombstones=2,
    segments=(SegmentEntry(0, 100, 5), SegmentEntry(10, 0, -1)),
    swap=SwapNote((0,), (0, 10)),
)


def framed(body: object) -> bytes:
    text = (body if isinstance(body, str) else json.dumps(body)).encode() + b"\n"
    return f"duramen-partition-state 1 crc32c={crc32c(text):08x}\n".encode() + text


def body() -> dict[str, object]:
    return json.loads(encode_state(STATE).split(b"\n")[1])  # type: ignore[no-any-return]


def test_a_state_is_read_back_as_it_was_written() -> None:
    fs = SimulatedFileSystem()
    write_state(fs, "/state", STATE)
    assert read_state(fs, "/state") == STATE
    assert read_state(fs, "/none") is None
    assert fs.listdir("/") == ["state"]


def test_it_is_two_lines_of_text_with_version_and_checksum() -> None:
    head, text, end = encode_state(STATE).split(b"\n")
    assert head == b"duramen-partition-state 1 crc32c=%08x" % crc32c(text + b"\n")
    assert json.loads(text)["segments"] == [[0, 100, 5], [10, 0, -1]]
    assert end == b""


def test_a_new_list_is_a_new_generation() -> None:
    following = STATE.with_segments((SegmentEntry(4, 1, 2),), log_start_offset=4)
    assert (following.generation, following.log_start_offset, following.dropped_tombstones) == (8, 4, 2)


@pytest.mark.parametrize(
    "change",
    [
        {"generation": -1},
        {"generation": 1.5},
        {"generation": True},
        {"log_start_offset": INT64_MAX + 1},
        {"log_start_offset": None},
        {"segments": None},
        {"segments": [[0, 1]]},
        {"segments": [[0, -1, 5]]},
        {"segments": [[5, 1, 1], [5, 1, 1]]},
        {"segments": [[5, 1, 1], [4, 1, 1]]},
        {"segments": [[0, 1, "5"]]},
        {"segments": [["0", 1, 5]]},
        {"swap": 5},
        {"swap": [[1]]},
        {"swap": [[-1], []]},
    ],
)
def test_values_that_cannot_be_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(CorruptState) as refused:
        decode_state(framed({**body(), **change}), file="/f")
    assert refused.value.file == "/f"


@pytest.mark.parametrize("name", ["generation", "log_start_offset", "segments", "swap"])
def test_what_is_missing_is_refused(name: str) -> None:
    lacking = {key: value for key, value in body().items() if key != name}
    with pytest.raises(CorruptState):
        decode_state(framed(lacking))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"duramen-partition-state 1\n{}",
        b"duramen-partition-state 2 crc32c=00000000\n{}",
        b"another-file 1 crc32c=00000000\n{}",
        framed("[" * 100_000),
        framed("[]"),
        framed("{"),
        framed('{"generation": 1'),
        framed("NaN"),
    ],
    ids=range(10),
)
def test_other_content_is_refused(data: bytes) -> None:
    with pytest.raises(CorruptState):
        decode_state(data)


def test_a_file_larger_than_the_limit_is_refused_unread() -> None:
    fs = SimulatedFileSystem()
    write_state(fs, "/state", STATE)
    with pytest.raises((CorruptState, OSError), match="larger than the limit"):
        read_state(fs, "/state", limits=Limits(side_file_bytes=32))


@given(position=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_no_flipped_bit_goes_unnoticed(position: int, bit: int) -> None:
    data = bytearray(encode_state(STATE))
    data[position % len(data)] ^= 1 << bit
    with pytest.raises(CorruptState):
        decode_state(bytes(data))


@given(size=st.integers(0, 10_000), tail=st.binary(max_size=20))
def test_no_cut_or_longer_file_goes_unnoticed(size: int, tail: bytes) -> None:
    data = encode_state(STATE)
    cut = data[: size % len(data)]
    if cut + tail != data:
        with pytest.raises(CorruptState):
            decode_state(cut + tail)


@given(data=st.binary(max_size=300))
def test_any_bytes_are_refused_with_a_typed_error(data: bytes) -> None:
    for candidate in (data, framed(data.decode("latin-1"))):
        with pytest.raises(CorruptState):
            decode_state(candidate)


NATURAL = st.integers(0, INT64_MAX)


@given(
    generation=NATURAL,
    log_start=NATURAL,
    segments=st.lists(st.tuples(NATURAL, NATURAL, st.integers(-1, INT64_MAX)), max_size=5, unique_by=lambda s: s[0]),
    swap=st.one_of(st.none(), st.tuples(st.lists(NATURAL, max_size=3), st.lists(NATURAL, max_size=3))),
)
def test_every_state_survives_the_round_trip(
    generation: int,
    log_start: int,
    segments: list[tuple[int, int, int]],
    swap: tuple[list[int], list[int]] | None,
) -> None:
    state = PartitionState(
        generation=generation,
        log_start_offset=log_start,
        segments=tuple(SegmentEntry(*entry) for entry in sorted(segments)),
        swap=None if swap is None else SwapNote(tuple(swap[0]), tuple(swap[1])),
    )
    assert decode_state(encode_state(state)) == state


def test_a_state_is_never_half_written() -> None:
    fs = SimulatedFileSystem()
    write_state(fs, "/state", STATE)
    before = fs.operations
    write_state(fs, "/state", STATE.with_segments((), log_start_offset=9))
    kinds = [operation.kind for operation in fs.trace[before:]]
    assert kinds.index("fsync") < kinds.index("rename") < kinds.index("fsync_dir")


def test_transactions_are_remembered_when_their_producers_have_expired(tmp_path: Path) -> None:
    """Their batches are still in the log, and compaction must know."""
    state_path = str(tmp_path / "state")
    write_state(OS_FILES, state_path, PartitionState(producers=False, transactions=False))
    clock = ManualClock(1_700_000_000_000)

    def opened() -> PartitionWriter:
        return PartitionWriter.open(
            str(tmp_path / "t-0"), partition=TopicPartition("t", 0), clean=True, state_path=state_path, clock=clock
        )

    with opened() as log:
        log.append([Record(b"k", b"v")])
    state = read_state(OS_FILES, state_path)
    assert state is not None
    assert not state.transactions
    with opened() as log:
        log.append_marker(commit=True, producer_id=7, producer_epoch=0)
    clock.advance(2 * 86_400_000)
    with opened():
        pass
    state = read_state(OS_FILES, state_path)
    assert state is not None
    assert (state.producers, state.transactions) == (False, True)


def test_a_list_says_whose_it_is() -> None:
    fs = SimulatedFileSystem()
    first, second = (f"/state/{new_topic_id()}" for _ in range(2))
    for folder in ("/state", first, second):
        fs.mkdir(folder)
    write_state(fs, f"{first}/0", STATE)
    for other in (f"{first}/1", f"{second}/0"):
        fs.rename(f"{first}/0", other)
        with pytest.raises(CorruptState, match="of another partition"):
            read_state(fs, other)
        fs.rename(other, f"{first}/0")
    assert read_state(fs, f"{first}/0") == STATE


def test_a_list_of_an_older_release_does_not_say_whose_it_is() -> None:
    fs = SimulatedFileSystem()
    folder = f"/state/{new_topic_id()}"
    for each in ("/state", folder):
        fs.mkdir(each)
    replace_file(fs, f"{folder}/0", encode_state(STATE))
    assert read_state(fs, f"{folder}/0") == STATE
