"""Keeps the layers: imports point down only, the engine knows no Spark, DAG files import none of ours when parsed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

#: The layers from the ground up. A module may import from its own layer and from those below it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("logstore",),  # the package itself and the modules directly in it: errors, limits, clock, files, topic, ...
    ("logstore.objects",),  # object storage, and what a store needs of it
    ("logstore.records",),
    ("logstore.segment",),
    ("logstore.directory",),  # what only a POSIX directory needs: small files, locks, tails, swaps
    ("logstore.partition",),
    ("logstore.cleaner",),
    ("logstore.ledger",),
    ("logstore.topics",),
    ("logstore.commit", "logstore.restore"),
    ("logstore.compaction",),  # planning and receipts, of both kinds; passes in a directory
    ("logstore.bucket",),  # what only a bucket needs: manifests, and what is decided by them
    ("logstore.transfer",),
    ("logstore.upkeep",),
    ("logstore.store",),
    ("streaming", "compaction_job"),  # side by side: neither imports the other
    ("pyspark_duramen",),
    ("duramen",),
)
RANK = {layer: rank for rank, layers in enumerate(LAYERS) for layer in layers}
OURS = {layer.split(".")[0] for layer in RANK}
SPARK = {"pyspark", "py4j", "delta"}


def layer_of(module: str) -> str:
    """The layer a module belongs to. A package inside the engine that no layer names is not known."""
    parts = module.split(".")
    if parts[0] != "logstore":
        return parts[0]
    inner = ".".join(parts[:2])
    if inner in RANK:
        return inner
    if len(parts) > 2:
        raise LookupError(f"{inner} is a package in no layer: give it a place in LAYERS")
    return "logstore"


def imports(tree: ast.AST, module: str, *, is_package: bool) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that `tree` imports, wherever: also inside functions and by import_module()."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = module.split(".")
                keep = len(parents) - node.level + (1 if is_package else 0)
                base = ".".join([*parents[:keep], *([node.module] if node.module else [])])
            # `from logstore import records` names a layer only together with what it imports.
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and node.args:
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0]
            if (
                function in ("import_module", "__import__")
                and isinstance(name, ast.Constant)
                and isinstance(name.value, str)
            ):
                yield node.lineno, name.value


def at_module_level(tree: ast.Module) -> ast.Module:
    """`tree` without the bodies of its functions: what runs when the file is merely imported."""

    class Emptied(ast.NodeTransformer):
        def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
            return ast.Pass()

        def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> ast.AST:
            return ast.Pass()

    return ast.fix_missing_locations(Emptied().visit(tree))


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def known_module(name: str) -> str:
    """`name` cut down to what is a module or package on disk: the tail of a from-import may be a class or function."""
    parts = name.split(".")
    while len(parts) > 1:
        path = ROOT.joinpath(*parts)
        if path.with_suffix(".py").exists() or path.is_dir():
            break
        parts.pop()
    return ".".join(parts)


def violations(source: str, module: str, *, is_package: bool = False) -> list[str]:
    """What `source`, as the text of `module`, imports against the direction."""
    own = layer_of(module)
    found = []
    for line, name in imports(ast.parse(source), module, is_package=is_package):
        top = name.split(".")[0]
        if top in SPARK and own.startswith("logstore"):
            found.append(f"{module}:{line} imports {name}, and the engine knows no Spark")
        if top in OURS:
            other = layer_of(known_module(name))
            if other != own and RANK[other] >= RANK[own]:
                found.append(f"{module}:{line} imports {name}: {other} is not below {own}")
    return found


def dag_violations(source: str) -> list[str]:
    tree = at_module_level(ast.parse(source))
    return [
        f"line {line} imports {name}"
        for line, name in imports(tree, "airflow_dags", is_package=False)
        if name.split(".")[0] in OURS
    ]


def our_files() -> list[Path]:
    packages = [ROOT / name for name in sorted(OURS) if (ROOT / name).is_dir()]
    return sorted([*(path for package in packages for path in package.rglob("*.py")), *ROOT.glob("pyspark_*.py")])


def test_imports_point_down_only() -> None:
    files = our_files()
    assert files
    found = [
        violation
        for path in files
        for violation in violations(path.read_text(), module_name(path), is_package=path.name == "__init__.py")
    ]
    assert not found, "\n".join(found)


def test_dag_files_import_nothing_of_ours_when_parsed() -> None:
    found = [
        f"{path.name}: {violation}"
        for path in (ROOT / "airflow_dags").rglob("*.py")
        for violation in dag_violations(path.read_text())
    ]
    assert not found, "\n".join(found)


def test_every_folder_of_a_package_is_a_package() -> None:
    """One without `__init__.py` imports from a clone, but is left out of an installed Duramen."""
    bare = {path.parent for path in our_files() if path.parent != ROOT and not (path.parent / "__init__.py").exists()}
    assert not bare


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("logstore.records.batch", "import logstore.segment"),
        ("logstore.records.batch", "from logstore import segment"),
        ("logstore.records.batch", "from ..segment import index"),
        ("logstore.records.batch", "def later():\n    from logstore.segment.index import OffsetIndex"),
        ("logstore.records.batch", "import importlib\nimportlib.import_module('logstore.store')"),
        (
            "logstore.segment.index",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import logstore.partition",
        ),
        ("logstore.errors", "from logstore.records import record"),
        ("logstore.ledger.commits", "import logstore.store"),
        ("logstore.topics.registry", "import duramen.cli"),
        ("logstore.topics.registry", "from pyspark.sql import SparkSession"),
        ("logstore.ledger.commits", "from delta.tables import DeltaTable"),
        ("streaming.sink", "import compaction_job"),
        ("compaction_job.plan", "from duramen import cli"),
    ],
)
def test_an_import_against_the_direction_is_found(module: str, source: str) -> None:
    assert violations(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("logstore.errors", "import logstore.limits"),
        ("logstore.records.batch", "from logstore.errors import CorruptBatch"),
        ("logstore.records.batch", "from .record import Record"),
        ("logstore.topics.registry", "from logstore.ledger import commits\nimport deltalake"),
        ("streaming.sink", "import pyspark\nfrom logstore.store import LogStore"),
        ("duramen.cli", "import streaming, compaction_job, logstore.records"),
    ],
)
def test_an_import_along_the_direction_is_fine(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_a_relative_import_in_a_package_starts_from_the_package_itself() -> None:
    assert violations("from .record import Record", "logstore.records", is_package=True) == []
    assert violations("from ..segment import index", "logstore.records", is_package=True)


def test_an_engine_package_outside_the_layers_is_refused() -> None:
    with pytest.raises(LookupError, match=r"logstore\.misc"):
        violations("", "logstore.misc.thing")


def test_a_dag_may_import_ours_inside_its_tasks_only() -> None:
    assert dag_violations("import airflow\ndef task():\n    import compaction_job") == []
    assert dag_violations("try:\n    import compaction_job\nexcept ImportError:\n    pass")
