"""Which Python runs Spark's workers: unless it is configured, it is the `python3` on the PATH.

That one may lack our packages even where the driver has them, if the driver's environment was not activated.
Imports no Spark.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from logstore.errors import PackageMissing

_SETTING = "spark.pyspark.python"
_VARIABLE = "PYSPARK_PYTHON"


def use_this_python(session: Any) -> None:
    """Let the workers of a local session run this interpreter, if none was chosen.

    Executors on other machines may have theirs elsewhere: nothing is done there, and `explained` says what to do.
    """
    if _VARIABLE in os.environ:
        return
    try:
        context = session.sparkContext
    except Exception:  # Spark Connect has none
        return
    if context.master.startswith("local") and context.getConf().get(_SETTING) is None:
        context.pythonExec = sys.executable


@contextmanager
def explained() -> Iterator[None]:
    """Raises PackageMissing for a job that failed because a worker's Python lacks our packages."""
    try:
        yield
    except Exception as error:
        missing = re.search(r"No module named '([\w.]+)'|\[PACKAGE_NOT_INSTALLED\] (\w+)", str(error))
        if missing is None:
            raise
        raise PackageMissing(
            f"the Python of Spark's workers has no package {missing[1] or missing[2]!r}",
            hint=f"Set the variable {_VARIABLE} (or {_SETTING}) to an interpreter that has Duramen, on every machine "
            f"that runs executors, before the session starts; the driver's is {sys.executable}",
        ) from error
