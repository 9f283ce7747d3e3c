"""Restores the latest value of every key of the topics that were compacted, each into a Parquet file.

Runs when duramen_compaction has published topics, with those; started by hand, with the topics of its params. The work
is `duramen restore` in the project's own environment, which is found by the Airflow Variable or the environment
variable of the same name (docs/airflow.md):

    duramen_python / DURAMEN_PYTHON             its interpreter; default: the .venv beside this folder, or python3
    duramen_store / DURAMEN_STORE               the store, when neither event nor param names one
    duramen_restore_dir / DURAMEN_RESTORE_DIR   where files go; default: STORE.restored, beside the store

A file is replaced only once the new one is complete. The file is complete in itself, so that it can be copied into any
DAG folder.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from airflow.sdk import AssetAlias, Param, Variable, dag, get_current_context, task
from airflow.sdk.exceptions import AirflowFailException

COMPACTED = AssetAlias("duramen-compacted")  # every topic that duramen_compaction compacts is behind it
STORE = "^((/|[a-z][a-z0-9]*://).*)?$"
TOPIC = "^[a-zA-Z0-9._-]{1,249}$"


def setting(name: str, default: str) -> str:
    """A Variable, else an environment variable, else the default. Read in tasks only: parsing stays quick."""
    found = Variable.get(name, default=None) or os.environ.get(name.upper())
    return str(found or default)


def project_python() -> str:
    beside = Path(__file__).resolve().parent.parent / ".venv" / "bin" / "python"
    return setting("duramen_python", str(beside) if beside.exists() else "python3")


@dag(
    schedule=COMPACTED,
    start_date=datetime(2026, 1, 1, tzinfo=timezone.utc),
    # Of no meaning for what assets start, but for the first run: without it, that leaves out events that are older than
    # the DAG's link to their asset, and the first event of a topic always is.
    catchup=True,
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
            description="The topics, for a run by hand; a run by compaction has its own",
        ),
        "into": Param("", type="string", pattern="^(/.*)?$", description="A directory; empty: duramen_restore_dir"),
    },
)
def duramen_restore() -> None:
    @task
    def choose_topics() -> list[dict[str, str]]:
        """What the events name, each topic once; without events, what the params name."""
        context = get_current_context()
        params = context["params"]
        # Airflow takes names that no param has.
        unknown = sorted(set(context["dag_run"].conf or {}) - set(context["dag"].params))
        if unknown:
            raise AirflowFailException(f"no param is called {', '.join(unknown)}")
        events = [event for found in context["triggering_asset_events"].values() for event in found]
        wanted = [(event.extra.get("store"), event.extra.get("topic")) for event in events]
        wanted = wanted or [(params["store"], topic) for topic in params["topics"]]
        if not wanted:
            raise AirflowFailException("no topics: give the param topics, or let duramen_compaction start this")
        default = params["store"] or setting("duramen_store", "")
        chosen = {(store or default, topic) for store, topic in wanted}
        for store, topic in chosen:
            if not store:
                raise AirflowFailException("no store: give the param store, or set duramen_store")
            # An event may come from anywhere, and its topic becomes the name of a file.
            if not re.match(TOPIC, topic or "") or topic in (".", ".."):
                raise AirflowFailException(f"an event names {topic!r}, which is no topic")
        return [{"store": store, "topic": topic} for store, topic in sorted(chosen)]

    @task(max_active_tis_per_dagrun=2, map_index_template="{{ topic_name }}")
    def restore_topic(chosen: dict[str, str]) -> dict[str, Any]:
        context = get_current_context()
        context["topic_name"] = chosen["topic"]  # type: ignore[typeddict-unknown-key]
        store, topic = chosen["store"], chosen["topic"]
        beside = "" if "://" in store else f"{store.rstrip('/')}.restored"
        folder = context["params"]["into"] or setting("duramen_restore_dir", beside)
        if not folder:
            raise AirflowFailException(f"{store} has no folder beside it: give the param into, or duramen_restore_dir")
        into = Path(folder)
        into.mkdir(parents=True, exist_ok=True)
        command = [project_python(), "-m", "duramen", "--store", store, "--output", "json", "restore"]
        command += ["--format", "parquet", "--output-file", str(into / f"{topic}.parquet"), "--", topic]
        print("running", *command)
        # Airflow's own paths stay out of the project's interpreter.
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
        try:
            done = subprocess.run(command, env=kept, capture_output=True, text=True, check=False)
        except OSError as error:
            raise AirflowFailException(f"cannot start {command[0]}: {error}. Set duramen_python.") from None
        if done.returncode:
            raise AirflowFailException(done.stderr.strip() or f"{command} ended with {done.returncode}")
        restored: dict[str, Any] = json.loads(done.stdout)
        print(f"restored {restored['rows']} keys of {topic} into {restored['file']}")
        return {name: restored[name] for name in ("topic", "rows", "file", "end_offsets")}

    restore_topic.expand(chosen=choose_topics())


duramen_restore()
