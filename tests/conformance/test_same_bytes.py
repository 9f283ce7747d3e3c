"""The same appends through our log and through Kafka's: the files are the same, byte for byte.

Every theme is a number of random workloads that lean towards one rule; each must have been reached. A failing workload
names its seed: DURAMEN_SEED repeats it. DURAMEN_SOAK=1 runs many more.
"""

from __future__ import annotations

import os
import random
import struct
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from conformance.kafka import Kafka
from conformance.workload import CODECS, LEGACY_CODECS, NOW_MS, Twins, random_records
from logstore.partition.producer_state import ProducerState
from logstore.records.columns import columns_of
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.record import Record

SOAK = os.environ.get("DURAMEN_SOAK") == "1"
WORKLOADS = 400 if SOAK else 15
WEEK_MS = 604_800_000
PRODUCERS = (11, 12, 13)
BEFORE_MAX = "message.timestamp.before.max.ms"


def random_config(rng: random.Random, theme: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "segment.bytes": rng.choice((500, 1200, 4000, 20_000)),
        "index.interval.bytes": rng.choice((0, 1, 100, 300, 4096)),
        "segment.index.bytes": rng.choice((4096, 65_536)),
        "segment.ms": rng.choice((WEEK_MS, WEEK_MS, 20_000)),
        "message.timestamp.type": rng.choice(("CreateTime", "CreateTime", "LogAppendTime")),
        "cleanup.policy": rng.choice(("delete", "compact", "compact,delete", "")),
        "compression.type": rng.choice(("producer", "producer", "uncompressed")),
        "retention.ms": rng.choice((-1, 30_000)),
        "retention.bytes": rng.choice((-1, 3000)),
        "preallocate": rng.random() < 0.2,
    }
    if rng.random() < 0.2:
        config["max.message.bytes"] = rng.choice((200, 400))
    if rng.random() < 0.2:
        config[BEFORE_MAX] = 2000
    if theme == "record time":
        config |= {"segment.ms": rng.choice((50, 500, 5000)), "segment.bytes": 20_000}
        if rng.random() < 0.5:
            config |= {
                "segment.ms": WEEK_MS,
                "cleanup.policy": "compact",
                "max.compaction.lag.ms": rng.choice((50, 5000)),
            }
        config["segment.jitter.ms"] = 40
    elif theme == "wall clock":
        config |= {"segment.ms": rng.choice((50, 500)), "segment.bytes": 20_000, "message.timestamp.type": "CreateTime"}
    elif theme == "offset index":
        config |= {
            "segment.index.bytes": rng.choice((40, 64, 100)),
            "index.interval.bytes": rng.choice((0, 1, 100)),
        }
        config |= {"segment.ms": WEEK_MS, "segment.bytes": 20_000, "message.timestamp.type": "CreateTime"}
    elif theme == "time index":
        config |= {
            "segment.index.bytes": rng.choice((12, 13, 24, 36, 100)),
            "index.interval.bytes": rng.choice((0, 1, 100)),
        }
        config |= {"segment.ms": WEEK_MS, "segment.bytes": 20_000}
    elif theme == "overflow":
        config |= {"segment.bytes": 20_000, "segment.ms": WEEK_MS}
    elif theme == "many segments":
        config |= {"segment.bytes": rng.choice((250, 500, 900))}
    return config


def changed_config(rng: random.Random, theme: str, config: dict[str, Any]) -> dict[str, Any]:
    if rng.random() < 0.5:
        return config
    # Kafka cannot open a log whose index is larger than the setting now allows.
    larger = max(config["segment.index.bytes"], (changed := random_config(rng, theme))["segment.index.bytes"])
    return changed | {"segment.index.bytes": larger}


def random_jitter(rng: random.Random, theme: str) -> int:
    return rng.choice((0, 7, 39)) if theme == "record time" else 0


