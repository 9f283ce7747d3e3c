"""Keeps the house tidy: sizes of functions and calls, names and settings somebody uses, paths and walks in the docs.

Where something is still larger than it should be, it is listed with its size: an entry may shrink, or go, and no new
one comes. `tests/test_imports.py` keeps the direction of imports.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from logstore.config import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("logstore", "streaming", "compaction_job", "duramen")
LINES_MAX = 70
PARAMETERS_MAX = 8
FOLDERS = "|".join((*PACKAGES, "tests", "conf", "docs", "bench", "airflow_dags"))
PATH = re.compile(rf"`((?:{FOLDERS})/[\w/.*-]+)(?:::?\w+)?`")
#: made by a build, or where an installed Duramen has them
MADE_LATER = {"tests/conformance/target", "duramen/airflow_dags/", "duramen/conf/"}
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)")
WALK = re.compile(r"^\d\. `([\w/]+\.py):(\w+)`", re.M)

TOO_LONG = {
    "compaction_job/job.py:compact": 96,
    "logstore/upkeep/maintenance.py:recover": 85,
    "logstore/cleaner/cleaner.py:run_pass": 74,
    "logstore/partition/reading.py:read_chunks": 72,
    "logstore/compaction/planning.py:plan_partition": 72,
}
TOO_MANY_PARAMETERS = {
    "logstore/cleaner/cleaner.py:clean_partition": 15,
    "compaction_job/job.py:compact": 15,
    "logstore/segment/segment.py:place": 12,
    "logstore/cleaner/cleaner.py:plan_pass": 12,
    "logstore/partition/appender.py:__init__": 11,
    "logstore/compaction/planning.py:plan_partition": 11,
    "logstore/cleaner/dedupe_map.py:judge": 11,
    "logstore/segment/segment.py:__init__": 10,
    "logstore/partition/reader.py:__init__": 10,
    "logstore/partition/latest.py:latest_records": 10,
    "logstore/cleaner/rewrite.py:__init__": 10,
    "logstore/upkeep/verify.py:_verify_segment": 9,
    "logstore/partition/latest.py:_fill": 9,
    "logstore/partition/latest.py:_deliver": 9,
    "logstore/directory/swap.py:swap_in": 9,
    "logstore/compaction/planning.py:_work": 9,
}
#: called by name from elsewhere: by Spark, the standard library, or setuptools
CALLED_FROM_OUTSIDE = {
    "verify_request",
    "handle_error",
    "log_message",
    "writelines",
    "getDefaultReadLimit",
    "reportLatestOffset",
    "prepareForTriggerAvailableNow",
    "streamReader",
    "streamWriter",
    "pushFilters",
    "initialOffset",
}
#: what only tests use by now
UNUSED = {
    "clean_partition",
    "read_clean_shutdown",
    "epoch_for_offset",
    "last_state",
    "first_undecided_offset",
    "remove_expired",
    "delete_snapshots_before",
    "mark_snapshot_deleted",
    "columns_from_arrow",
    "encode_empty_batch",
    "peek_legacy",
    "first_beyond",
    "change_suffix",
    "C_SLOTS",
    "removed_bytes",
    "removed_records",
}
#: accepted, because a broker's settings file has them, and without effect so far
WITHOUT_EFFECT = {
    "flush.messages",
    "log.cleaner.io.buffer.size",
    "log.flush.offset.checkpoint.interval.ms",
    "log.flush.start.offset.checkpoint.interval.ms",
    "replica.high.watermark.checkpoint.interval.ms",
    "num.recovery.threads.per.data.dir",
}
WALKS = {"A micro-batch": 6, "A Spark pass": 7, "`restore_state`": 4, "A reader": 4}


@cache
def modules() -> dict[str, ast.Module]:
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in files}


def functions() -> Iterator[tuple[str, str, ast.FunctionDef]]:
    for file, tree in modules().items():
        if "/kernels/" not in file:
            yield from ((file, node.name, node) for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def largest(sizes: Iterator[tuple[str, int]], most: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for name, size in sizes:
        if size > most:
            found[name] = max(size, found.get(name, 0))
    return found


def check_shrinking(found: dict[str, int], known: dict[str, int]) -> None:
    grown = {name: size for name, size in found.items() if size > known.get(name, 0)}
    assert not grown, f"too large: {grown}"
    better = {name for name in known if found.get(name, 0) < known[name]}
    assert not better, f"smaller by now; adjust the list: { {name: found.get(name) for name in better} }"


def test_functions_are_short() -> None:
    sizes = ((f"{file}:{name}", (node.end_lineno or 0) - node.lineno + 1) for file, name, node in functions())
    check_shrinking(largest(sizes, LINES_MAX), TOO_LONG)


def test_calls_have_few_parameters() -> None:
    def count(node: ast.FunctionDef) -> int:
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return len(given) - (bool(given) and given[0].arg in ("self", "cls"))

    # Those of a command are its options.
    sizes = (
        (f"{file}:{name}", count(node)) for file, name, node in functions() if not file.startswith("duramen/commands/")
    )
    check_shrinking(largest(sizes, PARAMETERS_MAX), TOO_MANY_PARAMETERS)


@cache
def words() -> Counter[str]:
    texts = [(ROOT / file).read_text() for file in modules()] + [(ROOT / "setup.py").read_text()]
    return Counter(word for text in texts for word in re.findall(r"\b[A-Za-z_]\w*\b", text))


def public_names() -> Iterator[str]:
    for tree in modules().values():
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and not node.decorator_list:
                yield node.name
            elif isinstance(node, ast.Assign):
                yield from (target.id for target in node.targets if isinstance(target, ast.Name))
            elif isinstance(node, ast.ClassDef):
                yield node.name
                yield from (each.name for each in node.body if isinstance(each, ast.FunctionDef))


def test_every_name_is_used() -> None:
    unused = {name for name in public_names() if words()[name] == 1 and not name.startswith("__")}
    assert unused - CALLED_FROM_OUTSIDE == UNUSED


def test_every_setting_is_read() -> None:
    texts = [(ROOT / file).read_text() for file in modules() if file != "logstore/config.py"]
    together = "\n".join(texts)
    dead = {
        setting.name
        for setting in SETTINGS
        if not re.search(rf"\b{setting.attribute}\b", together) and f'"{setting.name}"' not in together
    }
    assert dead == WITHOUT_EFFECT


def pages() -> list[Path]:
    return [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    missing = [path for path in {*PATH.findall(text)} - MADE_LATER if not list(ROOT.glob(path.rstrip("/")))]
    missing += [link for link in LINK.findall(text) if not (page.parent / link).exists()]
    assert not missing


def test_five_questions_have_an_answer_each_in_a_file_that_can_be_read() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    table = text[text.index("| where is") : text.index("## The way of the data")]
    files = re.findall(r"\| `([\w/]+\.py)` \|", table)
    assert len(files) == 5
    sizes = {file: len((ROOT / file).read_text().splitlines()) for file in files}
    assert max(sizes.values()) < 400, sizes


@pytest.mark.parametrize(("title", "most"), WALKS.items())
def test_a_walk_is_short_and_goes_through_functions_that_are_there(title: str, most: int) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    start = text.index(f"**{title}")
    end = text.find("\n**", start + 2)
    steps = WALK.findall(text[start : end if end > 0 else text.index("## How a record travels")])
    assert 0 < len(steps) <= most
    names = {(file, name) for file, name, _ in functions()}
    assert [step for step in steps if step not in names] == []
