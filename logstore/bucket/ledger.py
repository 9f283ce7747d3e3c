"""The ledger of a store in a bucket: one commit file a version, put where none is, and a summary to begin from.

A view is a snapshot of one version. A commit goes to exactly the version behind the view it was planned on, so whatever
was decided by the view still holds when it lands. Whoever follows asks for the next version until there is none.
"""

from __future__ import annotations

import contextlib
import operator
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

from logstore.bucket.commit_file import (
    SUMMARY,
    Entry,
    commit_key,
    decode_commit,
    decode_summary,
    encode_commit,
    encode_summary,
)
from logstore.bucket.elapsed import Elapsed
from logstore.bucket.freeing import Floor, kept_rows
from logstore.bucket.keys import new_nonce
from logstore.bucket.rows import LedgerView
from logstore.clock import Clock
from logstore.errors import (
    CommitConflict,
    CommitUnknown,
    DuramenError,
    LedgerError,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ObjectStoreError,
)
from logstore.limits import MIB, Limits
from logstore.objects.objects import Objects, Version

#: a summary is at most this many commits old, so that opening takes few requests; a large one may be older
_SUMMARY_EVERY = 4
_SUMMARY_BYTES = MIB
#: commits that a report goes back at most
_ENTRIES_MAX = 200
#: of many partitions fewer are kept
_OFFSETS_MAX = 1_000_000
#: who has not looked for this long begins from the summary again: commit files may have been cleaned up since
_STALE_MS = 3_600_000
_LOOKS_MAX = 3


