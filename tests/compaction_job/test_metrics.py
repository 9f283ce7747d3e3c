"""Metrics: what a scrape says is what the ledger and the state files say; a bad partition never makes one fail."""

from __future__ import annotations

import http.client
import json
import time
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from compaction_job import compact
from compaction_job.metrics import StoreCollector
from compaction_job.metrics_server import Health, MetricsServer
from logstore.errors import DuramenError
from logstore.ledger import Ledger, RunRow
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.upkeep.recovery import recover

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parsed(text: str) -> Samples:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def scraped(collector: StoreCollector) -> Samples:
    registry = CollectorRegistry()
    registry.register(collector)
    return parsed(generate_latest(registry).decode())


def of(samples: Samples, name: str, **labels: str) -> float:
    return samples[name, tuple(sorted(labels.items()))]


def totals(samples: Samples, name: str) -> float:
    return sum(value for (each, _), value in samples.items() if each == name)


def test_a_scrape_says_what_the_ledger_and_the_logs_say(store_path: Path) -> None:
    with LogStore(store_path) as store:
        collector = StoreCollector(store)
        before = scraped(collector)
        topic = store.topic("accounts")
        sizes = [store.log_bytes(topic, number) for number in (0, 1)]
        for number in ("0", "1"):
            sections = {
                section: of(before, "duramen_log_bytes", topic="accounts", partition=number, section=section)
                for section in ("clean", "dirty", "uncleanable")
            }
            assert sections["clean"] == 0
            assert sum(sections.values()) == sizes[int(number)]
            assert of(before, "duramen_dirty_ratio", topic="accounts", partition=number) == 1
            assert 50 < of(before, "duramen_compaction_lag_seconds", topic="accounts", partition=number) < 600
        assert of(before, "duramen_log_records", topic="events", partition="0") == 5
        assert totals(before, "duramen_log_records") == 40 * 8 + 1 + 5
        assert of(before, "duramen_append_batches_total", result="committed") == 10
        assert of(before, "duramen_compaction_runs_total", result="done") == 0
        assert of(before, "duramen_dirty_ratio_threshold", topic="accounts", partition="0") == 0.1
        assert of(before, "duramen_compaction_late_seconds", topic="accounts", partition="0") == 0
        assert of(before, "duramen_free_bytes") > 0
        timings = {row.plan_id: row.timings_ms for row in store.ledger().commits()}.values()
        for step in ("encode", "plan", "commit", "append"):
            name = step if step in ("encode", "plan") else f"previous_{step}"
            assert any(name in each for each in timings)
            spent_ms = sum(each.get(name, 0) for each in timings)
            assert of(before, "duramen_append_seconds_total", step=step) == pytest.approx(spent_ms / 1000)
        store.append("events", [Record(b"k", b"v")])
        (newest,) = store.ledger().commits()[-1:]
        more = scraped(collector)
        spent_ms = sum(each.get("encode", 0) for each in timings) + newest.timings_ms.get("encode", 0)
        assert of(more, "duramen_append_seconds_total", step="encode") == pytest.approx(spent_ms / 1000)

        report = compact(store, roll_active=True)
        after = scraped(collector)
        receipts = [run.report for run in report.done if run.report is not None]
        assert of(after, "duramen_compaction_runs_total", result="done") == len(receipts) == 2
        assert of(after, "duramen_records_removed_total", reason="superseded") == 40 * 7 + 1
        assert totals(after, "duramen_compaction_read_bytes_total") == sum(each.read_bytes for each in receipts)
        assert totals(after, "duramen_compaction_written_bytes_total") == sum(each.written_bytes for each in receipts)
        assert totals(after, "duramen_log_keys") == 40
        assert totals(after, "duramen_tombstones") == 1
        assert totals(after, "duramen_log_records") == 40 + 5 + 1
        assert totals(after, "duramen_dirty_ratio") == 0
        (horizon,) = [
            value for (name, _), value in after.items() if name == "duramen_next_delete_horizon_timestamp_seconds"
        ]
        assert horizon == min(each.next_horizon_ms or 0 for each in receipts if each.next_horizon_ms) / 1000
        assert of(after, "duramen_uncleanable_partitions") == 0
        # Counters survive a restart of whoever serves them.
        again = scraped(StoreCollector(store))
        assert {key: value for key, value in again.items() if key[0].endswith("_total")} == {
            key: value for key, value in after.items() if key[0].endswith("_total")
        }


