"""Whatever threads do side by side is taken up in order, by one at a time, and nobody waits for what has failed."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import CancelledError, ThreadPoolExecutor

import pytest

from logstore.cleaner.ordered_work import OrderedWork

AHEAD = 5


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_items_are_taken_up_in_order(seed: int, threads: int) -> None:
    turns: OrderedWork[int] = OrderedWork(AHEAD)
    taken: list[int] = []
    busy = threading.Lock()
    begun = 0

    def work(number: int) -> None:
        nonlocal begun
        rng = random.Random(f"{seed} {number}")
        turns.begin(number)
        begun = max(begun, number)
        assert number < len(taken) + AHEAD + 1, "far ahead of what was taken up"
        time.sleep(rng.choice((0, 0, 0.001, 0.004)))
        if rng.random() < 0.2:
            turns.await_turn(number)
            assert taken == list(range(number)), "all before it are done, and none behind"
        for item in turns.hand_in(number, number):
            assert busy.acquire(blocking=False), "two at once"
            time.sleep(rng.choice((0, 0.001)))
            taken.append(item)
            busy.release()

    with ThreadPoolExecutor(threads) as pool:
        for future in [pool.submit(work, number) for number in range(200)]:
            future.result(timeout=60)
    assert taken == list(range(200))


@pytest.mark.parametrize("where", ["before", "while it is taken up"])
def test_a_failure_lets_nobody_wait(where: str) -> None:
    turns: OrderedWork[int] = OrderedWork(3)
    taken: list[int] = []

    def work(number: int) -> None:
        try:
            turns.begin(number)
            if number == 7 and where == "before":
                raise ValueError("as if")
            time.sleep(0.002)
            for item in turns.hand_in(number, number):
                if item == 7:
                    raise ValueError("as if")
                taken.append(item)
            if number > 7:
                turns.await_turn(number + 1)
        except BaseException:
            turns.fail()
            raise

    with ThreadPoolExecutor(3) as pool:
        errors = [future.exception(timeout=60) for future in [pool.submit(work, number) for number in range(30)]]
    assert taken == list(range(len(taken)))
    assert 7 not in taken
    assert {type(error) for error in errors if error is not None} == {ValueError, CancelledError}
    assert sum(isinstance(error, ValueError) for error in errors) == 1
