"""Pages of the site that are made from the code or from files at the root, when the site is built (see mkdocs.yml).

Settings come from the one table in `logstore.config`, options from the command line's own parser. So neither page can
say something else than the code does.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files

ROOT = Path(__file__).resolve().parent.parent
#: page of the site -> file at the root
FROM_ROOT = {"changelog.md": "CHANGELOG.md", "contributing.md": "CONTRIBUTING.md", "security.md": "SECURITY.md"}
#: durations and sizes whose plain numbers nobody reads
UNITS_MS = (("day", 86_400_000), ("hour", 3_600_000), ("minute", 60_000), ("second", 1_000))
UNITS_BYTES = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Called by MkDocs before the pages are read."""
    from mkdocs.structure.files import File

    sys.path.insert(0, str(ROOT))
    for path, text in pages().items():
        files.append(File.generated(config, path, content=text))
    return files


def pages() -> dict[str, str]:
    """Path and text of each generated page."""
    found = {path: from_root(name) for path, name in FROM_ROOT.items()}
    return found | {
        "reference/settings.md": settings_page(),
        "reference/options.md": options_page(),
        "decisions/index.md": decisions_page(),
    }


def from_root(name: str) -> str:
    """A file of the root as a page: its links into docs/ lose that folder, those to other files become pages."""
    text = (ROOT / name).read_text(encoding="utf-8").replace("](docs/", "](")
    for path, other in FROM_ROOT.items():
        text = text.replace(f"]({other})", f"]({path})")
    return re.sub(r"\]\(README\.md\)", "](index.md)", text)


# --- settings -------------------------------------------------------------------------------------------------------


def settings_page() -> str:
    from logstore.config import BROKER_SETTINGS, TOPIC_SETTINGS

    lines = [
        "# Settings",
        "",
        "Every setting, from the table that the code itself uses. Names, defaults and ranges are Kafka's. Settings "
        "that begin with `duramen.` are ours.",
        "",
        "A topic's own value (`duramen topics create` or `alter`, `--config NAME=VALUE`) wins over the store's file "
        "(`STORE/duramen.toml`), and the file wins over the default. `duramen config` prints this table for a store, "
        "`duramen describe TOPIC` shows each value in force with its source.",
        "",
        "Sizes take `k`, `m`, `g`, `t`; times take `ms`, `s`, `m`, `h`, `d`: `segment.bytes=64MB`, `retention.ms=7d`.",
    ]
    lines += ["", "## Topic settings", "", "The store's default is set under the broker name.", ""]
    for setting in TOPIC_SETTINGS.values():
        lines += [*_setting(setting), ""]
    lines += ["## Store settings", ""]
    for setting in BROKER_SETTINGS.values():
        lines += [*_setting(setting), ""]
    return "\n".join(lines)


def _setting(setting: Any) -> Iterator[str]:
    default = setting.default
    if isinstance(default, frozenset):
        default = ",".join(sorted(default))
    elif isinstance(default, bool):
        default = str(default).lower()
    names = [f"`{each.name}`" for each in setting.synonyms if each.name != setting.name]
    yield f"### `{setting.name}` {{ #{setting.name} }}"
    yield ""
    yield setting.doc
    yield ""
    facts = [f"{setting.kind.value}", f"{setting.valid}", f"default `{default}`{_in_words(setting)}"]
    if names:
        facts.append("broker name " + ", then ".join(names))
    yield "<small>" + " · ".join(facts) + "</small>"


def _in_words(setting: Any) -> str:
    value = setting.default
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        return ""
    if value == (1 << 63) - 1:
        return " (never)" if setting.name.endswith(".ms") else " (no limit)"
    units = UNITS_MS if setting.name.endswith(".ms") else UNITS_BYTES if "bytes" in setting.name else ()
    for name, size in units:
        if value >= size and value % size == 0:
            count = value // size
            plural = "s" if units is UNITS_MS and count > 1 else ""
            return f" ({count} {name}{plural})"
    return ""


# --- options --------------------------------------------------------------------------------------------------------


def options_page() -> str:
    from typer.main import get_command

    from duramen.cli import app

    top: Any = get_command(app)
    lines = [
        "# Every option",
        "",
        "Made from the command itself: what `duramen COMMAND --help` prints. [Commands and JSON](../cli.md) explains "
        "what each command does and documents its JSON.",
        "",
        "## duramen",
        "",
        *_parameters(top),
    ]
    for path, command in commands(top):
        lines += ["", f"## {path}", "", _prose(command.help), "", *_parameters(command)]
    return "\n".join(lines) + "\n"


def commands(group: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every command that does something, by its words: `topics create`."""
    for name, command in sorted(group.commands.items()):
        if getattr(command, "hidden", False):
            continue
        if hasattr(command, "commands"):
            yield from commands(command, f"{prefix}{name} ")
        else:
            yield prefix + name, command


def _parameters(command: Any) -> Iterator[str]:
    yield "| option | |"
    yield "|---|---|"
    for each in command.params:
        if getattr(each, "hidden", False):
            continue
        argument = each.param_type_name == "argument"
        names = [each.human_readable_name] if argument else [*each.opts, *each.secondary_opts]
        text = ", ".join(f"`{name}`" for name in names)
        if not argument and not getattr(each, "is_flag", False):
            text += f" {_cell(each.metavar or _choices(each))}"
        yield f"| {text} | {_cell(_prose(getattr(each, 'help', None)))}{_default(each)} |"


def _choices(parameter: Any) -> str:
    values = getattr(parameter.type, "choices", None)
    if values:
        return " or ".join(f"`{getattr(value, 'value', value)}`" for value in values)
    return "N" if "int" in parameter.type.name else parameter.type.name.upper()


def _default(parameter: Any) -> str:
    value = getattr(parameter, "default", None)
    value = getattr(value, "value", value)
    shown = parameter.param_type_name == "option" and isinstance(value, (str, int)) and not isinstance(value, bool)
    return f" Default: `{value}`." if shown and value != "" else ""


def _prose(text: str | None) -> str:
    return re.sub(r"\s*\n\s*", " ", (text or "").replace("\b", "").strip()).replace("<", "&lt;")


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


# --- decisions ------------------------------------------------------------------------------------------------------


def decisions_page() -> str:
    lines = [
        "# Decisions",
        "",
        "Big choices, one short page each: the context, the choice, what was rejected and why.",
        "",
    ]
    for path in sorted((ROOT / "docs" / "decisions").glob("0*.md")):
        title = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        number, _, name = title.partition(". ")
        lines.append(f"{int(number)}. [{name}]({path.name})")
    return "\n".join(lines) + "\n"
