"""Imports: clean and unclean, copied and linked, bare folders, refusals; a crash leaves nothing half visible."""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from logstore.clock import ManualClock
from logstore.errors import ImportRefused, InvalidConfig, StoreInUse, TopicExists, UnknownConfig
from logstore.files import OS_FILES, OsFileSystem
from logstore.limits import DEFAULT_LIMITS
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.topics.registry import Topic
from logstore.transfer.kafka_export import export_topics
from logstore.transfer.kafka_import import ImportedTopic, import_topics, plan_import
from logstore.transfer.kafka_source import examine, stopped_source
from logstore.upkeep.retention import delete_records
from reference.partition_writer import writing

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]


@pytest.fixture
def broker(store: LogStore, orders: Topic, tmp_path: Path) -> Path:
    """A directory as a stopped broker leaves it."""
    export_topics(store, str(tmp_path / "broker"), [orders])
    (tmp_path / "broker" / "__cluster_metadata-0").mkdir()
    (tmp_path / "broker" / "bootstrap.checkpoint").write_bytes(b"x")
    return tmp_path / "broker"


@pytest.fixture
def target(tmp_path: Path) -> LogStore:
    return LogStore(tmp_path / "target", create=True, lock_wait_ms=50)


def take(
    target: LogStore, directory: Path, *, only: list[str] | None = None, link: bool = False, **configs: object
) -> list[ImportedTopic]:
    with stopped_source(OS_FILES, str(directory)):
        source = examine(OS_FILES, str(directory), only=only, limits=DEFAULT_LIMITS)
        return import_topics(target, source, configs, link=link)


