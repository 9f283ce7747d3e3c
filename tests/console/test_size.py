"""A store with 1,000 partitions, 20,000 segments and 10,000 runs: pages stay quick, and the console small.

Times are of the processor: what else the machine does is not the console's fault.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from console.big_store import make_big_store

TOPICS, PARTITIONS, SEGMENTS, RUNS = 20, 50, 20, 10_000
FIRST_PAINT_S, TOPIC_S, REPORT_S, MEMORY_KIB = 2.0, 1.0, 10.0, 200 * 1024


@pytest.fixture(scope="module")
def big_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("big") / "store"
    make_big_store(path, topics=TOPICS, partitions=PARTITIONS, segments=SEGMENTS, runs=RUNS)
    return path


class Served:
    """The command in a process of its own."""

    def __init__(self, store: Path) -> None:
        command = [sys.executable, "-m", "duramen", "--store", str(store), "--output", "json", "console", "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.url = json.loads(self.process.stdout.readline())["url"]

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}api/v1{path}", timeout=60) as answer:
            return json.loads(answer.read())

    def cpu_s(self) -> float:
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def memory_kib(self) -> int:
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(next(line for line in status.splitlines() if line.startswith("RssAnon")).split()[1])

    def timed(self, *paths: str) -> float:
        before = self.cpu_s()
        for path in paths:
            self.get(path)
        return self.cpu_s() - before


@pytest.fixture(scope="module")
def served(big_store: Path) -> Iterator[Served]:
    found = Served(big_store)
    yield found
    found.process.terminate()
    found.process.communicate(timeout=30)


def test_pages_of_a_large_store_are_quick_and_the_console_stays_small(served: Served) -> None:
    first = served.timed("/store", "/topics")  # what the first page asks for, with nothing cached
    header = served.get("/store")
    assert header["totals"]["partitions"] == TOPICS * PARTITIONS + 1
    assert header["totals"]["segments"] == TOPICS * PARTITIONS * SEGMENTS + 1
    assert first < FIRST_PAINT_S
    again = served.timed("/store", "/topics")
    assert again < first
    topic = served.timed("/topics/topic-0007?limit=50", "/topics/topic-0007/history", "/explain?topic=topic-0007")
    assert topic < TOPIC_S
    assert served.timed("/topics/topic-0007/partitions/3", "/runs?topic=topic-0007") < TOPIC_S
    runs = served.get("/runs?limit=1000")
    assert runs["total"] == RUNS
    for path in ("/what-if?ratio=0.1", "/horizons", "/apps", "/commits", "/settings", "/topics?limit=1000&sort=size"):
        served.get(path)
    position = runs["next"]
    while position is not None:
        position = served.get(f"/runs?limit=1000&position={position}")["next"]
    for number in range(0, PARTITIONS, 5):
        served.get(f"/topics/topic-0011/partitions/{number}")
    served.get("/topics/source/messages")
    served.get("/topics/source/erasure?key=12")
    memory = served.memory_kib()
    print(f"first {first:.2f} s, again {again:.2f} s, topic {topic:.2f} s, {memory} KiB")
    assert memory < MEMORY_KIB


def test_a_report_of_a_large_store_is_written_quickly(big_store: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.html"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    began = time.monotonic()
    subprocess.run([sys.executable, "-m", "duramen", "--store", str(big_store), "report", str(file)], check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"{cpu_s:.2f} s of the processor, {time.monotonic() - began:.2f} s, {file.stat().st_size} bytes")
    assert cpu_s < REPORT_S
    assert f"/topics/topic-0019/partitions/{PARTITIONS - 1}" in file.read_text(encoding="utf-8")
