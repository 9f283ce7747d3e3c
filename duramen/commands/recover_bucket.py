"""`duramen recover` of a store in a bucket."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from duramen.commands.options import chosen_partitions
from duramen.losses import joined_ranges, loss_documents, loss_text
from duramen.session import DAMAGE, session, stop

if TYPE_CHECKING:
    from logstore.bucket.mending import Mended
    from logstore.bucket.store import BucketStore
    from logstore.topics.registry import Topic


def recover_bucket(topics: list[str] | None, partition: int | None, *, readmit: bool, yes: bool, dry_run: bool) -> None:
    """Look first, ask before records are given up, then mend; exit 3 when there was damage."""
    from logstore.bucket.examining import mend_store
    from logstore.bucket.store import BucketStore

    ledger, agreed = _open_again(BucketStore(session.path, is_draft=True), yes=yes, dry_run=dry_run)
    if ledger and dry_run:  # nothing more can be looked at without it
        return _answer(ledger, [], dry_run=True)
    with session.open_bucket() as store:
        chosen = chosen_partitions(store, topics, partition)
        actions = [*ledger, *mend_store(store, dry_run=dry_run)]
        found = _mend_all(store, chosen, dry_run=True)
        lost = [f"{each.partition} {loss_text(loss)}" for each in found for loss in loss_documents(each.losses)]
        if not dry_run and set(lost) - agreed:
            session.confirm(f"Give up {', '.join(lost)}?", yes=yes)
        if not dry_run and any(each.found_damage for each in found):
            damaged = {each.partition for each in found if each.found_damage}
            found = _mend_all(store, [c for c in chosen if c[0].partition(c[1]) in damaged], dry_run=False)
        if readmit:
            _readmit_all(store, chosen, found, dry_run=dry_run)
    _answer(actions, found, dry_run=dry_run)


def _open_again(store: BucketStore, *, yes: bool, dry_run: bool) -> tuple[list[str], set[str]]:
    """What a store does not open without: what is done about it, and the losses that were agreed to."""
    from logstore.bucket.identity_mending import look_at_identity, make_identity
    from logstore.bucket.ledger_mending import carry_out, look_at_ledger

    identity, repair = look_at_identity(store), look_at_ledger(store)
    done = [] if identity is None else [f"{identity}: made again with a new id, without settings of the whole store"]
    lost = [f"{topic}-{number} offsets {first} to {end - 1}" for topic, number, first, end in repair.lost_offsets]
    done += repair.notes + [f"lost with its commit: {each}" for each in lost]
    if dry_run or not done:
        return done, set()
    if lost:
        session.confirm(f"Give up {', '.join(lost)}?", yes=yes)
    if identity is not None:
        session.confirm(f"{identity}. Make it again at {store.url}, with a new id?", yes=yes)
    if repair.notes:
        carry_out(store, repair)
    if identity is not None:
        done[0] = f"{identity}: {make_identity(store)}"
    return done, set(lost)


def _mend_all(store: BucketStore, chosen: list[tuple[Topic, int]], *, dry_run: bool) -> list[Mended]:
    from logstore.bucket.mending import mend_partition

    return [mend_partition(store, topic, number, dry_run=dry_run) for topic, number in chosen]


def _readmit_all(store: BucketStore, chosen: list[tuple[Topic, int]], found: list[Mended], *, dry_run: bool) -> None:
    """`found` gets what came back, of partitions that were sound as well."""
    from logstore.bucket.mending import Mended
    from logstore.bucket.readmitting import readmit_partition

    known = {each.partition: each for each in found}
    for topic, number in chosen:
        name = topic.partition(number)
        done = known.get(name) or Mended(name)
        readmit_partition(store, topic, number, done, dry_run=dry_run)
        if name not in known and (done.readmitted or done.held_back):
            found.append(done)


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
                "readmitted": [
                    {"source": source, "base_offset": first, "end_offset": end}
                    for source, first, end in joined_ranges(each.readmitted)
                ],
                "held_back": [
                    {"base_offset": first, "end_offset": end, "reason": why} for first, end, why in each.held_back
                ],
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
            would = "would be " if dry_run else ""
            for back in each["readmitted"]:
                print(f"{name}: offsets {back['base_offset']} to {back['end_offset'] - 1} {would}put back")
            for held in each["held_back"]:
                span = f"offsets {held['base_offset']} to {held['end_offset'] - 1}"
                print(f"{name}: {span} stay in quarantine: {held['reason']}")
        if sound and not any(each["readmitted"] or each["held_back"] for each in document["partitions"]):
            print("nothing to recover")

    session.answer(document, text)
    if not sound:
        stop(DAMAGE)
