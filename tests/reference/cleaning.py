"""One pass over a log that nobody else uses, without a store around it: no locks, no plan, no receipt."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping

from logstore.cleaner.cleaner import SWAP_BYTES, plan_pass, run_pass
from logstore.cleaner.engine import LocalEngine
from logstore.cleaner.filter import LastRecord
from logstore.cleaner.work import CleaningOptions, LogToClean, PassReport
from logstore.config import LogConfig
from logstore.directory.state import read_state
from logstore.directory.swap import finish_swap
from logstore.files import FileSystem
from logstore.limits import DEFAULT_LIMITS, Limits
from logstore.records.offset_map import MapSettings
from logstore.topic import TopicPartition


def clean_partition(
    fs: FileSystem,
    directory: str,
    *,
    partition: TopicPartition,
    config: LogConfig,
    state_path: str,
    first_uncleanable_offset: int,
    now_ms: int,
    map_settings: MapSettings,
    producers: Mapping[int, LastRecord],
    threads: int = 1,
    groups_at_once: int | None = None,
    folder: str | None = None,
    options: CleaningOptions = CleaningOptions(),  # noqa: B008 (frozen)
    limits: Limits = DEFAULT_LIMITS,
    swap_bytes: int = SWAP_BYTES,
) -> PassReport:
    """A pass over a log nobody else uses, by this process."""
    state = read_state(fs, state_path, limits=limits)
    assert state is not None
    state = finish_swap(fs, directory, state_path, state)
    first_dirty = max(state.first_dirty_offset, state.log_start_offset)
    work = plan_pass(
        fs,
        LogToClean(partition, directory, state, config, first_dirty, first_uncleanable_offset),
        now_ms=now_ms,
        map_settings=map_settings,
        producers=producers,
        options=options,
        limits=limits,
    )
    folder = folder or directory + ".cleaning"
    fs.mkdir(folder)
    try:
        engine = LocalEngine(fs, threads=threads, groups_at_once=groups_at_once)
        return run_pass(fs, work, engine=engine, state_path=state_path, folder=folder, swap_bytes=swap_bytes)
    finally:
        with contextlib.suppress(OSError):
            for name in fs.listdir(folder):
                fs.unlink(os.path.join(folder, name))
            fs.rmdir(folder)
