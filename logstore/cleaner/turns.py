"""Things made side by side, and taken up in their order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class Turns(Generic[_Item]):
    """Items 0, 1, 2 and so on, which threads begin in that order. None of them waits for its turn: whoever hands in the
    next one takes up those behind it, too. So that not too many lie there, none is begun that is far ahead.
    """

    def __init__(self, ahead: int) -> None:
        self._ahead = ahead
        self._next = 0
        self._handed_in: dict[int, _Item] = {}
        self._taken_up = False
        self._failed = False
        self._moved = threading.Condition()

    def begin(self, number: int) -> None:
        """Returns once the item may be begun. Raises CancelledError when another one has failed."""
        with self._moved:
            self._moved.wait_for(lambda: self._failed or number < self._next + self._ahead)
            self._check()

    def await_turn(self, number: int) -> None:
        """Returns once all items before this one are done; the turn lasts until it is handed in. Raises as `begin`."""
        with self._moved:
            self._moved.wait_for(lambda: self._failed or (self._next == number and not self._taken_up))
            self._check()

    def _check(self) -> None:
        if self._failed:
            raise CancelledError

    def hand_in(self, number: int, item: _Item) -> Iterator[_Item]:
        """All items whose turn it is now; none while another thread is at them, which takes this one as well."""
        with self._moved:
            self._handed_in[number] = item
            if self._taken_up:
                return
            self._taken_up = True
        while True:
            with self._moved:
                if self._next not in self._handed_in:
                    self._taken_up = False
                    self._moved.notify_all()
                    return
                item = self._handed_in.pop(self._next)
            yield item
            with self._moved:
                self._next += 1
                self._moved.notify_all()

    def fail(self) -> None:
        """Nobody waits any more."""
        with self._moved:
            self._failed = True
            self._moved.notify_all()
