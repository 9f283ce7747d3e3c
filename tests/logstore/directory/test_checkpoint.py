from __future__ import annotations

import contextlib
import os
import re
import tracemalloc
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from logstore.directory.checkpoint import (
    Line,
    MetaProperties,
    PartitionMetadata,
    delete_clean_shutdown,
    format_properties,
    parse_properties,
    read_meta_properties,
    read_offset_checkpoint,
    read_partition_metadata,
    write_clean_shutdown,
    write_meta_properties,
    write_offset_checkpoint,
    write_partition_metadata,
)
from logstore.errors import CorruptCheckpoint
from logstore.files import OS_FILES
from logstore.limits import Limits
from logstore.topic import TopicPartition

TOPIC_ID = "Ql9Jzv2kQxq1Zr0cV8s3Tw"

topics = st.text(alphabet="abcXYZ019._-", min_size=1, max_size=40).filter(lambda name: name not in (".", ".."))
offsets = st.dictionaries(
    st.builds(TopicPartition, topics, st.integers(0, 2**31 - 1)), st.integers(0, 2**63 - 1), max_size=8
)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("checkpoints")


def checkpoint(directory: Path, content: bytes) -> str:
    path = directory / "cleaner-offset-checkpoint"
    path.write_bytes(content)
    return str(path)


def offsets_or_typed_error(path: str) -> dict[TopicPartition, int] | None:
    try:
        return read_offset_checkpoint(OS_FILES, path)
    except CorruptCheckpoint as error:
        return None if error.file == path else pytest.fail(f"the error names {error.file}")


# --- offset checkpoints


def test_an_offset_checkpoint_is_written_as_kafka_writes_it(tmp_path: Path) -> None:
    path = str(tmp_path / "recovery-point-offset-checkpoint")
    write_offset_checkpoint(OS_FILES, path, {TopicPartition("topic.a-b", 0): 12})
    assert Path(path).read_bytes() == b"0\n1\ntopic.a-b 0 12\n"
    assert os.listdir(tmp_path) == ["recovery-point-offset-checkpoint"]


@given(offsets)
def test_every_offset_checkpoint_comes_back(shared: Path, entries: dict[TopicPartition, int]) -> None:
    path = str(shared / "replication-offset-checkpoint")
    write_offset_checkpoint(OS_FILES, path, entries)
    assert read_offset_checkpoint(OS_FILES, path) == entries


def test_an_absent_or_empty_checkpoint_has_no_entries(tmp_path: Path) -> None:
    assert read_offset_checkpoint(OS_FILES, str(tmp_path / "absent")) == {}
    assert read_offset_checkpoint(OS_FILES, checkpoint(tmp_path, b"")) == {}
    assert read_offset_checkpoint(OS_FILES, checkpoint(tmp_path, b"0\n0\n")) == {}


@pytest.mark.parametrize(
    "content", [b"0\n1\nt  0\t5", b"0\n1\nt 0 5  \n", b"0\r\n1\r\nt 0 5\r\n"], ids=["runs", "trailing", "crlf"]
)
def test_what_java_reads_we_read(tmp_path: Path, content: bytes) -> None:
    assert read_offset_checkpoint(OS_FILES, checkpoint(tmp_path, content)) == {TopicPartition("t", 0): 5}


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"1\n0\n", 1),
        (b"\n", 1),
        (b"zero\n", 1),
        (b"\x00" * 4096, 1),
        (b"0\n", 2),
        (b"0\n-1\n", 2),
        (b"0\n99999999999999999999999\n", 2),
        (b"0\n2147483647\n", 2),
        (b"0\n2\nt 0 5\n", 2),
        (b"0\n0\nt 0 5\n", 3),
        (b"0\n1\nt 0 5\n\n", 4),
        (b"0\n1\nt 0\n", 3),
        (b"0\n1\nt 0 5 6\n", 3),
        (b"0\n1\n t 0 5\n", 3),
        (b"0\n1\nt 0 -5\n", 3),
        (b"0\n1\nt -1 5\n", 3),
        (b"0\n1\nt 2147483648 5\n", 3),
        (b"0\n1\nt 0 9223372036854775808\n", 3),
        (b"0\n1\nt 0 +5\n", 3),
        (b"0\n1\nt 0 5_0\n", 3),
        ("0\n1\nt 0 \u0665\n".encode(), 3),
        (b"0\n1\n../../etc 0 5\n", 3),
        (b"0\n1\n.. 0 5\n", 3),
        (b"0\n2\nt 0 5\nt 0 6\n", 4),
        (b"0\n1\n\xff 0 5\n", 3),
        (b"0\n1\n" + b"t" * 250 + b" 0 5\n", 3),
    ],
)
def test_a_malformed_checkpoint_is_refused_with_its_line(tmp_path: Path, content: bytes, line: int) -> None:
    path = checkpoint(tmp_path, content)
    with pytest.raises(CorruptCheckpoint, match=f"line {line}:") as caught:
        read_offset_checkpoint(OS_FILES, path)
    assert caught.value.file == path
    assert len(str(caught.value)) < 1000


