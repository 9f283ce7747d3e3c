"""Every command under a tight address space: the right answer or a typed error, and nothing broken after.

A process imports everything, makes a store, and forks a child for each command and limit; so the limit hits the work.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SOAK = os.environ.get("DURAMEN_SOAK") == "1"

SCRIPT = r"""
import json, os, random, resource, shutil, signal, sys
from duramen import cli
import compaction_job.job, compaction_job.scheduler
import logstore.upkeep.backup, logstore.transfer.kafka_export, logstore.restore.lookup, logstore.restore.restore
import logstore.upkeep.verify
from logstore.records.native import kernels
from logstore.records.record import Record
from logstore.store import LogStore
from logstore.transfer.kafka_export import export_topics

kernels()
folder, seed, rounds = sys.argv[1], sys.argv[2], int(sys.argv[3])
rng = random.Random(seed)
root, rows = os.path.join(folder, "store"), os.path.join(folder, "rows")
err, out = os.path.join(folder, "err"), os.path.join(folder, "out")


def forked(work, limit_bytes=None):
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            os.dup2(os.open(err, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 2)
            os.dup2(os.open(out, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), 1)
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            if limit_bytes is not None:
                resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
            signal.alarm(120)
            code = work() or 0
            sys.stdout.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def make():
    with LogStore(root, create=True) as store:
        store.create_topic("t", configs={"cleanup.policy": "compact", "segment.bytes": 100_000})
        for _ in range(3):
            store.append("t", [Record(b"k%d" % (n % 100), os.urandom(400)) for n in range(400)])


def make_broker():
    with LogStore(os.path.join(folder, "other"), create=True) as store:
        store.create_topic("foreign")
        store.append("foreign", [Record(b"k%d" % n, os.urandom(400)) for n in range(400)])
        export_topics(store, os.path.join(folder, "broker"), store.topics())


assert forked(make) == 0, open(err).read()
assert forked(make_broker) == 0, open(err).read()
with open(rows, "w") as file:
    for n in range(500):
        file.write(json.dumps({"key": f"p{n}", "value": "v" * 300}) + "\n")
COMMANDS = {
    "produce": [rows], "verify": [], "compact": ["--force", "--roll-active"], "get": ["azE=", "--encoding", "base64"],
    "restore": ["--encoding", "base64"], "consume": ["--encoding", "base64"], "explain": [], "plan": [],
    "retain": [], "describe": [], "recover": [], "backup": [folder + "/backup"], "export": [folder + "/export"],
    "offsets": [], "schedule": ["--once"], "dump": [os.path.join(root, "logs", "t-0")], "prove-erased": ["nobody"],
    "delete-records": ["--partition", "0", "--before-offset", "7", "--yes"], "set-aside": ["--dry-run"],
    "pause": [], "resume": [], "import": [folder + "/broker"], "report": [folder + "/report.html"], "top": ["--once"],
    "runs": [], "topics list": [], "topics describe": [], "topics alter": ["--config", "retention.ms=-1"],
    "topics create": ["--partitions", "3"], "topics delete": ["--yes"], "transactions list": [],
}
TOPIC_FIRST = {
    "produce", "get", "restore", "consume", "prove-erased", "delete-records", "set-aside", "pause", "resume",
    "topics describe", "topics alter",
}
OF_A_NEW_TOPIC = {"topics create", "topics delete"}
#: without a limit, so that each round finds the same
BEFORE = {"topics delete": ["topics", "create", "new"]}
AFTER = {
    "topics create": ["topics", "delete", "new", "--yes"], "topics delete": ["topics", "delete", "new", "--yes"],
    "import": ["topics", "delete", "foreign", "--yes"],
}
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
for name, more in COMMANDS.items():
    for _ in range(rounds):
        for copy in ("backup", "export"):
            shutil.rmtree(os.path.join(folder, copy), ignore_errors=True)
        spare = int(2 ** rng.uniform(0, 11.5)) << 20
        topics = ["t"] if name in TOPIC_FIRST else ["new"] if name in OF_A_NEW_TOPIC else []
        line = ["--store", root, "--output", "json", *name.split(), *topics, *more]
        if name in BEFORE:
            assert forked(lambda: cli.run(["--store", root, *BEFORE[name]])) == 0, open(err).read()
        code = forked(lambda: cli.run(line), used + spare)
        text = open(err, errors="replace").read()
        if name in AFTER:
            forked(lambda: cli.run(["--store", root, *AFTER[name]]))
        checked = forked(lambda: cli.run(["--store", root, "--output", "json", "verify"]))
        print(json.dumps([name, spare >> 20, code, text[-2000:], checked]), flush=True)
print(json.dumps(forked(lambda: cli.run(["--store", root, "--output", "json", "get", "t", "p7"]))))
"""


@pytest.mark.timeout(0 if SOAK else 240)
def test_every_command_answers_rightly_or_with_a_typed_error(tmp_path: Path, seed: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(seed), "40" if SOAK else "1"],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *answers, last = map(json.loads, done.stdout.splitlines())
    produced = False
    for name, spare, code, err, verified in answers:
        what = f"{name} with {spare} MiB to spare: {code}, {err}"
        assert verified == 0, what  # nothing is broken after
        assert code in (0, 1), what  # no signal, no cry of damage
        if code == 1:
            assert _kind(err) == "NotEnoughMemory" or "not enough memory" in err or "leaves" in err, what
        produced |= name == "produce" and code == 0
    assert last == (0 if produced else 1)


def _kind(err: str) -> Any:
    try:
        return json.loads(err.strip().splitlines()[-1])["error"]["kind"]
    except (ValueError, KeyError, IndexError, TypeError):
        return None


def test_a_limit_that_is_too_low_is_named_before_anything_begins(tmp_path: Path) -> None:
    script = (
        "import resource, sys; from logstore import address_space as a; "
        "used = int(open('/proc/self/statm').read().split()[0]) * resource.getpagesize(); "
        "resource.setrlimit(resource.RLIMIT_AS, (used + (500 << 20),) * 2); a.check_address_space()"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "NotEnoughMemory: the limit on the process's address space leaves" in done.stderr
