"""What a log must hold after operations and a crash, worked out without the log.

A `Model` is what was acknowledged: every record and marker at its offset, the log start, and how much is known to be on
disk. `check` compares a log that was opened after a crash with it: what is there is what was appended, from the log
start up to one point, with nothing missing, changed, moved or added; that point lies where the rules allow it. The
operation that was under way may have happened, not happened, or got as far as a prefix of it.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace

from crash.workload import RECORDS_MAX, Operation, Place, records_of
from logstore.directory.layout import PartitionPlace
from logstore.directory.state import read_state
from logstore.files import FileSystem
from logstore.partition.reader import PartitionReader
from logstore.records.columns import columns_of
from logstore.records.encoder import BatchOptions, encode_batch
from logstore.records.record import Record
from logstore.segment.names import FileKind, Transient, parse_file_name
from reference.epochs import epoch_for_offset
from reference.fetching import Isolation
from reference.partition_writer import PartitionWriter


@dataclass(frozen=True, slots=True)
class Entry:
    """One offset of the log: a record, or a transaction marker (then `record` is None)."""

    offset: int
    record: Record | None
    producer_id: int = -1
    first_sequence: int = -1
    last_sequence: int = -1
    transactional: bool = False
    commit: bool = False
    appended_ms: int = 0


@dataclass(frozen=True, slots=True)
class Model:
    """A log as acknowledged. `entries` are all offsets given so far and not cut off, also those below the log start."""

    entries: tuple[Entry, ...] = field(default=(), repr=False)
    log_start: int = 0
    log_end: int = 0
    #: everything below is on disk
    flushed: int = 0

    @property
    def content_end(self) -> int:
        return self.entries[-1].offset + 1 if self.entries else self.log_start

    def truncated_end(self, truncation: Operation) -> int:
        """What a truncation leaves at the least: the batch that holds its offset goes as a whole."""
        whole = truncation.offset - RECORDS_MAX
        return max((entry.offset + 1 for entry in self.entries if entry.offset <= whole), default=0)

    def after(self, operation: Operation, log: PartitionWriter, content_end: int, now_ms: int) -> Model:
        """The model once `operation` returned. Where it is the log that decides (how far a retention pass goes, where
        the batch begins that a truncation cuts), the log is asked, within bounds.
        """
        model = self
        if operation.appends:
            model = replace(model, entries=self.entries + entries_of(operation, self.log_end, now_ms))
            model = replace(model, log_end=model.content_end)
        elif operation.kind == "truncate":
            assert self.truncated_end(operation) <= content_end <= operation.offset
            kept = tuple(entry for entry in self.entries if entry.offset < content_end)
            model = replace(model, entries=kept, log_end=operation.offset)
        elif operation.kind == "anew":
            model = Model((), operation.offset, operation.offset, operation.offset)
        elif operation.kind == "advance":
            model = replace(model, log_start=operation.offset)
        elif operation.kind == "retain":
            assert self.log_start <= log.log_start_offset <= self.log_end
            model = replace(model, log_start=log.log_start_offset)
        elif operation.kind == "reopen":
            # Where a truncation in a batch left the end above the last record, only a segment begun there remembers it.
            assert self.content_end <= log.log_end_offset <= max(self.log_end, self.log_start)
            model = replace(model, log_end=log.log_end_offset)
        assert (log.log_start_offset, log.log_end_offset) == (model.log_start, model.log_end), operation
        assert log.recovery_point <= log.log_end_offset
        return replace(model, flushed=log.recovery_point)


def entries_of(operation: Operation, first_offset: int, now_ms: int) -> tuple[Entry, ...]:
    """What an append adds, from `first_offset` on."""
    if operation.kind == "marker":
        return (Entry(first_offset, None, operation.producer_id, commit=operation.commit, appended_ms=now_ms),)
    last_sequence = -1 if operation.sequence < 0 else operation.sequence + operation.count - 1
    return tuple(
        Entry(
            first_offset + number,
            replace(record, offset=first_offset + number),
            operation.producer_id,
            operation.sequence,
            last_sequence,
            operation.transactional,
            appended_ms=now_ms,
        )
        for number, record in enumerate(records_of(operation))
    )


@dataclass(frozen=True, slots=True)
class Bounds:
    """Where a log may end and start after a crash, and all that may stand in it."""

    entries: tuple[Entry, ...] = field(repr=False)
    end_min: int
    end_max: int
    start_min: int
    start_max: int
    #: where the log may be found empty, because it was about to begin anew
    empty_at: tuple[int, ...] = ()


def bounds(model: Model, under_way: Operation | None, *, durable_end: int, now_ms: int) -> Bounds:
    """`durable_end` is how much of the acknowledged is sure to be there: all of it when only the process died."""
    entries, end_max = model.entries, max(model.log_end, model.log_start)
    end_min = max((entry.offset + 1 for entry in entries if entry.offset < durable_end), default=0)
    start_max = model.log_start
    empty_at: tuple[int, ...] = ()
    if under_way is not None:
        if under_way.appends:
            entries += entries_of(under_way, model.log_end, now_ms)
            end_max = entries[-1].offset + 1
        elif under_way.kind == "truncate":
            end_min = min(end_min, model.truncated_end(under_way))
        elif under_way.kind == "advance":
            start_max = under_way.offset
        elif under_way.kind == "retain":
            start_max = model.log_end
        elif under_way.kind == "anew":
            # Half done, it leaves a shorter log: segments go from the highest down.
            empty_at = (under_way.offset, max(under_way.offset, model.log_start))
            start_max = max(start_max, under_way.offset)
            end_min = 0
    return Bounds(entries, end_min, end_max, model.log_start, start_max, empty_at)


def check(log: PartitionWriter, model: Model, allowed: Bounds) -> Model:
    """Judge a log opened after a crash; returns the model of what it holds. Raises AssertionError."""
    start, end = log.log_start_offset, log.log_end_offset
    if start != end or start not in allowed.empty_at:
        assert allowed.start_min <= start <= allowed.start_max, f"log start {start}, allowed {allowed}"
        assert max(allowed.end_min, start) <= end <= max(allowed.end_max, start), f"log end {end}, allowed {allowed}"
    kept = tuple(entry for entry in allowed.entries if entry.offset < end)
    visible = [entry.record for entry in kept if entry.record is not None and entry.offset >= start]
    found = list(log.records(start, isolation=Isolation.LOG_END))
    assert found == visible, _difference(found, visible)
    _check_committed(log, kept)
    _check_producers(log, kept)
    _check_segments(log)
    return Model(kept, start, end, min(model.flushed, end))


def _difference(found: list[Record], expected: list[Record]) -> str:
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=False)):
        if ours != theirs:
            return f"record {number}: {ours}, expected {theirs}"
    return f"{len(found)} records, expected {len(expected)}: {found[len(expected) :]} {expected[len(found) :]}"


def _check_committed(log: PartitionWriter, entries: tuple[Entry, ...]) -> None:
    """A read_committed reader gets no record of an open or aborted transaction, and all others up to the first open."""
    pending: dict[int, list[Entry]] = {}
    hidden: set[int] = set()
    crosses_log_start = False
    for entry in entries:
        if entry.record is None:
            ended = pending.pop(entry.producer_id, [])
            if not entry.commit:
                hidden.update(each.offset for each in ended)
                crosses_log_start |= bool(ended) and ended[0].offset < log.log_start_offset
        elif entry.transactional:
            pending.setdefault(entry.producer_id, []).append(entry)
    stable = min((each[0].offset for each in pending.values()), default=log.log_end_offset)
    hidden.update(each.offset for group in pending.values() for each in group)
    crosses_log_start |= stable < log.log_start_offset
    found = list(log.records(isolation=Isolation.READ_COMMITTED))
    if crosses_log_start:
        # Where the log start cut a transaction in two, what is known of its beginning may be gone, never its end.
        assert not {record.offset for record in found} & hidden
        return
    shown = [
        entry.record
        for entry in entries
        if entry.record and log.log_start_offset <= entry.offset < stable and entry.offset not in hidden
    ]
    assert found == shown, "read committed: " + _difference(found, shown)


def _check_producers(log: PartitionWriter, entries: tuple[Entry, ...]) -> None:
    """Producers are known by what is in the log, and not by what was lost."""
    last: dict[int, Entry] = {}
    for entry in entries:
        if entry.producer_id >= 0 and entry.record is not None:
            last[entry.producer_id] = entry
    for producer_id in log.producers.producers:
        assert any(entry.producer_id == producer_id for entry in entries), f"producer {producer_id} of nothing"
    for producer_id, entry in last.items():
        if entry.offset < log.log_start_offset:
            continue
        state = log.producers.producers.get(producer_id)
        assert state is not None, f"producer {producer_id} is forgotten"
        assert (state.last_sequence, state.last_data_offset) == (entry.last_sequence, entry.offset), state
        if log.producers.producers.get(producer_id) is not None and entry.last_sequence >= 0:
            _check_repeat(log, entry)


def _check_repeat(log: PartitionWriter, entry: Entry) -> None:
    """The producer sends its last batch once more, as it would not knowing that it arrived."""
    count = entry.last_sequence - entry.first_sequence + 1
    again = encode_batch(
        columns_of([Record(b"k", b"again", 1)] * count),
        BatchOptions(
            producer_id=entry.producer_id,
            producer_epoch=0,
            base_sequence=entry.first_sequence,
            transactional=entry.transactional,
        ),
    )
    end = log.log_end_offset
    info = log.append_batches(again, leader_epoch=-1)
    assert info.duplicate, f"{entry} was appended twice"
    assert (info.last_offset, log.log_end_offset) == (entry.offset, end)


def _check_segments(log: PartitionWriter) -> None:
    """Index entries point at the batches they name; batches of the log have the epochs the checkpoint says."""
    for segment in log.segments:
        headers = list(segment.headers())
        positions = {header.last_offset: header.position for header in headers}
        for offset_entry in segment.offset_index.items():
            assert positions.get(offset_entry.offset) == offset_entry.position, (segment, offset_entry)
        for time_entry in segment.time_index.items():
            before = [header.max_timestamp_ms for header in headers if header.last_offset <= time_entry.offset]
            assert time_entry.offset in positions, (segment, time_entry)
            assert max(before) == time_entry.timestamp_ms, (segment, time_entry)
        markers = {header.last_offset for header in headers if header.control}
        for aborted in segment.txn_index.entries():
            assert aborted.last_offset in markers, (segment, aborted)
        for header in headers:
            assert header.base_offset is not None
            if header.base_offset >= log.log_start_offset:
                assert epoch_for_offset(log.epochs, header.base_offset) == header.leader_epoch, (segment, header)


def check_files(fs: FileSystem, place: Place, log: PartitionWriter) -> None:
    """The directory holds the log and nothing half done; the state file lists it, and a reader by that list agrees."""
    bases = [segment.base_offset for segment in log.segments]
    names = fs.listdir(place.directory)
    files = [parsed for parsed in map(parse_file_name, names) if parsed is not None]
    assert not [file.name for file in files if file.transient in (Transient.CLEANED, Transient.SWAP)]
    assert not [name for name in names if name.endswith(".tmp")]
    logs = [file.base_offset for file in files if file.kind is FileKind.LOG and file.transient is Transient.NONE]
    assert sorted(logs) == bases
    state = read_state(fs, place.state_path)
    assert state is not None
    assert [entry.base_offset for entry in state.segments] == bases
    assert state.log_start_offset == log.log_start_offset
    assert not state.closed
    reader = PartitionReader(
        PartitionPlace(place.directory, log.partition, place.state_path),
        high_watermark=lambda: log.high_watermark,
        fs=fs,
    )
    try:
        assert list(reader.records(log.log_start_offset)) == list(log.records())
    finally:
        reader.close()


def check_quarantine(before: dict[str, bytes], fs: FileSystem, place: Place, log: PartitionWriter) -> None:
    """Every byte that recovery took out of a `.log` file lies in quarantine, but for zeros at the end.

    `before` are the files as recovery found them.
    """
    report = log.recovery
    kept = {os.path.basename(path): _content(fs, path) for path in report.quarantined}
    logs = {segment.path(FileKind.LOG) for segment in log.segments}
    for cut in report.cuts:
        tail = before[cut.file][cut.position :].rstrip(b"\0")
        if tail:
            assert kept[f"{os.path.basename(cut.file)}.from-{cut.position}"] == tail
            assert cut.dropped_bytes >= len(tail)
    if not report.cuts:
        assert not kept
    first_lost = min((cut.file for cut in report.cuts), default=None)
    for path, content in before.items():
        parsed = parse_file_name(os.path.basename(path))
        behind = first_lost is not None and os.path.dirname(path) == place.directory and path > first_lost
        if behind and parsed and parsed.kind is FileKind.LOG and parsed.transient is Transient.NONE:
            assert path not in logs
            if content.strip(b"\0"):
                assert kept[os.path.basename(path)] == content


def _content(fs: FileSystem, path: str) -> bytes:
    file = fs.open(path)
    try:
        return file.pread(file.size(), 0)
    finally:
        file.close()
