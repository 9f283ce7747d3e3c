"""The bytes of the ledger: commit files that are a Delta table to everybody else, and the summary of a version.

    ledger/commits/_delta_log/00000000000000000012.json
        {"commitInfo":{…,"duramen":"<sealed document: the rows of this commit>"}}
        {"txn":{"appId":"topic:ID","version":SEQUENCE}} {"txn":{"appId":"app:NAME","version":BATCH}} …

Version 0 has `protocol` and `metaData` besides. What we read is the sealed document alone; Delta's readers see the
transactions. The summary is the same rows of a whole view, compressed.
"""

from __future__ import annotations

import base64
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from logstore.bucket.rows import NO_TOPIC, Aborted, Kind, LedgerView, PlanRef, TopicRow, Transactions
from logstore.directory.sealed import seal, unseal
from logstore.errors import AppendTooLarge, CorruptState, LedgerError
from logstore.ledger.ledger import APP, COUNTED, TOPIC
from logstore.ledger.rows import COMMITS, CommitRow
from logstore.limits import INT64_MAX, Limits
from logstore.objects.objects import check_key
from logstore.topics.registry import topic_document, topic_from

VERSION = 1
LOG = "ledger/commits/_delta_log"
SUMMARY = "ledger/summary"
#: an older one, behind which every commit file is still there; for `recover`
SUMMARY_COPY = "ledger/summary-copy"
#: `name:NAME` changes whenever a topic of that name comes or goes, `sweep` with each fence of a sweep
NAME, SWEEP = "name:", "sweep"
_SIZES = (1, 2, 4, 8)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a commit says. All its rows have one clock, one plan and one app."""

    rows: tuple[TopicRow, ...]
    nonce: str
    #: a fence of a sweep
    is_sweep: bool = False
    #: for people and reports: timings, workers, records; no decision rests on it
    details: Mapping[str, object] = field(default_factory=dict)


def commit_key(version: int) -> str:
    return f"{LOG}/{version:020d}.json"


def encode_commit(entry: Entry, seen: LedgerView | None, *, now_ms: int, limits: Limits) -> bytes:
    """The commit that follows `seen`; None: the ledger's first. Raises AppendTooLarge."""
    version = 0 if seen is None else seen.version + 1
    document = {
        "nonce": entry.nonce,
        "ledger_version": version,
        "sweep": entry.is_sweep,
        "rows": [_row_document(row, None, _more(row)) for row in entry.rows],
        "details": dict(entry.details),
    }
    sealed = seal(document, version=VERSION).decode()
    operation = {"operation": "DURAMEN", "operationParameters": {}, "engineInfo": "duramen", "duramen": sealed}
    actions: list[dict[str, object]] = [{"commitInfo": {"timestamp": now_ms, **operation}}]
    if seen is None:
        actions += _table(entry.nonce, now_ms)
    transactions = _transactions(entry, seen)
    actions += [
        {"txn": {"appId": name, "version": number, "lastUpdated": now_ms}} for name, number in transactions.items()
    ]
    data = "".join(json.dumps(action, separators=(",", ":"), allow_nan=False) + "\n" for action in actions).encode()
    if len(data) > limits.side_file_bytes:
        raise AppendTooLarge(
            f"a commit of {len(data)} bytes; the largest that can be read has {limits.side_file_bytes}"
        )
    return data


def decode_commit(data: bytes, version: int, *, limits: Limits) -> Entry:
    """Raises LedgerError, StoreVersionError."""
    key = commit_key(version)
    try:
        document = unseal(_sealed(data, limits), version=VERSION, file=key)
        if document["ledger_version"] != version:
            raise ValueError(f"it is of version {document['ledger_version']}")
        rows = tuple(_row(each, {}) for each in _list(document["rows"]))
        details = document["details"]
        if not isinstance(details, dict) or not isinstance(document["sweep"], bool):
            raise ValueError("details or sweep of another type")
        return Entry(rows, _text(document["nonce"]), document["sweep"], details)
    except (KeyError, TypeError, ValueError, RecursionError, CorruptState) as error:
        raise LedgerError(f"a malformed commit: {error}", file=key) from None


def encode_summary(view: LedgerView, nonce: str, *, limits: Limits) -> bytes:
    """Raises LedgerError beyond the limit."""
    known: dict[str, tuple[int, ...]] = {}
    rows = []
    for row in view.rows:
        more = np.array(row.end_offsets, dtype=np.int64) - np.array(row.base_offsets, dtype=np.int64)
        rows.append(_row_document(row, known.get(row.topic_id), _packed(more)))
        known[row.topic_id] = row.end_offsets
    document = {
        "rows": rows,
        "sweeps": view.sweeps,
        "definitions": [topic_document(topic) for topic in view.definitions.values()],
        "unstable": {topic_id: [list(pair) for pair in pairs] for topic_id, pairs in view.unstable.items()},
    }
    packed = zlib.compress(json.dumps(document, separators=(",", ":")).encode(), 1)
    data = seal(
        {"ledger_version": view.version, "nonce": nonce, "view": base64.b64encode(packed).decode()}, version=VERSION
    )
    if len(data) > limits.side_file_bytes:
        raise LedgerError(f"a summary of {len(data)} bytes; the limit is {limits.side_file_bytes}", file=SUMMARY)
    return data


