"""`make demo`: a small store is written, read, damaged, repaired and exported for a broker, with a word on each."""

from __future__ import annotations

import os
import random
import sys
import tempfile
import time

import numpy as np
import pyarrow as pa
from rich.console import Console
from rich.table import Table

from logstore.store.kafka_export import export_topics
from logstore.store.maintenance import recover
from logstore.store.store import LogStore
from logstore.store.verify import Finding, verify_partition

ACCOUNTS = 20_000
CHANGES = 400_000
PARTITIONS = 4


def account_changes(partition: int, count: int) -> pa.Table:
    """Changes of the accounts that live in one partition; a tenth of them closes the account (a tombstone)."""
    randomness = np.random.default_rng(partition)
    accounts = randomness.integers(0, ACCOUNTS // PARTITIONS, count) * PARTITIONS + partition
    balances = randomness.integers(0, 10_000, count)
    closed = randomness.random(count) < 0.1
    now_ms = time.time_ns() // 1_000_000
    return pa.table(
        {
            "key": pa.array([f"account-{account:05d}" for account in accounts]),
            "value": pa.array([f'{{"balance": {b}}}' for b in balances], mask=closed),
            "timestamp": pa.array(now_ms - count + np.arange(count)),
        }
    )


def main() -> int:
    out = Console()
    with tempfile.TemporaryDirectory(prefix="duramen-demo-") as folder:
        _run(out, folder)
    return 0


def _run(out: Console, folder: str) -> None:
    path = os.path.join(folder, "store")
    out.rule("[bold]1. A store is a directory")
    with LogStore(path, create=True) as store:
        topic = store.create_topic(
            "accounts",
            partitions=PARTITIONS,
            configs={"cleanup.policy": "compact", "segment.bytes": 512 << 10, "compression.type": "zstd"},
        )
        out.print(f"Topic [bold]{topic.name}[/] with {PARTITIONS} partitions, compacted, zstd, segments of 512 KiB.")

        out.rule("[bold]2. Arrow columns in, Kafka batches on disk")
        written = seconds = 0.0
        for number in range(PARTITIONS):
            changes = account_changes(number, CHANGES // PARTITIONS)
            began = time.perf_counter()
            with store.writing(topic, number, what="demo") as log:
                info = log.append_columns(changes)
            seconds += time.perf_counter() - began
            written += info.bytes
        out.print(
            f"{CHANGES:,} account changes appended, indexed and fsynced in {seconds:.2f} s "
            f"({CHANGES / seconds / 1e6:.2f} M records/s, {written / 1e6:.1f} MB)."
        )
        out.print(_partitions(store, topic.name))

        out.rule("[bold]3. The latest value per key, by reading back")
        began = time.perf_counter()
        state: dict[bytes | None, bytes | None] = {}
        for number in range(PARTITIONS):
            for columns in store.reader(topic, number).columns(0, headers=False):
                state.update(zip(columns.keys.tolist(), columns.values.tolist(), strict=True))
        live = sum(value is not None for value in state.values())
        out.print(
            f"{live:,} open accounts out of {len(state):,} ({time.perf_counter() - began:.2f} s, checksums verified)."
        )

        out.rule("[bold]4. Damage is found, cut out and set aside, never passed over")
        victim = _damage(store, topic.name)
        out.print(f"A block of nonsense was written into [bold]{os.path.relpath(victim, path)}[/].")
        found = _verify(store, topic.name)
        out.print(f"verify: {len(found)} finding(s); the first: {found[0].what if found else 'none'}")
        for report in recover(store, topic):
            if report.dropped_bytes or report.lost_from is not None:
                out.print(
                    f"recover: {report.partition} lost offsets {report.lost_from} to {report.lost_to}; "
                    f"{len(report.quarantined)} file(s) set aside in quarantine/, "
                    f"the log goes on at {report.log_end_offset}."
                )

        out.rule("[bold]5. A directory a broker can mount")
        target = os.path.join(folder, "for-a-broker")
        export_topics(store, target, [topic])
        files = sum(len(names) for _, _, names in os.walk(target))
        out.print(f"Exported: {files} files in Kafka's layout, sealed segments hard-linked.")
        for name in sorted(os.listdir(os.path.join(target, "accounts-0")))[:6]:
            out.print(f"  accounts-0/{name}", highlight=False)
    out.rule("[bold]Done")
    out.print("Everything was in a temporary folder and is gone. Next: [bold]duramen --help[/], README.md, docs/.")


def _partitions(store: LogStore, name: str) -> Table:
    topic = store.topic(name)
    table = Table("partition", "segments", "log start", "high watermark", "bytes", title=None)
    for number in range(topic.partitions):
        state = store.partition_state(topic, number)
        size = sum(segment.size_bytes for segment in state.segments)
        watermark = store.high_watermark(topic, number)
        table.add_row(str(number), str(len(state.segments)), str(state.log_start_offset), f"{watermark:,}", f"{size:,}")
    return table


def _verify(store: LogStore, name: str) -> list[Finding]:
    topic = store.topic(name)
    found: list[Finding] = []
    for number in range(topic.partitions):
        partition = topic.partition(number)
        found += verify_partition(
            store.fs,
            store.layout.partition(partition),
            partition=partition,
            topic_id=topic.id,
            state_path=store.layout.partition_state(topic.id, number),
            high_watermark=store.high_watermark(topic, number),
        ).findings
    return found


def _damage(store: LogStore, name: str) -> str:
    """Overwrite a few bytes in the middle of the last segment of partition 1."""
    topic = store.topic(name)
    segment = store.partition_state(topic, 1).segments[-1]
    path = os.path.join(store.layout.partition(topic.partition(1)), f"{segment.base_offset:020d}.log")
    with open(path, "r+b") as file:
        file.seek(segment.size_bytes // 2)
        file.write(random.Random(7).randbytes(64))
    return path


if __name__ == "__main__":
    sys.exit(main())
