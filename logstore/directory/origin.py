"""Where a store is from: a backup records which store it is a copy of and when it was taken; its first commit records
since when it is written to, which makes it a restored store.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

from logstore.directory.layout import Layout
from logstore.directory.sealed import read_sealed, whole_number, write_sealed
from logstore.errors import CorruptState
from logstore.files import FileSystem
from logstore.limits import DEFAULT_LIMITS

VERSION = 1


@dataclass(frozen=True, slots=True)
class Origin:
    source: str
    taken_ms: int
    #: when the first batch was committed to the copy; None while it is only a backup
    restored_ms: int | None = None

    def explained(self, hint: str | None) -> str:
        """The hint of an error that a copy explains."""
        taken = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self.taken_ms // 1000))
        return f"The store is a copy of {self.source}, taken at {taken}. {hint}"


def read_origin(fs: FileSystem, layout: Layout) -> Origin | None:
    """None for a store that is not a copy. Raises CorruptState."""
    path = layout.origin
    try:
        document = read_sealed(fs, path, version=VERSION, limit=DEFAULT_LIMITS.side_file_bytes)
    except FileNotFoundError:
        return None
    restored = document.get("restored_ms")
    return Origin(
        str(document.get("source")),
        whole_number(document, "taken_ms", file=path),
        None if restored is None else whole_number(document, "restored_ms", file=path),
    )


def write_origin(fs: FileSystem, layout: Layout, origin: Origin) -> None:
    document = {"source": origin.source, "taken_ms": origin.taken_ms, "restored_ms": origin.restored_ms}
    write_sealed(fs, layout.origin, document, version=VERSION)


def note_restored(fs: FileSystem, layout: Layout, *, now_ms: int) -> None:
    """Note that a copy is written to from now on; does nothing for a store that is not a copy, or was noted before."""
    try:
        origin = read_origin(fs, layout) if fs.exists(layout.origin) else None
    except CorruptState:
        return  # `verify` says so; it must not stop a commit
    if origin is not None and origin.restored_ms is None:
        write_origin(fs, layout, replace(origin, restored_ms=now_ms))
