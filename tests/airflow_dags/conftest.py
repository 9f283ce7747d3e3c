"""A real Airflow: its environment made from its own lock file, and a home with an empty database for these tests.

Nothing of Airflow is imported here. `driver.py` is run by Airflow's interpreter, and so are its servers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ports import free_port

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
VENV = ROOT / "build" / "airflow-venv"
COMMAND_S = 900
START_S = 300


@dataclass(frozen=True)
class Airflow:
    home: Path
    env: dict[str, str]

    def with_env(self, **more: str) -> Airflow:
        return Airflow(self.home, self.env | more)

    def ask(self, do: str, **request: Any) -> dict[str, Any]:
        """What `driver.py` answers; its output, Airflow's log, is shown when it fails."""
        paths = [self.home / "request.json", self.home / "answer.json"]
        paths[0].write_text(json.dumps({"do": do, **request}))
        paths[1].unlink(missing_ok=True)
        self.command(VENV / "bin" / "python", HERE / "driver.py", *paths)
        answer: dict[str, Any] = json.loads(paths[1].read_text())
        return answer

    def command(self, *arguments: str | Path) -> None:
        done = subprocess.run(
            list(map(str, arguments)),
            cwd=self.home,
            env=self.env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMMAND_S,
            check=False,
        )
        print(done.stdout)
        assert done.returncode == 0, f"{arguments} ended with {done.returncode}"


@pytest.fixture(scope="session")
def airflow(tmp_path_factory: pytest.TempPathFactory) -> Airflow:
    """Makes Airflow's environment when it is missing or its lock file has changed: minutes, once."""
    subprocess.run(["make", "--no-print-directory", f"{VENV.relative_to(ROOT)}/.setup"], cwd=ROOT, check=True)
    home = tmp_path_factory.mktemp("airflow")
    port = free_port()
    ours = ("AIRFLOW", "_AIRFLOW", "DURAMEN_", "SPARK_", "PYSPARK_", "PYTHONPATH")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env |= {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "airflow_dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
        "AIRFLOW__CORE__PARALLELISM": "2",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{port}/execution/",
        "AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "AIRFLOW__API__HOST": "127.0.0.1",
        "AIRFLOW__API__PORT": str(port),
        "AIRFLOW__API__WORKERS": "1",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "DURAMEN_PYTHON": sys.executable,
        "DURAMEN_COMPACTION_SCHEDULE": "",  # nothing starts by itself
        "SPARK_LOCAL_IP": "127.0.0.1",
    }
    made = Airflow(home, env)
    made.command(VENV / "bin" / "airflow", "db", "migrate")
    return made


Call = Callable[..., tuple[int, Any]]


@pytest.fixture(scope="class")
def api(airflow: Airflow) -> Iterator[Call]:
    """`api(method, path, body)` of a running API server, with a scheduler beside it."""
    address = f"http://127.0.0.1:{airflow.env['AIRFLOW__API__PORT']}"
    headers = {"Content-Type": "application/json"}

    def call(method: str, path: str, body: Any = None) -> tuple[int, Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(address + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, json.load(response)
        except urllib.error.HTTPError as error:
            with error:
                return error.code, json.load(error)

    with contextlib.ExitStack() as running:
        running.enter_context(_server(airflow, "api-server"))
        # A task that finds no API server fails, so the scheduler comes second.
        deadline = time.monotonic() + START_S
        while True:
            with contextlib.suppress(OSError):
                if call("GET", "/api/v2/version")[0] == 200:
                    break
            assert time.monotonic() < deadline, "the API server does not answer"
            time.sleep(0.5)
        headers["Authorization"] = f"Bearer {call('GET', '/auth/token')[1]['access_token']}"
        running.enter_context(_server(airflow, "scheduler"))
        yield call


@contextlib.contextmanager
def _server(airflow: Airflow, name: str) -> Iterator[None]:
    log = airflow.home / f"{name}.log"
    with open(log, "wb") as out:
        process = subprocess.Popen(
            [str(VENV / "bin" / "airflow"), name],
            cwd=airflow.home,
            env=airflow.env,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield
        assert process.poll() is None, f"{name} ended with {process.returncode}"
    finally:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(20)
        with contextlib.suppress(ProcessLookupError):  # what it started and left
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        print(f"--- {name}\n{log.read_text(errors='replace')[-20_000:]}")
