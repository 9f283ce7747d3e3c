"""Nothing is committed that cannot be appended, read or compacted; and a batch that was has a way out."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from logstore.commit.committer import Committer
from logstore.commit.plan import Plan, write_plan
from logstore.commit.plan_folder import Staging
from logstore.commit.produce import append_table
from logstore.commit.set_aside import set_aside
from logstore.commit.staging import EncodeOptions, StagedWriter
from logstore.errors import AppendTooLarge, AppendUnfinished, DamagedLog, InvalidConfig, RecordTooLarge, UnappliablePlan
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.topics.registry import Topic

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
SMALL = Limits(batch_bytes=64 << 10, read_buffer_bytes=64 << 10, decompressed_bytes=128 << 10)


def table(*values: bytes, header: bytes | None = None) -> pa.Table:
    columns = {"key": pa.array([b"k%d" % n for n in range(len(values))]), "value": pa.array(list(values))}
    if header is not None:
        kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
        columns["headers"] = pa.array([[{"key": "h", "value": header}]] * len(values), kind)
    return pa.table(columns)


@pytest.mark.parametrize("codec", ["none", "gzip", "zstd", "lz4", "snappy"])
@pytest.mark.parametrize("where", ["value", "header"])
def test_a_record_no_reader_could_hold_is_refused_before_the_commit(
    tmp_path: Path, read_all: ReadAll, codec: str, where: str
) -> None:
    """However well it packs: it has to be unpacked again, and perhaps packed anew with another codec."""
    with LogStore(tmp_path / "store", create=True, limits=SMALL) as store:
        store.create_topic("orders", configs={"max.message.bytes": 60_000, "segment.bytes": 10 << 20})
        store.registry.replace(_allowing(store.topic("orders"), 1 << 30))
        committer = Committer(store)
        rows = table(b"a", b"b", bytes(70 << 10)) if where == "value" else table(b"a", header=bytes(70 << 10))
        with pytest.raises(RecordTooLarge, match=r"row [02] .*64512"):
            append_table(committer, "orders", rows, options=EncodeOptions(compression_type=codec))
        assert committer.ledger.sequence(store.topic("orders").id) == 0
        assert [name for name in os.listdir(store.layout.staging) if name.endswith("-plan")] == []
        append_table(committer, "orders", table(b"fine"))
        assert [record.value for record in read_all(store, "orders")[0]] == [b"fine"]


def _allowing(topic: Topic, max_message_bytes: int) -> Topic:
    """As an older version, or a broker's settings, left it."""
    return replace(topic, configs=topic.configs | {"max.message.bytes": str(max_message_bytes)}, config_version=2)


@pytest.mark.parametrize("codec", ["none", "zstd"])
def test_the_largest_record_allowed_comes_through_everything(tmp_path: Path, read_all: ReadAll, codec: str) -> None:
    with LogStore(tmp_path / "store", create=True, limits=SMALL) as store:
        store.create_topic("orders", configs={"max.message.bytes": SMALL.written_batch_bytes})
        committer = Committer(store)
        value = os.urandom(SMALL.written_batch_bytes - 500)
        append_table(committer, "orders", table(value), options=EncodeOptions(compression_type=codec))
        append_table(committer, "orders", table(b"x" * 60_000), options=EncodeOptions(compression_type=codec))
        committer.flush(store.topic("orders"))
        assert [record.value for record in read_all(store, "orders")[0]] == [value, b"x" * 60_000]


def test_a_batch_size_above_what_can_be_read_is_cut_to_it(tmp_path: Path, read_all: ReadAll) -> None:
    with LogStore(tmp_path / "store", create=True, limits=SMALL) as store:
        store.create_topic("orders")
        options = EncodeOptions(compression_type="zstd", batch_size=1 << 30)
        append_table(Committer(store), "orders", table(*[b"v" * 1000] * 500), options=options)
        assert len(read_all(store, "orders")[0]) == 500


def test_a_setting_that_promises_more_than_can_be_read_is_refused(tmp_path: Path) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        most = DEFAULT_LIMITS.written_batch_bytes
        with pytest.raises(InvalidConfig, match=str(most)):
            store.create_topic("orders", configs={"max.message.bytes": most + 1})
        store.create_topic("orders", configs={"max.message.bytes": most})
        with pytest.raises(InvalidConfig, match=str(most)):
            store.alter_topic("orders", configs={"max.message.bytes": 1 << 30})
        store.registry.replace(_allowing(store.topic("orders"), 1 << 30))
        store.alter_topic("orders", configs={"retention.ms": -1})  # what came from elsewhere stays, and is capped