@given(st.binary(max_size=120))
@example(b"0\n1\nt 0 5\n")
def test_any_bytes_give_offsets_or_a_typed_error(shared: Path, content: bytes) -> None:
    path = checkpoint(shared, content)
    entries = offsets_or_typed_error(path)
    assert entries is None or all(offset >= 0 for offset in entries.values())


@given(offsets, st.data())
def test_a_mutated_checkpoint_gives_offsets_or_a_typed_error(
    shared: Path, entries: dict[TopicPartition, int], data: st.DataObject
) -> None:
    path = str(shared / "log-start-offset-checkpoint")
    write_offset_checkpoint(OS_FILES, path, entries)
    content = bytearray(Path(path).read_bytes())
    at = data.draw(st.integers(0, len(content) - 1))
    content[at] ^= data.draw(st.integers(1, 255))
    Path(path).write_bytes(content[: data.draw(st.integers(1, len(content)))])
    found = offsets_or_typed_error(path)
    assert found is None or len(found) <= len(entries)


def test_a_checkpoint_beyond_the_limit_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "cleaner-offset-checkpoint"
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(CorruptCheckpoint, match="limit"):
        read_offset_checkpoint(OS_FILES, str(path))


def test_a_file_of_many_entries_stays_within_the_limit_in_memory(tmp_path: Path) -> None:
    count = 100_000
    path = checkpoint(tmp_path, f"0\n{count}\n".encode() + b"".join(b"t %d 0\n" % n for n in range(count)))
    limits = Limits(side_file_bytes=2 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(CorruptCheckpoint, match="more than the limit"):
            read_offset_checkpoint(OS_FILES, path, limits=limits)
        assert tracemalloc.get_traced_memory()[1] < 3 * limits.side_file_bytes
    finally:
        tracemalloc.stop()


# --- partition.metadata


def test_partition_metadata_is_written_as_kafka_writes_it(tmp_path: Path) -> None:
    path = str(tmp_path / "partition.metadata")
    write_partition_metadata(OS_FILES, path, TOPIC_ID)
    content = Path(path).read_bytes()
    assert content == b"version: 0\ntopic_id: " + TOPIC_ID.encode()
    assert len(content) == 43
    assert read_partition_metadata(OS_FILES, path) == PartitionMetadata(TOPIC_ID, 0)


def test_absent_partition_metadata_is_none(tmp_path: Path) -> None:
    assert read_partition_metadata(OS_FILES, str(tmp_path / "partition.metadata")) is None


def test_a_later_version_of_partition_metadata_is_read(tmp_path: Path) -> None:
    path = tmp_path / "partition.metadata"
    path.write_text(f"version: 7\ntopic_id: {TOPIC_ID}\nnews: 1\n")
    assert read_partition_metadata(OS_FILES, str(path)) == PartitionMetadata(TOPIC_ID, 7)


@pytest.mark.parametrize(
    "content",
    [
        "",
        "version: 0\n",
        "version: -1\ntopic_id: " + TOPIC_ID,
        "version: x\ntopic_id: " + TOPIC_ID,
        "topic_id: " + TOPIC_ID,
        "version: 0\ntopic_id: " + "A" * 22,
        "version: 0\ntopic_id: " + TOPIC_ID[:-1],
        "version: 0\ntopic_id: ../../../../../../../x",
        "version: 0\ntopic: " + TOPIC_ID,
        "version:0\ntopic_id:" + TOPIC_ID,
        "\x00" * 43,
        "version: 0\ntopic_id: a: b",
        "version: 0\n" + "x" * 100_000,
    ],
)
def test_malformed_partition_metadata_is_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "partition.metadata"
    path.write_text(content)
    with pytest.raises(CorruptCheckpoint) as caught:
        read_partition_metadata(OS_FILES, str(path))
    assert caught.value.file == str(path)
    assert len(str(caught.value)) < 1000


def test_the_all_zero_topic_id_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="all-zero"):
        write_partition_metadata(OS_FILES, str(tmp_path / "partition.metadata"), "A" * 22)
    assert os.listdir(tmp_path) == []