def decode_summary(data: bytes, *, limits: Limits) -> LedgerView:
    """Raises LedgerError, StoreVersionError."""
    try:
        if len(data) > limits.side_file_bytes:
            raise ValueError(f"{len(data)} bytes; the limit is {limits.side_file_bytes}")
        document = unseal(data, version=VERSION, file=SUMMARY)
        unpacker = zlib.decompressobj()
        inner = unpacker.decompress(base64.b64decode(_text(document["view"], len(data))), limits.decompressed_bytes)
        if not unpacker.eof:
            raise ValueError("it is larger than the limit once it is unpacked")
        content = json.loads(inner)
        known: dict[str, tuple[int, ...]] = {}
        rows = tuple(_row(each, known) for each in _list(content["rows"]))
        topics = [topic_from(each, file=SUMMARY) for each in _list(content["definitions"])]
        return LedgerView(
            _number(document["ledger_version"]),
            rows,
            _number(content["sweeps"]),
            {topic.id: topic for topic in topics},
            {_text(topic_id): _unstable(pairs) for topic_id, pairs in dict(content.get("unstable", {})).items()},
        )
    except (KeyError, TypeError, ValueError, RecursionError, zlib.error, CorruptState) as error:
        raise LedgerError(f"a malformed summary: {error}", file=SUMMARY) from None


def commit_rows(entry: Entry, version: int, view: LedgerView) -> list[CommitRow]:
    """What a commit says of batches, as the ledger of a directory has it; `view` is of that version or newer."""
    details = entry.details
    timings, sizes = details.get("timings_ms"), details.get("bytes")
    workers, dead_letters = details.get("workers"), details.get("dead_letters")
    found = []
    for row in entry.rows:
        if row.kind not in (Kind.BATCH, Kind.EMPTY):
            continue
        topic = view.definitions.get(row.topic_id)
        found.append(
            CommitRow(
                version=version,
                topic_id=row.topic_id,
                topic="" if topic is None else topic.name,
                sequence=row.sequence,
                plan_id=str(details.get("plan_id")),
                app_id=row.app_id,
                batch_id=row.batch_id,
                query_id=row.query_id,
                base_offsets=row.base_offsets,
                end_offsets=row.end_offsets,
                records=sum(row.end_offsets) - sum(row.base_offsets),
                size_bytes=_whole(sizes.get(row.topic_id)) if isinstance(sizes, dict) else 0,
                dead_letters=_whole(dead_letters),
                timings_ms={str(step): _whole(spent) for step, spent in timings.items()}
                if isinstance(timings, dict)
                else {},
                workers=tuple(map(str, workers)) if isinstance(workers, list) else (),
                void=False,
                committed_ms=row.clock_ms,
                engine=str(details.get("engine")),
            )
        )
    return found


def _whole(value: object) -> int:
    """For what is only shown."""
    return value if type(value) is int else 0


# --- rows ------------------------------------------------------------------------------------------------------------


def _row_document(row: TopicRow, known: Sequence[int] | None, more: object) -> dict[str, object]:
    """Ends as what they have more than bases; bases are left out where they are `known`."""
    document: dict[str, object] = {
        "topic": row.topic_id,
        "sequence": row.sequence,
        "kind": row.kind.value,
        "config": row.config_version,
        "clock": row.clock_ms,
        "more": more,
    }
    if row.base_offsets != known:
        document["base"] = list(row.base_offsets)
    if row.plan is not None:
        document["plan"] = [row.plan.key, row.plan.size_bytes, row.plan.crc, [list(each) for each in row.plan.topics]]
    if row.app_id is not None:
        document["app"] = [row.app_id, row.batch_id, row.query_id]
    if row.definition is not None:
        document["definition"] = topic_document(row.definition)
    if row.transactions is not None:
        aborted = [[a.partition, a.producer_id, a.first_offset, a.last_stable_offset] for a in row.transactions.aborted]
        document["transactions"] = [[list(each) for each in row.transactions.unstable], aborted]
    return document


def _row(document: object, known: dict[str, tuple[int, ...]]) -> TopicRow:
    if not isinstance(document, dict):
        raise ValueError("a row is not an object")
    topic_id = _text(document["topic"])
    packed = document["more"]
    more = _unpacked(packed) if isinstance(packed, str) else [_number(each) for each in _list(packed)]
    bases = known[topic_id] if "base" not in document else tuple(_number(each) for each in _list(document["base"]))
    # One object where nothing came: rows of many partitions share most of what they have.
    ends = tuple(base + each for base, each in zip(bases, more, strict=True)) if any(more) else bases
    known[topic_id] = ends
    app_id, batch_id, query_id = document.get("app", (None, None, None))
    return TopicRow(
        topic_id,
        _number(document["sequence"]),
        Kind(document["kind"]),
        _number(document["config"]),
        bases,
        ends,
        _number(document["clock"]),
        _plan(document.get("plan")),
        None if app_id is None else _text(app_id),
        None if batch_id is None else _number(batch_id),
        None if query_id is None else _text(query_id),
        topic_from(document["definition"], file="definition") if "definition" in document else None,
        _transactions_of(document["transactions"], len(ends)) if "transactions" in document else None,
    )


