"""Options of the data source, under the names of Spark's Kafka source; parsed once, errors name the nearest option.

Each option has one name. Case, `_`, `.` and `-` in it do not matter: `app_id`, `appId` and `app.id` are the same.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from logstore.commit.apps import Adopt
from logstore.errors import InvalidConfig, UnknownConfig
from logstore.objects.opening import is_url
from logstore.objects.remote import plain_options
from logstore.records.encoder import BATCH_BYTES

EARLIEST = -2
LATEST = -1
#: beside the topics in the JSON of offsets; no topic can have this name
IDS = "@ids"

#: topic -> partition -> offset (or timestamp)
Offsets = dict[str, dict[int, int]]

_READ = (
    "store",
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "endingOffsets",
    "startingOffsetsByTimestamp",
    "endingOffsetsByTimestamp",
    "startingTimestamp",
    "endingTimestamp",
    "startingOffsetsByTimestampStrategy",
    "failOnDataLoss",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "groupIdPrefix",
    "includeHeaders",
    "isolationLevel",
)
_WRITE = (
    "store",
    "topic",
    "app_id",
    "batch_id",
    "query_id",
    "compression.type",
    "batch.size",
    "adopt",
    "deadLetterTopic",
)
#: what Spark adds to the options of a stream that is written
_OF_SPARK = ("checkpointLocation",)
#: `load(path)`, `save(path)` and `start(path)` name the store
_PATH = "path"
#: `storage.endpoint` and the like: how a bucket is reached
_STORAGE = "storage."
#: as Spark's Kafka source has it
_TRIGGER_DELAY_MS = 15 * 60_000
_UNITS_MS = {"": 1, "ms": 1, "s": 1000, "m": 60_000, "min": 60_000, "h": 3_600_000, "d": 86_400_000}


@dataclass(frozen=True, slots=True)
class Boundary:
    """Where reading begins or ends: everywhere the same (EARLIEST, LATEST), by partition, or by time."""

    everywhere: int | None = None
    offsets: Offsets | None = None
    timestamp_ms: int | None = None
    timestamps: Offsets | None = None
    #: topic -> id, where the offsets say whose they are
    topic_ids: dict[str, str] = field(default_factory=dict)


class StorageOptions(dict[str, str]):
    """How a bucket is reached. Secrets among them are in no pickle and no text: tasks take theirs from elsewhere."""

    def __reduce__(self) -> tuple[object, ...]:
        return StorageOptions, (plain_options(self),)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(sorted(self))})"


@dataclass(frozen=True, slots=True)
class ReadOptions:
    store: str
    subscribe: tuple[str, ...] = ()
    pattern: str | None = None
    assign: dict[str, tuple[int, ...]] = field(default_factory=dict)
    starting: Boundary = Boundary(EARLIEST)
    ending: Boundary = Boundary(LATEST)
    fail_on_data_loss: bool = True
    max_offsets_per_trigger: int | None = None
    min_offsets_per_trigger: int | None = None
    max_trigger_delay_ms: int = _TRIGGER_DELAY_MS
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    include_headers: bool = False
    committed: bool = False
    latest_when_no_timestamp: bool = False
    #: options `storage.NAME`, of a store in a bucket
    storage: StorageOptions = field(default_factory=StorageOptions)


@dataclass(frozen=True, slots=True)
class SinkOptions:
    """How a `LogSink` writes; the defaults suit most queries.

    A query seldom needs another choice than compression.

        LogSink("/data/store", "orders", app_id="orders-v1", options=SinkOptions(compression_type="zstd"))
    """

    #: compression.type and batch.size, as Kafka's producer has them
    compression_type: str = "none"
    batch_size: int = BATCH_BYTES
    #: the writer's id, instead of the streaming query's own
    query_id: str | None = None
    #: appended batches reach the disk at most this late; until then their staged copy is what survives a power cut
    flush_ms: int = 1000
    #: of a store in a bucket: endpoint, region and the like, under obstore's names. Secrets among them stay on the
    #: driver; executors take theirs from their environment or role
    storage_options: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True, slots=True)
class WriteOptions:
    store: str
    topic: str | None
    app_id: str | None
    batch_id: int | None
    query_id: str | None
    compression_type: str
    batch_size: int | None
    adopt: Adopt | bool | None
    dead_letter_topic: str | None = None
    #: options `storage.NAME`, of a store in a bucket
    storage: StorageOptions = field(default_factory=StorageOptions)


def _plain(name: str) -> str:
    return re.sub(r"[_.-]", "", name.lower())


def option_of(options: Mapping[str, str], name: str) -> str | None:
    """One option in any of its spellings, before all of them are checked."""
    return next((value for given, value in options.items() if _plain(given) == _plain(name)), None)


def _given(options: Mapping[str, str], known: tuple[str, ...]) -> dict[str, str]:
    """The options by their proper spelling. Raises UnknownConfig with the nearest name, InvalidConfig."""
    proper = {_plain(name): name for name in (*known, _PATH)}
    found: dict[str, str] = {}
    for name, value in options.items():
        if name.lower().startswith(_STORAGE):
            continue
        plain = _plain(name)
        if plain not in proper:
            near = difflib.get_close_matches(plain, proper, n=1)
            hint = f"Did you mean {proper[near[0]]}?" if near else f"Known options: {', '.join(known)}"
            raise UnknownConfig(f"there is no option {name!r}", hint=hint)
        if found.get(proper[plain], value) != value:
            raise InvalidConfig(f"option {proper[plain]} is given twice: {found[proper[plain]]!r} and {value!r}")
        found[proper[plain]] = value
    path = found.pop(_PATH, None)
    if path and os.path.abspath(found.setdefault("store", path)) != os.path.abspath(path):
        raise InvalidConfig(f"option 'store' is {found['store']!r}, but the path is {path!r}", hint="Give one of them")
    if not found.get("store"):
        raise InvalidConfig("option 'store' is missing", hint="Give the path of the store")
    if not is_url(found["store"]):
        found["store"] = os.path.abspath(found["store"])  # tasks run elsewhere
        if _storage(options):
            raise InvalidConfig(f"options {_STORAGE}… are for a store in a bucket, and the store is a path")
    return found


def _storage(options: Mapping[str, str]) -> StorageOptions:
    return StorageOptions(
        {name.lower()[len(_STORAGE) :]: value for name, value in options.items() if name.lower().startswith(_STORAGE)}
    )


def read_options(options: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    """Raises UnknownConfig, InvalidConfig."""
    given = _given(options, _READ)
    chosen = [name for name in ("subscribe", "subscribePattern", "assign") if name in given]
    if len(chosen) != 1:
        raise InvalidConfig(f"give exactly one of subscribe, subscribePattern, assign; there are {chosen or 'none'}")
    if streaming:
        for name in ("endingOffsets", "endingOffsetsByTimestamp", "endingTimestamp"):
            if name in given:
                raise InvalidConfig(f"{name} is for batch reads; a stream has no end")
    pattern = given.get("subscribePattern")
    if pattern is not None:
        try:
            re.compile(pattern)
        except re.error as error:
            raise InvalidConfig(f"subscribePattern is not a regular expression: {error}") from None
    starting = _boundary(given, "starting", default=LATEST if streaming else EARLIEST)
    ending = _boundary(given, "ending", default=LATEST)
    if ending.everywhere == EARLIEST or any(
        offset == EARLIEST for per in (ending.offsets or {}).values() for offset in per.values()
    ):
        raise InvalidConfig("endingOffsets cannot be earliest")
    if not streaming and starting.everywhere == LATEST:
        raise InvalidConfig("startingOffsets cannot be latest for a batch read")
    strategy = given.get("startingOffsetsByTimestampStrategy", "error")
    if strategy not in ("error", "latest"):
        raise InvalidConfig(f"startingOffsetsByTimestampStrategy is {strategy!r}; expected error or latest")
    most, least = _positive(given, "maxOffsetsPerTrigger"), _positive(given, "minOffsetsPerTrigger")
    if most is not None and least is not None and least > most:
        raise InvalidConfig(f"minOffsetsPerTrigger is {least}, above maxOffsetsPerTrigger, which is {most}")
    return ReadOptions(
        store=given["store"],
        subscribe=tuple(name.strip() for name in given.get("subscribe", "").split(",") if name.strip()),
        pattern=pattern,
        assign=_assign(given["assign"]) if "assign" in given else {},
        starting=starting,
        ending=ending,
        fail_on_data_loss=_boolean(given, "failOnDataLoss", True),
        max_offsets_per_trigger=most,
        min_offsets_per_trigger=least,
        max_trigger_delay_ms=_duration_ms(given, "maxTriggerDelay", _TRIGGER_DELAY_MS),
        min_partitions=_positive(given, "minPartitions"),
        max_records_per_partition=_positive(given, "maxRecordsPerPartition"),
        include_headers=_boolean(given, "includeHeaders", False),
        committed=_choice(given, "isolationLevel", ("read_uncommitted", "read_committed")) == "read_committed",
        latest_when_no_timestamp=strategy == "latest",
        storage=_storage(options),
    )


def write_options(options: Mapping[str, str], *, streaming: bool = False) -> WriteOptions:
    """Raises UnknownConfig, InvalidConfig."""
    given = _given(options, (*_WRITE, *_OF_SPARK) if streaming else _WRITE)
    batch_id = given.get("batch_id")
    if streaming and not given.get("app_id"):
        raise InvalidConfig(
            "a stream needs the option app_id",
            hint="It names the query for exactly-once; a lost checkpoint silently gives a query a new id",
        )
    for name in ("batch_id", "query_id"):
        if streaming and name in given:
            raise InvalidConfig(f"{name} is for batch writes; Spark says which batch of which query a stream writes")
    if batch_id is not None:
        _natural(batch_id, "batch_id")
    if batch_id is not None and "app_id" not in given:
        raise InvalidConfig("batch_id counts the batches of an app_id; give both or none")
    return WriteOptions(
        given["store"],
        given.get("topic"),
        given.get("app_id"),
        None if batch_id is None else int(batch_id),
        given.get("query_id"),
        given.get("compression.type", "none"),
        _positive(given, "batch.size"),
        _adopt(given.get("adopt")),
        given.get("deadLetterTopic"),
        _storage(options),
    )


def _adopt(text: str | None) -> Adopt | bool | None:
    """`true` is not enough: the error of the write says what to pass."""
    if text is None or text.lower() == "false":
        return None
    return True if text.lower() == "true" else Adopt.parse(text)


def _boundary(given: Mapping[str, str], side: str, *, default: int) -> Boundary:
    names = (f"{side}Timestamp", f"{side}OffsetsByTimestamp", f"{side}Offsets")
    timestamp, by_timestamp, offsets = (given.get(name) for name in names)
    if timestamp is not None:  # Spark's order of precedence
        return Boundary(timestamp_ms=_natural(timestamp, names[0]))
    if by_timestamp is not None:
        return Boundary(timestamps=_offsets(by_timestamp, names[1], lowest=0)[0])
    if offsets is None:
        return Boundary(default)
    word = offsets.strip().lower()
    if word in ("earliest", "latest"):
        return Boundary(EARLIEST if word == "earliest" else LATEST)
    found, topic_ids = _offsets(offsets, names[2], lowest=EARLIEST)
    return Boundary(offsets=found, topic_ids=topic_ids)


def _offsets(text: str, name: str, *, lowest: int) -> tuple[Offsets, dict[str, str]]:
    example = '{"topic": {"0": 23, "1": -2}}'
    try:
        document = json.loads(text)
        topic_ids = {str(topic): str(topic_id) for topic, topic_id in document.pop(IDS, {}).items()}
        parsed: Offsets = {}
        for topic, entries in document.items():
            parsed[topic] = {int(partition): offset for partition, offset in entries.items()}
            if len(parsed[topic]) < len(entries):
                raise ValueError(f"a partition of {topic} is listed twice")
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise InvalidConfig(f"{name} is not JSON of the form {example}: {error}") from None
    for topic, entries in parsed.items():
        for partition, offset in entries.items():
            if type(offset) is not int or offset < lowest or partition < 0:
                raise InvalidConfig(
                    f"{name} has {offset!r} for {topic}-{partition}; expected a number from {lowest} up"
                )
    return parsed, topic_ids


def _assign(text: str) -> dict[str, tuple[int, ...]]:
    example = '{"topic": [0, 1]}'
    try:
        document = json.loads(text)
        parsed = {str(topic): tuple(numbers) for topic, numbers in document.items() if isinstance(numbers, list)}
        if len(parsed) < len(document) or any(type(n) is not int for numbers in parsed.values() for n in numbers):
            raise ValueError("partitions are a list of numbers")
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise InvalidConfig(f"assign is not JSON of the form {example}: {error}") from None
    if not parsed or not all(parsed.values()):
        raise InvalidConfig(f"assign names no partition; expected {example}")
    return parsed


def _boolean(given: Mapping[str, str], name: str, default: bool) -> bool:
    text = str(given.get(name, default)).lower()
    if text not in ("true", "false"):
        raise InvalidConfig(f"{name} is {given[name]!r}; expected true or false")
    return text == "true"


def _choice(given: Mapping[str, str], name: str, choices: tuple[str, ...]) -> str:
    value = given.get(name, choices[0])
    if value not in choices:
        raise InvalidConfig(f"{name} is {value!r}; expected {' or '.join(choices)}")
    return value


def _positive(given: Mapping[str, str], name: str) -> int | None:
    if name not in given:
        return None
    number = _natural(given[name], name)
    if number == 0:
        raise InvalidConfig(f"{name} is 0; expected a number above 0")
    return number


def _duration_ms(given: Mapping[str, str], name: str, default: int) -> int:
    """As Spark writes durations: `15m`, `30s`, `500ms`; a number alone is milliseconds."""
    if name not in given:
        return default
    found = re.fullmatch(r"([0-9]{1,15})([a-z]*)", given[name].strip().lower())
    if found is None or found[2] not in _UNITS_MS:
        raise InvalidConfig(f"{name} is {given[name]!r}; expected a duration such as 500ms, 30s, 15m, 2h")
    return int(found[1]) * _UNITS_MS[found[2]]


def _natural(text: str, name: str) -> int:
    if not re.fullmatch(r"\s*[0-9]{1,19}\s*", str(text)):
        raise InvalidConfig(f"{name} is {text!r}; expected a number from 0 up")
    return int(text)