# --- meta.properties


def test_meta_properties_as_a_broker_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "meta.properties"
    path.write_text(
        "#\n#Mon Jan 01 00:00:00 UTC 2024\nnode.id=1\ndirectory.id=" + TOPIC_ID + "\nversion=1\n"
        "cluster.id=5L6g3nShT-eMCtK--X86sw\n"
    )
    found = read_meta_properties(OS_FILES, str(path))
    assert found == MetaProperties(1, 1, "5L6g3nShT-eMCtK--X86sw", TOPIC_ID, {})


def test_meta_properties_come_back(tmp_path: Path) -> None:
    path = str(tmp_path / "meta.properties")
    for properties in (
        MetaProperties(1, 3, "a=b c", TOPIC_ID, {"x y": " \u00e9\U0001f600\n"}),
        MetaProperties(0, -1, None, None, {}),
        MetaProperties(0, None, "c", None, {}),
    ):
        write_meta_properties(OS_FILES, path, properties)
        assert read_meta_properties(OS_FILES, path) == properties
    assert read_meta_properties(OS_FILES, str(tmp_path / "absent")) is None


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", {}),
        (b"# c = d\n! x\n\n  \t\n a = b", {"a": "b"}),
        (b"a:b\nc d\ne\nf = \n", {"a": "b", "c": "d", "e": "", "f": ""}),
        (b"a=b=c:d", {"a": "b=c:d"}),
        (b"a = \\\n   b\\\n  c\nd=e", {"a": "bc", "d": "e"}),
        (b"a=b\\\\\nc=d", {"a": "b\\", "c": "d"}),
        (b"k\\ e\\=y\\:=v", {"k e=y:": "v"}),
        (b"a=\\u00e9\\u20AC\\t\\q", {"a": "\u00e9\u20ac\tq"}),
        (b"a=\\uD83D\\uDE00", {"a": "\U0001f600"}),
        (b"a=\xe9", {"a": "\u00e9"}),
        (b"a=1\ra=2\r\na=3", {"a": "3"}),
        (b"a=1\\", {"a": "1"}),
        (b"a=\\\n\nb=2", {"a": "", "b": "2"}),
        (b"a=\\\n#b=2", {"a": "#b=2"}),
        (b"a=b  ", {"a": "b  "}),
    ],
)
def test_properties_as_java_reads_them(content: bytes, expected: dict[str, str]) -> None:
    found = parse_properties(content, file="meta.properties")
    assert {key: value for key, (_, value) in found.items()} == expected


printable = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)


@given(st.dictionaries(printable, printable, max_size=5))
def test_every_property_comes_back(values: dict[str, str]) -> None:
    found = parse_properties(format_properties(values), file="meta.properties")
    assert {key: value for key, (_, value) in found.items()} == values


