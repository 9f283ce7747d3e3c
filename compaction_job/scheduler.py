"""The daemon: compaction, retention, flushing of idle topics and upkeep of the ledger, each at its interval.

Jobs run on APScheduler's threads, at most one of each at a time. It may be killed at any moment: what a job leaves
undone, the next one finishes. Any number of daemons, jobs and people work on one store side by side; each skips the
partitions that another works on. A store that vanishes ends the daemon.
"""

from __future__ import annotations

import datetime
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
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
from logstore.commit.committer import Committer
from logstore.compaction.receipts import Run, Skip
from logstore.config import BrokerConfig
from logstore.directory.locks import FileLock, holder
from logstore.directory.shared_clock import clock_warning
from logstore.errors import DuramenError, InvalidConfig, LockHeld
from logstore.ledger.rows import DONE, FAILED, SKIPPED
from logstore.limits import INT64_MAX
from logstore.spark_tasks import cancel_jobs
from logstore.store import LogStore, directory_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

COMPACTION, RETENTION, FLUSH, LEDGER = "compaction", "retention", "flush", "ledger"
#: the setting a job's interval is from; the ledger's is ours
SETTINGS = {
    COMPACTION: "log.cleaner.backoff.ms",
    RETENTION: "log.retention.check.interval.ms",
    FLUSH: "log.flush.scheduler.interval.ms",
    LEDGER: None,
}
#: Kafka's default is never, as its replicas are its durability; here staged files wait for the flush
FLUSH_INTERVAL_MS = 60_000
LEDGER_INTERVAL_MS = 3_600_000
INTERVAL_MS_MIN = 100
#: longer than this is never
INTERVAL_MS_MAX = 10 * 365 * 86_400_000

LOOPBACK = "127.0.0.1"

_JITTER_SHARE, _JITTER_S_MAX = 0.1, 30.0
_MISFIRE_GRACE_S_MIN = 10
_STORE_CHECK_S = 1.0
#: waiting for another's lock must not outlast the time a stop may take
_LOCK_WAIT_MS = 5_000
_DAEMON_LOCK = "schedule"
_SAMPLE_S = 60.0

log = logging.getLogger("duramen.schedule")


def intervals_of(config: BrokerConfig, overrides: Mapping[str, int] | None = None) -> dict[str, int | None]:
    """How often each job runs, None for never. Raises InvalidConfig."""
    flush_ms = config.log_flush_scheduler_interval_ms
    given = {
        COMPACTION: max(config.log_cleaner_backoff_ms, 1_000),  # 0 is allowed, and means at once
        RETENTION: config.log_retention_check_interval_ms,
        FLUSH: FLUSH_INTERVAL_MS if flush_ms == INT64_MAX else flush_ms,
        LEDGER: LEDGER_INTERVAL_MS,
    }
    for name in overrides or {}:
        if name not in given:
            raise InvalidConfig(f"there is no job {name!r}", hint=f"The jobs are {', '.join(given)}")
    intervals: dict[str, int | None] = {}
    for name, from_settings in given.items():
        interval_ms = (overrides or {}).get(name, from_settings)
        if interval_ms < INTERVAL_MS_MIN:
            source = f"the interval of {name}" if name in (overrides or {}) else SETTINGS[name]
            raise InvalidConfig(f"{source} = {interval_ms} ms is too short; expected at least {INTERVAL_MS_MIN}")
        intervals[name] = None if interval_ms > INTERVAL_MS_MAX else interval_ms
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
    ) -> None:
        """Raises NotAStore, StoreInUse, ReadOnlyStore, InvalidConfig, UnknownConfig."""
        self._store = LogStore(directory_of(store), lock_wait_ms=_LOCK_WAIT_MS)
        self._store.check_writable()
        self._spark = spark
        self._threads = threads
        self._metrics = (metrics_host, metrics_port)
        self._server: MetricsServer | None = None
        self._scheduler: BackgroundScheduler | None = None
        self._stop = threading.Event()
        self._changed = threading.Condition()
        self._identity = self._store_identity()
        self._beside = FileLock(self._store.fs, os.path.join(self._store.layout.locks, _DAEMON_LOCK))
        #: why the daemon cannot go on
        self.failure: str | None = None
        self._sequences: dict[str, int] = {}
        self._work: dict[str, Callable[[], list[str]]] = {
            FLUSH: self._flush,
            COMPACTION: self._compact,
            RETENTION: self._retain,
            LEDGER: self._upkeep,
        }
        try:
            self._ledger = self._store.ledger()
            resolved = intervals_of(self._store.broker_config, intervals)
        except BaseException:
            self._store.close()
            raise
        self._status = {name: JobStatus(name, resolved[name]) for name in self._work}
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
        if not self._beside.try_acquire():
            log.warning(
                "another daemon is running on this store (%s); each skips partitions that the other is working on",
                holder(self._store.fs, self._beside.path),
            )
        else:
            self._beside.sign(self._store.clock, "schedule")
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
        self._beside.release()
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
        for topic in self._store.topics():
            self._sequences[topic.id] = self._ledger.sequence(topic.id)  # as if nothing had come for a while
        for name in self._work:
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
            problems = [] if self._stop.is_set() else self._work[name]()
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
        report = Report("retention", "local", self._now_ms())
        if doubt := clock_warning(self._store.clock):
            log.warning("%s", doubt)
        retain_all(self._store, Choice(), report, self._stop.is_set)
        for kept in report.retained:
            for one in kept.passes:
                log.info("%s: %d segments deleted because of %s", kept.partition, len(one.base_offsets), one.policy)
        for note in report.notes:
            log.info("%s", note)
        if not self._stop.is_set():
            project(self._store, report)
        return report.problems

    def _flush(self) -> list[str]:
        """Settle and flush topics that were not written to since the last look; unlink what has lain long enough."""
        problems = []
        committer = Committer(self._store)
        for topic in self._store.topics():
            if self._stop.is_set():
                return []
            try:
                sequence = self._ledger.sequence(topic.id)
                idle = self._sequences.get(topic.id) == sequence
                self._sequences[topic.id] = sequence
                ends = self._store.ends(topic)
                if idle and (ends.flushed_sequence != sequence or ends.recovery_points != ends.high_watermarks):
                    committer.flush(topic)
                    log.info("%s: flushed", topic.name)
                for number in range(topic.partitions):
                    self._store.sweep_deleted(topic, number, now_ms=self._now_ms())
            except LockHeld as error:
                log.info("%s is left to another process: %s", topic.name, error.what)
            except DuramenError as error:
                problems.append(f"{topic.name}: {error}")
        return problems

    def _upkeep(self) -> list[str]:
        """Merge the ledger's files; remove what killed processes left behind."""
        try:
            self._ledger.maintain()
            Committer(self._store).sweep()
            self._store.sweep()
        except LockHeld as error:
            log.info("upkeep is left for the next time: %s", error.what)
        return []

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
            gone = self._store_identity() != self._identity
        except (FileNotFoundError, NotADirectoryError):
            gone = True
        except OSError as error:  # of the system: it says nothing about the store
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
            take_samples(self._store)
            remove_stale(self._store)

    def _store_identity(self) -> tuple[int, int]:
        found = os.stat(self._store.layout.version)
        return found.st_dev, found.st_ino

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
