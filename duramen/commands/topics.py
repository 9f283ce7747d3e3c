"""`duramen topics`: create, list, describe, alter and delete topics."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.health import origin_document, origin_text, strays_of
from duramen.commands.options import complete_topic
from duramen.session import (
    DAMAGE,
    bad_usage,
    count_text,
    key_values,
    print_pairs,
    print_table,
    session,
    size_text,
    stop,
    time_text,
)
from duramen.tables import Wrong

if TYPE_CHECKING:
    from logstore.commit.store_face import Store
    from logstore.topics.registry import Topic

app = typer.Typer(help="Create, list, describe, alter and delete topics.", no_args_is_help=True, rich_markup_mode=None)

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="Name of the topic.", show_default=False, autocompletion=complete_topic),
]
Configs = Annotated[
    list[str] | None,
    typer.Option(
        "--config", metavar="NAME=VALUE", help="A setting of the topic; may be given again.", show_default=False
    ),
]
_UNKNOWN = "unknown: nothing is deleted or compacted until `duramen topics alter` gives them, or says --defaults"
_KEYS_MOVE = (
    "with {after} partitions instead of {before}, most keys of {name} get their new records in another partition. "
    "Records written before stay where they are, so compaction keeps an old and a new value of such a key, and "
    "restores merge all partitions, which is slower. A new topic with {after} partitions, filled from this one, "
    "avoids that."
)
ConfigFile = Annotated[
    str | None,
    typer.Option(
        "--config-file", metavar="FILE", help="A TOML file of settings; --config is stronger.", show_default=False
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Check and show, but change nothing.")]


@app.command()
def create(
    name: Name,
    partitions: Annotated[int, typer.Option("--partitions", min=1, help="Number of partitions.")] = 1,
    config: Configs = None,
    config_file: ConfigFile = None,
    dry_run: DryRun = False,
) -> None:
    """Create a topic; makes the store too when there is none."""
    configs = _configs(config, config_file)
    with session.open_any(create=not dry_run) as store:
        topic = store.create_topic(name, partitions=partitions, configs=configs, dry_run=dry_run)
        document = {"topic": _document(store, topic), "created": not dry_run}
        partitions_text = f"{topic.name} with {count_text(topic.partitions, 'partition')}"
        text = f"Would create {partitions_text}" if dry_run else f"Created {partitions_text}, id {topic.id}"
        session.answer(document, lambda: print(text))


@app.command("list")
def list_() -> None:
    """List the topics of the store."""
    from logstore.upkeep.strays import readable_topics

    with session.open_any() as store:
        documents = [_document(store, topic) | _extent(store, topic) for topic in readable_topics(store)[0]]
        strays = strays_of(store)

    def text() -> None:
        print_table(
            ["topic", "partitions", "size", "records", "cleanup.policy"],
            [[each["name"], each["partitions"], *_extent_text(each), _policy(each)] for each in documents],
        )
        for stray in strays:
            print(f"{stray.what} (file {stray.file})", file=sys.stderr)
        if strays:
            print("`duramen recover --dry-run` says what can be brought back", file=sys.stderr)

    lost = [{"what": stray.what, "file": stray.file, "topic": stray.name} for stray in strays]
    session.answer({"topics": documents, "strays": lost}, text)
    if strays:
        stop(DAMAGE)


@app.command()
def describe(name: Name) -> None:
    """Show a topic's id, partitions and own settings (`duramen describe` shows all that are in force)."""
    with session.open_any() as store:
        document = _document(store, store.topic(name))
        origin = origin_document(store)

    def text() -> None:
        print_pairs(
            [
                ("topic", document["name"]),
                ("id", document["id"]),
                ("Kafka's id", document["kafka_id"]),
                ("partitions", document["partitions"]),
                ("created", time_text(document["created_ms"])),
                ("config version", document["config_version"]),
                *([("settings", _UNKNOWN)] if document["settings_unknown"] else []),
                *((key, value) for key, value in document["configs"].items()),
                *([("store", origin_text(origin))] if origin else []),
            ]
        )

    session.answer({"topic": document, "origin": origin}, text)


