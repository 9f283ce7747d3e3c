"""The log against a list: whatever is done to it in whatever order, it holds what the list holds."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pyarrow as pa
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from logstore.clock import ManualClock
from logstore.config import LogConfig
from logstore.directory.layout import PartitionPlace
from logstore.partition.reader import PartitionReader
from logstore.records.record import Record
from reference.fetching import Isolation
from reference.partition_writer import PartitionWriter
from simulation.filesystem import SimulatedFileSystem
from simulation.logs import DIRECTORY, PARTITION, batch, contents, open_log, state_path

Row = tuple[int, bytes | None, bytes | None, int]

RECORDS = st.lists(
    st.tuples(st.binary(max_size=3), st.one_of(st.none(), st.binary(max_size=60)), st.integers(0, 50)),
    min_size=1,
    max_size=5,
).map(lambda rows: [Record(*row) for row in rows])


@dataclass
class Oracle:
    """What the log should hold: rows of every batch that is still in a file, hidden ones included."""

    batches: list[list[Row]]
    log_start: int = 0
    end: int = 0

    @property
    def rows(self) -> list[Row]:
        return [row for rows in self.batches for row in rows]

    @property
    def data_end(self) -> int:
        """Behind the last batch; a truncation inside a batch leaves offsets without records up to the log's end."""
        return self.batches[-1][-1][0] + 1 if self.batches else -1

    def append(self, records: list[Record]) -> None:
        rows = [(self.end + n, r.key, r.value, r.timestamp_ms) for n, r in enumerate(records)]
        self.batches.append(rows)
        self.end = rows[-1][0] + 1

    def truncate(self, offset: int) -> None:
        self.batches = [rows for rows in self.batches if rows[-1][0] < offset]
        self.end = offset
        self.log_start = min(self.log_start, offset)


