"""Pins of snapshot readers: an object that says "I began then, and am at work until then", renewed while it is true.

A pin is put before the first manifest is read; garbage and level 0 that was in use then stay until it expires. A reader
that dies leaves a pin that expires by itself.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from logstore.bucket.freeing import CLOCK_OFF_MS_MAX, HOUR_MS, Pin
from logstore.bucket.keys import PINS, new_nonce, pin_key
from logstore.clock import Clock
from logstore.directory.sealed import seal, unseal, whole_number
from logstore.errors import CorruptState, ObjectMissing, ObjectStoreError
from logstore.objects.objects import Objects, Version

PIN_MS = HOUR_MS
_VERSION = 1


@contextlib.contextmanager
def pinned(objects: Objects, clock: Clock) -> Iterator[Pin]:
    """While inside, what readers could find at the beginning stays. A thread renews the pin each third of its time."""
    key, started_ms = pin_key(new_nonce()), clock.now_ms()
    pin = Pin(started_ms, started_ms + PIN_MS)
    version = objects.create(key, encode_pin(pin))
    done = threading.Event()
    renewing = threading.Thread(target=_renew, args=(objects, clock, key, pin, version, done), daemon=True)
    renewing.start()
    try:
        yield pin
    finally:
        done.set()
        renewing.join()
        with contextlib.suppress(ObjectStoreError):  # it expires
            objects.delete([key])


def _renew(objects: Objects, clock: Clock, key: str, pin: Pin, version: Version, done: threading.Event) -> None:
    while not done.wait(PIN_MS / 3000):
        with contextlib.suppress(ObjectStoreError, ObjectMissing):  # the next time, or the reader finds objects gone
            version = objects.replace(key, encode_pin(Pin(pin.started_ms, clock.now_ms() + PIN_MS)), version)


def read_pins(objects: Objects, now_ms: int) -> tuple[Pin, ...]:
    """All pins. One that cannot be read holds everything until it is two days old: nobody knows what it protects."""
    found = []
    for head in objects.list(PINS):
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
    gone = [head.key for head in objects.list(PINS) if now_ms - head.modified_ms > 24 * HOUR_MS + PIN_MS]
    if gone:
        objects.delete(gone)
    return len(gone)


def encode_pin(pin: Pin) -> bytes:
    document = {"started_ms": pin.started_ms, "expires_ms": pin.expires_ms, "nonce": new_nonce()}
    return seal(document, version=_VERSION)
