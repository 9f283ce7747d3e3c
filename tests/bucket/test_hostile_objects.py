"""Small objects with anything in them: right results or typed errors, in bounded memory; and others' objects stay.

Damage is found by checksums; here the checksum is right and the document is not, as only a fault or malice makes it.
"""

from __future__ import annotations

import base64
import contextlib
import copy
import json
import os
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from crc32c import crc32c

from logstore.bucket.collecting import decode_floor
from logstore.bucket.commit_file import SUMMARY, commit_key, decode_commit, decode_summary
from logstore.bucket.freeing import HOUR_MS
from logstore.bucket.keys import STORE, floor_key, manifest_key
from logstore.bucket.maintaining import MaintenanceRules, Step, maintain
from logstore.bucket.manifest import decode_manifest
from logstore.bucket.plan import parse_plan
from logstore.bucket.rows import Kind
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.clock import ManualClock
from logstore.commit.apps import AppBatch
from logstore.directory.sealed import seal
from logstore.errors import DuramenError, LedgerError
from logstore.limits import DEFAULT_LIMITS
from logstore.objects.memory import MemoryObjects
from logstore.records.record import Record

NOW_MS = 1_700_000_000_000
DAY_MS = 24 * HOUR_MS
CASES = 20_000 if os.environ.get("DURAMEN_SOAK") else 150
SEALED = MaintenanceRules(seal=SealRules(force=True), force_compaction=True)
CLEANED = MaintenanceRules(steps=frozenset({Step.COLLECT, Step.CLEAN_UP}))
ODD: list[Any] = [None, True, -1, 0, 1, 2**31, 2**63 - 1, 2**63, 10**400, 1.5, 1e308, "", "x" * 5000, [], [[]], {}, "é"]


def some_store() -> tuple[BucketStore, MemoryObjects, ManualClock]:
    """With segments, receipts, garbage, floors, a tail, apps and a topic that has ended."""
    clock = ManualClock(NOW_MS)
    objects = MemoryObjects(clock)
    store = BucketStore("memory://hostile", create=True, objects=objects, clock=clock)
    configs = {"cleanup.policy": "compact", "segment.bytes": 600, "min.cleanable.dirty.ratio": 0}
    for name in ("a", "b"):
        store.create_topic(name, partitions=2, configs=configs)
    for batch in range(6):
        for name in ("a", "b"):
            rows = [Record(b"k%d" % n, b"%d" % batch, clock.now_ms()) for n in range(12)]
            store.append(name, rows, app=AppBatch(name, batch, "query"))
        if batch in (2, 4):
            assert not maintain(store, SEALED).failed
            clock.advance(DAY_MS)
    store.delete_topic("b")
    return store, objects, clock


def mutated(document: Any, rng: random.Random) -> Any:
    """With one value somewhere in it that is another one, gone, doubled or nested deeply."""
    places: list[tuple[Any, Any]] = []

    def walk(value: Any) -> None:
        found = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        for at, each in found:
            places.append((value, at))
            walk(each)

    document = copy.deepcopy(document)
    walk(document)
    if not places:
        return rng.choice(ODD)
    holder, at = rng.choice(places)
    act = rng.randrange(5)
    if act == 0:
        del holder[at]
    elif act == 1 and isinstance(holder, list):
        holder.insert(at, copy.deepcopy(holder[at]))
    elif act == 2 and type(holder[at]) is int:
        holder[at] += rng.choice([-1, 1, 1 << 31, -(1 << 62), 1 << 62])
    elif act == 3 and isinstance(holder[at], str) and holder[at]:
        text = list(holder[at])
        text[rng.randrange(len(text))] = rng.choice(["/", "\0", "a", "Z", "=", "0"])
        holder[at] = "".join(text)
    else:
        holder[at] = copy.deepcopy(rng.choice(ODD))
    return document


def sealed_again(data: bytes, rng: random.Random) -> bytes:
    document = mutated(json.loads(data[: data.index(b"\n")]), rng)
    if not isinstance(document, dict) or "version" not in document:
        line = json.dumps(document).encode() + b"\n"
        return line + b"crc32c %08x\n" % crc32c(line)
    line = json.dumps(document, separators=(",", ":")).encode() + b"\n"
    return line + b"crc32c %08x\n" % crc32c(line)


def commit_again(data: bytes, rng: random.Random) -> bytes:
    lines = [json.loads(line) for line in data.splitlines()]
    if rng.random() < 0.1:
        lines = mutated(lines, rng)
    else:
        lines[0]["commitInfo"]["duramen"] = sealed_again(lines[0]["commitInfo"]["duramen"].encode(), rng).decode()
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines) if isinstance(lines, list) else b"0"


