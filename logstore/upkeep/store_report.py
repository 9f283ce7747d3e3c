"""What is said of a store as a whole. Light: whoever only asks whether there is anything to look at loads no more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from logstore.errors import CorruptState
from logstore.directory.ends import read_applied_sequence
from logstore.directory.finding import Finding

if TYPE_CHECKING:
    from logstore.store import LogStore


@dataclass(slots=True)
class StoreReport:
    """What is wrong with the store as a whole, and what was done about it, or would be."""

    findings: list[Finding] = field(default_factory=list)
    actions: list[str] = field(default_factory=list)
    #: what nobody can know any more
    lost: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not self.findings

    def add(self, other: StoreReport) -> None:
        self.findings += other.findings
        self.actions += other.actions
        self.lost += other.lost


def is_unwritten(store: LogStore) -> bool:
    """Nothing was ever committed here, and the store is no copy: there is no ledger, and no topic misses one."""
    if store.fs.exists(store.layout.ledger) or store.fs.exists(store.layout.origin):
        return False
    for topic_id in store.fs.listdir(store.layout.state):
        try:
            if read_applied_sequence(store.fs, store.layout.ends(topic_id), limits=store.limits):
                return False
        except (CorruptState, ValueError, NotADirectoryError):
            continue  # told of the topic
    return True
