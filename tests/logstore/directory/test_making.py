"""Making a store: a half-made one is made again, a directory with other things is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from logstore.directory.history import MINUTES, Sample, read_samples, write_sample
from logstore.directory.layout import TOP_NAMES, Layout
from logstore.directory.making import make_store
from logstore.directory.version import read_version
from logstore.errors import NotAStore
from logstore.files import OS_FILES


def test_all_that_lies_at_the_top_of_a_store_is_known() -> None:
    layout = Layout("/store")
    values = [getattr(layout, name) for name in dir(Layout) if isinstance(getattr(Layout, name), property)]
    paths = [value for value in [*values, layout.history(None)] if isinstance(value, str)]
    assert len(paths) > 8
    assert {os.path.basename(path) for path in paths} - TOP_NAMES == set()


def test_a_store_that_was_made_half_is_made_again(tmp_path: Path) -> None:
    layout = Layout(str(tmp_path / "store"))
    make_store(OS_FILES, layout)
    write_sample(OS_FILES, layout.history(None), "store", Sample(0, 1, 1, 1, 0))
    os.unlink(layout.version)
    make_store(OS_FILES, layout)
    read_version(OS_FILES, layout.version)
    assert len(read_samples(OS_FILES, layout.history(None), "store", MINUTES, now_ms=0)) == 1


def test_a_directory_with_other_things_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(NotAStore, match=r"other things \(letter\.txt\)"):
        make_store(OS_FILES, Layout(str(tmp_path)))
    assert os.listdir(tmp_path) == ["letter.txt"]
