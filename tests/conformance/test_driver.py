"""The judge itself: Kafka's own logs pass, broken ones do not, and the broker serves what it was given."""

from __future__ import annotations

import dataclasses
import json
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from conformance.broker import Broker
from conformance.build import build
from conformance.kafka import DriverDied, Kafka, KafkaError, KafkaRecord, Op, batch, record
from conformance.vectors import VECTORS, plain

NOW_MS = 1_700_000_000_000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
SMALL = {"segment.bytes": 3000, "index.interval.bytes": 300}


def appends(count: int, codec: str = "none") -> list[dict[str, Any]]:
    return [
        Op.append_records([record(b"k%d" % i, b"v" * 90, NOW_MS + 10 * i + j) for j in range(3)], codec=codec)
        for i in range(count)
    ]


@pytest.fixture
def written(kafka: Kafka, tmp_path: Path) -> Path:
    """A partition directory of several segments that Kafka wrote and closed."""
    directory = tmp_path / "topic-0"
    run = kafka.append(directory, appends(40), SMALL, now_ms=NOW_MS)
    assert len(run.closed.segments) > 3
    assert all(result.error is None for result in run.results)
    return directory


def test_building_again_does_nothing(kafka: Kafka) -> None:
    kafka.versions()
    before = [(p, p.stat().st_mtime_ns) for p in sorted((Path(__file__).parent / "target" / "classes").rglob("*"))]
    build()
    assert before
    assert before == [(p, p.stat().st_mtime_ns) for p, _ in before]


@pytest.mark.parametrize("codec", CODECS)
def test_kafkas_own_log_has_no_findings(kafka: Kafka, tmp_path: Path, codec: str) -> None:
    directory = tmp_path / "topic-0"
    kafka.append(directory, appends(20, codec), SMALL, now_ms=NOW_MS)
    assert kafka.dump_findings(directory) == []


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x01
    path.write_bytes(data)


def last_segment(directory: Path, suffix: str) -> Path:
    return sorted(directory.glob(f"*.{suffix}"))[-2]  # the very last is short


def test_flipped_byte_in_a_batch_is_found(kafka: Kafka, written: Path) -> None:
    flip(last_segment(written, "log"), 200)
    assert any("isvalid: false" in finding for finding in kafka.dump_findings(written))


def test_cut_off_log_is_found(kafka: Kafka, written: Path) -> None:
    log = last_segment(written, "log")
    log.write_bytes(log.read_bytes()[:-5])
    assert any("invalid bytes at the end" in finding for finding in kafka.dump_findings(written))


def test_index_entry_that_points_elsewhere_is_found(kafka: Kafka, written: Path) -> None:
    index = last_segment(written, "index")
    entries = index.read_bytes()
    offset, position = struct.unpack_from(">ii", entries)
    index.write_bytes(struct.pack(">ii", offset + 1, position) + entries[8:])
    assert any(finding.startswith("index entries:") for finding in kafka.dump_findings(written))


def test_time_index_entry_of_another_time_is_found(kafka: Kafka, written: Path) -> None:
    index = last_segment(written, "timeindex")
    entries = index.read_bytes()
    timestamp_ms, offset = struct.unpack_from(">qi", entries)
    index.write_bytes(struct.pack(">qi", timestamp_ms - 1, offset) + entries[12:])
    assert any(finding.startswith("time index entries:") for finding in kafka.dump_findings(written))


@pytest.mark.parametrize("suffix", ["index", "timeindex"])
def test_cut_off_index_fails_the_sanity_check(kafka: Kafka, written: Path, suffix: str) -> None:
    index = last_segment(written, suffix)
    index.write_bytes(index.read_bytes()[:-3])
    assert any(finding.startswith("index sanity:") for finding in kafka.dump_findings(written))


def test_untrimmed_index_is_found_though_kafkas_tool_says_nothing(kafka: Kafka, written: Path) -> None:
    index = last_segment(written, "index")
    index.write_bytes(index.read_bytes() + bytes(80))
    assert kafka.dump_findings(written) == [f"{index.name}: entries do not go upwards"]


