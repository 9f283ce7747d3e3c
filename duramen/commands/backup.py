"""`duramen backup`: a consistent copy of a live store."""

from __future__ import annotations

import os
from functools import partial
from typing import Annotated, Any

import typer

from duramen.commands.options import DryRun
from duramen.session import print_table, session, size_text


def backup(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="TARGET", help="A new or empty directory for the copy, or the URL of a prefix.", show_default=False
        ),
    ],
    copy: Annotated[bool, typer.Option("--copy", help="Copy sealed segments even where hard links would do.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Copy the store as of one moment, while appends go on; the copy is a store of its own."""
    from logstore.objects.opening import is_url
    from logstore.store import open_store
    from logstore.upkeep import backing_up

    target = directory if is_url(directory) else os.path.abspath(directory)
    with session.open_any() as store:
        sizes: list[dict[str, Any]] = [
            {"topic": topic.name, "partition": number, "size_bytes": store.log_bytes(topic, number)}
            for topic in store.topics()
            for number in range(topic.partitions)
        ]
        if dry_run:
            backing_up.check_target(store, target)
            partitions = sizes
        else:
            with session.progress("backing up", sum(each["size_bytes"] for each in sizes)) as step:
                done = backing_up.back_up(store, target, partial(open_store, create=True), link=not copy, progress=step)
            partitions = [
                {
                    "topic": each.partition.topic,
                    "partition": each.partition.partition,
                    "log_start_offset": each.log_start_offset,
                    "log_end_offset": each.log_end_offset,
                    "linked_bytes": each.linked_bytes,
                    "copied_bytes": each.copied_bytes,
                }
                for each in done
            ]
    document: dict[str, Any] = {"backed_up": not dry_run, "directory": target, "partitions": partitions}

    def text() -> None:
        if dry_run:
            columns = ["topic", "partition", "size"]
            rows = [[each["topic"], each["partition"], size_text(each["size_bytes"])] for each in partitions]
        else:
            columns = ["topic", "partition", "log start", "log end", "linked", "copied"]
            rows = [
                [
                    each["topic"],
                    each["partition"],
                    each["log_start_offset"],
                    each["log_end_offset"],
                    size_text(each["linked_bytes"]),
                    size_text(each["copied_bytes"]),
                ]
                for each in partitions
            ]
        print_table(columns, rows, title=f"{'Would back up' if dry_run else 'Backed up'} to {target}")

    session.answer(document, text)
