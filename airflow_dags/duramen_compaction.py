"""Compaction of a Duramen store: asks what is due, and runs one spark-submit application a due partition.

Airflow needs nothing of Duramen installed. Every step is a process in the project's own environment, which is found by
the Airflow Variable or the environment variable of the same name (docs/airflow.md):

    duramen_python / DURAMEN_PYTHON               its interpreter; default: the .venv beside this folder, or python3
    duramen_spark_submit / DURAMEN_SPARK_SUBMIT   default: spark-submit beside that interpreter
    duramen_store / DURAMEN_STORE                 the store, when the param names none

It runs hourly, or as DURAMEN_COMPACTION_SCHEDULE says when the file is parsed; empty: only by hand. A partition that
fails, fails its own mapped task: the others go on, retention runs, and what was compacted is published. The file is
complete in itself, so that it can be copied into any DAG folder.
"""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from airflow.sdk import Asset, AssetAlias, Param, Variable, dag, get_current_context, task
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

# Which topics a run compacts is known only while it runs, and a DAG's own outlets are fixed when it is parsed. So the
# outlet is an alias, and each run puts the assets of its topics behind it, one event each. Whoever wants all topics
# schedules on the alias, as duramen_restore does; whoever wants one, on Asset("x-duramen://STORE/TOPIC").
COMPACTED = AssetAlias("duramen-compacted")

TOPIC = "^[a-zA-Z0-9._-]{1,249}$"
MASTER = r"^(local|local\[(\*|[1-9][0-9]*)\]|yarn|(spark|k8s)://[^\s]+)$"


def setting(name: str, default: str) -> str:
    """A Variable, else an environment variable, else the default. Read in tasks only: parsing stays quick."""
    found = Variable.get(name, default=None) or os.environ.get(name.upper())
    return str(found or default)


def project_python() -> str:
    beside = Path(__file__).resolve().parent.parent / ".venv" / "bin" / "python"
    return setting("duramen_python", str(beside) if beside.exists() else "python3")