def test_snapshot_with_wrong_crc_is_found(kafka: Kafka, written: Path) -> None:
    flip(last_segment(written, "snapshot"), 3)
    assert any(finding.startswith("transactions and snapshots:") for finding in kafka.dump_findings(written))


def test_leftovers_and_missing_logs_are_found(kafka: Kafka, written: Path, tmp_path: Path) -> None:
    (written / "00000000000000000000.log.swap").touch()
    assert kafka.dump_findings(written) == ["left over: 00000000000000000000.log.swap"]
    empty = tmp_path / "empty-0"
    empty.mkdir()
    assert kafka.dump_findings(empty) == [f"no log file in {empty}"]


def test_offset_gaps_are_findings_unless_the_log_is_compacted(kafka: Kafka, tmp_path: Path) -> None:
    directory = tmp_path / "topic-0"
    gap = kafka.build_batches(
        [batch([record(b"k", b"v", NOW_MS)], base_offset=offset, leader_epoch=0) for offset in (0, 5)]
    )
    run = kafka.append(directory, [Op.append(data, origin="replication") for data in gap], now_ms=NOW_MS)
    assert run.closed.log_end_offset == 6
    assert [f.split(": ")[-1] for f in kafka.dump_findings(directory)] == ["0 is followed by 5"]
    assert kafka.dump_findings(directory, compacted=True) == []


def test_same_request_writes_same_bytes(kafka: Kafka, tmp_path: Path) -> None:
    def run(name: str) -> dict[str, bytes]:
        kafka.append(tmp_path / name / "topic-0", appends(20, "zstd"), SMALL, now_ms=NOW_MS)
        return {p.name: p.read_bytes() for p in (tmp_path / name / "topic-0").iterdir()}

    assert run("a") == run("b")


def test_clock_jitter_and_time_rolls_are_the_requests(kafka: Kafka, tmp_path: Path) -> None:
    def bases(jitter_ms: int) -> list[int]:
        operations = [Op.append_records([record(b"k", b"v", NOW_MS + 100 * i)]) for i in range(6)]
        config = {"segment.ms": 250, "segment.jitter.ms": 200}
        directory = tmp_path / f"jitter{jitter_ms}-0"
        run = kafka.append(directory, operations, config, now_ms=NOW_MS + 1000, jitter_ms=jitter_ms)
        return run.closed.base_offsets

    assert bases(0) == [0, 3]
    assert bases(100) == [0, 2, 4]


def test_refused_appends_are_results_and_bad_requests_are_errors(kafka: Kafka, tmp_path: Path) -> None:
    directory = tmp_path / "topic-0"
    operations = [
        Op.append_records([record(None, b"v", NOW_MS)]),
        Op.append_records([record(b"k", b"v", NOW_MS)]),
        Op.append(kafka.build_batches([batch([record(b"k", b"v", NOW_MS)], base_offset=7)])[0]),
        Op.read(5),
    ]
    run = kafka.append(directory, operations, {"cleanup.policy": "compact"}, now_ms=NOW_MS)
    assert [(result.error, result.cause) for result in run.results] == [
        ("RecordValidationException", "InvalidRecordException"),
        (None, None),
        ("InvalidRecordException", None),
        ("OffsetOutOfRangeException", None),
    ]
    assert (run.results[1].first_offset, run.results[1].last_offset) == (0, 0)
    with pytest.raises(KafkaError, match="unknown operation"):
        kafka.append(directory, [{"do": "nothing"}])
    with pytest.raises(KafkaError, match="ConfigException"):
        kafka.append(directory, (), {"segment.ms": -5})


def test_retention_truncation_and_log_start(kafka: Kafka, tmp_path: Path) -> None:
    directory = tmp_path / "topic-0"
    operations = [
        *appends(40),
        Op.truncate(100),
        Op.log_start(30),
        Op.retain(),
        Op.clock(NOW_MS + 1000),
        Op.state(),
    ]
    config = {**SMALL, "file.delete.delay.ms": 500, "retention.ms": -1}
    run = kafka.append(directory, operations, config, now_ms=NOW_MS, crash=True)
    assert run.results[-3]["deleted"] > 0
    assert (run.closed.log_start_offset, run.closed.log_end_offset) == (30, 100)
    assert run.closed.segments[0][0] <= 30 < run.closed.segments[1][0]
    assert not list(directory.glob("*.deleted"))  # due by the clock, although never closed


