"""Every topic and broker setting, from one table: name, type, range, default, doc, and the broker names of its default.

Validation, `LogConfig`, `BrokerConfig`, `conf/duramen.toml` and the `config` command are all made from `SETTINGS`.
Names, defaults and ranges are Kafka's; `segment.bytes` is accepted from 14 up, as a topic's could be in Kafka 4.0.
Nothing here touches a log, and nothing heavy is imported: commands that only look at settings must start at once.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from logstore.errors import InvalidConfig, UnknownConfig
from logstore.files import OS_FILES, FileSystem, read_whole
from logstore.limits import INT32_MAX, INT64_MAX

#: a settings file is written by hand; anything larger is not one
SETTINGS_FILE_BYTES_MAX = 1 << 20

_MINUTE_MS = 60_000
_HOUR_MS = 3_600_000
_DEDUPE_BYTES_PER_THREAD_MIN = 1 << 20
_DOUBLE_MAX = sys.float_info.max

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


class Source(Enum):
    """Where a value in force comes from, strongest first."""

    TOPIC = "topic override"
    STORE_FILE = "store file"
    DEFAULT = "default"
    #: nobody knows it, and it would delete: held back until it is given
    UNKNOWN = "settings unknown"


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
    #: to leave it out is not the same as to set the default
    matters_when_set: bool = False

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


def _topic(name: str, kind: Kind, default: Value, doc: str, *synonyms: Synonym | str, **rules: Any) -> Setting:
    # Ours that Kafka does not know have one name, on a topic and as the store's default.
    named = tuple(Synonym(synonym) if isinstance(synonym, str) else synonym for synonym in synonyms or (name,))
    return Setting(name, Scope.TOPIC, kind, default, doc, named, **rules)


def _broker(name: str, kind: Kind, default: Value, doc: str, **rules: Any) -> Setting:
    return Setting(name, Scope.BROKER, kind, default, doc, **rules)


SETTINGS: tuple[Setting, ...] = (
    _topic(
        "segment.bytes",
        Kind.INT,
        1_073_741_824,
        "Size at which a segment is rolled; also the largest single append and the largest segment compaction writes.",
        "log.segment.bytes",
        minimum=14,
    ),
    _topic(
        "segment.ms",
        Kind.LONG,
        604_800_000,
        "Age, in record time, at which a segment is rolled by the next append.",
        "log.roll.ms",
        Synonym("log.roll.hours", _HOUR_MS),
        minimum=1,
    ),
    _topic(
        "segment.jitter.ms",
        Kind.LONG,
        0,
        "Random part taken off segment.ms, so that many partitions do not roll at once.",
        "log.roll.jitter.ms",
        Synonym("log.roll.jitter.hours", _HOUR_MS),
        minimum=0,
    ),
    _topic(
        "segment.index.bytes",
        Kind.INT,
        10_485_760,
        "Largest size of each index file; a full index rolls the segment.",
        "log.index.size.max.bytes",
        minimum=4,
    ),
    _topic(
        "index.interval.bytes",
        Kind.INT,
        4096,
        "Bytes of log between two index entries.",
        "log.index.interval.bytes",
        minimum=0,
    ),
    _topic(
        "flush.messages",
        Kind.LONG,
        INT64_MAX,
        "Unflushed records that force an fsync of a broker's log. Accepted and kept; nothing is forced here, because a "
        "commit is on disk in staging before it is visible.",
        "log.flush.interval.messages",
        minimum=1,
    ),
    _topic(
        "flush.ms",
        Kind.LONG,
        INT64_MAX,
        "Longest time a record stays unflushed in a broker's log. Accepted and kept; nothing is forced here, because a "
        "commit is on disk in staging before it is visible.",
        "log.flush.interval.ms",
        "log.flush.scheduler.interval.ms",
        minimum=0,
    ),
    _topic(
        "retention.ms",
        Kind.LONG,
        604_800_000,
        "Age after which a segment is deleted, where cleanup.policy has delete; -1 keeps it forever.",
        "log.retention.ms",
        Synonym("log.retention.minutes", _MINUTE_MS),
        Synonym("log.retention.hours", _HOUR_MS),
        minimum=-1,
    ),
    _topic(
        "retention.bytes",
        Kind.LONG,
        -1,
        "Size of a partition above which its oldest segments are deleted; a negative value is no limit.",
        "log.retention.bytes",
        negative_is_none=True,
    ),
    _topic(
        "cleanup.policy",
        Kind.LIST,
        frozenset({"delete"}),
        "How old data goes: delete by age and size, compact to the latest value of each key, both, or (empty) neither.",
        "log.cleanup.policy",
        choices=("compact", "delete"),
    ),
    _topic(
        "delete.retention.ms",
        Kind.LONG,
        86_400_000,
        "How long tombstones and transaction markers outlive the first compaction that meets them.",
        "log.cleaner.delete.retention.ms",
        minimum=0,
    ),
    _topic(
        "min.compaction.lag.ms",
        Kind.LONG,
        0,
        "Records younger than this are not compacted.",
        "log.cleaner.min.compaction.lag.ms",
        minimum=0,
    ),
    _topic(
        "max.compaction.lag.ms",
        Kind.LONG,
        INT64_MAX,
        "A record older than this makes its log due for compaction whatever its dirty ratio; also caps segment.ms.",
        "log.cleaner.max.compaction.lag.ms",
        minimum=1,
    ),
    _topic(
        "min.cleanable.dirty.ratio",
        Kind.DOUBLE,
        0.5,
        "Share of uncompacted bytes from which a log is due for compaction.",
        "log.cleaner.min.cleanable.ratio",
        minimum=0,
        maximum=1,
    ),
    _topic(
        "max.message.bytes",
        Kind.INT,
        1_048_588,
        "Largest record batch, after compression.",
        "message.max.bytes",
        minimum=0,
    ),
    _topic(
        "message.timestamp.type",
        Kind.STRING,
        "CreateTime",
        "Whose clock stamps a record: its producer's or the log's.",
        "log.message.timestamp.type",
        choices=("CreateTime", "LogAppendTime"),
    ),
    _topic(
        "message.timestamp.before.max.ms",
        Kind.LONG,
        INT64_MAX,
        "How far a CreateTime may lie in the past before the record is refused.",
        "log.message.timestamp.before.max.ms",
        minimum=0,
    ),
    _topic(
        "message.timestamp.after.max.ms",
        Kind.LONG,
        3_600_000,
        "How far a CreateTime may lie in the future before the record is refused.",
        "log.message.timestamp.after.max.ms",
        minimum=0,
    ),
    _topic(
        "compression.type",
        Kind.STRING,
        "producer",
        "Codec of stored batches; producer keeps what the producer chose, another value re-encodes on append.",
        "compression.type",
        choices=("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"),
    ),
    _topic(
        "compression.gzip.level",
        Kind.INT,
        -1,
        "Level where the log compresses with gzip; -1 is the codec's own default.",
        "compression.gzip.level",
        minimum=1,
        maximum=9,
        also=-1,
    ),
    _topic(
        "compression.lz4.level",
        Kind.INT,
        9,
        "Level where the log compresses with lz4.",
        "compression.lz4.level",
        minimum=1,
        maximum=17,
    ),
    _topic(
        "compression.zstd.level",
        Kind.INT,
        3,
        "Level where the log compresses with zstd.",
        "compression.zstd.level",
        minimum=-131_072,
        maximum=22,
    ),
    _topic(
        "file.delete.delay.ms",
        Kind.LONG,
        60_000,
        "How long a .deleted file stays, so that readers that have it open can finish.",
        "log.segment.delete.delay.ms",
        minimum=0,
    ),
    _topic(
        "preallocate",
        Kind.BOOLEAN,
        False,
        "Create a segment's file at its full size. Accepted and kept; here files grow as they are written, and "
        "recovery cuts the zeros that a broker left.",
        "log.preallocate",
    ),
    _topic("duramen.compaction.paused", Kind.BOOLEAN, False, "Leave the topic out of compaction until it is resumed."),
    _topic(
        "duramen.compaction.order",
        Kind.STRING,
        "offset",
        "Which record of a key is the latest: the one with the highest offset, timestamp, or version in a header.",
        choices=("offset", "timestamp", "header"),
    ),
    _topic(
        "duramen.compaction.version.header",
        Kind.STRING,
        "version",
        "The header that holds the version, 8 bytes, big endian; a record without it loses.",
    ),
    _topic(
        "duramen.compaction.merge.bytes",
        Kind.INT,
        0,
        "Join thinned neighbouring batches up to this size; 0 leaves batches as they are.",
        minimum=0,
    ),
    _topic(
        "duramen.compaction.recompress.type",
        Kind.STRING,
        "producer",
        "Codec compaction gives to what it rewrites of cold data; producer leaves it as it was.",
        choices=("producer", "uncompressed", "gzip", "snappy", "lz4", "zstd"),
    ),
    _topic(
        "duramen.compaction.recompress.after.ms",
        Kind.LONG,
        0,
        "From which age on a segment counts as cold.",
        minimum=0,
    ),
    _topic(
        "duramen.key.ttl.ms",
        Kind.LONG,
        -1,
        "Records older than this become tombstones when they are compacted; -1 never.",
        minimum=1,
        also=-1,
    ),
    _broker("log.cleaner.enable", Kind.BOOLEAN, True, "Compact logs at all (deprecated in Kafka since 4.1)."),
    _broker(
        "log.cleaner.threads",
        Kind.INT,
        1,
        "Threads of a compaction, or tasks of one with Spark, all partitions together; one a core where it is not set.",
        minimum=0,
        matters_when_set=True,
    ),
    _broker(
        "log.cleaner.dedupe.buffer.size",
        Kind.LONG,
        134_217_728,
        "Memory for the offset maps of all cleaner threads together; more than 1 MiB for each.",
        minimum=0,
    ),
    _broker(
        "log.cleaner.io.buffer.size",
        Kind.INT,
        524_288,
        "Memory for the read and write buffers of all cleaner threads together.",
        minimum=0,
    ),
    _broker("log.cleaner.io.buffer.load.factor", Kind.DOUBLE, 0.9, "How full an offset map may become."),
    _broker(
        "log.cleaner.io.max.bytes.per.second",
        Kind.DOUBLE,
        _DOUBLE_MAX,
        "Limit on the bytes compaction reads and writes a second.",
    ),
    _broker("log.cleaner.backoff.ms", Kind.LONG, 15_000, "Pause when no log is due for compaction.", minimum=0),
    _broker(
        "log.retention.check.interval.ms",
        Kind.LONG,
        300_000,
        "How often logs that are not compacted are checked for retention.",
        minimum=1,
    ),
    _broker(
        "log.flush.scheduler.interval.ms",
        Kind.LONG,
        INT64_MAX,
        "How often `duramen schedule` flushes the logs, so that staged files can go; every minute unless it is set.",
    ),
    _broker(
        "log.flush.offset.checkpoint.interval.ms",
        Kind.INT,
        60_000,
        "How often recovery points are written.",
        minimum=0,
    ),
    _broker(
        "log.flush.start.offset.checkpoint.interval.ms",
        Kind.INT,
        60_000,
        "How often log start offsets are written.",
        minimum=0,
    ),
    _broker(
        "replica.high.watermark.checkpoint.interval.ms",
        Kind.LONG,
        5_000,
        "How often high watermarks are written.",
    ),
    _broker(
        "num.recovery.threads.per.data.dir",
        Kind.INT,
        2,
        "Partitions loaded, recovered and closed side by side.",
        minimum=1,
    ),
    _broker(
        "producer.id.expiration.ms",
        Kind.INT,
        86_400_000,
        "How long the state of an idle producer is kept.",
        minimum=1,
    ),
    _broker(
        "log.initial.task.delay.ms",
        Kind.LONG,
        30_000,
        "Delay of the first run of background work (internal in Kafka).",
        minimum=0,
    ),
    _broker(
        "duramen.cleaner.hash",
        Kind.STRING,
        "siphash",
        "How compaction tells keys apart: siphash, keyed by a secret of each run, or md5, as Kafka does.",
        choices=("siphash", "md5"),
    ),
    _broker(
        "duramen.cleaner.retry.ms",
        Kind.LONG,
        60_000,
        "How long a partition whose compaction failed is set aside; doubled with each failure, up to a day.",
        minimum=0,
    ),
)

TOPIC_SETTINGS: dict[str, Setting] = {setting.name: setting for setting in SETTINGS if setting.scope is Scope.TOPIC}
BROKER_SETTINGS: dict[str, Setting] = {setting.name: setting for setting in SETTINGS if setting.scope is Scope.BROKER}

#: every name the store file may hold, with the topic settings it is a default of (a name can serve two purposes)
STORE_FILE_NAMES: dict[str, tuple[Setting, ...]] = {
    name: tuple(
        setting
        for setting in SETTINGS
        if (setting.name == name and setting.scope is Scope.BROKER) or name in (s.name for s in setting.synonyms)
    )
    for name in dict.fromkeys(
        name
        for setting in SETTINGS
        for name in ([s.name for s in setting.synonyms] if setting.scope is Scope.TOPIC else [setting.name])
    )
}

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
        raise InvalidConfig(f"{name} = {_shown(given)} is not {_EXPECTED[setting.kind]}{also}", file=file)
    if isinstance(value, frozenset):
        wrong = sorted(value.difference(setting.choices))
        if wrong:
            raise InvalidConfig(f"{name} has {_shown(wrong[0])}; expected {setting.valid}", file=file)
        return value
    if isinstance(value, str):
        if setting.choices and value not in setting.choices:
            raise InvalidConfig(f"{name} = {_shown(given)}; expected {setting.valid}", file=file)
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
        raise InvalidConfig(f"{name} = {_shown(given)}{unit} is out of range; expected {setting.valid}", file=file)
    return converted


#: powers of 1024, whatever they are called, as Spark and the JVM count
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


def _shown(given: object) -> str:
    text = repr(given)
    return text if len(text) <= 80 else text[:77] + "..."


def format_value(value: Value) -> str:
    """A value in Kafka's spelling."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, frozenset):
        return ",".join(sorted(value))
    return str(value)


