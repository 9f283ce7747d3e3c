"""`duramen offsets` and `duramen describe`: where partitions begin and end, and what is in force for a topic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.health import counts_of, examined, origin_document, origin_text, print_store, store_document
from duramen.commands.options import Partition, Topics, chosen_topics, partition_numbers
from duramen.losses import loss_documents, print_losses
from duramen.moments import moment_ms
from duramen.session import BadUsage, bad_usage, print_pairs, print_table, seconds_text, session, size_text, time_text

if TYPE_CHECKING:
    from collections.abc import Iterable

    from logstore.commit.store_face import Store
    from logstore.directory.state import PartitionState
    from logstore.ledger import Ledger, SegmentRow
    from logstore.topics.registry import Topic


def offsets(
    topics: Topics = None,
    partition: Partition = None,
    timestamp: Annotated[
        str | None,
        typer.Option(
            "--timestamp",
            metavar="TIME|earliest|latest|max-timestamp",
            help="Also the first offset at or after this time.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Show where partitions begin and end."""
    at_ms = _timestamp(timestamp)
    with session.open_any() as store:
        rows = [
            _offsets(store, topic, number, at_ms)
            for topic in chosen_topics(store, topics)
            for number in partition_numbers(topic, partition)
        ]
    columns = ["log_start_offset", "high_watermark", "recovery_point"]
    if at_ms is not None:
        columns += ["found_offset", "found_timestamp"]
    session.answer(
        {"offsets": rows},
        lambda: print_table(
            ["partition", *(name.replace("_", " ") for name in columns)],
            [[f"{row['topic']}-{row['partition']}", *(_shown(name, row[name]) for name in columns)] for row in rows],
        ),
    )


def _shown(name: str, value: Any) -> object:
    return time_text(value) if name == "found_timestamp" else value


def _timestamp(text: str | None) -> int | None:
    special = {"latest": -1, "earliest": -2, "max-timestamp": -3}
    if text is None or text in special:
        return special[text] if text else None
    try:
        return moment_ms(text)
    except BadUsage as error:
        raise bad_usage(f"--timestamp takes earliest, latest, max-timestamp or a time: {error}") from None


def _offsets(store: Store, topic: Topic, number: int, at_ms: int | None) -> dict[str, Any]:
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
    with session.open_any() as store:
        whole = examined(store, deep=False)
        origin = origin_document(store)
        read_only = store.is_read_only
        ledger = counts_of(store) if whole.sound else None
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
        ["partition", "log start", "high watermark", "recovery point", "segments", "size", "newest record"],
        [
            [
                each["partition"],
                each["log_start_offset"],
                each["high_watermark"],
                each["recovery_point"],
                each["segments"],
                size_text(each["size_bytes"]),
                seconds_text(each["largest_timestamp_ms"]),
            ]
            for each in document["partitions"]
        ],
    )
    counted = [each for each in document["partitions"] if each["counted_segments"]]
    if counted:
        print()
        print_table(
            ["partition", "counted segments", "records", "keys", "tombstones"],
            [
                [
                    each["partition"],
                    f"{each['counted_segments']} of {each['segments']}",
                    each["records"],
                    each["keys"],
                    each["tombstones"],
                ]
                for each in counted
            ],
        )
    for each in document["partitions"]:
        print_losses(f"{document['name']}-{each['partition']}", each["losses"])
    print()
    print_table(
        ["setting", "value", "source"],
        [[each["name"], each["value"], _source(each)] for each in document["settings"]],
    )


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


def _describe(store: Store, topic: Topic, ledger: Ledger | None) -> dict[str, Any]:
    from logstore.setting import format_value

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
