"""Large objects are fetched by pieces, side by side, and each byte once."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from logstore.bucket.files import BlockCache, ObjectFile
from logstore.bucket.manifest import Segment
from logstore.bucket.segment_object import LocalSegment, fetch_segments, put_segment
from logstore.bucket.store import BucketStore
from logstore.errors import ObjectStoreUnavailable
from logstore.files import OS_FILES
from logstore.limits import MIB
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Bytes
from logstore.records.record import Record

SIZE = 30 * MIB + 12_345


class Asked(MemoryObjects):
    """Notes which bytes are asked for; each request waits for another one where `together` is set."""

    def __init__(self) -> None:
        super().__init__()
        self.spans: list[tuple[int, int]] = []
        self.fails = False
        self._lock = threading.Lock()
        self.at_once = self.most_at_once = 0

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
        with self._lock:
            self.spans += spans
            self.at_once += 1
            self.most_at_once = max(self.at_once, self.most_at_once)
        try:
            if self.fails:
                raise ObjectStoreUnavailable("not now")
            threading.Event().wait(0.01)
            return super().ranges(key, spans)
        finally:
            with self._lock:
                self.at_once -= 1


@pytest.fixture
def large() -> tuple[Asked, bytes]:
    objects, data = Asked(), np.random.default_rng(1).bytes(SIZE)
    objects.put("logs/large", [data])
    return objects, data


def test_a_reader_that_goes_on_has_the_next_pieces_fetched_meanwhile(large: tuple[Asked, bytes]) -> None:
    objects, data = large
    file = ObjectFile(BlockCache(objects), "logs/large", SIZE, (100, SIZE - 100), "large")
    found, at = bytearray(), 0
    while at < file.size():
        part = file.pread(4 * MIB, at)
        # A scan goes on where the last whole batch ended.
        step = len(part) if at + len(part) == file.size() else len(part) - 300
        found += part[:step]
        at += step
    assert bytes(found) == data[100:-100]
    assert sum(end - begin for begin, end in objects.spans) == SIZE, "no byte came twice"
    assert objects.most_at_once > 1
    assert len(objects.spans) < 16


def read_from(file: ObjectFile, begin: int) -> bytes:
    return b"".join(file.pread(4 * MIB, at) for at in range(begin, SIZE, 4 * MIB))


def test_what_fails_ahead_is_asked_for_again_and_told_then(large: tuple[Asked, bytes]) -> None:
    objects, data = large
    file = ObjectFile(BlockCache(objects), "logs/large", SIZE, (0, SIZE), "large")
    file.pread(4 * MIB, 0)
    file.pread(4 * MIB, 4 * MIB - 100)
    objects.fails = True
    with pytest.raises(ObjectStoreUnavailable):
        read_from(file, 8 * MIB)
    objects.fails = False
    assert read_from(file, 0) == data


def test_segments_come_whole_however_they_are_cut(tmp_path: Path) -> None:
    objects, rng = Asked(), np.random.default_rng(2)
    source, target = tmp_path / "source", tmp_path / "target"
    segments = []
    for folder in (source, target):
        folder.mkdir()
    for number, sizes in enumerate(((9 * MIB, 5000, 700), (0, 0, 0), (4 * MIB - 3, 6, 12), (100, 8, 12))):
        local = LocalSegment(OS_FILES, str(source), number)
        for kind, size in zip(("log", "index", "timeindex"), sizes, strict=True):
            (source / f"{number:020d}.{kind}").write_bytes(rng.bytes(size))
        segments.append(put_segment(objects, local, Segment(f"logs/{number}", number, number + 1)))
    (target / f"{0:020d}.log").write_bytes(b"of an earlier attempt" * MIB)
    fetch_segments(objects, segments, OS_FILES, str(target))
    for path in source.iterdir():
        assert (target / path.name).read_bytes() == path.read_bytes(), path.name
    assert len(objects.spans) == 3 + 0 + 2 + 1, "small ones by one request each"


def test_a_restore_takes_few_requests() -> None:
    with BucketStore("memory://restored", create=True) as store:
        store.create_topic("t", partitions=8, configs={"cleanup.policy": "compact"})
        store.append("t", [Record(b"%d" % number, b"v") for number in range(100)])
    store = BucketStore("memory://restored")
    before = store.requests.total()
    assert sum(batch.num_rows for batch in store.restore("t")) == 100
    looks, manifests, plan_and_object, pin = 2, 2 * 8, 2, 1
    assert store.requests.total() - before <= looks + manifests + plan_and_object + pin
