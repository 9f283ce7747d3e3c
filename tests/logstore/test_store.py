"""A store as a whole: making and opening it, topics over their life, what crashes leave behind."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from logstore.clock import ManualClock
from logstore.config import Source
from logstore.directory.checkpoint import read_meta_properties, read_partition_metadata
from logstore.directory.ends import TopicEnds
from logstore.errors import (
    InvalidConfig,
    InvalidTopic,
    LockHeld,
    NotAStore,
    StoreVersionError,
    StrayDirectory,
    TopicExists,
    UnknownConfig,
    UnknownTopic,
)
from logstore.files import OsFileSystem
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.topics.placing import place_partition


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(root: Path) -> LogStore:
    return LogStore(root, create=True, lock_wait_ms=50)


# --- making and opening --------------------------------------------------------------------------------------------


def test_a_new_store_has_kafkas_layout_and_the_guard(store: LogStore, root: Path) -> None:
    assert sorted(path.name for path in root.iterdir()) == ["locks", "logs", "staging", "state", "topics", "version"]
    assert (root / "logs" / "use.duramen.export").is_dir()
    assert (root / "version").read_text() == "1\n"
    properties = read_meta_properties(store.fs, str(root / "logs" / "meta.properties"))
    assert properties is not None
    assert properties.version == 1
    assert properties.cluster_id != properties.directory_id


def test_a_store_opens_again_and_keeps_its_identity(store: LogStore, root: Path) -> None:
    before = (root / "logs" / "meta.properties").read_bytes()
    store.close()
    LogStore(root, create=True).close()
    LogStore(root).close()
    assert (root / "logs" / "meta.properties").read_bytes() == before


def test_several_open_stores_share(store: LogStore, root: Path) -> None:
    with LogStore(root) as other:
        other.create_topic("a")
        assert store.topic_names() == ["a"]


def test_no_store_is_named(root: Path) -> None:
    with pytest.raises(NotAStore) as caught:
        LogStore(root)
    assert caught.value.file == str(root)
    assert not root.exists()


def test_a_directory_with_other_things_is_not_made_a_store(root: Path) -> None:
    root.mkdir()
    (root / "orders-0").mkdir()
    with pytest.raises(NotAStore, match="orders-0"):
        LogStore(root, create=True)
    assert [path.name for path in root.iterdir()] == ["orders-0"]


def test_a_file_is_not_made_a_store(root: Path) -> None:
    root.write_text("x")
    with pytest.raises(NotAStore):
        LogStore(root, create=True)


def test_a_store_half_made_by_a_crash_is_made_again(root: Path) -> None:
    (root / "topics").mkdir(parents=True)
    (root / "version.tmp").write_text("")
    with LogStore(root, create=True) as store:
        store.create_topic("t")
        assert store.append("t", [Record(b"k", b"v", 1)]).records == 1
    with LogStore(root) as store:
        assert [record.value for record in store.reader("t", 0).records(0)] == [b"v"]


@pytest.mark.parametrize(
    ("content", "error"),
    [
        (b"2\n", StoreVersionError),
        (b"999999999", StoreVersionError),
        (b"0\n", StoreVersionError),
        (b"", NotAStore),
        (b"one\n", NotAStore),
        (b"\xff\n", NotAStore),
        (b"1" * 1000, NotAStore),
    ],
)
def test_other_versions_are_refused(store: LogStore, root: Path, content: bytes, error: type[Exception]) -> None:
    store.close()
    (root / "version").write_bytes(content)
    with pytest.raises(error):
        LogStore(root)


def test_the_guard_comes_back_when_somebody_removed_it(store: LogStore, root: Path) -> None:
    (root / "logs" / "use.duramen.export").rmdir()
    LogStore(root).close()
    assert (root / "logs" / "use.duramen.export").is_dir()


# --- settings ------------------------------------------------------------------------------------------------------


def test_settings_come_from_the_topic_then_the_store_file_then_the_table(store: LogStore, root: Path) -> None:
    store.close()
    (root / "duramen.toml").write_text("log.segment.bytes = 2000\nlog.roll.hours = 1\nlog.cleaner.threads = 2\n")
    with LogStore(root) as opened:
        topic = opened.create_topic("a", configs={"segment.bytes": "1000"})
        found = opened.topic_settings(topic)
        assert (found["segment.bytes"].value, found["segment.bytes"].source) == (1000, Source.TOPIC)
        assert (found["segment.ms"].value, found["segment.ms"].source_name) == (3_600_000, "log.roll.hours")
        assert found["retention.ms"].source is Source.DEFAULT
        assert opened.log_config(topic).segment_bytes == 1000
        assert opened.broker_config.log_cleaner_threads == 2
        assert opened.topic_settings()["segment.bytes"].value == 2000


def test_a_bad_store_file_is_named(store: LogStore, root: Path) -> None:
    store.close()
    (root / "duramen.toml").write_text("log.segment.bytess = 1\n")
    with pytest.raises(UnknownConfig, match=r"log\.segment\.bytes\?") as caught:
        LogStore(root)
    assert caught.value.file == str(root / "duramen.toml")


# --- topics --------------------------------------------------------------------------------------------------------


def test_a_topic_over_its_life(store: LogStore, root: Path) -> None:
    topic = store.create_topic("orders", partitions=2, configs={"cleanup.policy": "compact"})
    assert store.topic("orders") == topic
    assert store.log_config(topic).compact
    for number in range(2):
        metadata = read_partition_metadata(store.fs, str(root / "logs" / f"orders-{number}" / "partition.metadata"))
        assert metadata is not None
        assert metadata.topic_id == topic.id
    assert store.ends(topic) == TopicEnds.empty(2)

    altered = store.alter_topic("orders", configs={"segment.bytes": 100}, unset=["cleanup.policy"], partitions=3)
    assert store.topic("orders") == altered
    assert altered.configs == {"segment.bytes": "100"}
    assert altered.config_version == 2
    assert (root / "logs" / "orders-2" / "partition.metadata").exists()

    store.write_ends(altered, TopicEnds((1, 2, 3), (1, 2, 3), (0, 0, 0)))
    store.delete_topic("orders")
    assert store.topics() == []
    left = sorted(path.name for path in (root / "logs").iterdir() if not path.name.endswith("-offset-checkpoint"))
    assert left == [".lock", "meta.properties", "use.duramen.export"]
    for folder, left in (("state", []), ("staging", []), ("locks", ["clock", "leases", "partitions"])):
        assert sorted(path.name for path in (root / folder).iterdir()) == left


def test_a_recreated_topic_inherits_nothing(store: LogStore) -> None:
    old = store.create_topic("orders")
    store.write_ends(old, TopicEnds((7,), (7,), (7,)))
    store.delete_topic("orders")
    new = store.create_topic("orders")
    assert new.id != old.id
    assert store.ends(new) == TopicEnds.empty(1)


def test_dry_runs_change_nothing(store: LogStore, root: Path) -> None:
    store.create_topic("a", dry_run=True)
    assert store.topic_names() == []
    store.create_topic("a")
    before = sorted(root.rglob("*"))
    assert store.alter_topic("a", partitions=4, dry_run=True).partitions == 4
    store.delete_topic("a", dry_run=True)
    assert store.topic("a").partitions == 1
    assert sorted(path for path in root.rglob("*") if path.parent.name != "locks") == [
        path for path in before if path.parent.name != "locks"
    ]


def test_refusals_leave_no_topic(store: LogStore) -> None:
    for arguments, error in (
        ({"name": "../x"}, InvalidTopic),
        ({"name": "a", "partitions": 0}, InvalidConfig),
        ({"name": "a", "configs": {"segment.bytes": 1}}, InvalidConfig),
        ({"name": "a", "configs": {"log.segment.bytes": 100}}, UnknownConfig),
    ):
        with pytest.raises(error):
            store.create_topic(**arguments)  # type: ignore[arg-type]
    store.create_topic("a")
    with pytest.raises(TopicExists):
        store.create_topic("a")
    with pytest.raises(InvalidConfig, match="only grow"):
        store.create_topic("b", partitions=2) and store.alter_topic("b", partitions=1)
    with pytest.raises(UnknownConfig):
        store.alter_topic("a", unset=["nope"])
    with pytest.raises(UnknownTopic):
        store.alter_topic("c", partitions=2)
    with pytest.raises(UnknownTopic):
        store.delete_topic("c")
    assert store.topic_names() == ["a", "b"]


def test_a_lag_that_fits_the_default_but_not_the_store_file_is_refused(store: LogStore, root: Path) -> None:
    store.close()
    (root / "duramen.toml").write_text("log.cleaner.max.compaction.lag.ms = 10\n")
    with LogStore(root) as opened, pytest.raises(InvalidConfig, match=r"log\.cleaner\.max\.compaction\.lag\.ms"):
        opened.create_topic("a", configs={"min.compaction.lag.ms": 11})


def test_one_of_many_creators_wins(store: LogStore, root: Path) -> None:
    won: list[str] = []
    lost: list[Exception] = []

    def create() -> None:
        with LogStore(root) as mine:
            try:
                won.append(mine.create_topic("contested", partitions=2).id)
            except TopicExists as error:
                lost.append(error)

    threads = [threading.Thread(target=create) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert len(lost) == 5
    topic = store.topic("contested")
    assert topic.id == won[0]
    for partition in topic.partition_list():
        metadata = read_partition_metadata(
            store.fs, os.path.join(store.layout.partition(partition), "partition.metadata")
        )
        assert metadata is not None
        assert metadata.topic_id == topic.id


def test_deletion_waits_for_maintenance_and_names_it(store: LogStore) -> None:
    topic = store.create_topic("a", partitions=2)
    with (
        LogStore(store.path) as other,
        other.locks.maintenance(topic.id, 1, what="a long pass"),
        pytest.raises(LockHeld, match="for a long pass"),
    ):
        store.delete_topic("a")
    assert store.topic("a") == topic


# --- crashes -------------------------------------------------------------------------------------------------------


class Crash(BaseException):
    pass


class CrashesAtRename(OsFileSystem):
    """Dies when something is about to leave `logs/` (or to enter it)."""

    def __init__(self, part: str) -> None:
        self.part = part

    def rename(self, source: str, target: str) -> None:
        if self.part in source:
            raise Crash
        super().rename(source, target)


def test_a_crash_between_the_end_of_a_topic_and_its_directories_is_swept(root: Path) -> None:
    with LogStore(root, create=True) as store:
        topic = store.create_topic("a", partitions=2)
        store.write_ends(topic, TopicEnds((1, 1), (1, 1), (0, 0)))
    with LogStore(root, fs=CrashesAtRename("/logs/a-0")) as dying, pytest.raises(Crash):
        dying.delete_topic("a")
    with LogStore(root) as store:
        assert store.topic_names() == []
        assert (root / "logs" / "a-1").is_dir()
        swept = store.sweep()
        assert {os.path.basename(path) for path in swept} == {"a-0", "a-1", topic.id}
        assert not (root / "logs" / "a-1").exists()
        assert list((root / "state").iterdir()) == []


def test_directories_a_deleted_topic_left_are_not_inherited(root: Path) -> None:
    with LogStore(root, create=True) as store:
        store.create_topic("a")
        (root / "logs" / "a-0" / "00000000000000000000.log").write_bytes(b"old")
    with LogStore(root, fs=CrashesAtRename("/logs/a-0")) as dying, pytest.raises(Crash):
        dying.delete_topic("a")
    with LogStore(root) as store:
        store.create_topic("a")
        names = sorted(path.name for path in (root / "logs" / "a-0").iterdir())
        assert names == ["0" * 20 + ".log", "leader-epoch-checkpoint", "partition.metadata"]
        assert not (root / "logs" / "a-0" / names[0]).stat().st_size


def test_a_crash_while_partitions_are_placed_leaves_a_topic_that_works(root: Path) -> None:
    with LogStore(root, create=True):
        pass
    with LogStore(root, fs=CrashesAtRename("/staging/")) as dying, pytest.raises(Crash):
        dying.create_topic("a", partitions=2)
    with LogStore(root) as store:
        topic = store.topic("a")
        directory = place_partition(store, topic, topic.partition(1))
        assert sorted(os.listdir(directory)) == ["0" * 20 + ".log", "leader-epoch-checkpoint", "partition.metadata"]


def test_a_foreign_directory_in_the_way_is_left_and_named(store: LogStore, root: Path) -> None:
    (root / "logs" / "a-0").mkdir()
    (root / "logs" / "a-0" / "precious").write_text("x")
    with pytest.raises(StrayDirectory, match="a-0 does not say whose it is"):
        store.create_topic("a")
    assert store.topic_names() == []
    store.sweep()
    assert (root / "logs" / "a-0" / "precious").read_text() == "x"


def test_sweeping_leaves_young_leftovers_and_the_living(root: Path) -> None:
    clock = ManualClock(0)
    with LogStore(root, create=True, clock=clock) as store:
        store.create_topic("a", partitions=2)
        (root / "staging" / "0123-partition").mkdir()
        (root / "topics" / "x.new").touch()
        assert store.sweep() == []
        clock.set(10**15)
        assert sorted(os.path.basename(path) for path in store.sweep()) == ["0123-partition", "x.new"]
        assert (root / "logs" / "a-1").is_dir()
        assert store.topic_names() == ["a"]
