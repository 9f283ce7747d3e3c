"""A store with many partitions, segments and runs, made of links to one real segment: large to list, small on disk."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path

from logstore.directory.ends import TopicEnds
from logstore.directory.state import PartitionState, SegmentEntry, encode_state, owner_of
from logstore.ledger import RunRow, SegmentRow
from logstore.ledger.table import Change
from logstore.records.record import Record
from logstore.segment.names import FileKind, file_name
from logstore.store import LogStore

START_MS = 1_790_000_000_000
_RECORDS = 200


def make_big_store(path: Path, *, topics: int, partitions: int, segments: int, runs: int) -> None:
    """`partitions` of each topic, `segments` of each partition, `runs` in all."""
    with LogStore(path, create=True) as store:
        source = _source(store)
        size = os.path.getsize(source)
        counts: dict[tuple[str, int], list[SegmentRow]] = {}
        for number in range(topics):
            counts |= _fill(store, f"topic-{number:04d}", partitions, segments, source, size)
        ledger = store.ledger()
        ledger.replace_segments_of(counts)
        ids = {f"topic-{number:04d}": store.topic(f"topic-{number:04d}").id for number in range(topics)}
        rows = [_run(number, ids, partitions) for number in range(runs)]
        for first in range(0, len(rows), 2000):
            ledger.runs_table.write(lambda first=first: Change(rows[first : first + 2000]))  # type: ignore[misc]


def _source(store: LogStore) -> Path:
    """One segment with real batches."""
    store.create_topic("source", partitions=1, configs={"cleanup.policy": "compact"})
    store.append("source", [Record(b"%d" % n, b"value" * 8, timestamp_ms=START_MS) for n in range(_RECORDS)])
    return Path(store.layout.partition(store.topic("source").partition(0))) / file_name(0, FileKind.LOG)


def _fill(
    store: LogStore, name: str, partitions: int, segments: int, source: Path, size: int
) -> dict[tuple[str, int], list[SegmentRow]]:
    topic = store.create_topic(name, partitions=partitions, configs={"cleanup.policy": "compact"})
    bases = [at * _RECORDS for at in range(segments)]
    state = PartitionState(
        generation=segments,
        first_dirty_offset=bases[segments // 2],
        segments=tuple(SegmentEntry(base, size, START_MS) for base in bases),
        closed=True,
        producers=False,
        transactions=False,
    )
    counts = {}
    for number in range(partitions):
        directory = Path(store.layout.partition(topic.partition(number)))
        for base in bases:
            target = directory / file_name(base, FileKind.LOG)
            target.unlink(missing_ok=True)
            os.link(source, target)
        path = store.layout.partition_state(topic.id, number)
        Path(path).write_bytes(encode_state(state, owner_of(path)))
        counts[topic.id, number] = [SegmentRow(base, size, _RECORDS, 150, 5, "run") for base in bases[: segments // 2]]
    ends = (segments * _RECORDS,) * partitions
    store.write_ends(topic, TopicEnds(ends, ends, ends))
    return counts


def _run(number: int, ids: dict[str, str], partitions: int) -> dict[str, object]:
    name = f"topic-{number % len(ids):04d}"
    partition = number // len(ids) % partitions
    details = {"groups": 3, "read_bytes": 123456, "written_bytes": 65432, "segments_before": 20, "segments_after": 11}
    run = RunRow(
        run_id=f"run{number:06d}-{name}-{partition}",
        kind="compaction",
        topic_id=ids[name],
        topic=name,
        partition=partition,
        engine="local",
        started_ms=START_MS + number * 1000,
        ended_ms=START_MS + number * 1000 + 800,
        result="failed" if number % 97 == 0 else "done",
        reason="due: its dirty ratio is above the threshold",
        before_bytes=200_000,
        after_bytes=110_000,
        removed={"superseded": 1000, "tombstone": 3},
        map_fill=0.2,
        seconds=0.8,
        workers=("host-1/4711",),
        details=json.dumps(details),
    )
    return asdict(run) | {"removed": list(run.removed.items()), "workers": list(run.workers)}
