"""A plan: everything that decides which bytes a batch becomes, written down before it is committed.

Applying a committed plan gives the same bytes every time and in every process: it names the staged files in order, each
partition's base and end offset, and all that rolling depends on (settings and clock).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from logstore.config import LogConfig
from logstore.directory.sealed import read_sealed, seal, whole_number, whole_numbers
from logstore.errors import AppendTooLarge, CorruptState
from logstore.files import FileSystem, replace_file
from logstore.limits import INT64_MAX, Limits

PLAN_FILE = "plan"
VERSION = 1


@dataclass(frozen=True, slots=True)
class TopicPlan:
    topic: str
    topic_id: str
    partitions: int
    config_version: int
    configs: dict[str, str]  # the topic's own settings and the store's, resolved, under Kafka's names
    sequence: int
    base_offsets: tuple[int, ...]
    end_offsets: tuple[int, ...]
    records: int
    bytes: int
    #: last stable offsets after the plan, of partitions in which it ends transactions
    stable_offsets: dict[int, int] = field(default_factory=dict)

    def log_config(self) -> LogConfig:
        return LogConfig.from_mapping(self.configs)

    @property
    def flush_messages(self) -> int:
        """So many records that are not flushed make a flush due."""
        return int(self.configs.get("flush.messages", INT64_MAX))

    @property
    def flush_ms(self) -> int:
        """So old a record that is not flushed makes a flush due."""
        return int(self.configs.get("flush.ms", INT64_MAX))


@dataclass(frozen=True, slots=True)
class Plan:
    plan_id: str
    now_ms: int
    files: tuple[str, ...]
    topics: tuple[TopicPlan, ...]
    #: whose batch it is: not needed to apply the plan, but a ledger that lost the commit is rebuilt from it
    app_id: str | None = None
    batch_id: int | None = None
    query_id: str | None = None

    def topic(self, topic_id: str) -> TopicPlan | None:
        return next((topic for topic in self.topics if topic.topic_id == topic_id), None)


def plan_document(plan: Plan) -> dict[str, object]:
    """The plan as JSON has it; `plan_from` reads it."""
    return {
        "plan_id": plan.plan_id,
        "now_ms": plan.now_ms,
        "files": list(plan.files),
        "app_id": plan.app_id,
        "batch_id": plan.batch_id,
        "query_id": plan.query_id,
        "topics": [
            {
                "topic": topic.topic,
                "topic_id": topic.topic_id,
                "partitions": topic.partitions,
                "config_version": topic.config_version,
                "configs": topic.configs,
                "sequence": topic.sequence,
                "base_offsets": list(topic.base_offsets),
                "end_offsets": list(topic.end_offsets),
                "records": topic.records,
                "bytes": topic.bytes,
                "stable_offsets": {str(number): offset for number, offset in topic.stable_offsets.items()},
            }
            for topic in plan.topics
        ],
    }


def plan_from(document: Mapping[str, object], *, file: str, name_of: Callable[[object], str]) -> Plan:
    """`name_of` checks the name of a staged file. Raises CorruptState."""
    try:
        files = tuple(name_of(name) for name in _items(document["files"]))
        topics = tuple(_topic(entry, file) for entry in _items(document["topics"]))
        return Plan(
            str(document["plan_id"]),
            whole_number(document, "now_ms", file=file),
            files,
            topics,
            app_id=_text_or_none(document.get("app_id")),
            batch_id=None if document.get("batch_id") is None else whole_number(document, "batch_id", file=file),
            query_id=_text_or_none(document.get("query_id")),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptState(f"malformed plan: {error}", file=file) from None


def check_size(data: bytes, limits: Limits) -> bytes:
    """Raises AppendTooLarge for a plan that nobody would read."""
    if len(data) > limits.side_file_bytes:
        raise AppendTooLarge(
            f"the plan of the batch has {len(data)} bytes; the largest that can be read has {limits.side_file_bytes}",
            hint="Send the batch in fewer files, or to fewer topics and partitions at a time",
        )
    return data


def write_plan(fs: FileSystem, folder: str, plan: Plan, *, limits: Limits) -> None:
    """Durable, file and folder, when this returns. Raises AppendTooLarge for one that `read_plan` would refuse."""
    data = check_size(seal(plan_document(plan), version=VERSION), limits)
    replace_file(fs, os.path.join(folder, PLAN_FILE), data)


def read_plan(fs: FileSystem, folder: str, *, limits: Limits) -> Plan:
    """Raises FileNotFoundError, CorruptState."""
    path = os.path.join(folder, PLAN_FILE)
    document = read_sealed(fs, path, version=VERSION, limit=limits.side_file_bytes)
    return plan_from(document, file=path, name_of=_file_name)


def _topic(entry: object, path: str) -> TopicPlan:
    if not isinstance(entry, dict):
        raise ValueError("a topic is not an object")
    return TopicPlan(
        str(entry["topic"]),
        str(entry["topic_id"]),
        whole_number(entry, "partitions", file=path),
        whole_number(entry, "config_version", file=path),
        {str(name): str(value) for name, value in entry["configs"].items()},
        whole_number(entry, "sequence", file=path),
        whole_numbers(entry, "base_offsets", file=path),
        whole_numbers(entry, "end_offsets", file=path),
        whole_number(entry, "records", file=path),
        whole_number(entry, "bytes", file=path),
        {
            int(number): whole_number(entry["stable_offsets"], number, file=path)
            for number in entry.get("stable_offsets", {})
        },
    )


def _text_or_none(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError("not a text")
    return value


def _items(value: object) -> list[object]:
    if not isinstance(value, list):
        raise ValueError("not a list")
    return value


def _file_name(name: object) -> str:
    """A bare name: a plan never points outside its folder."""
    if not isinstance(name, str) or os.path.basename(name) != name or not name:
        raise ValueError(f"{name!r} is not a file name")
    return name
