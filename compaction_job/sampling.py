"""Takes the samples of which the history consists: sizes of topics, once a minute and after every run.

The daemon's tick and each run of compaction take them. Reading never does. A sample that
cannot be taken or written is left out; it never makes work fail.
"""

from __future__ import annotations

import logging
from collections.abc import Collection

from compaction_job.figures import PartitionFigures, Section, figures_of
from logstore.compaction.maintenance import MaintainedStore, Maintenance
from logstore.directory.history import Sample, write_sample
from logstore.errors import DuramenError
from logstore.files import OS_FILES

#: the owner in the header of the history of the store as a whole
WHOLE = "store"

_log = logging.getLogger("duramen.history")


def take_samples(
    store: MaintainedStore, topics: Collection[str] | None = None, *, maintenance: Maintenance | None = None
) -> None:
    """One sample of each topic, or of these, now; of the store as a whole when all are asked for.

    Its `maintenance`, where it is at hand, saves opening the ledger again.
    """
    maintenance = maintenance or store.maintenance()
    path = maintenance.history_path(None)
    if path is None or store.is_read_only:
        return
    now_ms = store.clock.now_ms()
    whole = Sample(now_ms, 0, 0, 0, 0)
    try:
        counted = maintenance.counts()
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
            own = maintenance.history_path(topic.id)
            assert own is not None
            write_sample(OS_FILES, own, topic.id, sample)
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
            write_sample(OS_FILES, path, WHOLE, whole)
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
