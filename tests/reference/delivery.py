"""Delivery of byte ranges of segment files to a socket, from the page cache and without a copy through Python.

Owns the two framings and the loop around `sendfile`. It never opens, reads for meaning or checks what it sends, and
never closes the socket: after any error the connection is out of step with its framing and the caller must close it,
unless the error says that nothing had been sent (`bytes_sent` 0).

    message set  := int32 length of what follows · int16 error code · messages
    several sets := int32 length of what follows · int16 error code 0 · message set*             (big-endian)
"""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from logstore.clock import SYSTEM_CLOCK, Clock
from logstore.errors import DuramenError
from logstore.files import File
from logstore.limits import INT32_MAX

_HEADER = struct.Struct(">ih")
_LENGTH_BYTES = 4
_ERROR_CODE_BYTES = 2

NO_ERROR = 0
UNKNOWN_SERVER_ERROR = -1
KAFKA_STORAGE_ERROR = 56

#: One sendfile call; between two of them the deadline is looked at.
_SENDFILE_BYTES = 4 << 20
#: The buffer when sendfile cannot be used.
_COPY_BYTES = 256 << 10
#: What sendfile answers for a file or socket it cannot serve, as opposed to an error of the transfer.
_NO_SENDFILE = frozenset({errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOTSOCK})
#: "More follows": lets the kernel put a header into one packet with the data behind it.
_MSG_MORE = getattr(socket, "MSG_MORE", 0)


class DeliveryTooLarge(DuramenError):
    """Message sets whose lengths do not fit the framing's int32; nothing was sent."""

    kafka_code = 10


class DeliveryBroken(DuramenError):
    """A file ended before the bytes promised from it; unless `bytes_sent` is 0 the connection must be closed."""

    kafka_code = 56

    def __init__(self, what: str, *, bytes_sent: int, **places: Any) -> None:
        super().__init__(what, **places)
        self.bytes_sent = bytes_sent


class DeliveryTimeout(DuramenError):
    """The other side took its bytes too slowly; unless `bytes_sent` is 0 the connection must be closed."""

    kafka_code = 7

    def __init__(self, what: str, *, bytes_sent: int, **places: Any) -> None:
        super().__init__(what, **places)
        self.bytes_sent = bytes_sent


@dataclass(frozen=True, slots=True)
class FileRange:
    """Bytes of an open segment file. The descriptor keeps them readable even when the file is renamed or unlinked."""

    file: File
    position: int
    size: int


@dataclass(frozen=True, slots=True)
class MessageSet:
    """The answer for one partition: its ranges back to back, or an error code and no ranges."""

    error_code: int = NO_ERROR
    ranges: tuple[FileRange, ...] = ()

    @property
    def message_bytes(self) -> int:
        return sum(part.size for part in self.ranges)

    @property
    def framed_bytes(self) -> int:
        return _LENGTH_BYTES + _ERROR_CODE_BYTES + self.message_bytes


def error_code_of(error: BaseException | None) -> int:
    """Kafka's number for an error; 0 for none, -1 ("unknown") for one Kafka has no number for."""
    if error is None:
        return NO_ERROR
    if isinstance(error, DuramenError):
        return error.kafka_code
    return KAFKA_STORAGE_ERROR if isinstance(error, OSError) else UNKNOWN_SERVER_ERROR


def send_message_set(
    sock: socket.socket, message_set: MessageSet, timeout_s: float, *, clock: Clock = SYSTEM_CLOCK
) -> int:
    """Send one framed message set within `timeout_s`; returns how many bytes went out, the frame included.

    Raises DeliveryTooLarge, DeliveryBroken, DeliveryTimeout, or the socket's own OSError. Works on blocking and
    non-blocking sockets; the socket's timeout is the same afterwards.
    """
    return _Sender(sock, timeout_s, clock).send(_framed(message_set), [message_set])


def send_message_sets(
    sock: socket.socket, message_sets: Sequence[MessageSet], timeout_s: float, *, clock: Clock = SYSTEM_CLOCK
) -> int:
    """Send several message sets in one answer; otherwise as `send_message_set`."""
    head = _header(_ERROR_CODE_BYTES + sum(part.framed_bytes for part in message_sets), NO_ERROR)

    def parts() -> Iterator[bytes | FileRange]:
        yield head
        for message_set in message_sets:
            yield from _framed(message_set)

    return _Sender(sock, timeout_s, clock).send(parts(), message_sets)


def _framed(message_set: MessageSet) -> Iterator[bytes | FileRange]:
    yield _header(_ERROR_CODE_BYTES + message_set.message_bytes, message_set.error_code)
    yield from message_set.ranges


