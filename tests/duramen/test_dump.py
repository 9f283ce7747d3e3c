"""`duramen dump`: Kafka's words, every kind of file, every kind of damage."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logstore.files import OS_FILES
from logstore.partition.snapshot import SnapshotEntry, write_snapshot
from logstore.segment.txn_index import AbortedTransaction, encode_entry

Command = Callable[..., Any]

# Produced by Kafka's own code: two records, one batch each codec; an ABORT marker.
PLAIN = bytes.fromhex(
    "00000000000000640000004cffffffff02d4575bef0000000000010000018bcfe568000000018bcfe56805ffffffffffffffffffffffffffff"
    "00000002" "22000000046b310476310402680278026e01" "10000a02046b320100"
)  # fmt: skip
LZ4 = bytes.fromhex(
    "00000000000000640000005bffffffff02669486660003000000010000018bcfe568000000018bcfe56805ffffffffffffffffffffffffffff"
    "00000002" "04224d18604082" "1b000080" "22000000046b310476310402680278026e0110000a02046b320100" "00000000"
)  # fmt: skip
ABORT = bytes.fromhex(
    "00000000000000c80000004200000007020650e7e10030000000000000018bcfe568000000018bcfe568000000000000000009"
    "0003ffffffff00000001" "2000000008000000000c00000000000b00"
)  # fmt: skip
V1 = bytes.fromhex(
    "00000000000000640000001aa5da6a6201000000018bcfe56800000000026b31000000027631"
    "000000000000006500000018dcbe14a101000000018bcfe56805000000026b32ffffffff"
)


def log(tmp_path: Path, data: bytes, base: int = 100) -> Path:
    path = tmp_path / f"{base:020d}.log"
    path.write_bytes(data)
    return path


def test_a_batch_in_kafkas_words(duramen: Command, tmp_path: Path) -> None:
    found = duramen("dump", log(tmp_path, PLAIN), "--print-data-log")
    assert found.code == 0
    assert found.out.splitlines()[1:] == [
        "Log starting offset: 100",
        "baseOffset: 100 lastOffset: 101 count: 2 baseSequence: -1 lastSequence: -1 producerId: -1 producerEpoch: -1 "
        "partitionLeaderEpoch: -1 isTransactional: false isControl: false deleteHorizonMs: OptionalLong.empty "
        "position: 0 CreateTime: 1700000000005 size: 88 magic: 2 compresscodec: none crc: 3562494959 isvalid: true",
        "| offset: 100 CreateTime: 1700000000000 keySize: 2 valueSize: 2 sequence: -1 headerKeys: [h,n] "
        "key: k1 payload: v1",
        "| offset: 101 CreateTime: 1700000000005 keySize: 2 valueSize: -1 sequence: -1 headerKeys: [] "
        "key: k2 payload: null",
    ]


def test_depth_is_a_choice(duramen: Command, tmp_path: Path) -> None:
    path = log(tmp_path, LZ4)
    shallow = duramen("dump", path, output="json").lines
    assert [line["kind"] for line in shallow] == ["file", "log", "batch"]
    assert shallow[2]["codec"] == "lz4"
    deep = duramen("dump", "--files", path, "--deep-iteration", output="json").lines
    assert [line["kind"] for line in deep] == ["file", "log", "batch", "record", "record"]
    assert "key" not in deep[3]
    data = duramen("dump", path, "--print-data-log", "--key-decoder", "hex", "--value-decoder", "base64", output="json")
    assert (data.lines[3]["key"], data.lines[3]["value"]) == ("6b31", "djE=")
    bare = duramen("dump", path, "--print-data-log", "--skip-record-metadata").out.splitlines()
    assert bare[-1] == "| key: k2 payload: null"


def test_control_records_are_named(duramen: Command, tmp_path: Path) -> None:
    found = duramen("dump", log(tmp_path, ABORT, 200), "--deep-iteration")
    assert "isTransactional: true isControl: true" in found.out
    assert found.out.splitlines()[-1].endswith("endTxnMarker: ABORT coordinatorEpoch: 11")


def test_legacy_messages(duramen: Command, tmp_path: Path) -> None:
    found = duramen("dump", log(tmp_path, V1), "--print-data-log", output="json")
    assert found.code == 0
    records = [line for line in found.lines if line["kind"] == "record"]
    assert [(line["offset"], line["key"], line["value"]) for line in records] == [(100, "k1", "v1"), (101, "k2", None)]


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (PLAIN[:-1], "after the last whole batch"),
        (PLAIN[:80] + b"x" + PLAIN[81:], "checksum"),
        (PLAIN + PLAIN, "offset 100 where at least 102 belongs"),
        (b"\0" * 100, "impossible"),
        (PLAIN[:16] + b"\x09" + PLAIN[17:], "magic"),
    ],
)
def test_damage_is_a_finding(duramen: Command, tmp_path: Path, data: bytes, says: str) -> None:
    path = log(tmp_path, data)
    text = duramen("dump", path)
    assert text.code == 3
    assert "DAMAGE: " in text.out
    assert says in text.out
    finding = next(line for line in duramen("dump", path, output="json").lines if line["kind"] == "finding")
    assert finding["file"] == str(path)
    assert finding["position"] is not None


def test_every_truncation_ends_in_words(duramen: Command, tmp_path: Path) -> None:
    for size in range(len(LZ4)):
        found = duramen("dump", log(tmp_path, LZ4[:size]), "--deep-iteration")
        assert found.code == (3 if size else 0)
        assert "Traceback" not in found.err


def test_a_whole_partition_is_sound(duramen: Command, orders: Path) -> None:
    folder = orders / "logs" / "orders-0"
    whole = duramen("dump", folder, "--deep-iteration", output="json")
    assert whole.code == 0
    assert sum(line["kind"] == "record" for line in whole.lines) == 100
    assert sum(line["kind"] == "offset_index_entry" for line in whole.lines) > 5
    assert sum(line["kind"] == "time_index_entry" for line in whole.lines) > 5
    for flag in ("--index-sanity-check", "--verify-index-only"):
        quiet = duramen("dump", folder, flag, output="json")
        assert quiet.code == 0
        assert not [line for line in quiet.lines if line["kind"].endswith("_entry")]


@pytest.mark.parametrize("suffix", [".index", ".timeindex"])
def test_index_entries_that_lead_nowhere(duramen: Command, orders: Path, suffix: str) -> None:
    path = sorted((orders / "logs" / "orders-0").glob(f"*{suffix}"))[0]
    data = bytearray(path.read_bytes())
    at = 4 if suffix == ".index" else 0
    width = ">i" if suffix == ".index" else ">q"
    struct.pack_into(width, data, at, struct.unpack_from(width, data, at)[0] + 1)
    path.write_bytes(data)
    assert duramen("dump", path, "--index-sanity-check").code == 0
    for arguments in ([], ["--verify-index-only"]):
        found = duramen("dump", path, *arguments)
        assert found.code == 3
        assert "DAMAGE: entry" in found.out


def test_transaction_indexes_and_snapshots(duramen: Command, tmp_path: Path) -> None:
    index = tmp_path / f"{20:020d}.txnindex"
    index.write_bytes(encode_entry(AbortedTransaction(88, 26, 27, 28)))
    assert "producerId: 88 firstOffset: 26 lastOffset: 27 lastStableOffset: 28" in duramen("dump", index).out
    snapshot = tmp_path / f"{30:020d}.snapshot"
    write_snapshot(OS_FILES, str(snapshot), [SnapshotEntry(99, 1, 5, 28, 2, 1_700_000_000_000, 2, -1)])
    assert "producerId: 99 producerEpoch: 1" in duramen("dump", snapshot).out
    for path in (index, snapshot):
        path.write_bytes(path.read_bytes()[:-1])
        assert duramen("dump", path).code == 3


def test_limits_and_refusals(duramen: Command, tmp_path: Path) -> None:
    path = log(tmp_path, PLAIN)
    assert "above --max-message-size 50" in duramen("dump", path, "--max-message-size", 50).out
    assert duramen("dump", path, "--max-bytes", 40).code == 0
    assert duramen("dump").code == 2
    assert duramen("dump", path, "--value-decoder", "avro").code == 2
    other = tmp_path / "notes.txt"
    other.write_text("x")
    assert duramen("dump", other).code == 2
    missing = duramen("dump", tmp_path / f"{7:020d}.log")
    assert missing.code == 1
    assert "No such file" in missing.err
