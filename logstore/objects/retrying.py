"""Retries under one deadline, and what a lost answer means.

A write whose answer is lost may have happened, or happen later. Trying again tells: the condition lets one attempt
through at most, and where it fails the object is read back. Equal bytes are ours, since every object carries a nonce.
What is still open at the deadline is said in the error (`may_be_applied`), never guessed.
"""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from logstore.errors import (
    AccessDenied,
    DuramenError,
    InvalidConfig,
    ObjectChanged,
    ObjectExists,
    ObjectMissing,
    ObjectStoreError,
    ObjectStoreThrottled,
    ObjectStoreUnavailable,
    ObjectTruncated,
    RequestConflict,
    UnknownBucket,
)
from logstore.objects.counted import CountedObjects
from logstore.objects.objects import Bytes, Head, Objects, Version

_T = TypeVar("_T")
_PASSING = (ObjectStoreThrottled, ObjectStoreUnavailable, RequestConflict)
#: credentials that expire between two attempts
_REFUSED = (AccessDenied, InvalidConfig, UnknownBucket)
#: a cut answer is tried again this often before it is taken for a short object
_SHORT_TRIES = 3
#: a call that waits longer than this says so, once
_QUIET_S = 5.0

_log = logging.getLogger("duramen.objects")


@dataclass(frozen=True, slots=True)
class Patience:
    """How long a call may take, all its attempts together, and how long it waits between them."""

    deadline_s: float = 120.0
    first_wait_s: float = 0.1
    wait_s_max: float = 10.0
    sleep: Callable[[float], None] = time.sleep
    monotonic: Callable[[], float] = time.monotonic
    #: from 0 to 1: how much of a wait is taken, so that many clients do not come back at once
    jitter: Callable[[], float] = random.random


class _Call:
    """One call with all its attempts."""

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._began = patience.monotonic()
        self._ends = self._began + patience.deadline_s
        self._told = False
        self._wait_s = patience.first_wait_s
        #: an attempt of this call may have been applied, or may be applied later
        self.in_doubt = False

    def wait(self, reason: ObjectStoreError) -> None:
        """Let some time go by before the next attempt. Raises `reason` when there is none left."""
        self.in_doubt = self.in_doubt or reason.may_be_applied
        wait_s = self._wait_s * (0.5 + 0.5 * self._patience.jitter())
        now = self._patience.monotonic()
        if now + wait_s > self._ends:
            reason.may_be_applied = self.in_doubt
            raise reason
        if now - self._began > _QUIET_S and not self._told:
            self._told = True
            _log.warning("%s; trying again for up to %d s", reason, self._ends - now)
        self._patience.sleep(wait_s)
        self._wait_s = min(2 * self._wait_s, self._patience.wait_s_max)

    def check_refusal(self, reason: DuramenError) -> None:
        """Of a write. Raises ObjectStoreUnavailable where an attempt before the refused one may have been applied."""
        if self.in_doubt:
            raise ObjectStoreUnavailable(
                f"{reason.what}; an earlier attempt of this write was not answered",
                file=reason.file,
                hint=reason.hint,
                may_be_applied=True,
            ) from reason

    def ask(self, request: Callable[[], _T]) -> _T:
        """The answer of a request that can be repeated at will: a read, or a write that does the same each time."""
        short = 0
        while True:
            try:
                return request()
            except _PASSING as error:
                self.wait(error)
            except ObjectTruncated:
                short += 1
                if short == _SHORT_TRIES:
                    raise


class RetryingObjects:
    """Implements `Objects` over one that answers each call with one request."""

    def __init__(self, inner: Objects, patience: Patience | None = None) -> None:
        self._inner = inner
        #: each attempt counts
        self.requests = inner.requests if isinstance(inner, CountedObjects) else Counter[str]()
        self._patience = patience or Patience()

    def create(self, key: str, data: bytes) -> Version:
        """Raises ObjectExists where other bytes are. Its `may_be_applied`: ours may have been there before them."""
        call = _Call(self._patience)
        while True:
            try:
                return self._inner.create(key, data)
            except (ObjectExists, RequestConflict) as error:
                found = self._read_back(call, key)
                if found is None:  # two creations met and neither won, or it was deleted since
                    call.wait(error)
                elif found[0] == data:
                    return found[1]
                else:
                    raise ObjectExists(
                        "another object is already there", file=key, may_be_applied=call.in_doubt
                    ) from None
            except _PASSING as error:
                call.wait(error)
            except _REFUSED as error:
                call.check_refusal(error)
                raise

    def replace(self, key: str, data: bytes, seen: Version) -> Version:
        """Raises ObjectChanged where other bytes are. Its `may_be_applied`: ours may have been there before them."""
        call = _Call(self._patience)
        while True:
            try:
                return self._inner.replace(key, data, seen)
            except (ObjectChanged, RequestConflict) as error:
                found = self._read_back(call, key)
                if found is not None and found[0] == data:
                    return found[1]
                if found is None or found[1] != seen:
                    raise ObjectChanged(
                        "the object is no longer the one that was seen", file=key, may_be_applied=call.in_doubt
                    ) from None
                call.wait(error)
            except _PASSING as error:
                call.wait(error)
            except _REFUSED as error:
                call.check_refusal(error)
                raise

    def put(self, key: str, parts: Iterable[Bytes]) -> Version:
        if iter(parts) is parts:
            raise TypeError("parts are gone through again when an attempt fails; a generator is used up")
        return _Call(self._patience).ask(lambda: self._inner.put(key, parts))

    def get(self, key: str) -> tuple[bytes, Version]:
        return _Call(self._patience).ask(lambda: self._inner.get(key))

    def head(self, key: str) -> Head:
        return _Call(self._patience).ask(lambda: self._inner.head(key))

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
        return _Call(self._patience).ask(lambda: self._inner.ranges(key, spans))

    def delete(self, keys: Sequence[str]) -> None:
        _Call(self._patience).ask(lambda: self._inner.delete(keys))

    def list(self, prefix: str, after: str = "") -> Iterator[Head]:
        """Goes on behind the last key when a page fails; each page has the whole patience."""
        call = _Call(self._patience)
        while True:
            try:
                for head in self._inner.list(prefix, after):
                    call, after = _Call(self._patience), head.key
                    yield head
                return
            except _PASSING as error:
                call.wait(error)

    def _read_back(self, call: _Call, key: str) -> tuple[bytes, Version] | None:
        try:
            return call.ask(lambda: self._inner.get(key))
        except ObjectMissing:
            return None
        except _REFUSED as error:
            call.check_refusal(error)
            raise
