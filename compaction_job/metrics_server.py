"""The small HTTP server that shows a store's metrics and the daemon's health. Read-only."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from compaction_job.bounded_server import BoundedHandler, BoundedServer, ServerThread


@dataclass(frozen=True, slots=True)
class Health:
    healthy: bool
    document: dict[str, Any]


class MetricsServer(ServerThread):
    """`GET /metrics` and `GET /healthz`, on threads of its own. Raises UsageError when it cannot listen."""

    def __init__(self, host: str, port: int, *, collector: Collector, health: Callable[[], Health]) -> None:
        registry = CollectorRegistry()
        registry.register(_Quiet(collector))
        one_at_a_time = threading.Lock()  # a scrape goes through every partition

        class Handler(BoundedHandler):
            def do_GET(self) -> None:
                path = self.path.partition("?")[0]
                if path == "/metrics":
                    encode, content_type = choose_encoder(self.headers.get("Accept") or "")
                    with one_at_a_time:
                        text = encode(registry)
                    self.answer(200, content_type, text)
                elif path == "/healthz":
                    found = health()
                    text = json.dumps(found.document).encode() + b"\n"
                    self.answer(200 if found.healthy else 503, "application/json", text)
                else:
                    self.answer(404, "text/plain; charset=utf-8", b"there are /metrics and /healthz\n")

        hint = "Give another --metrics-port, or 0 for none"
        super().__init__(BoundedServer, (host, port), Handler, serves="metrics", hint=hint)


class _Quiet(Collector):
    """Registers without a first scrape."""

    def __init__(self, collector: Collector) -> None:
        self._collector = collector

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._collector.collect()
