"""The job as a Spark application: `spark-submit …/compaction_job/submit.py --store DIR [--topic T]…`.

Prints its report as JSON on standard output, and writes it to `--report`, when given. Exit codes are those of the
`duramen` command: 0 done, 1 a partition failed, 2 bad usage.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence


def parser() -> argparse.ArgumentParser:
    options = argparse.ArgumentParser(prog="compaction_job", description="Compact the topics of a Duramen store.")
    options.add_argument("--store", default=os.environ.get("DURAMEN_STORE"), help="the store's directory")
    options.add_argument("--topic", action="append", dest="topics", metavar="NAME", help="only these topics")
    options.add_argument("--partition", action="append", dest="partitions", type=int, metavar="N")
    options.add_argument(
        "--only", action="append", type=_share, metavar="TOPIC:N-M,N", help="only these partitions of a topic"
    )
    options.add_argument("--force", action="store_true", help="ignore the dirty ratio")
    options.add_argument("--roll-active", action="store_true", help="close active segments first")
    options.add_argument("--dry-run", action="store_true")
    options.add_argument("--now-ms", type=int)
    options.add_argument("--threads", type=int, help="passes and groups at once; default: log.cleaner.threads")
    options.add_argument(
        "--airflow-run-id", help="recorded in the receipts; a second run with the same id repeats nothing"
    )
    options.add_argument("--no-retention", action="store_true")
    options.add_argument("--report", metavar="FILE", help="write the report there as well")
    return options


def _share(word: str) -> str:
    from compaction_job.shares import read

    try:
        read([word])
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return word


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    if not options.store:
        parser().error("no store: give --store, or set DURAMEN_STORE")
    if options.only and (options.topics or options.partitions):
        parser().error("--only names topics and partitions: give no --topic and no --partition with it")
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    from pyspark.sql import SparkSession

    from compaction_job.job import compact
    from compaction_job.shares import read
    from logstore.errors import DuramenError

    spark = SparkSession.builder.appName("duramen-compaction").getOrCreate()
    try:
        report = compact(
            options.store,
            spark=spark,
            topics=read(options.only) if options.only else options.topics,
            partitions=options.partitions,
            force=options.force,
            roll_active=options.roll_active,
            dry_run=options.dry_run,
            now_ms=options.now_ms,
            threads=options.threads or spark.sparkContext.defaultParallelism,
            airflow_run_id=options.airflow_run_id,
            retention=not options.no_retention,
        )
    except DuramenError as error:
        print(f"error: {error}", file=sys.stderr)
        _write_report(options.report, json.dumps({"error": {"kind": type(error).__name__, "message": str(error)}}))
        return 1
    finally:
        spark.stop()
    text = json.dumps(report.as_dict(), indent=2)
    print(text)
    _write_report(options.report, text)
    return 1 if report.failed or report.problems else 0


def _write_report(path: str | None, text: str) -> None:
    if path:
        draft = f"{path}.tmp"
        with open(draft, "w") as file:
            file.write(text)
        os.replace(draft, path)


if __name__ == "__main__":
    # Started by path, Python looks for modules beside this file; they are where the package `duramen` is: one folder up
    # in a checkout, two when installed.
    home = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    sys.path[0] = home if os.path.isdir(os.path.join(home, "duramen")) else os.path.dirname(home)
    sys.exit(main())
