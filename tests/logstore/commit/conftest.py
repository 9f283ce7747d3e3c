"""What tests of the commit path share."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from logstore.directory import tails


@pytest.fixture
def boot(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Each call starts the machine again."""
    started = 0

    def again() -> None:
        nonlocal started
        started += 1
        monkeypatch.setattr(tails, "boot_id", lambda: f"boot-{started}")

    again()
    return again
