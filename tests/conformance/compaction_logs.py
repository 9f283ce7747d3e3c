"""Random logs for compaction: what Kafka appends to a partition, and when and how it is then cleaned.

A `Story` is a pure function of its seed: rounds of appends, each followed by one pass of a cleaner with its own clock,
settings and map. Every theme leans towards one rule of compaction; together they reach all of them. Owns what is
valid to append next, so that Kafka refuses nothing. Never runs or judges anything.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from conformance.kafka import Op, record
from conformance.workload import CODECS, LEGACY_CODECS, NOW_MS

DAY_MS = 86_400_000
THEMES = (
    "anything",
    "few keys",
    "many keys",
    "tombstones",
    "transactions",
    "idempotent",
    "keyless",
    "gaps",
    "legacy",
    "append time",
    "small map",
    "small indexes",
    "lag",
    "log start",
    "expiry",
    "uncompressed",
    "no transactions",
)
_MAP_ENTRY_BYTES = 24


@dataclass(frozen=True, slots=True)
class Round:
    """Appends, opened at `opened_ms`, then one pass at `now_ms` with the settings of a compacted topic."""

    opened_ms: int
    operations: tuple[dict[str, Any], ...]
    now_ms: int
    config: Mapping[str, Any]
    log_start_offset: int
    dedupe_buffer_bytes: int
    load_factor: float
    io_buffer_bytes: int
    #: another one than the pass before has left, if any: lost, or damaged
    checkpoint: int | None


@dataclass(frozen=True, slots=True)
class Story:
    seed: str
    theme: str
    #: while appending, when the topic may not be compacted yet
    config: Mapping[str, Any]
    producer_id_expiration_ms: int
    #: between the modification times of a log file and of one that begins an offset later: what the age of tombstones
    #: of the old formats is judged by
    mtime_step_ms: int
    rounds: tuple[Round, ...]


@dataclass(slots=True)
class _Producer:
    producer_id: int
    epoch: int = 0
    sequence: int = 0
    open: bool = False
    #: Kafka may have forgotten it while its transaction was open
    unsure: bool = False


class _Writer:
    """What is appended, in order, and what the log is like by then."""

    def __init__(self, rng: random.Random, theme: str, batch_bytes: int) -> None:
        self.rng = rng
        self.theme = theme
        self.batch_bytes = batch_bytes  # roughly the most
        self.operations: list[dict[str, Any]] = []
        self.now_ms = NOW_MS
        self.end_offset = 0
        self.leader_epoch = rng.randrange(3)
        self.active_is_empty = True
        some = rng.choice((1, 3, 8, 30))
        self.keys = {"few keys": rng.choice((1, 2, 3)), "many keys": 300, "small map": 40}.get(theme, some)
        self.tombstones = {"tombstones": 0.5, "legacy": 0.3, "few keys": 0.2}.get(theme, rng.choice((0, 0.05, 0.2)))
        self.keyless = 0.25 if theme == "keyless" else 0.02 if theme in ("anything", "legacy") else 0
        self.plain_codec = theme == "uncompressed" or rng.random() < 0.3
        self.one_codec = rng.choice(CODECS) if rng.random() < 0.4 else None
        self.append_time = theme == "append time"
        self.producers = [_Producer(10 + at) for at in range(3)]
        self.idempotent = [_Producer(20 + at) for at in range(3)]
        self.old_formats = theme == "legacy"
        if rng.random() < 0.15:
            self.end_offset = 1000
            self.operations.append(Op.truncate_fully(1000))

    # ----- records

    def codec(self) -> str:
        if self.plain_codec:
            return "none"
        return self.one_codec or self.rng.choice(CODECS)

    def records(
        self, most: int = 6, *, headers: bool = True, timed: bool = False, offsets_from: int | None = None
    ) -> list[dict[str, Any]]:
        rng = self.rng
        untimed = not timed and rng.random() < 0.05
        spread_ms = rng.choice((0, 5, 500, 20_000))
        offset = offsets_from
        left_bytes = self.batch_bytes - 150
        out: list[dict[str, Any]] = []
        for _ in range(rng.randint(1, most)):
            key = None if rng.random() < self.keyless else b"k%d" % rng.randrange(self.keys)
            if key is not None and rng.random() < 0.03:
                key = rng.choice((b"", b"long" * 30, key + b"\0"))
            size = rng.choice((0, 3, 20, 60, 300))
            value = rng.randbytes(size) if rng.random() < 0.5 else b"ab" * (size // 2)
            pairs = []
            if headers and rng.random() < 0.1:
                pairs = [(rng.choice(("", "h", "grüße-✓")), rng.choice((None, b"", b"v")))] * rng.randint(1, 2)
            timestamp_ms = -1 if untimed else max(self.now_ms - rng.randint(0, spread_ms), 0)
            is_tombstone = rng.random() < self.tombstones
            left_bytes -= len(key or b"") + len(value) + 60
            if out and left_bytes < 0:
                break
            out.append(record(key, None if is_tombstone else value, timestamp_ms, pairs, offset))
            if offset is not None:
                offset += rng.choice((1, 1, 2, 5))
        return out

    # ----- appends

    def step(self) -> None:
        rng = self.rng
        if rng.random() < 0.6:
            self.advance(rng.choice((1, 20, 300, 4000)))
        if rng.random() < 0.04:
            self.leader_epoch += 1
        if self.old_formats and rng.random() < 0.97:
            self.legacy()
            return
        weights = {
            self.plain: 30,
            self.idempotently: 60 if self.theme in ("idempotent", "expiry") else 8,
            self.transactionally: 60 if self.theme == "transactions" else 12,
            self.end_transaction: 40 if self.theme == "transactions" else 9,
            self.replicated: 60 if self.theme == "gaps" else 4,
            self.roll: 3,
        }
        if self.theme == "no transactions":
            weights |= {self.transactionally: 0, self.end_transaction: 0}
        rng.choices(list(weights), list(weights.values()))[0]()

    def advance(self, elapsed_ms: int) -> None:
        self.now_ms += elapsed_ms
        self.operations.append(Op.clock(self.now_ms))

    def append(self, records: list[dict[str, Any]], **fields: Any) -> None:
        self.operations.append(Op.append_records(records, self.leader_epoch, **{"codec": self.codec(), **fields}))
        self.end_offset += len(records)
        self.active_is_empty = False

    def plain(self) -> None:
        self.append(self.records(most=self.rng.choice((1, 6, 20))))

    def produce(self, producer: _Producer, transactional: bool) -> None:
        if self.rng.random() < 0.04 and not producer.open:
            producer.epoch, producer.sequence = producer.epoch + 1, 0
        records = self.records(timed=True)  # without timestamps it would have expired at the next opening
        self.append(
            records,
            producer_id=producer.producer_id,
            producer_epoch=producer.epoch,
            base_sequence=producer.sequence,
            transactional=transactional,
        )
        producer.sequence += len(records)
        producer.open = producer.open or transactional

    def idempotently(self) -> None:
        if self.theme in ("idempotent", "expiry") and self.rng.random() < 0.2:
            self.idempotent.append(_Producer(100 + len(self.idempotent)))
        self.produce(self.rng.choice(self.idempotent), transactional=False)

    def transactionally(self) -> None:
        self.produce(self.rng.choice(self.producers), transactional=True)

    def end_transaction(self) -> None:
        """Mostly of one that is open; a marker of an empty transaction is valid, too."""
        waiting = [p for p in self.producers if p.open]
        self.end(self.rng.choice(waiting if waiting and self.rng.random() < 0.9 else self.producers))

    def end(self, producer: _Producer) -> None:
        kind = self.rng.choice(("commit", "abort"))
        version = 2 if self.rng.random() < 0.2 and producer.open else 1
        if version == 2:
            producer.epoch, producer.sequence = producer.epoch + 1, 0
        self.operations.append(
            Op.marker(kind, producer.producer_id, producer.epoch, 0, None, self.leader_epoch, version)
        )
        producer.open = False
        if producer.unsure:  # a marker alone makes it known again, without a sequence
            producer.epoch, producer.sequence, producer.unsure = producer.epoch + 1, 0, False
        self.end_offset += 1
        self.active_is_empty = False

    def replicated(self) -> None:
        """A batch with offsets of its own, as it comes from a leader that has compacted."""
        rng = self.rng
        far = (2**31 - 2, 2**31, 2**32) if self.theme == "gaps" and rng.random() < 0.04 else ()
        base = self.end_offset + rng.choice(far or (0, 0, 1, 7, 50))
        fields: dict[str, Any] = {"base_offset": base}
        if self.append_time:
            fields |= {"timestamp_type": "LogAppendTime", "log_append_time_ms": self.now_ms}
        records = self.records(offsets_from=base + rng.choice((0, 0, 2)))
        last = records[-1]["offset"] + rng.choice((0, 0, 3))
        kind = rng.random()
        if kind < 0.15:
            records = []
            fields |= {"empty": True, "max_timestamp_ms": self.now_ms}
        elif kind < 0.4:
            fields["delete_horizon_ms"] = self.now_ms + rng.choice((-1000, 0, 5000))
        self._follow(records, last_offset=last, codec=self.codec(), **fields)
        self.end_offset = last + 1

    def legacy(self) -> None:
        """Message formats 0 and 1, through the leader or with offsets of its own."""
        rng = self.rng
        magic = rng.choice((0, 1, 1))
        codec = rng.choice(LEGACY_CODECS)
        if rng.random() < 0.5:
            records = self.records(headers=False)
            self.append(records, magic=magic, as_magic=magic, codec=codec)
            return
        base = self.end_offset + rng.choice((0, 0, 4))
        records = self.records(headers=False, offsets_from=base)
        self._follow(records, magic=magic, base_offset=base, codec=codec)
        self.end_offset = records[-1]["offset"] + 1

    def _follow(self, records: list[dict[str, Any]], **fields: Any) -> None:
        self.operations.append(Op.append_records(records, self.leader_epoch, origin="replication", **fields))
        self.active_is_empty = False

    # ----- the rest

    def forget_producers(self) -> None:
        """They may have expired, or lie below the log start; then only a new epoch is sure to be taken."""
        for producer in (*self.producers, *self.idempotent):
            if not producer.open:
                producer.epoch, producer.sequence = producer.epoch + 1, 0
            producer.unsure = producer.open

    def roll(self) -> None:
        if not self.active_is_empty:
            self.operations.append(Op.roll())
            self.active_is_empty = True

    def taken(self) -> tuple[dict[str, Any], ...]:
        done, self.operations = tuple(self.operations), []
        return done


def random_config(rng: random.Random, theme: str) -> dict[str, Any]:
    """The settings that hold through a story."""
    config: dict[str, Any] = {
        "segment.bytes": rng.choice((700, 1200, 3000, 10_000)),
        "index.interval.bytes": rng.choice((0, 1, 100, 4096)),
        "segment.index.bytes": 65_536,
        "message.timestamp.type": "LogAppendTime" if theme == "append time" else "CreateTime",
        "delete.retention.ms": rng.choice((0, 1000, 60_000, DAY_MS)),
    }
    if theme == "small indexes":
        config |= {"segment.index.bytes": rng.choice((40, 64, 100)), "index.interval.bytes": rng.choice((0, 1, 100))}
        config["segment.bytes"] = 10_000
    return config


def random_story(seed: str, theme: str) -> Story:
    rng = random.Random(f"{seed} {theme}")
    config = random_config(rng, theme)
    writer = _Writer(rng, theme, config["segment.bytes"])
    expiration_ms = rng.choice((5000, 60_000)) if theme == "expiry" else DAY_MS
    log_start_offset = 0
    rounds = []
    for number in range(rng.randint(1, 4)):
        opened_ms = writer.now_ms
        if writer.old_formats and number > 0 and rng.random() < 0.4:
            writer.old_formats = False  # the topic's format was raised
        for _ in range(rng.choice((4, 12, 40)) * (2 if theme == "many keys" else 1)):
            writer.step()
        for producer in writer.producers:
            if producer.open and rng.random() < 0.8:
                writer.end(producer)
        if rng.random() < 0.8:
            writer.roll()
        if theme == "log start" and rng.random() < 0.7:
            log_start_offset = rng.randint(log_start_offset, writer.end_offset)
            writer.operations.append(Op.log_start(log_start_offset))
            writer.forget_producers()
        retention_ms = config["delete.retention.ms"]
        # Also just before, at and after the horizon that the pass before this one has set.
        waits = (0, 1, 1000, retention_ms - 1, retention_ms, retention_ms + 1, 2 * DAY_MS)
        operations = writer.taken()
        wait_ms = max(rng.choice(waits), 0)
        writer.now_ms += wait_ms
        if theme == "expiry" or wait_ms > DAY_MS // 2:
            writer.forget_producers()
        lag_ms = rng.choice((1, 1000, 5000, 60_000)) if theme == "lag" else 0
        often_full = {"small map": 1.0, "no transactions": 0.3}.get(theme, 0.1)
        slots = rng.choice((1, 2, 3, 5, 10, 25)) if rng.random() < often_full else 10_000
        load_factor = rng.choice((1.0, 0.9, 0.75))
        rounds.append(
            Round(
                opened_ms=opened_ms,
                operations=operations,
                now_ms=writer.now_ms,
                config={**config, "cleanup.policy": "compact", "min.compaction.lag.ms": lag_ms},
                log_start_offset=log_start_offset,
                dedupe_buffer_bytes=_MAP_ENTRY_BYTES * (slots + 1),
                load_factor=load_factor,
                io_buffer_bytes=rng.choice((128, 1000, 10_000, 256 << 10)),
                checkpoint=rng.choice((0, 3, 2**40)) if rng.random() < 0.1 else None,
            )
        )
    return Story(
        seed=seed,
        theme=theme,
        config={**config, "cleanup.policy": "delete", "retention.ms": -1},
        producer_id_expiration_ms=expiration_ms,
        mtime_step_ms=rng.choice((0, 1, 40, 2000)),
        rounds=tuple(rounds),
    )
