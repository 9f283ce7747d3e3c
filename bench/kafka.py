"""Kafka's side: the driver of the conformance tests, in a JVM that may use the one core this process has."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent / "tests"
if str(TESTS) not in sys.path:
    sys.path.insert(0, str(TESTS))

from conformance.broker import Broker  # noqa: E402 (the path comes first)
from conformance.kafka import Kafka  # noqa: E402

#: the collector with the least overhead on one core, and memory that is there before the clock starts
JVM_OPTIONS = ("-Xms4g", "-Xmx4g", "-XX:+UseSerialGC", "-XX:+AlwaysPreTouch")
#: what Kafka's own scripts give a broker, as far as it concerns speed
BROKER_JVM_OPTIONS = ("-Xms1g", "-Xmx1g", "-XX:+UseG1GC", "-Dlog4j2.disableJmx=true")


@contextmanager
def broker(folder: Path) -> Iterator[Broker]:
    """A stock broker of one node, for Spark's Kafka sink and source."""
    settings = {"num.network.threads": 3, "num.io.threads": 8, "log.retention.ms": -1}
    with Kafka() as tool, Broker(tool, folder / "broker", settings, BROKER_JVM_OPTIONS) as node:
        yield node


class TimedKafka(Kafka):
    """A JVM for timing; a context manager. It inherits the core of this process."""

    def __init__(self) -> None:
        super().__init__(timeout_s=600.0, jvm_options=JVM_OPTIONS)

    def __enter__(self) -> TimedKafka:
        return self

    @property
    def processes(self) -> tuple[int, ...]:
        """The JVM's process id, once it runs."""
        return () if self._process is None else (self._process.pid,)
