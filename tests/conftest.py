"""What every test gets: one Hypothesis profile for all machines, and a seed that a failing test prints.

`DURAMEN_SEED=N` repeats a run of a seeded test, `DURAMEN_SOAK=1` asks for the long form of a test that has one. On CI
(`CI=true`) examples and seeds are the same in every run, so that a change is judged by what it changed; new ones are
tried by everybody who runs the tests, and by `make soak`.
"""

from __future__ import annotations

import os
import random

import pytest
from hypothesis import HealthCheck, settings

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
