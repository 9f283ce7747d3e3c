"""The mutation fuzzer: a minute of it in the suite, any number of cases on demand, and that it would notice.

`DURAMEN_FUZZ_SECONDS` or `DURAMEN_FUZZ_CASES` say how long, `DURAMEN_SEED` where to begin. A finding names its case:
`python tests/fuzz/mutation.py --seed S --case N` runs that one again.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from fuzz import mutation
from fuzz.mutation import BLOCK_CASES, Outcome, block_target, block_words, case_input, fuzz, mutate
from fuzz.targets import Target, all_targets

SECONDS = float(os.environ.get("DURAMEN_FUZZ_SECONDS", "10"))
CASES = int(os.environ.get("DURAMEN_FUZZ_CASES", "0"))


def test_no_mutated_input_does_more_than_raise_a_typed_error(seed: int, tmp_path: Path) -> None:
    seed &= 0xFFFFFFFF  # enough, and shorter to type
    workers = min(os.cpu_count() or 1, 2)
    outcome = fuzz(seed, seconds=0 if CASES else SECONDS, cases=CASES, workers=workers, progress=tmp_path)
    print(f"seed {seed}: {outcome}")
    assert not outcome.findings, _told(outcome)
    assert outcome.cases >= CASES
    assert outcome.cases > 1000


def _told(outcome: Outcome) -> str:
    lines = [f"{outcome}; inputs are in {mutation.OUT}"]
    for finding in outcome.findings:
        lines.append(f"--seed {finding['seed']} --case {finding['case']} ({finding['target']}):\n{finding['what']}")
    return "\n".join(lines)


def test_a_case_follows_from_its_seed_and_number() -> None:
    targets = all_targets()
    words = block_words(5, 3)
    target = block_target(targets, words[0])
    for at in (0, 7, BLOCK_CASES - 1):
        again, data = case_input(targets, 5, 3 * BLOCK_CASES + at)
        assert again.name == target.name
        assert data == bytes(mutate(target, words[at + 1]))


def test_every_target_takes_its_own_corpus() -> None:
    """A reader that refused everything would never be found wanting."""
    for target in all_targets():
        for data in target.corpus:
            target.run(data)
            target.run(bytes(target.repair(bytearray(data), 1)))


def test_mutations_reach_every_target_and_change_most_inputs() -> None:
    targets = all_targets()
    seen = {block_target(targets, block_words(1, block)[0]).name for block in range(400)}
    assert seen == {target.name for target in targets}
    for target in targets:
        changed = sum(bytes(mutate(target, words)) not in target.corpus for words in block_words(2, 0)[1:])
        assert changed > BLOCK_CASES // 2


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("segfault", "SIGSEGV"),
        ("hang", "no end after"),
        ("slow", "took more than"),
        ("memory", "MemoryError"),
        ("untyped", "KeyError"),
    ],
)
def test_a_fault_is_found_and_its_input_kept(
    fault: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fault == "hang":
        monkeypatch.setattr(mutation, "HANG_SECONDS", 15.0)
    found = tmp_path / "found"  # what is found here is no news
    outcome = fuzz(11, seconds=20.0, workers=1, progress=tmp_path, out=found, self_test=fault)
    assert outcome.findings
    finding = outcome.findings[0]
    assert told in str(finding["what"])
    number = finding["case"]
    assert isinstance(number, int)
    target, data = case_input((_any_target(),), 11, number)
    assert not data[0] & 1
    assert not data[1] & 1
    assert (found / f"broken-11-{number}.bin").read_bytes() == data
    assert target.name == "broken"


def _any_target() -> Target:
    return mutation._broken_target("")
