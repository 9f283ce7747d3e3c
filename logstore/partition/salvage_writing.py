"""Carries out the salvage of a partition.

A segment with damage is written again as a whole and swapped in, like the output of compaction, so every crash leaves
the old files or the new ones (docs/protocols.md). No file is changed in place: a backup may share it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from logstore.directory.state import PartitionState, SegmentEntry, SwapNote, write_state
from logstore.directory.swap import replace_segments
from logstore.errors import DamageError
from logstore.files import FileSystem
from logstore.limits import RELATIVE_OFFSET_MAX, Limits
from logstore.partition.losses import merged, without
from logstore.partition.quarantine import QuarantinedRegion, quarantine, tombstones_beyond_reasons
from logstore.partition.salvage import Partition, Piece, Salvage, SegmentSalvage
from logstore.records.native import address_of, kernels
from logstore.segment.batches import Chunk, read_batches
from logstore.segment.names import SEGMENT_KINDS, FileKind, Transient, file_name
from logstore.segment.output import discard_output
from logstore.segment.segment import LogSegment, Numbering
from logstore.segment.segment_reader import SegmentSettings

_JOINED_BYTES_MAX = 16 << 20


def carry_out(partition: Partition, plan: Salvage, state_path: str) -> tuple[PartitionState, list[str]]:
    """Do what the plan says; returns the state it wrote, and the paths in quarantine. Can be repeated after any crash.

    The caller holds the partition's locks, and no log of it is open.
    """
    fs, directory = partition.fs, partition.directory
    state = partition.state or _rebuilt_state(partition, plan)
    # Damaged bytes are safe in quarantine before anything loses its name.
    aside = _set_aside(partition, plan, state)
    losses = merged(state.losses, [*plan.losses, *plan.earlier_losses])
    first_dirty = min([state.first_dirty_offset, *(low for _, low, _ in plan.refilled)])
    state = replace(state, losses=losses, first_dirty_offset=first_dirty, closed=False)
    made: dict[int, SegmentEntry] = {}
    for segment in plan.rewritten:
        for base, pieces in _outputs(partition, segment):
            made[base] = _write_segment(partition, base, pieces)
    if plan.begin_at is not None and plan.begin_at not in {segment.base_offset for segment in plan.segments}:
        made[plan.begin_at] = _write_segment(partition, plan.begin_at, ())
    if made:
        _swap(partition, state_path, state, made)
    # A loss that was made good leaves the list when that cannot be undone any more.
    losses = without(losses, [*((low, high) for _, low, high in plan.refilled), *plan.found_again])
    done = replace(
        state,
        generation=state.generation + 2,
        segments=_listed(partition, state, plan, made),
        losses=losses,
        swap=None,
        next_horizon_ms=None,
    )
    write_state(fs, state_path, done)
    for path in plan.strays:
        for kind in SEGMENT_KINDS:
            leftover = os.path.splitext(path)[0] + kind.value
            if fs.exists(leftover):
                fs.unlink(leftover)  # the log itself is in quarantine
    fs.fsync_dir(directory)
    return done, aside


def _rebuilt_state(partition: Partition, plan: Salvage) -> PartitionState:
    # Compaction never touches the last segment.
    last_base = max((segment.base_offset for segment in plan.segments), default=0)
    return PartitionState(
        log_start_offset=plan.log_start_offset,
        dropped_tombstones=tombstones_beyond_reasons(partition.fs, partition.directory),
        losses=partition.known_losses,
        thinned_offset=last_base,
    )


def _set_aside(partition: Partition, plan: Salvage, state: PartitionState) -> list[str]:
    regions = [*plan.quarantine]
    for path in plan.strays:
        regions.append(QuarantinedRegion(path, 0, partition.fs.stat(path).size_bytes))
    if not regions and not plan.losses:
        return []
    document = {
        "partition": partition.name,
        "time_ms": partition.now_ms,
        "cuts": [
            {
                "file": os.path.basename(each.file),
                "position": each.position,
                "dropped_bytes": each.size_bytes,
                "reason": each.reason,
                "base_offset": each.base_offset,
                "end_offset": each.end_offset,
                "at_most": each.at_most,
            }
            for each in plan.damages
        ],
        "losses": [
            [each.base_offset, each.end_offset, each.reason, each.since_ms, each.at_most] for each in plan.losses
        ],
        "high_watermark": partition.committed,
        "dropped_tombstones": state.dropped_tombstones,
    }
    return quarantine(partition.fs, partition.directory, regions, document)


def _outputs(partition: Partition, segment: SegmentSalvage) -> list[tuple[int, list[Piece]]]:
    """The segment's pieces; where much was put back, in several segments, as an append would have rolled."""
    limit_bytes = max(partition.config.segment_bytes, segment.scan.size_bytes if segment.scan else 0)
    outputs: list[tuple[int, list[Piece]]] = [(segment.base_offset, [])]
    size_bytes = 0
    for before, after in pairwise(segment.pieces):
        assert before.end_offset <= after.first_offset, f"{before} and {after} overlap"
    for piece in _joined(segment.pieces):
        base, pieces = outputs[-1]
        too_far = piece.end_offset - 1 - base > RELATIVE_OFFSET_MAX
        if pieces and (too_far or size_bytes + piece.end - piece.position > limit_bytes):
            outputs.append((piece.first_offset, []))
            size_bytes = 0
        outputs[-1][1].append(piece)
        size_bytes += piece.end - piece.position
    return outputs