def test_crash_recovery_is_kafkas(kafka: Kafka, tmp_path: Path) -> None:
    directory = tmp_path / "topic-0"
    kafka.append(directory, appends(40), SMALL, now_ms=NOW_MS, crash=True)
    log = sorted(directory.glob("*.log"))[-1]
    assert log.stat().st_size > 400
    with open(log, "r+b") as file:
        file.truncate(log.stat().st_size - 7)
    loaded = kafka.load(directory, SMALL, unclean=True, now_ms=NOW_MS)
    assert (loaded.log_end_offset, loaded.log_start_offset) == (117, 0)
    assert kafka.dump_findings(directory) == []


def test_transactions_hide_aborted_records_and_leave_producer_state(kafka: Kafka, tmp_path: Path) -> None:
    directory = tmp_path / "topic-0"

    def data(producer_id: int, value: bytes) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "producer_id": producer_id,
            "producer_epoch": 0,
            "base_sequence": 0,
            "transactional": True,
        }
        return Op.append_records([record(b"k", value, NOW_MS)], **fields)

    run = kafka.append(
        directory,
        [data(1, b"aborted"), data(2, b"committed"), Op.marker("abort", 1, 0), Op.marker("commit", 2, 0), data(3, b"")],
        now_ms=NOW_MS,
    )
    assert run.closed.last_stable_offset == 4
    assert [p["producer_id"] for p in run.closed.producers] == [1, 2, 3]
    assert [r.value for r in kafka.records(directory)] == [b"aborted", b"committed", b""]
    assert [r.value for r in kafka.records(directory, committed=True)] == [b"committed"]
    indexes = kafka.indexes(directory)
    assert indexes["00000000000000000000.txnindex"] == [[1, 0, 2, 1]]
    assert [p["current_txn_first_offset"] for p in indexes["00000000000000000005.snapshot"]] == [None, None, 4]
    read = kafka.read_range(directory, [Op.read(0, isolation="read_committed")])[0]
    assert (read["size_bytes"], read["aborted"]) == (2 * (61 + 8) + 2 * 78 + len(b"abortedcommitted"), [[1, 0]])


def test_lookups_by_time(kafka: Kafka, written: Path) -> None:
    found = kafka.offset_for_timestamp(written, [-2, -1, -3, NOW_MS + 51, NOW_MS + 10_000])
    assert found == [(-1, 0), (-1, 120), (NOW_MS + 392, 119), (NOW_MS + 51, 16), None]


@pytest.mark.parametrize("name", ["batches_v2", "batches_v1", "batches_v0", "upconverted"])
def test_golden_batches_are_kafkas(kafka: Kafka, name: str) -> None:
    cases = json.loads((VECTORS / f"{name}.json").read_text(encoding="utf-8"))["cases"]
    assert len(cases) > 20
    for case in cases:
        assert [plain(b) for b in kafka.read(bytes.fromhex(case["hex"]))] == case["batches"], case["name"]


def test_golden_directories_are_kafkas(kafka: Kafka, tmp_path: Path) -> None:
    for case in json.loads((VECTORS / "directories.json").read_text(encoding="utf-8"))["cases"]:
        directory = tmp_path / case["name"]
        directory.mkdir()
        for name, data in case["files"].items():
            (directory / name).write_bytes(bytes.fromhex(data))
        (directory / "leader-epoch-checkpoint").write_text(case["leader-epoch-checkpoint"])
        assert kafka.dump_findings(directory) == []
        assert kafka.indexes(directory) == case["entries"]
        state = kafka.load(directory, case["config"], now_ms=NOW_MS)
        assert (state.log_end_offset, state.last_stable_offset) == (case["log_end_offset"], case["last_stable_offset"])
        assert [list(entry) for entry in state.leader_epochs] == case["leader_epochs"]