def test_failures_and_killed_runs_are_counted_once(flushed: Path) -> None:
    store_path = flushed
    with LogStore(store_path) as store:
        collector = StoreCollector(store)
        topic = store.topic("accounts")
        path = sorted((store_path / "logs" / "accounts-1").glob("*.log"))[0]
        data = bytearray(path.read_bytes())
        data[90] ^= 0xFF
        path.write_bytes(data)
        compact(store)
        Ledger(store.layout.ledger).record_run(
            RunRow("killed", "compaction", topic.id, topic.name, 0, started_ms=1, result="running")
        )
        samples = scraped(collector)
        results = {result: of(samples, "duramen_compaction_runs_total", result=result) for result in ("done", "failed")}
        assert results == {"done": 1, "failed": 1}
        assert of(samples, "duramen_compaction_runs_total", result="abandoned") == 0
        assert of(samples, "duramen_uncleanable_partitions") == 1
        compact(store)
        assert of(scraped(collector), "duramen_compaction_runs_total", result="abandoned") == 1
        assert scraped(collector) == pytest.approx(scraped(StoreCollector(store)), rel=0.1)


def test_a_bad_partition_is_counted_and_left_out(store_path: Path) -> None:
    with LogStore(store_path) as store:
        topic = store.topic("accounts")
        Path(store.layout.partition_state(topic.id, 1)).write_bytes(b"garbage")
        (store_path / "topics" / "broken.t").write_bytes(b"garbage")
        samples = scraped(StoreCollector(store))
        assert of(samples, "duramen_unreadable_partitions") == 2
        assert of(samples, "duramen_dirty_ratio", topic="accounts", partition="0") == 1
        assert ("duramen_dirty_ratio", (("partition", "1"), ("topic", "accounts"))) not in samples


def test_what_damage_took_is_counted_once_it_was_recovered(flushed: Path) -> None:
    with LogStore(flushed) as store:
        topic = store.topic("accounts")
        log = min(Path(store.layout.partition(topic.partition(1))).glob("*.log"))
        data = bytearray(log.read_bytes())
        data[70] ^= 1
        log.write_bytes(data)
        collector = StoreCollector(store)
        assert totals(scraped(collector), "duramen_lost_offsets") == 0
        reports = recover(store, topic)
        lost = [sum(loss.end_offset - loss.base_offset for loss in report.losses) for report in reports]
        assert lost[0] == 0 < lost[1]
        samples = scraped(collector)
        for number in (0, 1):
            assert of(samples, "duramen_lost_offsets", topic="accounts", partition=str(number)) == lost[number]


def test_a_scrape_of_hundreds_of_partitions_is_cheap(store_path: Path) -> None:
    with LogStore(store_path) as store:
        store.create_topic("wide", partitions=300, configs={"cleanup.policy": "compact"})
        collector = StoreCollector(store)
        scraped(collector)
        began = time.process_time()
        samples = scraped(collector)
        assert time.process_time() - began < 1
        assert sum(name == "duramen_dirty_ratio" for name, _ in samples) == 302


def test_what_is_served(store_path: Path) -> None:
    health = {"healthy": True}
    with LogStore(store_path) as store:
        server = MetricsServer(
            "127.0.0.1",
            0,
            collector=StoreCollector(store),
            health=lambda: Health(health["healthy"], {"status": "ok" if health["healthy"] else "failed"}),
        )
        try:

            def get(path: str) -> tuple[int, str, bytes]:
                client = http.client.HTTPConnection(*server.address, timeout=30)
                client.request("GET", path)
                answer = client.getresponse()
                body = answer.read()
                client.close()
                return answer.status, answer.headers["Content-Type"], body

            code, kind, body = get("/metrics")
            assert (code, kind.split(";")[0]) == (200, "text/plain")
            assert of(parsed(body.decode()), "duramen_append_batches_total", result="committed") == 10
            assert get("/healthz")[::2] == (200, b'{"status": "ok"}\n')
            health["healthy"] = False
            code, kind, body = get("/healthz")
            assert (code, kind, json.loads(body)) == (503, "application/json", {"status": "failed"})
            assert get("/")[0] == 404
            with pytest.raises(DuramenError, match=r"cannot serve metrics on 127.0.0.1:\d+"):
                MetricsServer(*server.address, collector=StoreCollector(store), health=lambda: Health(True, {}))
        finally:
            server.close()
