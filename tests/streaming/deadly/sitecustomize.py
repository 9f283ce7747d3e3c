"""Python runs this first where the folder is on its path. In the process that commits a stream's batches it kills the
driver, Spark's JVM and itself as soon as batch `DEADLY_BATCH` is in the ledger: Spark never hears of that.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

if any("python_streaming_sink_runner" in argument for argument in sys.orig_argv):
    from logstore.commit.committer import Committer

    decide = Committer._decide

    def die_behind(self: Committer, request: Any, staging: Any) -> None:
        decide(self, request, staging)
        if request.batch_id == int(os.environ["DEADLY_BATCH"]):
            daemon = os.getppid()
            jvm = int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{daemon}/status").read_text())[0])
            for pid in (int(os.environ["DEADLY_DRIVER"]), jvm, daemon, os.getpid()):
                os.kill(pid, signal.SIGKILL)

    Committer._decide = die_behind  # type: ignore[method-assign]
