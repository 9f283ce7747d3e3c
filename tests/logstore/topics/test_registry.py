"""Topic files: round trip, exclusive creation, hostile content."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.directory.layout import Layout
from logstore.directory.sealed import seal, write_sealed
from logstore.errors import CorruptState, DuramenError, InvalidConfig, StoreVersionError, TopicExists, UnknownTopic
from logstore.files import OS_FILES
from logstore.topic import TopicPartition, new_topic_id
from logstore.topics.marks import DELETED, TopicMarks
from logstore.topics.registry import Topic, TopicRegistry, check_partitions, spelled

ORDERS = Topic("orders", "AAAAAAAAQACAAAAAAAAAAQ", 3, {"cleanup.policy": "compact"}, 1, 1_700_000_000_000)


@pytest.fixture
def registry(tmp_path: Path) -> TopicRegistry:
    OS_FILES.mkdir(Layout(str(tmp_path)).topics)
    return TopicRegistry(OS_FILES, Layout(str(tmp_path)))


def test_a_topic_reads_back(registry: TopicRegistry, tmp_path: Path) -> None:
    registry.create(ORDERS)
    assert registry.names() == ["orders"]
    assert registry.read("orders") == ORDERS
    altered = replace(ORDERS, configs={"retention.ms": "5"}, partitions=7, config_version=2)
    registry.replace(altered)
    assert registry.read("orders") == altered
    unknown = replace(altered, settings_unknown=True, kafka_id="AAAAAAAAQACAAAAAAAAAAg")
    registry.replace(unknown)
    assert registry.read("orders") == unknown
    marks = TopicMarks(OS_FILES, Layout(str(tmp_path)))
    marks.retire(unknown)
    assert registry.names() == []
    assert [(mark.topic_id, mark.topic) for mark in marks.find(DELETED)] == [(ORDERS.id, unknown)]


def test_the_second_copy_follows_every_change_and_needs_no_file(registry: TopicRegistry, tmp_path: Path) -> None:
    layout = Layout(str(tmp_path))
    OS_FILES.mkdir(layout.topic_state(ORDERS.id))
    registry.create(ORDERS)
    altered = replace(ORDERS, partitions=7, config_version=2)
    registry.replace(altered)
    assert registry.read_copy(ORDERS.id) == altered
    OS_FILES.unlink(layout.topic("orders"))
    assert registry.read_copy(ORDERS.id) == altered


def test_creation_never_replaces_another(registry: TopicRegistry, tmp_path: Path) -> None:
    registry.create(ORDERS)
    with pytest.raises(TopicExists):
        registry.create(replace(ORDERS, id=new_topic_id(), partitions=9))
    assert registry.read("orders") == ORDERS
    assert [path.name for path in (tmp_path / "topics").iterdir()] == ["orders.t"]


def test_names_that_look_like_each_others_files_do_not_meet(registry: TopicRegistry) -> None:
    names = ["a", "a.t", "a.t.tmp", "a.tmp", "a.new", "-", "x" * 249]
    for number, name in enumerate(names):
        registry.create(replace(ORDERS, name=name, id=new_topic_id(), partitions=number + 1))
    for name in names:  # the temporary file of one is never the file of another
        registry.replace(replace(registry.read(name), config_version=5))
    assert sorted(registry.names()) == sorted(names)
    assert [registry.read(name).partitions for name in names] == [1, 2, 3, 4, 5, 6, 7]


def test_unknown_topic_gets_the_nearest_name(registry: TopicRegistry) -> None:
    registry.create(ORDERS)
    with pytest.raises(UnknownTopic, match=r"Did you mean orders\?"):
        registry.read("order")
    with pytest.raises(UnknownTopic, match="topics list"):
        registry.read("zzz")


def test_other_files_are_left_alone(registry: TopicRegistry, tmp_path: Path) -> None:
    for name in ("README", "a b.t", ".t", "..t", "x.new"):
        (tmp_path / "topics" / name).touch()
    assert registry.names() == []


@pytest.mark.parametrize(
    "change",
    [
        {"name": "other"},
        {"id": None},
        {"id": "short"},
        {"id": "../../../../../../etc/x"},
        {"id": "AAAAAAAAAAAAAAAAAAAAAA"},
        {"partitions": 0},
        {"partitions": 100_001},
        {"partitions": True},
        {"partitions": "3"},
        {"configs": []},
        {"configs": {"no.such": "1"}},
        {"configs": {"segment.bytes": "1"}},
        {"configs": {"min.compaction.lag.ms": "5", "max.compaction.lag.ms": "4"}},
        {"config_version": None},
        {"created_ms": -1},
    ],
)
def test_hostile_documents_are_refused(registry: TopicRegistry, tmp_path: Path, change: dict[str, object]) -> None:
    good: dict[str, object] = {
        "name": "orders",
        "id": ORDERS.id,
        "partitions": 3,
        "configs": {},
        "config_version": 1,
        "created_ms": 0,
    }
    path = str(tmp_path / "topics" / "orders.t")
    write_sealed(OS_FILES, path, good, version=1)
    assert registry.read("orders").partitions == 3
    write_sealed(OS_FILES, path, {**good, **change}, version=1)
    with pytest.raises(CorruptState) as caught:
        registry.read("orders")
    assert caught.value.file == path


def test_a_newer_topic_file_asks_for_a_newer_release(registry: TopicRegistry, tmp_path: Path) -> None:
    (tmp_path / "topics" / "orders.t").write_bytes(seal({}, version=3))
    with pytest.raises(StoreVersionError):
        registry.read("orders")


@settings(max_examples=200)
@given(st.binary(max_size=300))
def test_any_bytes_give_a_typed_error(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    root = tmp_path_factory.getbasetemp()
    OS_FILES.mkdir(str(root / "topics"))
    (root / "topics" / "fuzz.t").write_bytes(content)
    with pytest.raises(DuramenError):
        TopicRegistry(OS_FILES, Layout(str(root))).read("fuzz")


def test_partitions_of_a_topic() -> None:
    assert ORDERS.partition_list() == [TopicPartition("orders", number) for number in range(3)]
    assert ORDERS.partition(2) == TopicPartition("orders", 2)
    for number in (-1, 3):
        with pytest.raises(UnknownTopic, match="partitions 0 to 2"):
            ORDERS.partition(number)


def test_number_of_partitions_has_limits() -> None:
    assert check_partitions(1) == 1
    for number in (0, -1, 100_001):
        with pytest.raises(InvalidConfig):
            check_partitions(number)


def test_settings_are_kept_in_kafkas_spelling() -> None:
    given = {"cleanup.policy": ["delete", "compact"], "preallocate": True, "min.cleanable.dirty.ratio": 1}
    assert spelled(given) == {
        "cleanup.policy": "compact,delete",
        "min.cleanable.dirty.ratio": "1.0",
        "preallocate": "true",
    }