def test_a_batch_that_makes_more_segments_than_a_list_holds_is_refused(tmp_path: Path) -> None:
    limits = Limits(side_file_bytes=32 * 53 * 1200)
    with LogStore(tmp_path / "store", create=True, limits=limits) as store:
        store.create_topic("orders", configs={"segment.bytes": 200})
        committer = Committer(store)
        with pytest.raises(AppendTooLarge, match=r"at most 1200.*segment\.bytes"):
            append_table(committer, "orders", table(*[b"v" * 60] * 2000))
        assert committer.ledger.sequence(store.topic("orders").id) == 0
        append_table(committer, "orders", table(b"fine"))


def test_a_plan_that_nobody_could_read_is_refused_before_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        store.create_topic("orders")
        committer = Committer(store)
        with monkeypatch.context() as patched:
            low = replace(DEFAULT_LIMITS, side_file_bytes=400)  # other small files are smaller than a plan
            patched.setattr(
                "logstore.commit.committer.write_plan",
                lambda fs, folder, plan, limits: write_plan(fs, folder, plan, limits=low),
            )
            with pytest.raises(AppendTooLarge, match=r"the plan of the batch .* 400"):
                append_table(committer, "orders", table(b"a"))
        assert committer.ledger.sequence(store.topic("orders").id) == 0
        assert [name for name in os.listdir(store.layout.staging) if name.endswith("-plan")] == []
        append_table(committer, "orders", table(b"a"))


# --- the way out ------------------------------------------------------------------------------------------------------


def poisoned(root: Path, damage: str) -> tuple[LogStore, Committer]:
    """A store of an older version in which a batch was committed that cannot be appended."""
    with LogStore(root, create=True) as store:
        store.create_topic("orders", partitions=2, configs={"segment.bytes": 1 << 20})
        committer = Committer(store)
        append_table(committer, "orders", table(b"before-0", b"before-1", b"before-2"))
        target = committer.target("orders")
        staging = Staging(store)
        writer = StagedWriter(staging.output(), options=EncodeOptions(batch_size=100), now_ms=1)
        values = [b"v%d" % n for n in range(40)]
        values[17] = bytes(100 << 10)
        writer.write(target, table(*values).to_batches()[0])
        file = writer.finish()

        def die(plan: Plan, topic: Topic, numbers: object) -> None:
            raise DamagedLog("killed here")

        with pytest.raises(AppendUnfinished):
            committer.commit(staging, [file], {target.id: target}, apply_many=die)
        path = Path(staging.folder, file.name)
        if damage == "gone":
            path.unlink()
        elif damage == "flip":
            data = bytearray(path.read_bytes())
            data[80] ^= 1
            path.write_bytes(data)
    later = LogStore(root, limits=SMALL if damage == "too large" else DEFAULT_LIMITS)
    return later, Committer(later)


LOST = {"too large": 1, "flip": 3, "gone": 40}  # one batch, one batch, all of it


@pytest.mark.parametrize("damage", LOST)
def test_a_committed_batch_that_cannot_be_appended_is_set_aside_and_the_topic_goes_on(
    tmp_path: Path, read_all: ReadAll, damage: str
) -> None:
    store, committer = poisoned(tmp_path / "store", damage)
    with store:
        topic = store.topic("orders")
        for _ in range(2):
            with pytest.raises(UnappliablePlan, match="set-aside"):
                append_table(committer, "orders", table(b"after"))
        ends = store.ends(topic)
        row = committer.ledger.commits_after(topic.id, ends.applied_sequence)[0]
        planned = set_aside(committer, topic, dry_run=True)
        assert planned is not None
        assert store.ends(topic) == ends
        done = set_aside(committer, topic)
        assert done is not None
        assert done.losses.keys() == planned.losses.keys()
        assert done.lost_records == planned.lost_records == LOST[damage]
        assert set_aside(committer, topic) is None
        assert store.ends(topic).high_watermarks == row.end_offsets
        lost = {
            (number, offset)
            for number, losses in done.losses.items()
            for loss in losses
            for offset in range(loss.base_offset, loss.end_offset)
        }
        for number in range(2):
            assert store.partition_state(topic, number).losses == done.losses.get(number, ())
        append_table(committer, "orders", table(b"after-0", b"after-1", b"after-2"))
        committer.flush(topic)
        found = read_all(store, "orders")
        offsets = {(number, record.offset) for number, records in found.items() for record in records}
        ends = store.ends(topic)
        assert offsets == {(n, offset) for n in range(2) for offset in range(ends.high_watermarks[n])} - lost
        assert len([1 for records in found.values() for record in records]) == 46 - LOST[damage]
        assert done.kept is not None
        assert "plan" in os.listdir(done.kept)
        for number in range(2):  # opened anew, the log ends where it did
            with store.writing(topic, number, what="roll") as log:
                log.roll()
        assert read_all(store, "orders") == found
