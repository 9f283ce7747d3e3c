"""A transaction that Kafka left open and we end: the same bytes as Kafka's own marker, and a broker serves the rest."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from conformance.broker import Broker
from conformance.kafka import Kafka, Op, record
from conformance.workload import NOW_MS, PARTITION, partition_files
from logstore.clock import ManualClock
from logstore.commit.transactions import abort_transaction, open_transactions
from logstore.store import LogStore
from logstore.transfer.kafka_export import export_topics
from logstore.transfer.kafka_import import import_topics
from logstore.transfer.kafka_source import examine, stopped_source

CONFIG = {"segment.bytes": 2_000, "index.interval.bytes": 300, "retention.ms": -1}
#: far above those a new cluster hands out
PRODUCERS = (10**12, 10**12 + 1)
MARKED_MS = NOW_MS + 5_000


def data(name: str, count: int, **fields: object) -> dict[str, object]:
    rows = [record(b"%s-%d" % (name.encode(), at), b"v" * 40, NOW_MS) for at in range(count)]
    return Op.append_records(rows, leader_epoch=4, **fields)  # type: ignore[arg-type]


def left_open(kafka: Kafka, directory: Path) -> None:
    """Two transactions without an end, records before, between and behind them, in several segments."""
    first, second = PRODUCERS
    kafka.append(
        directory,
        [
            data("before", 20),
            data("first", 5, producer_id=first, producer_epoch=2, base_sequence=0, transactional=True),
            data("between", 30),
            Op.roll(),
            data("second", 5, producer_id=second, producer_epoch=0, base_sequence=0, transactional=True),
            data("first", 4, producer_id=first, producer_epoch=2, base_sequence=5, transactional=True),
            data("behind", 10),
        ],
        CONFIG,
        now_ms=NOW_MS,
    )


def imported(kafka: Kafka, root: Path, directory: Path) -> LogStore:
    (directory.parent / ".kafka_cleanshutdown").touch()
    store = LogStore(root, create=True, clock=ManualClock(MARKED_MS))
    with stopped_source(store.fs, str(directory.parent)):
        source = examine(store.fs, str(directory.parent), limits=store.limits)
        import_topics(store, source, CONFIG)
    return store


@pytest.mark.timeout(240)
def test_our_marker_is_kafkas_and_a_broker_goes_on(kafka: Kafka, scratch: Path, tmp_path: Path) -> None:
    theirs = scratch / "theirs" / str(PARTITION)
    left_open(kafka, theirs)
    shutil.copytree(theirs.parent, scratch / "source")
    with imported(kafka, tmp_path / "store", scratch / "source" / str(PARTITION)) as store:
        topic = store.topic(PARTITION.topic)
        assert [each.producer_id for each in open_transactions(store, topic, 0)] == list(PRODUCERS)
        for producer_id in reversed(PRODUCERS):
            abort_transaction(store, topic.name, 0, producer_id)
        kafka.append(
            theirs,
            [
                Op.marker("abort", PRODUCERS[1], 0, 0, MARKED_MS, leader_epoch=4, transaction_version=0),
                Op.marker("abort", PRODUCERS[0], 2, 0, MARKED_MS, leader_epoch=4, transaction_version=0),
            ],
            CONFIG,
            now_ms=MARKED_MS,
        )
        export_topics(store, str(tmp_path / "exported"), [topic])
        ours = tmp_path / "exported" / str(PARTITION)
        assert list(kafka.read(ours)) == list(kafka.read(theirs))
        for suffix in (".log", ".txnindex"):
            mine, kafkas = (
                {name: found for name, found in partition_files(each).items() if name.endswith(suffix)}
                for each in (ours, theirs)
            )
            assert mine == kafkas
        assert kafka.dump_findings(ours) == []
        for unclean in (False, True):
            options = {"now_ms": MARKED_MS, "unclean": unclean}
            mine_state, kafkas_state = (kafka.load(each, CONFIG, **options) for each in (ours, theirs))
            assert mine_state.producers == kafkas_state.producers
            assert mine_state.last_stable_offset == kafkas_state.last_stable_offset == kafkas_state.log_end_offset
        committed = [r.offset for r in store.reader(topic, 0).records(0, committed=True)]
        with Broker(kafka, tmp_path / "broker") as broker:
            topic_id = broker.create_topic("served", config={"retention.ms": -1})
            broker.stop()
            broker.mount(ours, "served", topic_id)
            broker.start()
            end = kafkas_state.log_end_offset
            served = kafka.consume(broker.bootstrap, "served", committed=True, await_end_offset=end)
            assert [r.offset for r in served] == committed
            assert len(served) == 60
            [[offset]] = kafka.produce(broker.bootstrap, "served", [record(b"more", b"v", NOW_MS)])
            assert offset == end
