#!/usr/bin/env python3
"""Writes the golden vectors in `tests/vectors` with Kafka's own code, never with ours.

- `batches_v2.json`, `batches_v1.json`, `batches_v0.json`: cases of a `name`, the bytes as `hex`, and `batches`: every
  header field and record as Kafka reads them back.
- `upconverted.json`: v0 and v1 sets (`source_hex`, base offset 0) as a leader of a v2 log stores them (`hex`,
  `batches`), with the topic settings and the clock.
- `directories.json`: partition directories that Kafka closed, each file's bytes, and what Kafka reads from them:
  index entries, snapshots, leader epochs, committed records.

Keys, values and header values are base64, or null, or {"repeat": [base64, times]} for long ones. A record is
[offset, timestamp, key, value, [[header name, header value], ...]]. Run again only for another Kafka; the compressed
bytes depend on the libraries in its jars and the JDK.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

if __name__ == "__main__":  # run as a script: the folder of the test modules is not on the path
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from conformance.build import BuildError
from conformance.kafka import Kafka, KafkaBatch, Op, batch, encoded, record

VECTORS = Path(__file__).resolve().parent.parent / "vectors"
NOW_MS = 1_700_000_000_000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
LEGACY_CODECS = CODECS[:4]
APPEND_TIME = {"message.timestamp.type": "LogAppendTime"}
#: 97 is prime: no block of any codec begins at the start of a repetition
UNIT = bytes((7 * i * i + i) % 251 for i in range(97))


def packed(data: bytes | None) -> Any:
    """JSON for a key or value; a long periodic one in short."""
    if data is None or len(data) < 1000:
        return encoded(data)
    for period in range(1, 257):
        if len(data) % period == 0 and data[:period] * (len(data) // period) == data:
            return {"repeat": [encoded(data[:period]), len(data) // period]}
    return encoded(data)


def plain(found: KafkaBatch) -> dict[str, Any]:
    fields = {f.name: getattr(found, f.name) for f in dataclasses.fields(found) if f.name not in ("file", "records")}
    fields["records"] = [
        [r.offset, r.timestamp_ms, packed(r.key), packed(r.value), [[n, packed(v)] for n, v in r.headers]]
        for r in found.records or ()
    ]
    return fields


TWO = [
    record(b"k1", b"v1", NOW_MS, [("h", b"x"), ("n", None)]),
    record(b"k2", None, NOW_MS + 5),
]
NULLS = [record(None, None, NOW_MS), record(b"", b"", NOW_MS), record(None, b"", NOW_MS), record(b"", None, NOW_MS)]
HEADERS = [
    record(b"k", b"v", NOW_MS, [("", b""), ("a", b"1"), ("a", b"2"), ("a", None), ("grüße-✓", b"\x00\xff")]),
    record(b"k", b"v", NOW_MS, [(f"h{i}", b"%d" % i) for i in range(70)]),
    record(b"k", b"v", NOW_MS),
]
TIMES = [
    record(b"a", b"1", NOW_MS),
    record(b"b", b"2", -1),
    record(b"c", b"3", NOW_MS - 3_000_000_000),
    record(b"d", b"4", NOW_MS + 3_000_000_000),
    record(b"e", b"5", 0),
    record(b"f", b"6", 2**63 - 1),
]
NO_TIME = [record(b"a", b"1", -1), record(b"b", b"2", -1)]
MANY = [record(b"key-%03d" % (i % 17), UNIT[: i % 31] if i % 7 else None, NOW_MS + i * i) for i in range(66)]
#: more than one block of 64 KiB (lz4), 32 KiB (snappy)
LONG = [record(b"long", UNIT * 700, NOW_MS), record(None, UNIT[:16] * 600, NOW_MS + 1)]
#: more than one block of 128 KiB (zstd)
LONGER = [record(b"longer", UNIT * 1400, NOW_MS)]


def v2_cases() -> Iterable[tuple[str, list[dict[str, Any]]]]:
    shapes = {"two": TWO, "nulls": NULLS, "headers": HEADERS, "timestamps": TIMES, "no_timestamp": NO_TIME}
    for codec in CODECS:
        for shape, records in shapes.items():
            yield f"{shape}_{codec}", [batch(records, codec=codec, base_offset=100)]
        yield f"many_{codec}", [batch(MANY, codec=codec, base_offset=2**40, leader_epoch=3)]
        if codec != "none":
            yield f"long_{codec}", [batch(LONG, codec=codec, base_offset=5)]
    for codec, level in [("gzip", 1), ("gzip", 9), ("lz4", 1), ("lz4", 9), ("lz4", 17)]:
        yield f"level_{codec}_{level}", [batch(MANY[:20], codec=codec, level=level)]
    for level in (-131072, -5, 1, 22):
        yield f"level_zstd_{level}", [batch(MANY[:20], codec="zstd", level=level)]
    yield "longer_zstd", [batch(LONGER, codec="zstd")]
    producer: dict[str, Any] = {"producer_id": 4711, "producer_epoch": 3, "base_sequence": 40}
    yield "idempotent", [batch(TWO, **producer)]
    yield "transactional_lz4", [batch(TWO, **producer, transactional=True, codec="lz4")]
    extreme: dict[str, Any] = {
        "producer_id": 2**63 - 1,
        "producer_epoch": 32767,
        "base_sequence": 2**31 - 1,
        "leader_epoch": 2**31 - 1,
    }
    yield "extreme_fields", [batch(TWO, **extreme, base_offset=2**62)]
    yield "widest_offset_delta", [batch([record(b"a", b"1", 0, offset=0), record(b"b", b"2", 1, offset=2**31 - 1)])]
    yield "widest_timestamp_delta", [batch([record(b"a", b"1", 0), record(b"b", b"2", 2**63 - 1)])]
    gaps = [record(b"a", b"1", NOW_MS, offset=103), record(b"b", b"2", NOW_MS, offset=107)]
    yield "gaps_after_compaction", [batch(gaps, base_offset=100, last_offset=120, **producer)]
    yield "log_append_time", [batch(TWO, timestamp_type="LogAppendTime", log_append_time_ms=NOW_MS + 999)]
    for codec in ("none", "zstd"):
        yield f"log_append_time_stamped_{codec}", [batch(TIMES[:4], stamp_append_time_ms=NOW_MS + 77, codec=codec)]
    for codec in ("none", "lz4"):
        yield f"delete_horizon_{codec}", [batch(TWO, delete_horizon_ms=NOW_MS + 86_400_000, codec=codec)]
    horizon: dict[str, Any] = {
        "delete_horizon_ms": NOW_MS + 1000,
        "timestamp_type": "LogAppendTime",
        "log_append_time_ms": NOW_MS,
    }
    yield "delete_horizon_log_append_time", [batch(TWO, **horizon)]
    marker: dict[str, Any] = {
        "producer_id": 9,
        "producer_epoch": 3,
        "transactional": True,
        "base_offset": 200,
        "leader_epoch": 7,
    }
    for kind in ("abort", "commit"):
        fields = {"type": kind, "coordinator_epoch": 11, "timestamp_ms": NOW_MS}
        yield f"marker_{kind}", [batch(marker=fields, **marker)]
        yield f"marker_{kind}_delete_horizon", [batch(marker=fields, **marker, delete_horizon_ms=NOW_MS + 5)]
    leader_change = record(b"\x00\x00\x00\x02", b"\x01\x02\x03", NOW_MS)
    yield "control_leader_change", [batch([leader_change], control=True, leader_epoch=1)]
    span: dict[str, Any] = {"empty": True, "base_offset": 100, "last_offset": 104, "max_timestamp_ms": NOW_MS + 5}
    yield "empty", [batch(**span)]
    yield "empty_of_producer", [batch(**span, **producer, leader_epoch=7)]
    yield "empty_transactional", [batch(**span, **producer, transactional=True, timestamp_type="LogAppendTime")]
    yield "empty_marker", [batch(**(span | marker | {"last_offset": 200}), control=True)]
    yield "empty_no_timestamp", [batch(empty=True, base_offset=1, last_offset=1)]
    yield (
        "several_batches",
        [batch(TWO, codec=codec, base_offset=10 * i, leader_epoch=i) for i, codec in enumerate(CODECS)],
    )


def without_headers(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{**r, "headers": []} for r in records]


def legacy_cases(magic: int) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    shapes = {"two": without_headers(TWO), "nulls": NULLS, "many": MANY[:16]}
    if magic == 1:
        shapes |= {"timestamps": TIMES[:5], "no_timestamp": NO_TIME}
    for codec in LEGACY_CODECS:
        fields = {"magic": magic, "codec": codec}
        for shape, records in shapes.items():
            yield f"{shape}_{codec}", [batch(records, base_offset=100, **fields)]
        yield f"offset_zero_{codec}", [batch([record(b"k", b"v", NOW_MS)], **fields)]
        gaps = [record(b"a", b"1", NOW_MS, offset=103), record(b"b", b"2", NOW_MS, offset=107)]
        yield f"gaps_{codec}", [batch(gaps, base_offset=100, **fields)]
        if codec != "none":
            yield f"long_{codec}", [batch(LONG, base_offset=5, **fields)]
        if magic == 1:
            times = {"timestamp_type": "LogAppendTime", "log_append_time_ms": NOW_MS + 999}
            yield f"log_append_time_{codec}", [batch(without_headers(TWO), base_offset=100, **fields, **times)]
    yield (
        "several_sets",
        [
            batch(without_headers(TWO), magic=magic, codec=codec, base_offset=10 * i)
            for i, codec in enumerate(LEGACY_CODECS)
        ],
    )


def batch_vectors(kafka: Kafka, cases: Iterable[tuple[str, list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    out = []
    for name, specs in cases:
        data = b"".join(kafka.build_batches(specs))
        out.append({"name": name, "hex": data.hex(), "batches": [plain(b) for b in kafka.read(data)]})
    return out


def upconverted(kafka: Kafka, scratch: Path) -> list[dict[str, Any]]:
    out = []
    for magic in (0, 1):
        for codec in LEGACY_CODECS:
            shapes = {"two": without_headers(TWO), "nulls": NULLS, "many": MANY[:10]}
            cases: list[tuple[str, list[dict[str, Any]], dict[str, str]]] = [
                (shape, records, {}) for shape, records in shapes.items()
            ]
            cases.append(("two_log_append_time", shapes["two"], APPEND_TIME))
            if codec == "none":
                cases.append(("two_to_zstd", shapes["two"], {"compression.type": "zstd"}))
            for shape, records, config in cases:
                name = f"v{magic}_{shape}_{codec}"
                source = kafka.build_batches([batch(records, magic=magic, codec=codec)])[0]
                directory = scratch / f"{name}-0"
                run = kafka.append(directory, [Op.append(source, leader_epoch=4)], config, now_ms=NOW_MS + 50)
                assert run.results[0].error is None, run.results[0]
                data = (directory / f"{0:020}.log").read_bytes()
                out.append(
                    {
                        "name": name,
                        "config": config,
                        "now_ms": NOW_MS + 50,
                        "source_hex": source.hex(),
                        "hex": data.hex(),
                        "batches": [plain(b) for b in kafka.read(data)],
                    }
                )
    return out


def transactions() -> list[dict[str, Any]]:
    """Three producers over several segments and leader epochs: commits, overlapping aborts, one left open."""
    sequence = {1: 0, 2: 0, 3: 0, 4: 0}
    now_ms = NOW_MS
    ops: list[dict[str, Any]] = []

    def data(producer: int, count: int, leader_epoch: int, transactional: bool = True, codec: str = "none") -> None:
        nonlocal now_ms
        now_ms += 10
        records = [record(b"p%d" % producer, UNIT[: 40 + i], now_ms - i) for i in range(count)]
        fields: dict[str, Any] = {"producer_id": producer, "producer_epoch": 0, "base_sequence": sequence[producer]}
        ops.append(Op.clock(now_ms))
        ops.append(Op.append_records(records, leader_epoch, codec=codec, transactional=transactional, **fields))
        sequence[producer] += count

    def end(kind: str, producer: int, leader_epoch: int) -> None:
        nonlocal now_ms
        now_ms += 10
        ops.append(Op.clock(now_ms))
        ops.append(Op.marker(kind, producer, 0, coordinator_epoch=leader_epoch + 5, leader_epoch=leader_epoch))

    data(1, 3, 0)
    data(2, 2, 0)
    data(4, 2, 0, transactional=False, codec="lz4")
    end("abort", 1, 0)
    data(2, 4, 1)
    end("commit", 2, 1)
    data(1, 5, 1, codec="zstd")
    data(3, 3, 1)
    end("abort", 3, 1)
    end("abort", 1, 4)
    data(3, 6, 4, codec="gzip")
    data(2, 6, 4)
    end("abort", 2, 4)
    data(1, 1, 4)
    end("commit", 1, 4)
    end("abort", 4, 4)  # closes nothing: no entry
    data(2, 2, 6, codec="snappy")  # producers 2 and 3 stay open
    return ops


def directories(kafka: Kafka, scratch: Path) -> list[dict[str, Any]]:
    small = {"segment.bytes": 900, "index.interval.bytes": 200}
    formats = []
    for i in range(12):
        records = without_headers(MANY[4 * i : 4 * i + 4])
        magic = i // 4
        codec = LEGACY_CODECS[i % 4] if magic < 2 else CODECS[1 + i % 4]
        formats.append(Op.append_records(records, i // 6, magic=magic, codec=codec, as_magic=magic))
    scenarios: list[tuple[str, list[dict[str, Any]], dict[str, Any]]] = [
        ("transactions", transactions(), small),
        ("formats", formats, {"segment.bytes": 500, "index.interval.bytes": 100}),
        ("append-time", [Op.append_records(MANY[i : i + 3]) for i in range(0, 24, 3)], small | APPEND_TIME),
    ]
    out = []
    for name, operations, config in scenarios:
        directory = scratch / f"{name}-0"
        run = kafka.append(directory, operations, config, now_ms=NOW_MS)
        assert all(r.error is None for r in run.results), run.results
        findings = kafka.dump_findings(directory)
        assert not findings, findings
        files = {p.name: p for p in sorted(directory.iterdir())}
        text = "leader-epoch-checkpoint"
        out.append(
            {
                "name": directory.name,
                "config": config,
                "log_start_offset": run.closed.log_start_offset,
                "log_end_offset": run.closed.log_end_offset,
                "last_stable_offset": run.closed.last_stable_offset,
                "leader_epochs": run.closed.leader_epochs,
                "producers": run.closed.producers,
                "files": {name: path.read_bytes().hex() for name, path in files.items() if name != text},
                text: files[text].read_text(),
                "entries": kafka.indexes(directory),
                "batches": {
                    path.name: [plain(b) for b in kafka.read([path])]
                    for path in files.values()
                    if path.suffix == ".log"
                },
                "committed_offsets": [r.offset for r in kafka.records(directory, committed=True)],
            }
        )
    return out


def write(name: str, kafka_version: str, cases: list[dict[str, Any]]) -> int:
    """One case a line, so that a change shows which."""
    lines = ",\n".join(json.dumps(case, ensure_ascii=False, separators=(",", ":")) for case in cases)
    path = VECTORS / name
    path.write_text(f'{{"kafka":"{kafka_version}","cases":[\n{lines}\n]}}\n', encoding="utf-8")
    print(f"{path.name}: {len(cases)} cases, {path.stat().st_size} bytes")
    return path.stat().st_size


def main() -> None:
    VECTORS.mkdir(exist_ok=True)
    with Kafka() as kafka, tempfile.TemporaryDirectory() as scratch:
        version = kafka.versions()["kafka"]
        sizes = [
            write("batches_v2.json", version, batch_vectors(kafka, v2_cases())),
            write("batches_v1.json", version, batch_vectors(kafka, legacy_cases(1))),
            write("batches_v0.json", version, batch_vectors(kafka, legacy_cases(0))),
            write("upconverted.json", version, upconverted(kafka, Path(scratch))),
            write("directories.json", version, directories(kafka, Path(scratch))),
        ]
    print(f"{sum(sizes)} bytes in all")


if __name__ == "__main__":
    try:
        main()
    except BuildError as error:
        sys.exit(str(error))
