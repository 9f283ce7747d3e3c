"""`duramen import` and `duramen export`: partitions in from a stopped broker, and out to one."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.options import DryRun, OnlyTopics
from duramen.losses import loss_documents, print_losses
from duramen.session import DAMAGE, bad_usage, file_path, key_values, print_table, session, size_text, stop

if TYPE_CHECKING:
    from logstore.commit.store_face import Store
    from logstore.topics.registry import Topic
    from logstore.transfer.kafka_export import ExportedPartition
    from logstore.transfer.kafka_import import ImportedTopic
    from logstore.transfer.kafka_source import Source


TopicConfig = Annotated[
    list[str] | None,
    typer.Option(
        "--topic-config",
        metavar="NAME=VALUE",
        help="A setting of the imported topics; may be given again.",
        show_default=False,
    ),
]
MetadataDir = Annotated[
    str | None,
    typer.Option(
        "--metadata-dir",
        metavar="DIR",
        help="The directory with __cluster_metadata-0, if it is elsewhere.",
        show_default=False,
    ),
]
ServerProperties = Annotated[
    str | None,
    typer.Option(
        "--server-properties",
        metavar="FILE",
        help="The broker's settings file: defaults of its topics.",
        show_default=False,
    ),
]


def import_(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="KAFKA_LOG_DIR",
            help="A stopped broker's log directory, or a folder of topic-N folders.",
            show_default=False,
        ),
    ],
    topic: OnlyTopics = None,
    topic_config: TopicConfig = None,
    defaults: Annotated[
        bool, typer.Option("--defaults", help="Use the store's defaults for topics whose settings are not known.")
    ] = False,
    metadata_dir: MetadataDir = None,
    server_properties: ServerProperties = None,
    follow_links: Annotated[
        bool, typer.Option("--follow-links", help="Also take what symbolic links out of the directory lead to.")
    ] = False,
    link: Annotated[
        bool, typer.Option("--link", help="Hard links for sealed segments instead of copies; same file system only.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Adopt the topics of a stopped broker. The source is not changed; all its records count as committed."""
    from logstore.files import OS_FILES
    from logstore.limits import DEFAULT_LIMITS
    from logstore.transfer.kafka_import import plan_import
    from logstore.transfer.kafka_source import examine, stopped_source

    configs = key_values(topic_config, "--topic-config")
    source_path = os.path.abspath(file_path(directory))
    with stopped_source(OS_FILES, source_path):
        source = examine(
            OS_FILES,
            source_path,
            only=topic,
            limits=DEFAULT_LIMITS,
            metadata_directory=metadata_dir,
            server_properties=server_properties,
            follow_links=follow_links,
        )
        with session.open_any(create=not dry_run) as store:
            if dry_run:
                documents = _planned(source, plan_import(store, source, configs, defaults=defaults))
                damaged = False
            else:
                imported = _import_topics(store, source, configs, link=link, defaults=defaults)
                documents = [_imported(each) for each in imported]
                damaged = any(part.found_damage for each in imported for part in each.partitions)
    document = {
        "imported": not dry_run,
        "clean": source.clean,
        "topics": documents,
        "skipped": dict(source.skipped),
        "notes": list(source.notes),
    }
    session.answer(document, lambda: _print_import(documents, source, dry_run=dry_run))
    if damaged:
        stop(DAMAGE)


def _import_topics(
    store: Store, source: Source, configs: dict[str, str], *, link: bool, defaults: bool
) -> list[ImportedTopic]:
    from logstore.transfer.kafka_import import import_topics

    total = sum(each.size_bytes for topic in source.topics for each in topic.partitions)
    with session.progress("importing", total) as step:
        return import_topics(store, source, configs, link=link, defaults=defaults, progress=step)


def _planned(source: Source, topics: list[Topic]) -> list[dict[str, Any]]:
    return [
        {
            "name": each.name,
            "id": None,
            "kafka_id": each.topic_id,
            **_settings(topic),
            "partitions": [
                {"partition": part.partition.partition, "segments": part.segments, "size_bytes": part.size_bytes}
                for part in each.partitions
            ],
        }
        for each, topic in zip(source.topics, topics, strict=True)
    ]


def _imported(imported: ImportedTopic) -> dict[str, Any]:
    return {
        "name": imported.topic.name,
        "id": imported.topic.id,
        "kafka_id": imported.topic.kafka_id,
        **_settings(imported.topic),
        "partitions": [
            {
                "partition": part.partition.partition,
                "segments": part.segments,
                "size_bytes": part.size_bytes,
                "log_start_offset": part.log_start_offset,
                "log_end_offset": part.log_end_offset,
                "linked_bytes": part.linked_bytes,
                "copied_bytes": part.copied_bytes,
                "dropped_bytes": part.dropped_bytes,
                "cuts": part.cuts,
                "quarantined": part.quarantined,
            }
            for part in imported.partitions
        ],
    }


def _settings(topic: Topic) -> dict[str, Any]:
    return {"configs": dict(topic.configs), "settings_unknown": topic.settings_unknown}


