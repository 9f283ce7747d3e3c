from __future__ import annotations

import errno
import os
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from logstore.errors import CorruptBatch, DuramenError, OffsetOutOfRange, UnknownTopic
from logstore.files import OS_FILES, File
from reference import delivery
from reference.delivery import (
    DeliveryBroken,
    DeliveryTimeout,
    DeliveryTooLarge,
    FileRange,
    MessageSet,
    error_code_of,
    send_message_set,
    send_message_sets,
)

TIMEOUT_S = 20.0


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, socket.socket]]:
    """Two ends of a TCP connection over loopback with buffers so small that every send is a partial one."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        near = socket.socket()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        near.connect(server.getsockname())
        far, _ = server.accept()
    far.settimeout(TIMEOUT_S)
    with near, far:
        yield near, far


class Client:
    """Decodes both framings from a socket, at its own pace; it shares nothing with the sender."""

    def __init__(self, sock: socket.socket, *, chunk: int = 1 << 16, pause_s: float = 0.0) -> None:
        self.sock, self.chunk, self.pause_s = sock, chunk, pause_s

    def exactly(self, size: int) -> bytes:
        parts = []
        while size:
            if self.pause_s:
                time.sleep(self.pause_s)
            part = self.sock.recv(min(size, self.chunk))
            if not part:
                raise EOFError(f"{size} bytes short")
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def message_set(self) -> tuple[int, bytes]:
        (length,) = struct.unpack(">i", self.exactly(4))
        (code,) = struct.unpack(">h", self.exactly(2))
        return code, self.exactly(length - 2)

    def message_sets(self) -> list[tuple[int, bytes]]:
        (length,) = struct.unpack(">i", self.exactly(4))
        assert struct.unpack(">h", self.exactly(2)) == (0,)
        left, sets = length - 2, []
        while left > 0:
            sets.append(self.message_set())
            left -= 6 + len(sets[-1][1])
        assert left == 0
        return sets


def reading(read: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    """Run the client in a thread of its own; what it got, or what it raised, is in the list."""
    found: list[object] = []

    def run() -> None:
        try:
            found.append(read())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def result(thread: threading.Thread, found: list[object]) -> object:
    thread.join(TIMEOUT_S)
    assert found, "the client is still reading"
    return found[0]


def segment(directory: Path, content: bytes, name: str = "00000000000000000000.log") -> File:
    (directory / name).write_bytes(content)
    return OS_FILES.open(str(directory / name))


class WithoutDescriptor:
    """A file that is not the operating system's, as a simulated one is."""

    def __init__(self, file: File) -> None:
        self.path = file.path
        self.pread_into = file.pread_into
        self.size = file.size

    def fileno(self) -> int:
        raise OSError(errno.EBADF, "no descriptor")


def test_one_set_to_a_slow_reader(tmp_path: Path, connection: tuple[socket.socket, socket.socket]) -> None:
    near, far = connection
    content = random.Random(1).randbytes(300_000)
    file = segment(tmp_path, content)
    running = reading(Client(far, chunk=9000, pause_s=0.002).message_set)
    sent = send_message_set(near, MessageSet(ranges=(FileRange(file, 1000, 250_000),)), TIMEOUT_S)
    assert sent == 250_006
    assert result(*running) == (0, content[1000:251_000])
    file.close()


def test_several_sets_in_one_answer(tmp_path: Path, connection: tuple[socket.socket, socket.socket]) -> None:
    near, far = connection
    one, two = random.Random(2).randbytes(50_000), random.Random(3).randbytes(70_000)
    files = segment(tmp_path, one), segment(tmp_path, two, "00000000000000000100.log")
    sets = [
        MessageSet(ranges=(FileRange(files[0], 0, 50_000), FileRange(files[1], 5, 60_000))),
        MessageSet(error_code_of(OffsetOutOfRange("below the log start"))),
        MessageSet(),
        MessageSet(ranges=(FileRange(files[1], 70_000, 0), FileRange(files[1], 0, 1))),
        MessageSet(error_code_of(UnknownTopic("no such topic"))),
    ]
    running = reading(Client(far, chunk=5000).message_sets)
    sent = send_message_sets(near, sets, TIMEOUT_S)
    expected = [(0, one + two[5:60_005]), (1, b""), (0, b""), (0, two[:1]), (3, b"")]
    assert result(*running) == expected
    assert sent == 6 + sum(6 + len(messages) for _, messages in expected)
    for file in files:
        file.close()


