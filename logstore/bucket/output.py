"""A staged file that becomes an object: gathered in memory, above some MiB on local disk, and put when it is whole."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator

from crc32c import crc32c

from logstore.limits import MIB
from logstore.objects.objects import Bytes, Objects

_MEMORY_BYTES = 16 * MIB
_PART_BYTES = 8 * MIB


class ObjectOutput:
    """Implements `StagedOutput`. What is written can be sent more than once, as a retry needs it."""

    def __init__(self, objects: Objects, key: str) -> None:
        self.name = key
        self._objects = objects
        self._spool = tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115 (closed by finish and abandon)
        self._crc = 0

    def write(self, data: bytes | memoryview) -> None:
        self._crc = crc32c(data, self._crc)
        self._spool.write(data)

    def start_writing(self) -> None:
        pass

    def finish(self) -> int:
        """Raises what `Objects.put` raises."""
        try:
            self._objects.put(self.name, self)
        finally:
            self._spool.close()
        return self._crc

    def abandon(self) -> None:
        """Nothing was sent. An object whose put failed half-way is swept one day."""
        self._spool.close()

    def __iter__(self) -> Iterator[Bytes]:
        self._spool.seek(0)
        while part := self._spool.read(_PART_BYTES):
            yield part
