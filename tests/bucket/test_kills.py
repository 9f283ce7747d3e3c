"""Writers, maintainers and readers of a store on a real server, killed at random; then everything is counted.

`DURAMEN_SOAK=1` makes it ten minutes. The seed decides who is killed and when.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
import uuid
from dataclasses import replace
from pathlib import Path

import pytest

from bucket.kills_worker import PARTITIONS, RULES, noted, records_of
from bucket.servers import ROOT, Server, chosen
from logstore.bucket.maintaining import maintain
from logstore.bucket.sealing import SealRules
from logstore.bucket.store import BucketStore
from logstore.bucket.verifying import verify_partition

SOAK = bool(os.environ.get("DURAMEN_SOAK"))
SECONDS = 600 if SOAK else 12
ROLES = [("writer", 0), ("writer", 1), ("maintainer", 0), ("daemon", 0), ("reader", 0)]
#: of the daemon's jobs, far more often than anybody needs
INTERVALS = [f"--interval={job}=500" for job in ("seal", "compaction", "retention", "sweep")]
COMPACTED = {"cleanup.policy": "compact", "segment.bytes": "3000", "delete.retention.ms": "0"}


class Killing:
    def __init__(self, server: Server, folder: Path, rng: random.Random) -> None:
        self.rng = rng
        self.folder = folder
        self.told = {"url": server.url(uuid.uuid4().hex), "options": server.options, "folder": str(folder)}
        self.running: dict[tuple[str, int], subprocess.Popen[bytes]] = {}
        self.environment = server.environment
        self.kills = 0
        store = self.store(create=True)
        store.create_topic("log", partitions=PARTITIONS, configs={"segment.bytes": "3000"})
        store.create_topic("state", partitions=PARTITIONS, configs=COMPACTED)

    def store(self, *, create: bool = False) -> BucketStore:
        return BucketStore(str(self.told["url"]), create=create, storage_options=self.told["options"])  # type: ignore[arg-type]

    def begin(self, role: str, number: int) -> None:
        told = json.dumps(self.told | {"role": role, "number": number})
        command = ["bucket.kills_worker", told]
        if role == "daemon":
            command = ["duramen", "--store", str(self.told["url"]), "schedule", "--metrics-port=0", *INTERVALS]
        env = os.environ | self.environment | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        with (self.folder / f"{role}-{number}.log").open("ab") as log:
            self.running[role, number] = subprocess.Popen(
                [sys.executable, "-m", *command], cwd=ROOT, env=env, stdout=log, stderr=log
            )

    def end(self, who: tuple[str, int]) -> None:
        process = self.running.pop(who)
        code = process.poll()
        log = (self.folder / f"{who[0]}-{who[1]}.log").read_text()[-3000:]
        process.kill()
        process.wait()
        assert code is None, f"{who} ended by itself with {code}: {log}"

    def run(self) -> None:
        ends = time.monotonic() + SECONDS
        try:
            for who in ROLES:
                self.begin(*who)
            while time.monotonic() < ends or not any(noted(self.folder / f"done-{n}") for n in range(2)):
                assert time.monotonic() < ends + 100, "nobody writes"
                time.sleep(self.rng.uniform(0.2, 2.5))
                who = self.rng.choice(ROLES)
                self.end(who)
                self.kills += 1
                self.begin(*who)
        finally:
            for who in list(self.running):
                self.end(who)

    def check(self) -> tuple[int, int]:
        """Returns how many batches were acknowledged, and how many are there."""
        assert [path.read_text() for path in self.folder.glob("failed-*")] == []
        store = self.store()
        rules = replace(RULES, seal=SealRules(force=True), folder=str(self.folder))
        for _ in range(2):
            done = maintain(store, rules)
            assert not done.failed, done.failed
        log, state = [], {}
        for number in range(PARTITIONS):
            log += [record.value for record in store.reader("log", number).records(0)]
            reader = store.reader("state", number)
            for record in reader.records(reader.log_start_offset()):
                assert record.key not in state, "compaction left two"
                state[record.key] = record.value
        acknowledged, there = 0, 0
        wanted_log, wanted_state = [], {}
        for writer in range(2):
            known = noted(self.folder / f"done-{writer}")
            assert known == list(range(len(known)))
            acknowledged += len(known)
            for topic in ("log", "state"):
                progress = store.ledger.view.app(f"{topic}-{writer}")
                through = -1 if progress is None else progress.batch_id
                assert through in (len(known) - 1, len(known))  # the last one may be there without its note
                there += through + 1
                for batch in range(through + 1):
                    for record in records_of(writer, batch):
                        if topic == "log":
                            wanted_log.append(record.value)
                        else:
                            wanted_state[record.key] = record.value
        assert sorted(v for v in log if v) == sorted(v for v in wanted_log if v)
        assert state == wanted_state
        for topic in store.topics():
            for number in range(PARTITIONS):
                assert verify_partition(store, store.source(topic, number)).findings == ()
        return acknowledged, there


@pytest.mark.timeout(0 if SOAK else 400)
@pytest.mark.parametrize("server", chosen("ministack", *(["versitygw"] if SOAK else [])))
def test_nothing_is_lost_or_doubled_by_kills(
    server: str, tmp_path: Path, seed: int, request: pytest.FixtureRequest
) -> None:
    killing = Killing(request.getfixturevalue(server), tmp_path, random.Random(seed))
    killing.run()
    acknowledged, there = killing.check()
    print(f"seed {seed}, {server}: {killing.kills} kills, {acknowledged} batches acknowledged, {there} commits there")
    assert killing.kills
    assert acknowledged
