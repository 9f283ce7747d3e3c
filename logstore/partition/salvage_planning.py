"""Looks through a damaged partition and plans its salvage: what each file still holds, what is lost, and what other
sources can put back. Changes nothing; `recover --dry-run` shows the plan.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise

from logstore.directory.state import Loss
from logstore.files import FileSystem
from logstore.limits import INT64_MAX, SEGMENT_BYTES_MAX
from logstore.partition.damage import FoundBatch, Hole, intact_batches, scan_file
from logstore.partition.losses import Range, subtract, without
from logstore.partition.quarantine import QuarantinedRegion
from logstore.partition.salvage import Damage, Partition, Piece, Salvage, SegmentSalvage, Source
from logstore.records.header import read_header
from logstore.segment.names import FileKind, Transient, file_name, parse_file_name

_BLOCK_BYTES = 1 << 20


def plan_salvage(partition: Partition, sources: Sequence[Source] = (), *, gaps: bool = False) -> Salvage:
    """Look through every file and decide; changes nothing. The caller holds the partition's locks.

    With `gaps` the sources may also fill gaps that no loss is written down for, where compaction has not been: an older
    version left those.
    """
    return _Planner(partition, sources, gaps).plan()


def has_wrong_list(partition: Partition) -> bool:
    """Whether the segment list is another partition's: it names segments that are missing, and the files that are there
    cannot be part of the same log.
    """
    if partition.state is None:
        return False
    fs, directory, start = partition.fs, partition.directory, partition.log_start_offset
    listed = [entry.base_offset for entry in partition.state.segments]
    there = _logs_there(fs, directory)
    missing = [
        at for at, base in enumerate(listed) if base not in there and (at + 1 == len(listed) or listed[at + 1] > start)
    ]
    if not missing or not there:
        return False
    if any(base not in listed and listed[0] <= base < listed[-1] for base in there):
        return True
    return any(listed[at - 1] in there and _reaches(partition, listed[at - 1]) > listed[at] for at in missing if at > 0)


def _reaches(partition: Partition, base: int) -> int:
    """Where the batches of a segment's file end, whatever the list says."""
    file = partition.fs.open(os.path.join(partition.directory, file_name(base, FileKind.LOG)))
    try:
        return scan_file(file, low=base, high=INT64_MAX, limits=partition.limits).end_offset or base
    finally:
        file.close()


def _logs_there(fs: FileSystem, directory: str) -> list[int]:
    names = fs.listdir(directory) if fs.exists(directory) else []
    parsed = [file for file in map(parse_file_name, names) if file is not None]
    return sorted(f.base_offset for f in parsed if f.kind is FileKind.LOG and f.transient is Transient.NONE)


def with_found_end(partition: Partition, at_least: int = 0) -> Partition:
    """The partition with everything that is found taken as committed, and everything below `at_least`."""
    found = plan_salvage(partition)
    ends = [piece.end_offset for segment in found.segments for piece in segment.pieces]
    return replace(partition, committed=max([at_least, found.log_start_offset, *ends]))


