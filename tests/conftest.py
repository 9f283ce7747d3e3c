"""What every test gets: one Hypothesis profile for all machines, and a seed that a failing test prints.

`DURAMEN_SEED=N` repeats a run of a seeded test, `DURAMEN_SOAK=1` asks for the long form of a test that has one.
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
settings.load_profile("soak" if os.environ.get("DURAMEN_SOAK") == "1" else "duramen")


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A seed for the test's own random numbers, new in every run; reported when the test fails."""
    given = os.environ.get("DURAMEN_SEED")
    chosen = int(given) if given else random.SystemRandom().getrandbits(63)
    request.node.add_report_section("setup", "seed", f"repeat with DURAMEN_SEED={chosen}")
    return chosen