@app.command()
def alter(
    name: Name,
    config: Configs = None,
    config_file: ConfigFile = None,
    unset: Annotated[
        list[str] | None,
        typer.Option(
            "--unset", metavar="NAME", help="Back to the store's default; may be given again.", show_default=False
        ),
    ] = None,
    partitions: Annotated[
        int | None,
        typer.Option("--partitions", min=1, help="New number of partitions; it can only grow.", show_default=False),
    ] = None,
    defaults: Annotated[
        bool,
        typer.Option("--defaults", help="The topic's settings were not known: use the store's defaults."),
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Change a topic's settings or add partitions."""
    configs = _configs(config, config_file)
    if not configs and not unset and partitions is None and not defaults:
        raise bad_usage("nothing to alter: give --config, --config-file, --unset, --partitions or --defaults")
    with session.open_any() as store:
        before = store.topic(name)
        topic = store.alter_topic(
            name, configs=configs, unset=unset or (), partitions=partitions, defaults=defaults, dry_run=dry_run
        )
        warnings = []
        if before.keyed and topic.partitions > before.partitions and store.log_config(topic).compact:
            warnings.append(_KEYS_MOVE.format(name=name, before=before.partitions, after=topic.partitions))
        changes = topic.config_version != before.config_version
        document = {"topic": _document(store, topic), "altered": changes and not dry_run, "warnings": warnings}
    verb = "Nothing to change:" if not changes else "Would alter" if dry_run else "Altered"
    for warning in warnings:
        print(f"warning: {warning}", file=sys.stderr)

    def text() -> None:
        print(f"{verb} {topic.name} with {count_text(topic.partitions, 'partition')}")
        print_pairs(topic.configs.items())

    session.answer(document, text)


@app.command()
def delete(
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask for confirmation.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Delete a topic and all its records."""
    with session.open_any() as store:
        topic = store.topic(name)
        if not dry_run:
            session.confirm(
                f"Delete {name}, {count_text(topic.partitions, 'partition')} and all their records?", yes=yes
            )
            store.delete_topic(name)
        document = {"topic": _document(store, topic), "deleted": not dry_run}
    verb = "Would delete" if dry_run else "Deleted"
    partitions_text = count_text(topic.partitions, "partition")
    session.answer(document, lambda: print(f"{verb} {name} with {partitions_text}, id {topic.id}"))


def _extent(store: Store, topic: Topic) -> dict[str, Any]:
    """Size and records by what the small files say; where compaction was, fewer records than offsets are left."""
    from logstore.errors import DuramenError

    size_bytes, records, exact = 0, 0, True
    try:
        ends = store.ends(topic).high_watermarks
        for number in range(topic.partitions):
            state = store.partition_state(topic, number)
            size_bytes += store.log_bytes(topic, number)
            records += max(ends[number] - state.log_start_offset, 0)
            exact &= state.first_dirty_offset <= state.log_start_offset and not state.losses
    except DuramenError:  # `verify` says what is wrong
        return {"size_bytes": None, "records": None, "records_exact": False}
    return {"size_bytes": size_bytes, "records": records, "records_exact": exact}


def _extent_text(document: dict[str, Any]) -> tuple[str, str]:
    if document["size_bytes"] is None:
        return Wrong("?"), Wrong("?")
    return size_text(document["size_bytes"]), ("" if document["records_exact"] else "≤") + str(document["records"])


def _policy(document: dict[str, Any]) -> str:
    return "(settings unknown)" if document["settings_unknown"] else document["cleanup_policy"] or "(none)"


def _configs(config: list[str] | None, config_file: str | None) -> dict[str, object]:
    from logstore.settings import topic_setting
    from logstore.settings_file import load_toml

    found: dict[str, object] = load_toml(config_file) if config_file else {}
    for name in found:
        topic_setting(name, file=config_file)
    found.update(key_values(config, "--config"))
    return found


def _document(store: Store, topic: Topic) -> dict[str, Any]:
    from logstore.setting import format_value

    policy = store.topic_settings(topic)["cleanup.policy"].value
    return {
        "name": topic.name,
        "id": topic.id,
        "kafka_id": topic.export_id,
        "partitions": topic.partitions,
        "cleanup_policy": format_value(policy),
        "configs": dict(topic.configs),
        "config_version": topic.config_version,
        "created_ms": topic.created_ms,
        "settings_unknown": topic.settings_unknown,
    }
