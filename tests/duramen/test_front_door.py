"""`from duramen import …` is all a user needs, and all that the pages use."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import duramen
from duramen import LogStore, Record, compact, errors, explain, plan

ROOT = Path(__file__).resolve().parents[2]
INNER = re.compile(r"^\s*(?:from|import)\s+(?:logstore|streaming|compaction_job)\b", re.MULTILINE)


@pytest.mark.parametrize("name", duramen.__all__)
def test_every_name_is_there(name: str) -> None:
    if name in ("LogSink", "RestoredState", "SinkOptions", "restore_into_delta", "restore_state"):
        pytest.importorskip("pyspark")
    assert getattr(duramen, name) is not None
    assert name in dir(duramen)


def test_a_name_that_is_not_there() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        duramen.nothing  # noqa: B018


def test_the_door_itself_loads_nothing() -> None:
    loaded = (
        "import sys, duramen; print([each for each in sys.modules if each.split('.')[0] in {'logstore', 'pyarrow'}])"
    )
    found = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True, cwd=ROOT)
    assert found.stdout.strip() == "[]"


def test_write_read_compact_and_restore_with_these_names_alone(tmp_path: Path) -> None:
    with LogStore(tmp_path / "store", create=True) as store:
        store.create_topic("orders", partitions=1, configs={"cleanup.policy": "compact"})
        store.append("orders", [Record(b"one", b"ordered"), Record(b"two", b"ordered"), Record(b"one", b"paid")])
        assert [record.value for record in store.reader("orders", 0).records(0)] == [b"ordered", b"ordered", b"paid"]
        (before,) = store.restore("orders", as_of_offsets={0: 2})
        assert before.column("value").to_pylist() == [b"ordered", b"ordered"]
        assert [each.name for each in explain(store)] == [found.name for found, _ in plan(store)] == ["orders-0"]
        assert not compact(store, roll_active=True).failed
        assert [record.value for record in store.reader("orders", 0).records(0)] == [b"ordered", b"paid"]
        (now,) = store.restore("orders")
        assert dict(zip(now.column("key").to_pylist(), now.column("value").to_pylist(), strict=True)) == {
            b"one": b"paid",
            b"two": b"ordered",
        }
        with pytest.raises(errors.UnknownTopic):
            store.reader("nobody", 0)


@pytest.mark.parametrize(
    "page", sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "docs/examples").glob("*")])
)
def test_no_page_imports_from_behind_it(page: Path) -> None:
    if page.is_file():
        assert not INNER.findall(page.read_text(encoding="utf-8")), page.name
