from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import CorruptCheckpoint
from logstore.files import OS_FILES
from logstore.partition.leader_epochs import EpochEntry, LeaderEpochs, cut_from_end, cut_from_start, with_epoch
from reference.epochs import epoch_for_offset


def entries(*pairs: tuple[int, int]) -> tuple[EpochEntry, ...]:
    return tuple(EpochEntry(*pair) for pair in pairs)


def epochs_of(*pairs: tuple[int, int]) -> LeaderEpochs:
    return LeaderEpochs(OS_FILES, "nowhere", entries(*pairs))


def ascending() -> st.SearchStrategy[tuple[EpochEntry, ...]]:
    columns = st.integers(0, 8).flatmap(
        lambda size: st.tuples(*[st.sets(st.integers(0, 50), min_size=size, max_size=size)] * 2)
    )
    return columns.map(lambda pair: entries(*zip(sorted(pair[0]), sorted(pair[1]), strict=True)))


@pytest.mark.parametrize(
    ("before", "new", "after"),
    [
        ((), (0, 0), ((0, 0),)),
        (((0, 0),), (1, 10), ((0, 0), (1, 10))),
        (((0, 0),), (0, 10), ((0, 0),)),
        (((0, 0), (1, 10)), (1, 5), ((0, 0), (1, 5))),
        (((0, 0), (1, 10)), (2, 10), ((0, 0), (2, 10))),
        (((0, 0), (1, 10)), (2, 5), ((0, 0), (2, 5))),
        (((0, 0), (3, 10)), (2, 20), ((0, 0), (2, 20))),
        (((4, 0), (5, 10)), (3, 30), ((3, 30),)),
        (((4, 10), (5, 20)), (6, 0), ((6, 0),)),
    ],
    ids=[
        "first", "next", "same epoch again", "same epoch earlier", "epoch that wrote nothing", "later epoch earlier",
        "lower epoch", "lower than all", "below all offsets",
    ],
)  # fmt: skip
def test_an_epoch_displaces_what_contradicts_it(
    before: tuple[tuple[int, int], ...], new: tuple[int, int], after: tuple[tuple[int, int], ...]
) -> None:
    assert with_epoch(entries(*before), EpochEntry(*new)) == entries(*after)


@given(ascending(), st.integers(0, 50), st.integers(0, 50))
def test_the_columns_always_ascend(before: tuple[EpochEntry, ...], epoch: int, offset: int) -> None:
    changed = (
        with_epoch(before, EpochEntry(epoch, offset)),
        cut_from_end(before, offset),
        cut_from_start(before, offset),
    )
    for after in changed:
        assert all(a.epoch < b.epoch and a.start_offset < b.start_offset for a, b in pairwise(after))
    assert with_epoch(before, EpochEntry(epoch, offset))[-1].epoch == epoch


@given(ascending(), st.integers(0, 60), st.integers(0, 60))
def test_cutting_keeps_the_epoch_of_every_offset_that_stays(
    before: tuple[EpochEntry, ...], start: int, end: int
) -> None:
    whole = LeaderEpochs(OS_FILES, "nowhere", before)
    cut = LeaderEpochs(OS_FILES, "nowhere", cut_from_start(cut_from_end(before, end), start))
    for offset in range(start, end):
        assert epoch_for_offset(cut, offset) == epoch_for_offset(whole, offset)
    assert all(entry.start_offset >= start for entry in cut.entries)


def test_truncation_from_either_side() -> None:
    before = entries((0, 0), (1, 10), (2, 20))
    assert cut_from_end(before, 20) == entries((0, 0), (1, 10))
    assert cut_from_end(before, 21) == before
    assert cut_from_end(before, 0) == ()
    assert cut_from_start(before, 0) == before
    assert cut_from_start(before, 5) == entries((0, 5), (1, 10), (2, 20))
    assert cut_from_start(before, 10) == entries((1, 10), (2, 20))
    assert cut_from_start(before, 99) == entries((2, 99))
    assert cut_from_start(entries((3, 7)), 5) == entries((3, 7))


def test_the_epoch_of_an_offset() -> None:
    epochs = epochs_of((2, 5), (4, 10))
    found = [epoch_for_offset(epochs, offset) for offset in (0, 4, 5, 9, 10, 1000)]
    assert found == [None, None, 2, 2, 4, 4]
    assert epochs.latest == EpochEntry(4, 10)
    assert epochs_of().latest is None


def test_every_change_is_in_the_file_at_once(tmp_path: Path) -> None:
    epochs = LeaderEpochs.load(OS_FILES, str(tmp_path))
    file = tmp_path / "leader-epoch-checkpoint"
    assert not file.exists()
    assert epochs.assign(4, 0)
    assert file.read_text() == "0\n1\n4 0\n"
    assert not epochs.assign(4, 7)
    assert epochs.assign(5, 10)
    assert epochs.truncate_from_start(3)
    assert file.read_text() == "0\n2\n4 3\n5 10\n"
    assert epochs.truncate_from_end(10)
    assert LeaderEpochs.load(OS_FILES, str(tmp_path)).entries == epochs.entries == entries((4, 3))
    assert epochs.clear()
    assert file.read_text() == "0\n0\n"


def test_a_caller_may_store_once_for_many_changes(tmp_path: Path) -> None:
    epochs = LeaderEpochs.load(OS_FILES, str(tmp_path))
    epochs.assign(0, 0, store=False)
    epochs.assign(1, 5, store=False)
    assert not (tmp_path / "leader-epoch-checkpoint").exists()
    epochs.store()
    assert LeaderEpochs.load(OS_FILES, str(tmp_path)).entries == entries((0, 0), (1, 5))


@pytest.mark.parametrize(("epoch", "offset"), [(-1, 0), (0, -1), (2**31, 0), (0, 2**63)])
def test_an_impossible_epoch_is_refused(epoch: int, offset: int) -> None:
    with pytest.raises(ValueError, match="is not a leader epoch"):
        epochs_of().assign(epoch, offset)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("0\n2\n1 0\n1 5\n", 4),
        ("0\n2\n1 5\n2 5\n", 4),
        ("0\n1\n-1 5\n", 3),
        ("0\n1\n1 -5\n", 3),
        ("0\n1\n2147483648 0\n", 3),
        ("0\n1\n1 2 3\n", 3),
        ("1\n0\n", 1),
    ],
)
def test_a_checkpoint_no_log_can_have_is_refused(tmp_path: Path, text: str, line: int) -> None:
    (tmp_path / "leader-epoch-checkpoint").write_text(text)
    with pytest.raises(CorruptCheckpoint, match=f"line {line}:") as caught:
        LeaderEpochs.load(OS_FILES, str(tmp_path))
    assert caught.value.file == str(tmp_path / "leader-epoch-checkpoint")


def test_an_empty_checkpoint_has_no_epochs(tmp_path: Path) -> None:
    (tmp_path / "leader-epoch-checkpoint").write_bytes(b"")
    assert LeaderEpochs.load(OS_FILES, str(tmp_path)).entries == ()
