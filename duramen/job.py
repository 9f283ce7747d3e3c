"""The compaction job for schedulers: `python -m duramen.job plan|retain|outcomes|submit-file …`.

`plan`, `retain` and `outcomes` print one JSON document; `submit-file` the path of the application for `spark-submit`.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    step = words.pop(0) if words else ""
    if step == "plan":
        from compaction_job.planning import main as plan

        return plan(words)
    if step == "retain":
        from compaction_job.retention import main as retain

        return retain(words)
    if step == "outcomes":
        from compaction_job.outcomes import main as outcomes

        return outcomes(words)
    if step == "submit-file" and not words:
        from compaction_job import submit

        print(submit.__file__)
        return 0
    print("usage: python -m duramen.job plan|retain|outcomes|submit-file", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
