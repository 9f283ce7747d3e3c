"""Every kind of damage below the high watermark is found and named; nothing is changed, nothing above is judged."""

from __future__ import annotations

import errno
import os
import random
import struct
from pathlib import Path

import pytest

from logstore.files import File, OsFileSystem
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.topics.registry import Topic
from logstore.upkeep.verify import Verification, verify_partition
from reference.partition_writer import writing


def verify(store: LogStore, topic: Topic, number: int = 0) -> Verification:
    return verify_partition(
        store.fs,
        store.layout.partition(topic.partition(number)),
        partition=topic.partition(number),
        topic_id=topic.id,
        state_path=store.layout.partition_state(topic.id, number),
        high_watermark=store.high_watermark(topic, number),
    )


def file_of(store: LogStore, topic: Topic, suffix: str, at: int = 0) -> Path:
    base = store.partition_state(topic, 0).segments[at].base_offset
    return Path(store.layout.partition(topic.partition(0))) / f"{base:020d}{suffix}"


def test_a_sound_partition(store: LogStore, orders: Topic) -> None:
    seen: list[int] = []
    result = verify_partition(
        store.fs,
        store.layout.partition(orders.partition(0)),
        partition=orders.partition(0),
        topic_id=orders.id,
        state_path=store.layout.partition_state(orders.id, 0),
        high_watermark=300,
        progress=seen.append,
    )
    state = store.partition_state(orders, 0)
    assert result.sound, result.findings
    assert result.segments == len(state.segments)
    assert result.size_bytes == sum(seen) == sum(segment.size_bytes for segment in state.segments)
    assert result.batches > 20


def test_an_empty_partition_is_sound(store: LogStore) -> None:
    assert verify(store, store.create_topic("new")).sound


@pytest.mark.parametrize("at", [0, 1, -1])
def test_a_batch_whose_offset_is_above_the_high_watermark_by_damage_is_found(
    store: LogStore, orders: Topic, at: int
) -> None:
    """No checksum covers the offset; such a batch is not taken for one that was never committed."""
    path = file_of(store, orders, ".log", at=at)
    whole, position = path.read_bytes(), 0
    while position < len(whole):
        broken = bytearray(whole)
        broken[position + 5] ^= 0x02
        path.write_bytes(broken)
        assert not verify(store, orders).sound, position
        position += 12 + struct.unpack_from(">i", whole, position + 8)[0]
    path.write_bytes(whole)
    assert verify(store, orders).sound


def test_a_last_batch_whose_offset_reaches_across_the_high_watermark_by_damage_is_found(
    store: LogStore, orders: Topic
) -> None:
    path = file_of(store, orders, ".log", at=-1)
    whole, position = path.read_bytes(), 0
    while (following := position + 12 + struct.unpack_from(">i", whole, position + 8)[0]) < len(whole):
        position = following
    (offset,) = struct.unpack_from(">q", whole, position)
    for more in (1, 2, 3):
        path.write_bytes(whole[:position] + struct.pack(">q", offset + more) + whole[position + 8 :])
        assert not verify(store, orders).sound, more
    path.write_bytes(whole)
    assert verify(store, orders).sound


def test_every_flipped_byte_of_a_log_is_found(store: LogStore, orders: Topic, seed: int) -> None:
    randomness = random.Random(seed)
    path = file_of(store, orders, ".log", at=1)
    whole = path.read_bytes()
    for _ in range(40):
        at = randomness.randrange(len(whole))
        if _leader_epoch(whole, at):
            continue
        broken = bytearray(whole)
        broken[at] ^= 1 << randomness.randrange(8)
        path.write_bytes(broken)
        result = verify(store, orders)
        assert not result.sound, at
        assert all(finding.file for finding in result.findings)
    path.write_bytes(whole)
    assert verify(store, orders).sound


def _leader_epoch(data: bytes, at: int) -> bool:
    """Whether the byte belongs to a batch's leader epoch, which no checksum covers."""
    position = 0
    while position < len(data):
        if position + 12 <= at < position + 16:
            return True
        position += 12 + struct.unpack_from(">i", data, position + 8)[0]
    return False