def _joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Neighbours of one file as one piece, up to a size."""
    out: list[Piece] = []
    for piece in pieces:
        last = out[-1] if out else None
        if (
            last is not None
            and piece.epoch is None
            and last.epoch is None
            and (last.path, last.end, last.end_offset) == (piece.path, piece.position, piece.first_offset)
            and piece.end - last.position <= _JOINED_BYTES_MAX
        ):
            out[-1] = replace(last, end=piece.end, end_offset=piece.end_offset)
        else:
            out.append(piece)
    return out


def _write_segment(partition: Partition, base_offset: int, pieces: Iterable[Piece]) -> SegmentEntry:
    """The segment as it is to be, complete and synced, under `.cleaned`."""
    fs, directory = partition.fs, partition.directory
    old = os.path.join(directory, file_name(base_offset, FileKind.LOG))
    mtime_ms = fs.stat(old).mtime_ms if fs.exists(old) else None
    discard_output(fs, directory, base_offset)
    _copy_aborted(partition, base_offset)
    settings = SegmentSettings.under(partition.config)
    output = LogSegment(
        fs, directory, base_offset, settings=settings, writable=True, suffix=Transient.CLEANED, limits=partition.limits
    )
    try:
        for piece in pieces:
            _copy_piece(partition, piece, output)
        output.seal()
        output.flush()
        entry = SegmentEntry(base_offset, output.size_bytes, output.largest.timestamp_ms)
    finally:
        output.close(clean=False)
    if mtime_ms is not None:  # it stands for the time of records that have none
        fs.set_mtime(os.path.join(directory, file_name(base_offset, FileKind.LOG, Transient.CLEANED)), mtime_ms)
    return entry


def _copy_piece(partition: Partition, piece: Piece, output: LogSegment) -> None:
    for chunk in piece_chunks(partition.fs, piece, partition.limits):
        numbering = None if piece.epoch is None else Numbering(piece.first_offset, piece.epoch)
        placed, _ = output.place(chunk.data, chunk.table, 0, numbering)
        if placed < len(chunk.table):
            raise DamageError("a batch does not fit its segment", file=piece.path, position=piece.position)


def piece_chunks(fs: FileSystem, piece: Piece, limits: Limits) -> Iterator[Chunk]:
    """The piece's batches, in memory that may be written to. Of a staged piece there is one batch."""
    file = fs.open(piece.path)
    try:
        for chunk in read_batches(file, piece.position, piece.end, limits=limits):
            if piece.stamp_ms is not None:
                chunk = Chunk(np.array(chunk.data), chunk.table, chunk.position, chunk.file)
                kernels().stamp_append_time(
                    address_of(chunk.data), address_of(chunk.table), len(chunk.table), piece.stamp_ms
                )
            yield chunk
    finally:
        file.close()


def _copy_aborted(partition: Partition, base: int) -> None:
    """Readers of committed data need the aborted transactions at once; they are rebuilt when the log is opened."""
    source = os.path.join(partition.directory, file_name(base, FileKind.TXN_INDEX))
    if not partition.fs.exists(source):
        return
    target = os.path.join(partition.directory, file_name(base, FileKind.TXN_INDEX, Transient.CLEANED))
    reader = partition.fs.open(source)
    try:
        writer = partition.fs.open(target, create=True)
        try:
            writer.pwrite(reader.pread(min(reader.size(), partition.limits.side_file_bytes), 0), 0)
            writer.fsync()
        finally:
            writer.close()
    finally:
        reader.close()


def _swap(partition: Partition, state_path: str, state: PartitionState, made: dict[int, SegmentEntry]) -> None:
    fs, directory = partition.fs, partition.directory
    old = [base for base in made if fs.exists(os.path.join(directory, file_name(base, FileKind.LOG)))]
    note = SwapNote(tuple(sorted(made)), tuple(sorted(old)))
    fs.fsync_dir(directory)
    write_state(fs, state_path, replace(state, generation=state.generation + 1, swap=note))
    replace_segments(fs, directory, note.new_bases, note.old_bases)


def _listed(
    partition: Partition, state: PartitionState, plan: Salvage, made: dict[int, SegmentEntry]
) -> tuple[SegmentEntry, ...]:
    known = {entry.base_offset: entry for entry in state.segments}
    entries = dict(made)
    for segment in plan.segments:
        base = segment.base_offset
        if base in entries or segment.scan is None:
            continue
        entry = known.get(base)
        same = entry is not None and entry.size_bytes == segment.scan.size_bytes
        entries[base] = entry if entry and same else SegmentEntry(base, segment.scan.size_bytes, -1)
    return tuple(entries[base] for base in sorted(entries))
