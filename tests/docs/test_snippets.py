"""Every snippet of README and docs, run from the page itself, in order, in one folder a page.

| language | what is done with it |
|---|---|
| python | run, in one namespace a page, with one Spark session for all; a title makes it a file in the page's folder |
| bash | run, in one shell a page |
| sql | run, in a session of its own |
| text | what the block before prints, as far as it is shown; `…` stands for anything |
| json, toml, yaml, ini | parsed |

`/data` is a folder of the page, and `…` in a chain of calls stands for what the page has said before; both are filled
in here. A block that is none of this and not named in `NOT_RUN` or `SYNOPSES` fails the test: whoever adds one decides.
"""

from __future__ import annotations

import configparser
import contextlib
import io
import json
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from delta_session import delta_session
from docs.page import ROOT, Block, Shell, blocks, check_output
from logstore.records.record import Record
from logstore.store import LogStore

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

PAGES = ("README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")))
PARSED = ("json", "toml", "ini")

#: blocks that cannot run on a test machine, by page and first words, and why
NOT_RUN = {
    ("README.md", "make demo"): "builds the whole environment; `make test` is what runs this test",
    ("README.md", "make wheel"): "the suite `package` builds the wheel and installs it",
    ("docs/install.md", "make wheel"): "the suite `package` builds the wheel and installs it",
    ("docs/operations.md", "pip install 'duramen[schedule]'"): "installs from an index; the suite `package` does it",
    ("docs/airflow.md", "plan_shares ->"): "a drawing of the DAG",
    ("docs/airflow.md", "@dag(schedule="): "two ways to write one line; the suite `airflow` runs DAGs by assets",
    ("docs/howto/bucket-policies.md", "export AWS_REGION"): "needs a cluster; tests/cluster/test_bucket.py has one",
    ("docs/howto/bucket-policies.md", "spark-submit --master spark"): "the same",
    ("docs/howto/bucket-policies.md", "spark-submit --master k8s"): "needs a cluster; the page says so",
    ("docs/howto/bucket-policies.md", "spark-submit --master yarn"): "needs a cluster; the page says so",
    ("docs/howto/bucket-policies.md", "databricks jobs submit"): "needs an account; the page says so",
    ("docs/console.md", "duramen --store /data/store console"): "serves until it is stopped; tests/console runs it",
    ("docs/console.md", "curl http://"): "needs a console that runs; tests/console asks for the same",
    ("docs/console.md", "curl -H"): "needs a console that runs; tests/console does the same",
}
#: the reference of the command: forms with placeholders. Their commands and options are held to `--help`.
SYNOPSES = {"docs/cli.md"}
#: typed from the built page instead, by test_site.py
TYPED = {"docs/tutorial.md"}
#: pages that take a store with records, and a stream of changes, for granted
GIVEN = {"docs/spark.md", "docs/operations.md", "docs/errors.md"}
#: pages that show ways to do the same: each block has a folder and a store of its own
APART = {"docs/spark.md"}


def not_run(block: Block) -> bool:
    return any(page == block.page and block.text.startswith(first) for page, first in NOT_RUN)


def is_synopsis(block: Block) -> bool:
    return block.page in SYNOPSES and block.language == "" and block.text.startswith("duramen ")


ALL = [block for page in PAGES for block in blocks(page)]


@pytest.mark.parametrize("block", ALL, ids=[block.name for block in ALL])
def test_every_block_is_run_or_named_with_its_reason(block: Block) -> None:
    runs = block.language in ("python", "sql", "bash", "text", "yaml", *PARSED)
    ways = [runs, is_synopsis(block), not_run(block)]
    assert any(ways), f"{block.name} begins with {block.text[:40]!r}: let it run, or name it in NOT_RUN with the reason"


def test_no_block_is_named_that_is_not_there() -> None:
    for page, first in NOT_RUN:
        assert any(block.text.startswith(first) for block in blocks(page)), (page, first)


SYNOPSIS = [block for block in ALL if is_synopsis(block)]


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
        known = {option for each in command.params for option in (*each.opts, *each.secondary_opts)}
        assert set(re.findall(r"--[a-z][a-z-]*", line)) <= known, line


