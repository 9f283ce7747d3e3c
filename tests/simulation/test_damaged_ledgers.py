"""Ledgers damaged at random, found, brought back by `recover`, and judged by an oracle that knows every batch.

Commit files, checkpoints, data files, the hint, proofs and gates of all tables: removed, cut, emptied, garbled,
flipped, swapped, several at once. Afterwards appends go on, every record is readable, `verify` finds nothing, and what
was lost of exactly-once bookkeeping is said: without a word of loss no batch is committed again. `DURAMEN_SOAK=1` tries
200.
"""

from __future__ import annotations

import contextlib
import io
import os
import random
import shutil
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
from deltalake import DeltaTable

from duramen.cli import run
from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committer
from logstore.commit.produce import append_table, table_of
from logstore.errors import DuramenError, ReplayMismatch
from logstore.ledger import RunRow
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.upkeep.recovery import recover
from logstore.upkeep.repair import examine, repair

SOAK = os.environ.get("DURAMEN_SOAK") == "1"
CASES = int(os.environ.get("DURAMEN_DAMAGED_LEDGERS", "200" if SOAK else "4"))
FIRST = int(os.environ.get("DURAMEN_DAMAGED_FIRST", "0"))
FAILURES_MAX = 5
TOPICS = ("orders", "payments")


@dataclass
class Made:
    root: Path
    values: dict[str, list[bytes]]
    #: app -> its topic and last batch
    apps: dict[str, tuple[str, int]]
    #: files without which the tables say less
    live: set[Path]


def append(committer: Committer, topic: str, batch: int, app: str | None) -> bool:
    """One batch of two records; whether it was there already."""
    records = [Record(b"k%d" % at, f"{app}-{batch}-{at}".encode(), 1_700_000_000_000 + batch) for at in range(2)]
    of_app = None if app is None else AppBatch(app, batch, f"query-{app}")
    return append_table(committer, topic, table_of(records), app=of_app).replayed


def make(root: Path, kind: str) -> Made:
    """Two topics, three apps and writers without one; commits only, commits behind a checkpoint, or after upkeep."""
    apps: dict[str, tuple[str, int]] = {}
    with LogStore(root, create=True) as store:
        for name in TOPICS:
            store.create_topic(name, partitions=2)
        committer = Committer(store)

        def write(rounds: range) -> None:
            for batch in rounds:
                for app, topic in (("a", "orders"), ("b", "payments"), ("c", "orders")):
                    append(committer, topic, batch, app)
                    apps[app] = (topic, batch)
                append(committer, "payments", batch, None)

        write(range(3))
        ledger = committer.ledger
        ledger.record_run(RunRow("run-1", "compaction"))
        if kind != "commits only":
            ledger.maintain()
            if kind == "behind a checkpoint":
                log = root / "ledger/commits/_delta_log"
                for path in sorted(log.glob("*.json"))[:-1]:
                    path.unlink()
            write(range(3, 5))
        if kind != "staged":
            for name in TOPICS:
                committer.flush(store.topic(name))
        values = {name: values_of(store, name) for name in TOPICS}
    return Made(root, values, apps, live_files(root))


def live_files(root: Path) -> set[Path]:
    found = set()
    for name in ("commits", "runs", "segments"):
        table = root / "ledger" / name
        log = table / "_delta_log"
        checkpoint = max((path for path in log.glob("*.checkpoint.parquet")), default=None)
        base = "" if checkpoint is None else checkpoint.name[:20]
        commits = sorted(log.glob("*.json"))
        found |= {path for path in commits if path.name[:20] > base} | {commits[-1]}
        found |= {checkpoint} if checkpoint else set()
        found |= {table / os.path.basename(uri) for uri in DeltaTable(str(table)).file_uris()}
    return {path.relative_to(root) for path in found}


def values_of(store: LogStore, name: str) -> list[bytes]:
    topic, found = store.topic(name), []
    for number in range(topic.partitions):
        reader = store.reader(topic, number)
        found += [record.value or b"" for record in reader.records(reader.log_start_offset())]
        reader.close()
    return sorted(found)


def hurt(path: Path, rng: random.Random) -> str | None:
    """Damage a file; how, None when that left it as it was."""
    data = bytearray(path.read_bytes())
    how = rng.choice(["removed", "emptied", "cut", "garbled", "zeros", "flipped", "swapped", "swapped"])
    if how == "removed":
        path.unlink()
        return how
    if how == "swapped":
        others = [each for each in path.parent.iterdir() if each.suffix == path.suffix and each.is_file()]
        other = rng.choice(sorted(others))
        path.write_bytes(other.read_bytes())
        other.write_bytes(data)
        return how if path != other and path.read_bytes() != data else None
    if not data:
        return None
    if how == "flipped":
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    rest = {
        "emptied": b"",
        "cut": data[: rng.randrange(max(len(data) - 2, 1))],
        "garbled": rng.randbytes(len(data)),
        "zeros": bytes(len(data)),
    }
    path.write_bytes(rest.get(how, data))
    return how