def topic_setting(name: str, *, file: str | None = None) -> Setting:
    """The topic setting of that name. Raises UnknownConfig with the nearest one."""
    setting = TOPIC_SETTINGS.get(name)
    if setting is not None:
        return setting
    served = STORE_FILE_NAMES.get(name, ())
    for other in served:
        if other.scope is Scope.TOPIC:
            raise UnknownConfig(f"{name} is not a topic setting", file=file, hint=f"On a topic it is {other.name}.")
    if served:
        raise UnknownConfig(f"{name} is a setting of the store, not of a topic", file=file)
    raise _unknown(name, list(TOPIC_SETTINGS), "topic setting", file)


def store_setting(name: str, *, file: str | None = None) -> Setting:
    """The setting a name of the store file stands for. Raises UnknownConfig with the nearest one."""
    served = STORE_FILE_NAMES.get(name)
    if served:
        return served[-1]  # of two meanings the broker's own, which stands after the topic's
    setting = TOPIC_SETTINGS.get(name)
    if setting is not None:
        raise UnknownConfig(
            f"{name} is a topic setting", file=file, hint=f"Its default for the store is {setting.synonyms[0].name}."
        )
    raise _unknown(name, list(STORE_FILE_NAMES), "setting", file)


def any_setting(name: str) -> Setting:
    """The setting of any name, topic or broker. Raises UnknownConfig with the nearest one."""
    if name in TOPIC_SETTINGS:
        return TOPIC_SETTINGS[name]
    if name in STORE_FILE_NAMES:
        return STORE_FILE_NAMES[name][-1]
    raise _unknown(name, [*TOPIC_SETTINGS, *STORE_FILE_NAMES], "setting", None)


