"""Errors of the system at every call: whatever a store does, each of its calls fails once with EIO, ENOSPC, EMFILE,
ENOMEM or EACCES, or is cut short.

The operation then ends with a typed error, with the system's own, or with the right result. With the fault gone
nothing acknowledged is missing, nothing that was needed is removed, the store verifies, and work goes on. The suite
tries a sample of the calls; `DURAMEN_SOAK=1` tries every one with every error, or with a random one if
`DURAMEN_ONE_ERROR=1`. delta-rs does its own I/O past the seam, so of the ledger our own calls are covered.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa
import pytest

from compaction_job.job import compact
from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committer
from logstore.commit.plan_folder import Staging
from logstore.commit.produce import append_table
from logstore.commit.staging import EncodeOptions, StagedWriter
from logstore.directory import unsynced
from logstore.errors import AppendUnfinished, CommitConflict, DuramenError
from logstore.files import OS_FILES
from logstore.store import LogStore
from logstore.transfer.kafka_export import export_topics
from logstore.transfer.kafka_import import import_topics
from logstore.transfer.kafka_source import examine, stopped_source
from logstore.upkeep.backup import backup
from logstore.upkeep.recovery import recover
from logstore.upkeep.retention import delete_records, retain
from logstore.upkeep.verify import verify_partition
from simulation.faulty import ERRORS, NEEDS_ROOM, ROOM_ERRORS, Fault, FaultyFiles, short_transfers

SOAK = os.environ.get("DURAMEN_SOAK") == "1"
#: an hour for a random one at each call, five for all of them
EVERY_ERROR = SOAK and os.environ.get("DURAMEN_ONE_ERROR") != "1"
SAMPLES = int(os.environ.get("DURAMEN_ERROR_SAMPLES", "3"))
SHORT_SAMPLES = 1
PARTITIONS = 2
COMPACTED = {
    "cleanup.policy": "compact",
    "segment.bytes": 1500,
    "index.interval.bytes": 200,
    "min.cleanable.dirty.ratio": 0.01,
    "file.delete.delay.ms": 0,
}
EVENTS = {"segment.bytes": 1500, "retention.bytes": 2500, "file.delete.delay.ms": 0}
NOW_MS = 1_700_000_000_000


def rows(batch: int, count: int = 30) -> pa.Table:
    return pa.table(
        {
            "key": pa.array([b"k%d" % n for n in range(count)]),
            "value": pa.array([b"%d-%d" % (batch, n) for n in range(count)]),
            "timestamp": pa.array([NOW_MS + batch] * count),
        }
    )


# --- what is done -----------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """One copy of a store, and what may be in it. `batches` are acknowledged in both topics."""

    root: Path
    fs: FaultyFiles
    batches: int = 4
    #: batches that may be there as well
    maybe: set[int] = field(default_factory=set)
    #: how many records of topic `events` retention may take off the front
    may_retain: bool = False

    @contextlib.contextmanager
    def store(self) -> Iterator[LogStore]:
        with LogStore(self.root, fs=self.fs, lock_wait_ms=200) as store:
            yield store


def do_open(case: Case) -> None:
    with case.store() as store:
        assert store.topic_names() == ["accounts", "events"]


def do_append(case: Case) -> None:
    case.maybe.add(case.batches)
    with case.store() as store:
        committer = Committer(store)
        for topic in ("accounts", "events"):
            append_table(committer, topic, rows(case.batches), app=AppBatch(topic, case.batches, "query"))


def do_settle(case: Case) -> None:
    """A batch of both topics that another process committed and did not append."""
    with case.store() as store:
        committer = Committer(store)
        for topic in store.topics():
            committer.settle_topic(topic)


def do_flush(case: Case) -> None:
    with case.store() as store:
        committer = Committer(store)
        for topic in store.topics():
            committer.flush(topic)
        committer.sweep()


def do_read(case: Case) -> None:
    with case.store() as store:
        check_content(case, store)


def do_compact(case: Case) -> None:
    with case.store() as store:
        report = compact(store, force=True, roll_active=True, retention=False, threads=1, now_ms=NOW_MS + 60_000)
        if case.fs.failed is None:
            assert not report.failed
            assert not report.problems


def do_retain(case: Case) -> None:
    case.may_retain = True
    with case.store() as store:
        for number in range(PARTITIONS):
            retain(store, store.topic("events"), number, now_ms=NOW_MS)


def do_delete_records(case: Case) -> None:
    case.may_retain = True
    with case.store() as store:
        for number in range(PARTITIONS):
            delete_records(store, store.topic("events"), number, before_offset=5)


def do_sweep(case: Case) -> None:
    with case.store() as store:
        store.sweep()
        Committer(store).sweep()
        for topic in store.topics():
            for number in range(PARTITIONS):
                store.sweep_deleted(topic, number, now_ms=NOW_MS)


def do_create(case: Case) -> None:
    with case.store() as store:
        if "more" in store.topic_names():  # an earlier try got so far; directories it lacks are made when needed
            store.delete_topic("more")
        store.create_topic("more", partitions=2)
        store.alter_topic("more", configs={"retention.ms": "-1"}, partitions=3)
        store.delete_topic("more")


def do_upkeep(case: Case) -> None:
    with case.store() as store:
        Committer(store).ledger.maintain()


def do_export(case: Case) -> None:
    with case.store() as store:
        export_topics(store, str(case.root.parent / f"{case.root.name}-export"), store.topics())


def do_import(case: Case) -> None:
    source = str(case.root.parent / "source")
    with case.store() as store, stopped_source(case.fs, source):
        import_topics(store, examine(case.fs, source, limits=store.limits), {"retention.ms": "-1"})
        assert sorted(store.topic_names()) == ["accounts", "events", "imported"]


def do_backup(case: Case) -> None:
    with case.store() as store:
        backup(store, str(case.root.parent / f"{case.root.name}-backup"))


def do_recover(case: Case) -> None:
    with case.store() as store:
        for topic in store.topics():
            for report in recover(store, topic):
                assert not report.found_damage


OPERATIONS: dict[str, Callable[[Case], None]] = {
    "open": do_open,
    "append": do_append,
    "settle": do_settle,
    "flush": do_flush,
    "read": do_read,
    "compact": do_compact,
    "retain": do_retain,
    "delete records": do_delete_records,
    "sweep": do_sweep,
    "create, alter, delete": do_create,
    "ledger upkeep": do_upkeep,
    "export": do_export,
    "import": do_import,
    "backup": do_backup,
    "recover": do_recover,
}


# --- the store it is done to ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Stores to copy: `plain`, with flushed and unflushed batches; `committed`, with one that was not appended."""
    folder = tmp_path_factory.mktemp("made")
    fs = FaultyFiles()
    with LogStore(folder / "plain", create=True, fs=fs) as store:
        store.create_topic("accounts", partitions=PARTITIONS, configs=COMPACTED)
        store.create_topic("events", partitions=PARTITIONS, configs=EVENTS)
        committer = Committer(store)
        for batch in range(4):
            for topic in ("accounts", "events"):
                append_table(committer, topic, rows(batch), app=AppBatch(topic, batch, "query"))
                if batch == 1:
                    committer.flush(store.topic(topic))
        for number in range(3):  # left over by processes that died
            staging = Staging(store)
            if number:
                StagedWriter(staging.output(), options=EncodeOptions(), now_ms=NOW_MS).finish()
            staging._lock.release()
    shutil.copytree(folder / "plain", folder / "committed")
    with LogStore(folder / "committed", fs=fs) as store:
        committer = Committer(store)

        def die(*_: object) -> None:
            raise CommitConflict("killed here")

        targets = {target.id: target for target in map(committer.target, ("accounts", "events"))}
        staging = Staging(store)
        writer = StagedWriter(staging.output(), options=EncodeOptions(), now_ms=NOW_MS)
        for target in targets.values():
            writer.write(target, rows(4).to_batches()[0])
        with pytest.raises(AppendUnfinished):
            committer.commit(staging, [writer.finish()], targets, apply_many=die)
    with LogStore(folder / "other", create=True, fs=fs) as store:
        store.create_topic("imported", partitions=1, configs={"segment.bytes": 1500})
        append_table(Committer(store), "imported", rows(0))
        export_topics(store, str(folder / "source"), store.topics())
    return folder


