"""The search for keys finds exactly the records that have them, in every codec, and none that only look alike."""

from __future__ import annotations

import json
import random
import shutil
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


def test_every_place_that_may_hold_a_key_is_found_with_when_it_goes(tmp_path: Path) -> None:
    """A copy of the segment with the key in every place where one may lie, and in one that is another topic's."""
    with LogStore(tmp_path / "store", create=True) as store:
        topic = store.create_topic("t", configs={"cleanup.policy": "compact"})
        store.create_topic("u")
        with writing(store, topic, 0, what="test") as log:
            log.append([Record(b"key", b"value", NOW_MS)])
        partition = Path(store.layout.partition(topic.partition(0)))
        segment = partition / f"{0:020d}.log"
        staging = Path(store.layout.staging)
        places = {
            partition / f"{7:020d}.log.deleted": ("deleted", 0, "swept once file.delete.delay.ms has passed"),
            partition / f"{8:020d}.log.cleaned": ("leftover", 0, "removed by the next compaction"),
            partition / f"{9:020d}.log": ("leftover", 0, "removed by the next compaction"),
            partition / "quarantine" / "000001" / f"{0:020d}.log.from-0": ("quarantine", 0, "never by itself"),
            staging / f"{'a' * 32}-run" / f"{0:020d}.log": ("run", 0, "left by a killed compaction"),
            staging / f"{'c' * 32}-run" / f"{0:020d}.log": ("run", None, "a compaction is at work"),
            staging / f"{'d' * 32}-stray" / f"{0:020d}.log": ("leftover", None, "never by itself"),
            staging / f"{'e' * 32}-delete" / f"{0:020d}.log": ("leftover", None, "with the next `duramen retain`"),
        }
        of_another = staging / f"{'b' * 32}-run" / f"{0:020d}.log"
        for path in (*places, of_another):
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(segment, path)
        for letter, name in (("a", "t-0"), ("b", "u-0")):
            (staging / f"{letter * 32}-run" / "owner").write_text(json.dumps({"partition": name}))
        torn = staging / f"{'f' * 32}-plan" / "1.batches"
        torn.parent.mkdir()
        torn.write_bytes(b"torn")
        (found,) = find_keys(store, topic, [b"key"], now_ms=NOW_MS)
        by_file = {Path(place.file): place for place in found.places}
        assert by_file.keys() == {segment, torn, *places}
        assert (by_file[torn].kind, by_file[torn].unreadable, by_file[torn].records) == ("staging", True, 0)
        assert by_file[torn].goes.startswith("not committed")
        assert by_file[segment].kind == "segment"
        assert by_file[segment].document()["first_offset"] == 0
        for path, (kind, number, goes) in places.items():
            place = by_file[path]
            assert (place.kind, place.partition, place.records) == (kind, number, 1), path
            assert place.goes.startswith(goes), path
        deleted = by_file[partition / f"{7:020d}.log.deleted"]
        assert deleted.goes_ms is not None
        assert not found.erased
        (other,) = find_keys(store, topic, [b"other key"], now_ms=NOW_MS)
        assert [place.file for place in other.places] == [str(torn)], "what cannot be read may hold any key"
        torn.unlink()
        (gone,) = find_keys(store, topic, [b"other key"], now_ms=NOW_MS)
        assert gone.erased
