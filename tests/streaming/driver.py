"""A driver of its own, for tests that stop, kill or leave one: JSON files through `LogSink` until all is read.

Told by one JSON argument where it runs and what befalls it. `format`: it writes by this data source, not by the sink.
`kill`: the step behind which it kills itself, in the batch `batch`. `stalls`: by batch the step at which it stops
itself until somebody wakes it. Steps are those of docs/protocols.md, "Commit"; `any` is some moment within
the batch.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from logstore.bucket import committing
from logstore.bucket.committing import BucketCommitter
from logstore.bucket.ledger import BucketLedger
from logstore.commit import apply, committer
from logstore.commit.committer import Committer
from logstore.directory.locks import StoreLocks
from streaming.options import SinkOptions
from streaming.sink import LogSink

STEPS = ("staged", "leased", "planned", "committed", "appending", "appended", "published", "synced", "flushed", "any")
#: where the commit is behind it
COMMITTED = ("committed", "appending", "appended", "published", "synced", "flushed")
FLUSHING = ("synced", "flushed")
SETTINGS = {
    "spark.ui.enabled": "false",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.memory": "512m",
    # It lives for seconds: nothing pays off that takes time to prepare.
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
}


def wrap(
    owner: Any, name: str, before: Callable[[], None] | None = None, after: Callable[[], None] | None = None
) -> None:
    work = getattr(owner, name)

    def run(*given: Any, **named: Any) -> Any:
        if before is not None:
            before()
        done = work(*given, **named)
        if after is not None:
            after()
        return done

    setattr(owner, name, run)


class Sink(LogSink):
    """Knows which batch is under way, and which is through."""

    begun = done = -1
    thread = 0

    def __call__(self, df: Any, batch_id: int) -> None:
        Sink.begun, Sink.thread = batch_id, threading.get_ident()
        self.begin(batch_id)
        super().__call__(df, batch_id)
        Sink.done = batch_id

    def begin(self, batch_id: int) -> None:
        """For tests that want to know."""


def between_partitions(act: Callable[[], None]) -> None:
    """Call `act` when a partition is appended to and its lock is free again; they are taken one by one for that."""
    apply._PARTITIONS_AT_ONCE = 1
    locked = StoreLocks.partitions

    @contextlib.contextmanager
    def partitions(self: StoreLocks, *given: Any, **more: Any) -> Iterator[None]:
        with locked(self, *given, **more):
            yield
        act()

    StoreLocks.partitions = partitions  # type: ignore[method-assign]


def at_step(step: str, act: Callable[[], None]) -> None:
    """Call `act` behind the step, each time it is reached."""
    if step == "staged":
        wrap(Committer, "commit", before=act)
    elif step == "leased":
        wrap(Committer, "settle", before=act)
    elif step == "planned":
        wrap(committer, "write_plan", after=act)
    elif step == "committed":
        wrap(Committer, "_decide", after=act)
    elif step == "appending":
        between_partitions(act)
    elif step == "appended":
        wrap(Committer, "publish", before=act)
    elif step == "published":
        wrap(Committer, "publish", after=act)
    elif step == "synced":
        wrap(Committer, "_make_durable", after=act)
    elif step == "flushed":
        wrap(Committer, "_drop_plan", before=act)
    elif step == "bucket staged":
        wrap(BucketCommitter, "commit", before=act)
    elif step == "bucket planned":
        wrap(committing._Decision, "_put", after=act)
    elif step == "bucket committed":
        wrap(BucketLedger, "commit", after=act)
    else:
        raise ValueError(step)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def prepare(told: dict[str, Any]) -> None:
    step, batch = told.get("kill"), told.get("batch")
    if step == "any":

        def begin(self: Sink, batch_id: int) -> None:
            if batch_id == batch:
                timer = threading.Timer(random.Random(told["seed"]).uniform(0, 0.5), die)
                timer.daemon = True
                timer.start()

        Sink.begin = begin  # type: ignore[method-assign]
    elif step is not None:
        # What is flushed belongs to a batch that is through; the one before may still be at it.
        at_step(step, lambda: die() if (Sink.done if step in FLUSHING else Sink.begun) == batch else None)
    stalls = {int(number): name for number, name in told.get("stalls", {}).items()}
    for name in set(stalls.values()):

        def stall(name: str = name) -> None:
            # A flush goes on beside it; where that one is, nobody can say.
            if stalls.get(Sink.begun) == name and Sink.thread == threading.get_ident():
                del stalls[Sink.begun]  # once
                signal.pthread_kill(Sink.thread, signal.SIGSTOP)  # here, not some instructions later

        at_step(name, stall)


def main(told: dict[str, Any]) -> None:
    from pyspark.sql import SparkSession

    prepare(told)
    os.environ["DEADLY_DRIVER"] = str(os.getpid())  # for deadly/sitecustomize.py
    builder = SparkSession.builder.master("local[2]")
    for name, value in SETTINGS.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    stream = spark.readStream.schema("key string, value string").option("maxFilesPerTrigger", 1).json(told["source"])
    options = SinkOptions(flush_ms=told.get("flush_ms", 1000), storage_options=told.get("storage_options", {}))
    if told.get("format") is None:
        writer = stream.writeStream.foreachBatch(Sink(told["store"], "orders", app_id="app", options=options))
    else:
        writer = stream.writeStream.format(told["format"]).options(store=told["store"], topic="orders", app_id="app")
    query = writer.option("checkpointLocation", told["checkpoint"]).trigger(availableNow=True).start()
    query.awaitTermination()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
