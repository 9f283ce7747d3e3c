"""`duramen config`: every setting with its range, default, doc and, in a store, the value in force and its source."""

from __future__ import annotations

import shutil
import sys
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.options import DryRun
from duramen.session import bad_usage, key_values, print_pairs, print_table, session

if TYPE_CHECKING:
    from logstore.config import Resolved

#: what the files in `conf/` end in
_TEMPLATES = {".toml", ".yml", ".yaml", ".json", ".service", ".timer", ".conf"}


def config(
    name: Annotated[
        str | None,
        typer.Argument(metavar="[NAME]", help="One setting, by its topic or broker name.", show_default=False),
    ] = None,
    template: Annotated[
        bool, typer.Option("--template", help="Print a settings file with every default, for STORE/duramen.toml.")
    ] = False,
    templates: Annotated[
        bool,
        typer.Option("--templates", help="Show the files for operators that come with Duramen, and where they are."),
    ] = False,
    given: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="NAME=VALUE",
            help="Set it for the store as a whole; in a bucket only. May be given again.",
            show_default=False,
        ),
    ] = None,
    unset: Annotated[
        list[str] | None,
        typer.Option("--unset", metavar="NAME", help="Back to the default; may be given again.", show_default=False),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """List every setting, or explain one; with --set and --unset, change those of a store in a bucket."""
    from logstore.config import resolve_broker, resolve_topic
    from logstore.settings import SETTINGS, any_setting
    from logstore.settings_file import store_file_template

    if templates:
        if name or template:
            raise bad_usage("--templates takes no other argument")
        _show_templates()
        return
    if given or unset:
        if name or template:
            raise bad_usage("--set and --unset stand alone")
        _alter(key_values(given, "--set"), unset or [], dry_run=dry_run)
        return
    if template:
        if name:
            raise bad_usage("--template prints all settings: leave the name out")
        session.answer({"template": store_file_template()}, lambda: print(store_file_template(), end=""))
        return
    chosen = [any_setting(name)] if name else list(SETTINGS)
    if session.store_path:
        with session.open_any() as store:
            resolved = {**store.topic_settings(), **store.broker_settings()}
    else:
        resolved = {**resolve_topic(), **resolve_broker()}
    documents = [setting_document(resolved[setting.name]) for setting in chosen]
    if name:
        session.answer({"setting": documents[0]}, lambda: _explain(documents[0]))
    else:
        session.answer(
            {"settings": documents},
            lambda: print_table(
                ["setting", "scope", "type", "value", "source", "valid"],
                [
                    [each["name"], each["scope"], each["type"], each["value"], _source(each), each["valid"]]
                    for each in documents
                ],
            ),
        )


def _alter(given: dict[str, str], unset: list[str], *, dry_run: bool) -> None:
    from logstore.settings import any_setting

    for name in unset:
        any_setting(name)
    with session.open_any() as store:
        store.alter_settings(given, unset=unset, dry_run=dry_run)
    verb = "Would set" if dry_run else "Set"
    words = [*(f"{name} = {value}" for name, value in given.items()), *(f"{name} to its default" for name in unset)]
    document = {"set": given, "unset": unset, "altered": not dry_run}
    text = f"{verb} {', '.join(words)}; whoever has the store open sees it when opening it again"
    session.answer(document, lambda: print(text))


def _show_templates() -> None:
    """The wheel has `conf/` inside the package, a checkout beside it."""
    package = Path(__file__).resolve().parents[1]
    folder = package / "conf" if (package / "conf").is_dir() else package.parent / "conf"
    files = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in _TEMPLATES)

    def text() -> None:
        print(folder)
        for each in files:
            print(f"  {each}")

    session.answer({"directory": str(folder), "files": files}, text)


def setting_document(resolved: Resolved) -> dict[str, Any]:
    from logstore.setting import format_value

    setting = resolved.setting
    return {
        "name": setting.name,
        "scope": setting.scope.value,
        "type": setting.kind.value,
        "valid": setting.valid,
        "default": format_value(setting.default),
        "value": format_value(resolved.value),
        "source": resolved.source.value,
        "source_name": resolved.source_name,
        "shadowed": list(resolved.shadowed),
        "broker_names": [synonym.name for synonym in setting.synonyms],
        "doc": setting.doc,
        "no_effect": setting.no_effect,
    }


def _source(document: dict[str, Any]) -> str:
    given = document["source_name"]
    source = document["source"] if document["source"] == "default" else f"{document['source']} ({given})"
    return f"{source}, no effect" if document["no_effect"] else source


def _explain(document: dict[str, Any]) -> None:
    doc = document["doc"]
    print(textwrap.fill(doc, shutil.get_terminal_size().columns) if sys.stdout.isatty() else doc)
    print()
    print_pairs(
        [
            ("setting", document["name"]),
            ("scope", document["scope"]),
            ("type", document["type"]),
            ("valid", document["valid"]),
            ("default", document["default"]),
            ("value", document["value"]),
            ("source", _source(document)),
            *([("no effect", document["no_effect"])] if document["no_effect"] else []),
            *([("in the store file", ", then ".join(document["broker_names"]))] if document["broker_names"] else []),
        ]
    )
