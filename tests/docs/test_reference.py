"""The reference has everything: each command, option, setting, metric, Spark option and public name.

`tests/logstore/test_errors.py` does the same for errors.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import duramen
from docs import generated
from docs.page import ROOT
from duramen.cli import app
from logstore.config import BROKER_SETTINGS, TOPIC_SETTINGS
from logstore.records.record import Record
from logstore.store import LogStore

COMMANDS = dict(generated.commands(get_command(app)))


def page(path: str) -> str:
    return (ROOT / "docs" / path).read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_explained_and_its_options_are_listed(name: str) -> None:
    command: Any = COMMANDS[name]
    assert re.search(rf"^duramen {name}\b", page("cli.md"), re.MULTILINE), f"docs/cli.md has no form of {name}"
    section = generated.options_page().split(f"\n## {name}\n")[1].split("\n## ")[0]
    for option in command.params:
        if getattr(option, "hidden", False):
            continue
        names = [option.human_readable_name] if option.param_type_name == "argument" else option.opts
        assert all(f"`{each}`" in section for each in names), (name, names)


def test_every_setting_is_on_the_page_with_its_default() -> None:
    text = generated.settings_page()
    for setting in (*TOPIC_SETTINGS.values(), *BROKER_SETTINGS.values()):
        section = text.split(f"### `{setting.name}` ")[1].split("\n### ")[0]
        assert setting.doc in section
        assert "default `" in section


def test_every_metric_is_on_the_page_with_its_labels(tmp_path: Path) -> None:
    from compaction_job.metrics import StoreCollector

    with LogStore(tmp_path / "store", create=True) as store:
        store.create_topic("orders", configs={"cleanup.policy": "compact"})
        store.append("orders", [Record(b"a", b"1")])
        families = list(StoreCollector(store).collect())
    served = {family.name + ("_total" if family.type == "counter" else "") for family in families}
    rows = dict(re.findall(r"^\| `(duramen_\w+)` \| (.*)$", page("reference/metrics.md"), re.MULTILINE))
    assert rows.keys() == served
    for family in families:
        row = rows[family.name + ("_total" if family.type == "counter" else "")]
        assert row.startswith(family.type)
        for label in {label for sample in family.samples for label in sample.labels} - {"topic", "partition"}:
            assert f"`{label}`" in row, (family.name, label)


def test_every_option_of_spark_is_in_the_tables() -> None:
    from streaming import options

    text = page("spark.md")
    for name in (*options._READ, *options._WRITE):
        assert re.search(rf"^\|.*`{re.escape(name)}`", text, re.MULTILINE), name


def test_every_public_name_has_its_documentation() -> None:
    listed = set(re.findall(r"^::: duramen\.(\w+)$", page("reference/python.md"), re.MULTILINE))
    assert listed == set(duramen.__all__) - {"__version__", "errors"}


def test_generated_pages_are_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text()
    for path in generated.pages():
        assert f": {path}" in navigation, path
