"""Work that threads do side by side and whose results are taken in order."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from typing import Generic, TypeVar

_Item = TypeVar("_Item")


class OrderedWork(Generic[_Item]):
    """Items 0, 1, 2 and so on, begun by threads in that order. No thread waits for the results before its own: the
    thread that hands in the next result also takes those after it. No item is begun too far ahead, so few results wait.
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
        """All items whose turn it is now; none while another thread handles them, which then takes this one too."""
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
        """Wake all who wait; they raise CancelledError."""
        with self._moved:
            self._failed = True
            self._moved.notify_all()
