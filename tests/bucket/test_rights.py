"""The rights in docs/howto/bucket-policies.md are enough for what each role asks for, request by request."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import pytest

from logstore.bucket import inline_seal
from logstore.bucket.maintaining import MaintenanceRules, maintain
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.errors import AccessDenied
from logstore.objects.memory import MemoryObjects
from logstore.objects.objects import Bytes, Head, Objects, Version
from logstore.objects.probe import probe_objects
from logstore.records.record import Record

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "bucket-policies.md"
PLACE = "arn:aws:s3:::NAME/PREFIX/"
RECORDS = [Record(b"%d" % number, b"v" * 100) for number in range(100)]


def policies() -> list[list[tuple[set[str], set[str]]]]:
    """Those of the page: of the reader, the writer and the maintainer; each statement's actions and resources."""

    def many(value: str | list[str]) -> set[str]:
        return {value} if isinstance(value, str) else set(value)

    found = [json.loads(text) for text in re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.S)]
    return [
        [(many(each["Action"]), many(each["Resource"])) for each in policy["Statement"]]
        for policy in found
        if "Statement" in policy
    ]


class Guarded:
    """Implements `Objects`: what a policy does not allow is refused, as S3 would."""

    def __init__(self, inner: Objects, policy: Sequence[tuple[set[str], set[str]]]) -> None:
        self._inner = inner
        self._policy = policy
        #: of the allowed writes and deletions, the action and the first part of the key
        self.used: set[tuple[str, str]] = set()

    def _check(self, action: str, key: str | None) -> None:
        resource = "arn:aws:s3:::NAME" if key is None else PLACE + key
        for actions, resources in self._policy:
            if action in actions and any(fnmatchcase(resource, pattern) for pattern in resources):
                if key is not None and action != "s3:GetObject":
                    self.used.add((action, key.partition("/")[0]))
                return
        raise AccessDenied(f"{action} of {key}")

    def create(self, key: str, data: bytes) -> Version:
        self._check("s3:PutObject", key)
        return self._inner.create(key, data)

    def replace(self, key: str, data: bytes, seen: Version) -> Version:
        self._check("s3:PutObject", key)
        self._check("s3:GetObject", key)
        return self._inner.replace(key, data, seen)

    def put(self, key: str, parts: Iterable[Bytes]) -> Version:
        self._check("s3:PutObject", key)
        return self._inner.put(key, parts)

    def get(self, key: str) -> tuple[bytes, Version]:
        self._check("s3:GetObject", key)
        self._check("s3:ListBucket", None)  # or an object that is not there would be a 403
        return self._inner.get(key)

    def head(self, key: str) -> Head:
        self._check("s3:GetObject", key)
        self._check("s3:ListBucket", None)
        return self._inner.head(key)

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
        self._check("s3:GetObject", key)
        return self._inner.ranges(key, spans)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            self._check("s3:DeleteObject", key)
        self._inner.delete(keys)

    def list(self, prefix: str, after: str = "") -> Iterator[Head]:
        self._check("s3:ListBucket", None)
        return self._inner.list(prefix, after)


class Roles:
    """One store, opened with the rights of each role."""

    def __init__(self) -> None:
        raw = MemoryObjects()
        reader, writer, maintainer = (Guarded(raw, policy) for policy in policies())
        self.rights = {"reader": reader, "writer": writer, "maintainer": maintainer}
        probe_objects(maintainer)
        self.maintainer = BucketStore("memory://rights", create=True, objects=maintainer)
        self.maintainer.create_topic("t", partitions=2, configs={"cleanup.policy": "compact", "segment.bytes": 5000})
        self.writer = BucketStore("memory://rights", objects=writer)
        self.reader = BucketStore("memory://rights", objects=reader)

    def used(self, role: str) -> set[tuple[str, str]]:
        return self.rights[role].used


@pytest.fixture
def roles() -> Roles:
    return Roles()


def test_a_writer_may_write_alter_and_seal_a_long_tail(roles: Roles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inline_seal, "TAIL_COMMITS", 3)
    monkeypatch.setattr(inline_seal, "LOOK_EVERY", 1)
    probe_objects(roles.rights["writer"])
    for _ in range(5):
        roles.writer.append("t", RECORDS)
    roles.writer.create_topic("mine")
    roles.writer.alter_topic("mine", partitions=2)
    written = {place for action, place in roles.used("writer") if action == "s3:PutObject"}
    assert {"data", "ledger", "topics", "manifest", "logs"} <= written


def test_a_reader_may_read_and_nothing_else(roles: Roles) -> None:
    for _ in range(3):
        roles.writer.append("t", RECORDS)
    assert sum(batch.num_rows for batch in roles.reader.restore("t")) == 100
    done = maintain(roles.maintainer, MaintenanceRules(seal=SealRules(force=True), force_compaction=True))
    assert not done.failed
    assert sum(batch.num_rows for batch in roles.reader.restore("t")) == 100
    assert sum(len(each.records) for each in roles.reader.follow("t", wait=False)) >= 100
    assert {place for _, place in roles.used("reader")} <= {"pins"}
    with pytest.raises(AccessDenied):
        roles.reader.append("t", RECORDS)


def test_a_maintainer_may_do_all_that_maintenance_does(roles: Roles) -> None:
    for _ in range(3):
        roles.writer.append("t", RECORDS)
    roles.maintainer.delete_topic("t")
    done = maintain(roles.maintainer, MaintenanceRules(seal=SealRules(force=True), force_compaction=True))
    assert not done.failed