class _Planner:
    def __init__(self, partition: Partition, sources: Sequence[Source], gaps: bool) -> None:
        self._gaps = gaps
        self._given = partition
        self._fs = partition.fs
        self._sources = sources
        self._start = partition.log_start_offset
        self._plan = Salvage(partition.directory, self._start, partition.committed)
        self._listed: set[int] = set()
        self._found: list[Loss] = []
        self._strays: list[Piece] = []
        #: a segment with batches after the committed end that may be missing elsewhere
        self._tail: tuple[SegmentSalvage, QuarantinedRegion] | None = None
        #: files that lie below the log start
        self._passed: list[int] = []

    def plan(self) -> Salvage:
        bases, unlisted = self._bases()
        if (missing := self._missing_front(bases)) is not None:
            bases.insert(0, missing)
        if bases and self._given.state is None:
            self._plan.log_start_offset = self._start = bases[0]
        for at, base in enumerate(bases):
            following = bases[at + 1] if at + 1 < len(bases) else None
            self._plan.segments.append(self._look(base, following))
        for base in unlisted:
            self._set_aside(base, "a segment that the list does not have")
        self._find_losses()
        self._find_again()
        if self._found:
            self._look_below()
        self._refill()
        self._take_tail()
        self._settle_losses()
        self._end()
        return self._plan

    def _path(self, base: int) -> str:
        return os.path.join(self._given.directory, file_name(base, FileKind.LOG))

    def _bases(self) -> tuple[list[int], list[int]]:
        """Segments that make up the log up to its committed end, and files that are not part of it."""
        there = _logs_there(self._fs, self._given.directory)
        listed = [entry.base_offset for entry in self._given.state.segments] if self._given.state else []
        self._listed = set(listed)
        bases = sorted({*listed, *(base for base in there if not listed or base > listed[-1])})
        unlisted = [base for base in there if base not in bases and base >= (bases[0] if bases else 0)]
        self._passed = [base for base in there if base < (bases[0] if bases else 0)]
        while len(bases) > 1 and bases[1] <= self._start:
            self._passed.append(bases.pop(0))
        if self._given.committed is not None:  # what begins above was never published
            bases = [base for base in bases if base <= self._given.committed] or bases[:1]
        return bases, unlisted

    def _missing_front(self, bases: list[int]) -> int | None:
        """Where a segment was in front of those that are there, which no list tells of: the first of all, or of those
        that were never flushed, since they were not deleted, either.
        """
        given = self._given
        if given.is_listed or given.imported or given.committed is None:
            return None
        if not bases:
            return self._start if self._start < given.committed else None
        begin = None if given.flushed_offset is None else max(self._start, given.flushed_offset)
        return begin if begin is not None and begin < bases[0] else None

    def _listed_bytes(self, base: int) -> int | None:
        entries = self._given.state.segments if self._given.state and base in self._listed else ()
        return next((entry.size_bytes for entry in entries if entry.base_offset == base), None)

    def _look(self, base: int, following: int | None) -> SegmentSalvage:
        committed = self._given.committed
        open_ended = following is None and committed is not None
        high = following if following is not None else INT64_MAX if committed is None else committed
        listed = self._listed_bytes(base)
        found = SegmentSalvage(base, high, listed is not None, None)
        path = self._path(base)
        if not self._fs.exists(path):
            found.rewrite = high > max(base, self._start) or following is None
            return found
        file = self._fs.open(path)
        try:
            if file.size() > SEGMENT_BYTES_MAX:
                self._plan.damages.append(
                    Damage(path, SEGMENT_BYTES_MAX, file.size() - SEGMENT_BYTES_MAX, "larger than a segment can be")
                )
            had_bytes = listed if following is not None else None  # the last one grows before it is listed
            scan = scan_file(
                file, low=base, high=high, limits=self._given.limits, open_ended=open_ended, had_bytes=had_bytes
            )
            found.scan = scan
            self._plan.bytes_scanned += scan.size_bytes
            if not scan.runs and scan.holes:
                self._displaced(found, path, intact_batches(file, limits=self._given.limits))
            if open_ended and scan.tail_position < scan.size_bytes:
                self._misplaced_tail(found, path, intact_batches(file, limits=self._given.limits))
            self._plan_holes(found, path, file.size())
        finally:
            file.close()
        found.pieces = [Piece(path, run.position, run.end, run.first_offset, run.end_offset) for run in scan.runs]
        return found

    def _displaced(self, found: SegmentSalvage, path: str, batches: list[FoundBatch]) -> None:
        """A file none of whose intact batches can belong there: they are those of another segment."""
        if batches:
            found.displaced = True
            self._strays += [
                Piece(path, each.position, each.end, each.first_offset, each.end_offset) for each in batches
            ]

    def _look_below(self) -> None:
        """What is missing may lie in a file below the log start, which is not part of the log any more."""
        for base in self._passed:
            path = self._path(base)
            with contextlib.suppress(FileNotFoundError):
                file = self._fs.open(path)
                try:
                    batches = intact_batches(file, limits=self._given.limits)
                finally:
                    file.close()
                self._strays += _pieces(path, [each for each in batches if each.end_offset > self._start])

    def _misplaced_tail(self, found: SegmentSalvage, path: str, batches: list[FoundBatch]) -> None:
        """Batches after the committed end that have committed offsets: what was never published has later ones."""
        assert found.scan is not None
        assert self._given.committed is not None
        begin = found.scan.tail_position
        committed = self._given.committed
        strays = [each for each in batches if each.position >= begin and each.end_offset <= committed]
        if strays:
            self._strays += _pieces(path, strays)
            self._tail = (found, QuarantinedRegion(path, begin, found.scan.size_bytes))

    def _plan_holes(self, found: SegmentSalvage, path: str, size_bytes: int) -> None:
        scan = found.scan
        assert scan is not None
        if not scan.holes:
            return
        found.rewrite = True
        for hole in scan.holes:
            if not found.displaced and not self._is_blank(path, hole):
                self._plan.quarantine.append(QuarantinedRegion(path, hole.position, hole.end))
        if found.displaced:
            self._plan.quarantine.append(QuarantinedRegion(path, 0, size_bytes))

    def _is_blank(self, path: str, hole: Hole) -> bool:
        """Whether it holds zeros only, as a preallocated file does, or one the power cut made."""
        file = self._fs.open(path)
        try:
            at = hole.position
            while at < hole.end:
                data = file.pread(min(_BLOCK_BYTES, hole.end - at), at)
                if not data or data.strip(b"\0"):
                    return False
                at += len(data)
        finally:
            file.close()
        return True

    def _set_aside(self, base: int, reason: str) -> None:
        path = self._path(base)
        file = self._fs.open(path)
        try:
            batches = intact_batches(file, limits=self._given.limits)
            self._plan.damages.append(Damage(path, 0, file.size(), reason))
        finally:
            file.close()
        self._plan.strays.append(path)
        self._strays += _pieces(path, batches)

    # --- what is lost -------------------------------------------------------------------------------------------------

    def _find_losses(self) -> None:
        for segment in self._plan.segments:
            path = self._path(segment.base_offset)
            low = max(segment.base_offset, self._start)
            scan = segment.scan
            was_empty = segment is not self._plan.segments[-1] and self._listed_bytes(segment.base_offset) == 0
            if scan is None:
                if segment.rewrite and not was_empty:
                    self._lose(
                        path,
                        0,
                        self._listed_bytes(segment.base_offset) or 0,
                        "the file is missing",
                        low,
                        segment.high,
                        segment,
                    )
                continue
            if segment.displaced:
                reason = "what it holds belongs to another segment"
                if was_empty:
                    self._plan.damages.append(Damage(path, 0, scan.size_bytes, reason))
                else:
                    self._lose(path, 0, scan.size_bytes, reason, low, segment.high, segment)
                continue
            listed = self._listed_bytes(segment.base_offset)
            sealed = segment is not self._plan.segments[-1]
            for hole in scan.holes:
                if sealed and listed is not None and hole.position >= listed:
                    size_bytes = hole.end - hole.position
                    self._plan.damages.append(Damage(path, hole.position, size_bytes, "bytes after its end"))
                    continue
                before = [run.end_offset for run in scan.runs if run.end <= hole.position]
                after = [run.first_offset for run in scan.runs if run.position >= hole.end]
                begin = max(low, before[-1]) if before else low
                end = after[0] if after else segment.high
                if hole.claims is not None:
                    if begin < self._given.compacted_offset:  # offsets before those it names were compacted
                        begin = max(begin, min(hole.claims[0], end))
                    # So were those after the file's last batch.
                    known_end = hole.torn and end <= self._given.compacted_offset
                    end = hole.claims[1] if end == INT64_MAX or known_end else end
                self._lose(path, hole.position, hole.end - hole.position, hole.reason, begin, end, segment)
            if not scan.holes or scan.holes[-1].end < scan.size_bytes:
                self._lose_end(segment, path, low)

    def _lose_end(self, segment: SegmentSalvage, path: str, low: int) -> None:
        """Batches that are missing after the last one, where nothing is wrong with the bytes that are there."""
        scan = segment.scan
        assert scan is not None
        end = max(low, scan.end_offset or low)
        if end >= segment.high or segment.high == INT64_MAX:
            return
        listed = self._listed_bytes(segment.base_offset)
        is_last = segment is self._plan.segments[-1]
        short = (listed or 0) - scan.size_bytes
        if short > 0:
            self._plan.relisted = True
            self._lose(path, scan.size_bytes, short, "bytes are missing at the end", end, segment.high, segment)
        elif (is_last and segment.high == self._given.committed) or (
            # Without a list nothing else shows it. Gaps that compaction left are not losses.
            not (self._given.is_listed or self._given.imported)
            and (not self._given.config.compact or end >= self._given.compacted_offset)
        ):
            self._lose(path, scan.size_bytes, 0, "records are missing after its end", end, segment.high, segment)

    def _lose(
        self, path: str, position: int, size_bytes: int, reason: str, low: int, high: int, segment: SegmentSalvage
    ) -> None:
        low = max(low, self._start)
        if low >= high or high == INT64_MAX:
            self._plan.damages.append(Damage(path, position, size_bytes, reason))
            return
        at_most = low < self._given.compacted_offset or (segment.scan is not None and segment.scan.has_gaps)
        known = [(each.base_offset, each.end_offset) for each in self._given.losses]
        parts = subtract([(low, high)], known)
        for begin, end in parts:
            self._found.append(Loss(begin, end, f"{os.path.basename(path)}: {reason}", self._given.now_ms, at_most))
        if parts:
            damage = Damage(path, position, size_bytes, reason, parts[0][0], parts[-1][1], at_most)
            self._plan.damages.append(damage)
        elif size_bytes:
            self._plan.damages.append(Damage(path, position, size_bytes, reason))

    def _find_again(self) -> None:
        """Earlier losses that the log has: whoever put them back was killed before the list said so, or it was lost.

        A batch that was put back lies within its loss. One that reaches across was made by a compaction that merged.
        """
        for loss in self._given.losses:
            low, high = max(loss.base_offset, self._start), loss.end_offset
            there: list[Range] = []
            for piece in (piece for segment in self._plan.segments for piece in segment.pieces):
                if piece.first_offset < high and low < piece.end_offset:
                    there += self._batches_within(piece, low, high)
            for begin, end in subtract([(low, high)], subtract([(low, high)], there)):
                self._plan.found_again.append((begin, end))
                self._plan.notes.append(f"offsets {begin} to {end} were written down as lost, and are there")

    def _batches_within(self, piece: Piece, low: int, high: int) -> list[Range]:
        found: list[Range] = []
        file = self._fs.open(piece.path)
        try:
            position = piece.position
            while (header := read_header(file, position, piece.end)) is not None and header.begin_offset < high:
                begin = max(header.begin_offset, self._start)  # a log start may lie inside a batch
                if low <= begin and header.next_offset <= high and begin < header.next_offset:
                    found.append((begin, header.next_offset))
                position = header.end_position
        finally:
            file.close()
        return found

    # --- what can be put back -----------------------------------------------------------------------------------------

    def _refill(self) -> None:
        """Batches that are missing where they belong, and are found elsewhere."""
        missing = [(each.base_offset, each.end_offset) for each in [*self._found, *self._given.losses]]
        missing = subtract(missing, self._plan.found_again)
        wanted = missing
        if not self._given.is_listed:  # of a compacted topic nothing else tells what a file had
            wanted = [*missing, *subtract(self._uncovered(self._start), missing)]
        for piece in sorted(self._strays, key=lambda piece: piece.first_offset):
            wanted = self._put_back(piece, wanted, "misplaced files")
        missing = subtract(missing, [(low, high) for _, low, high in self._plan.refilled])
        gaps = subtract(self._uncovered(self._given.compacted_offset), missing) if self._gaps else []
        missing += gaps
        for source in self._sources:
            for low, high in sorted(missing):
                for piece in source.pieces(self._reach(low), high):
                    missing = self._put_back(piece, missing, source.name)
        self._note_gaps(gaps)

    def _take_tail(self) -> None:
        """What was put back from after the committed end leaves its old place; the rest there is not damage."""
        if self._tail is None:
            return
        segment, region = self._tail
        pieces = [piece for each in self._plan.segments for piece in each.pieces]
        if any(piece.path == region.path and piece.position >= region.position for piece in pieces):
            reason = "what it holds belongs to another segment"
            self._plan.quarantine.append(region)
            self._plan.damages.append(Damage(region.path, region.position, region.end - region.position, reason))
            segment.rewrite = True

    def _note_gaps(self, gaps: list[Range]) -> None:
        """What is still missing of a gap that was filled in part was lost, too; it was not recorded."""
        back = [(low, high) for _, low, high in self._plan.refilled]
        for low, high in gaps:
            inside = [each for each in back if low <= each[0] and each[1] <= high]
            for begin, end in subtract([(low, high)], inside) if inside else ():
                reason = "missing when its neighbours were put back from quarantine"
                self._plan.earlier_losses.append(Loss(begin, end, reason, self._given.now_ms))

    def _uncovered(self, low: int) -> list[Range]:
        """Committed offsets from `low` on that no stretch of batches has."""
        covered = [(piece.first_offset, piece.end_offset) for each in self._plan.segments for piece in each.pieces]
        return subtract([(max(self._start, low), self._given.committed or 0)], covered)

    def _put_back(self, piece: Piece, missing: list[Range], source: str) -> list[Range]:
        begin = max(piece.first_offset, self._start)  # a log start may lie inside a batch
        fits = any(low <= begin < piece.end_offset <= high for low, high in missing)
        segment = self._segment_for(piece) if fits else None
        if segment is None or (begin > piece.first_offset and _overlaps(segment.pieces, piece)):
            return missing
        self._make_room(segment, piece)
        segment.pieces.append(piece)
        segment.rewrite = True
        self._plan.refilled.append((source, piece.first_offset, piece.end_offset))
        return subtract(missing, [(piece.first_offset, piece.end_offset)])

    def _reach(self, low: int) -> int:
        """Where the batch that has offset `low` may begin: below it, where that is the log start."""
        if low != self._start:
            return low
        return max((each.base_offset for each in self._plan.segments if each.base_offset <= low), default=low)

    def _make_room(self, segment: SegmentSalvage, wanted: Piece) -> None:
        """Part the stretch of the file that has the wanted batch's gap in it: batches before, and batches after."""
        for at, piece in enumerate(segment.pieces):
            if piece.epoch is not None or not piece.first_offset < wanted.first_offset < piece.end_offset:
                continue
            file = self._fs.open(piece.path)
            try:
                position, end = piece.position, piece.first_offset
                while (header := read_header(file, position, piece.end)) is not None:
                    if header.last_offset >= wanted.first_offset:
                        break
                    position, end = header.end_position, header.next_offset
            finally:
                file.close()
            if header is not None and position > piece.position:
                segment.pieces[at : at + 1] = [
                    replace(piece, end=position, end_offset=end),
                    replace(piece, position=position, first_offset=max(header.begin_offset, wanted.end_offset)),
                ]
            return

    def _segment_for(self, piece: Piece) -> SegmentSalvage | None:
        for segment in reversed(self._plan.segments):
            if segment.base_offset <= piece.first_offset:
                return segment if piece.end_offset <= segment.high else None
        return None

    def _settle_losses(self) -> None:
        back = [(low, high) for _, low, high in self._plan.refilled]
        self._plan.losses = without(self._found, back)
        if not back:
            return
        self._plan.losses = without(self._plan.losses, [*self._whole_again(), *self._never_there()])
        lost = [(each.base_offset, each.end_offset) for each in self._plan.losses]
        damages = [_after_refill(each, lost) for each in self._plan.damages]
        self._plan.damages = [each for each in damages if each.size_bytes or each.base_offset is not None]
        for segment in self._plan.segments:
            segment.pieces.sort(key=lambda piece: piece.first_offset)

    def _whole_again(self) -> list[Range]:
        """Sealed segments that have every byte they had: offsets they lack were compacted."""
        found = []
        for segment in self._plan.segments[:-1]:
            size_bytes = sum(piece.end - piece.position for piece in segment.pieces)
            if size_bytes == self._listed_bytes(segment.base_offset):
                found.append((segment.base_offset, segment.high))
        return found

    def _never_there(self) -> list[Range]:
        """Offsets between batches that lie side by side in the file they were found in: nothing was lost there."""
        return [
            (first.end_offset, second.first_offset)
            for segment in self._plan.segments
            for first, second in pairwise(sorted(segment.pieces, key=lambda piece: piece.first_offset))
            if first.path == second.path and first.end == second.position and first.end_offset < second.first_offset
        ]

    def _end(self) -> None:
        """Let the log go on at its committed end, whatever is left below."""
        committed = self._given.committed
        if committed is None:
            return
        last = self._plan.segments[-1] if self._plan.segments else None
        if last is None:
            if committed > self._start:
                reason = "no segment is left"
                known = [(each.base_offset, each.end_offset) for each in self._given.losses]
                for begin, end in subtract([(self._start, committed)], known):
                    at_most = begin < self._given.compacted_offset
                    self._plan.losses += (Loss(begin, end, reason, self._given.now_ms, at_most),)
                    self._plan.damages.append(Damage(self._given.directory, 0, 0, reason, begin, end, at_most))
            if committed:
                self._plan.begin_at = committed
            return
        end = max((piece.end_offset for piece in last.pieces), default=last.base_offset)
        if end < committed:
            self._plan.begin_at = committed


def _pieces(path: str, batches: Iterable[FoundBatch]) -> list[Piece]:
    return [Piece(path, each.position, each.end, each.first_offset, each.end_offset) for each in batches]


def _overlaps(pieces: Iterable[Piece], wanted: Piece) -> bool:
    return any(each.first_offset < wanted.end_offset and wanted.first_offset < each.end_offset for each in pieces)


def _after_refill(damage: Damage, lost: list[Range]) -> Damage:
    """The damage with only those offsets that could not be put back."""
    if damage.base_offset is None or damage.end_offset is None:
        return damage
    mine = subtract([(damage.base_offset, damage.end_offset)], subtract([(0, INT64_MAX)], lost))
    if not mine:
        return replace(damage, base_offset=None, end_offset=None)
    return replace(damage, base_offset=mine[0][0], end_offset=mine[-1][1])
