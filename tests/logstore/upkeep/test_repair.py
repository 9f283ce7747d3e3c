"""A damaged ledger, a lost version or locks folder, a store from an older copy: found, said, and brought back."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committer
from logstore.commit.produce import append_table, table_of
from logstore.errors import CorruptState, DamagedLog, DuramenError, LedgerError, NotAStore, ReplayMismatch
from logstore.files import OS_FILES, OsFileSystem
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.upkeep.recovery import recover
from logstore.upkeep.repair import examine, repair, restore_version

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
BATCHES = 4
SOAK = os.environ.get("DURAMEN_SOAK") == "1"


def values(store: LogStore, read_all: ReadAll, topic: str = "orders") -> list[bytes | None]:
    return sorted(record.value or b"" for records in read_all(store, topic).values() for record in records)


def append(store: LogStore, batch: int, *topics: str, app: str = "app") -> bool:
    """One batch of three records; whether it was there already."""
    records = [Record(b"k%d" % at, b"b%d-%d" % (batch, at), 1_700_000_000_000 + batch) for at in range(3)]
    # Not `store.append`, which flushes by itself: the staged files are to stay.
    committer = Committer(store)
    name = topics[0] if topics else "orders"
    return append_table(committer, name, table_of(records), app=AppBatch(app, batch, "query-1")).replayed


def flush(store: LogStore) -> None:
    committer = Committer(store)
    for topic in store.topics():
        committer.flush(topic)


@pytest.fixture(scope="module", params=["flushed", "staged"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Batches 0 to 3 of one app, with or without their staged files."""
    root = tmp_path_factory.mktemp(request.param) / "store"
    with LogStore(root, create=True) as store:
        store.create_topic("orders", partitions=2)
        for batch in range(BATCHES):
            append(store, batch)
        if request.param == "flushed":
            flush(store)
    return root


@pytest.fixture
def damaged(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "store"))


@pytest.fixture
def opened(damaged: Path) -> Iterator[LogStore]:
    with LogStore(damaged) as store:
        yield store


def commit_files(root: Path) -> list[Path]:
    return sorted((root / "ledger" / "commits" / "_delta_log").glob("*.json"))


def data_files(root: Path) -> list[Path]:
    return sorted((root / "ledger" / "commits").glob("*.parquet"))


def checkpointed(root: Path) -> None:
    with LogStore(root) as store:
        Committer(store).ledger.maintain()
    for path in commit_files(root)[:-1]:
        path.unlink()


