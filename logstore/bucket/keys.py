"""The names of a store's objects in its bucket.

    duramen.json                       says that this is a store; created once
    ledger/                            commit files and a summary (see `commit_file`)
    topics/NAME                        a copy of a topic's definition, for people and tools
    manifest/TOPICID/N                 a partition's list of segments; changed by compare-and-set
    floors/TOPICID                     how far a topic is sealed and freed; changed by compare-and-set
    pins/NONCE                         a snapshot reader's pin, with an expiry that it renews
    arriving/TOPICID                   a topic that comes in and that no row names yet; see `arriving`
    data/HH/PLAN/TASK-NONCE.batches    level 0: a staged file
    data/HH/PLAN/plan-NONCE            level 0: the plan that gives the staged files their offsets
    logs/TOPICID/N/BASE20-NONCE        level 1: a sealed segment
    pages/TOPICID/N/NONCE              a part of a long list of segments
    quarantine/TOPICID/N/BASE20-NONCE  the bytes of a damaged piece that was sealed without; never deleted by itself
    quarantine/ledger/VERSION-NONCE    the bytes of a damaged commit file that was made again

What lies under `data/`, `logs/` and `pages/` is written once. Its name has a nonce and is never used again, so a write
that lands late cannot replace anything, and a name that was freed cannot come back. HH spreads plans over the
partitions that object storage makes of its keys.
"""

from __future__ import annotations

import hashlib
import re
import uuid

from logstore.topic import check_topic_name

MANIFESTS, FLOORS, PINS, ARRIVING, TOPICS = "manifest", "floors", "pins", "arriving", "topics"
STORE = "duramen.json"
#: how far the ledger's commit files are summarized, and deleted
LOG_FLOOR = "ledger/floor"

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_NONCE = r"[0-9a-f]{32}"
#: what a sweep may delete. Whatever else lies below the same prefix is somebody else's: another store's, or a file
_SWEPT = re.compile(
    rf"data/[0-9a-f]{{2}}/[A-Za-z0-9_-]{{1,64}}/([0-9]+-{_NONCE}\.batches|plan-{_NONCE})\Z"
    rf"|data/clock/{_NONCE}\Z"
    rf"|(logs|pages)/(?P<topic>[A-Za-z0-9_-]{{1,64}})/(?P<number>[0-9]+)/([0-9]{{20}}-)?{_NONCE}\Z"
)


def new_nonce() -> str:
    return uuid.uuid4().hex


def topic_key(name: str) -> str:
    return f"topics/{check_topic_name(name)}"


def manifest_key(topic_id: str, partition: int) -> str:
    return f"{MANIFESTS}/{_checked(topic_id)}/{partition}"


def floor_key(topic_id: str) -> str:
    return f"{FLOORS}/{_checked(topic_id)}"


def pin_key(nonce: str) -> str:
    return f"{PINS}/{_checked(nonce)}"


def arriving_key(topic_id: str) -> str:
    return f"{ARRIVING}/{_checked(topic_id)}"


def topic_prefixes(topic_id: str) -> list[str]:
    """Where everything lies that belongs to one topic alone, its manifests last."""
    return [f"{each}/{_checked(topic_id)}" for each in ("logs", "pages", "quarantine", MANIFESTS)]


def staged_key(plan_id: str, task: int, nonce: str) -> str:
    return f"{_plan_folder(plan_id)}/{task}-{_checked(nonce)}.batches"


def plan_key(plan_id: str, nonce: str) -> str:
    return f"{_plan_folder(plan_id)}/plan-{_checked(nonce)}"


def lost_plan_key() -> str:
    """Of a plan that there never was: a commit was lost, and its offsets are taken."""
    return plan_key("lost", new_nonce())


def quarantined_commit_key(version: int) -> str:
    return f"quarantine/ledger/{version:020d}-{new_nonce()}"


def segment_key(topic_id: str, partition: int, base_offset: int, nonce: str) -> str:
    return f"logs/{_checked(topic_id)}/{partition}/{base_offset:020d}-{_checked(nonce)}"


def page_key(topic_id: str, partition: int, nonce: str) -> str:
    return f"pages/{_checked(topic_id)}/{partition}/{_checked(nonce)}"


def quarantine_key(topic_id: str, partition: int, base_offset: int, nonce: str) -> str:
    return f"quarantine/{_checked(topic_id)}/{partition}/{base_offset:020d}-{_checked(nonce)}"


def staged_quarantine_key(topic_id: str, partition: int, base_offset: int) -> str:
    """Of a piece of a staged object, whose batches have no offsets yet: it began at `base_offset`."""
    return quarantine_key(topic_id, partition, base_offset, f"staged-{new_nonce()}")


def is_swept(key: str) -> bool:
    """Whether an object below `data/`, `logs/` or `pages/` has a name that only a store gives."""
    return _SWEPT.match(key) is not None


def partition_of(key: str) -> tuple[str, int] | None:
    """Topic id and partition of a segment or a page with such a name; None for level 0."""
    found = _SWEPT.match(key)
    assert found is not None
    return None if found["topic"] is None else (found["topic"], int(found["number"]))


def is_pin(key: str) -> bool:
    return re.fullmatch(f"{PINS}/{_NONCE}", key) is not None


def is_mark(key: str) -> bool:
    """Of a topic that comes in."""
    prefix, _, topic_id = key.partition("/")
    return prefix == ARRIVING and _NAME.match(topic_id) is not None


def _plan_folder(plan_id: str) -> str:
    spread = hashlib.blake2b(_checked(plan_id).encode(), digest_size=1).hexdigest()
    return f"data/{spread}/{plan_id}"


def _checked(name: str) -> str:
    if not _NAME.match(name):
        raise ValueError(f"{name!r} cannot be part of a key")
    return name