# --- what a page takes for granted -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    with delta_session(tmp_path_factory.mktemp("warehouse")) as session:
        yield session


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


def give(block: Block, namespace: dict[str, Any], folder: Path, spark: SparkSession) -> None:
    """`changes`, and a store with records."""
    store = folder / "store"
    if not store.exists():
        make_store(store)
    if "checkpointLocation" in block.text or "observed(" in block.text:
        # Each snippet is a first run: the page shows ways to do the same.
        subprocess.run(["rm", "-rf", store, folder / "checkpoints"], check=True)
        make_store(store)
    namespace["changes"] = stream_of_changes(spark, folder)
    namespace["CHECKPOINT"] = str(folder / "checkpoints" / str(block.line))


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


# --- running ---------------------------------------------------------------------------------------------------------


def settle(spark: SparkSession) -> None:
    """Let the page's streams do some work, then end them, so that the next snippet can use their names."""
    for query in spark.streams.active:
        deadline = time.monotonic() + 120
        while query.isActive and time.monotonic() < deadline:
            if any(progress["numInputRows"] for progress in query.recentProgress):
                break
            time.sleep(0.1)
        assert query.exception() is None
        assert query.lastProgress, "the stream made no batch"
        query.stop()


def run_python(block: Block, namespace: dict[str, Any], folder: Path) -> str:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        exec(compile(runnable(block, folder), block.name, "exec"), namespace)
    return out.getvalue()


def run_sql(block: Block, spark: SparkSession, folder: Path) -> None:
    session = spark.newSession()
    session.conf.unset("spark.sql.catalog.spark_catalog")  # Delta's, which takes no table of a source in Python
    for statement in runnable(block, folder).split(";"):
        text = re.sub(r"--.*", "", statement).strip()
        if text:
            session.sql(text).collect()


def parse(block: Block, folder: Path) -> None:
    """Raises what the parser raises."""
    if block.language == "json":
        json.loads(block.text)
    elif block.language == "ini":
        configparser.RawConfigParser(strict=False).read_string(block.text)
    else:  # toml: the store's own file; test_site.py parses yaml, in the environment of the site
        (folder / "store").mkdir(exist_ok=True)
        (folder / "store" / "duramen.toml").write_text(block.text)
        with LogStore(folder / "store", create=True) as store:
            assert store.broker_settings


RUN = [
    block
    for block in ALL
    if block.page not in TYPED and block.language != "yaml" and not not_run(block) and not is_synopsis(block)
]
PYTHON_PAGES = sorted({block.page for block in RUN if block.language in ("python", "sql")})
OTHER_PAGES = sorted({block.page for block in RUN} - set(PYTHON_PAGES))


def run_page(page: str, tmp_path: Path, spark: SparkSession | None) -> None:
    namespace: dict[str, Any] = {"__name__": "page", "spark": spark}
    shell, output = Shell(tmp_path), ""
    try:
        for block in (block for block in RUN if block.page == page):
            folder = tmp_path / str(block.line) if page in APART else tmp_path / "data"
            folder.mkdir(exist_ok=True)
            if block.language == "text":
                check_output(block.name, block.text, output)
            elif block.title:
                (tmp_path / block.title).write_text(runnable(block, folder))
            elif block.is_shell:
                output = shell.run(runnable(block, folder))
            elif block.language in PARSED:
                parse(block, folder)
            else:
                assert spark is not None
                if page in GIVEN:
                    give(block, namespace, folder, spark)
                if block.language == "sql":
                    run_sql(block, spark, folder)
                else:
                    output = run_python(block, namespace, folder)
                settle(spark)
    finally:
        shell.close()


@pytest.mark.parametrize("page", OTHER_PAGES)
def test_the_commands_of_a_page_run_in_order(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path, None)


@pytest.mark.parametrize("page", PYTHON_PAGES)
def test_the_code_of_a_page_runs_in_order(page: str, spark: SparkSession, tmp_path: Path) -> None:
    run_page(page, tmp_path, spark)
