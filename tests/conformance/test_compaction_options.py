"""What compaction writes beyond Kafka's rules is read by Kafka like the rest; many passes leave what its own do."""

from __future__ import annotations

import random
import shutil
import struct
from pathlib import Path

import pytest

from compaction.lab import NOW_MS, Lab
from conformance.kafka import Kafka
from logstore.cleaner.work import CleaningOptions
from logstore.records.marks import ORDER_HEADER, ORDER_TIMESTAMP
from logstore.records.offset_map import MapSettings
from logstore.records.record import Record

OPTIONS = {
    "merged": (CleaningOptions(merge_bytes=2000), {}),
    "recompressed": (CleaningOptions(recompress_codec_id=4), {}),
    "opened": (CleaningOptions(recompress_codec_id=0), {}),
    "expired": (CleaningOptions(key_ttl_ms=20), {}),
    "by version": (CleaningOptions(), {"order": ORDER_HEADER, "header": b"version"}),
    "by time": (CleaningOptions(), {"order": ORDER_TIMESTAMP}),
    "all at once": (
        CleaningOptions(merge_bytes=5000, recompress_codec_id=3, key_ttl_ms=20),
        {"order": ORDER_TIMESTAMP},
    ),
}


def drawn(rng: random.Random) -> Record:
    headers = (("version", struct.pack(">q", rng.randrange(9))), ("h", None)) if rng.random() < 0.7 else ()
    value = None if rng.random() < 0.2 else rng.choice((rng.randbytes(rng.randrange(60)), b"v" * 500))
    return Record(b"k%d" % rng.randrange(15), value, NOW_MS - rng.randrange(40), headers)


@pytest.mark.parametrize("name", OPTIONS)
def test_kafka_reads_what_options_wrote(kafka: Kafka, tmp_path: Path, name: str, seed: int) -> None:
    rng = random.Random(seed)
    options, order = OPTIONS[name]
    lab = Lab(tmp_path, segment_bytes=2000)
    for codec_id in (0, 2, 4):
        lab.append(*[[drawn(rng) for _ in range(rng.randrange(1, 8))] for _ in range(15)], codec_id=codec_id)
        lab.compact(options=options, map_settings=MapSettings(buffer_bytes=1 << 20, **order))  # type: ignore[arg-type]
    ours = [(r.offset, r.timestamp_ms, r.key, r.value, list(r.headers)) for r in lab.records()]
    theirs = [(r.offset, r.timestamp_ms, r.key, r.value, list(r.headers)) for r in kafka.records(Path(lab.directory))]
    assert ours == theirs
    for path in Path(lab.directory).glob("*.deleted"):
        path.unlink()
    assert kafka.dump_findings(Path(lab.directory), compacted=True) == []


def test_two_hundred_passes_over_a_hot_topic_leave_as_few_segments_as_kafka(kafka: Kafka, tmp_path: Path) -> None:
    rng = random.Random(7)
    ours = Lab(tmp_path / "ours", segment_bytes=4000)
    theirs = Lab(tmp_path / "theirs", segment_bytes=4000)
    checkpoint = 0
    written = {"ours": 0, "theirs": 0}
    for step in range(200):
        batch = [Record(b"k%d" % rng.randrange(100), rng.randbytes(40), NOW_MS + step) for _ in range(12)]
        for lab in (ours, theirs):
            lab.append(batch, roll=True)
        written["ours"] += ours.compact(NOW_MS + step).written_bytes
        done = kafka.clean(
            Path(theirs.directory),
            {"segment.bytes": 4000, "cleanup.policy": "compact"},
            now_ms=NOW_MS + step,
            checkpoint=checkpoint,
        )
        checkpoint = done.end_offset
        written["theirs"] += done.stats.get("bytes_written", 0)
        Path(theirs.state_path).unlink()  # what Kafka left is what the next append begins with
    bases = [len(list(Path(lab.directory).glob("*.log"))) for lab in (ours, theirs)]
    assert bases[0] <= bases[1] + 1, bases
    assert written["ours"] < written["theirs"]
    assert [(r.offset, r.key, r.value) for r in ours.records()] == [
        (r.offset, r.key, r.value) for r in kafka.records(Path(theirs.directory))
    ]
    shutil.rmtree(tmp_path / "theirs")
