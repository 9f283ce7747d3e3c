"""Replacement of segments by others, in an order in which every crash can be finished or undone.

swap note in the state file, with how far the log is thinned → outputs moved in as `.cleaned` (complete, synced) →
directory synced → `.swap`, highest base first → directory synced → old files to `.deleted` → `.swap` to plain →
directory synced → new list, no note

Until the last `.cleaned` is renamed the old segments stand; from then on the new ones do. Whoever finds a note
finishes either way (`finish_swap`); `recovery` does it without one, from the directory alone, as a broker would.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from logstore.directory.deletion import mark_deleted
from logstore.directory.state import PartitionState, SegmentEntry, SwapNote, write_state
from logstore.errors import SegmentsChanged
from logstore.files import FileSystem
from logstore.segment.names import SEGMENT_KINDS, FileKind, Transient, file_name
from logstore.segment.time_index import TimeIndex


def replace_segments(fs: FileSystem, directory: str, new_bases: Sequence[int], old_bases: Sequence[int]) -> None:
    """Swap complete `.cleaned` outputs in for the segments they replace."""
    for base in sorted(new_bases, reverse=True):
        _rename(fs, directory, base, Transient.CLEANED, Transient.SWAP)
    fs.fsync_dir(directory)
    for base in sorted(old_bases):
        mark_deleted(fs, directory, base)
    for base in sorted(new_bases):
        _rename(fs, directory, base, Transient.SWAP, Transient.NONE)
    fs.fsync_dir(directory)
    _drop_snapshots(fs, directory, new_bases, old_bases)


@dataclass(frozen=True, slots=True)
class Swap:
    """Segments that are ready in `folder` and the neighbours they replace."""

    folder: str
    new: Sequence[SegmentEntry]
    old_bases: Sequence[int]
    dropped_tombstones: int = 0
    #: the end of the pass's map where the outputs lack records of their sources; None: they have them all
    thinned_offset: int | None = None


def swap_in(fs: FileSystem, directory: str, state_path: str, state: PartitionState, swap: Swap) -> PartitionState:
    """Put the new segments in place of the old ones; returns the state it wrote.

    The caller holds the partition lock and has read `state` under it. Raises SegmentsChanged when the list no longer
    names exactly these segments; then nothing was touched.
    """
    new, old_bases = swap.new, swap.old_bases
    assert state.swap is None
    bases = [entry.base_offset for entry in state.segments]
    if old_bases[0] not in bases:
        raise SegmentsChanged(f"segment {old_bases[0]} is gone", file=directory)
    at = bases.index(old_bases[0])
    if bases[at : at + len(old_bases)] != list(old_bases) or at + len(old_bases) >= len(bases):
        raise SegmentsChanged(f"segments {list(old_bases)} are not neighbours, or the last is active", file=directory)
    assert new[0].base_offset == old_bases[0], "they cover the same offsets"
    note = SwapNote(tuple(entry.base_offset for entry in new), tuple(old_bases))
    if swap.thinned_offset is not None:  # on disk before any file changes: a restore of the past must not miss it
        state = state.thinned(new[0].base_offset, swap.thinned_offset)
    write_state(fs, state_path, replace(state, generation=state.generation + 1, swap=note))
    for entry in new:
        for kind in SEGMENT_KINDS:
            name = file_name(entry.base_offset, kind, Transient.CLEANED)
            if fs.exists(os.path.join(swap.folder, name)):
                fs.rename(os.path.join(swap.folder, name), os.path.join(directory, name))
    fs.fsync_dir(directory)
    replace_segments(fs, directory, note.new_bases, note.old_bases)
    done = replace(
        state,
        generation=state.generation + 2,
        segments=(*state.segments[:at], *new, *state.segments[at + len(old_bases) :]),
        dropped_tombstones=state.dropped_tombstones + swap.dropped_tombstones,
        swap=None,
    )
    write_state(fs, state_path, done)
    return done


def finish_swap(fs: FileSystem, directory: str, state_path: str, state: PartitionState) -> PartitionState:
    """Finish, or undo, the replacement a killed process left behind. The caller holds the partition lock."""
    note = state.swap
    if note is None:
        return state
    if any(_existing(fs, directory, base, Transient.CLEANED) for base in note.new_bases):
        for base in note.new_bases:
            for transient in (Transient.CLEANED, Transient.SWAP):
                for path in _existing(fs, directory, base, transient):
                    fs.unlink(path)
    else:
        # A `.log.swap` is renamed first of its segment: as long as one is there, nothing plain of its base is new.
        waiting = {base for base in note.new_bases if _log_exists(fs, directory, base, Transient.SWAP)}
        begun = waiting or any(_existing(fs, directory, base, Transient.SWAP) for base in note.new_bases)
        for base in note.old_bases:
            if base in waiting or (begun and base not in note.new_bases):
                mark_deleted(fs, directory, base)
        for base in sorted(note.new_bases):
            _rename(fs, directory, base, Transient.SWAP, Transient.NONE)
        if begun:
            _drop_snapshots(fs, directory, note.new_bases, note.old_bases)
    fs.fsync_dir(directory)
    done = replace(
        state,
        generation=state.generation + 1,
        segments=_listed(fs, directory, state, note),
        dropped_tombstones=state.dropped_tombstones + 1,  # some may be gone; it only matters that the count changed
        swap=None,
        next_horizon_ms=None,
    )
    write_state(fs, state_path, done)
    return done


def _listed(fs: FileSystem, directory: str, state: PartitionState, note: SwapNote) -> tuple[SegmentEntry, ...]:
    """The list with those segments of the replacement that exist now."""
    concerned = set(note.new_bases) | set(note.old_bases)
    entries = [entry for entry in state.segments if entry.base_offset not in concerned]
    for base in concerned:
        if _log_exists(fs, directory, base, Transient.NONE):
            size = fs.stat(os.path.join(directory, file_name(base, FileKind.LOG))).size_bytes
            entries.append(SegmentEntry(base, size, _largest_timestamp(fs, directory, base) if size else -1))
    return tuple(sorted(entries, key=lambda entry: entry.base_offset))


def _largest_timestamp(fs: FileSystem, directory: str, base: int) -> int:
    path = os.path.join(directory, file_name(base, FileKind.TIME_INDEX))
    index = TimeIndex(fs, path, base, fs.stat(path).size_bytes if fs.exists(path) else 0, writable=False)
    try:
        return index.last_entry().timestamp_ms
    finally:
        index.close()


def _log_exists(fs: FileSystem, directory: str, base: int, transient: Transient) -> bool:
    return fs.exists(os.path.join(directory, file_name(base, FileKind.LOG, transient)))


def _existing(fs: FileSystem, directory: str, base: int, transient: Transient) -> list[str]:
    paths = [os.path.join(directory, file_name(base, kind, transient)) for kind in SEGMENT_KINDS]
    return [path for path in paths if fs.exists(path)]


def _drop_snapshots(fs: FileSystem, directory: str, new_bases: Sequence[int], old_bases: Sequence[int]) -> None:
    for base in set(old_bases) - set(new_bases):
        path = os.path.join(directory, file_name(base, FileKind.SNAPSHOT))
        if fs.exists(path):
            fs.rename(path, path + Transient.DELETED.value)


def _rename(fs: FileSystem, directory: str, base_offset: int, source: Transient, target: Transient) -> None:
    for kind in SEGMENT_KINDS:
        path = os.path.join(directory, file_name(base_offset, kind, source))
        if fs.exists(path):
            fs.rename(path, os.path.join(directory, file_name(base_offset, kind, target)))
