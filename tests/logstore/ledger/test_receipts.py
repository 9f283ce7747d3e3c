"""Which receipts of runs stay, and that nothing is lost from the counters."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa

from logstore.ledger.receipts import KEPT_EACH, KEPT_ERASING_EACH, SUMMARY, is_due, kept_before, pruned, totals_of
from logstore.ledger.rows import RUNS


def run(version: int, run_id: str, *, result: str = "done", topic_id: str = "t", **more: Any) -> dict[str, Any]:
    removed = more.pop("removed", {"superseded": 1})
    details = json.dumps({"read_bytes": 10, "written_bytes": 4})
    row = {"version": version, "run_id": run_id, "kind": "compaction", "topic_id": topic_id, "partition": 0}
    return row | {"result": result, "removed": list(removed.items()), "details": details} | more


def table(*rows: dict[str, Any]) -> pa.Table:
    return pa.Table.from_pylist(list(rows), schema=RUNS)


def kept(found: pa.Table) -> list[str]:
    return [run_id for run_id in found["run_id"].to_pylist() if run_id != SUMMARY]


def totals(found: pa.Table) -> dict[str, Any]:
    (details,) = [row["details"] for row in found.to_pylist() if row["kind"] == SUMMARY]
    return json.loads(details)["kinds"]["compaction"]  # type: ignore[no-any-return]


def test_the_newest_runs_of_each_partition_stay() -> None:
    many = [run(at, f"run-{at}") for at in range(KEPT_EACH + 3)]
    other = run(100, "other", topic_id="u")
    assert kept(pruned(table(*many, other), version=101)) == [f"run-{at}" for at in range(3, KEPT_EACH + 3)] + ["other"]


def test_older_ones_that_erased_something_stay_too_but_not_all() -> None:
    erased = [run(at, f"erased-{at}", removed={"tombstone": 1}) for at in range(KEPT_ERASING_EACH + 2)]
    nothing = [run(50, "none-erased", removed={"tombstone": 0, "superseded": 5})]
    newest = [run(60 + at, f"new-{at}") for at in range(KEPT_EACH)]
    found = kept(pruned(table(*erased, *nothing, *newest), version=99))
    assert found == [f"erased-{at}" for at in range(2, KEPT_ERASING_EACH + 2)] + [
        f"new-{at}" for at in range(KEPT_EACH)
    ]


def test_runs_at_work_stay_and_only_a_runs_newest_row_counts() -> None:
    rows = [run(0, "killed", result="running"), run(1, "a", result="running")]
    rows += [run(2 + at, f"run-{at}") for at in range(KEPT_EACH)] + [run(20, "a")]
    assert kept(pruned(table(*rows), version=30)) == ["killed"] + [f"run-{at}" for at in range(1, KEPT_EACH)] + ["a"]


def test_what_is_dropped_is_summed_up_again_and_again() -> None:
    done = KEPT_EACH + 5
    rows = [run(at, f"run-{at}", removed={"superseded": 2}) for at in range(done - 1)]
    rows.append(run(done - 1, "failed", result="failed", removed={}))
    before = totals_of(table(*rows))["kinds"]["compaction"]
    assert before == {
        "results": {"done": done - 1, "failed": 1},
        "removed": {"superseded": 2 * (done - 1)},
        "read_bytes": 10 * (done - 1),
        "written_bytes": 4 * done,
    }
    once = pruned(table(*rows), version=50)
    assert totals(once)["results"] == {"done": 5}
    assert totals_of(once)["kinds"]["compaction"] == before
    more = [run(60 + at, f"later-{at}") for at in range(4)]
    twice = pruned(pa.concat_tables([once, table(*more)]), version=70)
    assert totals(twice)["results"] == {"done": 9}
    assert twice["run_id"].to_pylist().count(SUMMARY) == 1
    after = totals_of(twice)["kinds"]["compaction"]
    assert after["results"] == {"done": done + 3, "failed": 1}
    assert (after["read_bytes"], after["written_bytes"]) == (10 * (done + 3), 4 * (done + 4))
    assert after["removed"] == {"superseded": 2 * (done - 1) + 4}


def test_they_are_looked_through_when_there_are_many_or_twice_as_many() -> None:
    assert [is_due(rows, 0) for rows in (4095, 4096)] == [False, True]
    assert [is_due(rows, 5000) for rows in (9999, 10_000)] == [False, True]
    assert [kept_before(text) for text in (None, "no JSON", "[]", '{"kept": 7}', '{"kept": "7"}')] == [0, 0, 0, 7, 0]
