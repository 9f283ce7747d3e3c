"""The search for keys finds exactly the records that have them, in every codec, and none that only look alike."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from logstore.compaction.erasure import find_keys
from logstore.records.compression import codec_by_name
from logstore.records.record import Record
from logstore.store import LogStore
from reference.partition_writer import writing

NOW_MS = 1_700_000_000_000


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_records_are_counted_exactly(tmp_path: Path, codec: str, seed: int) -> None:
    randomness = random.Random(f"{seed} {codec}")
    keys = [b"", b"a", b"b", b"ab", b"ba", b"a" * 40, b"a" * 39 + b"b", b"\xff\x00"]
    written: Counter[bytes] = Counter()
    with LogStore(tmp_path / "store", create=True) as store:
        topic = store.create_topic("t", configs={"segment.bytes": 3000})
        with writing(store, topic, 0, what="test") as log:
            for _ in range(20):
                chosen = [randomness.choice([*keys, None]) for _ in range(randomness.randrange(1, 30))]
                written.update(key for key in chosen if key is not None)
                records = [Record(key, randomness.choice([None, b"v" * 9, b"ab"]), NOW_MS) for key in chosen]
                log.append(records, codec_id=codec_by_name(codec).id)
        found = find_keys(store, topic, [*keys, b"c"], now_ms=NOW_MS)
    for erasure in found:
        assert sum(place.records for place in erasure.places) == written[erasure.key]
        assert erasure.erased == (written[erasure.key] == 0)
    assert any(len(erasure.places) > 1 for erasure in found)
    assert all(place.goes.startswith("the topic is not compacted") for place in found[1].places)
