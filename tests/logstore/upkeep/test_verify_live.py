"""Verification beside compaction and retention, whole or killed half way: no damage where there is none."""

from __future__ import annotations

import random
import struct
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from crc32c import crc32c

from logstore.directory import swap
from logstore.records.record import Record
from logstore.segment import segment as segment_module
from logstore.store import LogStore
from logstore.topics.registry import Topic
from logstore.upkeep.retention import retain
from reference.partition_writer import writing
from tests.logstore.restore.test_restore_half_pass import NOW_MS, compact
from tests.logstore.upkeep.test_verify import file_of, verify


class Killed(BaseException):
    """Not an error that anybody handles."""


def filled(store: LogStore, batches: int = 12, **configs: object) -> Topic:
    topic = store.create_topic("t", configs={"cleanup.policy": "compact", "segment.bytes": 600, **configs})
    more(store, topic, 0, batches)
    return topic


def more(store: LogStore, topic: Topic, seed: int, batches: int) -> None:
    chance = random.Random(seed)
    with writing(store, topic, 0, what="test") as log:
        for _ in range(batches):
            log.append([Record(b"k%d" % chance.randrange(9), b"v%d" % seed, NOW_MS - 1000) for _ in range(6)])


def test_a_pass_that_overtakes_it_at_any_file_is_no_damage(store: LogStore, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = filled(store)
    opened = segment_module.LogSegment.__init__
    for at in range(6):
        left = [at]

        def opening(self: object, *given: object, left: list[int] = left, at: int = at, **named: object) -> None:
            left[0] -= 1
            if left[0] == -1:  # before the file that was next is opened, another has replaced it
                more(store, topic, at, 6)
                compact(store, "t")
            opened(self, *given, **named)  # type: ignore[misc, arg-type]

        with monkeypatch.context() as patched:
            patched.setattr(segment_module.LogSegment, "__init__", opening)
            result = verify(store, topic)
        assert result.sound, (at, result.findings)


def test_a_swap_killed_at_any_step_is_no_damage(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step, finished = 0, False
    while not finished:
        with LogStore(root / f"s{step}", create=True) as store:
            topic = filled(store)
            left = [step]

            def dying(real: Callable[..., object], left: list[int] = left) -> Callable[..., object]:
                def run(*given: object, **named: object) -> object:
                    left[0] -= 1
                    if left[0] < 0:
                        raise Killed
                    return real(*given, **named)

                return run

            with monkeypatch.context() as patched:
                for name in ("write_state", "_rename", "mark_deleted"):
                    patched.setattr(swap, name, dying(getattr(swap, name)))
                try:
                    compact(store, "t")
                    finished = True
                except Killed:
                    pass
            result = verify(store, topic)
            assert result.sound, (step, result.findings)
        step += 1
    assert step > 4


def test_retention_killed_before_its_files_are_renamed_is_no_damage(
    store: LogStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = filled(store, **{"cleanup.policy": "delete", "retention.ms": 10})

    def dying(*_: object, **__: object) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        patched.setattr("logstore.partition.log.mark_deleted", dying)
        with pytest.raises(Killed):
            retain(store, topic, 0, now_ms=NOW_MS + 10**6)
    assert verify(store, topic).sound


def test_many_runs_beside_passes(store: LogStore, root: Path, seed: int) -> None:
    topic = filled(store)
    done = threading.Event()
    failed: list[BaseException] = []

    def work() -> None:
        try:
            with LogStore(root) as other:
                for number in range(12):
                    more(other, topic, seed + number, 4)
                    compact(other, "t")
        except BaseException as error:
            failed.append(error)
        finally:
            done.set()

    worker = threading.Thread(target=work)
    worker.start()
    runs = 0
    while not done.is_set() or runs < 3:
        result = verify(store, topic)
        runs += 1
        assert result.sound, result.findings
    worker.join()
    assert not failed, failed


@pytest.mark.parametrize("by", [-1, 1])
@pytest.mark.parametrize("codec_id", [0, 1])
def test_a_record_count_that_lies_is_found_as_readers_find_it(store: LogStore, by: int, codec_id: int) -> None:
    topic = store.create_topic("t", configs={"segment.bytes": 2000})
    with writing(store, topic, 0, what="test") as log:
        for number in range(20):
            log.append([Record(b"k%d" % n, b"v" * 40, NOW_MS + number) for n in range(5)], codec_id=codec_id)
    assert verify(store, topic).sound
    path = file_of(store, topic, ".log", at=0)
    data = bytearray(path.read_bytes())
    (length,) = struct.unpack_from(">i", data, 8)
    (count,) = struct.unpack_from(">i", data, 57)
    struct.pack_into(">i", data, 57, count + by)
    struct.pack_into(">I", data, 17, crc32c(bytes(data[21 : 12 + length])))
    path.write_bytes(data)
    result = verify(store, topic)
    assert [(finding.file, finding.position) for finding in result.findings] == [(str(path), 0)]
