"""A stock broker's metadata log, read by us: the settings its topics were given come along with an import."""

from __future__ import annotations

import subprocess
from pathlib import Path

from conformance.broker import Broker
from conformance.build import build
from conformance.kafka import Kafka, record
from logstore.files import OS_FILES
from logstore.limits import DEFAULT_LIMITS
from logstore.store import LogStore
from logstore.transfer.kafka_import import import_topics
from logstore.transfer.kafka_source import examine, stopped_source
from logstore.transfer.kraft_metadata import read_cluster_metadata
from logstore.upkeep.retention import retain

#: often enough that there are snapshots to read
SNAPSHOTS = {"metadata.log.max.record.bytes.between.snapshots": 4000, "metadata.log.max.snapshot.interval.ms": 1000}


def alter(broker: Broker, kind: str, name: str | None, *changes: str) -> None:
    """With Kafka's own tool."""
    entity = ["--entity-default"] if name is None else ["--entity-name", name]
    java = ["java", "-Xmx256m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", build()]
    tool = ["kafka.admin.ConfigCommand", "--bootstrap-server", broker.bootstrap, "--entity-type", kind, *entity]
    subprocess.run([*java, *tool, "--alter", *changes], check=True, capture_output=True, timeout=120)


def test_what_a_brokers_topics_were_set_to_comes_along(kafka: Kafka, scratch: Path) -> None:
    with Broker(kafka, scratch / "broker", SNAPSHOTS) as broker:
        ids = {
            "kept": broker.create_topic("kept", 2, {"retention.ms": -1, "cleanup.policy": "delete"}),
            "compacted": broker.create_topic("compacted", 1, {"cleanup.policy": "compact"}),
            "plain": broker.create_topic("plain"),
        }
        for name in ids:
            kafka.produce(broker.bootstrap, name, [record(key=b"k", value=b"v", timestamp_ms=1_600_000_000_000)])
        alter(broker, "topics", "kept", "--add-config", "segment.bytes=1048576", "--delete-config", "cleanup.policy")
        alter(broker, "brokers", None, "--add-config", "log.retention.ms=9000000000000")
        broker.stop()
        directory = broker.logs_dir / "__cluster_metadata-0"
        assert list(directory.glob("*.checkpoint"))
        found = read_cluster_metadata(OS_FILES, str(directory), limits=DEFAULT_LIMITS)
        assert {name: found.topics[name] for name in ids} == ids
        kept = found.topic("kept")
        assert kept is not None
        assert (kept.partitions, kept.configs) == (2, {"retention.ms": "-1", "segment.bytes": "1048576"})

        with stopped_source(OS_FILES, str(broker.logs_dir)), LogStore(scratch / "store", create=True) as store:
            imported = import_topics(store, examine(OS_FILES, str(broker.logs_dir), limits=DEFAULT_LIMITS), {})
            topics = {each.topic.name: each.topic for each in imported}
            assert {name: topic.kafka_id for name, topic in topics.items()} == ids
            assert not any(topic.settings_unknown for topic in topics.values())
            own = "retention.ms"
            assert topics["kept"].configs == {"segment.bytes": "1048576", own: "-1"}
            assert topics["plain"].configs == {own: "9000000000000"}
            assert topics["compacted"].configs == {"cleanup.policy": "compact", own: "9000000000000"}
            for topic in topics.values():
                assert retain(store, topic, 0, now_ms=store.clock.now_ms()).log_start_offset == 0
                assert store.high_watermark(topic, 0) == 1