def _unknown(name: str, known: list[str], noun: str, file: str | None) -> UnknownConfig:
    import difflib

    near = difflib.get_close_matches(name[:200], known, n=1, cutoff=0.5)
    return UnknownConfig(
        f"no {noun} is called {_shown(name)}",
        file=file,
        hint=f"Did you mean {near[0]}?" if near else "`duramen config` lists them all.",
    )


@dataclass(frozen=True, slots=True)
class Resolved:
    """A setting's value in force and where it comes from."""

    setting: Setting
    value: Value
    source: Source
    #: the name it was given under; the setting's own for a default
    source_name: str
    #: other names that were given too and lost
    shadowed: tuple[str, ...] = ()


def resolve_topic(
    overrides: Mapping[str, object] | None = None,
    *,
    broker: Mapping[str, object] | None = None,
    file: str | None = None,
    store_file: str | None = None,
) -> dict[str, Resolved]:
    """Every topic setting with its source: the topic's own value, the store file's, the default.

    `broker` is the store file, flat, under broker names; names of other settings in it are left alone. `file` and
    `store_file` are named in errors. Raises UnknownConfig, InvalidConfig.
    """
    overrides = overrides or {}
    broker = broker or {}
    for name in overrides:
        topic_setting(name, file=file)
    resolved = {}
    for setting in TOPIC_SETTINGS.values():
        given = [synonym.name for synonym in setting.synonyms if synonym.name in broker]
        if setting.name in overrides:
            value = parse_value(setting, overrides[setting.name], file=file)
            resolved[setting.name] = Resolved(setting, value, Source.TOPIC, setting.name, tuple(given))
        elif given:
            value = parse_value(setting, broker[given[0]], name=given[0], file=store_file)
            resolved[setting.name] = Resolved(setting, value, Source.STORE_FILE, given[0], tuple(given[1:]))
        else:
            resolved[setting.name] = Resolved(setting, setting.default, Source.DEFAULT, setting.name)
    _check_compaction_lag(resolved, file if overrides else store_file)
    return resolved


