"""What was committed and what compaction did in a directory, read from its ledger as columns. Implements `Tables`."""

from __future__ import annotations

import pyarrow as pa

from logstore.compaction.maintenance import Commits
from logstore.ledger import Ledger
from logstore.ledger.rows import COMMITS, RUNS
from logstore.topics.opened import OpenStore


class LedgerTables:
    """A store without a ledger has nothing in it, and is not given one by looking."""

    def __init__(self, store: OpenStore) -> None:
        self._store = store
        self._known: Ledger | None = None

    def _ledger(self) -> Ledger | None:
        if self._known is None and self._store.has_ledger:
            self._known = self._store.ledger()
        return self._known

    def versions(self) -> tuple[int, ...]:
        ledger = self._ledger()
        if ledger is None:
            return ()
        tables = (ledger.commits_table, ledger.runs_table, ledger.segments_table)
        return tuple(table.run(lambda table=table: table.version) for table in tables)  # type: ignore[misc]

    def runs(self, version: int) -> tuple[int, pa.Table]:
        ledger = self._ledger()
        if ledger is None:
            return version, RUNS.empty_table()
        table = ledger.runs_table
        nothing = RUNS.empty_table()
        return table.run(lambda: (version, nothing) if table.version == version else (table.version, table.read_all()))

    def commits(self, known: Commits, most: int) -> Commits:
        ledger = self._ledger()
        if ledger is None:
            return known
        table, names = ledger.commits_table, known.rows.column_names

        def look() -> Commits:
            if table.version == known.version:
                return known
            if known.version < 0:
                return _newest(ledger, names, most)
            newer = table.read_newer(known.version, names).sort_by("version")
            return Commits(table.version, pa.concat_tables([known.rows, newer]), known.complete)

        return table.run(look).newest(most)


def _newest(ledger: Ledger, names: list[str], most: int) -> Commits:
    """From the newest files, until there are enough."""
    table = ledger.commits_table
    empty = pa.schema([COMMITS.field(name) for name in names]).empty_table()
    found, rows = [], 0
    files = table.files()
    for file in reversed(files):
        found.append(table.read(file, names).cast(empty.schema))
        rows += found[-1].num_rows
        if rows >= most:
            break
    together = pa.concat_tables([empty, *found]).sort_by("version")
    return Commits(table.version, together, len(found) == len(files))
