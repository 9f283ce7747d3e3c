"""The power goes at each step of a commit, ledger included: nothing committed is lost, nothing is there twice.

Two apps write two topics; one batch in two has rows for both. `PoweredFiles` (the ledger's tests) knows what was synced
and draws what a cut leaves, while the writer goes on as if nothing had been: one run is cut many times. Whoever comes
after a cut may be cut itself while it settles.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pyarrow as pa

from logstore.clock import ManualClock
from logstore.commit.apps import AppBatch
from logstore.commit.committer import Committer
from logstore.commit.plan_folder import Staging
from logstore.commit.staging import EncodeOptions, StagedWriter
from logstore.records.record import Record
from logstore.store import LogStore

ReadAll = Callable[[LogStore, str], dict[int, list[Record]]]
SOAK = os.environ.get("DURAMEN_SOAK") == "1"
NOW_MS = 1_700_000_000_000
#: app → the topics of its batches
APPS = {"both": ("orders", "payments"), "one": ("payments",)}
PARTITIONS = 2
BATCHES = 5
ROWS = 40

#: every file operation of the path belongs to a step of docs/protocols.md, "Exactly-once append"
STEPS = {
    "stage": r"staging/[^/]+-plan(/[^/]+\.batches|/owner)?",
    "place": r"state|logs",
    "lease": r"locks/lease-.*",
    "plan": r"staging(/[^/]+-plan/plan(\.tmp)?)?",
    "commit": r"ledger/commits(/.*)?",
    "append": r"logs/(orders|payments)-\d(/.*)?|locks/partition(s|-.*)",
    "segment list": r"state/[^/]+/\d(\.tmp)?",
    "tail": r"state/[^/]+/tails",
    "publish and flush": r"state/[^/]+(/ends(\.tmp)?)?|locks/ends-.*",
    "sweep": r"staging/[^/]+-delete(/.*)?",
}


def load_ledger_files() -> ModuleType:
    """The files with a power switch, which the ledger's tests have."""
    path = Path(__file__).parents[1] / "ledger" / "conftest.py"
    spec = importlib.util.spec_from_file_location("ledger_files", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def value(app: str, batch: int, row: int) -> bytes:
    return b"%s %d %d" % (app.encode(), batch, row)


def write(committer: Committer, app: str, batch: int) -> bool:
    """One batch of an app, as the sink does it. False when it was there already."""
    named = AppBatch(app, batch, f"query of {app}")
    if committer.check_replay(named):
        committer.finish_replay(named)
        return False
    targets = [committer.target(name) for name in APPS[app]]
    staging = Staging(committer.store)
    try:
        writer = StagedWriter(staging.output(), options=EncodeOptions(batch_size=250), now_ms=NOW_MS + batch)
        rows = pa.record_batch(
            {
                "key": pa.array([b"k%d" % (row % 9) for row in range(ROWS)]),
                "value": pa.array([value(app, batch, row) for row in range(ROWS)]),
            }
        )
        for target in targets:
            writer.write(target, rows)
        done = committer.commit(staging, [writer.finish()], {target.id: target for target in targets}, app=named)
    finally:
        staging.close()
    assert not done.replayed
    return True


def check_rows(store: LogStore, read_all: ReadAll, batches: dict[str, int]) -> None:
    """All rows of so many batches of each app are there, once and in order by key, and no others."""
    for topic in ("orders", "payments"):
        found = read_all(store, topic)
        wanted = Counter(
            value(app, batch, row)
            for app, topics in APPS.items()
            if topic in topics
            for batch in range(batches[app])
            for row in range(ROWS)
        )
        assert Counter(record.value for records in found.values() for record in records) == wanted
        for records in found.values():
            assert [record.offset for record in records] == list(range(len(records)))
            for app in APPS:
                for key in {record.key for record in records}:
                    mine = [
                        tuple(map(int, record.value.split()[1:]))
                        for record in records
                        if record.key == key and record.value and record.value.startswith(app.encode())
                    ]
                    assert mine == sorted(mine)


class Cuts:
    """Cuts the power at chosen operations of one run, and lets somebody come after each."""

    def __init__(self, root: Path, boot: Callable[[], None], read_all: ReadAll, seed: int) -> None:
        self.module = load_ledger_files()
        self.files = self.module.PoweredFiles()
        self.rng = random.Random(seed)
        self.root = root
        self.source = root / "store"
        self.boot = boot
        self.read_all = read_all
        self.acknowledged = dict.fromkeys(APPS, 0)
        self.seen: Counter[str] = Counter()
        self.cuts: Counter[str] = Counter()
        self.chance = 1.0 if SOAK else 0.01
        self.deadline = time.monotonic() + (10**9 if SOAK else 75)
        #: how often each sort of operation is certainly cut: the first of its kind, and then by chance
        self.certain = 1
        self._one_at_a_time = threading.RLock()
        self._depth = 0

    def sort_of(self, kind: str, path: str, root: Path) -> tuple[str, str]:
        """The step the operation belongs to, and what it is there."""
        place = os.path.relpath(path, root)
        step = next((name for name, pattern in STEPS.items() if re.fullmatch(pattern, place)), "other")
        return step, f"{kind} {re.sub(r'[0-9a-f-]{20,}|[A-Za-z0-9_-]{22}|[0-9]+', '#', place)}"

    def on_step(self, kind: str, path: str) -> None:
        with self._one_at_a_time:  # a flush syncs in several threads
            step, sort = self.sort_of(kind, path, self.source)
            self.seen[sort] += 1
            certain = self.seen[sort] <= self.certain
            if not certain and (self.rng.random() > self.chance or time.monotonic() > self.deadline):
                return
            self.cuts[step] += 1
            if step == "other":
                print(f"not known as a step: {sort}")
            left = self.root / "left"
            self.files.leave(str(self.source), str(left), self.rng)
            again = self.rng.random() < (0.5 if SOAK else 0.15)
            try:
                (self.cut_again if again else self.come_after)(left)
            except BaseException:
                print(f"cut number {self.cuts.total()} before {sort}" + (", and again" if again else ""))
                raise
            shutil.rmtree(left)

    def cut_again(self, left: Path) -> None:
        """Who settles is cut, too, at a random operation of its own."""
        files = self.module.PoweredFiles()
        for folder, _, names in os.walk(left):
            for name in names:
                file = files.open(os.path.join(folder, name))
                file.fsync()
                file.close()
            files.fsync_dir(folder)
        to_go = self.rng.randrange(80)
        last = self.root / "left again"

        def maybe_cut(kind: str, path: str) -> None:
            nonlocal to_go
            to_go -= 1
            if to_go == 0:
                files.leave(str(left), str(last), self.rng)

        self.boot()
        files.on_step = maybe_cut
        with LogStore(left, lock_wait_ms=2000, fs=files) as store:
            survivor = Committer(store)
            for name in ("orders", "payments"):
                survivor.settle_topic(store.topic(name))
                if self.rng.random() < 0.5:
                    survivor.flush(store.topic(name))
        files.on_step = lambda kind, path: None
        if not last.exists():
            files.leave(str(left), str(last), self.rng)
        files.close()
        try:
            self.come_after(last)
        finally:
            shutil.rmtree(last)

    def come_after(self, left: Path) -> None:
        """The next holder: settles, replays, goes on, flushes, sweeps. The oracle is what the ledger says is in it."""
        self.boot()
        # Days later: a folder that lost its owner file is left alone while it is young.
        later = ManualClock(time.time_ns() // 1_000_000 + 7 * 86_400_000)
        with LogStore(left, lock_wait_ms=2000, clock=later) as store:
            survivor = Committer(store)
            committed = {}
            for app, acknowledged in self.acknowledged.items():
                last = survivor.ledger.last_batch(app)
                committed[app] = 0 if last is None else last.batch_id + 1
                assert acknowledged <= committed[app] <= acknowledged + 1, app
            assert sum(committed.values()) <= sum(self.acknowledged.values()) + 1
            for name in ("orders", "payments"):
                survivor.settle_topic(store.topic(name))
            check_rows(store, self.read_all, committed)
            for app, batches in committed.items():
                for batch in range(max(batches - 1, 0), batches + 1):
                    assert write(survivor, app, batch) == (batch == batches)
            check_rows(store, self.read_all, {app: batches + 1 for app, batches in committed.items()})
            for name in ("orders", "payments"):
                survivor.flush(store.topic(name))
            survivor.sweep()
            assert [name for name in os.listdir(store.layout.staging) if name.endswith("-plan")] == []

    def run(self) -> None:
        self.files.fsync_dir(str(self.root))
        with LogStore(self.source, create=True, fs=self.files) as store:
            for name in ("orders", "payments"):
                store.create_topic(
                    name, partitions=PARTITIONS, configs={"segment.bytes": 900, "index.interval.bytes": 200}
                )
            committer = Committer(store)
            self.files.on_step = self.on_step
            for batch in range(BATCHES):
                for app in APPS:
                    write(committer, app, batch)
                    self.acknowledged[app] += 1
                    if self.rng.random() < 0.3:
                        committer.flush(store.topic(self.rng.choice(("orders", "payments"))))
                if batch == 1:  # staged files that no commit names, for the sweep
                    abandoned = Staging(store)
                    StagedWriter(abandoned.output(), options=EncodeOptions(), now_ms=NOW_MS).finish()
                    abandoned.decided = True
                    abandoned.close()
                    assert committer.sweep() == [abandoned.plan_id]
            for name in ("orders", "payments"):
                committer.flush(store.topic(name))
            assert os.listdir(store.layout.staging) == []
        self.files.close()


def test_a_power_cut_at_each_step_loses_and_doubles_nothing(
    tmp_path: Path, boot: Callable[[], None], read_all: ReadAll, seed: int
) -> None:
    cuts = Cuts(tmp_path, boot, read_all, seed)
    cuts.run()
    print(f"{cuts.cuts.total()} cuts: {dict(cuts.cuts)}")
    assert set(cuts.cuts) >= set(STEPS), "every step was cut"
    assert cuts.cuts["other"] < 5, "a step that is not told from the others"
