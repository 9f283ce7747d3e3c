"""The daemon: compaction, retention and what else its kind of store needs (see `Job`), each at its interval.

Jobs run on APScheduler's threads, at most one of each at a time. It may be killed at any moment: what a job leaves
undone, the next one finishes. Any number of daemons, jobs and people work on one store side by side; each skips the
partitions that another works on. A store that vanishes ends the daemon.
"""

from __future__ import annotations

import datetime
import logging
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from os import PathLike
from types import TracebackType
from typing import TYPE_CHECKING, Any

from apscheduler.schedulers.background import BackgroundScheduler
from apscheduler.triggers.interval import IntervalTrigger

from compaction_job.activity import Activity, remove_stale
from compaction_job.choice import Choice
from compaction_job.job import compact
from compaction_job.metrics import StoreCollector
from compaction_job.metrics_server import Health, MetricsServer
from compaction_job.report import Report
from compaction_job.retention import project, retain_all
from compaction_job.sampling import take_samples
from logstore.compaction.maintenance import Job
from logstore.compaction.receipts import Run, Skip
from logstore.errors import DuramenError, InvalidConfig, ObjectStoreError
from logstore.ledger.rows import DONE, FAILED, SKIPPED
from logstore.spark_tasks import cancel_jobs
from logstore.store import open_store

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: the setting a job's interval is from; the others are ours
SETTINGS = {
    Job.COMPACTION: "log.cleaner.backoff.ms",
    Job.RETENTION: "log.retention.check.interval.ms",
    Job.FLUSH: "log.flush.scheduler.interval.ms",
}
INTERVAL_MS_MIN = 100
#: longer than this is never
INTERVAL_MS_MAX = 10 * 365 * 86_400_000

LOOPBACK = "127.0.0.1"

_JITTER_SHARE, _JITTER_S_MAX = 0.1, 30.0
_MISFIRE_GRACE_S_MIN = 10
_STORE_CHECK_S = 1.0
#: waiting for another's lock must not outlast the time a stop may take
_LOCK_WAIT_MS = 5_000
_SAMPLE_S = 60.0

log = logging.getLogger("duramen.schedule")


def intervals_of(given: Mapping[Job, int], overrides: Mapping[str, int] | None = None) -> dict[str, int | None]:
    """How often each job runs, None for never; `given` are the store's. Raises InvalidConfig."""
    known = {job.value for job in given}
    for name in overrides or {}:
        if name not in known:
            raise InvalidConfig(f"there is no job {name!r}", hint=f"The jobs are {', '.join(sorted(known))}")
    intervals: dict[str, int | None] = {}
    for job, from_settings in given.items():
        interval_ms = (overrides or {}).get(job.value, from_settings)
        if interval_ms < INTERVAL_MS_MIN:
            source = f"the interval of {job.value}" if job.value in (overrides or {}) else SETTINGS[job]
            raise InvalidConfig(f"{source} = {interval_ms} ms is too short; expected at least {INTERVAL_MS_MIN}")
        intervals[job.value] = None if interval_ms > INTERVAL_MS_MAX else interval_ms
    return intervals


@dataclass(slots=True)
class JobStatus:
    """A job as /healthz shows it."""

    name: str
    interval_ms: int | None
    running: bool = False
    runs: int = 0
    last_started_ms: int | None = None
    last_ended_ms: int | None = None
    #: None before its first run
    ok: bool | None = None
    problems: tuple[str, ...] = ()
    next_ms: int | None = None

    def as_dict(self) -> dict[str, Any]:
        document = asdict(self) | {"problems": list(self.problems)}
        del document["name"]
        return document