#: in force while a topic's own settings are not known: nothing of it goes by itself
_HELD_BACK: Mapping[str, Value] = {"cleanup.policy": frozenset(), "retention.ms": -1, "retention.bytes": -1}


def hold_back(resolved: Mapping[str, Resolved]) -> dict[str, Resolved]:
    """The settings in force of a topic whose own are not known: neither retention nor compaction."""
    held = dict(resolved)
    for name, value in _HELD_BACK.items():
        held[name] = Resolved(held[name].setting, value, Source.UNKNOWN, name)
    return held


def _check_compaction_lag(resolved: Mapping[str, Resolved], file: str | None) -> None:
    low, high = resolved["min.compaction.lag.ms"], resolved["max.compaction.lag.ms"]
    assert isinstance(low.value, int)
    assert isinstance(high.value, int)
    if low.value > high.value:
        raise InvalidConfig(
            f"{low.source_name} = {low.value} is above {high.source_name} = {high.value}; expected min <= max",
            file=file,
        )


def resolve_broker(given: Mapping[str, object] | None = None, *, store_file: str | None = None) -> dict[str, Resolved]:
    """Every broker-only setting with its source; topic defaults in `given` are checked too.

    Raises UnknownConfig, InvalidConfig.
    """
    given = given or {}
    for name in given:
        store_setting(name, file=store_file)
        for setting in STORE_FILE_NAMES[name]:
            parse_value(setting, given[name], name=name, file=store_file)
    resolve_topic(broker=given, store_file=store_file)
    resolved = {}
    for setting in BROKER_SETTINGS.values():
        if setting.name in given:
            value = parse_value(setting, given[setting.name], file=store_file)
            resolved[setting.name] = Resolved(setting, value, Source.STORE_FILE, setting.name)
        else:
            resolved[setting.name] = Resolved(setting, setting.default, Source.DEFAULT, setting.name)
    threads, buffer = resolved["log.cleaner.threads"].value, resolved["log.cleaner.dedupe.buffer.size"].value
    assert isinstance(threads, int)
    assert isinstance(buffer, int)
    if buffer // max(1, threads) <= _DEDUPE_BYTES_PER_THREAD_MIN:
        raise InvalidConfig(
            f"log.cleaner.dedupe.buffer.size = {buffer} gives each of {max(1, threads)} cleaner threads too little; "
            f"expected more than {_DEDUPE_BYTES_PER_THREAD_MIN} bytes a thread",
            file=store_file,
        )
    return resolved


