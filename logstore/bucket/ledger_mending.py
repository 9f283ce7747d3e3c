"""`recover` of the ledger: the summary made of the commits, commits of what else the store tells (`lost_commits`).

Look first: what is damaged, what can be brought back, what is lost. Then, in this order: bytes of damaged commits are
kept under `quarantine/`; the commit files are made again, oldest first; the summary; and a fence, a commit with a row
for each topic, so that what a process planned that still has a lost commit in memory conflicts.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

from crc32c import crc32c

from logstore.bucket.commit_file import (
    LOG,
    SUMMARY,
    SUMMARY_COPY,
    Entry,
    commit_key,
    decode_commit,
    decode_summary,
    encode_commit,
    encode_summary,
)
from logstore.bucket.definitions import commit_rows, read_copies
from logstore.bucket.keys import new_nonce, quarantined_commit_key
from logstore.bucket.ledger import applied
from logstore.bucket.lost_commits import Evidence, FoundPlan, Hole, bring_back
from logstore.bucket.manifests import overwrite
from logstore.bucket.plan import parse_plan
from logstore.bucket.rows import Kind, LedgerView, PlanRef, TopicRow
from logstore.errors import CorruptState, LedgerError, ObjectChanged, ObjectExists, ObjectMissing, SegmentsChanged
from logstore.ledger.ledger import APP, TOPIC
from logstore.objects.objects import Version
from logstore.topics.registry import Topic

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore

#: in the details of a commit that was made again, and of the fence behind it
RECOVERED, FENCE = "recovered", "fence"
_NOT_SAID = -1


@dataclass(slots=True)
class LedgerRepair:
    """What is wrong with the ledger, and what it will be."""

    #: what was found and what becomes of it
    notes: list[str] = field(default_factory=list)
    #: rows of batches that nobody can bring back, and up to where partitions are sealed
    lost: list[TopicRow] = field(default_factory=list)
    sealed: Mapping[str, Sequence[int]] = field(default_factory=dict)
    #: the newest version, as the repaired ledger has it
    view: LedgerView = field(default_factory=lambda: LedgerView(-1))
    #: commits to make again, by version: what is there now, if anything is, and the bytes that it gets
    commits: dict[int, tuple[tuple[bytes, Version] | None, bytes]] = field(default_factory=dict)
    needs_summary: bool = False
    needs_fence: bool = False

    @property
    def lost_offsets(self) -> list[tuple[str, int, int, int]]:
        """Topic, partition, and the offsets that are lost: those that are not sealed."""
        found = []
        for row in self.lost:
            topic, sealed = self.view.definitions.get(row.topic_id), self.sealed.get(row.topic_id, ())
            for number, (base, end) in enumerate(zip(row.base_offsets, row.end_offsets, strict=True)):
                first = max(base, *sealed[number : number + 1], 0)
                if first < end:
                    found.append((topic.name if topic else row.topic_id, number, first, end))
        return found


def look_at_ledger(store: BucketStore) -> LedgerRepair:
    """For a store that may not open. Changes nothing.

    Raises LedgerError where the summary and commits that it would need are both gone.
    """
    repair = LedgerRepair()
    base, problem = LedgerView(-1), None
    try:
        base = decode_summary(store.objects.get(SUMMARY)[0], limits=store.limits)
    except ObjectMissing:
        problem = "the ledger's summary is gone"
    except LedgerError as error:
        problem = str(error)
    if problem is not None:
        base = _copied_summary(store)
    there = list(_versions(store, base.version))
    newest = max([base.version, *there])
    if base.version < 0 and (not there or there[0] > 0):
        raise LedgerError(
            f"{problem}; and commit {0 if not there else there[0] - 1}, which it could be made from, is gone",
            file=SUMMARY,
            hint="Bring the object back from another version of the bucket, or restore a backup",
        )
    if problem is not None:
        begin = "" if base.version < 0 else " a copy of it and"
        repair.notes.append(f"{problem}: made again from{begin} {newest - base.version} commits")
        repair.needs_summary = True
    _follow(store, repair, base, range(base.version + 1, newest + 1), set(there))
    return repair


def _copied_summary(store: BucketStore) -> LedgerView:
    """What was copied before commit files behind it were deleted."""
    try:
        return decode_summary(store.objects.get(SUMMARY_COPY)[0], limits=store.limits)
    except (ObjectMissing, LedgerError):
        return LedgerView(-1)


def carry_out(store: BucketStore, repair: LedgerRepair) -> None:
    """Raises SegmentsChanged when others wrote meanwhile: look again."""
    for version, (there, data) in repair.commits.items():
        try:
            if there is None:
                store.objects.create(commit_key(version), data)
                continue
            store.objects.put(quarantined_commit_key(version), [there[0]])
            store.objects.replace(commit_key(version), data, there[1])
        except (ObjectExists, ObjectChanged):
            raise SegmentsChanged("others wrote the commit meanwhile", file=commit_key(version)) from None
    if repair.needs_summary:
        overwrite(store.objects, SUMMARY, encode_summary(repair.view, new_nonce(), limits=store.limits))
    if repair.needs_fence and repair.view.definitions:
        commit_rows(store, _fence, details={FENCE: True})


def _fence(view: LedgerView) -> tuple[TopicRow, ...]:
    rows = []
    for topic_id in view.definitions:
        newest = view.newest(topic_id)
        if newest is not None:
            sequence, version, ends = newest.sequence + 1, newest.config_version, newest.end_offsets
            rows.append(TopicRow(topic_id, sequence, Kind.DEFINED, version, ends, ends, newest.clock_ms))
    return tuple(rows)


# --- looking ---------------------------------------------------------------------------------------------------------


def _versions(store: BucketStore, after: int) -> Iterator[int]:
    """Of the commit files behind a version, in order."""
    for head in store.objects.list(LOG, commit_key(after) if after >= 0 else ""):
        name = head.key[len(LOG) + 1 :]
        if len(name) == 25 and name.endswith(".json") and name[:20].isdigit():
            yield int(name[:20])


def _follow(store: BucketStore, repair: LedgerRepair, base: LedgerView, wanted: range, there: set[int]) -> None:
    """Every commit that is wanted; those that cannot be read are made again."""
    read = {version: _read(store, version, version in there) for version in wanted}
    entries = {version: entry for version, (_, entry, _) in read.items() if entry is not None}
    broken = {version: (there, problem) for version, (there, entry, problem) in read.items() if entry is None}
    evidence = _evidence(store, base, entries.values()) if broken else Evidence()
    view, repair.sealed = base, evidence.sealed
    for is_broken, run in groupby(read, broken.__contains__):
        versions = list(run)
        if is_broken:
            holes = _hole(versions, [broken[version][0] for version in versions])
            later = [row for version, entry in entries.items() if version > versions[-1] for row in entry.rows]
            rows = bring_back(view, holes, later, evidence)
            made = [Entry(tuple(rows), new_nonce(), details={RECOVERED: True})]
            made += [Entry((), new_nonce(), details={RECOVERED: True}) for _ in versions[1:]]
            _note(repair, versions, [broken[version][1] for version in versions], rows)
        else:
            made = [entries[version] for version in versions]
        for version, entry in zip(versions, made, strict=True):
            if is_broken:
                data = encode_commit(entry, view if version else None, now_ms=store.clock.now_ms(), limits=store.limits)
                repair.commits[version] = broken[version][0], data
            view = applied(view, entry)
    repair.view = view
    # One who died before the fence left that to us.
    recovered = max([*broken, *(v for v, e in entries.items() if RECOVERED in e.details)], default=_NOT_SAID)
    fenced = max([v for v, e in entries.items() if FENCE in e.details], default=_NOT_SAID)
    repair.needs_fence = recovered > fenced
    if repair.needs_fence and not broken:
        repair.notes.append("commits were made again, and no fence was committed behind them: that is done now")


def _read(store: BucketStore, version: int, is_listed: bool) -> tuple[tuple[bytes, Version] | None, Entry | None, str]:
    """What is there, what it says, and what is wrong with it. Raises SegmentsChanged: look again."""
    try:
        there = store.objects.get(commit_key(version))
    except ObjectMissing:
        if is_listed:
            raise SegmentsChanged("a commit that was listed is gone", file=commit_key(version)) from None
        return None, None, f"commit {version} is gone"
    try:
        return there, decode_commit(there[0], version, limits=store.limits), ""
    except LedgerError as error:
        return there, None, str(error)


def _note(repair: LedgerRepair, versions: list[int], problems: list[str], rows: list[TopicRow]) -> None:
    lost = [row for row in rows if row.is_lost]
    plans = len({row.plan.key for row in rows if row.plan is not None and not row.is_lost})
    repair.lost += lost
    found = f"{plans} batches brought back from their plans" if plans else "no batch brought back"
    if any(row.kind is Kind.DEFINED for row in rows):
        found += ", definitions of topics from their copies"
    repair.notes.append(f"{'; '.join(problems)}: made again, {found}")
    if not rows:
        repair.notes.append(f"nothing tells what version {versions[0]} was; what it said is lost, if it said anything")


def _hole(versions: list[int], found: Iterable[tuple[bytes, Version] | None]) -> Hole:
    topics: dict[str, int] = {}
    apps: dict[str, int] = {}
    for each in found:
        for name, number in _transactions(each[0] if each is not None else b""):
            if name.startswith(TOPIC):
                topics[name[len(TOPIC) :]] = number
            elif name.startswith(APP):
                apps[name[len(APP) :]] = number
    return Hole(versions[0], versions[-1], topics, apps)


def _transactions(data: bytes) -> Iterator[tuple[str, int]]:
    """What of a damaged commit Delta's readers can still read."""
    for line in data.splitlines():
        try:
            told = json.loads(line)["txn"]
            if type(told["version"]) is int and isinstance(told["appId"], str):
                yield told["appId"], told["version"]
        except (ValueError, KeyError, TypeError):
            continue


