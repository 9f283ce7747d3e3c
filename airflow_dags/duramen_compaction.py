"""Compaction of a Duramen store: asks what is due, and runs a spark-submit application for each share of it.

Airflow needs nothing of Duramen installed. Every step is a process in the project's own environment, which is found by
the Airflow Variable or the environment variable of the same name (docs/airflow.md):

    duramen_python / DURAMEN_PYTHON               its interpreter; default: the .venv beside this folder, or python3
    duramen_spark_submit / DURAMEN_SPARK_SUBMIT   default: spark-submit beside that interpreter
    duramen_store / DURAMEN_STORE                 the store, when the param names none

Two environment variables are read when the file is parsed. DURAMEN_COMPACTION_SCHEDULE is a schedule instead of hourly;
empty: only by hand. DURAMEN_SPARK_CONN is the id of a Spark connection: then Airflow's Spark provider submits, to the
master that the connection names.

A partition that fails, fails the task of its share: the other partitions and shares go on, retention runs, and what was
compacted is published. The file is complete in itself, so that it can be copied into any DAG folder.
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

CONNECTION = os.environ.get("DURAMEN_SPARK_CONN", "")
SPARK_CONF = {"spark.ui.enabled": "false", "spark.log.level": "WARN"}
STORE = "^((/|[a-z][a-z0-9]*://).*)?$"
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


def run_loudly(command: list[str], python: str) -> int:
    """Run it with its output in the task's log as it comes; its exit code. Killing the task kills it too."""
    print("running", *command, flush=True)
    try:
        process = subprocess.Popen(
            command, env=environment(python), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    except OSError as error:
        raise AirflowFailException(f"cannot start {command[0]}: {error}. Set duramen_spark_submit.") from None
    assert process.stdout is not None
    for line in process.stdout:
        print(line.rstrip())
    return process.wait()


def is_failure(run: dict[str, Any]) -> bool:
    return run["result"] not in ("done", "skipped")


def share_name(share: dict[str, Any]) -> str:
    """What a mapped task is called: `orders:0-49`, or `orders:0-49 and 3 topics more`."""
    first, *others = share["only"]
    if not others:
        return str(first)[:200]
    return f"{first[:200]} and {len(others)} {'topic' if len(others) == 1 else 'topics'} more"


def submit_by_provider(planned: Any) -> Any:
    """The shares as tasks of Airflow's Spark provider; master, queue and deploy mode are the connection's."""
    from airflow.providers.apache.spark.operators.spark_submit import SparkSubmitOperator

    return SparkSubmitOperator.partial(
        task_id="compact_share",
        conn_id=CONNECTION,
        max_active_tis_per_dagrun=2,
        retries=0,
        map_index_template="{{ task.name }}",
    ).expand_kwargs(planned.map(submission))


def submission(share: dict[str, Any]) -> dict[str, Any]:
    python = share["python"]
    return {
        "name": share["name"],
        "application": share["application"],
        "application_args": share["arguments"],
        "conf": {"spark.pyspark.python": python, "spark.pyspark.driver.python": python} | share["conf"],
    }


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
        "store": Param("", type="string", pattern=STORE, description="Directory or URL; empty: duramen_store"),
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
        "share_bytes": Param(
            4 << 30,
            type="integer",
            minimum=1,
            description="So many bytes of partitions are compacted by one Spark application",
        ),
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
    def plan_shares() -> list[dict[str, Any]]:
        """The due partitions, most urgent first, in shares of one Spark application each."""
        context = get_current_context()
        params = known_params(context)
        arguments = ["--store", chosen_store(params), *(f"--topic={topic}" for topic in params["topics"])]
        arguments += ["--share-bytes", str(params["share_bytes"])]
        if params["ratio"] is not None:
            arguments += ["--ratio", str(params["ratio"])]
        if params["force"]:
            arguments.append("--force")
        python = project_python()
        plan = json.loads(answer(python, "-m", "duramen.job", "plan", *arguments))
        for each in plan["due"] + plan["not_due"]:
            print(f"{each['topic']}-{each['partition']}: {each['why']} (dirty ratio {each['dirty_ratio']:.2f})")
        for problem in plan["problems"]:
            print(f"problem: {problem}")
        context["ti"].xcom_push(key="problems", value=plan["problems"])
        if params["dry_run"]:
            return []
        # The plan has judged by the ratio.
        force = ["--force"] if params["force"] or params["ratio"] is not None else []
        common = {
            "python": python,
            "application": answer(python, "-m", "duramen.job", "submit-file").strip(),
            "conf": SPARK_CONF | params["spark_conf"],
        }
        shares = []
        for number, each in enumerate(plan["shares"]):
            print(f"share {number}: {each['partitions']} partitions, {each['size_bytes']} bytes, {each['only']}")
            words = ["--store", plan["store"], *(f"--only={word}" for word in each["only"])]
            words += ["--airflow-run-id", context["run_id"], "--no-retention", *force]
            shares.append({"name": share_name(each), "arguments": words, **common})
        return shares

    # Each application is a JVM of its own, so few at a time. No retries: the job itself sets a failing partition aside
    # and tries it again with back-off.
    @task(max_active_tis_per_dagrun=2, retries=0, map_index_template="{{ share_name }}")
    def compact_share(share: dict[str, Any]) -> None:
        """The partitions of one share, by one Spark application."""
        context = get_current_context()
        params = context["params"]
        context["share_name"] = share["name"]  # type: ignore[typeddict-unknown-key]
        python = share["python"]
        spark_submit = setting("duramen_spark_submit", str(Path(python).parent / "spark-submit"))
        command = [spark_submit, "--master", params["master"]]
        for key, value in share["conf"].items():
            command += ["--conf", f"{key}={value}"]
        with tempfile.TemporaryDirectory(prefix="duramen-") as folder:
            report_path = Path(folder) / "report.json"
            command += [share["application"], *share["arguments"], "--report", str(report_path)]
            # A task that is run again by hand shall not wait for the job's back-off.
            if context["ti"].try_number > 1 and "--force" not in share["arguments"]:
                command.append("--force")
            code = run_loudly(command, python)
            report = json.loads(report_path.read_text()) if report_path.exists() else None
        if report is None:
            raise AirflowFailException(f"spark-submit ended with {code} and no report, see the log above")
        if "error" in report:
            raise AirflowFailException(f"error: {report['error']['message']}")
        failed = [f"{run['topic']}-{run['partition']}: {run['reason']}" for run in report["runs"] if is_failure(run)]
        if failed or report["problems"]:
            raise AirflowFailException("; ".join(failed + report["problems"]))
        # What another process is compacting, or is not due any more. What this run did before is no reason to skip.
        left = [run for run in report["runs"] if run["skip"] not in (None, "done_before")]
        if left and len(left) == len(report["runs"]):
            raise AirflowSkipException("; ".join(sorted({run["reason"] for run in left})))

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
    def publish_topics() -> list[dict[str, Any]]:
        """One event for each topic that was compacted, with what the receipts of this run say."""
        context = get_current_context()
        params = known_params(context)
        store = chosen_store(params)
        arguments = ["--store", store, "--airflow-run-id", context["run_id"]]
        outcomes: list[dict[str, Any]] = json.loads(
            answer(project_python(), "-m", "duramen.job", "outcomes", *arguments)
        )
        topics: dict[str, list[dict[str, Any]]] = {}
        for each in outcomes:
            name = f"{each['topic']}-{each['partition']}"
            if each["result"] == "done":
                print(f"{name}: {each['before_bytes']} -> {each['after_bytes']} bytes")
                topics.setdefault(each["topic"], []).append(each)
            else:
                print(f"{name}: {each['result']}, {each['reason']}")
        for topic, done in topics.items():
            extra = {
                "store": store,
                "topic": topic,
                "partitions": sorted(each["partition"] for each in done),
                "before_bytes": sum(each["before_bytes"] or 0 for each in done),
                "after_bytes": sum(each["after_bytes"] or 0 for each in done),
                "airflow_run_id": context["run_id"],
            }
            context["outlet_events"][COMPACTED].add(Asset(f"x-duramen://{store}/{topic}"), extra=extra)
        return outcomes

    @task(trigger_rule="none_failed")
    def all_compacted() -> None:
        """Makes a run with a failed share a failed run: the tasks above run in any case, and would hide it."""
        problems = get_current_context()["ti"].xcom_pull(task_ids="plan_shares", key="problems")
        if problems:
            raise AirflowFailException("; ".join(problems))

    planned = plan_shares()
    if CONNECTION:
        compacted: Any = submit_by_provider(planned)
    else:
        compacted = compact_share.expand(share=planned)
    retained, published = apply_retention(), publish_topics()
    compacted >> [retained, published]
    [compacted, retained, published] >> all_compacted()


duramen_compaction()
