"""A batch's offset lies outside its checksum: one that is wrong must not decide which records stay."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import pytest

from compaction.lab import NOW_MS, Lab
from logstore.cleaner.rewrite import GroupWriter
from logstore.errors import CorruptBatch
from logstore.records.record import Record


def made(folder: Path, rng: random.Random, segment_bytes: int) -> Lab:
    """A compacted part and a dirty one, whose keys all occur in both."""
    folder.mkdir()
    lab = Lab(folder, segment_bytes=segment_bytes, index_interval_bytes=50)
    for number in range(2):
        batches = [
            [Record(b"%d" % rng.randrange(30), b"%d" % rng.getrandbits(40), NOW_MS) for _ in range(rng.randint(1, 9))]
            for _ in range(60)
        ]
        lab.append(*batches, roll=True)
        if not number:
            lab.compact()
    return lab


def positions(data: bytes) -> list[int]:
    found, at = [], 0
    while at < len(data):
        found.append(at)
        at += 12 + int(struct.unpack_from(">i", data, at + 8)[0])
    return found


def latest_by_place(lab: Lab) -> dict[bytes | None, bytes | None]:
    """The last value of each key as the records lie in the files, whatever their offsets say."""
    return {record.key: record.value for record in lab.reader().records(0, lab.end)}


def files_of(lab: Lab) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(lab.directory).iterdir()) if path.suffix != ".deleted"}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("segment_bytes", [700, 1 << 20], ids=["many segments", "one segment"])
def test_a_batch_with_a_wrong_offset_takes_no_key_with_it(
    tmp_path: Path, seed: int, threads: int, segment_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GroupWriter, "piece_bytes", 300)
    rng = random.Random(seed)
    found = 0
    for case in range(16):
        lab = made(tmp_path / str(case), rng, segment_bytes)
        wanted = latest_by_place(lab)
        path = rng.choice([path for path in sorted(Path(lab.directory).glob("*.log")) if path.stat().st_size])
        data = bytearray(path.read_bytes())
        at = rng.choice(positions(data))
        (offset,) = struct.unpack_from(">q", data, at)
        struct.pack_into(">q", data, at, offset ^ (1 << rng.choice((0, 1, 2, 3, 4, 5, 6, 8, 20, 31, 32, 40, 62))))
        path.write_bytes(data)
        before = files_of(lab)
        try:
            lab.compact(NOW_MS + 1, threads=threads)
        except CorruptBatch:
            found += 1
            kept = {name: data for name, data in files_of(lab).items() if name in before}
            if segment_bytes > 700:
                assert kept == before
        else:
            assert latest_by_place(lab) == wanted, f"case {case}, batch at {at} of {path.name}, offset {offset}"
    assert found > 3
