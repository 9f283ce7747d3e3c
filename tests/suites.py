"""The table of suites behind `make test`, and what runs it: each suite in a process of its own, two at a time.

A failing suite does not stop the next one. What runs beside another suite is printed when it is over. The run ends with
a table of what passed, failed and was skipped, and why. On CI (`CI=true`) a skipped test, or a suite in which nothing
ran, is a failure as well. Standard library only, so that it can report even when an installed package is broken.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
REPORTS = ROOT / "build" / "reports"
PACKAGES = ("logstore", "streaming", "compaction_job", "duramen")
JAVA_VERSION_MIN = 17
_PRINTING = threading.Lock()
JAVA_INSTALL = "apt-get install openjdk-17-jdk-headless maven"


@dataclass(frozen=True, slots=True)
class Suite:
    """One row of the table: pytest over `paths` (patterns below the root), or the lint commands when there are none."""

    name: str
    paths: tuple[str, ...] = ()
    needs_java: bool = False
    #: settings the tests of this suite read
    env: dict[str, str] = field(default_factory=dict)
    #: more arguments for pytest
    arguments: tuple[str, ...] = ()
    #: the whole suite is killed after this long: a hang inside a kernel is out of reach for pytest's own timeout
    limit_s: int = 1800


#: The longest first, so that two at a time end together.
SUITES = (
    Suite("lint"),
    Suite("cluster", ("tests/cluster",), needs_java=True, arguments=("--timeout=900",)),
    Suite("unit", ("tests/logstore", "tests/compaction_job", "tests/duramen", "tests/test_*.py"), limit_s=3600),
    Suite("streaming", ("tests/streaming",), needs_java=True, arguments=("--timeout=900",)),
    Suite("conformance", ("tests/conformance",), needs_java=True, arguments=("--timeout=600",)),
    Suite("fuzz", ("tests/fuzz",), env={"DURAMEN_FUZZ_SECONDS": "30"}, arguments=("--timeout=600",)),
    Suite("package", ("tests/package",), needs_java=True, arguments=("--timeout=900",)),
    Suite("reads", ("tests/streaming_reads",), needs_java=True, arguments=("--timeout=900",)),
    Suite("docs", ("tests/docs",), needs_java=True, arguments=("--timeout=900",)),
    Suite("airflow", ("tests/airflow_dags",), needs_java=True, arguments=("--timeout=1200",)),
    Suite("versions", ("tests/versions",), needs_java=True, arguments=("--timeout=900",)),
    Suite("console", ("tests/console",), needs_java=True, arguments=("--timeout=300",)),
    Suite("simulation", ("tests/simulation",)),
    Suite("conf", ("tests/conf",), needs_java=True),
    Suite("crash", ("tests/crash",)),
    # Where there is no versitygw yet, it is built first.
    Suite("bucket", ("tests/bucket",), arguments=("--timeout=1500",)),
)

_DAY_S = 24 * 3600
_SOAK = {"DURAMEN_SOAK": "1"}
_LIVE_SOAK = _SOAK | {"DURAMEN_LIVE_SECONDS": os.environ.get("DURAMEN_LIVE_SECONDS", "1800")}
_FUZZ_SOAK = _SOAK | {"DURAMEN_FUZZ_CASES": "10000000"}
SOAK_SUITES = (
    Suite("simulation", ("tests/simulation",), env=_SOAK, arguments=("--timeout=0",), limit_s=_DAY_S),
    Suite("crash", ("tests/crash",), env=_SOAK, arguments=("--timeout=0",), limit_s=_DAY_S),
    Suite(
        "live",
        ("tests/crash/test_live_mix.py",),
        needs_java=True,
        env=_LIVE_SOAK,
        # Its summary and seed are worth reading when it passes, too.
        arguments=("--timeout=0", "--capture=no"),
        limit_s=_DAY_S,
    ),
    Suite("fuzz", ("tests/fuzz",), env=_FUZZ_SOAK, arguments=("--timeout=0",), limit_s=_DAY_S),
    Suite(
        "commit",
        (
            "tests/logstore/commit/test_commit_*.py",
            "tests/logstore/commit/test_settling.py",
            "tests/logstore/ledger/test_ledger_durability.py",
        ),
        env=_SOAK,
        arguments=("--timeout=0",),
        limit_s=_DAY_S,
    ),
    Suite(
        "streaming",
        ("tests/streaming", "tests/streaming_reads"),
        needs_java=True,
        env=_SOAK,
        arguments=("--timeout=0",),
        limit_s=_DAY_S,
    ),
    Suite(
        "survivors",
        ("tests/conformance/test_same_survivors.py", "tests/conformance/test_eligibility.py"),
        needs_java=True,
        env=_SOAK,
        arguments=("--timeout=0",),
        limit_s=_DAY_S,
    ),
    Suite("compaction", ("tests/compaction_job",), env=_SOAK, arguments=("--timeout=0",), limit_s=_DAY_S),
    Suite(
        "bucket",
        (
            "tests/bucket/test_model.py",
            "tests/bucket/test_ledger_orders.py",
            "tests/bucket/test_kills.py",
            "tests/bucket/test_maintaining.py",
            "tests/bucket/test_all_at_once.py",
        ),
        env=_SOAK,
        arguments=("--timeout=0", "-rP"),
        limit_s=_DAY_S,
    ),
    Suite(
        "probe",
        # Not named as tests are: it is run by this suite alone.
        ("tests/bucket/probe_servers.py",),
        needs_java=True,
        arguments=("--timeout=3000", "-rP"),
        limit_s=2 * 3600,
    ),
    Suite(
        "azure",
        tuple(f"tests/bucket/test_{name}.py" for name in ("objects", "probe", "whole_life", "commands", "kills")),
        env={"DURAMEN_SERVER": "azurite"},
        arguments=("--timeout=600", "-rP"),
        limit_s=3600,
    ),
)


@dataclass(slots=True)
class Outcome:
    suite: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    #: distinct reasons of skips, and what went wrong beside failing tests
    notes: list[str] = field(default_factory=list)

    @property
    def ran(self) -> int:
        return self.passed + self.failed

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


# --- judging -------------------------------------------------------------------------------------------------------


def read_junit(path: Path, outcome: Outcome) -> None:
    """Add the counts and the reasons for skipping of pytest's report at `path` to `outcome`."""
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        skipped = case.find("skipped")
        if case.find("failure") is not None or case.find("error") is not None:
            outcome.failed += 1
        elif skipped is not None:
            outcome.skipped += 1
            outcome.note(skipped.get("message") or "no reason given")
        else:
            outcome.passed += 1