@given(st.binary(max_size=80))
def test_any_bytes_are_properties_or_have_a_bad_escape(content: bytes) -> None:
    may_be_malformed = re.search(rb"\\u(?![0-9a-fA-F]{4})", content)
    found: dict[str, tuple[Line, str]] = {}
    with contextlib.suppress(CorruptCheckpoint) if may_be_malformed else contextlib.nullcontext():
        found = parse_properties(content, file="meta.properties")
    assert all(1 <= line.number <= content.count(b"\n") + content.count(b"\r") + 1 for line, _ in found.values())


def test_what_java_stores_is_read() -> None:
    stored = (  # by java.util.Properties.store
        b"#c\n#Tue Nov 17 02:23:15 UTC 2026\n"
        b"a\\ b=\\ lead\n"
        b"k\\=\\:\\#\\!=\\\\tail\\\\\n"
        b"plain=x y  \n"
        b"\\u00E9=\\u20AC\\uD83D\\uDE00\\n\\t\\f\\r\n"
    )
    found = parse_properties(stored, file="q")
    assert {key: value for key, (_, value) in found.items()} == {
        "a b": " lead",
        "k=:#!": "\\tail\\",
        "\u00e9": "\u20ac\U0001f600\n\t\f\r",
        "plain": "x y  ",
    }


@pytest.mark.parametrize(
    ("content", "match"),
    [
        ("version=2\nnode.id=1\ncluster.id=c", "line 1: version 2"),
        ("version=-1", "line 1"),
        ("version=one", "line 1"),
        ("cluster.id=c\nversion=1", "node.id is missing"),
        ("version=1\nnode.id=1", "cluster.id is missing"),
        ("version=1\nnode.id=1\ncluster.id=", "cluster.id is missing"),
        ("version=1\nnode.id=-1\ncluster.id=c", "line 2: node.id"),
        ("version=1\nnode.id=99999999999\ncluster.id=c", "line 2: node.id"),
        ("# c\nversion=1\nnode.id=1\ncluster.id=c\ndirectory.id=x", "line 5: directory.id"),
        ("a=1\nb=\\u12", "line 2"),
        ("a" * (2 << 20), "limit"),
    ],
)
def test_malformed_meta_properties_are_refused(tmp_path: Path, content: str, match: str) -> None:
    path = tmp_path / "meta.properties"
    path.write_text(content)
    with pytest.raises(CorruptCheckpoint, match=match) as caught:
        read_meta_properties(OS_FILES, str(path))
    assert caught.value.file == str(path)


# --- .kafka_cleanshutdown


def test_the_marker_of_a_clean_stop(tmp_path: Path) -> None:
    path = str(tmp_path / ".kafka_cleanshutdown")
    assert not delete_clean_shutdown(OS_FILES, path)
    write_clean_shutdown(OS_FILES, path, 42)
    assert Path(path).read_bytes() == b'{"version":0,"brokerEpoch":42}'
    assert delete_clean_shutdown(OS_FILES, path)
    assert not Path(path).exists()
    write_clean_shutdown(OS_FILES, path)
    assert Path(path).read_bytes() == b'{"version":0,"brokerEpoch":-1}'


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[" * 4096,
        b"null",
        b"[]",
        b'{"version":0}',
        b'{"version":1,"brokerEpoch":1}',
        b'{"version":0,"brokerEpoch":"1"}',
        b'{"version":0,"brokerEpoch":true}',
        b'{"version":0,"brokerEpoch":1e400}',
        b'{"version":0,"brokerEpoch":' + b"9" * 4000 + b"}",
        b'{"version":0,"brokerEpoch":99999999999999999999}',
        b"\xff\xfe",
        b" " * 100_000,
    ],
)
def test_a_marker_with_any_content_still_says_clean(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / ".kafka_cleanshutdown"
    path.write_bytes(content)
    assert delete_clean_shutdown(OS_FILES, str(path))