def new_case(made: Path, name: str, number: int) -> Case:
    root = made / f"{name.split()[0].strip(',')}-{number}"
    shutil.copytree(made / ("committed" if name == "settle" else "plain"), root)
    unsynced._REMEMBERED.clear()
    case = Case(root, FaultyFiles())
    if name == "settle":
        case.maybe.add(4)
    return case


def drop(case: Case) -> None:
    for path in (case.root, *(case.root.parent / f"{case.root.name}-{kind}" for kind in ("export", "backup"))):
        shutil.rmtree(path, ignore_errors=True)


# --- what must hold afterwards ----------------------------------------------------------------------------------------


def check_content(case: Case, store: LogStore) -> None:
    """Every acknowledged record once, at increasing offsets; `accounts` may be compacted, `events` retained."""
    allowed = [*range(case.batches), *sorted(case.maybe)]
    for name in ("accounts", "events"):
        topic = store.topic(name)
        found: list[tuple[bytes, bytes]] = []
        for number in range(PARTITIONS):
            reader = store.reader(topic, number)
            try:
                records = list(reader.records(reader.log_start_offset()))
            finally:
                reader.close()
            offsets = [record.offset for record in records]
            assert offsets == sorted(set(offsets)), (name, number)
            found += [(record.key or b"", record.value or b"") for record in records]
        batches = {int(value.split(b"-")[0]) for _, value in found}
        assert batches <= set(allowed), (name, batches)
        newest = max(batches)
        assert newest >= case.batches - 1, (name, "an acknowledged batch is missing", batches)
        assert len(found) == len(set(found)), (name, "twice")
        latest = dict(sorted(found, key=lambda pair: int(pair[1].split(b"-")[0])))
        if name == "accounts":
            assert latest == {b"k%d" % n: b"%d-%d" % (newest, n) for n in range(30)}
        elif not case.may_retain:
            whole = {(b"k%d" % n, b"%d-%d" % (batch, n)) for batch in range(newest + 1) for n in range(30)}
            assert set(found) == whole, (name, "missing", sorted(whole - set(found))[:5])