def test_many_answers_stay_in_step_on_one_connection(
    tmp_path: Path, connection: tuple[socket.socket, socket.socket], seed: int
) -> None:
    near, far = connection
    rng = random.Random(seed)
    content = rng.randbytes(40_000)
    file = segment(tmp_path, content)

    def drawn() -> MessageSet:
        if rng.random() < 0.2:
            return MessageSet(rng.randrange(-1, 90))
        starts = [rng.randrange(len(content)) for _ in range(rng.randrange(4))]
        return MessageSet(ranges=tuple(FileRange(file, at, rng.randrange(len(content) - at)) for at in starts))

    def expected(part: MessageSet) -> tuple[int, bytes]:
        return part.error_code, b"".join(content[r.position : r.position + r.size] for r in part.ranges)

    answers = [[drawn() for _ in range(rng.randrange(5))] if rng.random() < 0.5 else drawn() for _ in range(60)]
    client = Client(far, chunk=3000)
    running = reading(
        lambda: [client.message_sets() if isinstance(part, list) else client.message_set() for part in answers]
    )
    for part in answers:
        if isinstance(part, list):
            send_message_sets(near, part, TIMEOUT_S)
        else:
            send_message_set(near, part, TIMEOUT_S)
    assert result(*running) == [
        [expected(one) for one in part] if isinstance(part, list) else expected(part) for part in answers
    ]
    file.close()


def test_an_answer_without_messages_arrives_at_once(connection: tuple[socket.socket, socket.socket]) -> None:
    near, far = connection
    began = time.monotonic()
    send_message_sets(near, [MessageSet(), MessageSet(6)], TIMEOUT_S)
    assert Client(far).message_sets() == [(0, b""), (6, b"")]
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("mode", ["blocking", "non-blocking", "with a timeout"])
def test_the_socket_keeps_its_mode(tmp_path: Path, connection: tuple[socket.socket, socket.socket], mode: str) -> None:
    near, far = connection
    timeout = {"blocking": None, "non-blocking": 0.0, "with a timeout": 0.001}[mode]
    near.settimeout(timeout)
    content = random.Random(4).randbytes(100_000)
    file = segment(tmp_path, content)
    running = reading(Client(far, chunk=8000, pause_s=0.003).message_set)
    send_message_set(near, MessageSet(ranges=(FileRange(file, 0, len(content)),)), TIMEOUT_S)
    assert result(*running) == (0, content)
    assert near.gettimeout() == timeout
    file.close()


def test_a_reader_that_stops_is_given_up_at_the_deadline(
    tmp_path: Path, connection: tuple[socket.socket, socket.socket]
) -> None:
    near, _ = connection
    file = segment(tmp_path, bytes(20_000_000))
    began = time.monotonic()
    with pytest.raises(DeliveryTimeout, match="Close the connection") as caught:
        send_message_set(near, MessageSet(ranges=(FileRange(file, 0, 20_000_000),)), 0.3)
    assert 0.25 < time.monotonic() - began < 60
    assert 0 < caught.value.bytes_sent < 20_000_000
    assert caught.value.kafka_code == 7
    file.close()


def test_a_trickling_reader_is_given_up_at_the_deadline_as_well(
    tmp_path: Path, connection: tuple[socket.socket, socket.socket]
) -> None:
    near, far = connection
    file = segment(tmp_path, bytes(20_000_000))
    running = reading(Client(far, chunk=2000, pause_s=0.005).message_set)
    with pytest.raises(DeliveryTimeout):
        send_message_set(near, MessageSet(ranges=(FileRange(file, 0, 20_000_000),)), 0.4)
    near.close()
    assert isinstance(result(*running), (EOFError, ConnectionError))
    file.close()


def test_a_file_that_is_short_from_the_start_leaves_the_connection_usable(
    tmp_path: Path, connection: tuple[socket.socket, socket.socket]
) -> None:
    near, far = connection
    file = segment(tmp_path, b"x" * 100)
    sets = [MessageSet(ranges=(FileRange(file, 0, 100),)), MessageSet(ranges=(FileRange(file, 50, 51),))]
    with pytest.raises(DeliveryBroken) as caught:
        send_message_sets(near, sets, TIMEOUT_S)
    assert (caught.value.bytes_sent, caught.value.file, caught.value.position) == (0, file.path, 100)
    send_message_set(near, MessageSet(error_code_of(caught.value)), TIMEOUT_S)
    assert Client(far).message_set() == (56, b"")
    file.close()


@pytest.mark.parametrize("zero_copy", [True, False], ids=["sendfile", "copied"])
def test_a_file_cut_while_it_is_sent_breaks_the_connection(
    tmp_path: Path, connection: tuple[socket.socket, socket.socket], zero_copy: bool
) -> None:
    near, far = connection
    size = 20_000_000
    file = segment(tmp_path, bytes(size))
    source = file if zero_copy else WithoutDescriptor(file)
    client = Client(far)

    def cut_then_read() -> object:
        head = client.exactly(6 + 100)
        os.truncate(file.path, 10_000)  # the sender cannot be past this much: the buffers hold far less than the file
        return len(head) + len(client.exactly(size - 100))

    running = reading(cut_then_read)
    with pytest.raises(DeliveryBroken, match="Close the connection") as caught:
        send_message_set(near, MessageSet(ranges=(FileRange(source, 0, size),)), TIMEOUT_S)
    assert 0 < caught.value.bytes_sent < size
    near.close()
    assert isinstance(result(*running), EOFError)
    file.close()


