"""What keeps a store small and tidy, in a directory and in a bucket alike: the one face that the job, the daemon,
their figures and the commands work on.

Nothing that takes a `Maintenance` asks which kind of store it has. What one kind has no use for, it does not do.
"""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from logstore.cleaner.engine import Engine
from logstore.cleaner.index import Progress, no_progress
from logstore.cleaner.work import Cleaned
from logstore.commit.store_face import Store
from logstore.compaction.budget import Budget
from logstore.compaction.failures import SetAside
from logstore.compaction.planning import PartitionPlan, PlanOptions
from logstore.compaction.receipts import Run
from logstore.files import FileSystem
from logstore.ledger.rows import RunRow
from logstore.partition.retention import Retention
from logstore.topics.registry import Topic

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

#: how an append spends its time
STEPS = ("encode", "plan", "commit", "append")


class Job(Enum):
    """What the daemon does at intervals; each kind of store has some of them."""

    #: what was appended is made durable in the logs
    FLUSH = "flush"
    #: what was committed becomes segments
    SEAL = "seal"
    COMPACTION = "compaction"
    RETENTION = "retention"
    #: the ledger's files are merged, and what killed processes left is removed
    LEDGER = "ledger"
    #: objects that nobody needs are deleted
    SWEEP = "sweep"


@dataclass(frozen=True, slots=True)
class Worker:
    """The process that does a pass: its threads, where it may keep copies, and whom it tells how far it is."""

    name: str = ""
    threads: int = 1
    #: for local copies; None: the system's folder for such files
    folder: str | None = None
    progress: Progress = no_progress


class Workers(Protocol):
    """Who does the passes of a run: this process with its threads, or Spark's tasks."""

    @property
    def name(self) -> str: ...

    def engine(self, plan: PartitionPlan, fs: FileSystem) -> Engine:
        """For a log whose files all workers see."""

    def run(self, plan: PartitionPlan, task: Callable[[Worker], T]) -> T:
        """The whole pass by one worker, which fetches what it needs. `task` and what it returns can be pickled."""


@dataclass(slots=True)
class Context:
    """What all passes of a run share."""

    workers: Workers
    planning: PlanOptions
    budget: Budget
    run_name: str = field(default_factory=lambda: uuid.uuid4().hex)
    roll_active: bool = False
    #: whether several threads or tasks work at one pass, where its log allows it
    in_parallel: bool = False
    airflow_run_id: str | None = None
    stopping: Callable[[], bool] = lambda: False
    started: Callable[[PartitionPlan], None] = lambda _: None
    swapped: Callable[[PartitionPlan, Cleaned], None] = lambda _plan, _group: None


@dataclass(slots=True)
class Prepared:
    """What was done for a run before it planned, and what went wrong, in words."""

    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    #: runs of killed processes that were closed
    abandoned: list[str] = field(default_factory=list)


class Counted(NamedTuple):
    """What compaction counted in a segment."""

    size_bytes: int
    records: int
    keys: int
    tombstones: int
    run_id: str | None


#: by topic id and partition, then by base offset
Counts = dict[tuple[str, int], dict[int, Counted]]


class RunTotals(Protocol):
    """Sums over all passes that ended."""

    @property
    def results(self) -> Mapping[str, int]: ...
    @property
    def removed(self) -> Mapping[str, int]: ...
    @property
    def read_bytes(self) -> int: ...
    @property
    def written_bytes(self) -> int: ...


class Figures(Protocol):
    """Totals for metrics, brought up to date with each look. For threads."""

    def runs(self) -> RunTotals: ...

    def uncleanable(self) -> int:
        """Partitions whose last pass failed."""

    def appends(self) -> Mapping[str, int]:
        """Commits by outcome."""

    def append_ms(self) -> Counter[str]:
        """Time that batches took, by step (STEPS)."""

    def segments(self) -> Counts:
        """What compaction counted."""


@dataclass(frozen=True, slots=True)
class Commits:
    """The newest commits, oldest first, as columns of the ledger's; `complete`: there are no others."""

    version: int
    rows: pa.Table
    complete: bool

    def newest(self, most: int) -> Commits:
        if self.rows.num_rows <= most:
            return self
        return Commits(self.version, self.rows.slice(self.rows.num_rows - most).combine_chunks(), complete=False)


