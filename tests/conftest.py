"""What every test gets: one Hypothesis profile for all machines, and a seed that a failing test prints.

`DURAMEN_SEED=N` repeats a run of a seeded test, `DURAMEN_SOAK=1` asks for the long form of a test that has one. On CI
(`CI=true`) examples and seeds are the same in every run, so that a change is judged by what it changed; new ones are
tried by everybody who runs the tests, and by `make soak`.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from logstore.records.record import Record
    from logstore.store import LogStore

# Hypothesis would choose another profile on CI by itself; a test should be the same everywhere. No deadline: the first
# call of a kernel may compile it.
settings.register_profile(
    "duramen", max_examples=200, deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("soak", settings.get_profile("duramen"), max_examples=20_000)
settings.register_profile("ci", settings.get_profile("duramen"), derandomize=True, database=None)
ON_CI = os.environ.get("CI") == "true"
settings.load_profile("soak" if os.environ.get("DURAMEN_SOAK") == "1" else "ci" if ON_CI else "duramen")
CI_SEED = 20261117


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for the test's own random numbers, new in every run but on CI; reported when the test fails."""
    given = os.environ.get("DURAMEN_SEED")
    chosen = int(given) if given else CI_SEED if ON_CI else random.SystemRandom().getrandbits(63)
    request.node.add_report_section("setup", "seed", f"repeat with DURAMEN_SEED={chosen}")
    return chosen


@pytest.fixture
def append(store: LogStore) -> Callable[..., None]:
    """Appends records to a topic as one batch; `partitions` names theirs."""
    import pyarrow as pa

    from logstore.commit.committer import Committer
    from logstore.commit.produce import append_table, table_of

    committer = Committer(store)

    def run(topic: str, records: list[Record], partitions: list[int] | None = None) -> None:
        table = table_of(records)
        if partitions is not None:
            table = table.append_column("partition", pa.array(partitions, pa.int32()))
        append_table(committer, topic, table)

    return run


@pytest.fixture
def read_all() -> Callable[[LogStore, str], dict[int, list[Record]]]:
    """All records of a topic, by partition."""

    def read(store: LogStore, name: str) -> dict[int, list[Record]]:
        topic = store.topic(name)
        found = {}
        for number in range(topic.partitions):
            reader = store.reader(topic, number)
            found[number] = list(reader.records(reader.log_start_offset()))
            reader.close()
        return found

    return read