def _more(row: TopicRow) -> list[int]:
    return [end - base for base, end in zip(row.base_offsets, row.end_offsets, strict=True)]


def _packed(numbers: npt.NDArray[np.int64]) -> str:
    """A summary has a great many rows, and a row a number for each partition: as bytes, the first is their size."""
    size = next(size for size in _SIZES if not len(numbers) or numbers.max() < 1 << 8 * size)
    return f"{size}{base64.b64encode(numbers.astype(f'<u{size}').tobytes()).decode()}"


def _unpacked(text: str) -> list[int]:
    if text[:1] not in {str(size) for size in _SIZES}:
        raise ValueError("numbers of no size")
    found: list[int] = np.frombuffer(base64.b64decode(text[1:], validate=True), dtype=f"<u{text[0]}").tolist()
    if found and max(found) > INT64_MAX:
        raise ValueError("a number that is none")
    return found


def _transactions_of(value: object, partitions: int) -> Transactions:
    unstable, aborted = _list(value)
    found = Transactions(_unstable(unstable), tuple(Aborted(*map(_number, _list(each))) for each in _list(aborted)))
    if any(partition >= partitions for partition, _ in found.unstable) or any(
        each.partition >= partitions for each in found.aborted
    ):
        raise ValueError("a transaction of a partition that the topic does not have")
    return found


def _unstable(value: object) -> tuple[tuple[int, int], ...]:
    pairs = (_list(each) for each in _list(value))
    return tuple((_number(partition), _number(offset)) for partition, offset in pairs)


def _plan(value: object) -> PlanRef | None:
    if value is None:
        return None
    key, size, crc, topics = _list(value)
    pairs = (_list(each) for each in _list(topics))
    return PlanRef(
        check_key(_text(key)),
        _number(size),
        _number(crc),
        tuple((_text(topic_id), _number(sequence)) for topic_id, sequence in pairs),
    )


def _sealed(data: bytes, limits: Limits) -> bytes:
    if len(data) > limits.side_file_bytes:
        raise ValueError(f"{len(data)} bytes; the limit is {limits.side_file_bytes}")
    for line in data.splitlines():
        action = json.loads(line)
        if isinstance(action, dict) and isinstance(action.get("commitInfo"), dict):
            return _text(action["commitInfo"]["duramen"], len(data)).encode()
    raise ValueError("no commit of ours")


def _list(value: object) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("not a list")
    return value


def _number(value: object) -> int:
    if type(value) is not int or not 0 <= value <= INT64_MAX:
        raise ValueError(f"{value!r} is not a number from 0 on")
    return value


def _text(value: object, most: int = 4096) -> str:
    if not isinstance(value, str) or len(value) > most:
        raise ValueError("not a text, or too long")
    return value


# --- Delta -----------------------------------------------------------------------------------------------------------


def _transactions(entry: Entry, seen: LedgerView | None) -> dict[str, int]:
    found: dict[str, int] = {}
    for row in entry.rows:
        if row.topic_id != NO_TOPIC:
            found[TOPIC + row.topic_id] = row.sequence
        if row.app_id is not None and row.batch_id is not None:
            found[APP + row.app_id] = found[COUNTED + row.app_id] = row.batch_id
        if seen is not None and row.kind in (Kind.DEFINED, Kind.ENDED):
            topic = row.definition or seen.definitions.get(row.topic_id)
            if topic is not None:
                found[NAME + topic.name] = seen.version + 1
    if entry.is_sweep:
        found[SWEEP] = (seen.sweeps if seen is not None else 0) + 1
    return found


def _table(nonce: str, now_ms: int) -> list[dict[str, object]]:
    schema = {
        "type": "struct",
        "fields": [
            {"name": column.name, "type": _delta_type(column.type), "nullable": True, "metadata": {}}
            for column in COMMITS
        ],
    }
    return [
        {"protocol": {"minReaderVersion": 1, "minWriterVersion": 2}},
        {
            "metaData": {
                "id": nonce,
                "format": {"provider": "parquet", "options": {}},
                "schemaString": json.dumps(schema, separators=(",", ":")),
                "partitionColumns": [],
                "configuration": {},
                "createdTime": now_ms,
            }
        },
    ]


def _delta_type(kind: pa.DataType) -> object:
    if pa.types.is_list(kind):
        return {"type": "array", "elementType": _delta_type(kind.value_type), "containsNull": True}
    if pa.types.is_map(kind):
        sides = {"keyType": _delta_type(kind.key_type), "valueType": _delta_type(kind.item_type)}
        return {"type": "map", **sides, "valueContainsNull": True}
    return {pa.int64(): "long", pa.string(): "string", pa.bool_(): "boolean"}[kind]