class Tables(Protocol):
    """What was committed and done, as columns, for whoever shows it. Those who share one take turns."""

    def versions(self) -> tuple[int, ...]:
        """Changes whenever there may be news."""

    def runs(self, version: int) -> tuple[int, pa.Table]:
        """The version and the rows of all runs, by the ledger's columns; no rows where it is `version` still."""

    def commits(self, known: Commits, most: int) -> Commits:
        """With what came since `known`, an earlier answer with the columns that are wanted; the newest `most`."""


class Maintenance(Protocol):
    """Of one open store. Implemented by `DirectoryMaintenance` and `BucketMaintenance`."""

    # --- looking ----------------------------------------------------------------------------------------------------

    def now_ms(self, *, working: bool = False) -> int:
        """The time that ages are judged by; `working`: and something may be deleted because of it.

        Raises UnsuitableObjectStore where the clocks are too far apart for that.
        """

    def clock_doubt(self) -> str | None:
        """Why that time may be wrong, in words."""

    def free_bytes(self) -> int | None:
        """Room for what passes write; None where nobody can tell."""

    def total_bytes(self) -> int | None:
        """Size of what that is room in; None where nobody can tell."""

    @property
    def fresh_s(self) -> float:
        """For how long figures count as fresh; 0 where a look costs next to nothing."""

    def failures(self) -> dict[tuple[str, int], SetAside]:
        """Partitions whose last pass failed, by topic id and number, with when they are tried again."""

    def set_aside(self, now_ms: int) -> dict[tuple[str, int], SetAside]:
        """Those whose wait is not over, as far as a look at the partition itself does not tell."""

    def runs(self) -> list[RunRow]:
        """Receipts, oldest first: the newest of each partition, and the newest that erased something for good."""

    def counts(self) -> Counts:
        """What compaction counted in segments."""

    def figures(self) -> Figures: ...
    def tables(self) -> Tables: ...

    def history_path(self, topic_id: str | None) -> str | None:
        """The file with a topic's history, or the store's; None where none is kept."""

    @property
    def activity_folder(self) -> str | None:
        """Where processes tell each other what they are at; None where they do not."""

    def is_same(self) -> bool:
        """Whether the store is still the one that was opened. Raises OSError, ObjectStoreError: nobody knows."""

    # --- a run ------------------------------------------------------------------------------------------------------

    def prepare(self, topics: Sequence[Topic], stopping: Callable[[], bool]) -> Prepared:
        """Before a run plans: finish what is committed, and close what is to be closed."""

    def compact(self, context: Context, plan: PartitionPlan) -> Run:
        """One pass over one partition, if it is still due; what fails is recorded, not raised."""

    def end_passes(self) -> list[str]:
        """After the passes of a run; what went wrong, in words."""

    def prepare_retention(self, topic: Topic) -> None:
        """Raises LockHeld, DuramenError."""

    def retain(self, topic: Topic, number: int, *, now_ms: int, dry_run: bool = False) -> Retention:
        """Retention of a partition, and what is due to be removed with it. Raises LockHeld, DuramenError."""

    def publish(self) -> list[str]:
        """What other tools read, at the end of a run; what went wrong, in words."""

    # --- the daemon -------------------------------------------------------------------------------------------------

    @property
    def jobs(self) -> tuple[Job, ...]:
        """In the order in which one run of all of them does them."""

    def intervals_ms(self) -> dict[Job, int]:
        """How often each is done, by the store's settings."""

    def tidy(self, job: Job, stopping: Callable[[], bool], *, wait_for_idle: bool) -> Prepared:
        """A run of FLUSH, SEAL, LEDGER or SWEEP. `wait_for_idle`: topics under way have time until the next."""

    def hold_schedule(self) -> str | None:
        """Note that a daemon runs here; who runs one already, if that is known. Until `release_schedule`."""

    def release_schedule(self) -> None: ...


class MaintainedStore(Store, Protocol):
    """An open store, for whoever maintains it too."""

    def maintenance(self) -> Maintenance:
        """Each caller has one of its own."""