def garble(path: Path) -> None:
    path.write_bytes(random.Random(path.name).randbytes(path.stat().st_size))


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-30])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "newest commit removed": lambda root: commit_files(root)[-1].unlink(),
    "newest commit truncated": lambda root: truncate(commit_files(root)[-1]),
    "newest commit emptied": lambda root: commit_files(root)[-1].write_bytes(b""),
    "newest commit garbled": lambda root: garble(commit_files(root)[-1]),
    "newest commit and its data removed": lambda root: (commit_files(root)[-1].unlink(), data_files(root)[-1].unlink()),
    "commit in the middle removed": lambda root: commit_files(root)[2].unlink(),
    "commit in the middle garbled": lambda root: garble(commit_files(root)[2]),
    "first commit removed": lambda root: commit_files(root)[0].unlink(),
    "checkpoint removed": lambda root: (
        checkpointed(root),
        [path.unlink() for path in (root / "ledger/commits/_delta_log").glob("*.checkpoint.parquet")],
    ),
    "checkpoint garbled": lambda root: (
        checkpointed(root),
        [garble(path) for path in (root / "ledger/commits/_delta_log").glob("*.checkpoint.parquet")],
    ),
    "commit of the checkpoint removed": lambda root: (checkpointed(root), commit_files(root)[-1].unlink()),
    "data file removed": lambda root: data_files(root)[1].unlink(),
    "newest data file removed": lambda root: data_files(root)[-1].unlink(),
    "data file garbled": lambda root: garble(data_files(root)[-1]),
    "log folder removed": lambda root: shutil.rmtree(root / "ledger/commits/_delta_log"),
    "table removed": lambda root: shutil.rmtree(root / "ledger/commits"),
    "ledger removed": lambda root: shutil.rmtree(root / "ledger"),
    "runs garbled": lambda root: garble(next((root / "ledger/runs/_delta_log").glob("*.json"))),
    "segments removed": lambda root: shutil.rmtree(root / "ledger/segments"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_ledger_is_found_and_brought_back(damaged: Path, read_all: ReadAll, damage: str) -> None:
    with LogStore(damaged) as store:
        wanted = values(store, read_all)
    DAMAGES[damage](damaged)
    with LogStore(damaged) as store:
        found = examine(store)
        assert not found.sound
        told = repair(store, dry_run=True)
        assert told.findings == repair(store, dry_run=True).findings  # a dry run changes nothing
        done = repair(store)
        assert [each.what for each in done.findings] == [each.what for each in told.findings]
        assert len(done.lost) == len(told.lost)
        assert examine(store).sound, examine(store).findings
        assert values(store, read_all) == wanted
        last = Committer(store).ledger.last_batch("app")
        known = BATCHES - 1 if last is None else last.batch_id
        assert known <= BATCHES - 1
        is_certain = last is not None and not any("needs adopt" in each for each in done.lost)
        if is_certain:  # then nothing is appended twice
            assert known == BATCHES - 1
            assert append(store, BATCHES - 1)
            append(store, BATCHES)
            assert len(values(store, read_all)) == len(wanted) + 3
        else:
            store.append("orders", [Record(b"k", b"v")])
            assert len(values(store, read_all)) == len(wanted) + 1
        topic = store.topic("orders")
        assert store.ends(topic).applied_sequence == BATCHES + 1
        flush(store)
        assert Committer(store).ledger.sequence(topic.id) == BATCHES + 1
        assert [report.found_damage for report in recover(store, topic)] == [False, False]
    with LogStore(damaged) as store:
        assert examine(store).sound


@pytest.mark.parametrize("made", ["staged"], indirect=True)
@pytest.mark.parametrize("damage", ["newest commit removed", "newest commit garbled", "table removed"])
def test_plans_in_staging_tell_whose_batch_it_was(damaged: Path, read_all: ReadAll, damage: str) -> None:
    assert any((damaged / "staging").iterdir())
    for path in data_files(damaged):
        path.unlink()
    if damage == "table removed":
        shutil.rmtree(damaged / "ledger")
    else:
        DAMAGES[damage](damaged)
    with LogStore(damaged) as store:
        done = repair(store)
        assert not done.lost
        last = Committer(store).ledger.last_batch("app")
        assert last is not None
        assert (last.batch_id, last.query_id) == (BATCHES - 1, "query-1")
        assert append(store, BATCHES - 1)  # a replay
        assert not append(store, BATCHES)


def test_what_nobody_can_know_is_said(damaged: Path) -> None:
    commit_files(damaged)[-1].unlink()
    data_files(damaged)[-1].unlink()
    shutil.rmtree(damaged / "staging")
    with LogStore(damaged) as store:
        done = repair(store)
    text = " ".join(done.lost)
    assert "commits 4 is not known" in text
    assert f"app 'app' last known batch {BATCHES - 2}; the next batch of that query needs adopt" in text


def test_an_append_to_a_ledger_that_is_behind_names_the_way_out(damaged: Path) -> None:
    commit_files(damaged)[-1].unlink()
    with LogStore(damaged) as store, pytest.raises(LedgerError, match=r"older copy.*`duramen recover`"):
        store.append("orders", [Record(b"k", b"v")])
    shutil.rmtree(damaged / "ledger")
    with LogStore(damaged) as store, pytest.raises(LedgerError, match=r"ledger is missing.*`duramen recover`"):
        store.append("orders", [Record(b"k", b"v")])
    assert not (damaged / "ledger").exists()  # nothing hides the loss


def test_a_new_store_has_no_ledger_and_is_sound(store: LogStore) -> None:
    store.create_topic("orders")
    assert examine(store).sound
    assert repair(store).sound
    assert not os.path.exists(store.layout.ledger)


def test_a_ledger_in_use_goes_on_after_a_repair_by_another_process(damaged: Path) -> None:
    with LogStore(damaged) as store, LogStore(damaged) as other:
        append(store, BATCHES)
        commit_files(damaged)[-1].unlink()
        assert not repair(other).sound
        append(store, BATCHES + 1)
        assert Committer(other).ledger.sequence(store.topic("orders").id) == BATCHES + 2


def test_a_repair_cut_short_is_finished_by_whoever_opens_the_ledger(damaged: Path) -> None:
    commit_files(damaged)[2].unlink()
    with LogStore(damaged) as store:
        assert not repair(store).sound
    commits = damaged / "ledger" / "commits"
    commits.rename(damaged / "ledger" / "commits.rebuilt")  # as before the last step
    with LogStore(damaged) as store:
        assert append(store, BATCHES - 1)
        assert examine(store).sound


def hurt(path: Path, rng: random.Random) -> str:
    """Damage a file in one of the ways that files are damaged."""
    data = bytearray(path.read_bytes())
    how = rng.choice(["removed", "emptied", "cut", "flipped", "garbled", "zeros"])
    if how == "removed":
        path.unlink()
        return how
    if how == "flipped" and data:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    rest = {
        "emptied": b"",
        "cut": data[: rng.randrange(len(data) + 1)],
        "garbled": rng.randbytes(len(data)),
        "zeros": bytes(len(data)),
    }
    path.write_bytes(rest.get(how, data))
    return how


@pytest.mark.timeout(600)
def test_any_damage_of_the_ledger_costs_no_record_and_doubles_none(
    made: Path, tmp_path: Path, read_all: ReadAll, seed: int
) -> None:
    rng = random.Random(seed)
    for case in range(200 if SOAK else 6):
        root = Path(shutil.copytree(made, tmp_path / f"{case}"))
        if rng.random() < 0.3:
            checkpointed(root)
        files = [path for path in sorted((root / "ledger").rglob("*")) if path.is_file()]
        story = [(str(path.relative_to(root)), hurt(path, rng)) for path in rng.sample(files, rng.choice([1, 1, 2, 4]))]
        with LogStore(root) as store:
            wanted = values(store, read_all)
            told = repair(store, dry_run=True)
            assert told.sound == examine(store).sound, story
            done = repair(store)
            assert [each.what for each in done.findings] == [each.what for each in told.findings], story
            assert examine(store).sound, story
            assert values(store, read_all) == wanted, story
            try:
                replayed = append(store, BATCHES - 1)
            except ReplayMismatch:
                assert done.lost, story  # said, and adopt is the way on
            else:
                assert replayed, story
            store.append("orders", [Record(b"k", b"more")])
            flush(store)
            assert values(store, read_all) == sorted([*wanted, b"more"]), story
            assert not [each for each in recover(store, store.topic("orders")) if each.found_damage], story
            assert examine(store).sound, story
        shutil.rmtree(root)


def test_looking_beside_a_writer_finds_nothing(damaged: Path) -> None:
    stop = threading.Event()

    def write() -> None:
        with LogStore(damaged) as store:
            batch = BATCHES
            while not stop.is_set():
                append(store, batch)
                batch += 1
                if batch % 3 == 0:
                    flush(store)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        with LogStore(damaged) as store:
            for _ in range(25):
                assert examine(store).findings == []
    finally:
        stop.set()
        writer.join()


class _Dead(BaseException):
    pass


class MortalFiles(OsFileSystem):
    """Dies at a given one of the calls that change names."""

    def __init__(self) -> None:
        self.calls_left: int | None = None

    def rename(self, source: str, target: str) -> None:
        self._step()
        super().rename(source, target)

    def fsync_dir(self, path: str) -> None:
        self._step()
        super().fsync_dir(path)

    def _step(self) -> None:
        if self.calls_left is not None:
            self.calls_left -= 1
            if self.calls_left < 0:
                raise _Dead


def test_a_repair_cut_at_any_step_is_made_good(damaged: Path, tmp_path: Path, read_all: ReadAll) -> None:
    commit_files(damaged)[2].unlink()
    for step in range(100):
        copy = Path(shutil.copytree(damaged, tmp_path / f"copy-{step}"))
        files = MortalFiles()
        with LogStore(copy, fs=files) as store:
            files.calls_left = step
            try:
                repair(store)
                break
            except _Dead:
                files.calls_left = None
        with LogStore(copy) as store:
            repair(store)
            assert examine(store).sound
            assert append(store, BATCHES - 1)
            assert not append(store, BATCHES)
            assert len(values(store, read_all)) == (BATCHES + 1) * 3
        shutil.rmtree(copy)
    assert 10 < step < 99


# --- older copies -----------------------------------------------------------------------------------------------------


def test_a_ledger_from_an_older_copy_is_brought_up_to_the_logs(damaged: Path, tmp_path: Path) -> None:
    shutil.copytree(damaged / "ledger", tmp_path / "older")
    with LogStore(damaged) as store:
        for batch in range(BATCHES, BATCHES + 3):
            append(store, batch)
    shutil.rmtree(damaged / "ledger")
    (tmp_path / "older").rename(damaged / "ledger")
    with LogStore(damaged) as store:
        assert "older copy" in examine(store).findings[0].what
        assert not repair(store).lost  # the plans are still there
        assert append(store, BATCHES + 2)
        assert not append(store, BATCHES + 3)


def test_logs_and_ends_from_an_older_copy_go_on_behind_the_loss(
    damaged: Path, tmp_path: Path, read_all: ReadAll
) -> None:
    for name in ("logs", "state"):
        shutil.copytree(damaged / name, tmp_path / name)
    with LogStore(damaged) as store:
        wanted = values(store, read_all)
        append(store, BATCHES)
        flush(store)
    for name in ("logs", "state"):
        shutil.rmtree(damaged / name)
        (tmp_path / name).rename(damaged / name)
    shutil.rmtree(damaged / "staging")
    with LogStore(damaged) as store:
        with pytest.raises(DuramenError, match="duramen recover") as error:
            append(store, BATCHES + 1)
        assert isinstance(error.value, DamagedLog)
        assert "commit 5 was never applied" in " ".join(each.what for each in examine(store).findings)
        assert not repair(store).sound
        topic = store.topic("orders")
        assert any(each.losses for each in recover(store, topic))
        assert examine(store).sound
        assert values(store, read_all) == wanted
        append(store, BATCHES + 1)
        assert len(values(store, read_all)) == len(wanted) + 3


def test_ends_from_an_older_copy_lose_nothing_that_the_logs_hold(
    damaged: Path, tmp_path: Path, read_all: ReadAll
) -> None:
    shutil.copytree(damaged / "state", tmp_path / "state")
    with LogStore(damaged) as store:
        append(store, BATCHES)
        flush(store)
        wanted = values(store, read_all)
    shutil.rmtree(damaged / "state")
    (tmp_path / "state").rename(damaged / "state")
    for path in damaged.glob("state/*/*.tail"):
        path.unlink()
    with LogStore(damaged) as store:
        assert not repair(store).sound
        assert not any(each.losses for each in recover(store, store.topic("orders")))
        assert values(store, read_all) == wanted


@pytest.mark.timeout(0 if SOAK else 300)
def test_a_copy_of_a_live_store_is_told_what_it_lacks_and_goes_on(tmp_path: Path, read_all: ReadAll, seed: int) -> None:
    """File by file, while a writer appends, flushes and keeps its ledger small: as `cp -r` does it."""
    told = 0
    for case in range(100 if SOAK else 5):
        rng = random.Random(f"{seed}/{case}")
        source, copy = tmp_path / f"source-{case}", tmp_path / f"copy-{case}"
        with LogStore(source, create=True) as store:
            store.create_topic("orders", partitions=2, configs={"segment.bytes": 600})
            first = _copied_while_written(store, copy, rng)
            whole = {
                number: {each.offset: each for each in found} for number, found in read_all(store, "orders").items()
            }
        with LogStore(copy) as store:
            found, topic = repair(store), store.topic("orders")
            reports = recover(store, topic)
            told += not found.sound or any(report.found_damage for report in reports)
            lost = {
                (number, offset)
                for number, report in enumerate(reports)
                for loss in report.losses
                for offset in range(loss.base_offset, loss.end_offset)
            }
            left = read_all(store, "orders")
            assert all(each == whole[number][each.offset] for number, some in left.items() for each in some), case
            here = {(number, each.offset) for number, some in left.items() for each in some}
            assert not here & lost, case
            assert first <= {each.value for some in left.values() for each in some}, case
            ends = store.ends(topic).high_watermarks
            assert here | lost == {(number, offset) for number in (0, 1) for offset in range(ends[number])}, case
            assert examine(store).sound, case
            last = Committer(store).ledger.last_batch("app")
            try:
                assert append(store, last.batch_id if last else 0) == (last is not None), case
            except ReplayMismatch:
                assert found.lost, case  # said, and adopt is the way on
            before = values(store, read_all)
            store.append("orders", [Record(b"k", b"more")])
            flush(store)
            assert values(store, read_all) == sorted([*before, b"more"]), case
            assert not any(report.found_damage for report in recover(store, topic)), case
        shutil.rmtree(source)
        shutil.rmtree(copy)
    assert told, "no copy lacked anything: the writer did too little meanwhile"


def _copied_while_written(store: LogStore, copy: Path, rng: random.Random) -> set[bytes | None]:
    """Copy the store; the values that were acknowledged before the copy began."""
    batch = 0

    def work() -> None:
        nonlocal batch
        for _ in range(rng.randrange(3)):
            append(store, batch)
            batch += 1
        if rng.random() < 0.3:
            flush(store)
        if rng.random() < 0.1:
            Committer(store).ledger.maintain()

    for _ in range(4):
        work()
    first: set[bytes | None] = {b"b%d-%d" % (number, at) for number in range(batch) for at in range(3)}
    root = Path(store.path)
    folders = [path for path in root.iterdir() if path.is_dir()]
    rng.shuffle(folders)
    shutil.copytree(root, copy, ignore=lambda folder, names: names if Path(folder) in folders else [])
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            target = copy / path.relative_to(root)
            if path.is_dir():
                target.mkdir(parents=True, exist_ok=True)
            else:
                target.parent.mkdir(parents=True, exist_ok=True)
                with contextlib.suppress(FileNotFoundError):
                    shutil.copy2(path, target)
            if rng.random() < 0.1:
                work()
    return first


# --- version and locks ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("content", [None, b"", b"garbage", b"\xff" * 200])
def test_a_lost_version_is_said_and_written_again(damaged: Path, content: bytes | None) -> None:
    version = damaged / "version"
    version.unlink() if content is None else version.write_bytes(content)
    for create in (False, True):
        with pytest.raises(CorruptState, match=r"version.*`duramen recover`"):
            LogStore(damaged, create=create)
    assert not restore_version(OS_FILES, str(damaged), dry_run=True).sound
    assert not restore_version(OS_FILES, str(damaged)).sound
    assert restore_version(OS_FILES, str(damaged)).sound
    with LogStore(damaged) as store:
        assert append(store, BATCHES - 1)


def test_what_is_no_store_is_not_made_one(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    for path in (tmp_path / "none", tmp_path / "other"):
        with pytest.raises(NotAStore):
            restore_version(OS_FILES, str(path))


def test_the_locks_folder_is_made_again(damaged: Path) -> None:
    shutil.rmtree(damaged / "locks")
    with LogStore(damaged) as store:
        assert not append(store, BATCHES)
        shutil.rmtree(damaged / "locks")
        assert not append(store, BATCHES + 1)
        assert os.listdir(damaged / "locks")


def test_json_of_a_report_is_plain(damaged: Path) -> None:
    commit_files(damaged)[-1].unlink()
    from duramen.commands.health import store_document

    with LogStore(damaged) as store:
        assert json.loads(json.dumps(store_document(examine(store))))["sound"] is False
