"""What every answer is made from: the open store and what is kept of it between requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

from duramen.console.figures import Figures
from duramen.console.ledger_view import LedgerView
from logstore.store import LogStore

if TYPE_CHECKING:
    from duramen.console.actions import Actions
    from duramen.console.formats import MessageSchemas


class View:
    """One store as the console sees it. For any number of threads; nothing here changes the store."""

    def __init__(self, store: LogStore, *, schemas: MessageSchemas, actions: Actions | None = None) -> None:
        self.store = store
        self.schemas = schemas
        #: None in a report
        self.actions = actions
        self.ledger = LedgerView(store)
        self.figures = Figures(store, self.ledger)

    @property
    def now_ms(self) -> int:
        return self.store.clock.now_ms()
