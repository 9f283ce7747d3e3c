"""Where apps are in a ledger that is made whole again from data files and plans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from logstore.commit.plan import Plan, TopicPlan
from logstore.ledger import CommitRow
from logstore.ledger.ledger import APP, COUNTED, TOPIC
from logstore.upkeep.reconstruct import Applied, Reconstruction, reconstruct, rows_of_plan

#: (topic, sequence, batch of app "a") by version; each batch has ten records
Commits = dict[int, tuple[str, int, int]]


def plan_of(topic: str, sequence: int, batch: int) -> Plan:
    offsets = ((sequence - 1) * 10,), (sequence * 10,)
    of_topic = TopicPlan(topic, topic, 1, 1, {}, sequence, *offsets, 10, 100)
    return Plan(f"{topic}-{sequence}", 1000 + batch, ("f",), (of_topic,), "a", batch, "q")


def rebuilt(commits: Commits, *, lost: set[int]) -> Reconstruction:
    """Of the commits in `lost` only the plans are left; of the others the data files, and the newest commit file."""
    rows: dict[int, CommitRow] = {
        version: replace(rows_of_plan(plan_of(*commit), version)[0], engine="local")
        for version, commit in commits.items()
    }
    topics = {topic: max(s for t, s, _ in commits.values() if t == topic) for topic, _, _ in commits.values()}
    left = {version: commit for version, commit in commits.items() if version not in lost}
    return reconstruct(
        [],
        [rows[version] for version in left],
        [plan_of(*commits[version]) for version in sorted(lost)],
        transactions={COUNTED + "a": (1, 0)} | {TOPIC + topic: (1, 1) for topic in topics},
        is_chained=False,
        applied={topic: Applied(topic, last, (last * 10,)) for topic, last in topics.items()},
        version=max(commits),
        now_ms=5000,
    )


@pytest.mark.parametrize(
    ("commits", "lost"),
    [
        pytest.param({11: ("t", 1, 0), 14: ("t", 2, 1), 16: ("t", 3, 2)}, {14}, id="in the middle"),
        pytest.param({11: ("t", 1, 0), 14: ("t", 2, 1), 16: ("t", 3, 2)}, {14, 16}, id="at the end"),
        pytest.param({11: ("t", 1, 0), 14: ("t", 2, 1), 16: ("t", 3, 2)}, {11, 14}, id="at the beginning"),
        pytest.param({11: ("t", 1, 0), 14: ("t", 2, 1), 15: ("u", 1, 2), 20: ("t", 3, 3)}, {14, 20}, id="two topics"),
        pytest.param({11: ("t", 1, 0), 14: ("t", 2, 1), 15: ("u", 1, 2)}, {14}, id="newest in another topic"),
        pytest.param({11: ("t", 1, 0), 12: ("u", 1, 1), 14: ("t", 2, 2)}, {14}, id="newest lost, of another topic"),
    ],
)
def test_an_app_is_at_its_last_batch_whatever_is_left_of_the_commits(commits: Commits, lost: set[int]) -> None:
    found = rebuilt(commits, lost=lost)
    last = max(batch for _, _, batch in commits.values())
    assert not found.lost
    assert found.transactions[APP + "a"] == found.transactions[COUNTED + "a"] == last
    for topic in {topic for topic, _, _ in commits.values()}:
        versions = [row.version for row in found.rows if row.topic_id == topic]
        sequences = [row.sequence for row in found.rows if row.topic_id == topic]
        assert sequences == sorted(sequences)
        assert versions == sorted(versions)


@pytest.mark.parametrize(
    ("is_chained", "known_sequence", "is_unsure"),
    [(True, 2, False), (True, 1, True), (False, 2, True)],
    ids=["every commit is known by its transaction", "one is not", "commit files are missing"],
)
def test_apps_are_unsure_where_a_lost_commit_may_have_been_theirs(
    is_chained: bool, known_sequence: int, is_unsure: bool
) -> None:
    """Of the topic's second commit nothing is left but that it was applied."""
    first = replace(rows_of_plan(plan_of("t", 1, 0), 11)[0], engine="local")
    found = reconstruct(
        [first],
        [],
        [],
        transactions={TOPIC + "t": (12, known_sequence), APP + "a": (12, 1), COUNTED + "a": (12, 1)},
        is_chained=is_chained,
        applied={"t": Applied("t", 2, (20,))},
        version=12,
        now_ms=5000,
    )
    assert found.lost == {"t": [2]}
    assert {row.sequence: row.void for row in found.rows if row.topic_id} == {1: False, 2: True}
    assert bool(found.unsure) is is_unsure
