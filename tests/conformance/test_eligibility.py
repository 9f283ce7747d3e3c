"""Which log is cleaned, from where to where: our rules give what Kafka's cleaner manager says of the same log.

Logs, checkpoints, clocks and settings are random; Kafka answers many questions about one opening of a log. A failing
one names its seed: DURAMEN_SEED repeats it.
"""

from __future__ import annotations

import os
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from conformance.compaction_logs import THEMES, random_story
from conformance.kafka import Kafka, Verdict
from conformance.workload import NOW_MS, PARTITION, UnsyncedFiles, cleaner_facts, cleaner_rules
from logstore.cleaner.eligibility import CleanerFacts, Due, Lookups, cleanable
from logstore.clock import ManualClock
from logstore.config import LogConfig
from reference.partition_writer import PartitionWriter

SOAK = os.environ.get("DURAMEN_SOAK") == "1"
LOGS = (60 if SOAK else 3) * len(THEMES)
QUESTIONS = 40
Question = tuple[int, "int | None", dict[str, Any]]


def random_question(rng: random.Random, end_offset: int, last_ms: int) -> Question:
    """A time, a checkpoint that may be anywhere, and settings."""
    now_ms = last_ms + rng.choice((-100_000, -5000, -300, 0, 1, 1000, 60_000, 10**9))
    inside = rng.randint(0, end_offset)
    checkpoint = rng.choice((None, 0, inside, inside, end_offset, end_offset + 1))
    settings = {
        "cleanup.policy": rng.choice(("compact", "compact,delete")),
        "min.compaction.lag.ms": rng.choice((0, 0, 1, 1000, 30_000)),
        "max.compaction.lag.ms": rng.choice((2**63 - 1, 30_000, 60_000, 10**8)),
        "min.cleanable.dirty.ratio": rng.choice((0.0, 0.1, 0.5, 0.9, 1.0)),
    }
    return now_ms, checkpoint, settings


def assert_same_verdict(facts: CleanerFacts, log: PartitionWriter, question: Question, theirs: Verdict) -> Due | None:
    now_ms, _, settings = question
    bases = {segment.base_offset: segment for segment in log.segments}
    ours = cleanable(
        facts,
        cleaner_rules(LogConfig.from_mapping(settings)),
        now_ms=now_ms,
        looks=Lookups(lambda base_offset: bases[base_offset].first_timestamp_ms),
    )
    where = f"{question}\nours {ours}\nKafka's {theirs}\n{facts}"
    assert ours.first_dirty_offset == theirs.first_dirty_offset, where
    assert ours.checkpoint_reset == theirs.checkpoint_reset, where
    assert (ours.due is not None) == theirs.eligible, where
    if log.size_bytes == 0:
        return None  # Kafka never asks for the rest
    assert ours.first_uncleanable_offset == theirs.first_uncleanable_offset, where
    assert (ours.clean_bytes, ours.cleanable_bytes) == (theirs.clean_bytes, theirs.cleanable_bytes), where
    if ours.clean_bytes + ours.cleanable_bytes:  # Kafka divides nothing by nothing
        assert ours.ratio == theirs.cleanable_ratio, where
    if ours.cleanable_bytes:
        assert (ours.due is Due.MAX_LAG) == theirs.must_clean, where
        assert ours.late_ms == theirs.compaction_delay_ms, where
    return ours.due


@pytest.mark.timeout(24 * 3600 if SOAK else 300)
def test_our_rules_say_what_kafkas_cleaner_manager_says(kafka: Kafka, scratch: Path, seed: int) -> None:
    seen: Counter[str] = Counter()
    for number in range(LOGS):
        rng = random.Random(f"{seed} {number}")
        story = random_story(f"{seed} {number}", THEMES[number % len(THEMES)])
        turn = story.rounds[0]
        directory = scratch / str(number) / str(PARTITION)
        run = kafka.append(directory, turn.operations, story.config, now_ms=turn.opened_ms)
        for path in directory.glob("*.log"):  # counts where no record has a timestamp
            mtime_ns = (NOW_MS + rng.randint(0, 60_000)) * 1_000_000
            os.utime(path, ns=(mtime_ns, mtime_ns))
        questions = [random_question(rng, run.closed.log_end_offset, turn.now_ms) for _ in range(QUESTIONS)]
        verdicts = kafka.cleanable(directory, questions, config=story.config, log_start_offset=turn.log_start_offset)
        with PartitionWriter.open(
            str(directory),
            partition=PARTITION,
            config=LogConfig.from_mapping(story.config),
            clean=True,
            log_start_offset=turn.log_start_offset,
            clock=ManualClock(turn.now_ms),
            fs=UnsyncedFiles(),
            background_flush=False,
        ) as log:
            for question, theirs in zip(questions, verdicts, strict=True):
                due = assert_same_verdict(cleaner_facts(log, question[1]), log, question, theirs)
                seen["not due" if due is None else due.name] += 1
                seen["reset"] += theirs.checkpoint_reset
                seen["held back"] += theirs.first_uncleanable_offset < log.segments[-1].base_offset
        shutil.rmtree(directory.parent)
    print(f"{LOGS} logs, {LOGS * QUESTIONS} questions: {dict(seen)}")
    for outcome in ("not due", Due.RATIO.name, Due.MAX_LAG.name, "reset", "held back"):
        assert seen[outcome] > 0, outcome
