"""The runner behind `make test`: a run that must not pass, does not."""

from __future__ import annotations

from pathlib import Path

import pytest

import suites
from suites import Outcome, Suite


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project of its own with one suite, `unit`, for the runner to run with a real pytest."""
    monkeypatch.setattr(suites, "ROOT", tmp_path)
    monkeypatch.setattr(suites, "REPORTS", tmp_path / "build" / "reports")
    monkeypatch.setattr(suites, "SUITES", (Suite("unit", ("tests",), limit_s=60), Suite("later", ("tests/later",))))
    monkeypatch.delenv("CI", raising=False)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "tests").mkdir()
    return tmp_path


def write_test(project: Path, body: str) -> None:
    (project / "tests" / "test_it.py").write_text(f"import os, pytest, time\ndef test_it():\n    {body}\n")


def test_a_passing_suite_ends_with_the_table_and_the_totals(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_test(project, "pass")
    assert suites.main(["unit"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == "1 passed, 0 failed, 0 skipped"
    assert any(line.split()[:4] == ["unit", "1", "0", "0"] for line in lines)


def test_a_failing_suite_fails_the_run_and_the_next_one_still_runs(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_test(project, "assert False")
    (project / "tests" / "later").mkdir()
    (project / "tests" / "later" / "test_other.py").write_text("def test_other():\n    pass\n")
    assert suites.main([]) == 1
    out = capsys.readouterr().out
    assert "=== later" in out
    assert out.endswith("2 passed, 1 failed, 0 skipped\n")


@pytest.mark.parametrize(("ci", "code"), [("true", 1), ("", 0)])
def test_a_skipped_test_names_its_reason_and_fails_only_on_ci(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ci: str, code: int
) -> None:
    monkeypatch.setenv("CI", ci)
    write_test(project, "pytest.skip('the moon is full')")
    assert suites.main(["unit"]) == code
    out = capsys.readouterr().out
    assert "the moon is full" in out
    assert out.endswith("0 passed, 0 failed, 1 skipped\n")


@pytest.mark.parametrize(("ci", "code"), [("true", 1), ("", 0)])
def test_a_suite_that_is_not_there_is_named_and_fails_on_ci(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], ci: str, code: int
) -> None:
    monkeypatch.setenv("CI", ci)
    assert suites.main(["later"]) == code
    assert "there is no tests/later" in capsys.readouterr().out


def test_a_suite_that_collects_nothing_fails_on_ci(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CI", "true")
    assert suites.main(["unit"]) == 1
    assert "no tests collected" in capsys.readouterr().out


def test_a_crash_of_the_whole_process_is_a_failure(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_test(project, "os.kill(os.getpid(), 11)")
    assert suites.main(["unit"]) == 1
    out = capsys.readouterr().out
    assert "signal SIGSEGV" in out
    assert out.endswith("0 passed, 1 failed, 0 skipped\n")


def test_a_test_file_that_does_not_import_is_a_failure(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "tests" / "test_it.py").write_text("import no_such_module\n")
    assert suites.main(["unit"]) == 1
    assert "1 failed" in capsys.readouterr().out


def test_a_hanging_suite_is_killed_at_its_limit(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(suites, "SUITES", (Suite("unit", ("tests",), limit_s=2),))
    write_test(project, "time.sleep(100)")
    assert suites.main(["unit"]) == 1
    assert "signal SIGKILL" in capsys.readouterr().out


def test_an_unknown_suite_is_a_usage_error() -> None:
    with pytest.raises(SystemExit) as stop:
        suites.main(["no-such-suite"])
    assert stop.value.code == 2


@pytest.mark.parametrize(
    ("text", "major"),
    [
        ('openjdk version "17.0.15" 2025-04-15', 17),
        ('java version "1.8.0_402"', 8),
        ('openjdk version "21" x', 21),
        ("", 0),
    ],
)
def test_java_versions_are_read_as_java_prints_them(text: str, major: int) -> None:
    assert suites.java_major(text) == major


def test_a_missing_java_is_named_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    assert suites.main(["conformance"]) == 1
    assert "apt-get install openjdk-17-jdk-headless maven" in capsys.readouterr().err


def test_several_reasons_stand_below_each_other_in_the_table() -> None:
    shown = suites.table([Outcome("unit", 1, 0, 2, 0.5, ["first reason", "second reason"])])
    assert [line.split("  ")[-1].strip() for line in shown.splitlines()[2:]] == ["first reason", "second reason"]
