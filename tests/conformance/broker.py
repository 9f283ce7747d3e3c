"""A stock broker on loopback: one KRaft node from the same jars, in a process of its own.

Owns its data directory (`server.properties`, `broker.out`, `logs/`) and its process. Stops cleanly with SIGTERM or
dies with SIGKILL, and starts again on the same ports. A foreign partition directory is put in while it is down.
"""

from __future__ import annotations

import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from conformance.build import build
from conformance.kafka import Kafka
from ports import free_port

_JVM_OPTIONS = (
    "-Xms128m",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",  # it lives for seconds
    "-Dlog4j2.disableJmx=true",
)


class BrokerError(Exception):
    """The broker did not start or stop; the text has the end of its output."""


class Broker:
    """One node; a context manager that starts it and kills what is left of it.

    `settings` are added to server.properties when the directory is formatted, at the first start.
    """

    def __init__(
        self,
        kafka: Kafka,
        data_dir: Path,
        settings: Mapping[str, str | int] | None = None,
        jvm_options: Sequence[str] = _JVM_OPTIONS,
    ) -> None:
        self.kafka = kafka
        self._jvm_options = tuple(jvm_options)
        self.data_dir = data_dir
        self._settings = dict(settings or {})
        self._process: subprocess.Popen[bytes] | None = None
        self._port = 0

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self.running:
            self.kill()

    @property
    def bootstrap(self) -> str:
        return f"127.0.0.1:{self._port}"

    @property
    def logs_dir(self) -> Path:
        return self.data_dir / "logs"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def partition_dir(self, topic: str, partition: int = 0) -> Path:
        return self.logs_dir / f"{topic}-{partition}"

    def output_tail(self, characters: int = 4000) -> str:
        out = self.data_dir / "broker.out"
        return out.read_text(errors="replace")[-characters:] if out.exists() else ""

    def _format(self) -> None:
        self.data_dir.mkdir(parents=True, exist_ok=True)
        self._port = free_port()
        controller = free_port()
        while controller == self._port:
            controller = free_port()
        properties: dict[str, str | int] = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "listeners": f"PLAINTEXT://127.0.0.1:{self._port},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://127.0.0.1:{self._port}",
            "controller.listener.names": "CONTROLLER",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{controller}",
            "log.dirs": str(self.logs_dir),
            "auto.create.topics.enable": "false",
            "group.initial.rebalance.delay.ms": 0,
            "offsets.topic.replication.factor": 1,
            "offsets.topic.num.partitions": 1,
            "transaction.state.log.replication.factor": 1,
            "transaction.state.log.min.isr": 1,
            "transaction.state.log.num.partitions": 1,
            "share.coordinator.state.topic.replication.factor": 1,
            "share.coordinator.state.topic.min.isr": 1,
            # After a SIGKILL the node is let in again when its old session has ended.
            "broker.session.timeout.ms": 1500,
            "broker.heartbeat.interval.ms": 300,
            "num.network.threads": 1,
            "num.io.threads": 2,
            "log.cleaner.dedupe.buffer.size": 8 << 20,
            **self._settings,
        }
        path = self.data_dir / "server.properties"
        path.write_text("".join(f"{name}={value}\n" for name, value in properties.items()))
        self.kafka.format_storage(path)

    def start(self, timeout_s: float = 90.0) -> None:
        """Formats the directory if it is new, starts the process, returns when it answers."""
        if self.running:
            return
        if self._port == 0:
            self._format()
        command = ["java", *self._jvm_options, "-cp", build(), "kafka.Kafka", str(self.data_dir / "server.properties")]
        with open(self.data_dir / "broker.out", "ab") as out:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT)
        self._process = process
        deadline = time.monotonic() + timeout_s
        while not self.kafka.broker_answers(self.bootstrap):
            ended = process.poll()
            if ended is not None or time.monotonic() > deadline:
                how = "did not answer" if ended is None else f"ended with {ended}"
                self.kill()
                raise BrokerError(f"the broker {how}:\n{self.output_tail()}")

    def _end(self, with_signal: signal.Signals, timeout_s: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        process.send_signal(with_signal)
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise BrokerError(f"the broker did not stop within {timeout_s} s:\n{self.output_tail()}") from None

    def stop(self, timeout_s: float = 60.0) -> None:
        """A clean shutdown; leaves `.kafka_cleanshutdown`."""
        self._end(signal.SIGTERM, timeout_s)

    def kill(self) -> None:
        """As a crash of the process: nothing is closed."""
        self._end(signal.SIGKILL, 10.0)

    def create_topic(self, topic: str, partitions: int = 1, config: Mapping[str, str | int] | None = None) -> str:
        """Returns the topic's id. Records older than the retention are deleted within a minute of a start, so tests
        with old timestamps want retention.ms=-1."""
        return self.kafka.create_topic(self.bootstrap, topic, partitions, config)

    def mount(self, source: Path, topic: str, topic_id: str, partition: int = 0, clean: bool = True) -> Path:
        """Puts a copy of a foreign partition directory in the place of the topic's own, while the broker is down.
        The broker's log directory is trusted at the next start, or with clean=False recovered."""
        if self.running:
            raise BrokerError("stop the broker before mounting")
        target = self.partition_dir(topic, partition)
        if not target.is_dir():
            raise BrokerError(f"the broker has no {target}")
        shutil.rmtree(target)
        shutil.copytree(source, target)
        (target / "partition.metadata").write_text(f"version: 0\ntopic_id: {topic_id}")
        if not clean:
            (self.logs_dir / ".kafka_cleanshutdown").unlink(missing_ok=True)
        return target