def judge_pytest(suite: str, exit_code: int, report: Path) -> Outcome:
    """What a finished pytest process amounts to. One that died, or never got to run its tests, counts as a failure."""
    outcome = Outcome(suite)
    try:
        read_junit(report, outcome)
    except (OSError, ElementTree.ParseError):
        outcome.failed += 1
        outcome.note(f"pytest left no report ({_ending(exit_code)})")
        return outcome
    no_tests_collected = 5
    if exit_code not in (0, no_tests_collected) and not outcome.failed:
        outcome.failed += 1
        outcome.note(f"pytest ended with {_ending(exit_code)}")
    return outcome


def _ending(exit_code: int) -> str:
    return f"signal {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"


def complaints(outcomes: Sequence[Outcome], on_ci: bool) -> list[str]:
    """Why the run as a whole is a failure; empty when it is none."""
    found = []
    for outcome in outcomes:
        if outcome.failed:
            found.append(f"{outcome.suite}: {outcome.failed} failed")
        if on_ci and outcome.skipped:
            found.append(f"{outcome.suite}: {outcome.skipped} skipped, and on CI nothing may be")
        if on_ci and not outcome.ran and not outcome.skipped:
            found.append(f"{outcome.suite}: nothing ran, and on CI every suite must")
    return found


def table(outcomes: Sequence[Outcome]) -> str:
    """The closing table: one row a suite, its notes wrapped in the last column."""
    rows = [("suite", "passed", "failed", "skipped", "seconds", "why")]
    for outcome in outcomes:
        counts = (str(outcome.passed), str(outcome.failed), str(outcome.skipped), f"{outcome.seconds:.1f}")
        lines = [line for note in outcome.notes for line in textwrap.wrap(note, 80)] or [""]
        rows.append((outcome.suite, *counts, lines[0]))
        rows.extend(("", "", "", "", "", line) for line in lines[1:])
    widths = [max(len(row[column]) for row in rows) for column in range(6)]
    rows.insert(1, tuple("-" * width for width in widths))  # type: ignore[arg-type]
    return "\n".join(
        "  ".join(
            [row[0].ljust(widths[0]), *(row[column].rjust(widths[column]) for column in range(1, 5)), row[5]]
        ).rstrip()
        for row in rows
    )


def totals(outcomes: Sequence[Outcome]) -> str:
    passed, failed, skipped = (sum(getattr(o, name) for o in outcomes) for name in ("passed", "failed", "skipped"))
    return f"{passed} passed, {failed} failed, {skipped} skipped"


# --- Java ----------------------------------------------------------------------------------------------------------


def java_major(version_text: str) -> int:
    """The major version in what `java -version` prints; 0 when there is none. "1.8.0_402" is Java 8."""
    match = re.search(r'version "(?:1\.)?(\d+)', version_text)
    return int(match.group(1)) if match else 0


def missing_java() -> str | None:
    """What of a JDK and Maven is missing and the command that installs it, or None."""
    home = os.environ.get("JAVA_HOME")
    java, javac = (f"{home}/bin/{name}" if home else name for name in ("java", "javac"))
    missing = []
    if shutil.which(java) is None or shutil.which(javac) is None:
        missing.append(f"a Java development kit >= {JAVA_VERSION_MIN}")
    else:
        answer = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
        major = java_major(answer.stderr + answer.stdout)
        if major < JAVA_VERSION_MIN:
            missing.append(f"Java >= {JAVA_VERSION_MIN} (this one is {major or 'of an unknown version'})")
    if shutil.which("mvn") is None:
        missing.append("Maven (mvn)")
    if not missing:
        return None
    return f"The conformance suite needs {' and '.join(missing)}. Install with:\n    {JAVA_INSTALL}"


