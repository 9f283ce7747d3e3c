"""`make demo-bucket`: the demo with a store in a bucket. It starts an S3 server of its own on the loopback.

The same changes, the same kill, the same comparison as `duramen.demo`; beside them, the requests of each micro-batch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from duramen.demo import (
    APP,
    FILES,
    PARTITIONS,
    TOPIC,
    compare,
    figures_table,
    make_changes,
    removed_text,
    run_query,
    run_writer,
)

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore

BUCKET = "duramen-demo"
URL = f"s3://{BUCKET}/store"
_START_S = 30
#: where the query's driver notes what each micro-batch took
_NOTES = "requests"


def main() -> int:
    options = argparse.ArgumentParser(
        prog="python -m duramen.demo_bucket",
        description="A stream into a compacted topic of a store in a bucket: killed, restarted, maintained on the way, "
        "its state restored and compared with the truth. Needs duramen[spark,s3], ministack and Java.",
    )
    options.add_argument("--writer", metavar="FOLDER", help=argparse.SUPPRESS)
    writer_folder = options.parse_args().writer
    if writer_folder:
        return _write(writer_folder)
    out = Console()
    with tempfile.TemporaryDirectory(prefix="duramen-demo-") as folder, _server(Path(folder)) as endpoint:
        # Executors find their credentials as the driver does: in the environment.
        os.environ |= {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "demo",
            "AWS_SECRET_ACCESS_KEY": "demo",
        }
        return _tell(out, folder, endpoint)


def _tell(out: Console, folder: str, endpoint: str) -> int:
    from logstore.bucket.store import BucketStore

    out.rule("[bold]1. A store is a bucket; no broker and no shared file system")
    with BucketStore(URL, create=True) as store:
        store.create_topic(TOPIC, partitions=PARTITIONS, configs={"cleanup.policy": "compact", "segment.bytes": 32768})
    truth = make_changes(folder)
    out.print(f"{URL} at {endpoint}: topic [bold]{TOPIC}[/], {PARTITIONS} partitions, compacted.")

    out.rule("[bold]2. A streaming query writes to it, and is killed in the middle")
    program = ("-m", "duramen.demo_bucket")
    killed_at = run_writer(out, folder, kill_after_files=FILES // 2, program=program, committed=_committed)
    out.print(f"[red]SIGKILL[/] to the driver; the ledger has {killed_at} of {FILES} micro-batches.")

    out.rule("[bold]3. The same query goes on; then the tails are sealed and compacted")
    run_writer(out, folder, kill_after_files=None, program=program, committed=_committed)
    out.print(_requests(folder))
    with BucketStore(URL) as store:
        out.print(_maintain(store))

    out.rule("[bold]4. The state is restored from the bucket and compared with the truth")
    is_right = compare(out, URL, truth)
    out.rule("[bold]Done")
    out.print("Next: docs/bucket.md, [bold].venv/bin/duramen cost --partitions 1000 --trigger 10s[/].")
    return 0 if is_right else 1


def _committed(_: str) -> int:
    from logstore.bucket.store import BucketStore

    with BucketStore(URL) as store:
        app = store.ledger.view.app(APP)
    time.sleep(0.2)  # between looks
    return 0 if app is None else app.batch_id + 1


def _requests(folder: str) -> Table:
    table = figures_table("batch", "records", "tasks", "all requests", words=("requests of the driver",))
    for line in Path(folder, _NOTES).read_text().splitlines():
        note = json.loads(line)
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(note["requests"].items()))
        total = sum(note["requests"].values()) + note["tasks"]
        table.add_row(str(note["batch"]), f"{note['records']:,}", str(note["tasks"]), str(total), kinds)
    return table


def _maintain(store: BucketStore) -> str:
    from logstore.bucket.maintaining import MaintenanceRules, maintain
    from logstore.bucket.sealing import SealRules

    before = Counter(store.requests)
    done = maintain(store, MaintenanceRules(seal=SealRules(force=True), force_compaction=True))
    segments = sum(len(each.segments) for each in done.sealed)
    removed: Counter[str] = Counter()
    for each in done.compacted:
        removed.update(each.report.removed if each.report is not None else {})
    took = (store.requests - before).total()
    return f"Sealed into {segments} segments. Compaction removed {removed_text(removed)}. Both took {took} requests."


# --- the streaming query ----------------------------------------------------------------------------------------


def _write(folder: str) -> int:
    from logstore.bucket.store import BucketStore
    from streaming import LogSink
    from streaming.opened import kept_open

    sink = LogSink(store=URL, topic=TOPIC, app_id=APP)

    def write(df: Any, batch_id: int) -> None:
        store = kept_open(URL)  # the one the sink writes to
        assert isinstance(store, BucketStore)
        before = Counter(store.requests)
        done = sink.write(df, batch_id)
        requests = store.requests - before
        if not done.replayed:
            newest = store.ledger.view.newest(store.topic(TOPIC).id)
            assert newest is not None
            assert newest.plan is not None
            tasks = len(store.shelf.plans.get(newest.plan).files)
            note = {"batch": batch_id, "records": done.records, "tasks": tasks, "requests": requests}
            with open(os.path.join(folder, _NOTES), "a") as file:
                file.write(json.dumps(note) + "\n")

    return run_query(folder, write)


# --- the S3 server ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[str]:
    """An S3 server on the loopback, its data in memory, with the demo's bucket."""
    program = Path(sys.executable).with_name("ministack")
    if not program.exists():
        raise SystemExit("The demo starts ministack, a small S3 server: pip install ministack")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    env = {"SERVICES": "s3", "BIND_HOST": "127.0.0.1", "GATEWAY_PORT": str(port), "HOME": str(folder)}
    with open(folder / "ministack.log", "wb") as log:
        process = subprocess.Popen([str(program)], env=os.environ | env, stdout=log, stderr=subprocess.STDOUT)
    endpoint = f"http://127.0.0.1:{port}"
    try:
        ends = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError):
                urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=5).close()
                break
            if process.poll() is not None or time.monotonic() > ends:
                raise SystemExit((folder / "ministack.log").read_text(errors="replace")[-2000:])
            time.sleep(0.1)
        yield endpoint
    finally:
        process.terminate()
        process.wait()


if __name__ == "__main__":
    sys.exit(main())
