"""Whose batch it is, and whether it may follow what the ledger shows: the rules of exactly-once.

Batches of an app count by one, empty ones too. A batch that the ledger shows as the app's last one is a replay. One
that cannot follow it (another query, an older batch, a gap) needs `adopt`, which names the commit it takes over. It
holds only while the ledger shows exactly that commit, so it works once, and a driver that wakes late cannot use it
again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logstore.errors import InvalidConfig, MissingBatches, ReplayMismatch

if TYPE_CHECKING:
    from logstore.ledger import AppProgress

_NOTHING = "nothing"


@dataclass(frozen=True, slots=True)
class Adopt:
    """The commit that is taken over: the app's last batch, and the query that wrote it (None: not known).

    As text `QUERY:BATCH`, as the errors print it. A batch of None (text `nothing`) stands for an app that the ledger
    does not know.
    """

    query_id: str | None
    batch_id: int | None

    def __str__(self) -> str:
        return _NOTHING if self.batch_id is None else f"{self.query_id or ''}:{self.batch_id}"

    @classmethod
    def parse(cls, text: str) -> Adopt:
        """Raises InvalidConfig."""
        if text.strip() == _NOTHING:
            return cls(None, None)
        query_id, colon, batch_id = text.strip().rpartition(":")
        if not colon or not (batch_id.isascii() and batch_id.isdigit() and len(batch_id) <= 19):
            raise InvalidConfig(f"adopt is {text!r}", hint="It names what it takes over, as QUERY_ID:BATCH_ID")
        return cls(query_id or None, int(batch_id))


@dataclass(frozen=True, slots=True)
class AppBatch:
    """Whose batch it is. `adopt` (an `Adopt`, or its text) lets another query go on under the app's name."""

    app_id: str
    batch_id: int
    query_id: str | None = None
    adopt: Adopt | str | bool | None = None


def is_replay(
    last: AppProgress | None,
    app: AppBatch,
    *,
    is_counted: Callable[[], bool] = lambda: False,
    are_apps_lost: Callable[[], bool] = lambda: False,
) -> bool:
    """Whether the app's last batch is this one. Raises ReplayMismatch when this one cannot follow it.

    `is_counted`: the last commit is by a release that commits empty batches too. `are_apps_lost`: the ledger lost
    commits of unknown apps.
    """
    adopt = _adopt(app, last)
    if last is None:
        _check_unknown(app, adopt, are_apps_lost)
        return False
    shown = Adopt(last.query_id, last.batch_id)
    if adopt == shown and app.query_id != last.query_id:
        return False
    if last.batch_id == app.batch_id and _same_query(last.query_id, app.query_id):
        return True
    if adopt == shown:
        return False
    held = f"adopt names {adopt}, but the ledger shows {shown}: " if adopt is not None else ""
    if not _same_query(last.query_id, app.query_id):
        raise ReplayMismatch(
            f"{held}app {app.app_id!r} was last written by query {last.query_id} (batch {last.batch_id}); this is "
            f"query {app.query_id} (batch {app.batch_id})",
            hint="Two queries must not share an app_id. If the checkpoint was lost or replaced, continue with "
            f"adopt={str(shown)!r}, or choose a new app_id",
        )
    if app.batch_id < last.batch_id:
        raise ReplayMismatch(
            f"{held}app {app.app_id!r} is at batch {last.batch_id}; batch {app.batch_id} is older",
            hint=f"The query's checkpoint was reset or is a copy. Continue with adopt={str(shown)!r} if the rows are "
            "new, or choose a new app_id",
        )
    if last.is_unsure:
        raise ReplayMismatch(
            f"{held}app {app.app_id!r} was at batch {last.batch_id} when the ledger was rebuilt, or further: commits "
            f"were lost, and batch {app.batch_id} may be in the log already",
            hint=f"Look for its rows. Continue with adopt={str(shown)!r} if they are not there, or choose a new app_id",
        )
    if app.batch_id > last.batch_id + 1 and is_counted():
        missing = f"{last.batch_id + 1}" + (f" to {app.batch_id - 1}" if app.batch_id > last.batch_id + 2 else "")
        raise MissingBatches(
            f"{held}app {app.app_id!r} is at batch {last.batch_id}; batch {app.batch_id} leaves out {missing}",
            hint="The store is older than the query's checkpoint, or batches were skipped. Restart the query from "
            f"batch {last.batch_id + 1}, or leave them out for good with adopt={str(shown)!r}",
        )
    return False


def _check_unknown(app: AppBatch, adopt: Adopt | None, are_apps_lost: Callable[[], bool]) -> None:
    if adopt is not None and adopt.batch_id is not None:
        raise ReplayMismatch(
            f"adopt names {adopt}, but the ledger does not know app {app.app_id!r}",
            hint="Leave adopt out, or look whether this is the right store",
        )
    if app.batch_id > 0 and adopt is None and are_apps_lost():
        raise ReplayMismatch(
            f"the ledger lost commits and does not know app {app.app_id!r}; batch {app.batch_id} may be in the log "
            "already",
            hint=f"Look for its rows. Continue with adopt={_NOTHING!r} if they are not there",
        )


def _adopt(app: AppBatch, last: AppProgress | None) -> Adopt | None:
    if app.adopt is None or app.adopt is False:
        return None
    if app.adopt is True:
        shown = Adopt(last.query_id, last.batch_id) if last is not None else None
        raise InvalidConfig(
            "adopt names the commit that it takes over; True names none",
            hint=f"The last commit of app {app.app_id!r} is {shown}: pass adopt={str(shown)!r} to take it over"
            if shown
            else f"The ledger does not know app {app.app_id!r}: there is nothing to adopt, leave it out",
        )
    return Adopt.parse(app.adopt) if isinstance(app.adopt, str) else app.adopt


def _same_query(last: str | None, this: str | None) -> bool:
    """Queries without an id cannot be told apart."""
    return last is None or this is None or last == this
