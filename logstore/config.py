"""The settings in force: of one topic (`LogConfig`), of a store (`BrokerConfig`), and where each value comes from.

Nothing here touches a log, and nothing heavy is imported: commands that only look at settings must start at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from logstore.errors import InvalidConfig
from logstore.setting import Setting, Value, parse_value
from logstore.settings import BROKER_SETTINGS, STORE_FILE_NAMES, TOPIC_SETTINGS, store_setting, topic_setting

_DEDUPE_BYTES_PER_THREAD_MIN = 1 << 20


class Source(Enum):
    """Where a value in force comes from, strongest first."""

    TOPIC = "topic override"
    STORE_FILE = "store file"
    DEFAULT = "default"
    #: not known, and it could delete: held back until it is given
    UNKNOWN = "settings unknown"


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


#: in force while a topic's own settings are not known: nothing of it is deleted
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


# A field without a row, or a row without a field, is a bug: fail at import, not at the first use.
assert [each.name for each in fields(LogConfig)] == [each.attribute for each in TOPIC_SETTINGS.values()]
assert [each.name for each in fields(BrokerConfig)] == [each.attribute for each in BROKER_SETTINGS.values()]