# --- running -------------------------------------------------------------------------------------------------------


def run_process(command: Sequence[str], env: dict[str, str], limit_s: int, out: IO[bytes] | None = None) -> int:
    """The exit code of `command`, negative for a signal; output passes through, or goes to `out`. Its whole group dies
    at the limit.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        # Compiled modules are kept, as a user's are, whatever the surroundings say: most tests start processes.
        env={name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | env,
        start_new_session=True,
        stdout=out,
        stderr=None if out is None else subprocess.STDOUT,
    )
    try:
        return process.wait(timeout=limit_s)
    except BaseException as reason:
        os.killpg(process.pid, signal.SIGKILL)
        code = process.wait()
        if isinstance(reason, subprocess.TimeoutExpired):
            print(f"killed after {limit_s} s: {' '.join(command)}", file=sys.stderr)
            return code
        raise


def run_lint(suite: Suite, out: IO[bytes] | None) -> Outcome:
    outcome = Outcome(suite.name)
    packages = [name for name in PACKAGES if (ROOT / name / "__init__.py").exists()]
    checks = {
        "ruff check": ["ruff", "check", "--quiet", "."],
        "ruff format": ["ruff", "format", "--check", "--quiet", "."],
        "mypy": ["mypy", *packages, "tests/suites.py"],
    }
    for name, command in checks.items():
        program = str(Path(sys.executable).parent / command[0])
        if run_process([program, *command[1:]], suite.env, suite.limit_s, out) == 0:
            outcome.passed += 1
        else:
            outcome.failed += 1
            outcome.note(f"{name} has complaints")
    return outcome


def run_pytest(suite: Suite, out: IO[bytes] | None) -> Outcome:
    paths = [str(path.relative_to(ROOT)) for pattern in suite.paths for path in sorted(ROOT.glob(pattern))]
    if not paths:
        outcome = Outcome(suite.name)
        outcome.note(f"there is no {' or '.join(suite.paths)}")
        return outcome
    REPORTS.mkdir(parents=True, exist_ok=True)
    report = REPORTS / f"{suite.name}.xml"
    report.unlink(missing_ok=True)
    command = [sys.executable, "-m", "pytest", "--quiet", f"--junitxml={report}", *suite.arguments, *paths]
    outcome = judge_pytest(suite.name, run_process(command, suite.env, suite.limit_s, out), report)
    if not outcome.ran and not outcome.skipped:
        outcome.note("no tests collected")
    return outcome


def run(suite: Suite, *, aside: bool = False) -> Outcome:
    """Run one suite; with `aside` its output comes when it is over, in one piece."""
    start = time.monotonic()
    if not aside:
        print(f"\n=== {suite.name}", flush=True)
        outcome = run_pytest(suite, None) if suite.paths else run_lint(suite, None)
    else:
        print(f"... {suite.name} begins", flush=True)
        with tempfile.TemporaryFile() as out:
            outcome = run_pytest(suite, out) if suite.paths else run_lint(suite, out)
            out.seek(0)
            text = out.read().decode(errors="replace")
        with _PRINTING:
            print(f"\n=== {suite.name}\n{text}", flush=True)
    outcome.seconds = time.monotonic() - start
    return outcome


def run_all(suites: Sequence[Suite], jobs: int) -> list[Outcome]:
    """All suites, `jobs` at a time; outcomes in the order of the suites."""
    if jobs <= 1 or len(suites) == 1:
        return [run(suite) for suite in suites]
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda suite: run(suite, aside=True), suites))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Run the suites of the project and report them in a table.")
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="only these suites; all when none is named")
    parser.add_argument(
        "--jobs", type=int, default=2, metavar="N", help="suites at a time; one lets their output pass (default 2)"
    )
    parser.add_argument("--soak", action="store_true", help="the long form of the suites that have one")
    options = parser.parse_args(arguments)

    usual = SOAK_SUITES if options.soak else SUITES
    known = {suite.name: suite for suite in usual}
    for name in options.suites:
        if name not in known:
            parser.error(f"there is no suite {name!r}, only {', '.join(known)}")
    chosen = [known[name] for name in options.suites] or list(usual)

    complaint = missing_java() if any(suite.needs_java for suite in chosen) else None
    if complaint:
        print(complaint, file=sys.stderr)
        return 1

    began = time.monotonic()
    outcomes = run_all(chosen, 1 if options.soak else options.jobs)
    found = complaints(outcomes, on_ci=os.environ.get("CI") == "true")
    print(f"\n{table(outcomes)}\n")
    for line in found:
        print(line)
    print(f"{(time.monotonic() - began) / 60:.1f} minutes")
    print(totals(outcomes), flush=True)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
