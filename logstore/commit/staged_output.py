"""Where a staged file is written to: a file in a plan's folder, or something else with a name that only it has."""

from __future__ import annotations

import contextlib
import os
import uuid
from dataclasses import dataclass
from typing import Protocol

from logstore.files import FileSystem


class StagedOutput(Protocol):
    #: what the plan calls it
    name: str

    def write(self, data: bytes | memoryview) -> None:
        """The next bytes. They may change once this has returned."""

    def start_writing(self) -> None:
        """More will come: what was written may be on its way already."""

    def finish(self) -> int | None:
        """Durable when this returns. The CRC-32C of all of it where readers cannot look for themselves, else None."""

    def abandon(self) -> None:
        """As if it had never been."""


@dataclass(frozen=True, slots=True)
class Filled:
    """A place for staged files that tasks filled before anybody was there to commit them."""

    plan_id: str
    #: wall time before the first of the files had its name
    since_ms: int


class Outputs(Protocol):
    """Staged files of one batch, for its tasks. A small value that is pickled; nothing secret is in it."""

    def check(self) -> None:
        """Raises UnsuitableFileSystem where this process does not see what the driver sees."""

    def of(self, plan_id: str) -> Outputs:
        """Those of another batch in the same store."""

    def open(self, task: int) -> tuple[StagedOutput, int]:
        """A new one for a task, and the time that stands for rows without one, as all tasks agree on it."""


class FileOutput:
    """A new file in a folder of a file system."""

    def __init__(self, fs: FileSystem, folder: str) -> None:
        self.name = f"{uuid.uuid4().hex}.batches"
        self._fs = fs
        self._folder = folder
        fs.mkdir(folder)
        self._file = fs.open(os.path.join(folder, self.name), create=True, exclusive=True)
        self._position = self._begun = 0

    def write(self, data: bytes | memoryview) -> None:
        self._file.pwrite(data, self._position)
        self._position += len(data)

    def start_writing(self) -> None:
        self._file.start_writeback(self._begun, self._position - self._begun)
        self._begun = self._position

    def finish(self) -> None:
        self._file.fsync()
        self._file.close()
        self._fs.fsync_dir(self._folder)

    def abandon(self) -> None:
        self._file.close()
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(os.path.join(self._folder, self.name))
