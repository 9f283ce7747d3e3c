"""Apache Kafka itself, as the tests' judge: one JVM around its published jars that serves many requests.

`Kafka` starts the driver under `src/`, sends one JSON object a line and gets one back; large results travel in files.
Owns the JVM and its scratch directory, and removes both. Never judges anything of its own accord: what is compared
with what is up to the tests. A request that Kafka's code refuses raises `KafkaError` with the Java stack; one
operation on a log that Kafka refuses is an ordinary `OpResult` with `error` set, because tests ask for refusals.

The dictionaries that go to Kafka are made by two families of functions here, which document their fields:

- `record()` and `batch()` describe a record and a batch for `Kafka.build_batches` and `Op.append_records`;
- the `Op` functions describe the operations `Kafka.append` performs on an open log, in order.

Topic settings go by Kafka's names, values of any plain type. `segment.bytes` below Kafka's floor of 1 MiB is passed
by its internal name. A partition directory must be named `<topic>-<partition>`, as Kafka wants it.
"""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import queue
import re
import shutil
import struct
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from conformance.build import build

Headers = tuple[tuple[str, "bytes | None"], ...]
Config = Mapping[str, "str | int | float | bool"]

#: what marks a finding among the lines DumpLogSegments prints to stdout
_BAD_LINES = r"isvalid: false|isValid: false|invalid bytes at the end"
_OF_EMPTIED = re.compile(r"Found timestamp mismatch in|log timestamp: -1$")  # what else mismatches has a line more
#: small and quick to start; timing wants a JVM of its own with the options a broker has
JVM_OPTIONS = ("-Xmx2g", "-XX:+UseSerialGC")


class KafkaError(Exception):
    """The driver answered with an error: `error` is the Java class, `stack` its trace."""

    def __init__(self, error: str, message: str | None, stack: str) -> None:
        super().__init__(f"{error}: {message}\n{stack}")
        self.error = error
        self.stack = stack


class DriverDied(Exception):
    """The JVM ended or did not answer in time; the text has the end of its stderr."""


@dataclass(frozen=True, slots=True)
class KafkaRecord:
    """One record as Kafka read it."""

    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers = ()


@dataclass(frozen=True, slots=True)
class KafkaBatch:
    """One batch header as Kafka read it, and its records (None: not asked for, or hidden from read_committed).

    `count`, and for v0/v1 the producer fields, are what Kafka answers there: None, and -1. `base_timestamp_ms` is the
    raw field (the delete horizon, where one is set), -1 before v2. `position` is in `file`, or in the bytes given.
    """

    file: str | None
    position: int
    size_bytes: int
    base_offset: int
    last_offset: int
    count: int | None
    magic: int
    crc: int
    attributes: int
    codec: str
    timestamp_type: str
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    leader_epoch: int
    transactional: bool
    control: bool
    delete_horizon_ms: int | None
    records: tuple[KafkaRecord, ...] | None = None


@dataclass(frozen=True, slots=True)
class LogState:
    """What an open UnifiedLog says of itself. Segments are (base offset, size); epochs (epoch, start offset).

    A producer: producer_id, producer_epoch, coordinator_epoch, last_timestamp_ms, current_txn_first_offset (or None),
    batches (oldest first: last_sequence, last_offset, offset_delta, timestamp_ms).
    """

    log_start_offset: int
    log_end_offset: int
    high_watermark: int
    last_stable_offset: int
    recovery_point: int
    segments: tuple[tuple[int, int], ...]
    producers: tuple[dict[str, Any], ...]
    leader_epochs: tuple[tuple[int, int], ...]

    @property
    def base_offsets(self) -> list[int]:
        return [base for base, _ in self.segments]


@dataclass(frozen=True, slots=True)
class OpResult:
    """The outcome of one operation; `error` is the Java class that was thrown (`cause`, the one inside: what a client
    is told of a RecordValidationException), `fields` what the operation answers."""

    error: str | None
    cause: str | None
    message: str | None
    log_end_offset: int
    active_segment: int
    fields: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.fields[name]

    @property
    def first_offset(self) -> int:
        return int(self.fields["first_offset"])

    @property
    def last_offset(self) -> int:
        return int(self.fields["last_offset"])


