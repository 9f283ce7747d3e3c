"""`from duramen import …` is all a user needs, and all that the pages use."""

from __future__ import annotations

import ast
import contextlib
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import duramen
from duramen import LogStore, Record, compact, errors, explain, plan

ROOT = Path(__file__).resolve().parents[2]
OF_SPARK = ("LogSink", "RestoredState", "SinkOptions", "restore_into_delta", "restore_state")
#: what nobody makes by hand
PRODUCED_BY = {"RestoredState": "restore_state"}
INNER = re.compile(r"^\s*(?:from|import)\s+(?:logstore|streaming|compaction_job)\b", re.MULTILINE)


@pytest.mark.parametrize("name", duramen.__all__)
def test_every_name_is_there(name: str) -> None:
    if name in OF_SPARK:
        pytest.importorskip("pyspark")
    assert getattr(duramen, name) is not None
    assert name in dir(duramen)


def code_in(doc: str) -> list[ast.Module]:
    """The paragraphs that are Python; prose never is, by accident."""
    found = []
    for paragraph in doc.split("\n\n"):
        with contextlib.suppress(SyntaxError):
            found.append(ast.parse(textwrap.dedent(paragraph)))
    return found


@pytest.mark.parametrize("name", [name for name in duramen.__all__ if name != "__version__"])
def test_every_name_has_a_docstring_with_an_example_that_uses_it(name: str) -> None:
    if name in OF_SPARK:
        pytest.importorskip("pyspark")
    doc = inspect.getdoc(getattr(duramen, name))
    assert doc
    assert len(doc.splitlines()[0]) > 10
    used = {node.id for code in code_in(doc) for node in ast.walk(code) if isinstance(node, ast.Name)}
    assert name in used or PRODUCED_BY.get(name) in used, f"{name}: no example\n{doc}"


def test_a_sink_takes_few_arguments_and_all_but_the_first_two_by_keyword() -> None:
    pytest.importorskip("pyspark")
    given = inspect.signature(duramen.LogSink).parameters.values()
    assert len(given) <= 8
    by_position = [each.name for each in given if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    assert by_position == ["store", "topic"]


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
