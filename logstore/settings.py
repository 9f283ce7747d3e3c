"""Every topic and broker setting, in one table: name, type, default, doc, the broker names of its default, range.

Validation, `LogConfig`, `BrokerConfig`, `conf/duramen.toml` and the `config` command are all made from `SETTINGS`.
Names, defaults and ranges are Kafka's; `segment.bytes` is accepted from 14 up, as a topic's could be in Kafka 4.0.
"""

from __future__ import annotations

import sys
from typing import Any

from logstore.errors import UnknownConfig
from logstore.limits import INT64_MAX
from logstore.setting import Kind, Scope, Setting, Synonym, Value, shown

_MINUTE_MS = 60_000
_HOUR_MS = 3_600_000
_DOUBLE_MAX = sys.float_info.max
_WRITTEN_WITH_THE_CHANGE = "offsets are written with every change, not from time to time"


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
        "Records of a topic that its writer appended and did not flush yet, from which on it flushes the logs. Nothing "
        "depends on it for durability: a commit is on disk in staging before it is visible.",
        "log.flush.interval.messages",
        minimum=1,
    ),
    _topic(
        "flush.ms",
        Kind.LONG,
        INT64_MAX,
        "Age of unflushed records from which on their writer flushes the logs, at its next append or, in the sink, "
        "by itself. A writer flushes after five seconds (the sink after one) in any case.",
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
        "Size of a partition above which its oldest segments are deleted; a negative value means no limit.",
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
        "Create a segment's file at its full size. Here files grow as they are written; where this is set, recovery "
        "cuts the zeros that a broker left at the end of one.",
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
        "Memory for the read and write buffers of all cleaner threads together, half of it to read and half to write; "
        "each thread takes 4 MiB to read and 4 MiB to write where it is not set, and never more.",
        minimum=0,
        matters_when_set=True,
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
        no_effect=_WRITTEN_WITH_THE_CHANGE,
    ),
    _broker(
        "log.flush.start.offset.checkpoint.interval.ms",
        Kind.INT,
        60_000,
        "How often log start offsets are written.",
        minimum=0,
        no_effect=_WRITTEN_WITH_THE_CHANGE,
    ),
    _broker(
        "replica.high.watermark.checkpoint.interval.ms",
        Kind.LONG,
        5_000,
        "How often high watermarks are written.",
        no_effect=_WRITTEN_WITH_THE_CHANGE,
    ),
    _broker(
        "num.recovery.threads.per.data.dir",
        Kind.INT,
        2,
        "Partitions that `duramen verify` checks side by side; one at a time where it is not set. Opening a store "
        "loads nothing, and `recover` repairs one partition at a time.",
        minimum=1,
        matters_when_set=True,
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
        return served[-1]  # of two meanings the broker's own, which comes after the topic's
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
        f"no {noun} is called {shown(name)}",
        file=file,
        hint=f"Did you mean {near[0]}?" if near else "`duramen config` lists them all.",
    )