@dataclass(frozen=True, slots=True)
class LogRun:
    """`opened` is the log as loaded, `closed` as it was just before closing."""

    opened: LogState
    results: tuple[OpResult, ...]
    closed: LogState


@dataclass(frozen=True, slots=True)
class Cleanable:
    """What Kafka would clean of a log; `checkpoint_reset` says that the one given is out of range and replaced. The
    ratio of nothing to nothing is not a number."""

    first_dirty_offset: int
    first_uncleanable_offset: int
    checkpoint_reset: bool
    clean_bytes: int
    cleanable_bytes: int
    cleanable_ratio: float


@dataclass(frozen=True, slots=True)
class Verdict(Cleanable):
    """Whether Kafka's cleaner manager would take the log now, `checkpoint` the one it leaves behind, if any."""

    eligible: bool
    must_clean: bool
    compaction_delay_ms: int
    checkpoint: int | None


@dataclass(frozen=True, slots=True)
class CleanerPass(Cleanable):
    """One pass of Kafka's cleaner. `end_offset` is the new checkpoint, the old one where there was nothing to clean;
    then `stats` is empty. Stats: map_entries, map_slots, map_bytes_read, map_messages_read, bytes_read, bytes_written,
    messages_read, messages_written, invalid_messages_read, nanos."""

    cleaned: bool
    end_offset: int
    stats: dict[str, int]
    state: LogState