def _evidence(store: BucketStore, base: LedgerView, entries: Iterable[Entry]) -> Evidence:
    """Plans, copies of definitions, manifests: of all topics, since nobody knows which were concerned."""
    copies = read_copies(store)
    topics: dict[str, Topic] = {copy.topic.id: copy.topic for copy in copies if not copy.ended}
    topics |= base.definitions
    for entry in entries:
        topics |= {row.topic_id: row.definition for row in entry.rows if row.definition is not None}
    return Evidence(list(find_plans(store)), copies, sealed_offsets(store, topics))


def find_plans(store: BucketStore) -> Iterator[FoundPlan]:
    """Every plan that lies in the bucket and can be read."""
    for head in store.objects.list("data"):
        if not head.key.rpartition("/")[2].startswith("plan-"):
            continue
        try:
            data = _get_listed(store, head.key)
            plan = parse_plan(data, head.key, limits=store.limits).plan
        except (ObjectMissing, CorruptState):
            continue  # freed meanwhile, or damaged
        topics = tuple((topic.topic_id, topic.sequence) for topic in plan.topics)
        yield FoundPlan(PlanRef(head.key, len(data), crc32c(data), topics), plan, head.modified_ms)


def _get_listed(store: BucketStore, key: str) -> bytes:
    """Asked for twice, since a listing has it. Raises ObjectMissing."""
    with contextlib.suppress(ObjectMissing):
        return store.objects.get(key)[0]
    return store.objects.get(key)[0]


def sealed_offsets(store: BucketStore, topics: Mapping[str, Topic]) -> dict[str, tuple[int, ...]]:
    """Up to where each partition is sealed; 0 where its manifest is gone or damaged."""
    return {
        topic_id: tuple(_sealed_offset(store, topic_id, number) for number in range(topic.partitions))
        for topic_id, topic in topics.items()
    }


def _sealed_offset(store: BucketStore, topic_id: str, number: int) -> int:
    try:
        manifest = store.manifests.read(topic_id, number).manifest
    except (CorruptState, ObjectMissing):
        return 0
    return manifest.sealed_offset if manifest is not None else 0