def _print_import(documents: list[dict[str, Any]], source: Source, *, dry_run: bool) -> None:
    print_table(
        ["partition", "segments", "size", "log start", "log end", "cut off"],
        [
            [
                f"{each['name']}-{part['partition']}",
                part["segments"],
                size_text(part["size_bytes"]),
                part.get("log_start_offset", "?"),
                part.get("log_end_offset", "?"),
                size_text(part.get("dropped_bytes", 0)),
            ]
            for each in documents
            for part in each["partitions"]
        ],
        title="Would import" if dry_run else None,
    )
    for each in documents:
        for part in each["partitions"]:
            for cut in part.get("cuts", ()):
                print(
                    f"{each['name']}-{part['partition']}: {cut['dropped_bytes']} bytes cut off, {cut['reason']} "
                    f"(file {cut['file']}, position {cut['position']})"
                )
            for path in part.get("quarantined", ()):
                print(f"{each['name']}-{part['partition']}: set aside in {path}")
    for each in documents:
        if each["settings_unknown"]:
            why = source.settings[each["name"]].unknown
            print(
                f"{each['name']}: settings unknown, {why}; nothing of it is deleted or compacted until "
                f"`duramen topics alter {each['name']}` gives them"
            )
        elif each["configs"]:
            print(f"{each['name']}: {', '.join(f'{name}={value}' for name, value in each['configs'].items())}")
    for name, reason in source.skipped.items():
        print(f"skipped {name}: {reason}")
    for note in source.notes:
        print(note)


def export(
    directory: Annotated[
        str,
        typer.Argument(
            metavar="DIR", help="The directory to make, or a stopped broker's log directory.", show_default=False
        ),
    ],
    topic: OnlyTopics = None,
    topic_id: Annotated[
        list[str] | None,
        typer.Option(
            "--topic-id", metavar="TOPIC=ID", help="The id the broker's cluster knows the topic by.", show_default=False
        ),
    ] = None,
    unclean: Annotated[bool, typer.Option("--unclean", help="Let the broker check everything when it starts.")] = False,
    cluster_id: Annotated[
        str | None, typer.Option("--cluster-id", help="With --node-id: write meta.properties.", show_default=False)
    ] = None,
    node_id: Annotated[
        int | None,
        typer.Option("--node-id", min=0, help="With --cluster-id: write meta.properties.", show_default=False),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Make a directory a broker can mount, up to the high watermarks."""
    ids = key_values(topic_id, "--topic-id")
    if (cluster_id is None) != (node_id is None):
        raise bad_usage("--cluster-id and --node-id belong together")
    target = os.path.abspath(file_path(directory))
    with session.open_any() as store:
        from logstore.directory.checkpoint import MetaProperties
        from logstore.topic import new_topic_id
        from logstore.transfer import kafka_export

        topics = [store.topic(name) for name in topic] if topic else store.topics()
        if not topics:
            raise bad_usage("the store has no topics")
        if dry_run:
            kafka_export.check_topic_ids(topics, ids)
            kafka_export.check_target(store, target, topics)
            partitions = _exportable(store, topics, ids)
            clean = not unclean
        else:
            identity = None
            if cluster_id is not None and node_id is not None:
                identity = MetaProperties(node_id=node_id, cluster_id=cluster_id, directory_id=new_topic_id())
            total = sum(store.log_bytes(each, number) for each in topics for number in range(each.partitions))
            with session.progress("exporting", total) as step:
                done = kafka_export.export_topics(
                    store, target, topics, topic_ids=ids, unclean=unclean, identity=identity, progress=step
                )
            partitions = [_exported(each) for each in done.partitions]
            clean = done.clean
    document = {"exported": not dry_run, "directory": target, "clean": clean, "partitions": partitions}
    session.answer(document, lambda: _print_export(document))


def _exportable(store: Store, topics: list[Topic], ids: dict[str, str]) -> list[dict[str, Any]]:
    return [
        {
            "topic": each.name,
            "partition": number,
            "topic_id": ids.get(each.name, each.export_id),
            "log_start_offset": store.partition_state(each, number).log_start_offset,
            "log_end_offset": store.high_watermark(each, number),
        }
        for each in topics
        for number in range(each.partitions)
    ]


def _exported(partition: ExportedPartition) -> dict[str, Any]:
    return {
        "topic": partition.partition.topic,
        "partition": partition.partition.partition,
        "topic_id": partition.topic_id,
        "log_start_offset": partition.log_start_offset,
        "log_end_offset": partition.log_end_offset,
        "segments": partition.segments,
        "linked_bytes": partition.linked_bytes,
        "copied_bytes": partition.copied_bytes,
        "losses": loss_documents(partition.losses),
    }


def _print_export(document: dict[str, Any]) -> None:
    print_table(
        ["partition", "log start", "log end", "linked", "copied", "topic id"],
        [
            [
                f"{each['topic']}-{each['partition']}",
                each["log_start_offset"],
                each["log_end_offset"],
                size_text(each.get("linked_bytes", 0)),
                size_text(each.get("copied_bytes", 0)),
                each["topic_id"],
            ]
            for each in document["partitions"]
        ],
        title=f"{'Exported' if document['exported'] else 'Would export'} to {document['directory']}",
    )
    for each in document["partitions"]:
        # A broker has no place for them: to its consumers the offsets look compacted.
        print_losses(f"{each['topic']}-{each['partition']}", each.get("losses", ()))
    trusted = document["clean"]
    print("the broker will trust it as it is" if trusted else "the broker will check everything when it starts")
