"""Every snippet of README and docs, run from the page itself, in order, in one folder a page.

Python snippets of a page share one namespace and one Spark session. `/data` is that folder, and `…` in a chain of calls
stands for what the page has said before; both are filled in here. A block that is neither run nor named in `NOT_RUN` or
`SYNOPSES` fails the test: whoever adds one decides.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from logstore.records.record import Record
from logstore.store import LogStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("README.md", *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")))
_BLOCK = re.compile(r"^```([a-z]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)

#: blocks that cannot run on a test machine, by page and first words, and why
NOT_RUN = {
    ("README.md", "make demo"): "builds the whole environment; `make test` is what runs this test",
    ("docs/architecture.md", " rows of a micro-batch"): "a drawing of the data's way",
    ("docs/install.md", "make wheel"): "the suite `package` builds the wheel and installs it",
    ("docs/operations.md", "pip install 'duramen[schedule]'"): "installs from an index; the suite `package` does it",
    ("docs/operations.md", "[Service]"): "a unit of systemd",
    ("docs/airflow.md", "plan_shares ->"): "a drawing of the DAG",
    ("docs/airflow.md", "@dag(schedule="): "two ways to write one line; the suite `airflow` runs DAGs by assets",
    ("docs/cli.md", '{"error"'): "an answer, not a command",
    ("docs/cli.md", '{"partition"'): "an answer, not a command",
}
#: the reference of the command: forms with placeholders. Their commands and options are held to `--help`.
SYNOPSES = {"docs/cli.md"}


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def not_run(self) -> str | None:
        found = [why for (page, first), why in NOT_RUN.items() if page == self.page and self.text.startswith(first)]
        return found[0] if found else None

    @property
    def is_synopsis(self) -> bool:
        return self.page in SYNOPSES and self.language == "" and self.text.startswith("duramen ")

    @property
    def is_shell(self) -> bool:
        commands = ("duramen ", "export ", "printf ")
        return self.language in ("bash", "sh") or (self.language == "" and self.text.startswith(commands))


def blocks(page: str) -> list[Block]:
    text = (ROOT / page).read_text()
    return [Block(page, text[: each.start()].count("\n") + 1, each[1], each[2]) for each in _BLOCK.finditer(text)]


ALL = [block for page in PAGES for block in blocks(page)]


@pytest.mark.parametrize("block", ALL, ids=[block.name for block in ALL])
def test_every_block_is_run_or_named_with_its_reason(block: Block) -> None:
    ways = [block.language in ("python", "sql") or block.is_shell or block.is_synopsis, block.not_run is not None]
    assert any(ways), f"{block.name} begins with {block.text[:40]!r}: let it run, or name it in NOT_RUN with the reason"


def test_no_block_is_named_that_is_not_there() -> None:
    for page, first in NOT_RUN:
        assert any(block.text.startswith(first) for block in blocks(page)), (page, first)


SYNOPSIS = [block for block in ALL if block.is_synopsis]


@pytest.mark.parametrize("block", SYNOPSIS, ids=[block.name for block in SYNOPSIS])
def test_a_form_in_the_reference_names_options_that_exist(block: Block) -> None:
    from typer.main import get_command

    from duramen.cli import app

    joined = re.sub(r"\n +", " ", block.text)
    for line in joined.splitlines():
        command: Any = get_command(app)
        for word in line.split()[1:]:
            if not hasattr(command, "commands") or word not in command.commands:
                break
            command = command.commands[word]
        known = {option for each in command.params for option in each.opts}
        assert set(re.findall(r"--[a-z][a-z-]*", line)) <= known, line


# --- shell -----------------------------------------------------------------------------------------------------------


def prepared_shell(page: str, folder: Path) -> None:
    """What a page's commands take for granted."""
    if page == "README.md":
        with LogStore(folder / "source", create=True) as store:
            store.create_topic("imported")
            store.append("imported", [Record(b"k", b"v")])
        run_shell("duramen --store ./source export ./kafka-logs && rm -r ./source", folder)


