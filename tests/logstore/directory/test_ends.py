"""A topic's ends: round trip, growth, refusal of anything that does not fit the topic."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.directory.ends import TopicEnds, read_ends, write_ends
from logstore.directory.sealed import write_sealed
from logstore.errors import CorruptState
from logstore.files import OS_FILES
from logstore.topic import new_topic_id

_OFFSETS = st.integers(0, 2**63 - 1)


@settings(max_examples=200)
@given(st.lists(st.tuples(_OFFSETS, _OFFSETS, _OFFSETS), min_size=1, max_size=20), _OFFSETS)
def test_ends_read_back(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]], applied_sequence: int
) -> None:
    path = str(tmp_path_factory.getbasetemp() / "ends")
    ends = TopicEnds(*(tuple(row[at] for row in rows) for at in range(3)), applied_sequence)
    write_ends(OS_FILES, path, ends)
    assert read_ends(OS_FILES, path, partitions=len(rows)) == ends


def test_a_topic_nothing_was_written_to_ends_at_zero(tmp_path: Path) -> None:
    assert read_ends(OS_FILES, str(tmp_path / "ends"), partitions=3) == TopicEnds((0, 0, 0), (0, 0, 0), (0, 0, 0), 0)


def test_a_widened_topic_has_new_partitions_at_zero(tmp_path: Path) -> None:
    path = str(tmp_path / "ends")
    write_ends(OS_FILES, path, TopicEnds((5,), (4,), (3,), 9))
    assert read_ends(OS_FILES, path, partitions=2) == TopicEnds((5, 0), (4, 0), (3, 0), 9)


def test_changing_one_partition_leaves_the_others() -> None:
    ends = TopicEnds((1, 2, 3), (1, 2, 3), (1, 1, 1), 4)
    changed = ends.with_partition(1, high_watermark=9, last_stable_offset=8, recovery_point=7)
    assert changed == TopicEnds((1, 9, 3), (1, 8, 3), (1, 7, 1), 4)


def test_the_ends_of_another_topic_are_refused(tmp_path: Path) -> None:
    """They would hide records, or cut them."""
    mine, other = (tmp_path / new_topic_id() for _ in range(2))
    for folder in (mine, other):
        folder.mkdir()
    write_ends(OS_FILES, str(mine / "ends"), TopicEnds((5,), (4,), (3,), 9))
    assert read_ends(OS_FILES, str(mine / "ends"), partitions=1) == TopicEnds((5,), (4,), (3,), 9)
    (mine / "ends").rename(other / "ends")
    with pytest.raises(CorruptState, match=f"these are the ends of topic id {mine.name}"):
        read_ends(OS_FILES, str(other / "ends"), partitions=1)


@pytest.mark.parametrize(
    "document",
    [
        {},
        {"applied_sequence": 0, "last_stable_offsets": [1], "high_watermarks": [1], "recovery_points": []},
        {"applied_sequence": 0, "last_stable_offsets": [1], "high_watermarks": [1, 1, 1], "recovery_points": [1, 1, 1]},
        {"applied_sequence": -1, "last_stable_offsets": [1], "high_watermarks": [1], "recovery_points": [1]},
        {"applied_sequence": 0, "last_stable_offsets": [1], "high_watermarks": [-1], "recovery_points": [1]},
        {"applied_sequence": 0, "last_stable_offsets": [1], "high_watermarks": "11", "recovery_points": [1]},
        {"applied_sequence": 0, "last_stable_offsets": [1], "high_watermarks": [2**63], "recovery_points": [1]},
    ],
)
def test_documents_that_do_not_fit_are_refused(tmp_path: Path, document: dict[str, object]) -> None:
    path = str(tmp_path / "ends")
    write_sealed(OS_FILES, path, document, version=1)
    with pytest.raises(CorruptState) as caught:
        read_ends(OS_FILES, path, partitions=2)
    assert caught.value.file == path