def _default(name: str) -> Any:
    return field(default=(TOPIC_SETTINGS.get(name) or BROKER_SETTINGS[name]).default)


@dataclass(frozen=True, slots=True)
class LogConfig:
    """The settings of one topic, all in force; `LogConfig()` is Kafka's defaults."""

    segment_bytes: int = _default("segment.bytes")
    segment_ms: int = _default("segment.ms")
    segment_jitter_ms: int = _default("segment.jitter.ms")
    segment_index_bytes: int = _default("segment.index.bytes")
    index_interval_bytes: int = _default("index.interval.bytes")
    flush_messages: int = _default("flush.messages")
    flush_ms: int = _default("flush.ms")
    retention_ms: int = _default("retention.ms")
    retention_bytes: int = _default("retention.bytes")
    cleanup_policy: frozenset[str] = _default("cleanup.policy")
    delete_retention_ms: int = _default("delete.retention.ms")
    min_compaction_lag_ms: int = _default("min.compaction.lag.ms")
    max_compaction_lag_ms: int = _default("max.compaction.lag.ms")
    min_cleanable_dirty_ratio: float = _default("min.cleanable.dirty.ratio")
    max_message_bytes: int = _default("max.message.bytes")
    message_timestamp_type: str = _default("message.timestamp.type")
    message_timestamp_before_max_ms: int = _default("message.timestamp.before.max.ms")
    message_timestamp_after_max_ms: int = _default("message.timestamp.after.max.ms")
    compression_type: str = _default("compression.type")
    compression_gzip_level: int = _default("compression.gzip.level")
    compression_lz4_level: int = _default("compression.lz4.level")
    compression_zstd_level: int = _default("compression.zstd.level")
    file_delete_delay_ms: int = _default("file.delete.delay.ms")
    preallocate: bool = _default("preallocate")
    duramen_compaction_paused: bool = _default("duramen.compaction.paused")
    duramen_compaction_order: str = _default("duramen.compaction.order")
    duramen_compaction_version_header: str = _default("duramen.compaction.version.header")
    duramen_compaction_merge_bytes: int = _default("duramen.compaction.merge.bytes")
    duramen_compaction_recompress_type: str = _default("duramen.compaction.recompress.type")
    duramen_compaction_recompress_after_ms: int = _default("duramen.compaction.recompress.after.ms")
    duramen_key_ttl_ms: int = _default("duramen.key.ttl.ms")

    @property
    def compact(self) -> bool:
        return "compact" in self.cleanup_policy

    @property
    def delete(self) -> bool:
        return "delete" in self.cleanup_policy

    @classmethod
    def from_mapping(
        cls,
        topic_overrides: Mapping[str, object] | None = None,
        *,
        broker: Mapping[str, object] | None = None,
    ) -> LogConfig:
        """From a topic's own values and the store file's, both under Kafka's names.

        Raises UnknownConfig, InvalidConfig.
        """
        return cls.from_resolved(resolve_topic(topic_overrides, broker=broker))

    @classmethod
    def from_resolved(cls, resolved: Mapping[str, Resolved]) -> LogConfig:
        values: dict[str, Any] = {one.setting.attribute: one.value for one in resolved.values()}
        return cls(**values)


