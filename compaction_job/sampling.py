"""Takes the samples of which the history consists: sizes of topics, once a minute and after every run.

The daemon's tick and each run of compaction take them. Reading never does. A sample that
cannot be taken or written is left out; it never makes work fail.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from compaction_job.figures import PartitionFigures, Section, figures_of, read_counts
from logstore.directory.history import Sample, write_sample
from logstore.errors import DuramenError
from logstore.ledger import Ledger
from logstore.store import LogStore

#: the owner in the header of the history of the store as a whole
WHOLE = "store"

_log = logging.getLogger("duramen.history")


def take_samples(store: LogStore, topics: Collection[str] | None = None, *, ledger: Ledger | None = None) -> None:
    """One sample of each topic, or of these, now; of the store as a whole when all are asked for.

    A `ledger` that is open already saves opening one.
    """
    if store.is_read_only:
        return
    now_ms = store.clock.now_ms()
    whole = Sample(now_ms, 0, 0, 0, 0)
    try:
        counted = read_counts(ledger or store.ledger())[1] if store.has_ledger else {}
        names = store.topic_names()
    except (DuramenError, OSError) as error:
        _log.debug("no sample: %s", error)
        return
    for name in names if topics is None else topics:
        try:
            topic = store.topic(name)
            config = store.log_config(topic)
            partitions = [
                figures_of(
                    store,
                    topic,
                    number,
                    config=config,
                    now_ms=now_ms,
                    counted=counted.get((topic.id, number), {}),
                    failures={},
                )
                for number in range(topic.partitions)
            ]
            sample = sample_of(partitions, now_ms)
            write_sample(store.fs, store.layout.history(topic.id), topic.id, sample)
        except (DuramenError, OSError) as error:
            _log.debug("no sample of %s: %s", name, error)
            continue
        whole = Sample(
            now_ms,
            whole.size_bytes + sample.size_bytes,
            whole.dirty_bytes + sample.dirty_bytes,
            whole.records + sample.records,
            whole.tombstones + sample.tombstones,
        )
    if topics is None:
        try:
            write_sample(store.fs, store.layout.history(None), WHOLE, whole)
        except OSError as error:
            _log.debug("no sample of the store: %s", error)


def sample_of(partitions: Collection[PartitionFigures], now_ms: int) -> Sample:
    """The sums over a topic's partitions."""
    return Sample(
        now_ms,
        sum(each.size_bytes for each in partitions),
        sum(each.by_section.get(Section.DIRTY, 0) for each in partitions),
        sum(each.records for each in partitions),
        sum(each.tombstones or 0 for each in partitions),
    )
