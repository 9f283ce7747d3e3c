"""`duramen copy`: topics from the store into another one, of either kind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.options import DryRun, OnlyTopics
from duramen.session import bad_usage, print_table, session, size_text

if TYPE_CHECKING:
    from logstore.ledger.rows import AppProgress
    from logstore.topics.registry import Topic
    from logstore.transfer.copying import CopiedPartition


def copy(
    target: Annotated[
        str, typer.Argument(metavar="STORE", help="The other store: a path, or a URL.", show_default=False)
    ],
    topic: OnlyTopics = None,
    create: Annotated[bool, typer.Option("--create", help="Make the other store where there is none.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Copy topics as of one moment, with their offsets and settings; queries go on in the copy where they were."""
    from logstore.store import open_store
    from logstore.transfer.copying import copy_topics, plan_copy

    with session.open_any() as store, open_store(target, create=create and not dry_run) as other:
        topics = [store.topic(name) for name in topic] if topic else store.topics()
        if not topics:
            raise bad_usage("the store has no topics")
        partitions: list[dict[str, Any]]
        if dry_run:
            plan_copy(store, other, topics)
            partitions, apps = [_planned(each, n) for each in topics for n in range(each.partitions)], []
        else:
            total = sum(store.log_bytes(each, number) for each in topics for number in range(each.partitions))
            with session.progress("copying", total) as step:
                done = copy_topics(store, other, topics, progress=step)
            partitions, apps = [_copied(each) for each in done.partitions], [_app(each) for each in done.apps]
    document = {"copied": not dry_run, "target": target, "partitions": partitions, "apps": apps}

    def text() -> None:
        print_table(
            ["topic", "partition", "log start", "log end", "copied"],
            [
                [each["topic"], each["partition"], each["log_start_offset"], each["log_end_offset"], _size(each)]
                for each in partitions
            ],
            title=f"{'Would copy' if dry_run else 'Copied'} to {target}",
        )
        for each in apps:
            print(f"app {each['app_id']}: goes on behind batch {each['batch_id']}")

    session.answer(document, text)


def _planned(topic: Topic, number: int) -> dict[str, Any]:
    return {
        "topic": topic.name,
        "partition": number,
        "log_start_offset": None,
        "log_end_offset": None,
        "copied_bytes": None,
    }


def _copied(each: CopiedPartition) -> dict[str, Any]:
    return {
        "topic": each.partition.topic,
        "partition": each.partition.partition,
        "log_start_offset": each.log_start_offset,
        "log_end_offset": each.log_end_offset,
        "copied_bytes": each.copied_bytes,
    }


def _app(each: AppProgress) -> dict[str, Any]:
    return {"app_id": each.app_id, "batch_id": each.batch_id, "query_id": each.query_id}


def _size(each: dict[str, Any]) -> str:
    return "" if each["copied_bytes"] is None else size_text(each["copied_bytes"])
