"""The engine's own code as actors of the model: it runs as it is, and each of its requests waits for its turn.

An actor's code runs in a greenlet, and gives its request to the explorer of `model`. What would make two runs of one
order differ is taken from the world: names that are new, and the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import greenlet
import pytest

from bucket.model import Actor, Op, World
from logstore.bucket import keys
from logstore.bucket.elapsed import Elapsed
from logstore.objects.objects import Bytes, Head, Version


class WorldObjects:
    """Implements `Objects` over a world, without turns: for what happens before, and for the judge."""

    def __init__(self, world: World) -> None:
        self._world = world

    def _ask(self, op: Op) -> Any:
        return self._world.ask(op)

    def tick(self, ms: int = 0) -> None:
        """Time goes by; without any it is only waited for one's turn."""
        self._ask(Op("tick", value=ms))

    def create(self, key: str, data: bytes) -> Version:
        return self._ask(Op("create", key, data))  # type: ignore[no-any-return]

    def replace(self, key: str, data: bytes, seen: Version) -> Version:
        return self._ask(Op("replace", key, data, seen))  # type: ignore[no-any-return]

    def put(self, key: str, parts: Iterable[Bytes]) -> Version:
        return self._ask(Op("put", key, b"".join(parts)))  # type: ignore[no-any-return]

    def get(self, key: str) -> tuple[bytes, Version]:
        return self._ask(Op("get", key))  # type: ignore[no-any-return]

    def head(self, key: str) -> Head:
        return Head(key, 1, self._ask(Op("head", key)), Version("head"))

    def ranges(self, key: str, spans: Sequence[tuple[int, int]]) -> list[Bytes]:
        data, _ = self.get(key)
        return [data[begin:end] for begin, end in spans]

    def delete(self, keys: Sequence[str]) -> None:
        """One request, however many there are."""
        for key in keys[:1]:
            self._ask(Op("delete", key))
        for key in keys[1:]:
            WorldObjects._ask(self, Op("delete", key))

    def list(self, prefix: str, after: str = "") -> Iterator[Head]:
        return (head for head in self._ask(Op("list", f"{prefix}/")) if head.key > after)


class InTurn(WorldObjects):
    """The same, for the code of an actor: requests of these names wait for their turn, others come with the one before.

    What nobody else changes, or what only rises, need not wait.
    """

    def __init__(self, world: World, names: Sequence[str] = ("create", "replace", "put", "get", "delete")) -> None:
        super().__init__(world)
        self._names = names

    def _ask(self, op: Op) -> Any:
        if op.name not in self._names:
            return super()._ask(op)
        return greenlet.getcurrent().parent.switch(op)


def new_world() -> World:
    """Names begin anew with it."""
    greenlet.getcurrent().names = 0
    return World(timed=True)


class WorldClock:
    def __init__(self, world: World) -> None:
        self._world = world

    def now_ms(self) -> int:
        return self._world.now_ms

    def elapsed(self) -> Elapsed:
        return Elapsed(self.now_ms, self.now_ms)


def acting(name: str, work: Callable[[], None]) -> Actor:
    """`work` makes its requests on an `InTurn`."""
    running = greenlet.greenlet(work)
    running.name = name
    try:
        op = running.switch()
        while not running.dead:
            try:
                answer = yield op
            except GeneratorExit:
                raise
            except Exception as error:
                op = running.throw(error)
            else:
                op = running.switch(answer)
    finally:
        if not running.dead:
            running.throw(greenlet.GreenletExit)


def repeatable_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """New names by the actor and how many it had before."""

    def uuid4() -> SimpleNamespace:
        this = greenlet.getcurrent()
        this.names = getattr(this, "names", 0) + 1
        return SimpleNamespace(hex=f"{getattr(this, 'name', 'before')}{this.names}")

    monkeypatch.setattr(keys, "uuid", SimpleNamespace(uuid4=uuid4))