def check_after(case: Case, name: str) -> None:
    """With the fault gone."""
    with LogStore(case.root, lock_wait_ms=200) as store:
        committer = Committer(store)
        check_content(case, store)
        if name == "settle":  # it is committed, so it is there once somebody settles
            for topic in store.topics():
                committer.settle_topic(topic)
            case.batches, case.maybe = 5, set()
            check_content(case, store)
        if name not in ("create, alter, delete", "import"):
            assert store.topic_names() == ["accounts", "events"]
        for topic_name in ("accounts", "events"):
            for batch in sorted(case.maybe):
                append_table(committer, topic_name, rows(batch), app=AppBatch(topic_name, batch, "query"))
            append_table(committer, topic_name, rows(case.batches + len(case.maybe)))
        case.batches, case.maybe = case.batches + len(case.maybe) + 1, set()
        for topic_name in ("accounts", "events"):
            topic = store.topic(topic_name)
            committer.flush(topic)
            ends = store.ends(topic)
            assert ends.recovery_points == ends.high_watermarks
        committer.ledger.maintain()
        store.sweep()
        check_content(case, store)
        for topic in (each for each in store.topics() if each.name != "more"):
            for number in range(topic.partitions):
                found = verify_partition(
                    store.fs,
                    store.layout.partition(topic.partition(number)),
                    partition=topic.partition(number),
                    topic_id=topic.id,
                    state_path=store.layout.partition_state(topic.id, number),
                    high_watermark=store.high_watermark(topic, number),
                )
                assert found.sound, (topic.name, number, found.findings)
    # What failed can be done now.
    for kind in ("export", "backup"):
        shutil.rmtree(case.root.parent / f"{case.root.name}-{kind}", ignore_errors=True)
    if name not in ("import", "append"):
        case.fs.failed = None
        OPERATIONS[name](case)
    elif name == "import":
        with case.store() as store:
            done = "imported" in store.topic_names()
        if not done:
            do_import(case)


