"""Rows that cannot be written: found by column, taken out, and made records of the dead-letter topic. Imports no Spark.

Good rows are only ever looked at as columns. A dead letter has the row's key, value and headers as far as they fit,
and added headers that say why it is here and where it was to go.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from logstore.commit.staging import EncodeOptions, StagedWriter, TopicTarget
from logstore.errors import InvalidTopic, RecordTooLarge
from logstore.limits import INT64_MAX
from logstore.partition.validation import codec_level, topic_codec_id
from logstore.records.arrow import columns_of_batch
from logstore.records.compression import codec_by_name
from logstore.records.encoder import BatchOptions, Encoder
from logstore.records.table import HEADER_BYTES, SIZE
from logstore.topic import check_topic_name

PREFIX = "duramen.dead."
NULL_KEY = "null_key"
TOO_LARGE = "record_too_large"
BAD_PARTITION = "invalid_partition"
BAD_TIMESTAMP = "invalid_timestamp"
BAD_HEADERS = "invalid_headers"
UNKNOWN_TOPIC = "unknown_topic"
_REASONS = ("", NULL_KEY, BAD_PARTITION, BAD_TIMESTAMP, BAD_HEADERS, TOO_LARGE, UNKNOWN_TOPIC)

#: of a record and its batch beside its bytes, and of each header: never less than that
_RECORD_BYTES = HEADER_BYTES + 36
_HEADER_BYTES = 10
#: of a dead letter kept free for the headers that are added
_OWN_BYTES = 2048
_TEXT_CHARS_MAX = 300

_HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
Codes = npt.NDArray[np.int8]


@dataclass(frozen=True, slots=True)
class DeadLetters:
    """Where they go, and whose batch they come from."""

    target: TopicTarget
    app_id: str | None = None
    batch_id: int | None = None


def write_sifted(
    writer: StagedWriter,
    letters: DeadLetters,
    target: TopicTarget,
    rows: pa.RecordBatch,
    partitions: pa.Array | None,
    options: EncodeOptions,
) -> int:
    """Write the rows, and those that cannot be written to the dead-letter topic; returns how many these are."""
    codes = faults(rows, partitions, target, options, writer.now_ms)
    if codes is None:
        writer.write(target, rows, partitions)
        return 0
    good = pa.array(codes == 0)
    if good.true_count:
        writer.write(target, rows.filter(good), None if partitions is None else partitions.filter(good))
    bad = pa.array(codes != 0)
    _write_dead(
        writer,
        letters,
        target.name,
        rows.filter(bad),
        None if partitions is None else partitions.filter(bad),
        codes[codes != 0],
    )
    return int(bad.true_count)


def write_unknown_topic(
    writer: StagedWriter, letters: DeadLetters, topic: str, rows: pa.RecordBatch, partitions: pa.Array | None
) -> int:
    """All these rows name a topic that does not exist."""
    codes = np.full(rows.num_rows, _REASONS.index(UNKNOWN_TOPIC), dtype=np.int8)
    _write_dead(writer, letters, topic, rows, partitions, codes)
    return int(rows.num_rows)


def could_be_topic(name: str) -> bool:
    try:
        check_topic_name(name)
    except InvalidTopic:
        return False
    return True


# --- finding them ----------------------------------------------------------------------------------------------------


def faults(
    rows: pa.RecordBatch, partitions: pa.Array | None, target: TopicTarget, options: EncodeOptions, now_ms: int
) -> Codes | None:
    """What is wrong with each row, as an index into the reasons; None when nothing is with any."""
    found: list[tuple[str, npt.NDArray[np.bool_]]] = []
    names = rows.schema.names
    if target.config.compact:
        keys = rows.column("key") if "key" in names else pa.nulls(rows.num_rows)
        if keys.null_count:
            found.append((NULL_KEY, _mask(pc.is_null(keys))))
    if partitions is not None and partitions.null_count < len(partitions):
        asked = partitions.cast(pa.int64())
        lowest, highest = pc.min_max(asked).as_py().values()
        if lowest < 0 or highest >= target.partitions:
            wrong = pc.or_(pc.less(asked, 0), pc.greater_equal(asked, target.partitions))
            found.append((BAD_PARTITION, _mask(wrong)))
    if "timestamp" in names:
        outside = _outside(rows.column("timestamp"), target, now_ms)
        if outside is not None:
            found.append((BAD_TIMESTAMP, outside))
    if "headers" in names:
        nameless = _nameless(rows.column("headers"))
        if nameless is not None:
            found.append((BAD_HEADERS, nameless))
    codes: Codes = np.zeros(rows.num_rows, dtype=np.int8)
    for reason, mask in reversed(found):  # the first one counts
        codes[mask] = _REASONS.index(reason)
    for row in _suspects(rows, target):
        if not codes[row] and _is_too_large(rows.slice(row, 1), target, options, now_ms):
            codes[row] = _REASONS.index(TOO_LARGE)
    return codes if codes.any() else None


def _mask(found: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(pc.fill_null(found, False).to_numpy(zero_copy_only=False), dtype=np.bool_)


def _milliseconds(times: pa.Array, instead: int) -> npt.NDArray[np.int64]:
    """The times, and `instead` of nulls."""
    per_ms = {"us": 1000, "ns": 1_000_000}.get(times.type.unit, 1) if pa.types.is_timestamp(times.type) else 1
    values = pc.fill_null(times.cast(pa.int64()), instead * per_ms).to_numpy(zero_copy_only=False)
    return np.asarray(values if per_ms == 1 else values // per_ms, dtype=np.int64)


def _outside(times: pa.Array, target: TopicTarget, now_ms: int) -> npt.NDArray[np.bool_] | None:
    if pa.types.is_null(times.type) or not len(times):
        return None
    config = target.config
    low, high = 0, INT64_MAX
    if config.message_timestamp_type == "CreateTime":
        low = max(now_ms - config.message_timestamp_before_max_ms, 0)
        high = min(now_ms + config.message_timestamp_after_max_ms, INT64_MAX)
    ms = _milliseconds(times, now_ms)
    if int(ms.min()) >= low and int(ms.max()) <= high:
        return None
    return (ms < low) | (ms > high)


def _nameless(headers: pa.Array) -> npt.NDArray[np.bool_] | None:
    """Rows with a header that is null or has no key."""
    entries = headers.flatten()
    if not len(entries) or not (entries.null_count or entries.field("key").null_count):
        return None
    wrong = pc.or_(pc.is_null(entries), pc.is_null(pc.struct_field(entries, "key")))
    mask = np.zeros(len(headers), dtype=np.bool_)
    mask[pc.list_parent_indices(headers).filter(wrong).to_numpy(zero_copy_only=False)] = True
    return mask


def _limit(target: TopicTarget) -> int:
    return min(target.config.max_message_bytes, target.config.segment_bytes)


def _suspects(rows: pa.RecordBatch, target: TopicTarget) -> list[int]:
    """Rows that may be too large; all others are certainly not."""
    limit = _limit(target)
    if rows.nbytes + _RECORD_BYTES <= limit:
        return []
    sizes = np.full(rows.num_rows, _RECORD_BYTES, dtype=np.int64)
    for name in ("key", "value"):
        if name in rows.schema.names:
            sizes += _lengths(rows.column(name))
    if "headers" in rows.schema.names and not pa.types.is_null(rows.column("headers").type):
        headers = rows.column("headers")
        entries = headers.flatten()
        if len(entries):
            each = _lengths(pc.struct_field(entries, "key")) + _lengths(pc.struct_field(entries, "value"))
            owners = pc.list_parent_indices(headers).to_numpy(zero_copy_only=False)
            np.add.at(sizes, owners, each + _HEADER_BYTES)
    return [int(row) for row in np.flatnonzero(sizes > limit)]


def _lengths(column: pa.Array) -> npt.NDArray[np.int64]:
    if pa.types.is_null(column.type):
        return np.zeros(len(column), dtype=np.int64)
    return np.asarray(pc.fill_null(pc.binary_length(column), 0).to_numpy(zero_copy_only=False), dtype=np.int64)


def _is_too_large(row: pa.RecordBatch, target: TopicTarget, options: EncodeOptions, now_ms: int) -> bool:
    """By encoding it alone: compression may make it fit."""
    codec_id = topic_codec_id(target.config, codec_by_name(options.compression_type).id)
    level = codec_level(target.config, codec_id) if codec_id else None
    encoder = Encoder(BatchOptions(codec_id=codec_id, level=level, default_timestamp_ms=now_ms))
    try:
        return any(
            int(batches.table[:, SIZE].max()) > _limit(target) for batches in encoder.encode(columns_of_batch(row))
        )
    except RecordTooLarge:
        return True


# --- writing them ----------------------------------------------------------------------------------------------------


def _write_dead(
    writer: StagedWriter,
    letters: DeadLetters,
    topic: str,
    rows: pa.RecordBatch,
    partitions: pa.Array | None,
    codes: Codes,
) -> None:
    names = rows.schema.names
    count = rows.num_rows
    keys = rows.column("key").cast(pa.binary()) if "key" in names else pa.nulls(count, pa.binary())
    values = rows.column("value").cast(pa.binary())
    times: list[int | None] = [None] * count
    outside = None
    if "timestamp" in names and not pa.types.is_null(rows.column("timestamp").type):
        given = rows.column("timestamp")
        outside = _outside(given, letters.target, writer.now_ms)
        valid = given.is_valid().to_pylist()
        times = [ms if ok else None for ms, ok in zip(_milliseconds(given, 0).tolist(), valid, strict=True)]
    headers = rows.column("headers").to_pylist() if "headers" in names else [None] * count
    asked = [None] * count if partitions is None else partitions.to_pylist()
    room = _limit(letters.target) - _RECORD_BYTES - _OWN_BYTES
    made: dict[str, list[Any]] = {"key": [], "value": [], "timestamp": [], "headers": []}
    for row in range(count):
        facts = {
            "reason": _REASONS[codes[row]],
            "topic": topic[:_TEXT_CHARS_MAX],
            "partition": asked[row],
            "timestamp": times[row],
            "app_id": None if letters.app_id is None else letters.app_id[:_TEXT_CHARS_MAX],
            "batch_id": letters.batch_id,
        }
        key, value, kept, left_out = _fitting(keys[row].as_py(), values[row].as_py(), headers[row] or [], room)
        facts["left_out"] = ",".join(left_out) or None
        own = [{"key": PREFIX + name, "value": str(fact).encode()} for name, fact in facts.items() if fact is not None]
        made["key"].append(key)
        made["value"].append(value)
        made["timestamp"].append(None if outside is not None and outside[row] else times[row])
        made["headers"].append(kept + own)
    kinds = {"key": pa.binary(), "value": pa.binary(), "timestamp": pa.int64(), "headers": _HEADERS}
    batch = pa.RecordBatch.from_arrays([pa.array(made[name], kind) for name, kind in kinds.items()], names=list(kinds))
    writer.write(letters.target, batch)


def _fitting(
    key: bytes | None, value: bytes | None, headers: list[dict[str, Any] | None], room: int
) -> tuple[bytes | None, bytes | None, list[dict[str, Any]], list[str]]:
    """What fits of a row, and what had to be left out."""
    kept = [each for each in headers if each is not None and each["key"] is not None]
    left_out = [] if len(kept) == len(headers) else ["some headers"]
    size = sum(len(each["key"].encode()) + len(each["value"] or b"") + _HEADER_BYTES for each in kept)
    if len(key or b"") + len(value or b"") + size > room:
        left_out.append(f"value of {len(value or b'')} bytes")
        value = None
    if len(key or b"") + size > room:
        left_out.append(f"{len(kept)} headers")
        kept, size = [], 0
    if len(key or b"") > room:
        left_out.append(f"key of {len(key or b'')} bytes")
        key = None
    return key, value, kept, left_out
