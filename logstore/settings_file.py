"""The settings file of a store: TOML with Kafka's dotted names, read, written, and explained in a template."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping

from logstore.errors import InvalidConfig
from logstore.files import OS_FILES, FileSystem, read_whole
from logstore.setting import Scope, Setting, Value, format_value
from logstore.settings import SETTINGS

#: a settings file is written by hand; anything larger is not one
SETTINGS_FILE_BYTES_MAX = 1 << 20


def load_toml(path: str, *, fs: FileSystem = OS_FILES) -> dict[str, object]:
    """The settings of a TOML file, flat: tables and dotted keys become Kafka's dotted names.

    Raises InvalidConfig naming file and line when the file is missing, too large or malformed.
    """
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib

    try:
        data = read_whole(fs, path, limit=SETTINGS_FILE_BYTES_MAX)
    except OSError as error:
        raise InvalidConfig(f"cannot read the settings file: {error.strerror}", file=path) from error
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise InvalidConfig(f"line {line} is not UTF-8", file=path, position=error.start) from error
    try:
        return _flat(tomllib.loads(text), "")
    except ValueError as error:  # TOMLDecodeError is one; an absurdly long number is another
        found = re.search(r"\(at line (\d+), column (\d+)\)", str(error))
        line_text = found.group(1) if found else str(text.count("\n") + 1)
        reason = str(error).split(" (at ")[0]
        raise InvalidConfig(f"malformed TOML on line {line_text}: {reason[:200]}", file=path) from error
    except RecursionError as error:
        raise InvalidConfig("malformed TOML: nested too deeply", file=path) from error


def _flat(table: Mapping[str, object], prefix: str) -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in table.items():
        name = prefix + key
        found = _flat(value, name + ".") if isinstance(value, Mapping) else {name: value}
        twice = flat.keys() & found.keys()
        if twice:
            raise ValueError(f"{min(twice)} is given twice")
        flat.update(found)
    return flat


def dump_toml(values: Mapping[str, Value]) -> str:
    """The lines of a TOML file that `load_toml` reads back as `values`."""
    return "".join(f"{name} = {_toml(value)}\n" for name, value in values.items())


def _toml(value: Value) -> str:
    if isinstance(value, bool | int):
        return format_value(value)
    if isinstance(value, float):
        return repr(value)
    return '"' + format_value(value) + '"'  # only choices of the table get here: nothing to escape


def store_file_template() -> str:
    """The text of `conf/duramen.toml`: every default under its broker name, explained."""
    lines = [
        "# Defaults of a store, under Kafka's broker names. Copy to STORE/duramen.toml and change what you need;",
        "# a topic's own value (duramen topics create/alter --config) is stronger than anything here.",
    ]
    for title, scope in (("Defaults of topics", Scope.TOPIC), ("The store as a whole", Scope.BROKER)):
        lines += ["", f"# --- {title} " + "-" * (100 - len(title))]
        for setting in SETTINGS:
            if setting.scope is scope:
                lines += ["", *_template_lines(setting)]
    return "\n".join(lines) + "\n"


def _template_lines(setting: Setting) -> list[str]:
    import textwrap

    text = f"{setting.doc} No effect here: {setting.no_effect}." if setting.no_effect else setting.doc
    lines = ["# " + line for line in textwrap.wrap(text, 110)]
    names = [synonym.name for synonym in setting.synonyms] or [setting.name]
    on_topic = f" On a topic: {setting.name}." if setting.scope is Scope.TOPIC else ""
    lines.append(f"# {setting.kind.value}, {setting.valid}.{on_topic}")
    if len(names) > 1:
        lines.append(f"# Asked only when {names[0]} is not set: {', then '.join(names[1:])}.")
    unless = "# " if setting.matters_when_set else ""
    return [*lines, unless + dump_toml({names[0]: setting.default}).rstrip()]
