"""A group is rewritten in pieces: how many there are, and by how many threads, changes nothing that is written."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from compaction.lab import NOW_MS, Lab
from logstore.cleaner.filter import Filter, Filtered
from logstore.cleaner.rewrite import GroupWriter
from logstore.cleaner.work import CleaningOptions
from logstore.errors import CorruptBatch
from logstore.records.encoder import EncodedBatches
from logstore.records.record import Record
from logstore.segment.batches import Chunk

DAY_MS = 86_400_000
WHOLE = 1 << 30


def batches(rng: random.Random, keys: int, count: int) -> list[list[Record]]:
    def value() -> bytes | None:
        return None if rng.random() < 0.1 else rng.choice((b"a", b"bc")) * rng.randrange(60)

    return [
        [Record(b"%d" % rng.randrange(keys), value(), NOW_MS - rng.randrange(99)) for _ in range(rng.randint(1, 9))]
        for _ in range(count)
    ]


def lab_of(folder: Path, seed: int, codec_id: int, segment_bytes: int) -> Lab:
    """A log that was compacted before, with new records behind: of a few keys first, so that much stays as it is."""
    rng = random.Random(seed)
    folder.mkdir()
    lab = Lab(folder, segment_bytes=segment_bytes, index_interval_bytes=50)
    lab.append(*batches(rng, 400, 150), codec_id=codec_id, roll=True)
    lab.compact()
    lab.append(*batches(rng, rng.choice((3, 400)), 60), codec_id=codec_id, roll=True)
    return lab


def files_of(lab: Lab) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(Path(lab.directory).iterdir()) if path.suffix != ".deleted"}


@pytest.mark.parametrize("segment_bytes", [3_000, 1 << 20], ids=["many segments", "one segment"])
@pytest.mark.parametrize("codec_id", [0, 3, 4])
@pytest.mark.parametrize("name", ["plain", "recompressed", "opened", "expired"])
def test_the_same_files_whatever_the_pieces(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, segment_bytes: int, codec_id: int, name: str
) -> None:
    options = {
        "plain": CleaningOptions(),
        "recompressed": CleaningOptions(recompress_codec_id=4),
        "opened": CleaningOptions(recompress_codec_id=0),
        "expired": CleaningOptions(key_ttl_ms=50),
    }[name]
    first = lab_of(tmp_path / "first", seed, codec_id, segment_bytes)
    left = []
    for piece_bytes, threads in ((WHOLE, 1), (1, 1), (1, 3), (200, 2), (1_500, 4)):
        monkeypatch.setattr(GroupWriter, "piece_bytes", piece_bytes)
        folder = tmp_path / f"{piece_bytes}-{threads}"
        shutil.copytree(tmp_path / "first", folder)
        lab = Lab(folder, segment_bytes=segment_bytes, index_interval_bytes=50)
        lab.end = first.end
        report = lab.compact(NOW_MS + DAY_MS + 1, threads=threads, options=options)
        report_facts = (report.counts, report.read_bytes, report.written_bytes, report.groups_changed)
        left.append((files_of(lab), report_facts))
    assert all(each == left[0] for each in left[1:])


def test_an_index_that_lies_is_not_followed(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupWriter, "piece_bytes", 300)
    left = []
    for damage in (b"", b"\0" * 64, bytes(range(64)), random.Random(seed).randbytes(80)):
        lab = lab_of(tmp_path / str(len(left)), seed, 0, 1 << 20)
        for path in Path(lab.directory).glob("*.index"):
            data = path.read_bytes()
            path.write_bytes(damage[: len(data)] + data[len(damage) :])
        lab.compact(NOW_MS + 1, threads=2)
        left.append({path.name: path.read_bytes() for path in sorted(Path(lab.directory).glob("*.log"))})
    assert left[0] == left[1] == left[2] == left[3]


@pytest.mark.parametrize("threads", [1, 2, 4])
def test_a_piece_that_fails_leaves_nothing_and_says_why(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch, threads: int
) -> None:
    """In the middle of a group: the pieces behind it end, too, and what came before it is taken away."""
    monkeypatch.setattr(GroupWriter, "piece_bytes", 300)
    lab = lab_of(tmp_path / "log", seed, 0, 1 << 20)
    before = files_of(lab)
    original = Filter.written

    def failing(self: Filter, chunk: Chunk, part: Filtered) -> EncodedBatches | None:
        if part.position > 4_000:
            raise OSError(5, "as if", chunk.file)
        return original(self, chunk, part)

    monkeypatch.setattr(Filter, "written", failing)
    with pytest.raises(OSError, match="as if"):
        lab.compact(NOW_MS + 1, threads=threads)
    assert files_of(lab) == before
    assert not Path(lab.folder).exists()
    monkeypatch.undo()
    lab.compact(NOW_MS + 1, threads=threads)


def test_damage_in_the_middle_is_found_in_the_clean_part_too(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody has read the clean segments yet: each piece is held against its checksums."""
    monkeypatch.setattr(GroupWriter, "piece_bytes", 300)
    lab = lab_of(tmp_path / "log", seed, 0, 1 << 20)
    path = min(Path(lab.directory).glob("*.log"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    before = files_of(lab)
    with pytest.raises(CorruptBatch):
        lab.compact(NOW_MS + 1, threads=2)
    assert files_of(lab) == before