class LogMachine(RuleBasedStateMachine):
    log: PartitionWriter
    fs: SimulatedFileSystem

    @initialize(
        segment_bytes=st.sampled_from((200, 500, 1 << 20)),
        interval=st.sampled_from((0, 100, 4096)),
        index_bytes=st.sampled_from((4, 48, 1 << 12)),
        preallocate=st.booleans(),
        long_lived=st.booleans(),
        flush_messages=st.sampled_from((4, 1 << 40)),
        retention_bytes=st.sampled_from((-1, 0, 500)),
    )
    def begin(
        self,
        segment_bytes: int,
        interval: int,
        index_bytes: int,
        preallocate: bool,
        long_lived: bool,
        flush_messages: int,
        retention_bytes: int,
    ) -> None:
        self.config = LogConfig(
            segment_bytes=segment_bytes,
            index_interval_bytes=interval,
            segment_index_bytes=index_bytes,
            preallocate=preallocate,
            flush_messages=flush_messages,
            retention_bytes=retention_bytes,
            retention_ms=-1,
            segment_ms=1 << 50,
        )
        self.long_lived = long_lived
        self.clock = ManualClock(
            1000
        )  # near the records' times: a producer that has not written for a day is forgotten
        self.fs = SimulatedFileSystem(self.clock)
        self.oracle = Oracle([])
        self.producer_id = self.sequence = 0
        self.sent: tuple[int, int, bytes] | None = None  # first and last offset of the producer's last batch
        self.log = self._open(clean=True, recovery_point=0)

    def _open(self, *, clean: bool, recovery_point: int) -> PartitionWriter:
        return open_log(
            self.fs,
            config=self.config,
            clock=self.clock,
            clean=clean,
            recovery_point=recovery_point,
            long_lived=self.long_lived,
        )

    # --- writing

    @rule(records=RECORDS)
    def append_records(self, records: list[Record]) -> None:
        self._appended(records, self.log.append(records))

    @rule(records=RECORDS)
    def append_columns(self, records: list[Record]) -> None:
        table = pa.table(
            {
                "key": pa.array([r.key for r in records], pa.binary()),
                "value": pa.array([r.value for r in records], pa.binary()),
                "timestamp": pa.array([r.timestamp_ms for r in records], pa.int64()),
            }
        )
        self._appended(records, self.log.append_columns(table))

    @rule(records=RECORDS, codec_id=st.sampled_from((0, 0, 3, 4)))
    def append_batch(self, records: list[Record], codec_id: int) -> None:
        self._appended(records, self.log.append_batches(batch(records, codec_id=codec_id)))

    @rule(records=RECORDS)
    def append_idempotent(self, records: list[Record]) -> None:
        sent = batch(records, producer_id=self.producer_id, producer_epoch=0, base_sequence=self.sequence)
        first = self.oracle.end
        self._appended(records, self.log.append_batches(sent))
        self.sequence += len(records)
        self.sent = (first, self.oracle.end - 1, sent)

    @precondition(lambda self: self.sent)
    @rule()
    def repeat_the_last_idempotent_batch(self) -> None:
        assert self.sent is not None
        first, last, sent = self.sent
        info = self.log.append_batches(sent)
        assert info.duplicate
        assert (info.first_offset, info.last_offset) == (first, last)

    def _cut_off(self, end: int) -> None:
        """A producer whose last batch is gone is replaced by another: what is left of it only the log knows."""
        if self.sent is not None and self.sent[1] >= end:
            self.producer_id, self.sequence, self.sent = self.producer_id + 1, 0, None

    def _looked_for_again(self) -> None:
        """As in Kafka, producers are looked for from the log start on."""
        if self.sent is not None and self.sent[1] < self.oracle.log_start:
            self._cut_off(0)

    def _appended(self, records: list[Record], info: object) -> None:
        first = self.oracle.end
        self.oracle.append(records)
        assert (info.first_offset, info.last_offset) == (first, self.oracle.end - 1)  # type: ignore[attr-defined]
        assert self.log.log_end_offset - self.log.recovery_point < self.config.flush_messages

    @rule()
    def roll(self) -> None:
        self.log.roll()

    @rule()
    def flush(self) -> None:
        self.log.flush()
        assert self.log.recovery_point >= self.oracle.end

    # --- cutting

    @rule(share=st.floats(0, 1.1))
    def truncate(self, share: float) -> None:
        first = self.log.segments[0].base_offset
        offset = first + int(share * (self.oracle.end - first))
        assert self.log.truncate_to(offset) == (offset < self.oracle.end)
        if offset < self.oracle.end:
            self.oracle.truncate(offset)
            self._cut_off(offset)
            self._looked_for_again()

    @rule(share=st.floats(0, 1))
    def advance_log_start(self, share: float) -> None:
        offset = self.oracle.log_start + int(share * (self.log.high_watermark - self.oracle.log_start))
        assert self.log.advance_log_start(offset) == (offset > self.oracle.log_start)
        self.oracle.log_start = max(self.oracle.log_start, offset)

    @rule()
    def retain(self) -> None:
        told = self.log.apply_retention(dry_run=True)
        assert self.log.apply_retention() == told
        first = self.log.segments[0].base_offset
        gone = {base for deleted in told for base in deleted.base_offsets}
        assert not gone or first > max(gone)
        size = sum(len(rows) for rows in self.oracle.batches)
        self.oracle.batches = [rows for rows in self.oracle.batches if rows[-1][0] >= first]
        assert told or size == sum(len(rows) for rows in self.oracle.batches)
        self.oracle.log_start = max(self.oracle.log_start, first)
        if self.config.retention_bytes > 0:
            assert self.log.size_bytes >= min(self.config.retention_bytes, self.log.size_bytes)

    # --- stopping

    @rule()
    def close_and_open(self) -> None:
        self.log.close()
        before = {name: data for name, data in self.fs.files().items() if name.startswith(DIRECTORY)}
        self.log = self._open(clean=True, recovery_point=0)
        assert not self.log.recovery.found_damage
        if not self.long_lived and not self.log.recovery.notes:  # it begins anew when its start lies behind its data
            after = {name: data for name, data in self.fs.files().items() if name.startswith(DIRECTORY)}
            assert {n: d for n, d in after.items() if n.endswith((".log", "index"))} == {
                n: d for n, d in before.items() if n.endswith((".log", "index"))
            }
        self._reopened()

    @rule()
    def be_killed_and_open(self) -> None:
        recovery_point = self.log.recovery_point
        self.fs = self.fs.kill()
        self.log = self._open(clean=False, recovery_point=recovery_point)
        assert not self.log.recovery.found_damage
        self._reopened()

    @rule(seed=st.integers(0, 2**32))
    def lose_power_and_open(self, seed: int) -> None:
        recovery_point = self.log.recovery_point
        self.fs = self.fs.crash(random.Random(seed))
        self.log = self._open(clean=False, recovery_point=recovery_point)
        rows = contents(self.log)
        kept = [row for row in self.oracle.rows if row[0] >= self.log.log_start_offset]
        assert rows == kept[: len(rows)]
        assert len(rows) >= sum(row[0] < recovery_point for row in kept), "everything below the recovery point"
        self.oracle.batches = [b for b in self.oracle.batches if b[-1][0] < self.log.log_end_offset]
        self._reopened()
        self._cut_off(self.log.log_end_offset)

    def _reopened(self) -> None:
        """The log ends behind its last batch now; one that was cut off inside a batch has forgotten the rest."""
        first = self.log.segments[0].base_offset
        self.oracle.end = max(self.oracle.data_end, self.log.segments[-1].base_offset, first)
        if self.oracle.end < self.oracle.log_start:
            self.oracle.end = self.oracle.log_start
        self._looked_for_again()
        self.oracle.batches = [rows for rows in self.oracle.batches if rows[-1][0] >= first]

    # --- reading

    @rule(share=st.floats(0, 1))
    def read_from_anywhere(self, share: float) -> None:
        start = self.oracle.log_start + int(share * (self.oracle.end - self.oracle.log_start))
        assert contents(self.log, start) == [row for row in self.oracle.rows if row[0] >= start]

    @rule(time_ms=st.integers(0, 52))
    def look_up_a_time(self, time_ms: int) -> None:
        bases = [segment.base_offset for segment in self.log.segments]
        answer = None
        for base, following in zip(bases, [*bases[1:], self.oracle.end + 1], strict=True):
            inside = [row for row in self.oracle.rows if base <= row[0] < following]
            largest = max((row[3] for row in inside), default=None)
            if largest is None or largest >= time_ms:  # an empty segment has the time of its file
                answer = next((row for row in inside if row[3] >= time_ms and row[0] >= self.oracle.log_start), None)
                break
        found = self.log.offset_for_timestamp(time_ms, isolation=Isolation.LOG_END)
        assert (None if found is None else (found.offset, found.timestamp_ms)) == (
            None if answer is None else (answer[0], answer[3])
        )

    @rule()
    def read_from_another_process(self) -> None:
        reader = PartitionReader(
            PartitionPlace(DIRECTORY, PARTITION, state_path(DIRECTORY)),
            high_watermark=lambda: self.log.high_watermark,
            fs=self.fs,
        )
        rows = [(r.offset, r.key, r.value, r.timestamp_ms) for r in reader.records(self.log.log_start_offset)]
        assert rows == [row for row in self.oracle.rows if row[0] >= self.oracle.log_start]
        reader.close()

    @invariant()
    def the_log_is_the_list(self) -> None:
        if not hasattr(self, "log"):
            return
        assert self.log.log_start_offset == self.oracle.log_start
        assert self.log.log_end_offset == self.oracle.end
        assert self.log.high_watermark <= self.oracle.end
        assert self.log.high_watermark >= min(max(self.oracle.data_end, self.oracle.log_start), self.oracle.end)
        assert contents(self.log) == [row for row in self.oracle.rows if row[0] >= self.oracle.log_start]

    def teardown(self) -> None:
        if hasattr(self, "log"):
            self.log.close()
            again = self._open(clean=True, recovery_point=0)
            assert contents(again) == [row for row in self.oracle.rows if row[0] >= self.oracle.log_start]


TestLogMachine = LogMachine.TestCase
TestLogMachine.settings = settings(
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
