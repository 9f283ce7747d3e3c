"""The files for operators in `conf/`, judged by the tools that will read them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from compaction_job import compact
from compaction_job.metrics import StoreCollector
from logstore.records.record import Record
from logstore.store import LogStore

ROOT = Path(__file__).resolve().parents[2]
CONF = ROOT / "conf"
UNITS = sorted((CONF / "systemd").iterdir())
MANIFESTS = sorted((CONF / "kubernetes").glob("*.yaml"))
TEMPLATES = sorted((CONF / "topics").glob("*.toml"))
#: the oldest Kubernetes that is still looked after somewhere, and a new one
KUBERNETES = ("1.27", "1.33")
METRIC = re.compile(r"\bduramen_[a-z_]+")


def tool(name: str, package: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is missing; it is in the Debian package {package}, see .ci/run")
    return found


def run(*command: object, **options: Any) -> str:
    done = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=300, **options
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout + done.stderr


# --- Prometheus and Grafana -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def metrics(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The names that a daemon really serves."""
    with LogStore(tmp_path_factory.mktemp("store") / "store", create=True) as store:
        store.create_topic("orders", configs={"cleanup.policy": "compact"})
        store.append("orders", [Record(b"k", b"v"), Record(b"k", None)])
        compact(store, roll_active=True)
        registry = CollectorRegistry()
        registry.register(StoreCollector(store))
        text = generate_latest(registry).decode()
    return {line.split("{")[0].split()[0] for line in text.splitlines() if line.startswith("duramen_")}


def test_the_alerts_are_rules_and_do_what_their_examples_say() -> None:
    promtool = tool("promtool", "prometheus")
    assert "SUCCESS" in run(promtool, "check", "rules", CONF / "prometheus" / "alerts.yml")
    assert "SUCCESS" in run(promtool, "test", "rules", CONF / "prometheus" / "alerts_test.yml")


def test_every_alert_has_an_example() -> None:
    rules, examples = ((CONF / "prometheus" / name).read_text() for name in ("alerts.yml", "alerts_test.yml"))
    alerts = set(re.findall(r"alert: (\w+)", rules))
    assert len(alerts) == 10
    assert alerts == set(re.findall(r"alertname: (\w+)", examples))


def test_alerts_ask_for_metrics_that_there_are(metrics: set[str]) -> None:
    asked = set(METRIC.findall((CONF / "prometheus" / "alerts.yml").read_text()))
    assert asked <= metrics
    assert {"duramen_lost_offsets", "duramen_compaction_late_seconds", "duramen_free_bytes"} <= asked


@pytest.fixture(scope="module")
def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((CONF / "grafana" / "duramen.json").read_text())
    return found


def expressions(dashboard: dict[str, Any]) -> list[str]:
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    return panels + [each["expr"] for each in dashboard["annotations"]["list"]]


def test_grafana_s_own_types_know_every_field_of_the_dashboard(dashboard: dict[str, Any]) -> None:
    """What they do not know they leave out, so a field that does not come back is wrong."""
    pytest.importorskip("grafana_foundation_sdk", reason="for Python 3.11 and newer")
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models.dashboard import Dashboard

    plugins.register_default_plugins()
    back = json.loads(JSONEncoder().encode(Dashboard.from_json(dashboard)))
    assert list(differences(dashboard, back)) == []
    # The judge can say no.
    wrong = json.loads(json.dumps(dashboard))
    wrong["panels"][0]["fieldConfigs"] = {}
    again = json.loads(JSONEncoder().encode(Dashboard.from_json(wrong)))
    assert list(differences(wrong, again)) == [".panels[0].fieldConfigs"]


def differences(given: Any, back: Any, path: str = "") -> list[str]:
    if isinstance(given, dict) and isinstance(back, dict):
        missing = [f"{path}.{name}" for name in given if name not in back]
        return missing + [
            each for name in given if name in back for each in differences(given[name], back[name], f"{path}.{name}")
        ]
    if isinstance(given, list) and isinstance(back, list) and len(given) == len(back):
        pairs = enumerate(zip(given, back, strict=True))
        return [each for at, (one, other) in pairs for each in differences(one, other, f"{path}[{at}]")]
    return [] if given == back else [path]


