"""What `verify`, `recover` and `describe` say about the store as a whole: its ledger, its version, where it is from."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from duramen.session import time_text

if TYPE_CHECKING:
    from logstore.commit.store_face import Store
    from logstore.directory.finding import StoreReport
    from logstore.ledger import Ledger
    from logstore.topics.readable import ReadableStore
    from logstore.upkeep.strays import Stray


def examined(store: ReadableStore, *, deep: bool = True) -> StoreReport:
    """What is wrong with the store as a whole; the ledger's libraries are loaded only where there is one to look at."""
    from logstore.directory.finding import StoreReport
    from logstore.directory.identity import examine_identity
    from logstore.topics.opened import OpenStore
    from logstore.upkeep.side_files import examine_side_files

    if not isinstance(store, OpenStore):
        return StoreReport()  # opening one in a bucket reads its identity and its ledger
    report = examine_identity(store.fs, store.layout)
    report.add(examine_side_files(store))
    if not store.is_unwritten():
        from logstore.upkeep.repair import examine

        report.add(examine(store, deep=deep))
    return report


def strays_of(store: ReadableStore) -> list[Stray]:
    """What lies in the store and belongs to no topic; in a bucket a sweep looks for that."""
    from logstore.topics.opened import OpenStore
    from logstore.upkeep.strays import find_strays

    return find_strays(store, deep=False) if isinstance(store, OpenStore) else []


def counts_of(store: ReadableStore) -> Ledger | None:
    """The ledger with the counts of segments. Looking does not make one where nothing was ever committed, and starts
    faster without.
    """
    from logstore.topics.opened import OpenStore

    return store.ledger() if isinstance(store, OpenStore) and store.has_ledger else None


def origin_document(store: Store) -> dict[str, Any] | None:
    """Of what the store is a copy; None when it is none, or does not tell."""
    from logstore.errors import CorruptState

    try:
        origin = store.origin()
    except CorruptState:  # `verify` says so
        return None
    if origin is None:
        return None
    return {"source": origin.source, "taken_ms": origin.taken_ms, "restored_ms": origin.restored_ms}


def origin_text(origin: dict[str, Any]) -> str:
    copy = f"a backup of {origin['source']}, taken {time_text(origin['taken_ms'])}"
    if origin["restored_ms"] is None:
        return f"{copy}; nothing was written to it since"
    return f"restored from {copy}; written to since {time_text(origin['restored_ms'])}"


def store_document(report: StoreReport) -> dict[str, Any]:
    return {
        "sound": report.sound,
        "findings": [{"what": each.what, "file": each.file} for each in report.findings],
        "actions": report.actions,
        "lost": report.lost,
    }


def print_store(report: StoreReport) -> None:
    for each in report.findings:
        print(f"store: {each.what}" + (f" (file {each.file})" if each.file else ""))
    for line in [*report.actions, *report.lost]:
        print(f"store: {line}")
