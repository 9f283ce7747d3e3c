"""What a pass may use: memory for its offset map, bandwidth, threads; and the advice when a map is too small."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace

from logstore.cleaner.versions import Order
from logstore.cleaner.work import PIECE_BYTES, PassWork
from logstore.records.offset_map import MapSettings
from logstore.topics.readable import ReadableStore


@dataclass(frozen=True, slots=True)
class Budget:
    """What one pass may take; a run divides its own among those it makes at once."""

    map_bytes: int
    load_factor: float = 0.9
    bytes_per_second: float = float("inf")
    algorithm: str = "siphash"
    #: what one thread reads and writes at a time
    piece_bytes: int = PIECE_BYTES
    #: this many passes have as much at the same time
    passes: int = 1

    def divided(self, passes: int) -> Budget:
        return replace(
            self,
            map_bytes=self.map_bytes // passes,
            bytes_per_second=self.bytes_per_second / passes,
            passes=self.passes * passes,
        )


@dataclass(frozen=True, slots=True)
class MapAdvice:
    """What to set so that a pass whose map was full gets through: the buffer, or fewer threads to share it."""

    #: log.cleaner.dedupe.buffer.size
    buffer_bytes: int
    #: log.cleaner.threads; None: even one thread would have too little
    threads: int | None

    def __str__(self) -> str:
        fewer = "" if self.threads is None else f", or log.cleaner.threads = {self.threads}"
        return f"log.cleaner.dedupe.buffer.size = {self.buffer_bytes}{fewer}"


def map_advice(wanted_bytes: int, budget: Budget) -> MapAdvice:
    """For a pass that wants so many bytes, where the budget's were too few."""
    wanted_bytes = max(wanted_bytes, budget.map_bytes + 1)
    threads = budget.map_bytes * budget.passes // wanted_bytes
    return MapAdvice(wanted_bytes * budget.passes, threads if 1 <= threads < budget.passes else None)


def cleaner_threads(store: ReadableStore) -> int | None:
    """log.cleaner.threads where the store's settings have it; None: as many as there are cores."""
    threads = store.given("log.cleaner.threads")
    return None if threads is None else max(threads, 1)


def budget_of(store: ReadableStore) -> Budget:
    """As the store's settings have it."""
    config = store.broker_config
    threads = cleaner_threads(store) or os.cpu_count() or 1
    piece_bytes = PIECE_BYTES
    io_bytes = store.given("log.cleaner.io.buffer.size")
    if io_bytes is not None:  # as Kafka divides it: a share for each thread, half of it to read and half to write
        piece_bytes = min(max(io_bytes // threads // 2, 1), PIECE_BYTES)
    return Budget(
        config.log_cleaner_dedupe_buffer_size,
        config.log_cleaner_io_buffer_load_factor,
        config.log_cleaner_io_max_bytes_per_second,
        config.duramen_cleaner_hash,
        piece_bytes,
    )


def map_settings(budget: Budget, order: Order) -> MapSettings:
    """The offset map of a pass, whose records go by `order`."""
    return MapSettings(
        budget.map_bytes, budget.load_factor, budget.algorithm, order=order.kind, header=order.header.encode()
    )


def with_budget(work: PassWork, budget: Budget) -> PassWork:
    """The work with what one of several passes at once may take."""
    settings = replace(work.map_settings, buffer_bytes=budget.map_bytes)
    return replace(
        work, map_settings=settings, bytes_per_second=budget.bytes_per_second, piece_bytes=budget.piece_bytes
    )