def _header(length: int, error_code: int) -> bytes:
    if length > INT32_MAX:
        raise DeliveryTooLarge(
            f"an answer of {length} bytes, the framing takes {INT32_MAX}", hint="Fetch with a smaller byte budget"
        )
    return _HEADER.pack(length, error_code)


def _check_ranges(message_sets: Sequence[MessageSet]) -> None:
    """Refuse a short file while the connection is still in step."""
    for message_set in message_sets:
        _header(_ERROR_CODE_BYTES + message_set.message_bytes, message_set.error_code)
        for part in message_set.ranges:
            if part.position < 0 or part.size < 0:
                raise ValueError(f"no byte range: {part}")
            if part.size and part.file.size() < part.position + part.size:
                raise _short(part, part.file.size(), bytes_sent=0)


def _short(part: FileRange, position: int, *, bytes_sent: int) -> DeliveryBroken:
    return DeliveryBroken(
        f"the file ends before the {part.size} bytes promised from {part.position} on",
        file=part.file.path,
        position=position,
        hint="Close the connection: the reader waits for bytes that do not exist" if bytes_sent else None,
        bytes_sent=bytes_sent,
    )


class _Sender:
    """One answer on its way: the socket, the deadline, and how far it got."""

    def __init__(self, sock: socket.socket, timeout_s: float, clock: Clock) -> None:
        if hasattr(sock, "cipher"):
            # sendfile on its descriptor would put plain bytes into the encrypted stream
            raise TypeError("zero-copy delivery needs a plain socket, not a TLS one")
        self._sock = sock
        self._clock = clock
        self._timeout_s = timeout_s
        self._deadline_ms = clock.monotonic_ms() + int(timeout_s * 1000)
        self._bytes_sent = 0

    def send(self, parts: Iterator[bytes | FileRange], message_sets: Sequence[MessageSet]) -> int:
        _check_ranges(message_sets)
        timeout_before = self._sock.gettimeout()
        self._sock.setblocking(False)
        try:
            headers = b""
            for part in parts:
                if isinstance(part, bytes):
                    headers += part
                elif part.size:
                    self._send_bytes(memoryview(headers), _MSG_MORE)
                    headers = b""
                    self._send_range(part)
            self._send_bytes(memoryview(headers))
        finally:
            self._sock.settimeout(timeout_before)
        return self._bytes_sent

    def _send_bytes(self, view: memoryview, flags: int = 0) -> None:
        done = 0
        while done < len(view):
            try:
                sent = self._sock.send(view[done:], flags)
            except BlockingIOError:
                self._wait_writable()
                continue
            done += sent
            self._bytes_sent += sent
            self._check_deadline(done < len(view))

    def _send_range(self, part: FileRange) -> None:
        try:
            source = part.file.fileno()
        except OSError:  # a file without a descriptor
            self._copy_range(part, 0)
            return
        done = 0
        while done < part.size:
            count = min(part.size - done, _SENDFILE_BYTES)
            try:
                sent = os.sendfile(self._sock.fileno(), source, part.position + done, count)
            except BlockingIOError:
                self._wait_writable()
                continue
            except OSError as error:
                if error.errno not in _NO_SENDFILE:
                    raise
                self._copy_range(part, done)
                return
            if sent == 0:
                raise _short(part, part.position + done, bytes_sent=self._bytes_sent)
            done += sent
            self._bytes_sent += sent
            self._check_deadline(done < part.size)

    def _copy_range(self, part: FileRange, done: int) -> None:
        buffer = memoryview(bytearray(min(part.size - done, _COPY_BYTES)))
        while done < part.size:
            count = part.file.pread_into(buffer[: part.size - done], part.position + done)
            if count == 0:
                raise _short(part, part.position + done, bytes_sent=self._bytes_sent)
            self._send_bytes(buffer[:count])
            done += count

    def _check_deadline(self, more: bool) -> None:
        if more and self._clock.monotonic_ms() > self._deadline_ms:
            raise self._timed_out()

    def _wait_writable(self) -> None:
        left_ms = self._deadline_ms - self._clock.monotonic_ms()
        if left_ms <= 0:
            raise self._timed_out()
        poll = select.poll()  # unlike select() it takes descriptors above 1023
        poll.register(self._sock.fileno(), select.POLLOUT)
        if not poll.poll(left_ms):
            raise self._timed_out()

    def _timed_out(self) -> DeliveryTimeout:
        return DeliveryTimeout(
            f"the reader took {self._bytes_sent} bytes within {self._timeout_s:g} s and then no more",
            hint="Close the connection: the answer is incomplete" if self._bytes_sent else None,
            bytes_sent=self._bytes_sent,
        )
