"""`duramen offsets` and `duramen describe`: where partitions begin and end, and what is in force for a topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.health import examined, origin_document, origin_text, print_store, store_document
from duramen.commands.options import Partition, Topics, chosen_topics, partition_numbers
from duramen.losses import loss_documents, print_losses
from duramen.session import bad_usage, print_pairs, print_table, session, size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logstore.directory.state import PartitionState
    from logstore.ledger import Ledger, SegmentRow
    from logstore.store import LogStore
    from logstore.topics.registry import Topic


def offsets(
    topics: Topics = None,
    partition: Partition = None,
    timestamp: Annotated[
        str | None,
        typer.Option(
            "--timestamp",
            metavar="MS|earliest|latest|max-timestamp",
            help="Also the first offset at or after this time.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show where partitions begin and end."""
    at_ms = _timestamp(timestamp)
    with session.open() as store:
        rows = [
            _offsets(store, topic, number, at_ms)
            for topic in chosen_topics(store, topics)
            for number in partition_numbers(topic, partition)
        ]
    columns = ["topic", "partition", "log_start_offset", "high_watermark", "recovery_point"]
    if at_ms is not None:
        columns += ["found_offset", "found_timestamp"]
    session.answer(
        {"offsets": rows},
        lambda: print_table(
            [name.replace("_", " ") for name in columns], [[row[name] for name in columns] for row in rows]
        ),
    )


def _timestamp(text: str | None) -> int | None:
    special = {"latest": -1, "earliest": -2, "max-timestamp": -3}
    if text is None or text in special:
        return special[text] if text else None
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise bad_usage(f"--timestamp takes milliseconds, earliest, latest or max-timestamp, not {text!r}")
    return int(text)


def _offsets(store: LogStore, topic: Topic, number: int, at_ms: int | None) -> dict[str, Any]:
    ends = store.ends(topic)
    state = store.partition_state(topic, number)
    row: dict[str, Any] = {
        "topic": topic.name,
        "partition": number,
        "log_start_offset": state.log_start_offset,
        "high_watermark": ends.high_watermarks[number],
        "recovery_point": ends.recovery_points[number],
    }
    if at_ms is not None:
        found = store.reader(topic, number).offset_for_timestamp(at_ms)
        row["found_offset"] = None if found is None else found.offset
        row["found_timestamp"] = None if found is None else found.timestamp_ms
    return row


def describe(topics: Topics = None) -> None:
    """Show topics with every setting in force and its source, and what each partition holds."""
    with session.open() as store:
        whole = examined(store, deep=False)
        origin = origin_document(store)
        read_only = store.is_read_only
        # Looking does not make a ledger where nothing was ever committed, and starts faster without.
        ledger = store.ledger() if whole.sound and store.has_ledger else None
        documents = [_describe(store, topic, ledger) for topic in chosen_topics(store, topics)]

    def text() -> None:
        print_store(whole)
        if origin is not None:
            print(f"store: {origin_text(origin)}")
        if read_only:
            print("store: open for reading only; batches that were committed and not yet published are not shown")
        for number, document in enumerate(documents):
            if number:
                print()
            _print_topic(document)

    session.answer(
        {"store": store_document(whole) | {"origin": origin, "read_only": read_only}, "topics": documents}, text
    )


def _print_topic(document: dict[str, Any]) -> None:
    print_pairs(
        [
            ("topic", document["name"]),
            ("id", document["id"]),
            ("Kafka's id", document["kafka_id"]),
            ("created", time_text(document["created_ms"])),
            ("config version", document["config_version"]),
            *([("settings", "unknown: nothing is deleted")] if document["settings_unknown"] else []),
        ]
    )
    print()
    print_table(
        [
            "partition",
            "log start",
            "high watermark",
            "recovery point",
            "segments",
            "size",
            "newest record",
            "counted",
            "records",
            "keys",
            "tombstones",
        ],
        [
            [
                each["partition"],
                each["log_start_offset"],
                each["high_watermark"],
                each["recovery_point"],
                each["segments"],
                size_text(each["size_bytes"]),
                time_text(each["largest_timestamp_ms"]),
                *_counted_text(each),
            ]
            for each in document["partitions"]
        ],
    )
    for each in document["partitions"]:
        print_losses(f"{document['name']}-{each['partition']}", each["losses"])
    print()
    print_table(
        ["setting", "value", "source"],
        [[each["name"], each["value"], _source(each)] for each in document["settings"]],
    )


def _counted_text(partition: dict[str, Any]) -> list[object]:
    """What compaction counted, and in how many of the segments it did."""
    if not partition["counted_segments"]:
        return ["-"] * 4
    counted = f"{partition['counted_segments']} of {partition['segments']} segments"
    return [counted, partition["records"], partition["keys"], partition["tombstones"]]


def _counted(known: Iterable[SegmentRow], state: PartitionState) -> dict[str, int | None]:
    """True counts from the ledger, of segments that are still what was counted."""
    sizes = {each.base_offset: each.size_bytes for each in state.segments[:-1]}
    rows = [row for row in known if sizes.get(row.base_offset) == row.size_bytes]
    return {
        "counted_segments": len(rows),
        "records": sum(row.records for row in rows) if rows else None,
        "keys": sum(row.keys for row in rows) if rows else None,
        "tombstones": sum(row.tombstones for row in rows) if rows else None,
    }


def _source(setting: dict[str, Any]) -> str:
    source = str(setting["source"])
    return f"{source} ({setting['source_name']})" if source == "store file" else source


def _describe(store: LogStore, topic: Topic, ledger: Ledger | None) -> dict[str, Any]:
    from logstore.config import format_value

    ends = store.ends(topic)
    counts = {} if ledger is None else ledger.segments_of(topic.id)
    partitions = []
    for number in range(topic.partitions):
        state = store.partition_state(topic, number)
        partition: dict[str, Any] = {
            "partition": number,
            "log_start_offset": state.log_start_offset,
            "high_watermark": ends.high_watermarks[number],
            "recovery_point": ends.recovery_points[number],
            "first_dirty_offset": state.first_dirty_offset,
            "segments": len(state.segments),
            "size_bytes": store.log_bytes(topic, number),
            "largest_timestamp_ms": store.largest_timestamp_ms(topic, number),
            "losses": loss_documents(state.losses),
        }
        partitions.append(partition | _counted(counts.get(number, ()), state))
    return {
        "name": topic.name,
        "id": topic.id,
        "kafka_id": topic.export_id,
        "created_ms": topic.created_ms,
        "settings_unknown": topic.settings_unknown,
        "config_version": topic.config_version,
        "partitions": partitions,
        "settings": [
            {
                "name": name,
                "value": format_value(each.value),
                "source": each.source.value,
                "source_name": each.source_name,
            }
            for name, each in store.topic_settings(topic).items()
        ],
    }
