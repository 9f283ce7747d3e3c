"""What a writer does after a conflict or a lost answer: look for its own plan, judge the replay again, plan anew.

Nothing is concluded from the error itself. A commit that was sent may land later, for as long as the version it was for
does not exist. So "not committed" is said only of a ledger that has moved past every version that was tried.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import Enum

from logstore.bucket.freeing import CLOCK_OFF_MS_MAX
from logstore.bucket.rows import Kind, LedgerView
from logstore.commit.apps import AppBatch, is_replay
from logstore.errors import UnknownTopic, UnsuitableObjectStore


class Verdict(Enum):
    #: one of our own attempts is in the ledger
    COMMITTED = "committed"
    #: the batch is there, written by another attempt of the same query
    REPLAYED = "replayed"
    PLAN_AGAIN = "plan again"
    #: the topic's definition moved: what was encoded may not fit it
    ENCODE_AGAIN = "encode again"


@dataclass(frozen=True, slots=True)
class Attempt:
    """A batch that is to be committed."""

    app: AppBatch | None
    #: the topics and the config version each was encoded for
    config_versions: dict[str, int]
    #: keys of the plans of every attempt so far
    plans: tuple[str, ...] = ()


def judge(view: LedgerView, attempt: Attempt) -> Verdict:
    """By a snapshot loaded after the conflict. Raises ReplayMismatch, UnknownTopic."""
    own = set(attempt.plans)
    if any(row.plan is not None and row.plan.key in own for row in view.rows):
        return Verdict.COMMITTED
    if attempt.app is not None and is_next_or_replay(view, attempt.app):
        return Verdict.REPLAYED
    verdict = Verdict.PLAN_AGAIN
    for topic_id, config_version in attempt.config_versions.items():
        newest = view.newest(topic_id)
        if newest is None or newest.kind is Kind.ENDED:
            raise UnknownTopic("the topic was deleted while a batch for it was written; nothing was committed")
        if newest.config_version != config_version:
            verdict = Verdict.ENCODE_AGAIN
    return verdict


def is_next_or_replay(view: LedgerView, app: AppBatch) -> bool:
    """True for a replay, False for the app's next batch. Raises ReplayMismatch, MissingBatches, InvalidConfig."""
    return is_replay(view.app(app.app_id), app, is_counted=lambda: True, are_apps_lost=lambda: view.are_apps_lost)


def is_settled(view: LedgerView, tried: Collection[int]) -> bool:
    """Whether no attempt can land any more: each of the versions that were tried exists."""
    return all(version <= view.version for version in tried)


def plan_clock(own_ms: int, view: LedgerView, topics: Collection[str]) -> int:
    """A plan's clock: never behind the newest row of its topics, whoever wrote it."""
    return max([own_ms, *(row.clock_ms for row in view.rows if row.topic_id in topics)])


def check_clock(own_ms: int, server_ms: int) -> int:
    """The time that maintenance goes by: the server's. Raises UnsuitableObjectStore where ours is far off."""
    if abs(own_ms - server_ms) > CLOCK_OFF_MS_MAX:
        raise UnsuitableObjectStore(
            f"this machine's clock and the server's are {abs(own_ms - server_ms) // 1000} s apart",
            hint="Set the clock; ages decide what compaction and retention delete",
        )
    return server_ms
