"""`duramen schedule`: the daemon that compacts, retains, flushes and tidies up, until it is stopped."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.compact import Engine, EngineName, spark_session
from duramen.commands.console import Schemas, TokenFile
from duramen.session import DONE, FAILED, bad_usage, duration_text, key_values, print_table, session, stop, time_text
from duramen.terminal import json_text

if TYPE_CHECKING:
    from types import FrameType

    from compaction_job.scheduler import Scheduler

_STOP_S = 8.0


def schedule(
    engine: Engine = EngineName.LOCAL,
    interval: Annotated[
        list[str] | None,
        typer.Option(
            "--interval",
            metavar="JOB=MS",
            help="Run a job this often: compaction, retention, flush, ledger (a bucket: seal, sweep). Repeatable.",
            show_default=False,
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option("--threads", min=1, max=1024, help="Passes and groups at once.", show_default=False),
    ] = None,
    metrics_port: Annotated[
        int, typer.Option("--metrics-port", min=0, max=65535, help="Port of /metrics and /healthz; 0 for none.")
    ] = 9464,
    metrics_host: Annotated[
        str, typer.Option("--metrics-host", metavar="ADDRESS", help="Address to serve them on.")
    ] = "127.0.0.1",
    console: Annotated[
        bool, typer.Option("--console", help="Serve the console as well, as `duramen console` does.")
    ] = False,
    console_port: Annotated[
        int, typer.Option("--console-port", min=0, max=65535, help="Its port; 0 for a free one.")
    ] = 8787,
    token_file: TokenFile = None,
    schema: Schemas = None,
    once: Annotated[bool, typer.Option("--once", help="Run every job once, then end.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the jobs and their intervals, then end.")] = False,
) -> None:
    """Compact, retain, flush or seal, and tidy up, each at its interval, until SIGTERM or SIGINT."""
    try:
        from compaction_job.scheduler import Scheduler
    except ImportError as error:
        raise bad_usage(f"duramen schedule needs {error.name}: install duramen[schedule]") from None
    path, intervals = session.path, _intervals(interval)
    with spark_session(EngineName.LOCAL if dry_run else engine) as spark:
        daemon = Scheduler(
            path,
            spark=spark,
            intervals=intervals,
            threads=threads,
            metrics_port=0 if once or dry_run else metrics_port,
            metrics_host=metrics_host,
        )
        if dry_run:
            daemon.stop()
            _answer(daemon)
            return
        with _logging(), _console(console and not once, console_port, token_file, schema):
            _serve(daemon, once)


@contextlib.contextmanager
def _console(wanted: bool, port: int, token_file: str | None, schemas: list[str] | None) -> Iterator[None]:
    """The console beside the daemon, on loopback."""
    if not wanted:
        yield
        return
    from compaction_job.scheduler import log
    from duramen.console.opened import OpenConsole, find_token

    with OpenConsole(session.path, token=find_token(token_file), port=port, schemas=schemas or ()) as served:
        log.info("console on %s", served.link)
        yield


def _intervals(given: list[str] | None) -> dict[str, int]:
    from logstore.setting import DURATION_UNITS, parse_units

    found = {}
    for name, text in key_values(given, "--interval").items():
        interval_ms = int(text) if re.fullmatch("[0-9]{1,18}", text) else parse_units(text, DURATION_UNITS)
        if interval_ms is None:
            raise bad_usage(f"--interval {name} takes milliseconds, not {text!r}; 30s, 5m, 2h and 1d work, too")
        found[name] = interval_ms
    return found


def _serve(daemon: Scheduler, once: bool) -> None:
    from compaction_job.scheduler import log

    def handle(number: int, frame: FrameType | None) -> None:
        daemon.ask_to_stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, handle)
    try:
        if once:
            well = daemon.run_once()
        else:
            daemon.start()
            jobs = ", ".join(
                f"{name} never" if ms is None else f"{name} every {duration_text(ms)}"
                for name, ms in daemon.intervals_ms.items()
            )
            log.info("running on %s: %s", session.store_path, jobs)
            if daemon.metrics_address is not None:
                log.info("metrics on http://%s:%d/metrics", *daemon.metrics_address)
            well = daemon.wait()
            log.info("stopping")
    finally:
        ended = daemon.stop(_STOP_S)
    if not ended:
        log.warning("a job did not end in time; what it left undone is done by the next start")
    if once:
        _answer(daemon)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    if not ended:
        os._exit(DONE if well else FAILED)  # its thread would be waited for
    if not well:
        stop(FAILED)


def _answer(daemon: Scheduler) -> None:
    documents = {name: status.as_dict() for name, status in daemon.status().items()}

    def text() -> None:
        print_table(
            ["job", "interval", "last run", "result"],
            [
                [
                    name,
                    "never" if each["interval_ms"] is None else duration_text(each["interval_ms"]),
                    time_text(each["last_ended_ms"]),
                    _result(each),
                ]
                for name, each in documents.items()
            ],
        )

    session.answer({"jobs": documents, "failure": daemon.failure}, text)


def _result(document: dict[str, Any]) -> str:
    if document["ok"] is None:
        return "-"
    return "ok" if document["ok"] else "; ".join(document["problems"])


@contextlib.contextmanager
def _logging() -> Any:
    """A line on stderr for each thing done, as JSON where that was asked for."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if session.json else _Text())
    ours = logging.getLogger("duramen")
    level, propagate = ours.level, ours.propagate
    ours.addHandler(handler)
    ours.setLevel(logging.DEBUG if session.debug else logging.INFO)
    ours.propagate = False
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)
        ours.propagate = propagate


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        text = f"{time_text(int(record.created * 1000))} {record.levelname.lower()} {record.getMessage()}"
        return f"{text}\n{self.formatException(record.exc_info)}" if record.exc_info else text


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        document = {
            "time_ms": int(record.created * 1000),
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        }
        return json_text(document)
