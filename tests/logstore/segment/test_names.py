from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import InvalidTopic
from logstore.segment.names import (
    DirectoryState,
    FileKind,
    NumberedFile,
    PartitionDirectory,
    Transient,
    file_name,
    parse_file_name,
    parse_partition_directory,
    partition_directory_name,
)
from logstore.topic import TopicPartition

ID = "0123456789abcdef0123456789abcdef"
topics = st.text(alphabet="abcXYZ019._-", min_size=1, max_size=249).filter(lambda name: name not in (".", ".."))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("00000000000000000000.log", NumberedFile(0, FileKind.LOG)),
        ("00000000000000000042.index", NumberedFile(42, FileKind.INDEX)),
        ("00000000000000000042.timeindex.swap", NumberedFile(42, FileKind.TIME_INDEX, Transient.SWAP)),
        ("00000000000000000042.txnindex.cleaned", NumberedFile(42, FileKind.TXN_INDEX, Transient.CLEANED)),
        ("09223372036854775807.snapshot.deleted", NumberedFile(2**63 - 1, FileKind.SNAPSHOT, Transient.DELETED)),
    ],
)
def test_a_numbered_file_name_is_its_parts(name: str, expected: NumberedFile) -> None:
    assert parse_file_name(name) == expected
    assert expected.name == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "0.log",
        "0000000000000000000.log",
        "000000000000000000000.log",
        "00000000000000000000.log.tmp",
        "00000000000000000000.log.swap.deleted",
        "00000000000000000000.logx",
        "00000000000000000000",
        "-0000000000000000001.log",
        "\u0660" * 20 + ".log",
        "09223372036854775808.log",
        "00000000000000000000.log\n",
        "00000000000000000000-0000000001.checkpoint",
        "leader-epoch-checkpoint",
        "partition.metadata",
    ],
)
def test_any_other_name_is_not_a_numbered_file(name: str) -> None:
    assert parse_file_name(name) is None


@given(st.integers(0, 2**63 - 1), st.sampled_from(FileKind), st.sampled_from(Transient))
def test_every_file_name_comes_back_as_its_parts(offset: int, kind: FileKind, transient: Transient) -> None:
    assert parse_file_name(file_name(offset, kind, transient)) == NumberedFile(offset, kind, transient)


@given(st.text(max_size=60))
def test_a_name_that_parses_is_written_the_same_way(name: str) -> None:
    found = parse_file_name(name)
    assert found is None or found.name == name


@pytest.mark.parametrize("offset", [-1, 2**63])
def test_no_file_is_named_for_an_impossible_offset(offset: int) -> None:
    with pytest.raises(ValueError, match="is not an offset"):
        file_name(offset, FileKind.LOG)


@given(topics, st.integers(0, 2**31 - 1))
def test_every_partition_directory_comes_back_as_its_parts(topic: str, number: int) -> None:
    partition = TopicPartition(topic, number)
    assert parse_partition_directory(partition_directory_name(partition)) == PartitionDirectory(partition)
    name = partition_directory_name(partition, DirectoryState.FUTURE, ID)
    assert parse_partition_directory(name) == PartitionDirectory(partition, DirectoryState.FUTURE, ID)
    for state in (DirectoryState.DELETE, DirectoryState.STRAY):
        name = partition_directory_name(partition, state, ID)
        assert len(name) <= 255
        found = parse_partition_directory(name)
        assert (found.state, found.unique_id, found.partition.partition) == (state, ID, number)
        assert topic.startswith(found.partition.topic)


def test_a_topic_with_dashes_and_dots_is_split_at_the_last_of_each() -> None:
    found = parse_partition_directory(f"a.b-c-7.{ID}-delete")
    assert found == PartitionDirectory(TopicPartition("a.b-c", 7), DirectoryState.DELETE, ID)
    assert parse_partition_directory("orders--1").partition == TopicPartition("orders-", 1)
    assert parse_partition_directory("x.y-delete-0").partition == TopicPartition("x.y-delete", 0)


@pytest.mark.parametrize(
    "name",
    [
        "use.duramen.export",
        "orders",
        "orders-x",
        "orders-2147483648",
        "orders-delete",
        "orders-0-delete",
        f"orders.{ID}-delete",
        "orders-0.-stray",
        "../x-0",
        "-0",
        "a-" + "9" * 5000,
        "",
    ],
)
def test_a_directory_that_is_no_partition_is_refused(name: str) -> None:
    with pytest.raises(InvalidTopic):
        parse_partition_directory(name)


def test_a_set_aside_directory_needs_an_id_of_32_hex_digits() -> None:
    with pytest.raises(ValueError, match="hex"):
        partition_directory_name(TopicPartition("orders", 0), DirectoryState.DELETE, "../../etc")
