"""Pins of snapshot readers: an object that says "I began then, and am at work until then", renewed while it is true.

A pin is put before the first manifest is read; garbage and level 0 that was in use then stay until it expires. A reader
that dies leaves a pin that expires by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from logstore.bucket.freeing import CLOCK_OFF_MS_MAX, HOUR_MS, Pin
from logstore.bucket.keys import PINS, is_pin, new_nonce, pin_key
from logstore.clock import Clock
from logstore.directory.sealed import seal, unseal, whole_number
from logstore.errors import AccessDenied, CorruptState, DuramenError, ObjectMissing, ObjectStoreError
from logstore.objects.objects import Objects

PIN_MS = HOUR_MS
_VERSION = 1


class Pins:
    """Of the readers of one process: those that come within an hour share a pin. Safe for threads."""

    def __init__(self, objects: Objects, clock: Clock) -> None:
        self._objects = objects
        self._clock = clock
        self._lock = threading.Lock()
        self._held: _HeldPin | None = None

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While inside, what readers could find at the beginning stays, also should it take days.

        Whoever may not write has no pin: what it reads stays for the grace of the maintenance.
        """
        try:
            pin = self._taken()
        except AccessDenied:
            yield
            return
        try:
            yield
        finally:
            with self._lock:
                pin.holders -= 1
                if not pin.holders:
                    pin.done.set()
                    if pin is not self._held:
                        pin.remove()

    def _taken(self) -> _HeldPin:
        with self._lock:
            pin, now_ms = self._held, self._clock.now_ms()
            if pin is None or not pin.serves(now_ms):
                before, pin = pin, _HeldPin(self._objects, self._clock)
                self._held = pin
                if before is not None and not before.holders:
                    before.remove()
            pin.holders += 1
            if pin.holders == 1:
                pin.done = threading.Event()
                threading.Thread(target=pin.renew, args=(pin.done,), daemon=True).start()
            return pin

    def close(self) -> None:
        """Give up the pin that nobody holds any more; one that is left expires by itself. Idempotent."""
        with self._lock:
            pin, self._held = self._held, None
            if pin is not None and not pin.holders:
                pin.remove()


class _HeldPin:
    def __init__(self, objects: Objects, clock: Clock) -> None:
        self._objects = objects
        self._clock = clock
        self._key = pin_key(new_nonce())
        started_ms = clock.now_ms()
        self._pin = Pin(started_ms, started_ms + PIN_MS)
        self._version = objects.create(self._key, encode_pin(self._pin))
        self.holders = 0
        self.done = threading.Event()

    def serves(self, now_ms: int) -> bool:
        """Whether one more may hold it: it is not about to expire, and does not hold back what is long gone."""
        return now_ms < min(self._pin.expires_ms - PIN_MS // 3, self._pin.started_ms + PIN_MS)

    def renew(self, done: threading.Event) -> None:
        """Each third of its time."""
        while not done.wait(PIN_MS / 3000):
            pin = Pin(self._pin.started_ms, self._clock.now_ms() + PIN_MS)
            with contextlib.suppress(
                ObjectStoreError, ObjectMissing
            ):  # the next time, or the reader finds objects gone
                self._version = self._objects.replace(self._key, encode_pin(pin), self._version)
                self._pin = pin

    def remove(self) -> None:
        with contextlib.suppress(DuramenError):  # it expires
            self._objects.delete([self._key])


def read_pins(objects: Objects, now_ms: int) -> tuple[Pin, ...]:
    """All pins. One that cannot be read holds everything until it is two days old: nobody knows what it protects."""
    found = []
    for head in objects.list(PINS):
        if not is_pin(head.key):
            continue
        try:
            document = unseal(objects.get(head.key)[0], version=_VERSION, file=head.key)
            started_ms = whole_number(document, "started_ms", file=head.key)
            found.append(Pin(started_ms, whole_number(document, "expires_ms", file=head.key)))
        except ObjectMissing:
            continue
        except CorruptState:
            found.append(Pin(0, head.modified_ms + 48 * HOUR_MS))
    return tuple(pin for pin in found if now_ms <= pin.expires_ms + CLOCK_OFF_MS_MAX)


def remove_expired_pins(objects: Objects, now_ms: int) -> int:
    """Pins that ended a day ago and more; their readers are long gone. Returns how many."""
    old = (head.key for head in objects.list(PINS) if now_ms - head.modified_ms > 24 * HOUR_MS + PIN_MS)
    gone = [key for key in old if is_pin(key)]
    if gone:
        objects.delete(gone)
    return len(gone)


def encode_pin(pin: Pin) -> bytes:
    document = {"started_ms": pin.started_ms, "expires_ms": pin.expires_ms, "nonce": new_nonce()}
    return seal(document, version=_VERSION)