def test_the_dashboard_asks_for_metrics_that_there_are(dashboard: dict[str, Any], metrics: set[str]) -> None:
    asked = {name for each in expressions(dashboard) for name in METRIC.findall(each)}
    assert asked <= metrics
    # Keys go with records; everything else is shown.
    assert metrics - asked == {"duramen_log_keys"}


def test_prometheus_can_read_every_question_of_the_dashboard(dashboard: dict[str, Any], tmp_path: Path) -> None:
    promtool = tool("promtool", "prometheus")
    rules = [
        {"record": f"panel_{at}", "expr": each.replace("$__rate_interval", "5m")}
        for at, each in enumerate(expressions(dashboard))
    ]
    file = tmp_path / "rules.yml"
    file.write_text(json.dumps({"groups": [{"name": "panels", "rules": rules}]}))
    assert f"{len(rules)} rules found" in run(promtool, "check", "rules", file)


def test_panels_do_not_overlap(dashboard: dict[str, Any]) -> None:
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


# --- systemd ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units with a command that is on this machine."""
    command = tmp_path / "duramen"
    command.write_text("#!/bin/sh\n")
    command.chmod(0o755)
    folder = tmp_path / "units"
    folder.mkdir()
    for unit in UNITS:
        (folder / unit.name).write_text(unit.read_text().replace("/opt/duramen/bin/duramen", str(command)))
    return folder


def test_systemd_takes_the_units(units: Path) -> None:
    analyze = tool("systemd-analyze", "systemd")
    environment = os.environ | {"SYSTEMD_UNIT_PATH": f"{units}:"}
    said = run(analyze, "verify", "--man=no", *sorted(units.iterdir()), env=environment)
    assert said == ""
    broken = units / "duramen-schedule.service"
    broken.write_text(broken.read_text().replace("ProtectSystem=strict", "ProtectSystems=strict"))
    assert "Unknown key" in run(analyze, "verify", "--man=no", broken, env=environment)


def test_the_services_are_locked_down(units: Path) -> None:
    analyze = tool("systemd-analyze", "systemd")
    for unit in sorted(units.glob("*.service")):
        # The scale goes from 0 to 10, here in tenths; 2.0 is what systemd calls "OK".
        run(analyze, "security", "--offline=true", "--no-pager", "--threshold=20", unit)


# --- Kubernetes -------------------------------------------------------------------------------------------------------


def documents(path: Path) -> list[dict[str, Any]]:
    import yaml

    return [each for each in yaml.safe_load_all(path.read_text()) if each]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_kubernetes_knows_every_field_of_the_manifests(path: Path, version: str) -> None:
    import kubernetes_validate

    for each in documents(path):
        if each["kind"] == "ServiceMonitor":  # of an operator, not of Kubernetes
            assert set(each["spec"]) == {"jobLabel", "selector", "endpoints"}
            continue
        kubernetes_validate.validate(each, version, strict=True)
        each["spec"]["replica"] = 1
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(each, version, strict=True)


