"""The rules of the cleaner, one row each: what is in a log, what a pass leaves of it, and as what it counts the rest.

Kafka's own cleaner judges the same rules in the suite `conformance`; this is the list of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from compaction.lab import NOW_MS, Lab
from logstore.cleaner.filter import ABORTED, KEYLESS, MARKER, SUPERSEDED, TOMBSTONE
from logstore.cleaner.grouping import SourceSegment, group_segments
from logstore.limits import RELATIVE_OFFSET_MAX
from logstore.partition.producer_state import AppendOrigin
from logstore.records.columns import columns_of
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.record import Record

HOUR_MS = 3_600_000
RETENTION_MS = 24 * HOUR_MS

#: A batch of records: "a" is a value of key a, "a-" a tombstone, "_" a record without a key.
Fill = Callable[[Lab], None]


def records(text: str, at_ms: int = NOW_MS - HOUR_MS) -> list[Record]:
    return [
        Record(None if key == "_" else key[0].encode(), None if key.endswith("-") else b"v", at_ms)
        for key in text.split()
    ]


def plain(*batches: str, at_ms: int = NOW_MS - HOUR_MS) -> Fill:
    """Batches in one sealed segment."""
    return lambda lab: lab.append(*(records(batch, at_ms) for batch in batches), roll=True)


def keyless(text: str) -> Fill:
    def fill(lab: Lab) -> None:
        lab.reconfigure(cleanup_policy=frozenset({"delete"}))  # a compacted topic takes none
        lab.append(records(text), roll=True)
        lab.reconfigure(cleanup_policy=frozenset({"compact"}))

    return fill


def active(text: str) -> Fill:
    return lambda lab: lab.append(records(text))


def transaction(text: str, producer: int, *, commit: bool, sequence: int = 0) -> Fill:
    def fill(lab: Lab) -> None:
        options = BatchOptions(transactional=True, producer_id=producer, producer_epoch=0, base_sequence=sequence)
        with lab.open() as log:
            log.append_batches(encode_batch(columns_of(records(text)), options), origin=AppendOrigin.CLIENT)
            log.append_marker(commit=commit, producer_id=producer, producer_epoch=0)
            log.roll()
            lab.end = log.log_end_offset

    return fill


def idempotent(text: str, producer: int, sequence: int = 0) -> Fill:
    def fill(lab: Lab) -> None:
        options = BatchOptions(producer_id=producer, producer_epoch=0, base_sequence=sequence)
        with lab.open() as log:
            log.append_batches(encode_batch(columns_of(records(text)), options), origin=AppendOrigin.CLIENT)
            log.roll()
            lab.end = log.log_end_offset

    return fill


@dataclass(frozen=True)
class Rule:
    log: tuple[Fill, ...]
    #: offsets of the records that are left
    left: tuple[int, ...]
    #: what the last pass counted as removed
    removed: dict[str, int] = field(default_factory=dict)
    #: when passes are made
    passes_ms: tuple[int, ...] = (NOW_MS,)
    config: dict[str, Any] = field(default_factory=dict)


PASSED = NOW_MS + RETENTION_MS + 1
RULES = {
    "a record that a later one of its key supersedes goes": Rule((plain("a b a"),), (1, 2), {SUPERSEDED: 1}),
    "also across segments": Rule((plain("a b"), plain("a")), (1, 2), {SUPERSEDED: 1}),
    "the last record of each key stays, with its offset": Rule((plain("a b", "c"),), (0, 1, 2)),
    "a record without a key goes": Rule((keyless("a _ b"),), (0, 2), {KEYLESS: 1}),
    "a tombstone supersedes, and stays for a while": Rule((plain("a a-"),), (1,), {SUPERSEDED: 1}),
    "a tombstone stays until its horizon": Rule((plain("a a-"),), (1,), {}, (NOW_MS, NOW_MS + RETENTION_MS - 1)),
    "a tombstone past its horizon goes": Rule((plain("a a-", "b"),), (2,), {TOMBSTONE: 1}, (NOW_MS, PASSED)),
    "a horizon counts from the first pass, not from the record": Rule(
        (plain("a a-", "b"),), (1, 2), {SUPERSEDED: 1}, (PASSED,)
    ),
    "a key written again behind its tombstone stays": Rule((plain("a a- a"),), (2,), {SUPERSEDED: 2}),
    "the active segment is not touched": Rule((plain("a b"), active("c c")), (0, 1, 2, 3)),
    "what the active segment supersedes stays meanwhile": Rule((plain("a b"), active("a")), (0, 1, 2)),
    "nothing younger than min.compaction.lag.ms is touched": Rule(
        (plain("a", at_ms=NOW_MS - 2 * HOUR_MS), plain("a")), (0, 1), config={"min_compaction_lag_ms": HOUR_MS + 1}
    ),
    "of an aborted transaction nothing is left but its marker": Rule(
        (plain("a"), transaction("a b", 7, commit=False)), (0,), {ABORTED: 2}
    ),
    "of a committed one the records stay": Rule(
        (plain("a"), transaction("a b", 7, commit=True)), (1, 2), {SUPERSEDED: 1}
    ),
    "a marker goes when its records are gone and its horizon has passed": Rule(
        (transaction("a", 7, commit=True), transaction("a", 7, commit=True, sequence=1), plain("c")),
        (2, 4),
        {MARKER: 1},
        (NOW_MS, NOW_MS, PASSED),  # the second pass finds them gone, and sets the horizon
    ),
}


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
def test_a_rule_of_the_cleaner(tmp_path: Path, rule: Rule) -> None:
    lab = Lab(tmp_path, **({"delete_retention_ms": RETENTION_MS} | rule.config))
    for fill in rule.log:
        fill(lab)
    for now_ms in rule.passes_ms:
        report = lab.compact(now_ms)
    assert [record.offset for record in lab.records()] == list(rule.left)
    assert {kind: count for kind, count in report.removed.items() if count} == rule.removed
    if not lab.state.transactions:  # their markers count as well
        assert report.counts.records == sum(offset < report.end_offset for offset in rule.left)


def test_a_producers_last_batch_stays_without_records(tmp_path: Path) -> None:
    """Its sequence must be known as long as the producer may go on."""
    lab = Lab(tmp_path)
    for fill in (idempotent("a", 7), plain("a")):
        fill(lab)
    report = lab.compact()
    assert report.removed[SUPERSEDED] == 1
    assert [record.offset for record in lab.records()] == [1]
    with lab.open() as log:
        assert log.last_records.keys() == {7}


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        pytest.param([(0, 40), (10, 40), (20, 40)], [2, 1], id="neighbours share a segment as far as they fit"),
        pytest.param([(0, 150), (10, 40)], [1, 1], id="one that is too large is alone"),
        pytest.param([(0, 0), (10, 0), (20, 100)], [3], id="empty ones cost nothing"),
        pytest.param([(0, 10), (RELATIVE_OFFSET_MAX, 10)], [1, 1], id="offsets must count from the group's base"),
        pytest.param([(0, 10), (RELATIVE_OFFSET_MAX - 9, 10)], [2], id="they may use all of its range"),
        pytest.param([(0, 60), (10, 40), (20, 1)], [2, 1], id="a segment may be full to the byte"),
        pytest.param([(0, 9, 60, 0), (10, 9, 40, 0), (20, 9, 8, 0)], [2, 1], id="the offset index must fit"),
        pytest.param([(0, 9, 0, 60), (10, 9, 0, 41)], [1, 1], id="and the time index"),
    ],
)
def test_grouping(sizes: list[tuple[int, ...]], groups: list[int]) -> None:
    segments = [SourceSegment(*size) for size in sizes]
    found = group_segments(
        segments, segment_bytes=100, segment_index_bytes=100, first_uncleanable_offset=sizes[-1][0] + 10
    )
    assert [len(group) for group in found] == groups