class Scheduler:
    """The daemon's work inside any process, as a context manager or by `start`, `wait` and `stop`.

    `intervals` overrules the settings' intervals, by job. A `metrics_port` of 0 serves nothing, None a free one.

        with Scheduler("/data/store", intervals={"compaction": 60_000}) as scheduler:
            scheduler.wait()
    """

    def __init__(
        self,
        store: str | PathLike[str],
        *,
        spark: SparkSession | None = None,
        intervals: Mapping[str, int] | None = None,
        threads: int | None = None,
        metrics_port: int | None = 0,
        metrics_host: str = LOOPBACK,
        storage_options: Mapping[str, str] | None = None,
    ) -> None:
        """Raises NotAStore, StoreInUse, ReadOnlyStore, InvalidConfig, UnknownConfig, and what opening a bucket does."""
        self._store = open_store(store, storage_options=storage_options, lock_wait_ms=_LOCK_WAIT_MS)
        self._store.check_writable()
        self._spark = spark
        self._threads = threads
        self._metrics = (metrics_host, metrics_port)
        self._server: MetricsServer | None = None
        self._scheduler: BackgroundScheduler | None = None
        self._stop = threading.Event()
        self._changed = threading.Condition()
        #: why the daemon cannot go on
        self.failure: str | None = None
        try:
            self._maintenance = self._store.maintenance()
            resolved = intervals_of(self._maintenance.intervals_ms(), intervals)
        except BaseException:
            self._store.close()
            raise
        #: whether topics under way have time until the next run
        self._waits_for_idle = True
        self._status = {job.value: JobStatus(job.value, resolved[job.value]) for job in self._maintenance.jobs}
        self._activity = Activity(self._store, jobs=lambda: self.health().document["jobs"])
        self._sampled = -_SAMPLE_S

    @property
    def intervals_ms(self) -> dict[str, int | None]:
        return {name: status.interval_ms for name, status in self._status.items()}

    @property
    def metrics_address(self) -> tuple[str, int] | None:
        return None if self._server is None else self._server.address

    # --- running ----------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Raises DuramenError when metrics cannot be served."""
        host, port = self._metrics
        if port != 0:
            self._server = MetricsServer(host, port or 0, collector=StoreCollector(self._store), health=self.health)
        if (other := self._maintenance.hold_schedule()) is not None:
            log.warning(
                "another daemon is running on this store (%s); each skips partitions that the other is working on",
                other,
            )
        delay = datetime.timedelta(
            milliseconds=min(self._store.broker_config.log_initial_task_delay_ms, INTERVAL_MS_MAX)
        )
        scheduler = BackgroundScheduler(
            timezone=datetime.timezone.utc, job_defaults={"coalesce": True, "max_instances": 1}
        )
        logging.getLogger("apscheduler").setLevel(logging.ERROR)  # a run may take longer than its interval
        for name, status in self._status.items():
            if status.interval_ms is None:
                continue
            seconds = status.interval_ms / 1000
            scheduler.add_job(
                self.run_job,
                IntervalTrigger(seconds=seconds, timezone=datetime.timezone.utc, jitter=jitter_s(seconds)),
                args=(name,),
                id=name,
                misfire_grace_time=max(int(seconds), _MISFIRE_GRACE_S_MIN),
                next_run_time=datetime.datetime.now(datetime.timezone.utc) + delay,
            )
        scheduler.start()
        self._scheduler = scheduler
        self._activity.start()

    def wait(self) -> bool:
        """Until `stop` is asked for (True), or the store is gone (False)."""
        while not self._stop.wait(_STORE_CHECK_S):
            self._look_for_store()
            self._sample()
        return self.failure is None

    def ask_to_stop(self) -> None:
        """What runs ends at its next step. May be called from a signal handler."""
        self._stop.set()

    def stop(self, timeout_s: float = 8.0) -> bool:
        """End everything; False when a job is still running after `timeout_s`."""
        self._stop.set()
        deadline = time.monotonic() + timeout_s
        scheduler, self._scheduler = self._scheduler, None
        if scheduler is not None:
            scheduler.shutdown(wait=False)
        if self._spark is not None:
            self._cancel_spark()
        with self._changed:
            ended = self._changed.wait_for(
                lambda: not any(status.running for status in self._status.values()),
                timeout=max(deadline - time.monotonic(), 0),
            )
        server, self._server = self._server, None
        if server is not None:
            server.close()
        self._maintenance.release_schedule()
        self._activity.close()
        if ended:
            self._store.close()
        return ended

    def _cancel_spark(self) -> None:
        try:
            assert self._spark is not None
            cancel_jobs(self._spark)
        except Exception as error:
            log.warning("Spark's jobs could not be cancelled: %s", error)

    def __enter__(self) -> Scheduler:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop(timeout_s=60)

    def run_once(self) -> bool:
        """Every job once, one after the other, topics under way included; False when one failed."""
        self._waits_for_idle = False
        for name in self._status:
            if not self._stop.is_set():
                self.run_job(name)
        return self.failure is None and all(status.ok is not False for status in self._status.values())

    # --- jobs -------------------------------------------------------------------------------------------------------

    def run_job(self, name: str) -> None:
        """One run of a job; never raises, what went wrong is in its status and in the log."""
        status = self._status[name]
        with self._changed:
            if self._stop.is_set() or status.running:
                return
            status.running = True
            status.last_started_ms = self._now_ms()
        problems: list[str]
        try:
            self._look_for_store()
            problems = [] if self._stop.is_set() else self._do(Job(name))
        except DuramenError as error:
            problems = [str(error)]
        except Exception as error:
            log.debug("%s failed", name, exc_info=True)
            problems = [f"unexpected {type(error).__name__}: {error}"]
        if problems:
            self._look_for_store()
        if self.failure is None and not self._stop.is_set():
            for problem in problems:
                log.error("%s: %s", name, problem)
        with self._changed:
            status.running = False
            status.runs += 1
            status.last_ended_ms = self._now_ms()
            status.ok = not problems or self._stop.is_set()
            status.problems = () if status.ok else tuple(problems)
            self._changed.notify_all()

    def _do(self, job: Job) -> list[str]:
        """What went wrong, in words."""
        if job is Job.COMPACTION:
            return self._compact()
        if job is Job.RETENTION:
            return self._retain()
        done = self._maintenance.tidy(job, self._stop.is_set, wait_for_idle=self._waits_for_idle)
        for note in done.notes:
            log.info("%s", note)
        return done.problems

    def _compact(self) -> list[str]:
        report = compact(
            self._store,
            spark=self._spark,
            scheduled=True,
            retention=False,
            threads=self._threads,
            stopping=self._stop.is_set,
        )
        for run in report.runs:
            _tell(run)
        for run_id in report.abandoned:
            log.info("run %s was killed; what it left undone is planned again", run_id)
        return [f"{run.plan.name}: {run.reason}" for run in report.failed] + report.problems

    def _retain(self) -> list[str]:
        report = Report("retention", "local", self._maintenance.now_ms(working=True))
        if doubt := self._maintenance.clock_doubt():
            log.warning("%s", doubt)
        retain_all(self._store, Choice(), report, self._stop.is_set, maintenance=self._maintenance)
        for kept in report.retained:
            for one in kept.passes:
                log.info("%s: %d segments deleted because of %s", kept.partition, len(one.base_offsets), one.policy)
        for note in report.notes:
            log.info("%s", note)
        if not self._stop.is_set():
            project(self._store, report, maintenance=self._maintenance)
        return report.problems

    # --- looking ----------------------------------------------------------------------------------------------------

    def health(self) -> Health:
        """200 or 503, and the document; asked by the server's threads."""
        now_ms = self._now_ms()
        scheduler = self._scheduler
        jobs = {}
        late = []
        for name, status in self._status.items():
            job = None if scheduler is None else scheduler.get_job(name)
            next_run = None if job is None else job.next_run_time
            status.next_ms = None if next_run is None else int(next_run.timestamp() * 1000)
            if status.interval_ms is not None and not status.running and status.next_ms is not None:
                overdue_ms = now_ms - status.next_ms
                if overdue_ms > 2 * status.interval_ms + 60_000:
                    late.append(name)
            jobs[name] = status.as_dict()
        failed = [name for name, status in self._status.items() if status.ok is False]
        works = scheduler is not None and not self._stop.is_set() and self.failure is None and not late
        document = {
            "status": "ok" if works and not failed else "failed",
            "store": self._store.path,
            "failure": self.failure,
            "failed": failed,
            "late": late,
            "stopping": self._stop.is_set(),
            "jobs": jobs,
        }
        return Health(works and not failed, document)

    def status(self) -> dict[str, JobStatus]:
        return dict(self._status)

    def _look_for_store(self) -> None:
        """A store that was removed or replaced under us is not ours any more: end."""
        try:
            gone = not self._maintenance.is_same()
        except (OSError, ObjectStoreError) as error:  # of the system: it says nothing about the store
            log.warning("cannot look at the store: %s", error)
            return
        if gone and self.failure is None:
            self.failure = f"the store at {self._store.path} is gone"
            log.error("%s", self.failure)
            self._stop.set()

    def _sample(self) -> None:
        """The history has a slot a minute."""
        if time.monotonic() - self._sampled >= _SAMPLE_S and self.failure is None:
            self._sampled = time.monotonic()
            take_samples(self._store, maintenance=self._maintenance)
            remove_stale(self._store)

    def _now_ms(self) -> int:
        return self._store.clock.now_ms()


def jitter_s(interval_s: float) -> float:
    """So that many daemons do not look at the same moment."""
    return min(interval_s * _JITTER_SHARE, _JITTER_S_MAX)


def _tell(run: Run) -> None:
    """A line for each pass, and for each that was left to another process."""
    if run.result == DONE and run.report is not None:
        removed = ", ".join(f"{count} {reason}" for reason, count in sorted(run.report.removed.items())) or "nothing"
        log.info(
            "%s: %d bytes became %d in %.2f s, removed %s (%s)",
            run.plan.name,
            run.report.before_bytes,
            run.report.after_bytes,
            run.report.seconds,
            removed,
            run.reason,
        )
    elif run.result != SKIPPED and run.result != FAILED:
        log.info("%s: %s, %s", run.plan.name, run.result, run.reason)
    elif run.skip is Skip.TAKEN:
        log.info("%s: skipped, %s", run.plan.name, run.reason)
    elif run.rolled:
        log.info("%s: rolled", run.plan.name)
