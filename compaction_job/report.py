"""What a job did, for people and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from logstore.compaction.planning import PartitionPlan
from logstore.compaction.receipts import Run, describe_run
from logstore.ledger.rows import DONE, FAILED
from logstore.partition.retention import Retention


@dataclass(slots=True)
class Report:
    """What a job did. `runs` has one entry for each partition that was looked at."""

    run_name: str
    engine: str
    now_ms: int
    dry_run: bool = False
    plans: list[PartitionPlan] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    retained: list[Retention] = field(default_factory=list)
    #: what failed outside of a partition's pass, in words
    problems: list[str] = field(default_factory=list)
    #: what was left to others, in words
    notes: list[str] = field(default_factory=list)
    #: runs of killed processes that were closed
    abandoned: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def failed(self) -> list[Run]:
        return [run for run in self.runs if run.result == FAILED]

    @property
    def done(self) -> list[Run]:
        return [run for run in self.runs if run.result == DONE]

    def as_dict(self) -> dict[str, Any]:
        """JSON, the same for every engine."""
        return {
            "run": self.run_name,
            "engine": self.engine,
            "now_ms": self.now_ms,
            "dry_run": self.dry_run,
            "seconds": round(self.seconds, 3),
            "runs": [describe_run(run) for run in self.runs],
            "retained": [
                {
                    "topic": each.partition.topic,
                    "partition": each.partition.partition,
                    "log_start_offset": each.log_start_offset,
                    "passes": [
                        {"policy": one.policy, "segments": len(one.base_offsets), "bytes": one.size_bytes}
                        for one in each.passes
                    ],
                }
                for each in self.retained
                if each.passes
            ],
            "problems": self.problems,
            "notes": self.notes,
            "abandoned": self.abandoned,
        }
