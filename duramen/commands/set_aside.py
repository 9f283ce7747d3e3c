"""`duramen set-aside`: the way out of a committed batch that cannot be appended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.options import DryRun
from duramen.session import DAMAGE, session, stop

if TYPE_CHECKING:
    from logstore.commit.set_aside import SetAsideBatch

TopicName = Annotated[str, typer.Argument(metavar="TOPIC", show_default=False)]
Yes = Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")]


def set_aside(topic: TopicName, dry_run: DryRun = False, yes: Yes = False) -> None:
    """Give up a committed batch that cannot be appended; what can be read of it is kept. Exit 3 when records are lost.

    The topic continues after the batch. What is lost is recorded, and the staged files are kept.
    """
    from logstore.commit.committer import Committer
    from logstore.commit.set_aside import set_aside as give_up

    with session.open() as store:
        committer = Committer(store)
        found = give_up(committer, store.topic(topic), dry_run=True)
        if found is not None and not dry_run:
            session.confirm(f"Give up {found.lost_records} records of commit {found.sequence} of {topic}?", yes=yes)
            found = give_up(committer, store.topic(topic))
    session.answer(_document(topic, found, dry_run), lambda: _print(topic, found, dry_run))
    if found is not None and found.losses:
        stop(DAMAGE)


def _document(topic: str, found: SetAsideBatch | None, dry_run: bool) -> dict[str, Any]:
    document: dict[str, Any] = {"topic": topic, "dry_run": dry_run, "set_aside": None}
    if found is not None:
        document["set_aside"] = {
            "sequence": found.sequence,
            "plan_id": found.plan_id,
            "reason": found.reason,
            "lost_records": found.lost_records,
            "kept": found.kept,
            "losses": [
                {"partition": number, "from": loss.base_offset, "to": loss.end_offset, "reason": loss.reason}
                for number, losses in sorted(found.losses.items())
                for loss in losses
            ],
        }
    return document


def _print(topic: str, found: SetAsideBatch | None, dry_run: bool) -> None:
    if found is None:
        print(f"{topic}: every committed batch could be appended")
        return
    print(f"{topic}: commit {found.sequence} cannot be appended: {found.reason}")
    for number, losses in sorted(found.losses.items()):
        for loss in losses:
            verb = "would be" if dry_run else "are"
            print(f"{topic}-{number}: offsets {loss.base_offset} to {loss.end_offset} {verb} lost ({loss.reason})")
    if found.kept:
        print(f"its staged files are kept in {found.kept}")
