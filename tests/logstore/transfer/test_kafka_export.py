"""Exported directories: complete, committed only, as a broker wants them; refusals and crashes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from logstore.directory.checkpoint import MetaProperties, read_meta_properties, read_offset_checkpoint
from logstore.directory.locks import FileLock
from logstore.errors import ExportRefused, StoreInUse
from logstore.files import OsFileSystem
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.topics.registry import Topic
from logstore.transfer.kafka_export import export_topics
from logstore.transfer.kafka_import import import_topics
from logstore.transfer.kafka_source import examine
from logstore.upkeep.recovery import recover
from logstore.upkeep.retention import delete_records
from reference.partition_writer import writing

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
KAFKA_ID = "Kf3BP2PlSxiZLtZdEXcE9w"


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


def reimported(store: LogStore, target: Path, tmp_path: Path) -> LogStore:
    other = LogStore(tmp_path / "again", create=True)
    source = examine(store.fs, str(target), limits=store.limits)
    import_topics(other, source, {})
    return other


def test_an_export_has_everything_a_broker_wants(store: LogStore, orders: Topic, tmp_path: Path) -> None:
    target = tmp_path / "out"
    done = export_topics(store, str(target), [orders], topic_ids={"orders": KAFKA_ID})
    assert done.clean
    assert names(target) == {
        "orders-0",
        "orders-1",
        ".lock",
        ".kafka_cleanshutdown",
        "cleaner-offset-checkpoint",
        "log-start-offset-checkpoint",
        "recovery-point-offset-checkpoint",
        "replication-offset-checkpoint",
    }
    assert (target / ".kafka_cleanshutdown").read_bytes() == b'{"version":0,"brokerEpoch":-1}'
    for number, end in ((0, 300), (1, 200)):
        folder = target / f"orders-{number}"
        assert (folder / "partition.metadata").read_bytes() == f"version: 0\ntopic_id: {KAFKA_ID}".encode()
        assert (folder / f"{end:020d}.snapshot").exists()
        for name in ("recovery-point-offset-checkpoint", "replication-offset-checkpoint"):
            offsets = read_offset_checkpoint(store.fs, str(target / name))
            assert offsets[orders.partition(number)] == end
        logs = sorted(folder.glob("*.log"))
        assert len(logs) == len(store.partition_state(orders, number).segments) > 3
        for path in logs:
            ours = Path(store.layout.partition(orders.partition(number))) / path.name
            assert path.read_bytes() == ours.read_bytes()
            assert os.path.samefile(path, ours) == (path != logs[-1]), "sealed ones are linked, the last is copied"
            for suffix, entry_bytes in ((".index", 8), (".timeindex", 12)):
                index = path.with_suffix(suffix).read_bytes()
                assert len(index) % entry_bytes == 0
                assert index[-entry_bytes:] != bytes(entry_bytes)
                assert not os.path.samefile(path.with_suffix(suffix), ours.with_suffix(suffix))


def test_exported_records_come_back(store: LogStore, orders: Topic, tmp_path: Path, read_all: ReadAll) -> None:
    export_topics(store, str(tmp_path / "out"), [orders])
    with reimported(store, tmp_path / "out", tmp_path) as other:
        assert read_all(other, "orders") == read_all(store, "orders")
        assert other.topic("orders").export_id == orders.id


def test_only_what_is_committed_is_exported(store: LogStore, orders: Topic, tmp_path: Path, read_all: ReadAll) -> None:
    def append_and_die() -> None:
        with writing(store, orders, 0, what="test") as log:
            log.append([Record(b"k", b"undecided" * 50, 1_700_000_000_000 + n) for n in range(40)], batch_bytes=300)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        append_and_die()
    done = export_topics(store, str(tmp_path / "out"), [orders])
    assert done.partitions[0].log_end_offset == 300
    assert b"undecided" not in b"".join(path.read_bytes() for path in (tmp_path / "out" / "orders-0").glob("*.log"))
    with reimported(store, tmp_path / "out", tmp_path) as other:
        assert read_all(other, "orders") == read_all(store, "orders")


def test_the_log_start_goes_along(store: LogStore, orders: Topic, tmp_path: Path, read_all: ReadAll) -> None:
    delete_records(store, orders, 0, before_offset=133)
    delete_records(store, orders, 1, before_offset=None)
    export_topics(store, str(tmp_path / "out"), [orders])
    starts = read_offset_checkpoint(store.fs, str(tmp_path / "out" / "log-start-offset-checkpoint"))
    assert starts[orders.partition(0)] == 133
    with reimported(store, tmp_path / "out", tmp_path) as other:
        assert read_all(other, "orders") == read_all(store, "orders")
        assert read_all(other, "orders")[0][0].offset == 133
        assert other.ends(other.topic("orders")).high_watermarks == (300, 200)


def test_an_empty_topic_and_a_gap_are_exported(store: LogStore, orders: Topic, tmp_path: Path) -> None:
    store.create_topic("empty")
    last = store.partition_state(orders, 0).segments[-1].base_offset
    os.truncate(os.path.join(store.layout.partition(orders.partition(0)), f"{last:020d}.log"), 5)
    (loss,) = recover(store, orders, [0])[0].losses
    assert (loss.base_offset, loss.end_offset) == (last, 300)
    done = export_topics(store, str(tmp_path / "out"), store.topics())
    assert [each.losses for each in done.partitions] == [(), (loss,), ()]
    assert [each.log_end_offset for each in done.partitions] == [0, 300, 200]
    assert (tmp_path / "out" / "empty-0" / f"{0:020d}.log").read_bytes() == b""


def test_unclean_lets_the_broker_check_everything(store: LogStore, orders: Topic, tmp_path: Path) -> None:
    done = export_topics(store, str(tmp_path / "out"), [orders], unclean=True)
    assert not done.clean
    assert not (tmp_path / "out" / ".kafka_cleanshutdown").exists()
    points = read_offset_checkpoint(store.fs, str(tmp_path / "out" / "recovery-point-offset-checkpoint"))
    assert set(points.values()) == {0}


def test_into_a_stopped_brokers_directory(store: LogStore, orders: Topic, tmp_path: Path) -> None:
    target = tmp_path / "broker"
    for name in ("orders-0", "other-0", "__cluster_metadata-0"):
        (target / name).mkdir(parents=True)
        (target / name / f"{0:020d}.log").write_bytes(b"" if name == "orders-0" else b"x")
    (target / "meta.properties").write_text("version=1\nnode.id=1\ncluster.id=c\n")
    (target / ".kafka_cleanshutdown").write_text("{}")
    (target / "replication-offset-checkpoint").write_text("0\n2\nother 0 17\norders 0 3\n")
    done = export_topics(store, str(target), [orders])
    assert done.clean
    found = read_offset_checkpoint(store.fs, str(target / "replication-offset-checkpoint"))
    assert {str(key): value for key, value in found.items()} == {"other-0": 17, "orders-0": 300, "orders-1": 200}
    assert (target / "other-0" / f"{0:020d}.log").read_bytes() == b"x"
    assert (target / "meta.properties").read_text().startswith("version=1")


def test_partitions_that_were_not_clean_stay_unclean(store: LogStore, orders: Topic, tmp_path: Path) -> None:
    (tmp_path / "broker" / "other-0").mkdir(parents=True)
    done = export_topics(store, str(tmp_path / "broker"), [orders])
    assert not done.clean
    assert not (tmp_path / "broker" / ".kafka_cleanshutdown").exists()


def test_an_identity_can_be_given(store: LogStore, orders: Topic, tmp_path: Path) -> None:
    identity = MetaProperties(node_id=4, cluster_id="MkU3OEVBNTcwNTJENDM2Qg", directory_id=KAFKA_ID)
    export_topics(store, str(tmp_path / "out"), [orders], identity=identity)
    assert read_meta_properties(store.fs, str(tmp_path / "out" / "meta.properties")) == identity


def test_refusals(store: LogStore, orders: Topic, tmp_path: Path, root: Path) -> None:
    for ids, says in (
        ({"orders": "short"}, "not a topic id"),
        ({"orders": "A" * 22}, "not a topic id"),
        ({"x": KAFKA_ID}, "not exported"),
    ):
        with pytest.raises(ExportRefused, match=says):
            export_topics(store, str(tmp_path / "out"), [orders], topic_ids=ids)
    with pytest.raises(ExportRefused, match="inside the store"):
        export_topics(store, str(root / "logs" / "out"), [orders])
    with LogStore(tmp_path / "other", create=True), pytest.raises(ExportRefused, match="live store"):
        export_topics(store, str(tmp_path / "other" / "logs"), [orders])
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportRefused, match="not a directory"):
        export_topics(store, str(tmp_path / "file"), [orders])
    assert not (tmp_path / "out").exists()
    export_topics(store, str(tmp_path / "out"), [orders])
    before = (tmp_path / "out" / ".kafka_cleanshutdown").stat()
    with pytest.raises(ExportRefused, match="holds records"):
        export_topics(store, str(tmp_path / "out"), [orders])
    assert (tmp_path / "out" / ".kafka_cleanshutdown").stat() == before


def test_a_running_broker_is_left_alone(store: LogStore, orders: Topic, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    broker = FileLock(store.fs, str(tmp_path / "out" / ".lock"))
    assert broker.try_acquire()
    with pytest.raises(StoreInUse):
        export_topics(store, str(tmp_path / "out"), [orders])
    broker.release()
    assert names(tmp_path / "out") == {".lock"}


class Crash(BaseException):
    pass


class DiesAfter(OsFileSystem):
    """Dies at the n-th change; what is there stays there."""

    def __init__(self, changes: int) -> None:
        self.left = changes

    def _count(self) -> None:
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


def test_a_crash_never_leaves_a_marker_of_cleanness(store: LogStore, orders: Topic, root: Path, tmp_path: Path) -> None:
    crashes = 0
    for changes in range(200):
        target = tmp_path / f"out-{changes}"
        fs = DiesAfter(10_000)
        with LogStore(root, fs=fs) as dying:
            fs.left = changes
            try:
                export_topics(dying, str(target), [orders])
            except Crash:
                crashes += 1
                assert not (target / ".kafka_cleanshutdown").exists()
                continue
            finally:
                fs.left = 10_000
        assert (target / ".kafka_cleanshutdown").exists()
        break
    else:
        pytest.fail("never finished")
    assert crashes > 10


def test_where_links_are_impossible_files_are_copied(
    orders: Topic, store: LogStore, root: Path, tmp_path: Path
) -> None:
    class OtherDevice(OsFileSystem):
        def link(self, source: str, target: str) -> None:
            if "/store/" in source and "/out/" in target:
                raise OSError(18, "Invalid cross-device link")
            super().link(source, target)

    with LogStore(root, fs=OtherDevice()) as other:
        done = export_topics(other, str(tmp_path / "out"), [orders])
    assert {each.linked_bytes for each in done.partitions} == {0}
    ours = Path(store.layout.partition(orders.partition(0)))
    for path in (tmp_path / "out" / "orders-0").glob("*.log"):
        assert path.read_bytes() == (ours / path.name).read_bytes()
        assert abs(path.stat().st_mtime - (ours / path.name).stat().st_mtime) < 0.01
