"""Shares of due partitions, and what an Airflow run came to."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from compaction_job import compact
from compaction_job.outcomes import main as outcomes
from compaction_job.planning import main as planning
from compaction_job.shares import SHARES_MAX, read, shares, written
from compaction_job.submit import main as submit
from logstore.store import LogStore

PARTITIONS = st.tuples(st.sampled_from(["orders", "a.b", "x-1"]), st.integers(0, 40))


@given(st.sets(PARTITIONS, min_size=1))
def test_what_is_written_is_read_as_it_was(partitions: set[tuple[str, int]]) -> None:
    found = read(written(sorted(partitions)))
    assert {(topic, number) for topic, numbers in found.items() for number in numbers} == partitions


@given(st.dictionaries(PARTITIONS, st.integers(0, 1000), max_size=60), st.integers(1, 3000))
def test_shares_keep_the_order_and_the_size(sizes: dict[tuple[str, int], int], share_bytes: int) -> None:
    cut = shares(sizes, share_bytes)
    share_bytes = max(share_bytes, 2 * sum(sizes.values()) // SHARES_MAX)
    assert [partition for share in cut for partition in share] == list(sizes)
    assert all(cut)
    for share in cut:
        assert len(share) == 1 or sum(sizes[each] for each in share) <= share_bytes
    for share, following in pairwise(cut):  # none is smaller than it had to be
        assert sum(sizes[each] for each in share) + sizes[following[0]] > share_bytes


def test_there_are_never_more_shares_than_tasks_can_be_mapped() -> None:
    assert len(shares({("t", number): 1 << 40 for number in range(5000)}, 1)) <= SHARES_MAX


@pytest.mark.parametrize(
    "word", ["orders", ":1", "orders:", "orders:x", "orders:3-1", "orders:1,", "orders:0-99999999"]
)
def test_a_share_that_names_no_partitions_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        submit(["--store", "anywhere", f"--only={word}"])
    assert ended.value.code == 2
    assert "write orders:0-49,52" in capsys.readouterr().err


def filled(path: Path, topics: int) -> LogStore:
    store = LogStore(path, create=True)
    for topic in range(topics):
        name = f"t{topic}"
        store.create_topic(name, partitions=3, configs={"cleanup.policy": "compact", "segment.bytes": "1000"})
        for _ in range(4):
            keys = [b"key-%d" % (number % 5) for number in range(60)]
            store.append(name, pa.table({"key": keys, "value": [bytes(40)] * 60}))
    return store


def test_a_run_over_some_partitions_of_each_topic_leaves_the_others_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with filled(tmp_path / "store", 2) as store:
        report = compact(store, topics={"t0": {0, 2}, "t1": {1}}, airflow_run_id="one")
        assert sorted((run.plan.topic, run.plan.partition) for run in report.runs) == [("t0", 0), ("t0", 2), ("t1", 1)]
        done = {(run.plan.topic, run.plan.partition) for run in report.done}
    assert outcomes(["--store", str(tmp_path / "store"), "--airflow-run-id", "one"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert {(each["topic"], each["partition"]) for each in told} == done
    assert all(each["result"] == "done" and each["after_bytes"] < each["before_bytes"] for each in told)
    assert outcomes(["--store", str(tmp_path / "store"), "--airflow-run-id", "another"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_the_plan_has_the_due_partitions_in_shares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path / "store", 2).close()
    found = []
    for size in ("1", str(1 << 30)):
        assert planning(["--store", str(tmp_path / "store"), "--share-bytes", size]) == 0
        found.append(json.loads(capsys.readouterr().out))
    alone, together = found
    due = [(each["topic"], each["partition"]) for each in alone["due"]]
    assert [share["only"] for share in alone["shares"]] == [[f"{topic}:{number}"] for topic, number in due]
    assert [share["partitions"] for share in together["shares"]] == [len(due)]
    assert together["shares"][0]["size_bytes"] == sum(each["size_bytes"] for each in together["due"])
