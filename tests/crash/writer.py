"""A process that works on a log until it is killed.

Reads one order a line from its standard input (JSON: root, topic, long_lived, sync, seed) and forks for each a child
that opens the log, without trust in how it was left, and carries out what the seed draws. Every operation is announced
on standard output before it begins and acknowledged after it returned; a line is written at once, so what was
acknowledged can be read after the kill. Once the child is dead a line says so.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import tempfile
from typing import Any

from crash.workload import Operation, Place, Settings, UnsyncedFiles, Writer, draw_operation
from logstore.clock import SYSTEM_CLOCK
from logstore.files import OS_FILES


def tell(**line: Any) -> None:
    os.write(sys.stdout.fileno(), json.dumps(line).encode() + b"\n")


def work(order: dict[str, Any]) -> None:
    tell(pid=os.getpid())
    settings = Settings(order["topic"], order["long_lived"], background_flush=True)
    files = OS_FILES if order["sync"] else UnsyncedFiles()
    writer = Writer(Place(order["root"]), files, settings, SYSTEM_CLOCK)
    tell(opened=True)
    rng = random.Random(order["seed"])
    while True:
        operation = draw_operation(rng, writer.log, SYSTEM_CLOCK.now_ms())
        tell(begins=operation.as_json())
        writer.carry_out(operation)
        log = writer.log
        tell(done=[log.log_start_offset, log.log_end_offset, log.recovery_point, writer.content_end()])


def warm_up() -> None:
    """Load once what every child would load anew: the kernels and codecs."""
    with tempfile.TemporaryDirectory() as root:
        writer = Writer(Place(root), UnsyncedFiles(), Settings(), SYSTEM_CLOCK)
        now_ms = SYSTEM_CLOCK.now_ms()
        for codec_id in range(5):
            writer.carry_out(Operation("append", now_ms=now_ms, count=1, codec_id=codec_id))
            writer.carry_out(Operation("columns", now_ms=now_ms, count=1, codec_id=codec_id))
        writer.carry_out(Operation("batch", now_ms=now_ms, count=1, producer_id=1, sequence=0, transactional=True))
        writer.carry_out(Operation("marker", producer_id=1))
        writer.log.close()


def main() -> None:
    warm_up()
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                work(json.loads(line))
            except BrokenPipeError:  # nobody listens any more
                os._exit(1)
            except BaseException as error:
                tell(failed=repr(error))
                raise
        _, status = os.waitpid(pid, 0)
        tell(ended=signal.Signals(os.WTERMSIG(status)).name if os.WIFSIGNALED(status) else os.WEXITSTATUS(status))


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        main()