def summary_again(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.1:
        return sealed_again(data, rng)
    document = json.loads(data[: data.index(b"\n")])
    inner = mutated(json.loads(zlib.decompress(base64.b64decode(document["view"]))), rng)
    document["view"] = base64.b64encode(zlib.compress(json.dumps(inner).encode())).decode()
    version = document.pop("version")
    return seal(document, version=version)


def small_objects(
    store: BucketStore,
) -> dict[str, tuple[Callable[[bytes], Any], Callable[[bytes, random.Random], bytes]]]:
    """Each kind of small object by its key: how it is decoded, and how it is made odd with a right checksum."""
    topic, view, limits = store.topic("a"), store.ledger.view, DEFAULT_LIMITS
    plan = next(row.plan for row in reversed(view.rows) if row.plan is not None and row.kind is Kind.BATCH)
    key = manifest_key(topic.id, 0)
    return {
        key: (lambda data: decode_manifest(data, key, lambda page: b"", limits=limits), sealed_again),
        commit_key(view.version): (lambda data: decode_commit(data, view.version, limits=limits), commit_again),
        SUMMARY: (lambda data: decode_summary(data, limits=limits), summary_again),
        plan.key: (lambda data: parse_plan(data, plan.key, limits=limits), sealed_again),
        floor_key(topic.id): (lambda data: decode_floor(data, "floor"), sealed_again),
    }


def test_documents_with_anything_in_them_are_refused_or_understood(seed: int) -> None:
    store, objects, _ = some_store()
    rng = random.Random(seed)
    for key, (decode, make) in small_objects(store).items():
        data = objects.get(key)[0]
        decode(data)
        refused = 0
        for _ in range(CASES):
            odd = make(data, rng)
            try:
                decode(odd)
            except DuramenError:
                refused += 1
            except Exception as error:
                raise AssertionError(f"{key}: {error!r}\n{odd[:3000]!r}") from error
        assert refused, key


def test_a_bit_that_flips_anywhere_is_found(seed: int) -> None:
    store, objects, _ = some_store()
    rng = random.Random(seed)
    for key, (decode, _) in small_objects(store).items():
        data = objects.get(key)[0]
        for at in range(0, len(data), 1 if os.environ.get("DURAMEN_SOAK") else max(len(data) // 100, 1)):
            odd = bytearray(data)
            odd[at] ^= 1 << rng.randrange(8)
            try:
                found = decode(bytes(odd))
            except DuramenError:
                continue
            assert found == decode(data), (key, at)  # outside of what we read: Delta's own lines of a commit


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 200_000,
        b'{"commitInfo":{"duramen":' + b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\xff\xfe",
        b"",
        b"null\n",
        b'{"commitInfo":{"duramen":"x"}}',
    ],
    ids=range(7),
)
def test_a_commit_that_is_none_stops_readers_with_its_name(data: bytes) -> None:
    store, objects, _ = some_store()
    key = commit_key(store.ledger.view.version + 1)
    objects.put(key, [data])
    with pytest.raises(LedgerError) as caught:
        store.ledger.refresh()
    assert caught.value.file == key


def test_maintenance_deletes_nothing_because_of_an_odd_object(seed: int) -> None:
    """Whatever one small object says, what the others name stays, and what is read is right or an error."""
    rng = random.Random(seed)
    for _ in range(1000 if os.environ.get("DURAMEN_SOAK") else 6):
        store, objects, clock = some_store()
        wanted = [list(store.reader("a", number).records(0)) for number in range(2)]
        key = rng.choice([*small_objects(store), STORE])
        data = objects.get(key)[0]
        named = {s.key for n in range(2) for s in store.manifests.read(store.topic("a").id, n).manifest.segments}  # type: ignore[union-attr]
        odd = bytearray(data)
        odd[rng.randrange(len(odd))] ^= 0xFF
        objects.put(key, [rng.choice([bytes(odd), data[: rng.randrange(len(data))], b"", b"{}"])])
        for _ in range(3):
            clock.advance(3 * DAY_MS)
            with contextlib.suppress(DuramenError):
                maintain(BucketStore("memory://hostile", objects=objects, clock=clock), CLEANED)
        objects.put(key, [data])
        left = {head.key for prefix in ("data", "logs", "ledger") for head in objects.list(prefix)}
        assert named <= left, (key, named - left)
        again = BucketStore("memory://hostile", objects=objects, clock=clock)
        assert [list(again.reader("a", number).records(0)) for number in range(2)] == wanted, key


def test_what_others_keep_below_the_same_prefix_stays() -> None:
    """A store at the top of a bucket, and files or another store in folders of the same names."""
    clock = ManualClock(NOW_MS)
    objects = MemoryObjects(clock)
    store = BucketStore("memory://top", create=True, objects=objects, clock=clock)
    store.create_topic("t")
    nonce = "0" * 32
    foreign = {
        "data/2024/report.csv",
        "data/ab/topics/orders",
        f"data/data/ab/{nonce}/0-{nonce}.batches",
        f"data/ledger/{nonce}",
        "logs/app.log",
        "logs/web/2024/01/01.log",
        f"logs/logs/{nonce}/0/{0:020d}-{nonce}",
        "pages/index.html",
        "pages/a/b/c",
        "pins/board.txt",
        "arriving/list/a.txt",
    }
    for key in foreign:
        objects.put(key, [b"mine"])
    clock.advance(30 * DAY_MS)
    for _ in range(3):
        store.append("t", [Record(b"k", b"v", clock.now_ms())])
        assert not maintain(store).failed
        clock.advance(2 * DAY_MS)
    assert foreign <= {h.key for p in ("data", "logs", "pages", "pins", "arriving") for h in objects.list(p)}
