"""What runs in Airflow's own environment: `python driver.py REQUEST ANSWER`, both JSON files.

{"do": "import"}: the DAGs, and what went wrong with their files.
{"do": "run", "dag_id", "conf", "at"}: dag.test(); the same time again is the same run id.
{"do": "runs", "runs": [{"dag_id", …}…]}: several of them, one after the other.
{"do": "refuse", "dag_id", "confs": [{…}…]}: what each conf is told; null for one that would be taken.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime
from typing import Any

from airflow.dag_processing.dagbag import DagBag
from airflow.models.asset import AssetEvent
from airflow.models.dagrun import DagRun
from airflow.models.xcom import XComModel
from airflow.sdk.exceptions import ParamValidationError
from airflow.settings import AIRFLOW_HOME
from airflow.utils.session import create_session
from sqlalchemy import select


def imported() -> dict[str, Any]:
    bag = DagBag()
    dags = {name: {"tasks": sorted(dag.task_dict), "schedule": str(dag.schedule)} for name, dag in bag.dags.items()}
    return {"home": AIRFLOW_HOME, "errors": bag.import_errors, "dags": dags}


def run(dag_id: str, conf: dict[str, Any], at: str) -> dict[str, Any]:
    when = datetime.fromisoformat(at)
    done = DagBag().dags[dag_id].test(run_after=when, logical_date=when, run_conf=conf)
    with create_session() as session:
        events = session.scalars(select(AssetEvent).where(AssetEvent.source_run_id == done.run_id)).all()
        results = session.scalars(select(XComModel).where(XComModel.run_id == done.run_id)).all()
        return {
            "run_id": done.run_id,
            "state": str(done.state),
            # A mapped task is called by its partition or topic, not by its number.
            "tasks": {
                each.task_id if each.map_index < 0 else f"{each.task_id}/{each.rendered_map_index}": str(each.state)
                for each in done.get_task_instances(session=session)
            },
            "events": [{"uri": each.asset.uri, "extra": each.extra} for each in events],
            "results": [
                {"task": each.task_id, "value": XComModel.deserialize_value(each)}
                for each in results
                if each.key == "return_value"
            ],
        }


def several(runs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"runs": [run(**each) for each in runs]}


def refused(dag_id: str, confs: list[dict[str, Any]]) -> dict[str, Any]:
    dag = DagBag().dags[dag_id]
    told: list[str | None] = []
    for conf in confs:
        try:
            dag.test(run_conf=conf, mark_success_pattern=".*")
        except ParamValidationError as error:
            told.append(str(error))
        else:
            told.append(None)
    with create_session() as session:
        runs = session.scalars(select(DagRun).where(DagRun.dag_id == dag_id)).all()
        return {"told": told, "confs_of_runs": [each.conf for each in runs]}


def main(request_path: str, answer_path: str) -> None:
    with open(request_path) as file:
        request = json.load(file)
    actions = {"import": imported, "run": run, "runs": several, "refuse": refused}
    answer = actions[request.pop("do")](**request)
    with open(answer_path, "w") as file:
        json.dump(answer, file, default=str)


if __name__ == "__main__":
    main(*sys.argv[1:])