def test_driver_that_hangs_or_dies_is_replaced(kafka: Kafka, tmp_path: Path) -> None:
    with Kafka() as own:
        assert own.versions() == kafka.versions()
        process = own._process
        assert process is not None
        with pytest.raises(DriverDied, match="no answer within"):
            own.request("await_broker", timeout_s=0.5, bootstrap="127.0.0.1:9", timeout_ms=60_000)
        assert process.poll() is not None
        assert own.versions()["kafka"] == kafka.versions()["kafka"]
        assert own._process is not None
        threading.Timer(0.3, own._process.kill).start()
        with pytest.raises(DriverDied, match="ended"):
            own.request("await_broker", bootstrap="127.0.0.1:9", timeout_ms=60_000)


def test_bench_writes_the_records_of_its_input(kafka: Kafka, tmp_path: Path) -> None:
    source = tmp_path / "input"
    source.write_bytes(b"".join(b"%010d%0100d" % (i, i) for i in range(1000)))
    directory = tmp_path / "bench-0"
    timed = kafka.bench_append(directory, source, records=2500, codec="lz4", repetitions=2, records_per_ms=10)
    assert len(timed["seconds"]) == 2
    assert timed["log_bytes"] == sum(p.stat().st_size for p in directory.glob("*.log"))
    expected = [KafkaRecord(i, NOW_MS + i // 10, b"%010d" % (i % 1000), b"%0100d" % (i % 1000)) for i in range(2500)]
    assert list(kafka.records(directory)) == expected
    for copy in (False, True):
        scanned = kafka.bench_iterate(directory, copy=copy)
        assert (scanned["records"], scanned["bytes"]) == (2500, 2500 * 110)


@pytest.fixture(scope="module")
def broker(kafka: Kafka, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with Broker(kafka, tmp_path_factory.mktemp("broker")) as running:
        yield running


def test_broker_serves_appends_and_transactions_over_restarts(kafka: Kafka, broker: Broker, tmp_path: Path) -> None:
    # One broker life after another, because every start costs seconds.
    foreign = tmp_path / "foreign-0"
    kafka.append(foreign, appends(40, "lz4"), SMALL, now_ms=NOW_MS)
    expected = list(kafka.records(foreign))
    forever = {"retention.ms": -1}
    foreign_id = broker.create_topic("foreign", config=forever)
    broker.create_topic("own", partitions=2, config=forever)
    sent = [record(b"k%d" % i, None if i % 3 else b"v%d" % i, NOW_MS + i, [("h", None)]) for i in range(10)]
    assert kafka.produce(broker.bootstrap, "own", sent, partition=1, codec="zstd") == [list(range(10))]
    groups = [([record(b"a", b"committed")], True), ([record(b"a", b"aborted")], False)]
    offsets = kafka.produce(broker.bootstrap, "own", transactions=groups, transactional_id="t")
    assert offsets == [[0], [2]]
    assert [r.value for r in kafka.consume(broker.bootstrap, "own")] == [b"committed", b"aborted"]
    assert [r.value for r in kafka.consume(broker.bootstrap, "own", committed=True)] == [b"committed"]

    broker.stop()
    assert (broker.logs_dir / ".kafka_cleanshutdown").exists()
    assert kafka.dump_findings(broker.partition_dir("own", 1)) == []
    assert not kafka.broker_answers(broker.bootstrap, timeout_ms=200)
    broker.mount(foreign, "foreign", foreign_id)
    broker.start()
    served = kafka.consume(broker.bootstrap, "foreign", await_end_offset=120)
    assert served == expected
    kafka.produce(broker.bootstrap, "foreign", [record(b"new", b"", NOW_MS, [("h", b"1")])])

    broker.kill()
    assert not (broker.logs_dir / ".kafka_cleanshutdown").exists()
    broker.start()
    served = kafka.consume(broker.bootstrap, "foreign", offset=119, await_end_offset=121)
    assert served == [expected[-1], KafkaRecord(120, NOW_MS, b"new", b"", (("h", b"1"),))]
    assert [dataclasses.astuple(r)[1:4] for r in kafka.consume(broker.bootstrap, "own", partition=1)] == [
        (NOW_MS + i, b"k%d" % i, None if i % 3 else b"v%d" % i) for i in range(10)
    ]
