"""Which settings the topics of a broker's directory have: from its metadata log, and from its server.properties.

A topic's own settings and the brokers' dynamic defaults are in the metadata log. What a broker has in its
server.properties only is known when that file is given. Where it could be what keeps records (retention of a topic that
deletes), the topic's settings count as unknown. Rules only; what follows from them is the store's.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from logstore.config import Source, resolve_topic
from logstore.directory.checkpoint import parse_properties, read_meta_properties
from logstore.errors import DuramenError, ImportRefused
from logstore.files import FileSystem, read_whole
from logstore.limits import Limits
from logstore.segment.names import CLUSTER_METADATA_DIRECTORY, META_PROPERTIES
from logstore.setting import Scope, format_value
from logstore.settings import STORE_FILE_NAMES, TOPIC_SETTINGS
from logstore.transfer.kraft_metadata import ClusterMetadata, read_cluster_metadata

_PROPERTIES_BYTES_MAX = 1 << 20


@dataclass(frozen=True, slots=True)
class TopicSettings:
    """A topic's settings as far as its cluster has them; `unknown` says what is missing, None when nothing is."""

    configs: Mapping[str, str] = field(default_factory=dict)
    unknown: str | None = "there is no metadata log to read them from"


def read_settings(
    fs: FileSystem,
    directory: str,
    topics: Iterable[tuple[str, str | None]],
    *,
    metadata_directory: str | None,
    server_properties: str | None,
    limits: Limits,
) -> tuple[dict[str, TopicSettings], list[str]]:
    """Settings of the topics (name, and id where it is known) of a log directory, and notes.

    Raises ImportRefused when what was asked for by name cannot be read.
    """
    notes: list[str] = []
    path = metadata_directory or os.path.join(directory, CLUSTER_METADATA_DIRECTORY)
    if metadata_directory and os.path.basename(os.path.normpath(path)) != CLUSTER_METADATA_DIRECTORY:
        path = os.path.join(path, CLUSTER_METADATA_DIRECTORY)
    metadata = None
    if fs.exists(path):
        try:
            metadata = read_cluster_metadata(fs, path, limits=limits)
        except DuramenError as error:
            if metadata_directory:
                raise ImportRefused(f"the metadata log cannot be read: {error.what}", file=path) from error
            notes.append(f"the metadata log is not used: {error}")
    elif metadata_directory:
        raise ImportRefused("there is no metadata log", file=path)
    static = _static(fs, server_properties) if server_properties else None
    broker = {**(static or {}), **(_dynamic(fs, directory, metadata, limits) if metadata else {})}
    found = {}
    for name, topic_id in topics:
        found[name] = topic_settings(metadata, name, topic_id, broker, is_static_known=static is not None, notes=notes)
    return found, notes


def topic_settings(
    metadata: ClusterMetadata | None,
    name: str,
    topic_id: str | None,
    broker: Mapping[str, str],
    *,
    is_static_known: bool,
    notes: list[str],
) -> TopicSettings:
    """The rule for one topic; `broker` are the settings in force on its broker, under broker names."""
    topic = metadata.topic(name) if metadata else None
    if topic is None:
        return (
            TopicSettings() if metadata is None else TopicSettings(unknown="the metadata log does not know the topic")
        )
    if topic_id is not None and topic_id != topic.topic_id:
        return TopicSettings(unknown=f"the metadata log knows a topic of that name, but with id {topic.topic_id}")
    overrides = {key: value for key, value in topic.configs.items() if key in TOPIC_SETTINGS}
    passed_by = sorted(set(topic.configs) - set(overrides))
    if passed_by:
        notes.append(f"{name}: settings that mean nothing here: {', '.join(passed_by)}")
    try:
        resolved = resolve_topic(overrides, broker=broker)
    except DuramenError as error:
        return TopicSettings(unknown=f"its settings do not hold here: {error.what}")
    configs = {key: format_value(one.value) for key, one in resolved.items() if one.source is not Source.DEFAULT}
    policy, retention = resolved["cleanup.policy"], resolved["retention.ms"]
    deletes = isinstance(policy.value, frozenset) and "delete" in policy.value
    if deletes and retention.source is Source.DEFAULT and not is_static_known:
        return TopicSettings(configs, "retention.ms is its broker's default, which only server.properties has")
    return TopicSettings(configs, None)


def _dynamic(fs: FileSystem, directory: str, metadata: ClusterMetadata, limits: Limits) -> dict[str, str]:
    try:
        properties = read_meta_properties(fs, os.path.join(directory, META_PROPERTIES), limits=limits)
    except DuramenError:
        properties = None
    return _of_topics(metadata.broker_settings(properties.node_id if properties else None))


def _static(fs: FileSystem, path: str) -> dict[str, str]:
    try:
        data = read_whole(fs, path, limit=_PROPERTIES_BYTES_MAX)
    except OSError as error:
        raise ImportRefused(f"cannot be read: {error.strerror}", file=path) from error
    return _of_topics({name: value for name, (_, value) in parse_properties(data, file=path).items()})


def _of_topics(settings: Mapping[str, str]) -> dict[str, str]:
    """Those that are defaults of topic settings; the names of a topic's own settings are none."""
    return {
        name: value
        for name, value in settings.items()
        if any(setting.scope is Scope.TOPIC for setting in STORE_FILE_NAMES.get(name, ()))
    }
