"""Small JSON documents whose damage is noticed: one line of JSON, one line with its CRC-32C.

    {"version":1,...}\\n
    crc32c 0a1b2c3d\\n

The checksum covers the first line with its newline. Owns the frame only; what a document means is its caller's.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Callable, Hashable, Mapping
from typing import Generic, TypeVar

from crc32c import crc32c

from logstore.errors import CorruptState, StoreVersionError
from logstore.files import FileSystem, read_whole, replace_file
from logstore.limits import INT64_MAX

_T = TypeVar("_T")
_TRAILER = re.compile(rb"crc32c ([0-9a-f]{8})\n\Z")
_TRAILER_BYTES = len(b"crc32c 00000000\n")


def seal(document: Mapping[str, object], *, version: int) -> bytes:
    line = json.dumps({"version": version, **document}, separators=(",", ":"), allow_nan=False).encode() + b"\n"
    return line + b"crc32c %08x\n" % crc32c(line)


def unseal(data: bytes, *, version: int, file: str) -> dict[str, object]:
    """The document, without its version. Raises CorruptState, or StoreVersionError for a newer version."""
    body, trailer = data[:-_TRAILER_BYTES], data[-_TRAILER_BYTES:]
    found = _TRAILER.match(trailer)
    if not found or not body.endswith(b"\n"):
        raise CorruptState("the file does not end with its checksum", file=file, position=max(0, len(body)))
    if crc32c(body) != int(found.group(1), 16):
        raise CorruptState("the checksum does not match", file=file)
    try:
        document = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise CorruptState("not a JSON document", file=file) from error
    if not isinstance(document, dict):
        raise CorruptState("not a JSON object", file=file)
    written = document.pop("version", None)
    if type(written) is not int or written < 1:
        raise CorruptState("no version in the document", file=file)
    if written > version:
        raise StoreVersionError(
            f"written in version {written}, this release knows {version}", file=file, hint="Use a newer release."
        )
    return document


def read_sealed(fs: FileSystem, path: str, *, version: int, limit: int) -> dict[str, object]:
    """Raises FileNotFoundError, CorruptState, StoreVersionError."""
    return unseal(read_sealed_bytes(fs, path, limit=limit), version=version, file=path)


def read_sealed_bytes(fs: FileSystem, path: str, *, limit: int) -> bytes:
    """The same, not parsed. Raises FileNotFoundError, CorruptState for a file that is too large."""
    try:
        return read_whole(fs, path, limit=limit)
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise CorruptState(f"larger than the limit of {limit} bytes", file=path) from error
        raise  # of the system: it says nothing about the file


class Parsed(Generic[_T]):
    """What files were parsed to, for as long as they hold the same bytes: comparing is much cheaper than parsing."""

    def __init__(self, files_max: int = 64) -> None:
        self._files_max = files_max
        self._known: dict[Hashable, tuple[bytes, _T]] = {}

    def of(self, key: Hashable, data: bytes, parse: Callable[[bytes], _T]) -> _T:
        known = self._known.get(key)
        if known is not None and known[0] == data:
            return known[1]
        value = parse(data)
        if len(self._known) >= self._files_max:
            self._known.clear()
        self._known[key] = (data, value)
        return value


def write_sealed(
    fs: FileSystem, path: str, document: Mapping[str, object], *, version: int, durable: bool = True
) -> None:
    replace_file(fs, path, seal(document, version=version), durable=durable)


def whole_number(document: Mapping[str, object], name: str, *, file: str, high: int = INT64_MAX) -> int:
    """A required number of the document, 0..high. Raises CorruptState."""
    value = document.get(name)
    if type(value) is not int or not 0 <= value <= high:
        raise CorruptState(f"{name} is not a number from 0 to {high}", file=file)
    return value


def whole_numbers(document: Mapping[str, object], name: str, *, file: str) -> tuple[int, ...]:
    """A required list of numbers, each 0..2^63-1. Raises CorruptState."""
    value = document.get(name)
    if not isinstance(value, list) or any(type(each) is not int or not 0 <= each <= INT64_MAX for each in value):
        raise CorruptState(f"{name} is not a list of offsets", file=file)
    return tuple(value)