def damage(root: Path, made: Made, rng: random.Random) -> tuple[list[str], bool]:
    """What was done, and whether something must be found."""
    files = [path for path in sorted((root / "ledger").rglob("*")) if path.is_file() and path.name != ".gitkeep"]
    commits = [path for path in files if "commits" in path.parts]
    story, must = [], False
    for _ in range(rng.choice([1, 1, 1, 2, 4])):
        path = rng.choice(commits if rng.random() < 0.7 else files)
        if path.exists():
            how = hurt(path, rng)
            story.append(f"{how} {path.relative_to(root)}")
            must |= path.relative_to(root) in made.live and how not in (None, "flipped")
    return story, must


def check_case(made: Made, root: Path, rng: random.Random) -> tuple[list[str], bool]:
    """One damaged copy; the story and whether bookkeeping was lost."""
    shutil.copytree(made.root, root)
    story, must = damage(root, made, rng)
    try:
        return story, check_recovers(made, root, must)
    except (AssertionError, DuramenError, OSError, LookupError, ValueError) as error:
        raise AssertionError(f"{'; '.join(story)}: {type(error).__name__}: {error}") from error


def check_recovers(made: Made, root: Path, must: bool) -> bool:
    with LogStore(root) as store:
        before = examine(store)
        assert not must or before.findings, "not found"
        told = repair(store, dry_run=True)
        assert told.sound == before.sound, "a dry run says something else"
    code = duramen(root, "recover", "--yes")
    assert code == (3 if before.findings else 0), f"recover ended with {code}"
    with LogStore(root) as store:
        after = examine(store)
        assert after.sound, [each.what for each in after.findings]
        assert {name: values_of(store, name) for name in TOPICS} == made.values, "records are gone"
        lost, committer = bool(told.lost), Committer(store)
        expected = {name: list(values) for name, values in made.values.items()}
        for app, (topic, last) in made.apps.items():
            for batch in (last, last + 1):
                try:
                    replayed = append(committer, topic, batch, app)
                except ReplayMismatch:
                    if not lost:  # said, and adopt is the way on
                        raise
                    break
                assert replayed == (batch == last), f"batch {batch} of app {app} after {last}: replayed {replayed}"
                if not replayed:
                    expected[topic] += [f"{app}-{batch}-{at}".encode() for at in range(2)]
        for name in TOPICS:
            store.append(name, [Record(b"k", b"more")])
            expected[name].append(b"more")
            committer.flush(store.topic(name))
        committer.ledger.maintain()
        assert {name: values_of(store, name) for name in TOPICS} == {n: sorted(v) for n, v in expected.items()}
        for name in TOPICS:
            assert not [each for each in recover(store, store.topic(name)) if each.found_damage]
        assert examine(store).sound
    return lost


def duramen(root: Path, *arguments: str) -> int:
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return run(["--store", str(root), "--output", "json", *arguments])


@pytest.mark.timeout(0 if SOAK or CASES > 20 else 300)
def test_any_damage_of_a_ledger_is_found_and_made_good_or_said(tmp_path: Path, seed: int) -> None:
    kinds = ("commits only", "behind a checkpoint", "after upkeep", "staged")
    made = {kind: make(tmp_path / kind.replace(" ", "-"), kind) for kind in kinds}
    told: Counter[str] = Counter()
    failures: list[str] = []
    for number in range(FIRST, FIRST + CASES):
        rng = random.Random(f"{seed} {number}")
        kind = kinds[number % len(kinds)]
        root = tmp_path / f"{number}"
        try:
            _, lost = check_case(made[kind], root, rng)
            told["with a loss" if lost else "without one"] += 1
        except AssertionError as error:
            failures.append(f"case {number} ({kind}) of DURAMEN_SEED={seed}: {error}")
            print(failures[-1], flush=True)
            if len(failures) >= FAILURES_MAX:
                break
        shutil.rmtree(root, ignore_errors=True)
    assert not failures, "\n".join(failures)
    print(f"{CASES} ledgers of seed {seed}: {dict(told)}")


@pytest.mark.parametrize(
    ("kind", "at", "other"),
    [("commits only", -1, -5), ("behind a checkpoint", 2, 0), ("commits only", -1, 0), ("after upkeep", -3, 0)],
)
def test_swapped_commit_files_are_found_and_no_batch_is_committed_again(
    tmp_path: Path, kind: str, at: int, other: int
) -> None:
    """Each of them is whole; only their versions are wrong. The first behind a checkpoint merged files."""
    made = make(tmp_path / "made", kind)
    log = made.root / "ledger/commits/_delta_log"
    commits = sorted(log.glob("*.json"))
    newest, older = commits[at], commits[other]
    both = newest.read_bytes(), older.read_bytes()
    older.write_bytes(both[0])
    newest.write_bytes(both[1])
    check_recovers(made, made.root, must=True)


@pytest.mark.parametrize("table", ["runs", "segments"])
@pytest.mark.parametrize("how", ["removed", "garbled"])
def test_the_commit_file_of_the_last_checkpoint_is_looked_at(tmp_path: Path, table: str, how: str) -> None:
    """Nothing was committed since: the checkpoint says all there is, and the file beside it is the newest."""
    made = make(tmp_path / "made", "after upkeep")
    newest = max((made.root / "ledger" / table / "_delta_log").glob("*.json"))
    if how == "removed":
        newest.unlink()
    else:
        newest.write_bytes(random.Random(1).randbytes(newest.stat().st_size))
    check_recovers(made, made.root, must=True)
