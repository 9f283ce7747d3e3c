"""Leader epochs of one partition: which epoch wrote from which offset on, kept in `leader-epoch-checkpoint`.

Owns the rules by which entries displace each other and the file's content. Every change is written durably before the
call returns, so the file never lacks an epoch that a batch in the log carries. It never looks into batches.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from logstore.directory.checkpoint import frame_bytes, read_frame, write_frame
from logstore.files import FileSystem
from logstore.limits import DEFAULT_LIMITS, INT32_MAX, INT64_MAX, Limits
from logstore.segment.names import LEADER_EPOCH_CHECKPOINT

LEADER_EPOCH_CHECKPOINT_VERSION = 0


@dataclass(frozen=True, slots=True)
class EpochEntry:
    epoch: int
    start_offset: int


# --- the rules ---------------------------------------------------------------------------------------------------


def with_epoch(entries: Sequence[EpochEntry], new: EpochEntry) -> tuple[EpochEntry, ...]:
    """`entries` after `new` took effect; the same entries when it changes nothing.

    The latest epoch once assigned keeps its start, unless a lower one is learnt. Entries at the end that are not below
    the new one in both columns are displaced by it.
    """
    if entries and new.epoch == entries[-1].epoch and new.start_offset >= entries[-1].start_offset:
        return tuple(entries)
    kept = len(entries)
    while kept and (entries[kept - 1].epoch >= new.epoch or entries[kept - 1].start_offset >= new.start_offset):
        kept -= 1
    return (*entries[:kept], new)


def cut_from_end(entries: Sequence[EpochEntry], end_offset: int) -> tuple[EpochEntry, ...]:
    """`entries` of a log that now ends at `end_offset`: those that start at or above it are gone."""
    return tuple(entry for entry in entries if entry.start_offset < end_offset)


def cut_from_start(entries: Sequence[EpochEntry], start_offset: int) -> tuple[EpochEntry, ...]:
    """`entries` of a log that now starts at `start_offset`: the epoch in force there starts there, older ones go."""
    gone = bisect_right(entries, start_offset, key=lambda entry: entry.start_offset)
    if gone == 0:
        return tuple(entries)
    return (EpochEntry(entries[gone - 1].epoch, start_offset), *entries[gone:])


# --- the partition's epochs --------------------------------------------------------------------------------------


class LeaderEpochs:
    """The epochs of one partition, in memory and in its checkpoint."""

    def __init__(self, fs: FileSystem, path: str, entries: Iterable[EpochEntry] = ()) -> None:
        self._fs = fs
        self._path = path
        self._entries: tuple[EpochEntry, ...] = tuple(entries)

    @classmethod
    def load(cls, fs: FileSystem, directory: str, *, limits: Limits = DEFAULT_LIMITS) -> LeaderEpochs:
        """From the partition directory's checkpoint; no entries when it is absent or empty.

        Raises CorruptCheckpoint, also when the columns do not ascend. The way out is to start from no entries and let
        a scan of the log assign them again.
        """
        path = os.path.join(directory, LEADER_EPOCH_CHECKPOINT)
        entries: list[EpochEntry] = []
        for line, (epoch, start_offset) in read_frame(
            fs, path, version=LEADER_EPOCH_CHECKPOINT_VERSION, fields=2, limits=limits
        ):
            entry = EpochEntry(
                line.integer(epoch, "epoch", 0, INT32_MAX), line.integer(start_offset, "start offset", 0, INT64_MAX)
            )
            if entries and (entry.epoch <= entries[-1].epoch or entry.start_offset <= entries[-1].start_offset):
                raise line.corrupt(
                    f"epoch {entry.epoch} from offset {entry.start_offset} does not follow "
                    f"epoch {entries[-1].epoch} from offset {entries[-1].start_offset}"
                )
            entries.append(entry)
        return cls(fs, path, entries)

    @property
    def path(self) -> str:
        return self._path

    @property
    def entries(self) -> tuple[EpochEntry, ...]:
        return self._entries

    @property
    def latest(self) -> EpochEntry | None:
        return self._entries[-1] if self._entries else None

    def assign(self, epoch: int, start_offset: int, *, store: bool = True) -> bool:
        """Note that `epoch` writes from `start_offset` on; True when that changed anything.

        With `store` false the caller writes later (recovery assigns many and stores once).
        """
        if not 0 <= epoch <= INT32_MAX or not 0 <= start_offset <= INT64_MAX:
            raise ValueError(f"epoch {epoch} from offset {start_offset} is not a leader epoch")
        return self._change(with_epoch(self._entries, EpochEntry(epoch, start_offset)), store)

    def truncate_from_end(self, end_offset: int, *, store: bool = True) -> bool:
        """Forget epochs that start at or above `end_offset`; True when there were any."""
        return self._change(cut_from_end(self._entries, end_offset), store)

    def truncate_from_start(self, start_offset: int, *, store: bool = True) -> bool:
        """Let the epoch in force at `start_offset` start there, forget older ones; True when that changed anything."""
        return self._change(cut_from_start(self._entries, start_offset), store)

    def clear(self, *, store: bool = True) -> bool:
        return self._change((), store)

    def restore(self, entries: Sequence[EpochEntry]) -> bool:
        """Go back to what `entries` was before an append that failed; True when that changed anything."""
        return self._change(tuple(entries), store=True)

    def _change(self, entries: tuple[EpochEntry, ...], store: bool) -> bool:
        if entries == self._entries:
            return False
        before, self._entries = self._entries, entries
        if store:
            try:
                self.store()
            except OSError:
                self._entries = before  # or the file would never be written: the next assign changes nothing
                raise
        return True

    def store(self) -> None:
        """Replace the checkpoint durably with what is in memory."""
        write_frame(self._fs, self._path, version=LEADER_EPOCH_CHECKPOINT_VERSION, entries=self._lines())

    def begin(self) -> None:
        """Write the first entries in place, unsynced: a flush has to sync the file, and until then it may be torn."""
        data = frame_bytes(LEADER_EPOCH_CHECKPOINT_VERSION, self._lines())
        file = self._fs.open(self._path, create=True)
        try:
            file.truncate(0)
            file.pwrite(data, 0)
        finally:
            file.close()

    def _lines(self) -> Iterable[str]:
        return (f"{entry.epoch} {entry.start_offset}" for entry in self._entries)