def encoded(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode("ascii")


def decoded(text: str | None) -> bytes | None:
    return None if text is None else base64.b64decode(text)


def record(
    key: bytes | None,
    value: bytes | None,
    timestamp_ms: int | None = None,
    headers: Iterable[tuple[str, bytes | None]] = (),
    offset: int | None = None,
) -> dict[str, Any]:
    """A record for Kafka to write. No timestamp is -1 (the clients: now); no offset is the next one of its batch."""
    return {
        "key": encoded(key),
        "value": encoded(value),
        "timestamp_ms": timestamp_ms,
        "headers": [[name, encoded(data)] for name, data in headers],
        "offset": offset,
    }


def batch(records: Iterable[Mapping[str, Any]] = (), **fields: Any) -> dict[str, Any]:
    """A batch for Kafka's builder: `records` are record()s, the rest of the fields may be left out.

    magic (2), codec ("none"), level (codec's own), timestamp_type ("CreateTime"), log_append_time_ms (-1; what a
    LogAppendTime batch carries), base_offset (0), last_offset (of the last record), leader_epoch (-1), producer_id,
    producer_epoch, base_sequence (-1), transactional, control (False), delete_horizon_ms (none).
    marker: {"type": "commit" | "abort", "coordinator_epoch": 0, "timestamp_ms": -1} makes a transaction marker;
    empty: True makes a batch of no records from base_offset to last_offset with max_timestamp_ms.
    stamp_append_time_ms: what a leader of a LogAppendTime topic does to the finished batch.
    """
    return {"records": list(records), **fields}


class Op:
    """The operations of `Kafka.append`. After each, background work that is due runs and, unless the high watermark
    is held, it rises to the log end offset."""

    @staticmethod
    def append(
        batches: bytes,
        origin: str = "client",
        leader_epoch: int = 0,
        as_magic: int | None = None,
        transaction_version: int = 1,
    ) -> dict[str, Any]:
        """Ready-made bytes. Origin: client, coordinator (markers), raft_leader, or replication (appendAsFollower).
        as_magic 0 or 1 keeps the old format, through the method Kafka has for its tests. Answers first_offset,
        last_offset, max_timestamp_ms, log_append_time_ms, log_start_offset."""
        return {
            "do": "append",
            "batches": encoded(batches),
            "origin": origin,
            "leader_epoch": leader_epoch,
            "as_magic": as_magic,
            "transaction_version": transaction_version,
        }

    @staticmethod
    def append_records(
        records: Iterable[Mapping[str, Any]],
        leader_epoch: int = 0,
        origin: str = "client",
        as_magic: int | None = None,
        transaction_version: int = 1,
        **fields: Any,
    ) -> dict[str, Any]:
        """One batch from Kafka's builder, fields as in batch(), then appended as append() does."""
        return {
            "do": "append_records",
            **batch(records, **fields),
            "leader_epoch": leader_epoch,
            "origin": origin,
            "as_magic": as_magic,
            "transaction_version": transaction_version,
        }

    @staticmethod
    def marker(
        kind: str,
        producer_id: int,
        producer_epoch: int,
        coordinator_epoch: int = 0,
        timestamp_ms: int | None = None,
        leader_epoch: int = 0,
        transaction_version: int = 1,
    ) -> dict[str, Any]:
        """A "commit" or "abort" marker; its timestamp is the clock's unless given. Answers as append()."""
        return {
            "do": "marker",
            "type": kind,
            "producer_id": producer_id,
            "producer_epoch": producer_epoch,
            "coordinator_epoch": coordinator_epoch,
            "timestamp_ms": timestamp_ms,
            "leader_epoch": leader_epoch,
            "transaction_version": transaction_version,
        }

    @staticmethod
    def clock(now_ms: int) -> dict[str, Any]:
        return {"do": "clock", "now_ms": now_ms}

    @staticmethod
    def jitter(jitter_ms: int) -> dict[str, Any]:
        """The roll jitter of segments made from now on (Kafka draws it at random)."""
        return {"do": "jitter", "jitter_ms": jitter_ms}

    @staticmethod
    def configure(**config: Any) -> dict[str, Any]:
        """Changes settings of the open log; give names with dots as **{"segment.bytes": 1000}."""
        return {"do": "configure", "config": _settings(config)}

    @staticmethod
    def roll(offset: int | None = None) -> dict[str, Any]:
        return {"do": "roll", "offset": offset}

    @staticmethod
    def flush() -> dict[str, Any]:
        return {"do": "flush"}

    @staticmethod
    def truncate(offset: int) -> dict[str, Any]:
        """truncateTo; answers truncated."""
        return {"do": "truncate", "offset": offset}

    @staticmethod
    def truncate_fully(offset: int) -> dict[str, Any]:
        """Drops everything and starts an empty log at the offset."""
        return {"do": "truncate_fully", "offset": offset}

    @staticmethod
    def high_watermark(offset: int) -> dict[str, Any]:
        """Only of use where the high watermark is held."""
        return {"do": "high_watermark", "offset": offset}

    @staticmethod
    def log_start(offset: int) -> dict[str, Any]:
        """As a delete-records request; answers advanced."""
        return {"do": "log_start", "offset": offset}

    @staticmethod
    def retain() -> dict[str, Any]:
        """deleteOldSegments, all passes; answers deleted (a count of segments)."""
        return {"do": "retain"}

    @staticmethod
    def leader_epoch(leader_epoch: int) -> dict[str, Any]:
        """Assigns the epoch to the log end offset."""
        return {"do": "leader_epoch", "leader_epoch": leader_epoch}

    @staticmethod
    def snapshot() -> dict[str, Any]:
        return {"do": "snapshot"}

    @staticmethod
    def expire_producers() -> dict[str, Any]:
        return {"do": "expire_producers"}

    @staticmethod
    def state() -> dict[str, Any]:
        """Answers state: the fields of LogState as plain JSON (segments as base_offset and size_bytes)."""
        return {"do": "state"}

    @staticmethod
    def offset_for_timestamp(timestamp_ms: int) -> dict[str, Any]:
        """Also -1 latest, -2 earliest, -3 max timestamp. Answers timestamp_ms, offset, leader_epoch (or None), or
        nothing at all."""
        return {"do": "offset_for_timestamp", "timestamp_ms": timestamp_ms}

    @staticmethod
    def read(
        offset: int,
        max_bytes: int = 2**31 - 1,
        isolation: str = "log_end",
        min_one: bool = True,
        with_bytes: bool = False,
    ) -> dict[str, Any]:
        """UnifiedLog.read; isolation: log_end, high_watermark, read_committed. Answers offset, segment, position,
        size_bytes, first_entry_incomplete, aborted (pairs of producer id and first offset; read_committed only) and,
        if asked for, bytes (base64)."""
        return {
            "do": "read",
            "offset": offset,
            "max_bytes": max_bytes,
            "isolation": isolation,
            "min_one": min_one,
            "bytes": with_bytes,
        }


def _settings(config: Config | None) -> dict[str, str]:
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in (config or {}).items()
    }


