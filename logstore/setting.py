"""What a setting is: its name, type, range and units, and how a text becomes a value of it.

Names and ranges are Kafka's. `settings.py` lists the settings. Nothing heavy is imported: commands that only
look at settings must start at once.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from logstore.errors import InvalidConfig
from logstore.limits import INT32_MAX, INT64_MAX

#: what a value can be once it is parsed
Value = int | float | bool | str | frozenset[str]


class Scope(Enum):
    TOPIC = "topic"
    BROKER = "broker"


class Kind(Enum):
    """Kafka's configuration types, as far as the log uses them."""

    INT = "int"
    LONG = "long"
    DOUBLE = "double"
    BOOLEAN = "boolean"
    STRING = "string"
    LIST = "list"


@dataclass(frozen=True, slots=True)
class Synonym:
    """A broker-level name of a topic setting; `factor` turns its unit into the setting's."""

    name: str
    factor: int = 1


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    scope: Scope
    kind: Kind
    default: Value
    doc: str
    #: broker names in the order they are asked: ms before minutes before hours
    synonyms: tuple[Synonym, ...] = ()
    minimum: int | float | None = None
    maximum: int | float | None = None
    choices: tuple[str, ...] = ()
    #: one value allowed below `minimum`
    also: int | None = None
    #: any negative number means -1 (none)
    negative_is_none: bool = False
    #: leaving it out is not the same as setting the default
    matters_when_set: bool = False
    #: why it does nothing here; it is accepted, since a broker's settings have it
    no_effect: str = ""

    @property
    def attribute(self) -> str:
        """The name of the same setting in `LogConfig` or `BrokerConfig`."""
        return self.name.replace(".", "_")

    @property
    def valid(self) -> str:
        """The accepted values, for people."""
        if self.kind is Kind.LIST:
            return "a list of " + ", ".join(self.choices) + "; may be empty"
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is Kind.BOOLEAN:
            return "true or false"
        if self.minimum is None:
            return f"any {self.kind.value}"
        text = f">= {self.minimum}" if self.maximum is None else f"{self.minimum}..{self.maximum}"
        return text if self.also is None else f"{text} or {self.also}"


_INTEGER = re.compile(r"[+-]?[0-9]{1,20}\Z", re.ASCII)
_NUMBER = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]{1,4})?\Z", re.ASCII)
_BOUNDS = {Kind.INT: (-INT32_MAX - 1, INT32_MAX), Kind.LONG: (-INT64_MAX - 1, INT64_MAX)}
_EXPECTED = {
    Kind.INT: "a whole number of 32 bits",
    Kind.LONG: "a whole number of 64 bits",
    Kind.DOUBLE: "a finite number",
    Kind.BOOLEAN: "true or false",
    Kind.STRING: "a string",
    Kind.LIST: "a list, as an array or separated by commas",
}


def parse_value(setting: Setting, given: object, *, name: str | None = None, file: str | None = None) -> Value:
    """`given` (a string, or a TOML value) as the setting's type, within its range.

    `name` is the name the value was given under, which brings its unit. Raises InvalidConfig.
    """
    name = name or setting.name
    factor = next((synonym.factor for synonym in setting.synonyms if synonym.name == name), 1)
    value = _typed(setting.kind, given)
    if value is None and setting.kind in (Kind.INT, Kind.LONG) and isinstance(given, str):
        value = parse_units(given, units_of(setting.name))
        factor = 1 if value is not None else factor  # the suffix says the unit
    if value is None:
        units = units_of(setting.name)
        also = f", nor one with a unit ({', '.join(sorted(units, key=lambda unit: units[unit]))})" if units else ""
        raise InvalidConfig(f"{name} = {shown(given)} is not {_EXPECTED[setting.kind]}{also}", file=file)
    if isinstance(value, frozenset):
        wrong = sorted(value.difference(setting.choices))
        if wrong:
            raise InvalidConfig(f"{name} has {shown(wrong[0])}; expected {setting.valid}", file=file)
        return value
    if isinstance(value, str):
        if setting.choices and value not in setting.choices:
            raise InvalidConfig(f"{name} = {shown(given)}; expected {setting.valid}", file=file)
        return value
    if isinstance(value, bool):
        return value
    converted = value * factor
    if factor != 1 and converted < 0 and setting.minimum == -1:
        converted = -1  # Kafka: any negative number of hours or minutes is "no limit"
    if setting.negative_is_none and converted < 0:
        converted = -1
    if not _in_range(setting, converted):
        unit = f" ({converted} in {setting.name})" if factor != 1 else ""
        raise InvalidConfig(f"{name} = {shown(given)}{unit} is out of range; expected {setting.valid}", file=file)
    return converted


#: powers of 1024, for kB as for KiB, as Spark and the JVM count
SIZE_UNITS = {
    unit: 1024**power for power, letter in enumerate("kmgt", 1) for unit in (letter, f"{letter}b", f"{letter}ib")
} | {"b": 1}


DURATION_UNITS = {"ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}
_WITH_UNIT = re.compile(r"([0-9]{1,18}) ?([a-z]{1,3})\Z", re.ASCII)


def units_of(name: str) -> Mapping[str, int]:
    """The units that a value of the setting may carry: none unless it is in bytes or milliseconds."""
    if name.endswith((".bytes", ".size")):
        return SIZE_UNITS
    return DURATION_UNITS if name.endswith(".ms") else {}


def parse_units(text: str, units: Mapping[str, int]) -> int | None:
    """`10MB` or `7d` as a number of the smallest unit; None when it is not of that form."""
    found = _WITH_UNIT.match(text.strip().lower())
    return int(found[1]) * units[found[2]] if found and found[2] in units else None


def _in_range(setting: Setting, value: int | float) -> bool:
    bounds = _BOUNDS.get(setting.kind)
    if bounds is not None and not bounds[0] <= value <= bounds[1]:
        return False
    if setting.also is not None and value == setting.also:
        return True
    return (setting.minimum is None or value >= setting.minimum) and (
        setting.maximum is None or value <= setting.maximum
    )


def _typed(kind: Kind, given: object) -> Value | None:
    """The value in the kind's Python type, None when it is not of that kind."""
    if isinstance(given, str):
        given = given.strip()
    if kind is Kind.BOOLEAN:
        if isinstance(given, bool):
            return given
        return {"true": True, "false": False}.get(given.lower()) if isinstance(given, str) else None
    if isinstance(given, bool):
        return None
    if kind in (Kind.INT, Kind.LONG):
        if isinstance(given, str) and _INTEGER.match(given):
            given = int(given)
        low, high = _BOUNDS[kind]
        return given if isinstance(given, int) and low <= given <= high else None
    if kind is Kind.DOUBLE:
        if isinstance(given, str) and len(given) <= 400 and _NUMBER.match(given):
            given = float(given)
        try:
            number = float(given) if isinstance(given, int | float) else math.nan
        except OverflowError:
            return None
        return number if math.isfinite(number) else None
    if kind is Kind.STRING:
        return given if isinstance(given, str) else None
    if isinstance(given, str):
        given = [part.strip() for part in given.split(",")] if given else []
    if isinstance(given, frozenset | set | tuple | list) and all(isinstance(part, str) for part in given):
        return frozenset(given)
    return None


def shown(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 80 else text[:77] + "..."


def format_value(value: Value) -> str:
    """A value in Kafka's spelling."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, frozenset):
        return ",".join(sorted(value))
    return str(value)