def test_a_file_renamed_and_unlinked_while_it_is_sent_arrives_whole(
    tmp_path: Path, connection: tuple[socket.socket, socket.socket]
) -> None:
    near, far = connection
    content = random.Random(5).randbytes(200_000)
    file = segment(tmp_path, content)
    os.rename(file.path, file.path + ".deleted")
    os.unlink(file.path + ".deleted")
    running = reading(Client(far).message_set)
    send_message_set(near, MessageSet(ranges=(FileRange(file, 0, len(content)),)), TIMEOUT_S)
    assert result(*running) == (0, content)
    file.close()


def test_a_file_without_descriptor_is_copied(tmp_path: Path, connection: tuple[socket.socket, socket.socket]) -> None:
    near, far = connection
    content = random.Random(6).randbytes(600_000)
    file = segment(tmp_path, content)
    running = reading(Client(far).message_set)
    send_message_set(near, MessageSet(ranges=(FileRange(WithoutDescriptor(file), 3, 599_997),)), TIMEOUT_S)
    assert result(*running) == (0, content[3:])
    file.close()


def test_without_sendfile_in_the_kernel_the_bytes_are_copied(
    tmp_path: Path, connection: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    near, far = connection
    content = random.Random(7).randbytes(600_000)
    file = segment(tmp_path, content)
    real, calls = os.sendfile, []

    def gives_up(out: int, source: int, position: int, count: int) -> int:
        calls.append(count)
        if len(calls) > 2:
            raise OSError(errno.EINVAL, "not for this file")
        return real(out, source, position, min(count, 1000))

    monkeypatch.setattr(delivery.os, "sendfile", gives_up)
    running = reading(Client(far).message_set)
    send_message_set(near, MessageSet(ranges=(FileRange(file, 0, len(content)),)), TIMEOUT_S)
    assert result(*running) == (0, content)
    assert len(calls) >= 3
    file.close()


def test_a_reader_that_hangs_up_is_the_sockets_own_error(
    tmp_path: Path, connection: tuple[socket.socket, socket.socket]
) -> None:
    near, far = connection
    file = segment(tmp_path, bytes(20_000_000))
    far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    far.close()
    with pytest.raises(ConnectionError):
        send_message_set(near, MessageSet(ranges=(FileRange(file, 0, 20_000_000),)), TIMEOUT_S)
    assert near.gettimeout() is None
    file.close()


def test_an_answer_beyond_the_framing_is_refused_before_it_is_begun(
    tmp_path: Path, connection: tuple[socket.socket, socket.socket]
) -> None:
    near, far = connection
    file = segment(tmp_path, b"")
    os.truncate(file.path, 1 << 31)  # sparse
    whole = MessageSet(ranges=(FileRange(file, 0, (1 << 31) - 3),))
    assert whole.framed_bytes == (1 << 31) + 3
    half = MessageSet(ranges=(FileRange(file, 0, 1 << 30),))
    with pytest.raises(DeliveryTooLarge):
        send_message_set(near, MessageSet(ranges=(FileRange(file, 0, (1 << 31) - 2),)), TIMEOUT_S)
    with pytest.raises(DeliveryTooLarge):
        send_message_sets(near, [whole], TIMEOUT_S)
    with pytest.raises(DeliveryTooLarge):
        send_message_sets(near, [half, half], TIMEOUT_S)
    send_message_set(near, MessageSet(9), TIMEOUT_S)
    assert Client(far).message_set() == (9, b"")
    file.close()


def test_a_negative_range_is_refused(tmp_path: Path, connection: tuple[socket.socket, socket.socket]) -> None:
    file = segment(tmp_path, b"x")
    for bad in (FileRange(file, -1, 1), FileRange(file, 0, -1)):
        with pytest.raises(ValueError, match="no byte range"):
            send_message_set(connection[0], MessageSet(ranges=(bad,)), TIMEOUT_S)
    file.close()


def test_an_encrypted_socket_is_refused() -> None:
    class Encrypted(socket.socket):
        def cipher(self) -> None: ...

    with Encrypted() as sock, pytest.raises(TypeError, match="TLS"):
        send_message_set(sock, MessageSet(), TIMEOUT_S)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (OffsetOutOfRange("x"), 1),
        (CorruptBatch("x"), 2),
        (DuramenError("x"), -1),
        (OSError(errno.EIO, "x"), 56),
        (ValueError("x"), -1),
    ],
)
def test_errors_have_kafkas_numbers(error: Exception | None, code: int) -> None:
    assert error_code_of(error) == code
