"""`make demo`: account changes streamed into a compacted topic, the query killed in the middle, the topic compacted
while the query runs again, the state restored.

Three processes take part: this one narrates and checks; `--writer` is the streaming query's driver, which is killed and
started again; Spark's workers do what they always do. Everything lies in a temporary folder.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from compaction_job import Report

    Pass = tuple[Report, dict[str, float]]

ACCOUNTS = 2_000
FILES = 12
CHANGES_PER_FILE = 5_000
PARTITIONS = 4
TOPIC = "accounts"
APP = "accounts-demo"


def main() -> int:
    options = argparse.ArgumentParser(
        prog="python -m duramen.demo",
        description="A stream into a compacted topic: killed, restarted, compacted on the way, its state restored and "
        "compared with the truth. About half a minute; needs duramen[spark] and Java. Everything lies in a temporary "
        "folder.",
    )
    options.add_argument("--writer", metavar="FOLDER", help=argparse.SUPPRESS)
    writer_folder = options.parse_args().writer
    if writer_folder:
        return _write(writer_folder)
    out = Console()
    with tempfile.TemporaryDirectory(prefix="duramen-demo-") as folder:
        return _tell(out, folder)


# --- the story --------------------------------------------------------------------------------------------------


def _tell(out: Console, folder: str) -> int:
    from logstore.store import LogStore

    out.rule("[bold]1. A store is a directory; no broker runs")
    with LogStore(os.path.join(folder, "store"), create=True) as store:
        store.create_topic(
            TOPIC,
            partitions=PARTITIONS,
            configs={"cleanup.policy": "compact", "segment.bytes": 32 << 10, "min.cleanable.dirty.ratio": 0.3},
        )
    truth = make_changes(folder)
    out.print(
        f"Topic [bold]{TOPIC}[/], {PARTITIONS} partitions, compacted. {FILES * CHANGES_PER_FILE:,} changes of "
        f"{ACCOUNTS:,} accounts wait in {FILES} files."
    )

    out.rule("[bold]2. A streaming query writes them, and is killed in the middle")
    killed_at = run_writer(out, folder, kill_after_files=FILES // 2)
    out.print(f"[red]SIGKILL[/] to the driver; the ledger has {killed_at} of {FILES} micro-batches.")

    out.rule("[bold]3. The same query is started again, and the topic is compacted while it runs")
    passes: list[Pass] = []
    run_writer(out, folder, kill_after_files=None, meanwhile=lambda: _compact(folder, passes))
    out.print(_batches(folder))
    passes.append(_compact_now(folder))
    out.print(_compactions(passes))
    out.print(_removed([report for report, _ in passes]))

    out.rule("[bold]4. The state is restored and compared with the truth")
    is_right = compare(out, os.path.join(folder, "store"), truth)
    out.rule("[bold]Done")
    out.print("Next: README.md, [bold].venv/bin/duramen --help[/], docs/spark.md, docs/compaction.md.")
    return 0 if is_right else 1


def compare(out: Console, store_path: str, truth: dict[str, str]) -> bool:
    """Restore the state and say whether it is the truth, and whether each record was appended once."""
    began = time.perf_counter()
    state, records = restore_state(store_path)
    took = time.perf_counter() - began
    doubled = records - FILES * CHANGES_PER_FILE
    out.print(f"{records:,} records were appended: {max(-doubled, 0)} missing, {max(doubled, 0)} doubled.")
    same = state == truth
    out.print(
        f"{len(state):,} open accounts restored in {took:.2f} s; "
        + ("[green]equal to the truth, key for key[/]" if same else "[red]NOT equal to the truth[/]")
    )
    return same and doubled == 0


def make_changes(folder: str) -> dict[str, str]:
    """Write the input files; returns the state they lead to. A tenth of the changes closes the account."""
    randomness = np.random.default_rng(20)
    truth: dict[str, str] = {}
    incoming = os.path.join(folder, "incoming")
    os.mkdir(incoming)
    for number in range(FILES):
        accounts = randomness.integers(0, ACCOUNTS, CHANGES_PER_FILE)
        balances = randomness.integers(0, 100_000, CHANGES_PER_FILE)
        closed = randomness.random(CHANGES_PER_FILE) < 0.1
        with open(os.path.join(incoming, f"{number:03d}.json"), "w") as file:
            for account, balance, is_closed in zip(accounts.tolist(), balances.tolist(), closed.tolist(), strict=True):
                key, value = f"account-{account:05d}", f"{balance / 100:.2f} EUR"
                file.write(json.dumps({"key": key, "value": None if is_closed else value}) + "\n")
                if is_closed:
                    truth.pop(key, None)
                else:
                    truth[key] = value
        os.utime(os.path.join(incoming, f"{number:03d}.json"), (1_700_000_000 + number, 1_700_000_000 + number))
    return truth


def committed_batches(folder: str) -> int:
    from logstore.ledger import Ledger

    return len(Ledger(os.path.join(folder, "store", "ledger")).commits())


def run_writer(
    out: Console,
    folder: str,
    kill_after_files: int | None,
    meanwhile: Callable[[], None] = lambda: None,
    *,
    program: Sequence[str] = ("-m", "duramen.demo"),
    committed: Callable[[str], int] = committed_batches,
) -> int:
    """Run the query's driver to its end, or kill it when the ledger has that many micro-batches."""
    child = subprocess.Popen(
        [sys.executable, *program, "--writer", folder],
        stderr=open(os.path.join(folder, "spark.log"), "a"),  # noqa: SIM115 (the child's)
        start_new_session=True,
    )
    with out.status("Spark is starting…") as status:
        while child.poll() is None:
            done = committed(folder)
            status.update(f"{done} of {FILES} micro-batches committed")
            if kill_after_files is not None and done >= kill_after_files:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                return committed(folder)
            meanwhile()
            time.sleep(0.05)
    if child.returncode != 0:
        with open(os.path.join(folder, "spark.log")) as log:
            out.print("".join(log.readlines()[-30:]))
        raise SystemExit(f"the streaming query failed with exit code {child.returncode}")
    return committed(folder)


