"""`recover` of `duramen.json`, which says that there is a store, and has its settings.

It comes last when a store is made or copied, so a place without it is a store only if its ledger is whole. What it said
is nowhere else: the store gets a new id, and no settings of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from logstore.bucket.commit_file import SUMMARY, decode_summary
from logstore.bucket.keys import STORE, new_nonce
from logstore.errors import LedgerError, NotAStore, ObjectMissing

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore


def look_at_identity(store: BucketStore) -> str | None:
    """What is wrong with it; None: nothing. Raises NotAStore where nothing says that there ever was a store."""
    try:
        store.check_made()
        return None
    except NotAStore as error:
        problem = error
    try:
        store.objects.head(STORE)
        return f"{STORE} cannot be read: {problem.what}"
    except ObjectMissing:
        pass
    try:
        decode_summary(store.objects.get(SUMMARY)[0], limits=store.limits)
    except (ObjectMissing, LedgerError):
        raise problem from None
    return f"{STORE} is gone"


def make_identity(store: BucketStore) -> str:
    """Make it again where it is gone or damaged; returns what was done."""
    try:
        data, version = store.objects.get(STORE)
    except ObjectMissing:
        store.make_id(None)
        return "made again with a new id; settings of the store as a whole are lost"
    kept = f"quarantine/{STORE}-{new_nonce()}"
    store.objects.put(kept, [data])
    store.make_id(version)
    return f"made again with a new id; settings of the store as a whole are lost, what was there is kept in {kept}"