@pytest.mark.parametrize(
    ("suffix", "damage", "says"),
    [
        (".log", lambda data: data[:-5], "where the list has"),
        (".log", lambda data: data + b"x" * 30, "where the list has"),
        (".index", lambda data: data[:-3], "multiple of 8"),
        (".index", lambda data: data[8:16] + data[:8], "does not follow"),
        (".index", lambda data: data[:4] + struct.pack(">i", 1) + data[8:], "does not lead to a batch"),
        (".index", lambda data: data + bytes(8), "8 bytes after its entries"),
        (".timeindex", lambda data: data[:-1], "multiple of 12"),
        (".timeindex", lambda data: struct.pack(">q", 5) + data[8:], "not the largest timestamp"),
        (".timeindex", lambda data: data + bytes(24), "24 bytes after its entries"),
    ],
)
def test_damage_of_a_sealed_segment_is_named(
    store: LogStore, orders: Topic, suffix: str, damage: object, says: str
) -> None:
    path = file_of(store, orders, suffix)
    path.write_bytes(damage(path.read_bytes()))  # type: ignore[operator]
    result = verify(store, orders)
    assert any(says in finding.what and finding.file == str(path) for finding in result.findings), result.findings


class UnreadableFiles(OsFileSystem):
    """Every file with this ending gives an error of the system when it is opened."""

    def __init__(self, suffix: str, error_number: int) -> None:
        self.suffix, self.error_number = suffix, error_number

    def open(self, path: str, *, writable: bool = False, create: bool = False, exclusive: bool = False) -> File:
        if path.endswith(self.suffix):
            raise OSError(self.error_number, os.strerror(self.error_number), path)
        return super().open(path, writable=writable, create=create, exclusive=exclusive)


@pytest.mark.parametrize("suffix", [".log", ".index", ".timeindex", ".snapshot", "leader-epoch-checkpoint"])
@pytest.mark.parametrize(
    "number", [errno.EIO, errno.EMFILE, errno.ENOMEM, errno.EACCES], ids=lambda n: errno.errorcode[n]
)
def test_an_error_of_the_system_is_no_finding(store: LogStore, orders: Topic, suffix: str, number: int) -> None:
    with pytest.raises(OSError, match=os.strerror(number)):
        verify_partition(
            UnreadableFiles(suffix, number),
            store.layout.partition(orders.partition(0)),
            partition=orders.partition(0),
            topic_id=orders.id,
            state_path=store.layout.partition_state(orders.id, 0),
            high_watermark=store.high_watermark(orders, 0),
        )


def test_missing_files_are_named(store: LogStore, orders: Topic) -> None:
    file_of(store, orders, ".log", at=1).unlink()
    file_of(store, orders, ".index", at=2).unlink()
    found = [finding.what for finding in verify(store, orders).findings]
    assert "a segment of the list is missing" in found
    assert "a sealed segment has no offset index" in found


def test_side_files_are_checked(store: LogStore, orders: Topic) -> None:
    directory = Path(store.layout.partition(orders.partition(0)))
    next(directory.glob("*.snapshot")).write_bytes(b"\0")
    (directory / "leader-epoch-checkpoint").write_text("7\n")
    (directory / "partition.metadata").write_text("version: 0\ntopic_id: AAAAAAAAQACAAAAAAAAAAQ")
    (directory / f"{1:020d}.log").write_bytes(b"")
    found = " | ".join(finding.what for finding in verify(store, orders).findings)
    for says in ("snapshot of 1 bytes", "version 7", "does not belong to topic id", "of no segment of the list"):
        assert says in found


def test_a_damaged_or_missing_list_is_named(store: LogStore, orders: Topic) -> None:
    path = store.layout.partition_state(orders.id, 0)
    Path(path).write_bytes(b"nonsense")
    assert verify(store, orders).findings[0].file == path
    os.unlink(path)
    assert "no segment list" in verify(store, orders).findings[0].what


def test_a_log_that_ends_below_the_high_watermark_is_damaged(store: LogStore, orders: Topic) -> None:
    path = file_of(store, orders, ".log", at=-1)
    path.write_bytes(b"")
    found = [finding.what for finding in verify(store, orders).findings]
    assert any("committed up to 300, but the log ends at" in what for what in found)


def test_what_lies_above_the_high_watermark_is_not_judged(store: LogStore, orders: Topic) -> None:
    def append_and_die() -> None:
        with writing(store, orders, 0, what="test") as log:
            log.append([Record(b"k", b"v", 1_700_000_000_000)])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        append_and_die()
    path = file_of(store, orders, ".log", at=-1)
    with path.open("ab") as file:
        file.write(b"half a batch that somebody is writing just now")
    assert verify(store, orders).sound