def run(made: Path, name: str, number: int, fault: Fault) -> str | None:
    """One operation with one failing call; None when all is well, else what is not."""
    case = new_case(made, name, number)
    outcome = "it succeeded"
    try:
        with case.fs.faulty(fault):
            try:
                OPERATIONS[name](case)
            except (DuramenError, OSError) as error:
                outcome = f"it raised {type(error).__name__}: {error}"
        failed = case.fs.failed
        if failed is None and outcome != "it succeeded":
            return f"{name}: failed without a fault: {outcome}"
        # A store that is as it was needs no look: the same one is checked when calls are counted.
        if name == "settle" or unsynced._REMEMBERED or content(case.root) != content(made / "plain"):
            check_after(case, name)
        return None
    except BaseException:
        where = "\n".join(traceback.format_exc().splitlines()[-14:])
        return f"{name}, {case.fs.failed}, {fault}, {outcome}:\n{where}"
    finally:
        drop(case)


def content(root: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(root)): path.read_bytes() if path.is_file() else None
        for path in root.rglob("*")
        if "locks" not in path.parts
    }


def errors_of(kind: str) -> int:
    return len(ERRORS) + (len(ROOM_ERRORS) if kind in NEEDS_ROOM else 0)


def calls_of(made: Path, name: str) -> list[str]:
    """The kinds of its calls, in their order."""
    case = new_case(made, name, 0)
    try:
        with case.fs.faulty(None):
            OPERATIONS[name](case)
        calls = case.fs.kinds
        check_after(case, name)
        return calls
    finally:
        drop(case)


def chosen(rng: random.Random, count: int, samples: int) -> list[int]:
    return list(range(count)) if SOAK else sorted(rng.sample(range(count), min(samples, count)))


@pytest.mark.timeout(0 if SOAK else 300)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_error_of_the_system_at_any_call_costs_nothing(made: Path, name: str, seed: int) -> None:
    rng = random.Random(f"{seed}/{name}")
    calls = calls_of(made, name)
    problems = []
    faults = [
        Fault(at, turn, times=rng.choice((1, 1, 3)))
        for at in chosen(rng, len(calls), SAMPLES)
        for turn in (range(errors_of(calls[at])) if EVERY_ERROR else [rng.randrange(errors_of(calls[at]))])
    ]
    for number, fault in enumerate(faults):
        found = run(made, name, number + 1, fault)
        if found is not None:
            problems.append(found)
            print(found, flush=True)
    print(f"{name}: {len(calls)} calls, {len(faults)} faults, {len(problems)} problems")
    assert not problems, f"{len(problems)} of {len(faults)}; the first: {problems[0]}"


@pytest.mark.timeout(0 if SOAK else 300)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_read_or_write_that_moves_one_byte_only_goes_on(made: Path, name: str, seed: int) -> None:
    """The system may move fewer bytes than asked; that is not an error, and never the end of a file."""
    rng = random.Random(f"{seed}/{name}")
    case = new_case(made, name, 0)
    with short_transfers(-1) as count:
        OPERATIONS[name](case)
    drop(case)
    for number, at in enumerate(chosen(rng, count[0], SHORT_SAMPLES)):
        case = new_case(made, name, number + 1)
        case.fs.failed = None
        with short_transfers(at):
            OPERATIONS[name](case)
        if number == 0 or SOAK:
            check_after(case, name)
        drop(case)


def test_that_a_file_cannot_be_looked_at_does_not_mean_that_it_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    assert OS_FILES.exists(str(tmp_path / "file"))
    assert not OS_FILES.exists(str(tmp_path / "none"))
    assert not OS_FILES.exists(str(tmp_path / "file" / "below"))
    with pytest.raises(OSError, match="symbolic links"):
        OS_FILES.exists(str(tmp_path / "loop" / "below"))
