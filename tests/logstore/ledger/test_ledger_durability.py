"""Power cuts, torn files and kills: what was acknowledged stays, what was not is there whole or not at all."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.errors import LedgerError
from logstore.ledger import CommitRequest, Ledger, TopicCommit
from logstore.ledger.commit_file import is_whole
from logstore.ledger.data_file import parse_data

RequestOf = Callable[..., CommitRequest]
ROOT = Path(__file__).parents[3]
SOAK = os.environ.get("DURAMEN_SOAK") == "1"


def last_commit_file(ledger: Path) -> Path:
    return max((ledger / "commits" / "_delta_log").glob("*.json"))


def test_each_file_is_synced_before_what_depends_on_it(tmp_path: Path, powered: Any, request_of: RequestOf) -> None:
    ledger = Ledger(tmp_path / "ledger", fs=powered)
    table = tmp_path / "ledger" / "commits"
    log = table / "_delta_log"
    powered.trace.clear()
    commits_when: list[int] = []
    powered.on_step = lambda kind, path: commits_when.append(len(list(log.glob("*.json"))))
    ledger.commit(request_of(0))
    data = next(table.glob("*.parquet"))
    assert powered.trace == [
        ("pwrite", str(data)),
        ("fsync", str(data)),
        ("fsync_dir", str(table)),
        ("fsync", str(log / f"{1:020d}.json")),
        ("fsync_dir", str(log)),
    ]
    assert commits_when == [1, 1, 1, 2, 2]  # the commit file appears only after the data and its name are synced


def test_another_process_syncs_a_commit_before_it_believes_it(
    tmp_path: Path, powered: Any, request_of: RequestOf
) -> None:
    other = Ledger(tmp_path / "ledger", fs=powered)
    Ledger(tmp_path / "ledger").commit(request_of(0))
    powered.trace.clear()
    assert other.sequence("id-orders") == 1
    log = tmp_path / "ledger" / "commits" / "_delta_log"
    assert powered.trace == [("fsync", str(log / f"{1:020d}.json")), ("fsync_dir", str(log))]


def test_nothing_is_deleted_before_what_replaces_it_is_synced(
    tmp_path: Path, powered: Any, request_of: RequestOf
) -> None:
    ledger = Ledger(tmp_path / "ledger", fs=powered)
    for number in range(100):
        ledger.commit(request_of(number))
    kinds = [(kind, os.path.basename(path)) for kind, path in powered.trace]
    deleted = [index for index, (kind, name) in enumerate(kinds) if kind == "unlink" and name.endswith(".json")]
    assert deleted
    for index in deleted:
        synced = max(name for kind, name in kinds[:index] if kind == "fsync" and name.endswith(".checkpoint.parquet"))
        assert int(kinds[index][1][:20]) < int(synced[:20])


def test_a_power_cut_at_any_step_keeps_what_was_acknowledged(
    tmp_path: Path, powered: Any, request_of: RequestOf, seed: int
) -> None:
    rng = random.Random(seed)
    source, left = tmp_path / "store", tmp_path / "left"
    source.mkdir()
    powered.fsync_dir(str(source))
    acknowledged = 0
    cuts = 0

    def maybe_cut(kind: str, path: str) -> None:
        nonlocal cuts
        if rng.random() > (1.0 if SOAK else 0.15):
            return
        cuts += 1
        powered.leave(str(source), str(left), rng)
        survivor = Ledger(left / "ledger")
        committed = survivor.sequence("id-orders")
        assert acknowledged <= committed <= acknowledged + 1, (kind, path)
        rows = survivor.commits_after("id-orders", 0)
        assert [row.plan_id for row in rows] == [f"plan-{number}" for number in range(committed)]
        progress = survivor.last_batch("app")
        assert (-1 if progress is None else progress.batch_id) == committed - 1
        survivor.commit(request_of(committed))
        survivor.maintain()
        assert len(survivor.commits()) == committed + 1
        shutil.rmtree(left)

    powered.on_step = maybe_cut
    ledger = Ledger(source / "ledger", fs=powered)
    for number in range(50):
        ledger.commit(request_of(number))
        acknowledged += 1
    assert ledger.commits_table.upkeep_error is None
    assert cuts > 30


def request_number(number: int) -> CommitRequest:
    topic = TopicCommit("id-orders", "orders", number, (number,), (number + 1,), 1, 70)
    expected = number - 1 if number else None
    return CommitRequest(f"plan-{number}", (topic,), "app", number, "query-1", expected)


@pytest.fixture(scope="module")
def three_commits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("torn") / "ledger"
    ledger = Ledger(path)
    for number in range(3):
        ledger.commit(request_number(number))
    return path


def torn_versions(whole: bytes) -> st.SearchStrategy[bytes]:
    """What a power cut may leave of a file: cut anywhere or after a line, then nothing, zeros or nonsense."""
    line_ends = [index for index, byte in enumerate(whole) if byte == 0x0A]

    def tear(cut: int, rest: str, seed: int) -> bytes:
        missing = len(whole) - cut
        tails = {"nothing": b"", "zeros": bytes(missing), "nonsense": random.Random(seed).randbytes(missing)}
        return whole[:cut] + tails[rest]

    cuts = st.one_of(st.integers(0, len(whole) - 2), st.sampled_from(line_ends))
    return st.builds(tear, cuts, st.sampled_from(["nothing", "zeros", "nonsense"]), st.integers(0, 1000))


@settings(max_examples=1000)
@given(data=st.data())
def test_a_torn_commit_file_is_told_from_a_whole_one(three_commits: Path, data: st.DataObject) -> None:
    whole = last_commit_file(three_commits).read_bytes()
    assert is_whole(whole)
    assert not is_whole(data.draw(torn_versions(whole)))


@settings(max_examples=200)
@given(data=st.one_of(st.binary(), st.text().map(str.encode), st.just(b"[" * 100_000)))
def test_any_bytes_are_judged_without_an_accident(data: bytes) -> None:
    assert is_whole(data) in (True, False)


@settings(max_examples=100 if SOAK else 10)
@given(data=st.data())
def test_a_torn_last_commit_never_happened(three_commits: Path, data: st.DataObject) -> None:
    torn = data.draw(torn_versions(last_commit_file(three_commits).read_bytes()))
    copy = three_commits.parent / "copy"
    shutil.copytree(three_commits, copy)
    try:
        last_commit_file(copy).write_bytes(torn)
        ledger = Ledger(copy)
        assert ledger.sequence("id-orders") == 2
        assert [row.sequence for row in ledger.commits()] == [1, 2]
        assert len(list((copy / "torn").iterdir())) == 1
        ledger.commit(request_number(2))
        ledger.maintain()
        assert [row.sequence for row in Ledger(copy).commits_after("id-orders", 0)] == [1, 2, 3]
    finally:
        shutil.rmtree(copy)


def test_a_live_ledger_meets_a_torn_commit_of_another_host(tmp_path: Path, request_of: RequestOf) -> None:
    ledger = Ledger(tmp_path / "ledger")
    other = Ledger(tmp_path / "ledger")
    other.commit(request_of(0))
    last_commit_file(tmp_path / "ledger").write_bytes(b"")
    assert ledger.sequence("id-orders") == 0
    assert ledger.commit(request_of(0)) == 1


def test_damage_below_the_last_commit_is_not_taken_for_a_power_cut(tmp_path: Path, request_of: RequestOf) -> None:
    ledger = Ledger(tmp_path / "ledger")
    for number in range(3):
        ledger.commit(request_of(number))
    log = tmp_path / "ledger" / "commits" / "_delta_log"
    whole = (log / f"{2:020d}.json").read_bytes()
    (log / f"{2:020d}.json").write_bytes(whole[:50])
    with pytest.raises(LedgerError, match="damaged"):
        Ledger(tmp_path / "ledger")
    (log / f"{2:020d}.json").unlink()
    with pytest.raises(LedgerError, match="missing"):
        Ledger(tmp_path / "ledger")


def test_a_damaged_data_file_is_named(tmp_path: Path, request_of: RequestOf) -> None:
    ledger = Ledger(tmp_path / "ledger")
    ledger.commit(request_of(0))
    data = next((tmp_path / "ledger" / "commits").glob("*.parquet"))
    data.write_bytes(data.read_bytes()[:-9])
    with pytest.raises(LedgerError, match=data.name):
        ledger.commits()
    assert ledger.sequence("id-orders") == 1  # fencing needs the log alone


@pytest.mark.parametrize("damage", ["empty", "zeros", "gone", "hint torn", "hint empty"])
def test_a_torn_checkpoint_is_removed_and_nothing_is_lost(tmp_path: Path, request_of: RequestOf, damage: str) -> None:
    ledger = Ledger(tmp_path / "ledger")
    for number in range(70):
        ledger.commit(request_of(number))
    log = tmp_path / "ledger" / "commits" / "_delta_log"
    checkpoint = max(log.glob("*.checkpoint.parquet"))
    if damage == "empty":
        checkpoint.write_bytes(b"")
    elif damage == "zeros":
        checkpoint.write_bytes(bytes(checkpoint.stat().st_size))
    elif damage == "gone":
        checkpoint.unlink()
    else:
        (log / "_last_checkpoint").write_bytes(b'{"vers' if damage == "hint torn" else b"")
    again = Ledger(tmp_path / "ledger")
    assert [row.sequence for row in again.commits_after("id-orders", 0)] == list(range(1, 71))
    again.commit(request_of(70))
    again.maintain()
    assert len(Ledger(tmp_path / "ledger").commits()) == 71


_COMMITTER = """
import sys
from logstore.ledger import CommitRequest, Ledger, TopicCommit
from logstore.ledger.table import is_whole
ledger = Ledger(sys.argv[1])
number = ledger.sequence("id-orders")
while True:
    topic = TopicCommit("id-orders", "orders", number, (number,), (number + 1,))
    expected = number - 1 if number else None
    ledger.commit(CommitRequest(f"plan-{number}", (topic,), "app", number, "query-1", expected))
    number += 1
    print(number, flush=True)
