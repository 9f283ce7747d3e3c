"""Several processes at one ledger: of two commits that touch the same app or topic one wins, the others both do."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from logstore.errors import CommitConflict, LockHeld
from logstore.ledger import CommitRequest, Ledger

RequestOf = Callable[..., CommitRequest]
ROOT = Path(__file__).parents[3]

# Each line of the input is a round: look, say so, wait for the word, commit, say how it went.
_RACER = """
import sys
from logstore.errors import CommitConflict
from logstore.ledger import CommitRequest, Ledger, TopicCommit
path, name, topic, app = sys.argv[1:]
ledger = Ledger(path)
for line in sys.stdin:
    sequence, progress = ledger.sequence(topic), ledger.last_batch(app)
    print("ready", flush=True)
    sys.stdin.readline()
    seen = None if progress is None else progress.batch_id
    request = CommitRequest(f"{name}-{line.strip()}", (TopicCommit(topic, "t", sequence, (0,), (1,)),), app,
                            0 if seen is None else seen + 1, name, seen)
    try:
        ledger.commit(request)
        print("won", flush=True)
    except CommitConflict:
        print("lost", flush=True)
"""


def race(path: Path, rounds: int, contenders: list[tuple[str, str]]) -> list[list[str]]:
    """The outcomes of each round, of processes that commit for (topic, app) at the same moment."""
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", _RACER, str(path), f"racer{index}", topic, app],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for index, (topic, app) in enumerate(contenders)
    ]

    def say(word: str) -> None:
        for process in processes:
            assert process.stdin is not None
            process.stdin.write(word + "\n")
            process.stdin.flush()

    def hear() -> list[str]:
        return [process.stdout.readline().strip() for process in processes if process.stdout is not None]

    outcomes = []
    try:
        for number in range(rounds):
            say(str(number))
            assert hear() == ["ready"] * len(processes)
            say("go")
            outcomes.append(hear())
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    return outcomes


@pytest.mark.parametrize(
    "contenders",
    [[("id-a", "app-a"), ("id-a", "app-b"), ("id-a", "app-c")], [("id-a", "app"), ("id-b", "app"), ("id-c", "app")]],
    ids=["same topic", "same app"],
)
def test_of_racers_for_one_id_exactly_one_wins(tmp_path: Path, contenders: list[tuple[str, str]]) -> None:
    ledger = Ledger(tmp_path / "ledger")
    outcomes = race(tmp_path / "ledger", 25, contenders)
    for outcome in outcomes:
        assert sorted(outcome) == ["lost", "lost", "won"]
    winners = {f"racer{outcome.index('won')}-{number}" for number, outcome in enumerate(outcomes)}
    assert {row.plan_id for row in ledger.commits()} == winners
    assert len(ledger.commits()) == 25


def test_racers_for_different_ids_all_win(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger")
    outcomes = race(tmp_path / "ledger", 25, [("id-a", "app-a"), ("id-b", "app-b"), ("id-c", "app-c")])
    assert outcomes == [["won", "won", "won"]] * 25
    for topic in ("id-a", "id-b", "id-c"):
        assert [row.sequence for row in ledger.commits_after(topic, 0)] == list(range(1, 26))
    versions = [row.version for row in ledger.commits()]
    assert len(set(versions)) == 75


def test_a_committer_that_stalls_comes_too_late_and_loses(tmp_path: Path, powered: Any, request_of: RequestOf) -> None:
    """A log cleaned up under it would let its old version number be free again, and its commit vanish unseen."""
    arrived, go = threading.Event(), threading.Event()
    outcome: list[object] = []
    slow, fast = Ledger(tmp_path / "ledger", fs=powered), Ledger(tmp_path / "ledger")

    def stall(kind: str, path: str) -> None:
        if kind == "fsync_dir":  # the snapshot was looked at, the data is written, the commit is next
            arrived.set()
            go.wait(60)

    def work() -> None:
        try:
            outcome.append(slow.commit(request_of(0, app=None, plan="slow")))
        except CommitConflict as error:
            outcome.append(error)

    powered.on_step = stall
    thread = threading.Thread(target=work)
    thread.start()
    assert arrived.wait(60)
    for number in range(70):
        fast.commit(request_of(number))
    assert isinstance(fast.commits_table.upkeep_error, LockHeld)
    powered.on_step = lambda kind, path: None
    go.set()
    thread.join()
    assert isinstance(outcome[0], CommitConflict)
    fast.maintain()
    assert len(fast.commits()) == 70
    assert len(list((tmp_path / "ledger" / "commits" / "_delta_log").iterdir())) < 60
