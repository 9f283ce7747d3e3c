"""The options that several commands take, and the topics and partitions they mean."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from duramen.moments import moment_ms
from duramen.session import bad_usage, session

if TYPE_CHECKING:
    from logstore.topics.readable import ReadableStore
    from logstore.topics.registry import Topic


def complete_topic(ctx: typer.Context, incomplete: str) -> list[str]:
    """Names of topics for the shell; nothing where there is no store, or anything else is wrong with it."""
    import contextlib

    with contextlib.suppress(Exception):
        session.store_path = ctx.find_root().params.get("store") or os.environ.get("DURAMEN_STORE")
        with session.open_any() as store:
            return [name for name in sorted(store.topic_names()) if name.startswith(incomplete)]
    return []


OneTopic = Annotated[
    str, typer.Argument(metavar="TOPIC", help="The topic.", show_default=False, autocompletion=complete_topic)
]
Topics = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[TOPIC...]",
        help="The topics; all of them when none is named.",
        show_default=False,
        autocompletion=complete_topic,
    ),
]
OnlyTopics = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        metavar="TOPIC",
        help="Only this topic; may be given again.",
        show_default=False,
        autocompletion=complete_topic,
    ),
]
Partition = Annotated[int | None, typer.Option("--partition", min=0, help="Only this partition.", show_default=False)]
NowMs = Annotated[
    int | None,
    typer.Option(
        "--now-ms", metavar="TIME", parser=moment_ms, help="Decide as if it were this time.", show_default="now"
    ),
]
Force = Annotated[bool, typer.Option("--force", help="Ignore the dirty ratio; min.compaction.lag.ms still holds.")]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be done; change nothing.")]


class Encoding(str, Enum):
    UTF8 = "utf8"
    BASE64 = "base64"


def chosen_topics(store: ReadableStore, names: list[str] | None) -> list[Topic]:
    return [store.topic(name) for name in names] if names else store.topics()


def chosen_partitions(
    store: ReadableStore, names: list[str] | None, partition: int | None, *, tolerant: bool = False
) -> list[tuple[Topic, int]]:
    """Unless `tolerant`, a topic whose file is damaged is an error."""
    if partition is not None and (not names or len(names) != 1):
        raise bad_usage("--partition needs exactly one topic")
    topics = readable_topics(store) if tolerant and not names else chosen_topics(store, names)
    return [(topic, number) for topic in topics for number in partition_numbers(topic, partition)]


def partition_numbers(topic: Topic, partition: int | None) -> Sequence[int]:
    """The one that is asked for, or all. Raises where there is no such partition."""
    return range(topic.partitions) if partition is None else [topic.partition(partition).partition]


def readable_topics(store: ReadableStore) -> list[Topic]:
    from logstore.upkeep import strays

    return strays.readable_topics(store)[0]