class BucketLedger:
    """For any number of threads and processes; nothing is asked of the bucket before it is needed."""

    def __init__(
        self, objects: Objects, *, clock: Clock, limits: Limits, elapsed: Callable[[], Elapsed] = Elapsed
    ) -> None:
        self._objects = objects
        self._clock = clock
        self._limits = limits
        self._elapsed = elapsed
        self._lock = threading.RLock()
        self._view: LedgerView | None = None
        self._looked = elapsed()
        #: the summary as it was last seen or written
        self._summary: tuple[int, int, Version] | None = None  # ledger version, size
        #: the version at which this process last tried to write it
        self._tried = -_SUMMARY_EVERY
        #: the newest commits that this process read or made
        self._entries: dict[int, Entry] = {}
        #: what the commits that were read one by one took, by step
        self.spent_ms: Counter[str] = Counter()

    def make(self) -> None:
        """Begin the ledger where there is none."""
        data = encode_commit(Entry((), new_nonce()), None, now_ms=self._clock.now_ms(), limits=self._limits)
        with contextlib.suppress(ObjectExists):
            self._objects.create(commit_key(0), data)
        with self._lock:
            self.refresh()
            if self._summary is None:
                self._summarize()

    # --- reading ----------------------------------------------------------------------------------------------------

    @property
    def view(self) -> LedgerView:
        """The newest version that was seen."""
        return self._view or self.refresh()

    def refresh(self) -> LedgerView:
        """The newest version there is: one request when nothing is new. Raises LedgerError."""
        with self._lock:
            for _ in range(_LOOKS_MAX):
                looked = self._elapsed()  # since before anything was asked
                view = self._view
                if view is None or self._looked.ms() > _STALE_MS:
                    view = self._from_summary()
                while (after := self._next(view)) is not None:
                    view = after
                if view.version < 0:
                    raise LedgerError("the store has no ledger", file=commit_key(0), hint="Was it deleted?")
                if looked.ms() <= _STALE_MS:
                    self._view, self._looked = view, looked
                    return view
                # It slept in between. A version that was not there may have been cleaned up, and one that was may have
                # been put there by one who slept as well: none of this look is believed.
            raise LedgerError(f"reading the ledger took more than an hour, {_LOOKS_MAX} times", hint="Try again")

    def _from_summary(self) -> LedgerView:
        """Where following begins: the summary, or before the first commit."""
        begin = self._view or LedgerView(-1)
        try:
            data, version = self._objects.get(SUMMARY)
        except ObjectMissing:
            self._summary = None
            return begin
        found = decode_summary(data, limits=self._limits)
        self._summary = (found.version, len(data), version)
        return found if found.version > begin.version else begin

    def _next(self, view: LedgerView) -> LedgerView | None:
        try:
            data, _ = self._objects.get(commit_key(view.version + 1))
        except ObjectMissing:
            return None
        entry = decode_commit(data, view.version + 1, limits=self._limits)
        self.spent_ms.update(spent_ms(entry))
        self._keep(view.version + 1, entry)
        return applied(view, entry)

    def newest_entries(self) -> Iterator[tuple[int, Entry]]:
        """Commits, newest first, as far as they are kept, and no more than a report needs. Each one not seen lately is
        a request.
        """
        newest = self.refresh().version
        for version in range(newest, max(newest - _ENTRIES_MAX, 0), -1):
            entry = self._entries.get(version)
            if entry is None:
                try:
                    entry = decode_commit(self._objects.get(commit_key(version))[0], version, limits=self._limits)
                except ObjectMissing:
                    return
                with self._lock:
                    self._keep(version, entry)
            yield version, entry

    def seen_entries(self) -> list[Entry]:
        """The newest commits that this process has seen; asks for none."""
        with self._lock:
            return list(self._entries.values())

    def _keep(self, version: int, entry: Entry) -> None:
        self._entries[version] = entry
        while len(self._entries) > 1 and (len(self._entries) > _ENTRIES_MAX or self._offsets_kept() > _OFFSETS_MAX):
            del self._entries[min(self._entries)]

    def _offsets_kept(self) -> int:
        return sum(len(row.end_offsets) for entry in self._entries.values() for row in entry.rows)

    # --- writing ----------------------------------------------------------------------------------------------------

    def commit(self, seen: LedgerView, entry: Entry) -> LedgerView:
        """Commit to the version behind `seen`; returns the view that has it.

        Raises CommitConflict when another commit has that version: this one never will be. CommitUnknown when it may
        be there, or land later. Every other error says that nothing was sent.
        """
        version = seen.version + 1
        with self._lock:
            began = self._looked
            if self._view is not None and self._view.version > seen.version:
                raise CommitConflict(f"another commit has version {version}", file=commit_key(version))
        data = encode_commit(entry, seen, now_ms=self._clock.now_ms(), limits=self._limits)
        try:
            self._objects.create(commit_key(version), data)
        except ObjectExists:
            # Commit files are never replaced, so with another's bytes there ours were never anywhere.
            raise CommitConflict(f"another commit has version {version}", file=commit_key(version)) from None
        except ObjectStoreError as error:
            if not error.may_be_applied:
                raise
            raise CommitUnknown(
                f"the commit was sent and not answered: {error.what}",
                file=commit_key(version),
                hint="Look whether it is there before anything else is done",
            ) from error
        if began.ms() > _STALE_MS:
            self._check_in_force(version, entry)
        view = applied(seen, entry)
        with self._lock:
            self._keep(version, entry)
            if self._view is None or self._view.version < version:
                self._view = view
            self._summarize_now_and_then(view)
        return view

    def _check_in_force(self, version: int, entry: Entry) -> None:
        """A process that slept may have put a version that was there, summarized and cleaned up long ago."""
        try:
            with self._lock:
                self._view = None
                view = self.refresh()
        except DuramenError as error:
            raise CommitUnknown(
                f"the commit was sent long after the last look, and now the ledger cannot be read: {error.what}",
                file=commit_key(version),
                hint="Look whether it is there before anything else is done",
            ) from error
        if entry.rows and all(row in view.rows for row in entry.rows):
            return
        taken = {(row.topic_id, row.sequence) for row in view.rows}
        if not entry.rows or any((row.topic_id, row.sequence) in taken for row in entry.rows if row.topic_id):
            raise CommitConflict(f"version {version} was taken while this process slept", file=commit_key(version))
        raise CommitUnknown(
            "the commit was sent so long ago that the ledger has forgotten what became of it",
            file=commit_key(version),
            hint="Look whether it is there before anything else is done",
        )

    # --- the summary ------------------------------------------------------------------------------------------------

    def prune(self, floors: Mapping[str, Floor], sealed: Mapping[str, int], buried: Collection[str] = ()) -> int:
        """Forget rows that nobody needs any more, and offsets of those that are sealed; returns how many rows went.

        The objects of the rows were deleted before.
        """
        with self._lock:
            while True:
                view = self._reloaded()
                rows = kept_rows(view, floors, sealed, buried)
                if len(rows) == len(view.rows) and all(map(operator.is_, rows, view.rows)):
                    return 0
                with contextlib.suppress(ObjectExists, ObjectChanged):
                    self._put_summary(replace(view, rows=rows))
                    return len(view.rows) - len(rows)

    def summarized(self) -> int:
        """The version from which whoever begins now begins. Raises LedgerError where there is no summary."""
        with self._lock:
            self._view = None
            self.refresh()
            if self._summary is None:
                raise LedgerError("the ledger has no summary", file=SUMMARY)
            return self._summary[0]

    def _summarize_now_and_then(self, view: LedgerView) -> None:
        at, size = (-_SUMMARY_EVERY, 0) if self._summary is None else self._summary[:2]
        if view.version - max(at, self._tried) >= _SUMMARY_EVERY * max(1, size // _SUMMARY_BYTES):
            self._tried = view.version
            # What was committed is committed; the next one writes it.
            with contextlib.suppress(DuramenError):
                self._summarize()

    def _summarize(self) -> None:
        """Make the newest view that is known what others begin from, unless a newer one is there."""
        view = self.view
        while self._summary is None or self._summary[0] < view.version:
            try:
                return self._put_summary(view)
            except (ObjectExists, ObjectChanged):
                view = self._reloaded()  # others wrote it, and may have pruned rows that we still have

    def _reloaded(self) -> LedgerView:
        """The newest view by way of the summary that is there now."""
        self._view = None
        return self.refresh()

    def _put_summary(self, view: LedgerView) -> None:
        """Raises ObjectExists, ObjectChanged: it is no longer the one that was seen."""
        data = encode_summary(view, new_nonce(), limits=self._limits)
        if self._summary is None:
            version = self._objects.create(SUMMARY, data)
        else:
            version = self._objects.replace(SUMMARY, data, self._summary[2])
        self._view, self._summary = view, (view.version, len(data), version)


def spent_ms(entry: Entry) -> dict[str, int]:
    """What a batch took, by step. Its commit is written before it ended: it has those of the batch before."""
    timings = entry.details.get("timings_ms")
    if not isinstance(timings, dict):
        return {}
    return {str(step).removeprefix("previous_"): spent for step, spent in timings.items() if type(spent) is int}


def applied(view: LedgerView, entry: Entry) -> LedgerView:
    """The view after a commit."""
    return view.with_rows(view.version + 1, entry.rows, sweeps=view.sweeps + entry.is_sweep)
