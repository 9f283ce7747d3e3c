"""`duramen recover` of a store in a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from duramen.commands.options import chosen_partitions
from duramen.losses import loss_documents, loss_text
from duramen.session import DAMAGE, session, stop

if TYPE_CHECKING:
    from logstore.bucket.mending import Mended
    from logstore.bucket.store import BucketStore
    from logstore.topics.registry import Topic


def recover_bucket(topics: list[str] | None, partition: int | None, *, yes: bool, dry_run: bool) -> None:
    """Look first, ask before records are given up, then mend; exit 3 when there was damage."""
    from logstore.bucket.examining import mend_ledger, mend_store
    from logstore.bucket.store import BucketStore

    draft = BucketStore(session.path, is_draft=True)
    draft.check_made()
    ledger = mend_ledger(draft, dry_run=dry_run)
    if ledger and dry_run:  # nothing more can be looked at without it
        return _answer(ledger, [], dry_run=True)
    with session.open_bucket() as store:
        chosen = chosen_partitions(store, topics, partition)
        actions = [*ledger, *mend_store(store, dry_run=dry_run)]
        found = _mend_all(store, chosen, dry_run=True)
        lost = [f"{each.partition} {loss_text(loss)}" for each in found for loss in loss_documents(each.losses)]
        if lost and not dry_run:
            session.confirm(f"Give up {', '.join(lost)}?", yes=yes)
        if not dry_run and any(each.found_damage for each in found):
            damaged = {each.partition for each in found if each.found_damage}
            found = _mend_all(store, [c for c in chosen if c[0].partition(c[1]) in damaged], dry_run=False)
    _answer(actions, found, dry_run=dry_run)


def _mend_all(store: BucketStore, chosen: list[tuple[Topic, int]], *, dry_run: bool) -> list[Mended]:
    from logstore.bucket.mending import mend_partition

    return [mend_partition(store, topic, number, dry_run=dry_run) for topic, number in chosen]


def _answer(actions: list[str], found: list[Mended], *, dry_run: bool) -> None:
    sound = not actions and not any(each.found_damage for each in found)
    document: dict[str, Any] = {
        "recovered": not dry_run,
        "sound": sound,
        "store": {"sound": not actions, "actions": actions},
        "partitions": [
            {
                "topic": each.partition.topic,
                "partition": each.partition.partition,
                "findings": each.findings,
                "actions": each.actions,
                "losses": loss_documents(each.losses),
                "quarantined": each.kept,
            }
            for each in found
        ],
    }

    def text() -> None:
        for line in actions:
            print(f"store: {line}")
        for each in document["partitions"]:
            name = f"{each['topic']}-{each['partition']}"
            for line in (*each["findings"], *each["actions"]):
                print(f"{name}: {line}")
            for loss in each["losses"]:
                print(f"{name}: {'would be lost' if dry_run else 'lost'}: {loss_text(loss)} ({loss['reason']})")
            for key in each["quarantined"]:
                print(f"{name}: damaged bytes are kept in {key}")
        if sound:
            print("nothing to recover")

    session.answer(document, text)
    if not sound:
        stop(DAMAGE)
