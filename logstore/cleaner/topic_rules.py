"""A topic's settings as the cleaner's rules, whatever kind of store the topic lies in."""

from __future__ import annotations

from logstore.cleaner.eligibility import CleanerRules
from logstore.cleaner.work import CleaningOptions
from logstore.config import LogConfig
from logstore.records.compression import codec_by_name


def recompress_codec_id(config: LogConfig) -> int | None:
    """The codec compaction gives to cold data; None: it leaves it as it is."""
    name = config.duramen_compaction_recompress_type
    if name == "producer":
        return None
    return codec_by_name("none" if name == "uncompressed" else name).id


def rules_of(config: LogConfig) -> CleanerRules:
    recompresses = recompress_codec_id(config) is not None
    return CleanerRules(
        config.min_cleanable_dirty_ratio,
        config.min_compaction_lag_ms,
        config.max_compaction_lag_ms,
        key_ttl_ms=max(config.duramen_key_ttl_ms, 0),
        recompress_after_ms=config.duramen_compaction_recompress_after_ms if recompresses else None,
    )


def options_of(config: LogConfig) -> CleaningOptions:
    return CleaningOptions(
        merge_bytes=config.duramen_compaction_merge_bytes,
        recompress_codec_id=recompress_codec_id(config),
        recompress_after_ms=config.duramen_compaction_recompress_after_ms,
        key_ttl_ms=max(config.duramen_key_ttl_ms, 0),
    )
