"""Sound partition directories, as bytes in memory, and ways to damage them.

Three were written by Kafka (transactions, the old formats, LogAppendTime), one by our own log with all codecs. A sound
directory knows its records, so that whatever is read from a damaged copy can be compared.
"""

from __future__ import annotations

import base64
import json
import os
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from hypothesis import strategies as st

from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.directory.layout import PartitionPlace
from logstore.partition.reader import PartitionReader
from logstore.records.header import parse_header
from logstore.records.iterate import iter_records
from logstore.records.record import Record
from logstore.topic import TopicPartition
from reference.fetching import Isolation
from reference.partition_writer import PartitionWriter

VECTORS = Path(__file__).resolve().parents[1] / "vectors"
PARTITION = TopicPartition("topic", 0)
NOW_MS = 1_700_000_100_000
STATE = "state"  # lies beside the partition directory, not in it
NAMES = ("transactions-0", "formats-0", "append-time-0", "own")
FAST_DISK = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


@dataclass(frozen=True)
class Sound:
    """A directory before damage; `files` has the state file under STATE, all others by their name."""

    name: str
    config: LogConfig
    files: dict[str, bytes]
    records: dict[int, Record]
    committed: dict[int, Record]
    #: timestamps of all records, those of control batches too
    times_ms: dict[int, int]
    log_end_offset: int
    last_stable_offset: int

    def batches(self) -> list[tuple[str, int, int, int]]:
        """(file, position, size, magic) of every batch in log order."""
        found = []
        for name in sorted(self.files):
            if name.endswith(".log"):
                data = self.files[name]
                position = 0
                while header := parse_header(data[position : position + 61], position, len(data)):
                    found.append((name, position, header.size_bytes, header.magic))
                    position = header.end_position
                    if position >= len(data):
                        break
        return found


@cache
def sound(name: str) -> Sound:
    with tempfile.TemporaryDirectory(dir=FAST_DISK) as root:
        directory = os.path.join(root, str(PARTITION))
        os.mkdir(directory)
        if name == "own":
            config = LogConfig.from_mapping({"segment.bytes": "900", "index.interval.bytes": "150"})
        else:
            case = _vector(name)
            config = LogConfig.from_mapping(case["config"])
            for file, content in case["files"].items():
                Path(directory, file).write_bytes(_content(content))
            Path(directory, "leader-epoch-checkpoint").write_text(case["leader-epoch-checkpoint"])
        with open_log(root, config, clean=True) as log:
            if name == "own":
                _write(log)
            records = {record.offset: record for record in log.records()}
            committed = {record.offset: record for record in log.records(isolation=Isolation.READ_COMMITTED)}
            log_end_offset, last_stable_offset = log.log_end_offset, log.last_stable_offset
        files = {file: Path(directory, file).read_bytes() for file in os.listdir(directory)}
        files[STATE] = Path(root, STATE).read_bytes()
    logs = [data for file, data in sorted(files.items()) if file.endswith(".log")]
    times_ms = {record.offset: record.timestamp_ms for data in logs for record in iter_records(data, control=True)}
    assert len(records) > 20
    return Sound(name, config, files, records, committed, times_ms, log_end_offset, last_stable_offset)


def _vector(name: str) -> dict[str, dict[str, str]]:
    cases = json.loads((VECTORS / "directories.json").read_text())["cases"]
    found: dict[str, dict[str, str]] = next(case for case in cases if case["name"] == name)
    return found


def _content(text: str) -> bytes:
    try:
        return bytes.fromhex(text)
    except ValueError:
        return base64.b64decode(text)


def _write(log: PartitionWriter) -> None:
    for i in range(40):
        records = [
            Record(
                b"key-%d" % (i % 7) if i % 5 else None,
                b"value-%d-%d " % (i, j) * (1 + i % 9),
                NOW_MS - 10_000 + 10 * i + j,
                (("header", b"%d" % j),) if i % 3 == 0 else (),
            )
            for j in range(1 + i % 4)
        ]
        log.append(records, codec_id=i % 5, leader_epoch=i // 10)


# --- on disk ----------------------------------------------------------------------------------------------------------


@contextmanager
def on_disk(files: dict[str, bytes]) -> Iterator[str]:
    """A folder that holds `files`, for as long as the block lasts."""
    with tempfile.TemporaryDirectory(dir=FAST_DISK) as root:
        os.mkdir(os.path.join(root, str(PARTITION)))
        for name, data in files.items():
            path = os.path.join(root, name) if name == STATE else os.path.join(root, str(PARTITION), name)
            with open(path, "wb") as file:
                file.write(data)
        yield root


def open_log(root: str, config: LogConfig, *, clean: bool) -> PartitionWriter:
    return PartitionWriter.open(
        os.path.join(root, str(PARTITION)),
        partition=PARTITION,
        config=config,
        clean=clean,
        state_path=os.path.join(root, STATE),
        clock=ManualClock(NOW_MS),
        long_lived=False,
        background_flush=False,
    )


def open_reader(root: str, sound: Sound) -> PartitionReader:
    return PartitionReader(
        PartitionPlace(os.path.join(root, str(PARTITION)), PARTITION, os.path.join(root, STATE)),
        high_watermark=lambda: sound.log_end_offset,
        last_stable_offset=lambda: sound.last_stable_offset,
    )


# --- damage -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Damage:
    """One change to one file; positions are taken modulo its size."""

    file: str
    kind: str
    at: int
    data: bytes

    def apply(self, files: dict[str, bytes]) -> None:
        before = files.get(self.file)
        if before is None:
            return
        at = self.at % (len(before) + 1)
        if self.kind == "flip":
            if before:
                at = self.at // 8 % len(before)
                flipped = bytes((before[at] ^ (1 << self.at % 8),))
                files[self.file] = before[:at] + flipped + before[at + 1 :]
        elif self.kind == "truncate":
            files[self.file] = before[:at]
        elif self.kind == "append":
            files[self.file] = before + self.data
        elif self.kind == "overwrite":
            files[self.file] = before[:at] + self.data + before[at + len(self.data) :]
        elif self.kind == "insert":
            files[self.file] = before[:at] + self.data + before[at:]
        elif self.kind == "repeat":  # a piece of the file once more, as a confused disk may write it
            piece = before[at : at + 200]
            files[self.file] = before[:at] + piece + before[at:]
        else:
            del files[self.file]


KINDS = ("flip", "flip", "flip", "truncate", "append", "overwrite", "insert", "repeat", "delete")


def damages(names: list[str], kinds: tuple[str, ...] = KINDS) -> st.SearchStrategy[list[Damage]]:
    """One to three damages to files of these names."""
    data = st.one_of(
        st.binary(min_size=1, max_size=40),
        st.integers(1, 600).map(bytes),
        st.integers(-(1 << 63), (1 << 63) - 1).map(struct.Struct(">q").pack),
    )
    one = st.builds(Damage, st.sampled_from(names), st.sampled_from(kinds), st.integers(0, 1 << 16), data)
    return st.lists(one, min_size=1, max_size=3)