def snapshot(directory: Path) -> dict[str, bytes]:
    files = {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
    files.pop("locks/clock", None)  # whoever asks for the time writes it
    return files


@pytest.mark.parametrize("link", [False, True])
def test_a_clean_directory_comes_in_as_it_is(
    store: LogStore, target: LogStore, broker: Path, link: bool, read_all: ReadAll
) -> None:
    before = snapshot(broker)
    (imported,) = take(target, broker, link=link, **{"segment.bytes": 2000})
    assert snapshot(broker) == before, "the source is never changed"
    assert [(part.log_start_offset, part.log_end_offset) for part in imported.partitions] == [(0, 300), (0, 200)]
    assert read_all(target, "orders") == read_all(store, "orders")
    topic = target.topic("orders")
    assert topic.kafka_id == store.topic("orders").id
    assert topic.id != topic.kafka_id
    assert topic.configs == {"segment.bytes": "2000"}
    assert target.ends(topic).recovery_points == (300, 200)
    logs = sorted(Path(target.layout.partition(topic.partition(0))).glob("*.log"))
    for path in logs:
        assert os.path.samefile(path, broker / "orders-0" / path.name) == (link and path != logs[-1])
    assert list(Path(target.layout.staging).iterdir()) == []
    with writing(target, topic, 0, what="test") as log:
        assert log.append([Record(b"k", b"v", 1_700_000_000_000)]).first_offset == 300
    assert snapshot(broker) == before, "writing to the store does not reach a linked source"


@pytest.mark.parametrize("link", [False, True])
def test_an_unclean_directory_is_recovered_and_the_source_left_as_it_was(
    target: LogStore, broker: Path, link: bool, read_all: ReadAll
) -> None:
    (broker / ".kafka_cleanshutdown").unlink()
    (broker / "recovery-point-offset-checkpoint").write_text("0\n1\norders 0 20\n")
    logs = sorted((broker / "orders-0").glob("*.log"))
    with logs[-1].open("ab") as file:
        file.write(b"torn")
    before = snapshot(broker)
    (imported,) = take(target, broker, link=link)
    assert snapshot(broker) == before
    assert imported.partitions[0].dropped_bytes == 4
    assert imported.partitions[0].found_damage
    assert not imported.partitions[1].found_damage
    assert [len(found) for found in read_all(target, "orders").values()] == [300, 200]


def test_damage_of_the_source_costs_its_own_batch_and_the_source_stays_as_it_was(
    target: LogStore, broker: Path, read_all: ReadAll
) -> None:
    (broker / ".kafka_cleanshutdown").unlink()
    (broker / "recovery-point-offset-checkpoint").unlink()
    logs = sorted((broker / "orders-0").glob("*.log"))
    data = bytearray(logs[2].read_bytes())
    data[100] ^= 1
    logs[2].write_bytes(data)
    before = snapshot(broker)
    (imported,) = take(target, broker, link=True)
    assert snapshot(broker) == before
    damaged = imported.partitions[0]
    assert damaged.log_end_offset == 300
    assert damaged.quarantined
    assert all(os.path.exists(path) for path in damaged.quarantined)
    (loss,) = target.partition_state(target.topic("orders"), 0).losses
    assert loss.base_offset == int(logs[2].stem)
    lost = range(loss.base_offset, loss.end_offset)
    assert [each.offset for each in read_all(target, "orders")[0]] == [o for o in range(300) if o not in lost]


def test_bare_folders_have_all_their_records_committed(
    target: LogStore, broker: Path, tmp_path: Path, read_all: ReadAll
) -> None:
    bare = tmp_path / "bare"
    for number in (0, 1):
        (bare / f"orders-{number}").mkdir(parents=True)
        for path in (broker / f"orders-{number}").glob("*.log"):
            shutil.copy(path, bare / f"orders-{number}")
    (imported,) = take(target, bare)
    assert [part.log_end_offset for part in imported.partitions] == [300, 200]
    assert [len(found) for found in read_all(target, "orders").values()] == [300, 200]


def test_one_partitions_folder_alone(target: LogStore, broker: Path, read_all: ReadAll) -> None:
    (imported,) = take(target, broker / "orders-1")
    assert imported.topic.partitions == 2
    assert {number: len(found) for number, found in read_all(target, "orders").items()} == {0: 0, 1: 200}


def test_log_start_and_first_dirty_come_along(
    store: LogStore, orders: Topic, target: LogStore, tmp_path: Path, read_all: ReadAll
) -> None:
    delete_records(store, orders, 0, before_offset=77)
    export_topics(store, str(tmp_path / "broker"), [orders])
    (tmp_path / "broker" / "cleaner-offset-checkpoint").write_text("0\n2\norders 0 120\norders 1 100000\n")
    take(target, tmp_path / "broker")
    topic = target.topic("orders")
    assert read_all(target, "orders")[0][0].offset == 77
    assert [target.partition_state(topic, number).first_dirty_offset for number in (0, 1)] == [120, 200]


def test_what_is_not_a_live_partition_is_passed_by_with_a_reason(target: LogStore, broker: Path) -> None:
    hexed = "0123456789abcdef0123456789abcdef"
    for name in (
        f"orders-1.{hexed}-delete",
        f"gone-0.{hexed}-stray",
        f"new-0.{hexed}-future",
        "__consumer_offsets-3",
        "nonsense",
    ):
        (broker / name).mkdir()
    source = examine(OS_FILES, str(broker), limits=DEFAULT_LIMITS)
    assert [topic.name for topic in source.topics] == ["orders"]
    assert source.skipped["__cluster_metadata-0"] == "a broker's own"
    assert source.skipped[f"orders-1.{hexed}-delete"] == "awaits its deletion"
    assert "internal topic" in source.skipped["__consumer_offsets-3"]
    assert len(source.skipped) == 6
    named = examine(OS_FILES, str(broker), only=["__consumer_offsets"], limits=DEFAULT_LIMITS)
    assert [topic.name for topic in named.topics] == ["__consumer_offsets"]


def test_an_unreadable_checkpoint_is_noted_and_not_needed(target: LogStore, broker: Path) -> None:
    (broker / "recovery-point-offset-checkpoint").write_bytes(b"\xff\xfe")
    source = examine(OS_FILES, str(broker), limits=DEFAULT_LIMITS)
    assert "recovery-point-offset-checkpoint is not used" in source.notes[0]


def test_a_running_broker_is_refused(target: LogStore, broker: Path) -> None:
    with (broker / ".lock").open("r+b") as file:
        # Another process would be excluded by the same kind of lock; within one, only an open-file lock is.
        import struct

        fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi0q", fcntl.F_WRLCK, 0, 0, 0, 0))
        with pytest.raises(StoreInUse, match="is using the directory"):
            take(target, broker)
        with pytest.raises(StoreInUse):
            take(target, broker / "orders-0")
    assert target.topic_names() == []


def test_while_importing_no_broker_can_start(broker: Path) -> None:
    with stopped_source(OS_FILES, str(broker)):
        from logstore.directory.locks import FileLock

        assert not FileLock(OS_FILES, str(broker / ".lock")).try_acquire()


def test_refusals(store: LogStore, target: LogStore, broker: Path, tmp_path: Path) -> None:
    for directory, says in (
        (tmp_path / "none", "no such directory"),
        (Path(target.layout.topics), "no topic-N directories"),
        (Path(store.layout.logs), "live store"),
    ):
        with pytest.raises(ImportRefused, match=says):
            take(target, directory)
    with pytest.raises(ImportRefused, match="no partition of topic nope"):
        take(target, broker, only=["nope"])
    with pytest.raises(InvalidConfig):
        take(target, broker, **{"segment.bytes": 1})
    with pytest.raises(UnknownConfig):
        take(target, broker, nope=1)
    shutil.copytree(broker / "orders-0", broker / "copy-0")
    with pytest.raises(ImportRefused, match="have the same id"):
        take(target, broker)
    shutil.rmtree(broker / "copy-0")
    (broker / "orders-1" / "partition.metadata").write_text("version: 0\ntopic_id: AAAAAAAAQACAAAAAAAAAAQ")
    with pytest.raises(ImportRefused, match="belong to different topics"):
        take(target, broker)
    (broker / "orders-1" / "partition.metadata").unlink()
    assert target.topic_names() == []
    take(target, broker)
    with pytest.raises(TopicExists, match="Delete it first"):
        take(target, broker)


def test_planning_changes_nothing(target: LogStore, broker: Path) -> None:
    before = snapshot(Path(target.path))
    source = examine(OS_FILES, str(broker), limits=DEFAULT_LIMITS)
    (planned,) = plan_import(target, source, {"cleanup.policy": "compact"})
    assert (planned.name, planned.partitions) == ("orders", 2)
    assert snapshot(Path(target.path)) == before


def test_a_topic_imported_again_inherits_nothing(
    target: LogStore, orders: Topic, broker: Path, read_all: ReadAll
) -> None:
    """Both carry Kafka's topic id; ours is another each time."""
    ids = set()
    for at in range(3):
        take(target, broker)
        imported = read_all(target, "orders")
        target.append("orders", [Record(b"key", b"of life %d" % at, 1_700_000_000_000)])
        values = [record.value for records in read_all(target, "orders").values() for record in records]
        assert len(values) == sum(map(len, imported.values())) + 1
        assert [value for value in values if value and value.startswith(b"of life")] == [b"of life %d" % at]
        topic = target.topic("orders")
        ids.add(topic.id)
        assert topic.kafka_id == orders.id
        target.delete_topic("orders")  # before a flush: the staged batch is still there
    assert len(ids) == 3


def test_a_sweep_beside_an_import_leaves_what_is_being_imported(
    store: LogStore, broker: Path, tmp_path: Path, read_all: ReadAll
) -> None:
    for number in range(8):
        for part in (0, 1):
            shutil.copytree(broker / f"orders-{part}", broker / f"topic{number}-{part}")
            (broker / f"topic{number}-{part}" / "partition.metadata").unlink()
    expected = read_all(store, "orders")
    swept: list[str] = []
    with (
        LogStore(tmp_path / "target", create=True) as target,
        LogStore(target.path, clock=ManualClock(10**15)) as daemon,
    ):

        def sweep(_: int) -> None:
            swept.extend(daemon.sweep())

        source = examine(OS_FILES, str(broker), limits=DEFAULT_LIMITS)
        imported = import_topics(target, source, {}, progress=sweep)
        assert len(imported) == 9
        for each in imported:
            assert read_all(target, each.topic.name) == expected
            target.append(each.topic.name, [Record(b"key", b"value", 1_700_000_000_000)])
        assert swept == []
        assert daemon.sweep() == []


class Crash(BaseException):
    pass


class DiesAfter(OsFileSystem):
    """Dies at the n-th change, and from then on does nothing more: what is there stays there."""

    def __init__(self) -> None:
        self.left: int | None = None

    def _count(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Crash

    def rename(self, source: str, target: str) -> None:
        self._count()
        super().rename(source, target)

    def link(self, source: str, target: str) -> None:
        self._count()
        super().link(source, target)

    def unlink(self, path: str) -> None:
        self._count()
        super().unlink(path)

    def rmdir(self, path: str) -> None:
        self._count()
        super().rmdir(path)

    def mkdir(self, path: str) -> None:
        self._count()
        super().mkdir(path)


def test_a_crash_anywhere_leaves_all_or_nothing_and_the_next_import_works(
    store: LogStore, broker: Path, tmp_path: Path, read_all: ReadAll
) -> None:
    expected = read_all(store, "orders")
    outcomes = set()
    for changes in range(0, 400, 4):
        path = tmp_path / f"store-{changes}"
        fs = DiesAfter()
        crashed = False
        with LogStore(path, create=True, fs=fs) as dying:
            source = examine(fs, str(broker), limits=DEFAULT_LIMITS)
            fs.left = changes
            try:
                import_topics(dying, source, {})
            except Crash:
                crashed = True
            fs.left = None
        with LogStore(path) as after:
            after.sweep()
            visible = after.topic_names() == ["orders"]
            outcomes.add((crashed, visible))
            if not visible:
                take(after, broker)
            assert read_all(after, "orders") == expected
            after.delete_topic("orders")
            after.sweep()
            assert [name for name in os.listdir(after.layout.logs) if "-" in name and "checkpoint" not in name] == []
            assert os.listdir(after.layout.state) == []
        shutil.rmtree(path)
        if not crashed:
            break
    assert (True, False) in outcomes
    assert (False, True) in outcomes