def test_what_the_manifests_name_exists_in_them() -> None:
    every = {each["kind"]: each for path in MANIFESTS for each in documents(path)}
    pods = [
        every["Deployment"]["spec"]["template"]["spec"],
        every["CronJob"]["spec"]["jobTemplate"]["spec"]["template"]["spec"],
    ]
    claim = every["PersistentVolumeClaim"]["metadata"]["name"]
    for pod in pods:
        volumes = {each["name"]: each for each in pod["volumes"]}
        assert volumes["store"]["persistentVolumeClaim"]["claimName"] == claim
        (container,) = pod["containers"]
        assert {each["name"] for each in container["volumeMounts"]} == set(volumes)
        assert container["securityContext"]["readOnlyRootFilesystem"]
    labels = every["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert every["Deployment"]["spec"]["selector"]["matchLabels"] == labels == every["Service"]["spec"]["selector"]
    assert every["ServiceMonitor"]["spec"]["selector"]["matchLabels"] == every["Service"]["metadata"]["labels"]
    ports = {each["name"] for each in every["Service"]["spec"]["ports"]}
    assert {each["port"] for each in every["ServiceMonitor"]["spec"]["endpoints"]} <= ports
    # The operator takes the job's name from that label: it is the one the alerts ask for.
    job_label = every["ServiceMonitor"]["spec"]["jobLabel"]
    assert f'job="{every["Service"]["metadata"]["labels"][job_label]}"' in (CONF / "prometheus/alerts.yml").read_text()


# --- the command lines in them ----------------------------------------------------------------------------------------


def command_lines() -> list[list[str]]:
    lines = [
        line.removeprefix("ExecStart=").split()[1:]
        for unit in UNITS
        for line in unit.read_text().splitlines()
        if line.startswith("ExecStart=")
    ]
    for path in MANIFESTS:
        lines += [found.split(", ")[1:] for found in re.findall(r"args: \[(.*)\]", path.read_text())]
    return [[word.strip('"') for word in line] for line in lines]


@pytest.mark.parametrize("line", command_lines(), ids=" ".join)
def test_our_command_has_the_options_they_give(line: list[str]) -> None:
    from typer.main import get_command

    from duramen.cli import app

    commands: Any = get_command(app)
    if line[0] not in commands.commands:
        assert line[0] == "console"
        return
    known = {option for each in commands.commands[line[0]].params for option in each.opts} | {"--output"}
    assert {word for word in line if word.startswith("--")} <= known


# --- Spark ------------------------------------------------------------------------------------------------------------

SHOW = """
import json, sys
from pyspark.sql import SparkSession
spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
names = json.loads(sys.argv[1])
find = spark._jvm.org.apache.spark.internal.config.ConfigEntry.findEntry
spark._jvm.org.apache.spark.sql.internal.SQLConf.get()
print("FOUND", json.dumps({name: [spark.conf.get(name, None), find(name) is not None] for name in names}))
"""


def test_spark_takes_its_defaults_and_knows_their_names(tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    file = CONF / "spark-defaults.conf"
    line = re.compile(r"^(# )?(spark\.\S+) +(\S+)$", re.MULTILINE)
    found = [each.groups() for each in line.finditer(file.read_text())]
    in_force = {name: value for comment, name, value in found if not comment}
    assert len(in_force) >= 5
    program = tmp_path / "show.py"
    program.write_text(SHOW)
    names = [name for _, name, _ in found] + ["spark.sql.shuffle.partition"]
    submit = Path(sys.executable).parent / "spark-submit"
    environment = os.environ | {"PYSPARK_PYTHON": sys.executable, "SPARK_LOCAL_IP": "127.0.0.1"}
    said = run(submit, "--properties-file", file, program, json.dumps(names), env=environment, cwd=tmp_path)
    (text,) = [each.removeprefix("FOUND ") for each in said.splitlines() if each.startswith("FOUND ")]
    answer = json.loads(text)
    assert answer.pop("spark.sql.shuffle.partition") == [None, False]  # a name Spark does not know is told apart
    assert {name: value for name, (value, _) in answer.items() if name in in_force} == in_force
    assert [name for name, (_, is_known) in answer.items() if not is_known] == []


# --- topics -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda path: path.stem)
def test_a_topic_can_be_made_of_every_template(path: Path, tmp_path: Path) -> None:
    from duramen.cli import run as command

    store = str(tmp_path / "store")
    assert command(["--store", store, "topics", "create", "made", "--config-file", str(path)]) == 0
    with LogStore(store) as opened:
        settings = opened.log_config(opened.topic("made"))
        opened.append("made", [Record(b"k", b"v"), Record(b"k", b"w")])
        assert settings.compact is ("compact" in path.read_text().split("cleanup.policy = ")[1].splitlines()[0])
        if path.stem == "erasable":
            assert settings.max_compaction_lag_ms + settings.delete_retention_ms <= 4 * 86_400_000
    assert f"conf/topics/{path.name}" in path.read_text()  # the line to copy is about this file
    assert command(["--store", store, "compact", "--roll-active"]) == 0


def test_the_command_tells_where_the_files_are(capsys: pytest.CaptureFixture[str]) -> None:
    from duramen.cli import run as command

    assert command(["config", "--templates", "--output", "json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["directory"] == str(CONF)
    assert document["files"] == sorted(str(path.relative_to(CONF)) for path in CONF.rglob("*") if path.is_file())