def _state(answer: dict[str, Any]) -> LogState:
    return LogState(
        **{
            **answer,
            "segments": tuple((s["base_offset"], s["size_bytes"]) for s in answer["segments"]),
            "producers": tuple(answer["producers"]),
            "leader_epochs": tuple((epoch, start) for epoch, start in answer["leader_epochs"]),
        }
    )


def _op_result(answer: dict[str, Any]) -> OpResult:
    answer.pop("stack", None)
    return OpResult(
        error=answer.pop("error", None),
        cause=answer.pop("cause", None),
        message=answer.pop("message", None),
        log_end_offset=answer.pop("log_end_offset"),
        active_segment=answer.pop("active_segment"),
        fields=answer,
    )


def _record(fields: Sequence[Any]) -> KafkaRecord:
    offset, timestamp_ms, key, value, headers = fields
    return KafkaRecord(
        offset, timestamp_ms, decoded(key), decoded(value), tuple((name, decoded(data)) for name, data in headers)
    )


def _goes_upwards(offset_index: bytes) -> bool:
    entries = list(struct.iter_unpack(">ii", offset_index[: len(offset_index) // 8 * 8]))
    return all(a[0] < b[0] and a[1] < b[1] for a, b in itertools.pairwise(entries))


class Kafka:
    """The JVM; a context manager. Started by the first request, and anew after it died. Not for several threads."""

    def __init__(self, timeout_s: float = 120.0, jvm_options: Sequence[str] = JVM_OPTIONS) -> None:
        self.timeout_s = timeout_s
        self._jvm_options = tuple(jvm_options)
        self._scratch = Path(tempfile.mkdtemp(prefix="duramen-conformance-"))
        self._process: subprocess.Popen[bytes] | None = None
        self._answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._files = 0

    def __enter__(self) -> Kafka:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        self._stop()
        shutil.rmtree(self._scratch, ignore_errors=True)

    # ------------------------------------------------------------------------------------------- the JVM

    @property
    def _stderr(self) -> Path:
        return self._scratch / "driver.err"

    def _start(self) -> subprocess.Popen[bytes]:
        options = [*self._jvm_options, "-Dlog4j2.disableJmx=true"]
        command = ["java", *options, "-cp", build(), "duramen.conformance.Driver"]
        with open(self._stderr, "ab") as stderr:
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr)
        answers: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        assert process.stdout is not None
        threading.Thread(target=self._pump, args=(process.stdout, answers), daemon=True).start()
        self._process, self._answers = process, answers
        return process

    @staticmethod
    def _pump(stdout: IO[bytes], answers: queue.SimpleQueue[bytes]) -> None:
        with stdout:
            for line in stdout:
                answers.put(line)
        answers.put(b"")

    def _stop(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.kill()
        process.wait()
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # a half-sent request
            process.stdin.close()

    def stderr_tail(self, lines: int = 40) -> str:
        if not self._stderr.exists():
            return ""
        with open(self._stderr, encoding="utf-8", errors="replace") as text:
            return "".join(deque(text, lines))

    def request(self, name: str, timeout_s: float | None = None, **fields: Any) -> dict[str, Any]:
        """Sends one request; raises KafkaError, or DriverDied when no answer came in time (the JVM is then killed)."""
        process = self._process
        if process is None or process.poll() is not None:
            self._stop()
            process = self._start()
        assert process.stdin is not None
        limit_s = self.timeout_s if timeout_s is None else timeout_s
        try:
            process.stdin.write(json.dumps({"request": name, **fields}).encode() + b"\n")
            process.stdin.flush()
            line = self._answers.get(timeout=limit_s)
        except (OSError, queue.Empty) as cause:
            why = f"gave no answer within {limit_s} s" if isinstance(cause, queue.Empty) else "took no request"
            self._stop()
            raise DriverDied(f"the driver {why} to {name}\n{self.stderr_tail()}") from cause
        if not line:
            self._stop()
            raise DriverDied(f"the driver ended while it served {name}\n{self.stderr_tail()}")
        answer: dict[str, Any] = json.loads(line)
        if "stack" in answer:
            raise KafkaError(answer["error"], answer.get("message"), answer["stack"])
        return answer

    def scratch_file(self) -> Path:
        """A new file name in a directory that goes away with this object."""
        self._files += 1
        return self._scratch / f"{self._files}.jsonl"

    def versions(self) -> dict[str, str]:
        """The versions of `java` and `kafka`."""
        return self.request("hello")

    # ------------------------------------------------------------------------------------------- the dump tool

    def dump(
        self, files: Iterable[Path | str], *flags: str, matching: str | None = None, timeout_s: float | None = None
    ) -> tuple[str, str, int]:
        """kafka-dump-log over the files: what it printed to stdout (only the lines that match, if given) and to
        stderr, and the exit code, which says nothing about findings."""
        args = ["--files", ",".join(str(f) for f in files), *flags]
        answer = self.request("dump", timeout_s, args=args, matching=matching)
        return answer["out"], answer["err"], answer["exit"]

    def dump_findings(self, directory: Path, compacted: bool = False, time_entries: bool = True) -> list[str]:
        """Everything Kafka's dump tool finds wrong in a closed partition directory; an empty list is a pass.

        Logs are iterated record by record, index files sanity-checked and their entries held against the log,
        transaction indexes and snapshots read; leftovers of a swap are findings too. If `compacted`, gaps between
        offsets are allowed, and time index entries that point to emptied batches, in which the tool finds no timestamp:
        Kafka's own cleaner leaves both. Checking time index entries is quadratic in the segment: leave them out for
        large ones.
        """
        files: dict[str, list[Path]] = {suffix: [] for suffix in ("log", "index", "timeindex", "txnindex", "snapshot")}
        findings = []
        for path in sorted(directory.iterdir()):
            suffix = path.suffix[1:]
            if suffix in files:
                files[suffix].append(path)
            elif suffix in ("cleaned", "swap", "deleted"):
                findings.append(f"left over: {path.name}")
        if not files["log"]:
            findings.append(f"no log file in {directory}")
        indexes, times = files["index"], files["timeindex"]
        findings += self._judged("log", files["log"], compacted, "--deep-iteration")
        findings += self._judged("index sanity", indexes + times, compacted, "--index-sanity-check")
        verify = ("--verify-index-only", "--max-message-size", str(64 << 20))
        findings += self._judged("index entries", indexes, compacted, *verify)
        if time_entries:
            found = self._judged("time index entries", times, compacted, *verify)
            findings += [text for text in found if not (compacted and _OF_EMPTIED.search(text))]
        findings += self._judged("transactions and snapshots", files["txnindex"] + files["snapshot"], compacted)
        # What Kafka's tool passes over without a word: a cut-off transaction index, and whatever stands in an offset
        # index at and after an entry that does not go upwards.
        findings += [f"{p.name}: not a whole number of entries" for p in files["txnindex"] if p.stat().st_size % 34]
        findings += [f"{p.name}: entries do not go upwards" for p in indexes if not _goes_upwards(p.read_bytes())]
        return findings

    def _judged(self, what: str, files: list[Path], compacted: bool, *flags: str) -> list[str]:
        if not files:
            return []
        out, err, code = self.dump(files, *flags, matching=rf"{_BAD_LINES}|^Dumping ")
        findings = [] if code == 0 else [f"{what}: exit code {code}"]
        dumped = set()
        for line in out.splitlines():
            if line.startswith("Dumping "):
                dumped.add(line.removeprefix("Dumping "))
            else:
                findings.append(f"{what}: {line}")
        findings += [f"{what}: {path.name} was not dumped" for path in files if str(path) not in dumped]
        gap_head = None
        for line in err.splitlines():
            gap = re.match(r"\s+(-?\d+) is followed by", line)
            if line.startswith("Non-consecutive offsets in"):
                gap_head = line
            elif gap_head is not None and gap:
                # The tool calls the first record of every segment a gap after -1.
                if not compacted and gap.group(1) != "-1":
                    findings.append(f"{what}: {gap_head}: {line.strip()}")
            elif line.strip() and not line.startswith("\tat "):
                gap_head = None
                findings.append(f"{what}: {line}")
        return findings

    # ------------------------------------------------------------------------------------------- batches and logs

    def build_batches(self, batches: Iterable[Mapping[str, Any]]) -> list[bytes]:
        """The bytes Kafka's builder makes of each batch()."""
        answer = self.request("build_batches", batches=list(batches))
        return [base64.b64decode(text) for text in answer["batches"]]

    def append(
        self,
        directory: Path,
        operations: Iterable[Mapping[str, Any]] = (),
        config: Config | None = None,
        *,
        now_ms: int = 0,
        jitter_ms: int = 0,
        unclean: bool = False,
        recovery_point: int = 0,
        log_start_offset: int = 0,
        topic_id: str | None = None,
        producer_id_expiration_ms: int = 86_400_000,
        hold_high_watermark: bool = False,
        crash: bool = False,
        timeout_s: float | None = None,
    ) -> LogRun:
        """Opens the directory with UnifiedLog (made if absent), performs the Op operations, closes it.

        The clock stands at `now_ms` until an operation moves it; tasks that are due by it (flushes, deletions after
        file.delete.delay.ms) run after each operation, and all that are left before a clean close. With `crash` the
        files stay as they are when a process dies: indexes preallocated, no snapshot. `unclean` makes Kafka recover
        from `recovery_point` while it opens.
        """
        answer = self.request(
            "append",
            timeout_s,
            directory=str(directory),
            operations=list(operations),
            config=_settings(config),
            now_ms=now_ms,
            jitter_ms=jitter_ms,
            unclean=unclean,
            recovery_point=recovery_point,
            log_start_offset=log_start_offset,
            topic_id=topic_id,
            producer_id_expiration_ms=producer_id_expiration_ms,
            hold_high_watermark=hold_high_watermark,
            crash=crash,
        )
        return LogRun(
            _state(answer["opened"]), tuple(_op_result(r) for r in answer["results"]), _state(answer["closed"])
        )

    def load(self, directory: Path, config: Config | None = None, **options: Any) -> LogState:
        """Opens and closes the directory, options as in append(): what Kafka's loading, or with `unclean` its
        recovery, makes of it."""
        return self.append(directory, (), config, **options).opened

    def offset_for_timestamp(
        self, directory: Path, timestamps_ms: Iterable[int], config: Config | None = None, **options: Any
    ) -> list[tuple[int, int] | None]:
        """(timestamp, offset) of each lookup in one opening of the log, None where nothing is found."""
        run = self.append(directory, [Op.offset_for_timestamp(t) for t in timestamps_ms], config, **options)
        return [(r["timestamp_ms"], r["offset"]) if "offset" in r.fields else None for r in run.results]

    def read_range(
        self, directory: Path, reads: Iterable[Mapping[str, Any]], config: Config | None = None, **options: Any
    ) -> list[OpResult]:
        """The outcome of each Op.read in one opening of the log."""
        return list(self.append(directory, reads, config, **options).results)

    def read(
        self,
        source: Path | Sequence[Path] | bytes,
        *,
        records: bool = True,
        committed: bool = False,
        check_crc: bool = True,
        timeout_s: float | None = None,
    ) -> Iterator[KafkaBatch]:
        """Every batch as FileRecords (or, for bytes, MemoryRecords) reads it. The source is a partition directory,
        files, or bytes. `committed` leaves `records` None for aborted transactions and from the first open one on, as
        a read_committed consumer sees it; needs a directory."""
        out = self.scratch_file()
        where: dict[str, Any]
        if isinstance(source, bytes):
            where = {"bytes": encoded(source)}
        elif isinstance(source, Path):
            where = {"directory": str(source)}
        else:
            where = {"files": [str(p) for p in source]}
        self.request(
            "read", timeout_s, out=str(out), records=records, committed=committed, check_crc=check_crc, **where
        )
        return self._batches(out)

    @staticmethod
    def _batches(out: Path) -> Iterator[KafkaBatch]:
        with open(out, "rb") as lines:
            for line in lines:
                fields = json.loads(line)
                if "records" in fields:
                    fields["records"] = tuple(_record(r) for r in fields["records"])
                yield KafkaBatch(**fields)
        out.unlink()

    def records(self, source: Path | Sequence[Path] | bytes, committed: bool = False) -> Iterator[KafkaRecord]:
        """The data records of read(), without markers."""
        for found in self.read(source, committed=committed):
            if not found.control:
                yield from found.records or ()

    def indexes(self, directory: Path) -> dict[str, list[Any]]:
        """The entries of every index and snapshot by file name, as Kafka's classes read them: .index [offset,
        position], .timeindex [timestamp, offset], .txnindex [producer id, first, last, last stable offset], .snapshot
        producers as in LogState. For closed directories."""
        files: dict[str, list[Any]] = self.request("indexes", directory=str(directory))["files"]
        return files

    # ------------------------------------------------------------------------------------------- compaction

    def clean(
        self,
        directory: Path,
        config: Config | None = None,
        *,
        now_ms: int,
        checkpoint: int | None = None,
        roll: bool = False,
        dedupe_buffer_bytes: int = 1 << 20,
        load_factor: float = 0.9,
        io_buffer_bytes: int = 256 << 10,
        io_buffer_bytes_max: int = 1 << 20,
        log_start_offset: int = 0,
        producer_id_expiration_ms: int = 86_400_000,
        timeout_s: float | None = None,
    ) -> CleanerPass:
        """Opens the directory with UnifiedLog and lets Kafka's cleaner make one pass, whether or not one is due.

        `checkpoint` is the cleaner's (none: the log start). The dedupe buffer and the size of each I/O buffer are those
        of one thread; I/O buffers grow up to `io_buffer_bytes_max`, the broker's message.max.bytes. With `roll` the
        active segment is closed first. Replaced files are gone when this returns.
        """
        answer = self.request(
            "clean",
            timeout_s,
            directory=str(directory),
            config=_settings(config),
            now_ms=now_ms,
            checkpoint=checkpoint,
            roll=roll,
            dedupe_buffer_bytes=dedupe_buffer_bytes,
            load_factor=load_factor,
            io_buffer_bytes=io_buffer_bytes,
            io_buffer_bytes_max=io_buffer_bytes_max,
            log_start_offset=log_start_offset,
            producer_id_expiration_ms=producer_id_expiration_ms,
        )
        ratio = float(answer["cleanable_ratio"])
        return CleanerPass(**{"stats": {}, **answer, "cleanable_ratio": ratio, "state": _state(answer["state"])})

    def cleanable(
        self,
        directory: Path,
        questions: Iterable[tuple[int, int | None, Config]],
        *,
        config: Config | None = None,
        roll: bool = False,
        log_start_offset: int = 0,
        hold_high_watermark: bool = False,
    ) -> list[Verdict]:
        """What Kafka's cleaner manager says of the log for each (now_ms, checkpoint, settings), in one opening of it.
        Settings stay from one question to the next."""
        answer = self.request(
            "cleanable",
            directory=str(directory),
            config=_settings(config),
            roll=roll,
            log_start_offset=log_start_offset,
            hold_high_watermark=hold_high_watermark,
            questions=[
                {"now_ms": now_ms, "checkpoint": checkpoint, "config": _settings(settings)}
                for now_ms, checkpoint, settings in questions
            ],
        )
        return [Verdict(**{**each, "cleanable_ratio": float(each["cleanable_ratio"])}) for each in answer["answers"]]

    # ------------------------------------------------------------------------------------------- timing

    def bench_append(
        self,
        directory: Path,
        source: Path,
        *,
        records: int | None = None,
        key_bytes: int = 10,
        value_bytes: int = 100,
        codec: str = "none",
        level: int | None = None,
        batch_bytes: int = 16 << 10,
        now_ms: int = 1_700_000_000_000,
        records_per_ms: int = 1000,
        repetitions: int = 1,
        flush: bool = False,
        config: Config | None = None,
        timeout_s: float = 600.0,
    ) -> dict[str, Any]:
        """Times Kafka's batch builder plus appendAsLeader, one thread. `source` has key and value of each record back
        to back, fixed width, no separators; it is read over and over until `records` are written, record i with the
        timestamp now_ms + i // records_per_ms. Every repetition starts an empty log; the last one stays.
        Answers seconds (a list), records, batches, log_bytes. Reading the source, opening and closing are not timed;
        nothing is fsynced in the timed part, unless `flush` asks for it at its end (what a roll would flush waits for
        the close)."""
        return self.request(
            "bench_append",
            timeout_s,
            directory=str(directory),
            input=str(source),
            records=records,
            key_bytes=key_bytes,
            value_bytes=value_bytes,
            codec=codec,
            level=level,
            batch_bytes=batch_bytes,
            now_ms=now_ms,
            records_per_ms=records_per_ms,
            repetitions=repetitions,
            flush=flush,
            config=_settings(config),
        )

    def bench_iterate(
        self, directory: Path, *, repetitions: int = 1, copy: bool = False, timeout_s: float = 600.0
    ) -> dict[str, Any]:
        """Times Kafka's iteration over every record of a directory, CRCs checked; keys and values are looked at in
        place, or with `copy` taken out as arrays, as its consumer does. Answers seconds (a list), records, bytes (of
        keys and values), log_bytes."""
        return self.request("bench_iterate", timeout_s, directory=str(directory), repetitions=repetitions, copy=copy)

    # ------------------------------------------------------------------------------------------- broker and clients

    def format_storage(self, properties: Path) -> None:
        """Formats the log directories of a server.properties as a cluster of one node."""
        self.request("format", properties=str(properties))

    def broker_answers(self, bootstrap: str, timeout_ms: int = 2000) -> bool:
        return bool(self.request("await_broker", bootstrap=bootstrap, timeout_ms=timeout_ms)["ready"])

    def create_topic(self, bootstrap: str, topic: str, partitions: int = 1, config: Config | None = None) -> str:
        """Returns the topic's id."""
        answer = self.request(
            "create_topic", bootstrap=bootstrap, topic=topic, partitions=partitions, topic_config=_settings(config)
        )
        return str(answer["topic_id"])

    def produce(
        self,
        bootstrap: str,
        topic: str,
        records: Iterable[Mapping[str, Any]] = (),
        *,
        partition: int = 0,
        transactions: Iterable[tuple[Iterable[Mapping[str, Any]], bool]] | None = None,
        transactional_id: str | None = None,
        idempotent: bool = True,
        codec: str = "none",
        config: Config | None = None,
    ) -> list[list[int]]:
        """Sends record()s with the stock producer; returns the offsets, one list a transaction (or one in all).
        With a transactional_id, `transactions` are pairs of records and whether to commit."""
        settings = {"enable.idempotence": idempotent, "compression.type": codec, **(config or {})}
        if transactional_id is not None:
            settings["transactional.id"] = transactional_id
        groups = [(records, True)] if transactions is None else list(transactions)
        answer = self.request(
            "produce",
            bootstrap=bootstrap,
            topic=topic,
            partition=partition,
            groups=[{"records": list(group), "abort": not commit} for group, commit in groups],
            config=_settings(settings),
        )
        offsets: list[list[int]] = answer["offsets"]
        return offsets

    def consume(
        self,
        bootstrap: str,
        topic: str,
        *,
        partition: int = 0,
        offset: int | None = None,
        committed: bool = False,
        await_end_offset: int = 0,
        timeout_s: float = 60.0,
        config: Config | None = None,
    ) -> list[KafkaRecord]:
        """What the stock consumer gets of one partition, from an offset (the beginning) to the end its isolation
        level shows; waits until that end has reached `await_end_offset`."""
        out = self.scratch_file()
        settings = {"isolation.level": "read_committed" if committed else "read_uncommitted", **(config or {})}
        self.request(
            "consume",
            timeout_s + 30,
            bootstrap=bootstrap,
            topic=topic,
            partition=partition,
            offset=offset,
            out=str(out),
            await_end_offset=await_end_offset,
            timeout_ms=int(timeout_s * 1000),
            config=_settings(settings),
        )
        with open(out, "rb") as lines:
            found = [_record(json.loads(line)) for line in lines]
        out.unlink()
        return found
