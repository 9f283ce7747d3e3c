"""Everything at once on one store, with processes killed and stopped at random, and an oracle of what was acknowledged.

Two writers, a stream that is killed and started again, the daemon, an operator (compact, retain, delete-records,
alter), a reader (get, restore, consume, explain) and a keeper (verify, backup). `DURAMEN_LIVE_SECONDS` says how long;
`make soak SUITES=live` runs it for half an hour. From two minutes on a real Spark query takes part too, and Kafka's
dump tool judges the export. The seed decides what is written and who is hit; the scheduler of the machine decides when.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from crash.live import (
    EVENTS,
    LEFT,
    ORDERS,
    RETENTION_BYTES,
    RIGHT,
    STATE,
    STREAM,
    TOPICS,
    WRITERS,
    History,
    Progress,
    batch_of,
    lines_of,
    state_mistakes,
    stream_rows,
)
from duramen import cli
from logstore.clock import SYSTEM_CLOCK, ManualClock
from logstore.commit.committer import Committer
from logstore.records.record import Record
from logstore.store import LogStore

ROOT = Path(__file__).resolve().parents[2]
SECONDS = float(os.environ.get("DURAMEN_LIVE_SECONDS", "15"))
LONG = SECONDS >= 120
_BACKLOG_MAX = 20
ROLES = (*WRITERS, STREAM, "daemon", "operator", "reader", "keeper")


class Nursery:
    """The script `live_worker.py` and its children by role."""

    def __init__(self, store: Path, reports: Path, seed: int) -> None:
        self._order = {"store": str(store), "reports": str(reports), "seed": seed}
        self._rng = random.Random(f"{seed}/hosts")
        self._lives: Counter[str] = Counter()
        self._heard = b""
        self.pids: dict[str, int] = {}
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "crash" / "live_worker.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'tests'}"},
        )
        assert self._next(300).get("ready")

    def _next(self, wait_s: float) -> dict[str, Any]:
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        until = time.monotonic() + wait_s
        while b"\n" not in self._heard:
            left = until - time.monotonic()
            if left <= 0 or not select.select([descriptor], [], [], left)[0]:
                return {}
            data = os.read(descriptor, 1 << 16)
            assert data, "the nursery is gone"
            self._heard += data
        line, _, self._heard = self._heard.partition(b"\n")
        return dict(json.loads(line))

    def listen(self, wait_s: float) -> None:
        """Note who has begun and who has ended within that time."""
        until = time.monotonic() + wait_s
        while (left := until - time.monotonic()) > 0:
            line = self._next(left)
            if "pid" in line:
                self.pids[line["role"]] = line["pid"]
            elif "ended" in line:
                for role, pid in list(self.pids.items()):
                    if pid == line["ended"]:
                        del self.pids[role]

    def start(self, role: str) -> None:
        assert self._process.stdin is not None
        self._lives[role] += 1
        # Each life is on one of two machines that share the store, each with a boot id of its own.
        host = self._rng.choice((None, "another-host"))
        order = self._order | {"role": role, "life": self._lives[role], "host": host}
        self._process.stdin.write(json.dumps(order).encode() + b"\n")
        self._process.stdin.flush()
        self.pids[role] = 0

    def start_missing(self) -> None:
        for role in ROLES:
            if role not in self.pids:
                self.start(role)

    def signal(self, role: str, number: int) -> None:
        if self.pids.get(role):
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[role], number)

    @property
    def lives(self) -> int:
        return sum(self._lives.values())

    def close(self) -> None:
        if self._process.poll() is not None:
            return
        self.listen(0.5)
        for role in ROLES:
            self.signal(role, signal.SIGKILL)
            self.signal(role, signal.SIGCONT)
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._process.wait(30)


class SparkStream:
    """A real query through `LogSink`, fed by files, killed and started again."""

    def __init__(self, root: Path, store: Path, rng: random.Random) -> None:
        self.root, self.store, self.rng = root, store, rng
        self.folder = root / "spark-in"
        self.folder.mkdir()
        self.values: list[bytes] = []
        self.files = self.lives = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._until = 0.0
        self._committed = 0

    def add(self) -> None:
        values = [f"spark/{self.files}/{at}" for at in range(self.rng.randrange(1, 200))]
        draft = self.folder / f".{self.files}"
        draft.write_text("\n".join(json.dumps({"key": f"k{self.rng.randrange(9)}", "value": each}) for each in values))
        draft.rename(self.folder / f"{self.files:06d}.json")
        self.values += [each.encode() for each in values]
        self.files += 1

    def tick(self) -> None:
        now = time.monotonic()
        if self.rng.random() < 0.2 and self.files - self.committed() < _BACKLOG_MAX:
            self.add()
        if self.committed() > self._committed:  # it is at work: from now on its time is limited
            self._until = min(self._until, now + self.rng.uniform(0, 20))
        if self._process is not None and now > self._until:
            self.kill()
        if self._process is None or self._process.poll() is not None:
            assert self._process is None or self._process.returncode == 0, self.said()
            self._committed = self.committed()
            self.start()
            # Some die while they start; on a busy machine that takes minutes, and the others must get there.
            self._until = now + (self.rng.uniform(1, 20) if self.rng.random() < 0.2 else 600)

    def start(self) -> None:
        told = {"store": str(self.store), "source": str(self.folder), "checkpoint": str(self.root / "spark-checkpoint")}
        self.lives += 1
        with open(self.root / "spark.log", "ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(ROOT / "tests" / "streaming" / "driver.py"), json.dumps(told)],
                cwd=ROOT,
                env=os.environ | {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable},
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def kill(self) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(30)
            self._process = None

    def finish(self) -> None:
        """All that was given is written: the last run reads to the end."""
        self.kill()
        self.start()
        assert self._process is not None
        assert self._process.wait(900) == 0, self.said()
        assert self.committed() == self.files

    def committed(self) -> int:
        """Files of the batches that Spark has noted as done. A batch has several after a kill between its notes."""
        folder = self.root / "spark-checkpoint"
        done = [int(path.name) for path in (folder / "commits").glob("*") if path.name.isdigit()]
        if not done:
            return 0
        *_, end = (folder / "offsets" / str(max(done))).read_text().splitlines()
        return int(json.loads(end)["logOffset"]) + 1

    def said(self) -> str:
        return (self.root / "spark.log").read_text(errors="replace")[-5000:]


def command(store: Path | str, *arguments: str) -> tuple[int, Any, str]:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.run(["--store", str(store), "--output", "json", *arguments])
    return code, json.loads(out.getvalue()) if out.getvalue() else None, err.getvalue()


def hit(nursery: Nursery, rng: random.Random, stopped: dict[str, float], hits: Counter[str]) -> None:
    """Kill a role or stop it for a while; whoever was stopped long enough goes on."""
    now = time.monotonic()
    for role, until in list(stopped.items()):
        if now >= until:
            del stopped[role]
            nursery.signal(role, signal.SIGCONT)
    role = rng.choice(ROLES)
    if rng.random() < 0.6:
        nursery.signal(role, signal.SIGKILL)
        stopped.pop(role, None)
        hits["killed"] += 1
    elif role not in stopped:
        nursery.signal(role, signal.SIGSTOP)
        # Now and then for longer than anybody waits for a lock.
        stopped[role] = now + (40 if LONG and rng.random() < 0.02 else rng.uniform(0.05, 2))
        hits["stopped"] += 1


@pytest.mark.timeout(SECONDS * 2 + 900)
def test_the_live_mix_has_no_violation(tmp_path: Path, seed: int, request: pytest.FixtureRequest) -> None:
    print(f"seed {seed}, {SECONDS:.0f} s")
    rng = random.Random(seed)
    root, reports = tmp_path / "store", tmp_path / "reports"
    reports.mkdir()
    with LogStore(root, create=True) as store:
        for name, (partitions, configs) in TOPICS.items():
            store.create_topic(name, partitions=partitions, configs=configs)
    spark = SparkStream(tmp_path, root, rng) if LONG else None
    nursery = Nursery(root, reports, seed)
    stopped: dict[str, float] = {}
    hits: Counter[str] = Counter()
    try:
        until = time.monotonic() + SECONDS
        while time.monotonic() < until and not _violations(reports):
            nursery.start_missing()
            nursery.listen(rng.uniform(0.05, 1.2))
            hit(nursery, rng, stopped, hits)
            if spark is not None:
                spark.tick()
        nursery.close()
        assert not _violations(reports), "\n".join(_violations(reports))
        if spark is not None:
            spark.finish()
    finally:
        nursery.close()
        if spark is not None:
            spark.kill()
    print(_summary(reports, hits, nursery.lives, spark))
    judge(root, reports, seed, spark)
    if LONG:
        judge_export(root, tmp_path / "export", request)


def _violations(reports: Path) -> list[str]:
    return [f"{role}: {line['violation']}" for role in ROLES for line in lines_of(reports, role) if "violation" in line]


def _summary(reports: Path, hits: Counter[str], lives: int, spark: SparkStream | None) -> str:
    ran: Counter[str] = Counter()
    met: Counter[str] = Counter()
    for role in ROLES:
        for line in lines_of(reports, role):
            ran[line.get("ran", "")] += "ran" in line
            met[f"{line.get('met')} by {line.get('by')}"] += "met" in line
    batches = {role: Progress(reports, role).look().acknowledged + 1 for role in (*WRITERS, STREAM)}
    more = f"; Spark: {spark.files} files, {len(spark.values)} rows, {spark.lives} lives" if spark else ""
    return f"{dict(hits)}, {lives} lives; batches {batches}{more}; commands {dict(+ran)}; met {dict(+met)}"


# --- the oracle at the end ------------------------------------------------------------------------------------------


def judge(root: Path, reports: Path, seed: int, spark: SparkStream | None) -> None:
    with LogStore(root) as store:
        committer = Committer(store)
        for topic in store.topics():
            committer.settle_topic(topic)
            committer.flush(topic)
        _judge_state(store, reports, seed)
        _judge_events(store, reports, seed)
        _judge_stream(store, reports, seed)
        if spark is not None:
            values = [record.value for record in _records(store, ORDERS)]
            assert Counter(values) == Counter(spark.values)
    code, verified, err = command(root, "verify")
    assert code == 0, (verified, err)
    code, done, err = command(root, "compact", "--force", "--roll-active")
    assert code == 0, (done, err)
    with LogStore(root) as store:
        _judge_state(store, reports, seed)
    assert command(root, "verify")[0] == 0
    _judge_kept(reports, seed)
    _judge_strays(root)


def _records(store: LogStore, name: str) -> list[Record]:
    topic = store.topic(name)
    found: list[Record] = []
    for number in range(topic.partitions):
        reader = store.reader(topic, number)
        records = list(reader.records(reader.log_start_offset(), store.high_watermark(topic, number)))
        offsets = [record.offset for record in records]
        assert offsets == list(
            range(store.high_watermark(topic, number) - len(records), store.high_watermark(topic, number))
        )
        assert not offsets or offsets[0] == reader.log_start_offset()
        found += records
    return found


def _committed(store: LogStore, app_id: str, progress: Progress) -> int:
    """The last batch that is in the ledger: at least the last acknowledged, at most the last begun."""
    last = Committer(store).ledger.last_batch(app_id)
    number = -1 if last is None else last.batch_id
    assert progress.acknowledged <= number <= progress.begun
    return number


def _judge_state(store: LogStore, reports: Path, seed: int) -> None:
    from logstore.restore.restore import plan_restore, restore

    found: dict[bytes, bytes] = {}
    for batch in restore(store, plan_restore(store, STATE)):
        found.update(zip(batch.column("key").to_pylist(), batch.column("value").to_pylist(), strict=True))
    allowed: dict[bytes, set[bytes | None]] = {}
    for writer in WRITERS:
        last = _committed(store, writer, Progress(reports, writer).look())
        allowed |= History(seed, writer).allowed(last, last)
    assert state_mistakes(found, allowed) == []


def _judge_events(store: LogStore, reports: Path, seed: int) -> None:
    """At and above the log start everything is there, once; the log start was asked for, or retention had reason."""
    topic = store.topic(EVENTS)
    found: Counter[bytes] = Counter(record.value or b"" for record in _records(store, EVENTS))
    assert all(count == 1 for count in found.values())
    written: dict[int, list[bytes]] = {number: [] for number in range(topic.partitions)}
    from logstore.records.partitioner import partition_for_key

    for writer in WRITERS:
        for number in range(_committed(store, writer, Progress(reports, writer).look()) + 1):
            batch = batch_of(seed, writer, number)
            if batch.topic == EVENTS:
                for key, value in batch.rows:
                    written[partition_for_key(key, topic.partitions)].append(value or b"")
    asked = dict.fromkeys(written, 0)
    for line in lines_of(reports, "operator"):
        if "deletes" in line:
            number, before = line["deletes"]
            asked[number] = max(asked[number], before)
    for number, values in written.items():
        end = store.high_watermark(topic, number)
        start = store.partition_state(topic, number).log_start_offset
        assert end == len(values)  # every row of every committed batch has its offset, and nothing else has one
        assert sum(value in found for value in values) == end - start
        if start > asked[number]:
            assert store.log_bytes(topic, number) >= min(RETENTION_BYTES)


def _judge_stream(store: LogStore, reports: Path, seed: int) -> None:
    last = _committed(store, STREAM, Progress(reports, STREAM).look())
    written = Counter(value for number in range(last + 1) for _, value in stream_rows(seed, number))
    for name in (LEFT, RIGHT):
        assert Counter(record.value for record in _records(store, name)) == written


def _judge_kept(reports: Path, seed: int) -> None:
    """A backup taken early is still what it was: nothing that happened to the store since reached it."""
    kept = reports / "kept"
    before = [line["kept"] for line in lines_of(reports, "keeper") if "kept" in line]
    if not before:
        return
    code, found, err = command(kept, "verify")
    assert code == 0, (found, err)
    with LogStore(kept) as store:
        for writer in WRITERS:
            last = Committer(store).ledger.last_batch(writer)
            assert (-1 if last is None else last.batch_id) >= before[0][writer]
        _records(store, LEFT)
        _records(store, EVENTS)
    with LogStore(kept) as store:
        store.append(LEFT, [Record(b"k", b"the copy is a store of its own")])


def _judge_strays(root: Path) -> None:
    """Two days later, after one round of upkeep: nothing is left that a crashed process made."""
    later = ManualClock(SYSTEM_CLOCK.now_ms() + 2 * 86_400_000)
    with LogStore(root, clock=later) as store:
        committer = Committer(store)
        for topic in store.topics():
            committer.flush(topic)
        committer.sweep()
        store.sweep()
        for topic in store.topics():
            for number in range(topic.partitions):
                store.sweep_deleted(topic, number, now_ms=later.now_ms())
        assert os.listdir(store.layout.staging) == []
        assert sorted(os.listdir(store.layout.topics)) == sorted(f"{name}.t" for name in TOPICS)
        assert sorted(os.listdir(store.layout.state)) == sorted(topic.id for topic in store.topics())
        for topic in store.topics():
            for number in range(topic.partitions):
                named = {f"{each.base_offset:020d}" for each in store.partition_state(topic, number).segments}
                for name in os.listdir(store.layout.partition(topic.partition(number))):
                    stem, _, kind = name.partition(".")
                    if kind in ("log", "index", "timeindex", "txnindex"):
                        assert stem in named, name
                    assert not name.endswith((".deleted", ".cleaned", ".swap", ".tmp")), name


def judge_export(root: Path, target: Path, request: pytest.FixtureRequest) -> None:
    """Kafka's dump tool finds nothing wrong."""
    from conformance.kafka import Kafka

    code, _, err = command(root, "export", str(target))
    assert code == 0, err
    with Kafka() as kafka:
        for directory in sorted(target.iterdir()):
            if directory.is_dir():
                compacted = directory.name.rpartition("-")[0] == STATE
                assert kafka.dump_findings(directory, compacted=compacted) == [], directory.name
