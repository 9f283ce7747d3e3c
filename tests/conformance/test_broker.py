"""A stock broker over an exported directory, and back: served record for record, appended to, imported again.

Every start of a broker costs seconds, so one story is told over three lives of one broker.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from conformance.broker import Broker
from conformance.kafka import Kafka, KafkaRecord, batch, record
from conformance.workload import CODECS, LEGACY_CODECS, NOW_MS, as_kafka, for_kafka, random_records
from logstore.clock import ManualClock
from logstore.files import OS_FILES
from logstore.limits import DEFAULT_LIMITS
from logstore.partition.producer_state import AppendOrigin
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.transfer.kafka_export import export_topics
from logstore.transfer.kafka_import import import_topics
from logstore.transfer.kafka_source import examine, stopped_source
from reference.partition_writer import writing

SMALL = {"segment.bytes": 4000, "index.interval.bytes": 300, "retention.ms": -1}
#: far above those a new cluster hands out
PRODUCERS = (10**12, 10**12 + 1, 10**12 + 2)
ABORTED = b"aborted"

Place = tuple[str, int]
Expected = dict[Place, list[KafkaRecord]]


class Writer:
    """Fills topics of a store and notes what a consumer must get."""

    def __init__(self, kafka: Kafka, store: LogStore, rng: random.Random) -> None:
        self.kafka = kafka
        self.store = store
        self.rng = rng
        self.expected: Expected = {}
        self.ends: dict[Place, int] = {}

    def note(self, place: Place, records: Iterable[Record], first_offset: int) -> None:
        for i, r in enumerate(records):
            found = KafkaRecord(first_offset + i, r.timestamp_ms, r.key, r.value, r.headers)
            self.expected.setdefault(place, []).append(found)

    def codecs(self, name: str, partitions: int) -> None:
        """Plain records and ready-made batches of every codec, nulls, headers, several segments."""
        topic = self.store.create_topic(name, partitions=partitions, configs=SMALL)
        for number in range(partitions):
            clock = ManualClock(NOW_MS)
            with writing(self.store, topic, number, what="test", clock=clock) as log:
                for at in range(60):
                    clock.set(NOW_MS + 20 * at)
                    records = random_records(self.rng, clock.now_ms(), no_timestamp=0)
                    self.note((name, number), records, log.log_end_offset)
                    codec = self.rng.choice(CODECS)
                    if at % 2:
                        log.append(records, codec_id=CODECS.index(codec), leader_epoch=0)
                    else:
                        log.append_batches(self.kafka.build_batches([batch(for_kafka(records), codec=codec)])[0])
                assert len(log.segments) > 2
                self.ends[name, number] = log.log_end_offset

    def transactions(self, name: str) -> None:
        """Transactions that overlap; the keys say which of them are aborted."""
        topic = self.store.create_topic(name, partitions=1, configs=SMALL)
        clock = ManualClock(NOW_MS)
        sequences = dict.fromkeys(PRODUCERS, 0)
        fates: dict[int, bool | None] = dict.fromkeys(PRODUCERS)
        with writing(self.store, topic, 0, what="test", clock=clock) as log:
            for at in range(120):
                clock.set(NOW_MS + 20 * at)
                producer_id = self.rng.choice(PRODUCERS)
                fate = fates[producer_id]
                if fate is not None and (self.rng.random() < 0.4 or at > 110):
                    log.append_marker(commit=fate, producer_id=producer_id, producer_epoch=0)
                    fates[producer_id] = None
                    continue
                if fate is None:
                    if at > 110:
                        continue
                    fate = fates[producer_id] = self.rng.random() < 0.6
                records = random_records(self.rng, clock.now_ms(), no_timestamp=0)
                records = [Record(b"kept" if fate else ABORTED, r.value, r.timestamp_ms, r.headers) for r in records]
                self.note((name, 0), records, log.log_end_offset)
                fields: dict[str, Any] = {"producer_id": producer_id, "producer_epoch": 0, "transactional": True}
                fields |= {"base_sequence": sequences[producer_id], "codec": self.rng.choice(CODECS)}
                log.append_batches(self.kafka.build_batches([batch(for_kafka(records), **fields)])[0])
                sequences[producer_id] += len(records)
            for producer_id, fate in fates.items():
                if fate is not None:
                    log.append_marker(commit=fate, producer_id=producer_id, producer_epoch=0)
            self.ends[name, 0] = log.log_end_offset

    def replicated(self, name: str) -> None:
        """What an old cluster left behind: formats 0 and 1, gaps, batches that compaction emptied."""
        topic = self.store.create_topic(name, partitions=1, configs=SMALL)
        clock = ManualClock(NOW_MS)
        with writing(self.store, topic, 0, what="test", clock=clock) as log:
            for at in range(60):
                base = log.log_end_offset + self.rng.choice((0, 0, 7))
                magic = min(at // 20, 2)
                records = random_records(self.rng, NOW_MS + 20 * at, no_timestamp=0, headers=magic == 2)
                fields: dict[str, Any] = {"base_offset": base, "magic": magic}
                fields["codec"] = self.rng.choice(LEGACY_CODECS if magic < 2 else CODECS)
                if magic == 2:
                    fields["leader_epoch"] = 0
                if at % 10 == 9 and magic == 2:
                    fields |= {"empty": True, "last_offset": base + 4, "max_timestamp_ms": NOW_MS}
                    records = []
                stored = [Record(r.key, r.value, r.timestamp_ms if magic else -1, r.headers) for r in records]
                self.note((name, 0), stored, base)
                data = self.kafka.build_batches([batch(for_kafka(records), **fields)])[0]
                log.append_batches(data, origin=AppendOrigin.REPLICATION)
            self.ends[name, 0] = log.log_end_offset


def committed(records: Iterable[KafkaRecord]) -> list[KafkaRecord]:
    return [r for r in records if r.key != ABORTED]


def served(kafka: Kafka, broker: Broker, place: Place, end: int, **options: Any) -> list[KafkaRecord]:
    return kafka.consume(broker.bootstrap, place[0], partition=place[1], await_end_offset=end, **options)


def assert_served(kafka: Kafka, broker: Broker, writer: Writer, topics: Iterable[str]) -> None:
    for place, expected in writer.expected.items():
        if place[0] in topics:
            assert served(kafka, broker, place, writer.ends[place]) == expected, place
            assert served(kafka, broker, place, writer.ends[place], committed=True) == committed(expected), place


def append_with_the_broker(kafka: Kafka, broker: Broker, writer: Writer, topics: Iterable[str]) -> None:
    """Idempotent, compressed and transactional appends by the stock producer; noted as expected."""
    for place, expected in writer.expected.items():
        name, number = place
        if name not in topics:
            continue
        end = writer.ends[place]
        for codec in CODECS:
            plain = [record(b"more", codec.encode(), NOW_MS + 5000 + i, [("h", None)]) for i in range(3)]
            offsets = kafka.produce(broker.bootstrap, name, plain, partition=number, codec=codec)
            assert offsets == [[end, end + 1, end + 2]]
            expected += [
                KafkaRecord(o, NOW_MS + 5000 + i, b"more", codec.encode(), (("h", None),))
                for i, o in enumerate(offsets[0])
            ]
            end += 3
        groups = [([record(b"more", b"kept", NOW_MS)], True), ([record(ABORTED, b"lost", NOW_MS)], False)]
        offsets = kafka.produce(
            broker.bootstrap, name, partition=number, transactions=groups, transactional_id=f"{name}-{number}"
        )
        assert offsets == [[end], [end + 2]]
        expected.append(KafkaRecord(end, NOW_MS, b"more", b"kept"))
        expected.append(KafkaRecord(end + 2, NOW_MS, ABORTED, b"lost"))
        writer.ends[place] = end + 4


def assert_imported(root: Path, logs_dir: Path, writer: Writer, topics: list[str], *, clean: bool) -> None:
    """A new store takes the stopped broker's partitions in, with everything the broker appended."""
    with LogStore(root, create=True) as store, stopped_source(OS_FILES, str(logs_dir)):
        source = examine(OS_FILES, str(logs_dir), only=topics, limits=DEFAULT_LIMITS)
        assert source.clean is clean
        imported = import_topics(store, source, {})
        assert sorted(each.topic.name for each in imported) == sorted(topics)
        assert [part for each in imported for part in each.partitions if part.found_damage] == []
        for place, expected in writer.expected.items():
            if place[0] in topics:
                topic = store.topic(place[0])
                assert store.high_watermark(topic, place[1]) == writer.ends[place], place
                reader = store.reader(topic, place[1])
                assert [as_kafka(r) for r in reader.records(0)] == expected, place
                assert [as_kafka(r) for r in reader.records(0, committed=True)] == committed(expected), place
                reader.close()


