"""`verify` of several partitions at a time gives what it gives of one after the other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from duramen.commands.verify import verify_all
from logstore.store import LogStore
from logstore.upkeep import verify as engine

SIDE_BY_SIDE = "num.recovery.threads.per.data.dir = 2\n"


def test_the_answer_is_the_same_side_by_side(
    duramen: Callable[..., Any], orders: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    segment = next(orders.glob("logs/orders-1/*.log"))
    data = bytearray(segment.read_bytes())
    data[100] ^= 1
    segment.write_bytes(data)
    one_at_a_time = duramen("verify", output="json")
    (orders / "duramen.toml").write_text(SIDE_BY_SIDE)
    both = threading.Barrier(2, timeout=100)
    verified = engine.verify_partition

    def together(*given: object, **named: object) -> engine.Verification:
        both.wait()
        return verified(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "verify_partition", together)
    side_by_side = duramen("verify", output="json")
    assert (one_at_a_time.code, side_by_side.code) == (3, 3)
    assert side_by_side.json == one_at_a_time.json
    assert [each["sound"] for each in side_by_side.json["partitions"]] == [True, False]


def test_an_interrupt_ends_the_other_partition_too(orders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (orders / "duramen.toml").write_text(SIDE_BY_SIDE)
    verified = engine.verify_partition
    ended: list[BaseException] = []
    begun = threading.Event()

    def first_is_interrupted(*given: object, **named: object) -> engine.Verification:
        if "orders-0" in str(given[1]):
            assert begun.wait(100)
            raise KeyboardInterrupt
        begun.set()
        try:
            while True:
                verified(*given, **named)  # type: ignore[arg-type]
        except BaseException as error:
            ended.append(error)
            raise

    monkeypatch.setattr(engine, "verify_partition", first_is_interrupted)
    with LogStore(orders) as store, pytest.raises(KeyboardInterrupt):
        verify_all(store, [(store.topic("orders"), number) for number in range(2)])
    assert [type(error) for error in ended] == [KeyboardInterrupt]
