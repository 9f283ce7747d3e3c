"""The processes of the live mix: each plays one role on a store until it is killed.

A nursery imports and compiles everything once, and forks a child for each order it reads from standard input (JSON:
role, store, reports, seed, life). It answers with the child's pid, and tells when a child has ended. A child says what
it begins and what was acknowledged in its diary. What it finds wrong it says there as a `violation`; an error that may
happen to anybody (a lock is held too long) as `met`.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa

from crash.live import (
    EVENTS,
    LEFT,
    RETENTION_BYTES,
    RIGHT,
    STATE,
    STREAM,
    WRITERS,
    Diary,
    History,
    Progress,
    batch_of,
    state_mistakes,
    stream_rows,
)
from duramen import cli
from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committer
from logstore.commit.plan_folder import Staging
from logstore.commit.staging import EncodeOptions, StagedWriter
from logstore.errors import (
    AppendUnfinished,
    CommitConflict,
    CommitUnknown,
    DuramenError,
    LockHeld,
    TopicChanged,
)
from logstore.store import LogStore

#: what a busy store may answer; the same call is made again
RETRY = (LockHeld, CommitConflict, CommitUnknown, TopicChanged, AppendUnfinished)
RETRY_KINDS = {kind.__name__ for kind in RETRY}


class Role:
    """One child: where it works, and its diary."""

    def __init__(self, order: dict[str, Any]) -> None:
        self.name = str(order["role"])
        self.root = str(order["store"])
        self.reports = Path(order["reports"])
        self.seed = int(order["seed"])
        self.rng = random.Random(f"{self.seed}/{self.name}/{order['life']}")
        self.diary = Diary(self.reports, self.name)
        self.histories = {writer: History(self.seed, writer) for writer in WRITERS}
        self.progress = {writer: Progress(self.reports, writer) for writer in WRITERS}
        self.scratch = self.reports / f"{self.name}.scratch"

    # --- commands ------------------------------------------------------------------------------------------------

    def command(self, *arguments: str, store: str | None = None, may_fail: tuple[str, ...] = ()) -> Any:
        """The document a command printed; None when it met what a busy store may answer."""
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = cli.run(["--store", store or self.root, "--output", "json", *arguments])
        self.diary.say(ran=arguments[0], code=code)
        text = err.getvalue().strip().splitlines()
        if code != 0:
            kind = ""
            with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
                kind = json.loads(text[-1])["error"]["kind"]
            if kind in RETRY_KINDS or kind in may_fail:
                self.diary.say(met=kind, by=arguments[0], text=text[-1][:300])
                return None
            if code == 1 and not text and "not found" in may_fail:
                return json.loads(out.getvalue())
            self.violation(f"{' '.join(arguments)} ended with {code}: {err.getvalue()[-800:]} {out.getvalue()[-800:]}")
            return None
        return json.loads(out.getvalue())

    def violation(self, text: str) -> None:
        self.diary.say(violation=text, at=time.time())

    # --- writers -------------------------------------------------------------------------------------------------

    def writer(self) -> None:
        done = Progress(self.reports, self.name).look().acknowledged
        with LogStore(self.root) as store:
            number = done + 1
            while True:
                batch = batch_of(self.seed, self.name, number)
                table = pa.table(
                    {
                        "key": pa.array([key for key, _ in batch.rows], pa.binary()),
                        "value": pa.array([value for _, value in batch.rows], pa.binary()),
                    }
                )
                self.diary.say(begins=number)
                try:
                    committed = store.append(batch.topic, table, app=AppBatch(self.name, number, self.name))
                except RETRY as error:
                    self.diary.say(met=type(error).__name__, by="append", text=str(error)[:300])
                    continue
                self.diary.say(done=number, replayed=committed.replayed)
                number += 1
                time.sleep(self.rng.choice((0, 0, 0.02, 0.1)))

    def stream(self) -> None:
        """Two topics in one commit, each batch again until it is acknowledged, as a query from its checkpoint does."""
        done = Progress(self.reports, self.name).look().acknowledged
        with LogStore(self.root) as store:
            committer = Committer(store)
            number = done + 1
            while True:
                self.diary.say(begins=number)
                try:
                    self._commit_pair(committer, number)
                except RETRY as error:
                    self.diary.say(met=type(error).__name__, by="stream", text=str(error)[:300])
                    continue
                self.diary.say(done=number)
                number += 1
                if self.rng.random() < 0.3:
                    with contextlib.suppress(LockHeld):
                        committer.flush(store.topic(LEFT))
                time.sleep(self.rng.choice((0, 0.05, 0.2)))

    def _commit_pair(self, committer: Committer, number: int) -> None:
        app = AppBatch(STREAM, number, "query")
        if committer.check_replay(app):
            committer.finish_replay(app)
            return
        rows = stream_rows(self.seed, number)
        batch = pa.record_batch(
            {"key": pa.array([k for k, _ in rows], pa.binary()), "value": pa.array([v for _, v in rows], pa.binary())}
        )
        targets = [committer.target(name) for name in (LEFT, RIGHT)]
        staging = Staging(committer.store)
        try:
            writer = StagedWriter(staging.output(), options=EncodeOptions(), now_ms=committer.store.clock.now_ms())
            for target in targets:
                writer.write(target, batch)
            committer.commit(staging, [writer.finish()], {target.id: target for target in targets}, app=app)
        finally:
            staging.close()

    # --- upkeep --------------------------------------------------------------------------------------------------

    def daemon(self) -> None:
        intervals = {"compaction": 400, "retention": 900, "flush": 500, "ledger": 1500}
        given = [part for name, ms in intervals.items() for part in ("--interval", f"{name}={ms}")]
        code = cli.run(["--store", self.root, "schedule", "--metrics-port", "0", "--threads", "2", *given])
        self.violation(f"the daemon ended by itself with {code}")

    def operator(self) -> None:
        while True:
            act = self.rng.choice((self._compact, self._compact, self._retain, self._delete_records, self._alter))
            act()
            time.sleep(self.rng.uniform(0, 0.5))

    def _compact(self) -> None:
        more = ["--force"] if self.rng.random() < 0.5 else []
        more += ["--roll-active"] if self.rng.random() < 0.4 else []
        more += ["--dry-run"] if self.rng.random() < 0.15 else []
        done = self.command("compact", *more)
        for run in (done or {}).get("runs", ()):
            if run["result"] == "failed":
                self.violation(f"a compaction failed: {run['topic']}-{run['partition']}: {run['reason']}")

    def _retain(self) -> None:
        self.command("retain", *(["--dry-run"] if self.rng.random() < 0.2 else []))

    def _delete_records(self) -> None:
        with LogStore(self.root) as store:
            topic = store.topic(EVENTS)
            number = self.rng.randrange(topic.partitions)
            start = store.partition_state(topic, number).log_start_offset
            end = store.high_watermark(topic, number)
        before = self.rng.randint(start, start + (end - start) // 4)
        self.diary.say(deletes=[number, before])
        self.command("delete-records", EVENTS, "--partition", str(number), "--before-offset", str(before), "--yes")

    def _alter(self) -> None:
        retention = self.rng.choice(RETENTION_BYTES)
        size = self.rng.choice((15_000, 20_000, 40_000))
        self.command("topics", "alter", EVENTS, "--config", f"retention.bytes={retention}")
        self.command("topics", "alter", STATE, "--config", f"segment.bytes={size}")

    # --- readers -------------------------------------------------------------------------------------------------

    def _acknowledged(self) -> dict[str, int]:
        return {writer: progress.look().acknowledged for writer, progress in self.progress.items()}

    def _allowed(self, before: dict[str, int]) -> dict[bytes, set[bytes | None]]:
        found: dict[bytes, set[bytes | None]] = {}
        for writer, history in self.histories.items():
            found |= history.allowed(before[writer], self.progress[writer].look().begun)
        return found

    def reader(self) -> None:
        while True:
            act = self.rng.choice((self._get, self._get, self._restore, self._consume, self._explain))
            act()
            time.sleep(self.rng.uniform(0, 0.3))

    def _get(self) -> None:
        for _ in range(8):
            key = f"{self.rng.choice(WRITERS)}-{self.rng.randrange(40)}"
            before = self._acknowledged()
            found = self.command("get", STATE, key, may_fail=("not found",))
            if found is None:
                continue
            value = found["value"].encode() if found["found"] else None
            allowed = self._allowed(before)[key.encode()]
            if value not in allowed:
                self.violation(f"get {key} answered {value!r}, which is none of {allowed}")

    def _restore(self, store: str | None = None, before: dict[str, int] | None = None) -> None:
        before = before or self._acknowledged()
        out = f"{self.scratch}.restored"
        if self.command("restore", STATE, "--output-file", out, store=store) is None:
            return
        found = {}
        for line in Path(out).read_text().splitlines():
            row = json.loads(line)
            found[row["key"].encode()] = row["value"].encode()
        for mistake in state_mistakes(found, self._allowed(before)):
            self.violation(f"restore{' of a backup' if store else ''}: {mistake}")

    def _consume(self) -> None:
        """A topic that is not compacted has no gaps, and nothing twice."""
        from logstore.errors import OffsetOutOfRange

        with LogStore(self.root) as store:
            for name in (EVENTS, LEFT, RIGHT):
                topic = store.topic(name)
                for number in range(topic.partitions):
                    reader = store.reader(topic, number)
                    start, end = reader.log_start_offset(), store.high_watermark(topic, number)
                    try:
                        offsets = [record.offset for record in reader.records(start, end)]
                    except OffsetOutOfRange:
                        continue  # retention was faster
                    if offsets and offsets != list(range(offsets[0], end)):
                        self.violation(f"{name}-{number} was read with gaps: {offsets[0]} to {end}: {offsets}")

    def _explain(self) -> None:
        self.command(self.rng.choice(("explain", "plan", "describe", "offsets")))

    def keeper(self) -> None:
        """Verifies, and backs up; a backup is verified and restored as any store."""
        while True:
            self.command("verify")
            if self.rng.random() < 0.5:
                self._back_up()
            time.sleep(self.rng.uniform(0, 0.5))

    def _back_up(self) -> None:
        target = f"{self.scratch}.backup"
        shutil.rmtree(target, ignore_errors=True)
        before = self._acknowledged()
        more = ["--copy"] if self.rng.random() < 0.3 else []
        if self.command("backup", target, *more) is None:
            return
        self.command("verify", store=target)
        self._restore(target, before)
        kept = self.reports / "kept"
        if not kept.exists():
            os.rename(target, kept)
            self.diary.say(kept=before)


ROLES: dict[str, Callable[[Role], None]] = {
    **dict.fromkeys(WRITERS, Role.writer),
    STREAM: Role.stream,
    "daemon": Role.daemon,
    "operator": Role.operator,
    "reader": Role.reader,
    "keeper": Role.keeper,
}


# --- the nursery ----------------------------------------------------------------------------------------------------


def tell(**line: Any) -> None:
    os.write(1, json.dumps(line).encode() + b"\n")


def move_to(host: str) -> None:
    """As if this process ran on another machine that has the store mounted: one with a boot id of its own."""
    for module in list(sys.modules.values()):
        if module.__name__.startswith("logstore.") and hasattr(module, "boot_id"):
            module.boot_id = lambda: host


def play(order: dict[str, Any]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if order.get("host"):
        move_to(order["host"])
    role = Role(order)
    log = os.open(str(role.reports / f"{role.name}.err"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    null = os.open(os.devnull, os.O_RDWR)
    for number, onto in ((null, 0), (log, 1), (log, 2)):
        os.dup2(number, onto)
    try:
        ROLES[role.name](role)
    except DuramenError as error:
        if isinstance(error, RETRY):
            role.diary.say(met=type(error).__name__, by=role.name, text=str(error)[:300])
        else:
            role.violation(traceback.format_exc()[-3000:])
    except BaseException:
        role.violation(traceback.format_exc()[-3000:])


def warm_up() -> None:
    """Load what every child would load; in a child, because the ledger's library starts threads that no fork brings."""
    import logstore.compaction.passes
    import logstore.restore.restore
    import logstore.upkeep.backup
    import logstore.upkeep.verify  # noqa: F401
    from logstore.records.native import kernels

    kernels()
    pid = os.fork()
    if pid == 0:
        with tempfile.TemporaryDirectory() as root, LogStore(os.path.join(root, "s"), create=True) as store:
            store.create_topic("t")
            store.append("t", pa.table({"key": [b"a"], "value": [b"b"]}))
        os._exit(0)
    os.waitpid(pid, 0)


def main() -> None:
    warm_up()
    tell(ready=True)
    heard = b""
    while True:
        if select.select([0], [], [], 0.05)[0]:
            data = os.read(0, 1 << 16)
            if not data:
                return
            heard += data
        while b"\n" in heard:
            line, _, heard = heard.partition(b"\n")
            pid = os.fork()
            if pid == 0:
                try:
                    play(json.loads(line))
                finally:
                    os._exit(0)
            tell(pid=pid, role=json.loads(line)["role"])
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                tell(ended=ended[0], status=ended[1])


if __name__ == "__main__":
    main()