def run_shell(text: str, folder: Path) -> None:
    bin_folder = folder / "bin"
    bin_folder.mkdir(exist_ok=True)
    command = bin_folder / "duramen"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m duramen "$@"\n')
    command.chmod(0o755)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text.replace("/data", str(folder / "data"))],
        cwd=folder,
        env=os.environ | {"PATH": f"{bin_folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, f"{text}\n{done.stdout}\n{done.stderr}"


SHELL_PAGES = sorted({block.page for block in ALL if block.is_shell and not block.is_synopsis and not block.not_run})


@pytest.mark.parametrize("page", SHELL_PAGES)
def test_the_commands_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    prepared_shell(page, tmp_path)
    for block in blocks(page):
        if block.is_shell and not block.is_synopsis and not block.not_run:
            run_shell(block.text, tmp_path)


# --- Python and SQL --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    from delta import configure_spark_with_delta_pip
    from pyspark.sql import SparkSession

    os.environ["PYSPARK_PYTHON"] = sys.executable
    builder = (
        SparkSession.builder.master("local[2]")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.sql.warehouse.dir", str(tmp_path_factory.mktemp("warehouse")))
        .config("spark.databricks.delta.snapshotPartitions", "1")
        .config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
        .config("spark.sql.catalog.spark_catalog", "org.apache.spark.sql.delta.catalog.DeltaCatalog")
    )
    session = configure_spark_with_delta_pip(builder).getOrCreate()
    session.sparkContext.setLogLevel("ERROR")
    yield session
    session.stop()


def make_store(path: Path) -> None:
    with LogStore(path, create=True) as store:
        for name in ("orders", "accounts"):
            store.create_topic(name, configs={"cleanup.policy": "compact"})
            store.append(name, [Record(b"a", b"1"), Record(b"b", b"2")])


def stream_of_changes(spark: SparkSession, folder: Path) -> DataFrame:
    """A stream that has a few rows, and ends with them."""
    source = folder / "changes"
    if not source.exists():
        spark.range(5).selectExpr("cast(id AS string) AS key", "'v' AS value").write.json(str(source))
    return spark.readStream.schema("key string, value string").json(str(source))


#: `…` of a page, by the text before it
ELIDED: dict[str, tuple[tuple[str, str], ...]] = {
    "docs/spark.md": (
        (
            ".foreachBatch(sink)….start()",
            '.foreachBatch(sink).option("checkpointLocation", CHECKPOINT).trigger(availableNow=True).start()\n'
            "query.awaitTermination()",
        ),
        (
            '.option("store", "/data/store")….load()',
            '.option("store", "/data/store").option("subscribe", "orders").load()',
        ),
        (
            'readStream.format("duramen")….option(',
            'readStream.format("duramen").option("store", "/data/store").option(',
        ),
    ),
}


def runnable(block: Block, folder: Path) -> str:
    text = block.text
    for elided, full in ELIDED.get(block.page, ()):
        text = text.replace(elided, full)
    code = [line.partition("#")[0] for line in text.splitlines()]
    assert not any("…" in line for line in code), f"{block.name}: say in ELIDED what … stands for"
    return text.replace("/data", str(folder))


def settle(spark: SparkSession) -> None:
    """Let the page's streams do their work, then end them, so that the next snippet can use their names."""
    for query in spark.streams.active:
        deadline = time.monotonic() + 240
        while query.isActive and not query.lastProgress and time.monotonic() < deadline:
            time.sleep(0.1)
        assert query.exception() is None
        assert query.lastProgress, "the stream made no batch"
        query.stop()


def run_python(block: Block, namespace: dict[str, Any], folder: Path) -> None:
    exec(compile(runnable(block, folder), block.name, "exec"), namespace)


def run_sql(block: Block, spark: SparkSession, folder: Path) -> None:
    session = spark.newSession()
    session.conf.unset("spark.sql.catalog.spark_catalog")  # Delta's, which takes no table of a source in Python
    for statement in runnable(block, folder).split(";"):
        text = re.sub(r"--.*", "", statement).strip()
        if text:
            session.sql(text).collect()


def prepare(block: Block, namespace: dict[str, Any], folder: Path, spark: SparkSession) -> None:
    """What a block takes for granted: `changes`, `spark`, a store with records."""
    store = folder / "store"
    creates = "create=True" in block.text
    if creates:  # it begins with a store of its own
        subprocess.run(["rm", "-rf", store], check=True)
    elif not store.exists():
        make_store(store)
    if "checkpointLocation" in block.text or "observed(" in block.text:
        # Each snippet is a first run: the page shows ways to do the same.
        subprocess.run(["rm", "-rf", store, folder / "checkpoints"], check=True)
        make_store(store)
    namespace["changes"] = stream_of_changes(spark, folder)
    namespace["CHECKPOINT"] = str(folder / "checkpoints" / str(block.line))
    namespace["spark"] = spark


PYTHON_PAGES = sorted({block.page for block in ALL if block.language in ("python", "sql") and not block.not_run})
#: pages that show ways to do the same: each block has a folder and a store of its own
APART = {"docs/spark.md"}


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_the_code_of_a_page_runs_in_order(page: str, spark: SparkSession, tmp_path: Path) -> None:
    namespace: dict[str, Any] = {"__name__": "page"}
    for block in blocks(page):
        if block.not_run or block.language not in ("python", "sql"):
            continue
        folder = tmp_path / str(block.line) if page in APART else tmp_path
        folder.mkdir(exist_ok=True)
        prepare(block, namespace, folder, spark)
        if block.language == "sql":
            run_sql(block, spark, folder)
        else:
            run_python(block, namespace, folder)
        settle(spark)
