"""The plan object: what comes back is what was put, and nothing that does not add up is believed."""

from __future__ import annotations

import pytest
from crc32c import crc32c

from logstore.bucket.plan import PlanFile, PlanPiece, decode_plan, encode_plan, parse_plan
from logstore.bucket.rows import PlanRef
from logstore.commit.plan import Plan, TopicPlan
from logstore.directory.sealed import seal, unseal
from logstore.errors import AppendTooLarge, CorruptState
from logstore.limits import DEFAULT_LIMITS, Limits

FILES = (
    PlanFile("data/aa/p/0-a.batches", 1000, 1, (("t1", 1, 100, 3), ("t2", 0, 50, 1), ("t1", 1, 200, 4))),
    PlanFile("data/aa/p/1-b.batches", 900, 2, (("t1", 0, 70, 2), ("t1", 1, 30, 1))),
)


def plan(files: tuple[PlanFile, ...] = FILES, ends: tuple[int, ...] = (7, 18)) -> Plan:
    topics = (
        TopicPlan("one", "t1", 2, 3, {"segment.bytes": "100"}, 9, (5, 10), ends, 10, 400),
        TopicPlan("two", "t2", 1, 1, {}, 1, (0,), (1,), 1, 50),
    )
    return Plan("p", 42, tuple(file.key for file in files), topics, "app", 7, "query")


def ref(data: bytes) -> PlanRef:
    return PlanRef("data/aa/p/plan-n", len(data), crc32c(data), (("t1", 9), ("t2", 1)))


def test_a_plan_comes_back_with_the_place_of_every_piece() -> None:
    data = encode_plan(plan(), FILES, limits=DEFAULT_LIMITS)
    found = decode_plan(data, ref(data), limits=DEFAULT_LIMITS)
    assert found.plan == plan()
    assert found.files == tuple((file.key, file.size_bytes, file.crc) for file in FILES)
    assert found.pieces("t1", 1) == [PlanPiece(0, 0, 100, 3), PlanPiece(0, 150, 200, 4), PlanPiece(1, 70, 30, 1)]
    assert found.pieces("t1", 0) == [PlanPiece(1, 0, 70, 2)]
    assert found.pieces("t2", 0) == [PlanPiece(0, 100, 50, 1)]
    assert found.pieces("t3", 0) == []


def test_a_plan_other_than_the_committed_one_is_refused() -> None:
    data = encode_plan(plan(), FILES, limits=DEFAULT_LIMITS)
    with pytest.raises(CorruptState, match="not the one that was committed"):
        decode_plan(data[:-2] + b"0\n", ref(data), limits=DEFAULT_LIMITS)


def test_a_plan_too_large_to_be_read_is_not_written() -> None:
    with pytest.raises(AppendTooLarge):
        encode_plan(plan(), FILES, limits=Limits(side_file_bytes=100))
    data = encode_plan(plan(), FILES, limits=DEFAULT_LIMITS)
    with pytest.raises(CorruptState, match="limit"):
        parse_plan(data, "key", limits=Limits(side_file_bytes=100))


@pytest.mark.parametrize(
    ("files", "fault"),
    [
        ((PlanFile(FILES[0].key, 10, 1, FILES[0].pieces), FILES[1]), "do not fit"),
        ((PlanFile(FILES[0].key, 1000, 1, FILES[0].pieces[:2]), FILES[1]), "do not fill"),
        ((PlanFile(FILES[0].key, 1000, 1, (*FILES[0].pieces, ("t1", 2, 10, 1))), FILES[1]), "partition"),
        ((PlanFile(FILES[0].key, 1000, 1, (*FILES[0].pieces, ("t2", 0, 0, 1))), FILES[1]), "nothing in it"),
    ],
)
def test_pieces_that_do_not_add_up_are_refused(files: tuple[PlanFile, ...], fault: str) -> None:
    data = encode_plan(plan(files), files, limits=DEFAULT_LIMITS)
    with pytest.raises(CorruptState, match=fault):
        parse_plan(data, "key", limits=DEFAULT_LIMITS)


@pytest.mark.parametrize(
    "change",
    [
        {"count": 1},
        {"count": 10**12},
        {"count": -1},
        {"pieces": "eJw="},
        {"pieces": 5},
        {"sizes": [1]},
        {"crcs": [1, 1 << 33]},
        {"files": ["../x", "y"]},
        {"files": [7, 8]},
        {"topics": "no"},
    ],
)
def test_a_malformed_plan_is_refused(change: dict[str, object]) -> None:
    document = unseal(encode_plan(plan(), FILES, limits=DEFAULT_LIMITS), version=1, file="key")
    with pytest.raises(CorruptState):
        parse_plan(seal(document | change, version=1), "key", limits=DEFAULT_LIMITS)


def test_a_plan_without_files_has_no_pieces() -> None:
    empty = Plan("p", 1, (), ())
    assert parse_plan(encode_plan(empty, (), limits=DEFAULT_LIMITS), "key", limits=DEFAULT_LIMITS).plan == empty
