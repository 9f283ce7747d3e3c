"""A store in a bucket beside one in a directory, by random work; `DURAMEN_SOAK=1` makes it many long runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bucket.both_kinds import BothKinds
from compaction_job.job import compact
from logstore.records.record import Record

RUNS, STEPS = (200, 80) if os.environ.get("DURAMEN_SOAK") else (2, 40)


def test_a_restore_as_of_a_time_looks_behind_a_segment_that_compaction_emptied(tmp_path: Path) -> None:
    """Its file is new and its records are gone; Kafka's lookup gives up there, and "none" would mean: all there is."""
    both = BothKinds(tmp_path, 0)
    configs = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0, "segment.bytes": 100}
    for store in (both.directory, both.bucket):
        store.create_topic("t", configs=configs)
        for at_ms, value in ((1000, b"a"), (2000, b"b")):
            store.append("t", [Record(b"k", value, at_ms)])
        report = compact(store, roll_active=True, retention=False, threads=1)
        assert [run.report.removed for run in report.done if run.report] == [{"superseded": 1}]
        for at_ms, value in ((3000, b"c"), (4000, b"d")):
            store.append("t", [Record(b"k", value, at_ms)])
        assert not list(store.reader("t", 0).records(0, 1))
        found = {
            at_ms: [row["value"] for batch in store.restore("t", as_of_timestamp_ms=at_ms) for row in batch.to_pylist()]
            for at_ms in (2500, 3500, 4500)
        }
        assert found == {2500: [b"b"], 3500: [b"c"], 4500: [b"d"]}
    both.close()


@pytest.mark.parametrize("run", range(RUNS))
def test_both_kinds_of_store_give_the_same_answers(tmp_path: Path, seed: int, run: int) -> None:
    both = BothKinds(tmp_path, seed + run)
    try:
        both.run(STEPS)
    finally:
        print("\n".join(both.done[-20:]))
        both.close()
    assert both.counts["append"]
