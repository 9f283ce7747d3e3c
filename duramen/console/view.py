"""What every answer is made from: the open store and what is kept of it between requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from duramen.console.figures import Figures
from duramen.console.ledger_history import LedgerHistory
from duramen.console.problems import Refused
from logstore.compaction.maintenance import MaintainedStore
from logstore.store import LogStore

if TYPE_CHECKING:
    from duramen.console.actions import Actions
    from duramen.console.formats import MessageSchemas


class View:
    """One store as the console sees it. For any number of threads; nothing here changes the store."""

    def __init__(self, store: MaintainedStore, *, schemas: MessageSchemas, actions: Actions | None = None) -> None:
        self.store = store
        self.schemas = schemas
        #: None in a report
        self.actions = actions
        self.maintenance = store.maintenance()
        self.ledger = LedgerHistory(self.maintenance)
        self.figures = Figures(store, self.maintenance.fresh_s, self.ledger)

    @property
    def now_ms(self) -> int:
        return self.store.clock.now_ms()

    def directory(self) -> LogStore:
        """The store, for what looks into files. Raises Refused for one in a bucket."""
        if not isinstance(self.store, LogStore):
            raise Refused(422, "NotInABucket", "this looks into the files of a directory; the store is in a bucket")
        return self.store