def environment(python: str) -> dict[str, str]:
    """Airflow's own paths stay out of the project's interpreter."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    return kept | {"PYSPARK_PYTHON": python, "PYSPARK_DRIVER_PYTHON": python}


def answer(python: str, *arguments: str) -> str:
    """What a command of the project prints; a failure is its one line of error."""
    command = [python, *arguments]
    print("running", *command)
    try:
        done = subprocess.run(command, env=environment(python), capture_output=True, text=True, check=False)
    except OSError as error:
        raise AirflowFailException(f"cannot start {python}: {error}. Set duramen_python.") from None
    if done.returncode:
        raise AirflowFailException(done.stderr.strip() or f"{command} ended with {done.returncode}")
    return done.stdout


def known_params(context: Any) -> Any:
    """Airflow takes names that no param has, and a misspelt `topics` would mean all of them."""
    unknown = sorted(set(context["dag_run"].conf or {}) - set(context["dag"].params))
    if unknown:
        raise AirflowFailException(f"no param is called {', '.join(unknown)}")
    return context["params"]


def chosen_store(params: Any) -> str:
    store = params["store"] or setting("duramen_store", "")
    if not store:
        raise AirflowFailException("no store: give the param store, or set duramen_store")
    return str(store)


@dag(
    schedule=os.environ.get("DURAMEN_COMPACTION_SCHEDULE", "@hourly") or None,
    start_date=datetime(2026, 1, 1, tzinfo=timezone.utc),
    catchup=False,
    max_active_runs=1,
    tags=["duramen"],
    doc_md=__doc__,
    params={
        "store": Param("", type="string", pattern="^(/.*)?$", description="The store; empty: duramen_store"),
        "topics": Param(
            [],
            type="array",
            items={"type": "string", "pattern": TOPIC},
            uniqueItems=True,
            description="Only these topics; empty: all that are compacted",
        ),
        "dry_run": Param(False, type="boolean", description="Only say what is due"),
        "ratio": Param(
            None,
            type=["null", "number"],
            minimum=0,
            maximum=1,
            description="A dirty ratio instead of the topics' own min.cleanable.dirty.ratio",
        ),
        "force": Param(False, type="boolean", description="Ignore the dirty ratio, and earlier failures"),
        "master": Param("local[2]", type="string", pattern=MASTER, description="Spark's master"),
        "spark_conf": Param(
            {},
            type="object",
            propertyNames={"pattern": "^spark\\."},
            additionalProperties={"type": "string"},
            description="More settings for spark-submit",
        ),
    },
)
def duramen_compaction() -> None:
    @task
    def plan_partitions() -> list[dict[str, Any]]:
        """The due partitions, most urgent first."""
        context = get_current_context()
        params = known_params(context)
        arguments = ["--store", chosen_store(params), *(f"--topic={topic}" for topic in params["topics"])]
        if params["ratio"] is not None:
            arguments += ["--ratio", str(params["ratio"])]
        if params["force"]:
            arguments.append("--force")
        plan = json.loads(answer(project_python(), "-m", "duramen.job", "plan", *arguments))
        for each in plan["due"] + plan["not_due"]:
            print(f"{each['topic']}-{each['partition']}: {each['why']} (dirty ratio {each['dirty_ratio']:.2f})")
        for problem in plan["problems"]:
            print(f"problem: {problem}")
        context["ti"].xcom_push(key="problems", value=plan["problems"])
        if params["dry_run"]:
            return []
        return [
            {"store": plan["store"], "topic": each["topic"], "partition": each["partition"]} for each in plan["due"]
        ]

    # Each application is a JVM of its own, so few at a time. No retries: the job itself sets a failing partition aside
    # and tries it again with back-off.
    @task(max_active_tis_per_dagrun=2, retries=0, map_index_template="{{ partition_name }}")
    def compact_partition(partition: dict[str, Any]) -> dict[str, Any]:
        """One partition, one Spark application; what it did, from its receipt."""
        context = get_current_context()
        params = context["params"]
        name = f"{partition['topic']}-{partition['partition']}"
        context["partition_name"] = name  # type: ignore[typeddict-unknown-key]
        python = project_python()
        spark_submit = setting("duramen_spark_submit", str(Path(python).parent / "spark-submit"))
        application = Path(answer(python, "-m", "duramen.job", "submit-file").strip())
        conf = {"spark.ui.enabled": "false", "spark.log.level": "WARN"} | params["spark_conf"]
        command = [spark_submit, "--master", params["master"]]
        for key, value in conf.items():
            command += ["--conf", f"{key}={value}"]
        with tempfile.TemporaryDirectory(prefix="duramen-") as folder:
            report_path = Path(folder) / "report.json"
            command += [str(application), "--store", partition["store"], f"--topic={partition['topic']}"]
            command += ["--partition", str(partition["partition"]), "--airflow-run-id", context["run_id"]]
            command += ["--report", str(report_path), "--no-retention"]
            # The ratio was judged by the plan. A task that is run again by hand shall not wait for the job's back-off.
            if params["force"] or params["ratio"] is not None or context["ti"].try_number > 1:
                command.append("--force")
            print("running", *command, flush=True)
            # Its output goes into the task's log as it comes; killing the task kills the group it is in.
            try:
                process = subprocess.Popen(
                    command, env=environment(python), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            except OSError as error:
                raise AirflowFailException(f"cannot start {spark_submit}: {error}. Set duramen_spark_submit.") from None
            assert process.stdout is not None
            last = ""
            for line in process.stdout:
                print(line.rstrip())
                last = line.strip() if line.startswith("error:") else last
            code = process.wait()
            if not report_path.exists():
                raise AirflowFailException(last or f"spark-submit ended with {code} and no report, see the log above")
            report = json.loads(report_path.read_text())
        runs = [run for run in report["runs"] if run["partition"] == partition["partition"]]
        outcome = runs[0] if runs else {"result": "failed", "reason": "; ".join(report["problems"]) or "it is gone"}
        reason = f"{name}: {outcome['reason']}"
        if outcome["result"] == "skipped" and "Airflow run id" not in outcome["reason"]:
            raise AirflowSkipException(reason)
        if outcome["result"] not in ("done", "skipped"):
            raise AirflowFailException(reason)
        receipt = outcome.get("receipt") or {}
        return partition | {
            "result": outcome["result"],
            "run_id": outcome["run_id"],
            "before_bytes": receipt.get("before_bytes"),
            "after_bytes": receipt.get("after_bytes"),
            "removed": receipt.get("removed"),
        }

    @task(trigger_rule="all_done")
    def apply_retention() -> list[dict[str, Any]]:
        """Retention of every policy, also where compaction failed or was not due."""
        params = known_params(get_current_context())
        if params["dry_run"]:
            raise AirflowSkipException("dry run")
        arguments = ["--store", chosen_store(params), *(f"--topic={topic}" for topic in params["topics"])]
        done = json.loads(answer(project_python(), "-m", "duramen.job", "retain", *arguments))
        for note in done["notes"]:
            print(note)
        retained: list[dict[str, Any]] = done["retained"]
        return retained

    @task(trigger_rule="all_done", outlets=[COMPACTED])
    def publish_topics(outcomes: Any) -> list[str]:
        """One event for each topic that was compacted, with what it came to."""
        context = get_current_context()
        topics: dict[tuple[str, str], list[dict[str, Any]]] = {}
        for each in outcomes[:] if outcomes else ():  # a slice: going through it one by one logs an error at its end
            print(f"{each['topic']}-{each['partition']}: {each['before_bytes']} -> {each['after_bytes']} bytes")
            topics.setdefault((each["store"], each["topic"]), []).append(each)
        for (store, topic), done in topics.items():
            extra = {
                "store": store,
                "topic": topic,
                "partitions": sorted(each["partition"] for each in done),
                "before_bytes": sum(each["before_bytes"] or 0 for each in done),
                "after_bytes": sum(each["after_bytes"] or 0 for each in done),
                "airflow_run_id": context["run_id"],
            }
            context["outlet_events"][COMPACTED].add(Asset(f"x-duramen://{store}/{topic}"), extra=extra)
        return [topic for _, topic in topics]

    @task(trigger_rule="none_failed")
    def all_compacted() -> None:
        """Makes a run with a failed partition a failed run: the tasks above run in any case, and would hide it."""
        problems = get_current_context()["ti"].xcom_pull(task_ids="plan_partitions", key="problems")
        if problems:
            raise AirflowFailException("; ".join(problems))

    outcomes = compact_partition.expand(partition=plan_partitions())
    retained = apply_retention()
    outcomes >> retained
    [outcomes, retained, publish_topics(outcomes)] >> all_compacted()


duramen_compaction()
