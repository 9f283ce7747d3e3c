"""`spark-submit -m compaction_job` or `spark-submit compaction_job/submit.py`: the job as a Spark application."""

import sys

from compaction_job.submit import main

if __name__ == "__main__":
    sys.exit(main())