class Workload:
    """Random operations on a pair of logs; asks ours what would make sense next, and now and then does not."""

    def __init__(self, rng: random.Random, theme: str, twins: Twins) -> None:
        self.rng = rng
        self.theme = theme
        self.twins = twins
        self.leader_epoch = rng.randrange(3)
        self.resend: bytes | None = None

    @property
    def now_ms(self) -> int:
        return self.twins.clock.now_ms()

    def records(self, **options: Any) -> list[Record]:
        # Constant timestamps fill the offset index before the time index.
        at_ms = NOW_MS if self.theme == "offset index" else self.now_ms
        untimed = {"wall clock": 0.7}.get(self.theme, 0.05)
        compact = "compact" in str(self.twins.config["cleanup.policy"])
        # Two faults in one batch would only show whose error comes first.
        null_keys = not compact or (self.rng.random() < 0.05 and self.twins.config.get(BEFORE_MAX) is None)
        found = random_records(self.rng, at_ms, no_timestamp=untimed, null_keys=null_keys, **options)
        if self.theme == "offset index":
            found = [Record(r.key, r.value, min(r.timestamp_ms, NOW_MS), r.headers) for r in found]
        if self.rng.random() < 0.03 and not null_keys:
            late = self.rng.choice((3_600_000, 3_600_001))
            found = [Record(r.key, r.value, self.now_ms + late, r.headers) for r in found]
        if self.rng.random() < 0.03:
            early = self.rng.choice((2000, 2001))
            found = [Record(r.key, r.value, self.now_ms - early, r.headers) for r in found]
        return found

    def step(self) -> None:
        rng = self.rng
        if rng.random() < 0.5:
            pace = {"record time": 200, "wall clock": 200, "offset index": 3}.get(self.theme, 50)
            self.twins.set_clock(self.now_ms + rng.choice((1, pace // 3, pace, pace * 4)))
        if rng.random() < 0.05:
            self.leader_epoch += rng.choice((1, 1, 3))
        operations: list[tuple[Any, float]] = [
            (self.plain, 30),
            (self.ready_made, 25),
            (self.idempotent, 15),
            (self.transactional, 15),
            (self.end_transaction, 12),
            (self.repeated, 3),
            (self.refused, 6),
            (self.legacy, 2),
            (self.replicated, 40 if self.theme == "overflow" else 8),
            (self.rolled, 2),
            (self.truncated, 3),
            (self.log_start, 3),
            (self.retained, 3),
        ]
        choices, weights = zip(*operations, strict=True)
        rng.choices(choices, weights)[0]()

    # ----- appends

    def plain(self) -> None:
        """Records, encoded by us on one side and by Kafka's builder on the other."""
        records = self.records()
        config = self.twins.log.config
        size = len(encode_batch(columns_of(records), BatchOptions()))
        if size <= min(config.max_message_bytes, config.segment_bytes):  # else we would make several batches of it
            self.twins.append_records(records, self.leader_epoch)
        else:
            self.twins.append_batch(self.twins.build(records), self.leader_epoch)

    def codec(self) -> str:
        return self.rng.choice(CODECS)

    def ready_made(self) -> None:
        self.twins.append_batch(self.twins.build(self.records(most=8), codec=self.codec()), self.leader_epoch)

    def known(self, producer_id: int) -> ProducerState | None:
        return self.twins.log.producers.producers.get(producer_id)

    def next_of(self, producer_id: int) -> dict[str, Any]:
        """What the producer would send next."""
        state = self.known(producer_id)
        if state is None:
            return {"producer_epoch": 0, "base_sequence": self.rng.choice((0, 0, 7, 2**31 - 2))}
        if self.rng.random() < 0.05:
            return {"producer_epoch": state.producer_epoch + 1, "base_sequence": 0}
        following = 0 if state.last_sequence < 0 else (state.last_sequence + 1) % 2**31
        return {"producer_epoch": state.producer_epoch, "base_sequence": following}

    def produce(self, producer_id: int, transactional: bool, **changes: Any) -> None:
        fields = {"producer_id": producer_id, **self.next_of(producer_id), "transactional": transactional, **changes}
        fields["producer_epoch"] = max(fields["producer_epoch"], 0)
        self.resend = self.twins.build(self.records(), codec=self.codec(), **fields)
        self.twins.append_batch(self.resend, self.leader_epoch)

    def idempotent(self) -> None:
        self.produce(10, transactional=False)

    def transactional(self) -> None:
        self.produce(self.rng.choice(PRODUCERS), transactional=True)

    def end_transaction(self) -> None:
        producer_id = self.rng.choice(PRODUCERS)
        state = self.known(producer_id)
        epoch = 0 if state is None else max(state.producer_epoch, 0)
        coordinator_epoch = max(0 if state is None else state.coordinator_epoch, 0)
        version = self.rng.choice((1, 1, 2))
        if version == 2:
            epoch += 1
        kind = self.rng.choice(("commit", "abort"))
        if self.rng.random() < 0.1:
            epoch, coordinator_epoch = max(epoch - 1, 0), coordinator_epoch + 1
        if self.rng.random() < 0.05:
            coordinator_epoch = max(coordinator_epoch - 1, 0)
        self.twins.marker(kind, producer_id, epoch, coordinator_epoch, self.leader_epoch, version)

    def repeated(self) -> None:
        if self.resend is not None:
            self.twins.append_batch(self.resend, self.leader_epoch)

    def refused(self) -> None:
        """Mostly refused, that is."""
        rng = self.rng
        producer_id = rng.choice((10, *PRODUCERS))
        state = self.known(producer_id)
        what = rng.randrange(7)
        if what == 0 and state is not None:
            self.produce(producer_id, producer_id != 10, base_sequence=rng.randrange(50))
        elif what == 1 and state is not None:
            self.produce(producer_id, producer_id != 10, producer_epoch=max(state.producer_epoch - 1, 0))
        elif what == 2:
            self.produce(rng.choice(PRODUCERS), transactional=False)
        elif what == 3:
            large = [Record(b"k", b"v" * rng.choice((450, 1500, 5000)), self.now_ms)]
            self.twins.append_batch(self.twins.build(large), self.leader_epoch)
        elif what == 4:
            data = bytearray(self.twins.build(self.records(most=1, longest=9, headers=False)))
            data[rng.randrange(17, len(data))] ^= 1 << rng.randrange(8)
            self.twins.append_batch(bytes(data), self.leader_epoch)
        elif what == 5 and self.twins.config["message.timestamp.type"] == "LogAppendTime":
            marked = {"timestamp_type": "LogAppendTime", "log_append_time_ms": self.now_ms}
            self.twins.append_batch(self.twins.build(self.records(), **marked), self.leader_epoch)
        else:
            data = self.twins.build(self.records(most=1, longest=9, headers=False), base_offset=rng.choice((1, 77)))
            self.twins.append_batch(data, self.leader_epoch)

    def legacy(self) -> None:
        """A message set of an old client, up-converted. With a codec of its own it would be recompressed."""
        data = self.twins.build(self.records(headers=False), magic=self.rng.choice((0, 1)))
        self.twins.append_batch(data, self.leader_epoch)

    def replicated(self) -> None:
        rng = self.rng
        end = self.twins.log.log_end_offset
        gaps = (0, 0, 1, 50, 2**31 - 2, 2**31, 2**32) if self.theme == "overflow" else (0, 0, 0, 1, 50)
        fields: dict[str, Any] = {"base_offset": end + rng.choice(gaps), "codec": self.codec()}
        if rng.random() < 0.05 and end > 0:
            fields["base_offset"] = rng.randrange(max(end - 20, 0), end)
        kind = rng.random()
        # A set of several batches that fills an index half-way through is an error in Kafka.
        roomy = self.twins.config["segment.index.bytes"] >= 4096
        if kind < 0.1:
            fields |= {"magic": rng.choice((0, 1)), "codec": rng.choice(LEGACY_CODECS if roomy else LEGACY_CODECS[1:])}
        else:
            fields["leader_epoch"] = self.leader_epoch
            if kind < 0.2:
                fields |= {"last_offset": fields["base_offset"] + 30}
            elif kind < 0.4:
                fields |= {"producer_id": 10, **self.next_of(10)}
                fields["producer_epoch"] = max(fields["producer_epoch"], 0)
        records = self.records(headers="magic" not in fields)
        data = self.twins.build(records, **fields)
        while roomy and "magic" not in fields and rng.random() < 0.3:
            following = fields.get("last_offset", fields["base_offset"] + len(records) - 1) + rng.choice((1, 1, 9))
            records = self.records()
            fields = {"base_offset": following, "leader_epoch": self.leader_epoch, "codec": self.codec()}
            data += self.twins.build(records, **fields)
        self.twins.replicate(data)

    # ----- the rest

    def rolled(self) -> None:
        if self.twins.log.segments[-1].size_bytes:
            self.twins.roll()

    def truncated(self) -> None:
        start, end = self.twins.log.log_start_offset, self.twins.log.log_end_offset
        target = max(
            self.rng.choice((end + 3, end, end - 1, end - 2, end - 7, (start + end) // 2, start, start - 1)), 0
        )
        if forgets_a_timestamp(self.twins, target):
            return
        self.twins.truncate(target)
        if self.twins.log.high_watermark < self.twins.log.log_end_offset:
            # Cut inside a batch: our high watermark stays at the last record's end until there is another one.
            self.twins.append_records([Record(b"k", b"v", self.now_ms)], self.leader_epoch)

    def log_start(self) -> None:
        start, end = self.twins.log.log_start_offset, self.twins.log.log_end_offset
        self.twins.advance_log_start(self.rng.choice((start, start + 1, start + 8, (start + end) // 2, end, end + 1)))

    def retained(self) -> None:
        if self.rng.random() < 0.3:
            self.twins.set_clock(self.now_ms + 30_000)
        self.twins.retain()


def forgets_a_timestamp(twins: Twins, target: int) -> bool:
    """Whether Kafka would lose sight of the largest timestamp left below `target`: it looks for it only if it knew one
    before, or a time index entry is left. Ours always looks.
    """
    left = [segment for segment in twins.log.segments if segment.base_offset <= target]
    if not left or target >= twins.log.log_end_offset:
        return False
    touched = twins.opened_sizes.get(left[-1].base_offset) != left[-1].size_bytes
    return not touched and all(entry.offset >= target for entry in left[-1].time_index.items())


THEMES = {
    "anything": "SIZE",
    "many segments": "SIZE",
    "record time": "TIME by record",
    "wall clock": "TIME by clock",
    "offset index": "OFFSET_INDEX_FULL",
    "time index": "TIME_INDEX_FULL",
    "overflow": "OFFSET_OVERFLOW",
}


@pytest.mark.parametrize("theme", THEMES)
@pytest.mark.timeout(7200 if SOAK else 120)
def test_same_bytes_as_kafka(kafka: Kafka, tmp_path: Path, seed: int, theme: str) -> None:
    rolls: Counter[str] = Counter()
    errors: Counter[str] = Counter()
    duplicates = 0
    for number in range(WORKLOADS):
        rng = random.Random(f"{seed} {theme} {number}")
        twins = Twins(kafka, tmp_path / str(number), random_config(rng, theme), jitter_ms=random_jitter(rng, theme))
        workload = Workload(rng, theme, twins)
        try:
            for _ in range(rng.randint(1, 3)):
                for _ in range(rng.randint(10, 60)):
                    workload.step()
                twins.check(config=changed_config(rng, theme, twins.config))
            twins.close()
        except BaseException as error:
            raise AssertionError(f"workload {number} of {theme!r}, DURAMEN_SEED={seed}, {twins.config}") from error
        rolls += twins.rolls
        errors += twins.errors
        duplicates += twins.duplicates
    print(f"{theme}: {dict(rolls)} {dict(errors)} {duplicates} duplicates")
    assert rolls[THEMES[theme]] > 0


@pytest.mark.parametrize("codec", CODECS)
def test_batches_that_have_the_topics_codec_are_stored_as_sent(
    kafka: Kafka, tmp_path: Path, seed: int, codec: str
) -> None:
    rng = random.Random(seed)
    config = {"compression.type": "uncompressed" if codec == "none" else codec, "segment.bytes": 2000}
    twins = Twins(kafka, tmp_path, config)
    for at in range(30):
        twins.append_batch(twins.build(random_records(rng, NOW_MS + at), codec=codec))
    assert twins.rolls["SIZE"] > 0
    twins.check()
    twins.close()


def test_truncation_keeps_the_largest_timestamp_that_kafka_forgets(kafka: Kafka, tmp_path: Path) -> None:
    """On purpose: retention and lookups by time go by it."""
    twins = Twins(kafka, tmp_path, {})
    for at in range(10):
        twins.append_records([Record(b"k", b"v", NOW_MS + at)])
    twins.check()
    assert forgets_a_timestamp(twins, 5)
    twins.truncate(5)
    with pytest.raises(AssertionError, match="timeindex"):
        twins.check()
    name = f"{0:020}.timeindex"
    assert (twins.kafka_directory / name).read_bytes() == b""
    assert (twins.directory / name).read_bytes() == struct.pack(">qi", NOW_MS + 4, 4)


@pytest.mark.parametrize("compression", ["gzip", "snappy", "lz4", "zstd", "uncompressed", "producer"])
@pytest.mark.parametrize("timestamp_type", ["CreateTime", "LogAppendTime"])
def test_what_we_compress_ourselves_differs_in_nothing_else(
    kafka: Kafka, tmp_path: Path, seed: int, compression: str, timestamp_type: str
) -> None:
    rng = random.Random(seed)
    config: dict[str, Any] = {"compression.type": compression, "message.timestamp.type": timestamp_type}
    twins = Twins(kafka, tmp_path, config)
    for at in range(100 if SOAK else 25):
        twins.set_clock(NOW_MS + 100 * at)
        records = random_records(rng, NOW_MS + 100 * at, longest=rng.choice((60, 3000)))
        codec = rng.choice(CODECS)
        kind = rng.randrange(4)
        if kind == 0:
            twins.append_records(records, at // 9, codec=codec)
        elif kind == 1:
            plain = [Record(r.key, r.value, r.timestamp_ms) for r in records]
            codec = rng.choice(LEGACY_CODECS)
            twins.append_batch(twins.build(plain, codec=codec, magic=rng.choice((0, 1))), at // 9)
        else:
            known = twins.log.producers.producers.get(7)
            fields: dict[str, Any] = {"producer_id": 7, "producer_epoch": 0, "transactional": True}
            fields["base_sequence"] = 0 if known is None else known.last_sequence + 1
            twins.append_batch(twins.build(records, codec=codec, **(fields if kind == 2 else {})), at // 9)
    twins.marker("abort", 7, 0)
    twins.check(same_bytes=compression == "uncompressed")
    twins.close()
    assert not twins.errors