"""


def test_kill_9_loses_no_acknowledged_commit_and_doubles_none(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    acknowledged = 0
    for _ in range(40 if SOAK else 4):
        command = [sys.executable, "-c", _COMMITTER, str(tmp_path / "ledger")]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            acknowledged = int(process.stdout.readline())
            time.sleep(rng.uniform(0, 0.8))
            process.send_signal(signal.SIGKILL)
            acknowledged = max([acknowledged, *(int(line) for line in process.stdout if line.endswith("\n"))])
        ledger = Ledger(tmp_path / "ledger")
        committed = ledger.sequence("id-orders")
        assert acknowledged <= committed <= acknowledged + 1
        rows = ledger.commits_after("id-orders", 0)
        assert [row.plan_id for row in rows] == [f"plan-{number}" for number in range(committed)]
        progress = ledger.last_batch("app")
        assert progress is not None
        assert progress.batch_id == committed - 1
    ledger.maintain()
    assert len(ledger.commits()) == committed


def test_what_a_killed_writer_left_is_swept(tmp_path: Path, request_of: RequestOf) -> None:
    ledger = Ledger(tmp_path / "ledger")
    for number in range(3):
        ledger.commit(request_of(number))
    table = tmp_path / "ledger" / "commits"
    staged = table / "_delta_log" / f"{4:020d}.json#1"
    orphan = table / f"{4:020d}-0123.parquet"
    staged.write_bytes(b"{")
    orphan.write_bytes(b"PAR1")
    os.utime(orphan, (0, 0))
    assert len(Ledger(tmp_path / "ledger").commits()) == 3
    ledger.maintain()
    assert not staged.exists()
    assert not orphan.exists()
    assert len(ledger.commits()) == 3


def test_a_creation_cut_short_is_begun_again(tmp_path: Path, request_of: RequestOf) -> None:
    (tmp_path / "ledger" / "commits.new" / "_delta_log").mkdir(parents=True)
    (tmp_path / "ledger" / "commits.new" / "_delta_log" / f"{0:020d}.json").write_bytes(b"")
    assert Ledger(tmp_path / "ledger").commit(request_of(0)) == 1


def test_one_flipped_bit_anywhere_in_a_data_file_is_noticed(tmp_path: Path, request_of: RequestOf, seed: int) -> None:
    rng = random.Random(seed)
    Ledger(tmp_path / "ledger").commit(request_of(0))
    path = next((tmp_path / "ledger" / "commits").glob("*.parquet"))
    whole = path.read_bytes()
    for position in range(0, len(whole), 1 if SOAK else 37):
        data = bytearray(whole)
        data[position] ^= 1 << rng.randrange(8)
        with pytest.raises(ValueError, match="checksum"):
            parse_data(path.name, bytes(data))
    assert parse_data(path.name, whole).num_rows == 1
    older = "-".join(path.name.split("-")[:2]) + ".parquet"  # names of an older release have no checksum
    assert parse_data(older, whole).num_rows == 1