def _batches(folder: str) -> Table:
    from logstore.ledger import Ledger

    table = figures_table("batch", "records", "bytes", "encode ms", words=("offsets by partition",))
    for row in Ledger(os.path.join(folder, "store", "ledger")).commits():
        spans = zip(row.base_offsets, row.end_offsets, strict=True)
        ranges = "  ".join(f"{number}:[{base},{end})" for number, (base, end) in enumerate(spans))
        encode = row.timings_ms.get("encode")
        table.add_row(
            str(row.batch_id),
            f"{row.records:,}",
            f"{row.size_bytes:,}",
            "" if encode is None else f"{encode:,}",
            ranges,
        )
    return table


def _compact(folder: str, passes: list[Pass]) -> None:
    """Compact what is due, twice while the query runs: once what it left when it was killed, once what came since."""
    if len(passes) < 2 and committed_batches(folder) >= (FILES // 2 + 1, FILES - 3)[len(passes)]:
        passes.append(_compact_now(folder))


def _compact_now(folder: str) -> Pass:
    """What was compacted, and the dirty ratios then; while a query runs, it has appended again."""
    from compaction_job import compact, plan

    store = os.path.join(folder, "store")
    report = compact(store)
    return report, {each.name: each.cleanable.ratio for each, _ in plan(store, estimate=False)}


def _compactions(passes: list[Pass]) -> Table:
    table = figures_table("pass", "dirty before", "after", "bytes before", "after", "seconds", words=("partition",))
    for number, (report, ratios) in enumerate(passes, 1):
        for run in sorted(report.done, key=lambda run: run.plan.partition):
            assert run.report is not None
            table.add_row(
                str(number),
                f"{run.plan.cleanable.ratio:.2f}",
                f"{ratios[run.plan.name]:.2f}",
                f"{run.report.before_bytes:,}",
                f"{run.report.after_bytes:,}",
                f"{run.report.seconds:.2f}",
                run.plan.name,
            )
    return table


def _removed(reports: list[Report]) -> str:
    removed: dict[str, int] = {}
    saved = 0
    for run in [run for report in reports for run in report.done]:
        assert run.report is not None
        saved += run.report.before_bytes - run.report.after_bytes
        for reason, count in run.report.removed.items():
            removed[reason] = removed.get(reason, 0) + count
    told = removed_text(removed)
    return f"Compaction removed {told}, which saved {saved:,} bytes. Every pass left its receipt in the ledger."


def removed_text(removed: Mapping[str, int]) -> str:
    """Records by the reason for which they went."""
    told = ", ".join(f"{count:,} {reason}" for reason, count in sorted(removed.items()))
    return f"{told} records" if told else "nothing"


def figures_table(*figures: str, words: Sequence[str]) -> Table:
    """Figures stand to the right, and what is text comes behind them."""
    table = Table()
    for name in figures:
        table.add_column(name, justify="right")
    for name in words:
        table.add_column(name)
    return table


def restore_state(store_path: str) -> tuple[dict[str, str], int]:
    """The latest value of every key without Spark, and how many records were appended."""
    from logstore.restore.restore import plan_restore, restore_partition
    from logstore.store import open_store

    state: dict[str, str] = {}
    with open_store(store_path) as store:
        plan = plan_restore(store, TOPIC)
        for number in range(PARTITIONS):
            for columns in restore_partition(store, plan, number):
                for key, value in zip(columns.keys.tolist(), columns.values.tolist(), strict=True):
                    state[(key or b"").decode()] = (value or b"").decode()
    return state, sum(plan.end_offsets)


# --- the streaming query ----------------------------------------------------------------------------------------


def _write(folder: str) -> int:
    from streaming import LogSink

    return run_query(folder, LogSink(store=os.path.join(folder, "store"), topic=TOPIC, app_id=APP))


def run_query(folder: str, sink: Callable[[Any, int], None]) -> int:
    """Stream what waits in the folder into the sink, one file a micro-batch."""
    os.environ["PYSPARK_PYTHON"] = sys.executable
    from pyspark.sql import SparkSession

    spark = (
        SparkSession.builder.master("local[2]")
        .appName("duramen demo")
        .config("spark.ui.enabled", "false")
        .config("spark.sql.shuffle.partitions", "2")
        .config("spark.log.level", "ERROR")
        .getOrCreate()
    )
    changes = (
        spark.readStream.schema("key string, value string")
        .option("maxFilesPerTrigger", 1)
        .json(os.path.join(folder, "incoming"))
    )
    query = (
        changes.writeStream.foreachBatch(sink)
        .option("checkpointLocation", os.path.join(folder, "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return 0


if __name__ == "__main__":
    sys.exit(main())