@pytest.mark.timeout(300)
def test_exported_store_is_served_appended_to_and_imported_again(kafka: Kafka, tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with LogStore(tmp_path / "store", create=True) as store:
        writer = Writer(kafka, store, rng)
        first, second = ["codecs", "transactions", "old"], ["codecs2", "transactions2", "old2"]
        for suffix in ("", "2"):
            writer.codecs(f"codecs{suffix}", partitions=2)
            writer.transactions(f"transactions{suffix}")
            writer.replicated(f"old{suffix}")

        with Broker(kafka, tmp_path / "broker") as broker:
            forever = {"retention.ms": -1}
            ids = {t.name: broker.create_topic(t.name, t.partitions, forever) for t in store.topics()}
            broker.stop()

            # Clean: the broker trusts every file.
            done = export_topics(
                store, str(broker.logs_dir), [store.topic(n) for n in first], topic_ids={n: ids[n] for n in first}
            )
            assert done.clean
            for place in writer.expected:
                if place[0] in first:
                    assert kafka.dump_findings(broker.partition_dir(*place), compacted=place[0] == "old") == []
            broker.start()
            assert_served(kafka, broker, writer, first)
            append_with_the_broker(kafka, broker, writer, first)
            assert_served(kafka, broker, writer, first)
            broker.stop()
            assert_imported(tmp_path / "imported", broker.logs_dir, writer, first, clean=True)

            # Unclean: it looks through everything, also what it appended itself.
            done = export_topics(
                store,
                str(broker.logs_dir),
                [store.topic(n) for n in second],
                topic_ids={n: ids[n] for n in second},
                unclean=True,
            )
            assert not done.clean
            broker.start()
            assert_served(kafka, broker, writer, [*first, *second])
            append_with_the_broker(kafka, broker, writer, second)
            assert_served(kafka, broker, writer, second)  # waits until the last marker is written
            broker.kill()
            assert_imported(tmp_path / "crashed", broker.logs_dir, writer, [*first, *second], clean=False)
