"""A folder on this machine for copies of segments, gone when the work is over.

What the system says of it (a full disk, too many open files) says nothing about the store, which stands as it was.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator

from logstore.errors import DiskFull, RetriableError, is_disk_full


@contextlib.contextmanager
def scratch_folder(parent: str | None) -> Iterator[str]:
    """None: below the system's folder for such files. Raises DiskFull, RetriableError."""
    try:
        with tempfile.TemporaryDirectory(prefix="duramen-", dir=parent) as folder:
            yield folder
    except OSError as error:
        if is_disk_full(error):
            raise DiskFull(
                f"no space left for the local copy: {error.strerror}",
                file=error.filename,
                hint="The store stands as it was; make room, or set another folder for temporary files",
            ) from error
        raise RetriableError(
            f"the local copy could not be made: {type(error).__name__}: {error.strerror or error}",
            file=error.filename,
            hint="The store stands as it was",
        ) from error
