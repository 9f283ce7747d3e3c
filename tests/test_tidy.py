"""Keeps the house tidy: sizes of functions and calls, names and settings somebody uses, paths and walks in the docs.

`tests/test_imports.py` keeps the direction of imports.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from logstore.settings import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("logstore", "streaming", "compaction_job", "duramen")
LINES_MAX = 70
PARAMETERS_MAX = 8
FOLDERS = "|".join((*PACKAGES, "tests", "conf", "docs", "bench", "airflow_dags"))
PATH = re.compile(rf"`((?:{FOLDERS})/[\w/.*-]+)(?:::?\w+)?`")
#: made by a build, or where an installed Duramen has them
MADE_LATER = {"tests/conformance/target", "duramen/airflow_dags/", "duramen/conf/"}
#: pages that the site is built with, made from the code
GENERATED = {ROOT / "docs" / "reference" / "options.md", ROOT / "docs" / "reference" / "settings.md"}
LINK = re.compile(r"\]\((?!https?:|mailto:)([^)#\s]+)")
WALK = re.compile(r"^\d\. `([\w/]+\.py):(\w+)`", re.M)

#: called by name from elsewhere: by Spark, the standard library, or setuptools
CALLED_FROM_OUTSIDE = {
    "do_HEAD",
    "do_POST",
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
#: of the store in a bucket, which nothing above reaches yet
NOT_REACHED_YET: set[str] = set()
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


def test_functions_are_short() -> None:
    sizes = ((f"{file}:{name}", (node.end_lineno or 0) - node.lineno + 1) for file, name, node in functions())
    assert not largest(sizes, LINES_MAX)


def test_calls_have_few_parameters() -> None:
    def count(node: ast.FunctionDef) -> int:
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        return len(given) - (bool(given) and given[0].arg in ("self", "cls"))

    # Those of a command are its options, those of an answer of the console what a request may ask.
    asked = ("duramen/commands/", "duramen/console/")
    sizes = ((f"{file}:{name}", count(node)) for file, name, node in functions() if not file.startswith(asked))
    assert not largest(sizes, PARAMETERS_MAX)


def subjects(room: Path) -> set[str]:
    """What a test file of `room` may be about: the room, a module of it, or one of a folder in it."""
    modules = {"_".join(path.relative_to(room).with_suffix("").parts) for path in room.rglob("*.py")}
    folders = {"_".join(path.relative_to(room).parts) for path in room.rglob("*") if path.is_dir()}
    return {room.name} | modules | folders | {name.removesuffix("___init__") for name in modules}


#: tests of what tests compare with, beside the tests that use it
OF_THE_REFERENCE = {"delivery"}


@pytest.mark.parametrize("package", ["logstore", "compaction_job"])
def test_tests_mirror_the_tree_by_name(package: str) -> None:
    """`logstore/room/subject.py` is tested in `tests/logstore/room/test_subject*.py`."""
    astray = []
    for file in sorted((ROOT / "tests" / package).rglob("test_*.py")):
        room = ROOT / file.parent.relative_to(ROOT / "tests")
        about = file.stem.removeprefix("test_")
        named = {about[:end] for end in range(len(about) + 1) if about[end : end + 1] in ("", "_")}
        if not named & (subjects(room) | OF_THE_REFERENCE):
            astray.append(str(file.relative_to(ROOT)))
    assert not astray


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
    assert unused - CALLED_FROM_OUTSIDE == NOT_REACHED_YET


def test_every_setting_is_read_or_says_why_it_does_nothing() -> None:
    tables = ("logstore/config.py", "logstore/settings.py")
    texts = [(ROOT / file).read_text() for file in modules() if file not in tables]
    together = "\n".join(texts)
    dead = {
        setting.name
        for setting in SETTINGS
        if not re.search(rf"\b{setting.attribute}\b", together) and f'"{setting.name}"' not in together
    }
    assert dead <= {setting.name for setting in SETTINGS if setting.no_effect}


def pages() -> list[Path]:
    return [*sorted((ROOT / "docs").rglob("*.md")), *sorted(ROOT.glob("*.md"))]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_and_links_of_a_page_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    missing = [path for path in {*PATH.findall(text)} - MADE_LATER if not list(ROOT.glob(path.rstrip("/")))]
    for link in LINK.findall(text):
        target = (page.parent / link).resolve()
        missing += [] if target.exists() or target in GENERATED else [link]
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