@dataclass(frozen=True, slots=True)
class BrokerConfig:
    """The settings of a store as a whole; `BrokerConfig()` is Kafka's defaults."""

    log_cleaner_enable: bool = _default("log.cleaner.enable")
    log_cleaner_threads: int = _default("log.cleaner.threads")
    log_cleaner_dedupe_buffer_size: int = _default("log.cleaner.dedupe.buffer.size")
    log_cleaner_io_buffer_size: int = _default("log.cleaner.io.buffer.size")
    log_cleaner_io_buffer_load_factor: float = _default("log.cleaner.io.buffer.load.factor")
    log_cleaner_io_max_bytes_per_second: float = _default("log.cleaner.io.max.bytes.per.second")
    log_cleaner_backoff_ms: int = _default("log.cleaner.backoff.ms")
    log_retention_check_interval_ms: int = _default("log.retention.check.interval.ms")
    log_flush_scheduler_interval_ms: int = _default("log.flush.scheduler.interval.ms")
    log_flush_offset_checkpoint_interval_ms: int = _default("log.flush.offset.checkpoint.interval.ms")
    log_flush_start_offset_checkpoint_interval_ms: int = _default("log.flush.start.offset.checkpoint.interval.ms")
    replica_high_watermark_checkpoint_interval_ms: int = _default("replica.high.watermark.checkpoint.interval.ms")
    num_recovery_threads_per_data_dir: int = _default("num.recovery.threads.per.data.dir")
    producer_id_expiration_ms: int = _default("producer.id.expiration.ms")
    log_initial_task_delay_ms: int = _default("log.initial.task.delay.ms")
    duramen_cleaner_hash: str = _default("duramen.cleaner.hash")
    duramen_cleaner_retry_ms: int = _default("duramen.cleaner.retry.ms")

    @classmethod
    def from_mapping(cls, given: Mapping[str, object] | None = None) -> BrokerConfig:
        """From the store file's values, flat, under Kafka's names. Raises UnknownConfig, InvalidConfig."""
        return cls.from_resolved(resolve_broker(given))

    @classmethod
    def from_resolved(cls, resolved: Mapping[str, Resolved]) -> BrokerConfig:
        values: dict[str, Any] = {one.setting.attribute: one.value for one in resolved.values()}
        return cls(**values)


# A field without a row, or a row without a field, is a mistake of ours: say so at import, not at the first use.
assert [each.name for each in fields(LogConfig)] == [each.attribute for each in TOPIC_SETTINGS.values()]
assert [each.name for each in fields(BrokerConfig)] == [each.attribute for each in BROKER_SETTINGS.values()]


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

    lines = ["# " + line for line in textwrap.wrap(setting.doc, 110)]
    names = [synonym.name for synonym in setting.synonyms] or [setting.name]
    on_topic = f" On a topic: {setting.name}." if setting.scope is Scope.TOPIC else ""
    lines.append(f"# {setting.kind.value}, {setting.valid}.{on_topic}")
    if len(names) > 1:
        lines.append(f"# Asked only when {names[0]} is not set: {', then '.join(names[1:])}.")
    unless = "# " if setting.matters_when_set else ""
    return [*lines, unless + dump_toml({names[0]: setting.default}).rstrip()]
