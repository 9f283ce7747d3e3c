"""Marks in `topics/`: what was decided about a topic that has no file there, or none yet.

    ID.deleted    the topic's own file, renamed: the topic was deleted, whatever carries the id may go
    ID.importing  an import is building the topic; what carries the id may go once no process holds the import's folder
    ID.imported   the import is complete but for the topic's name, which the next sweep gives it

The absence of a topic's file proves nothing: a sweep removes only what a mark names. Ids are never given twice, so a
mark can never mean another topic. Knows nothing of logs.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

from logstore.directory.layout import Layout
from logstore.errors import CorruptState, TopicExists
from logstore.files import FileSystem
from logstore.topic import parse_uuid
from logstore.topics.registry import Topic, TopicRegistry, read_definition

DELETED, IMPORTING, IMPORTED = ".deleted", ".importing", ".imported"


@dataclass(frozen=True, slots=True)
class Mark:
    topic_id: str
    path: str
    #: as far as the mark can be read; its name alone says which id it is about
    topic: Topic | None


class TopicMarks:
    def __init__(self, fs: FileSystem, layout: Layout) -> None:
        self._fs = fs
        self._layout = layout

    def find(self, kind: str) -> list[Mark]:
        found = []
        for name in self._fs.listdir(self._layout.topics):
            topic_id = name.removesuffix(kind)
            if name == topic_id or not _is_id(topic_id):
                continue
            path = os.path.join(self._layout.topics, name)
            topic = None
            try:
                topic = read_definition(self._fs, path)
            except FileNotFoundError:
                continue
            except CorruptState:
                pass
            found.append(Mark(topic_id, path, topic if topic is not None and topic.id == topic_id else None))
        return found

    def ids(self) -> set[str]:
        """All ids that a mark of any kind is about."""
        found = set()
        for name in self._fs.listdir(self._layout.topics):
            topic_id, dot, kind = name.rpartition(".")
            if dot + kind in (DELETED, IMPORTING, IMPORTED) and _is_id(topic_id):
                found.add(topic_id)
        return found

    def is_deleted(self, topic_id: str) -> bool:
        return self._fs.exists(self._layout.topic_mark(topic_id, DELETED))

    def retire(self, topic: Topic) -> None:
        """End the topic in one step, durably: its file becomes the mark. The caller holds its lease."""
        self._fs.rename(self._layout.topic(topic.name), self._layout.topic_mark(topic.id, DELETED))
        self._fs.fsync_dir(self._layout.topics)

    def begin_import(self, registry: TopicRegistry, topic: Topic) -> None:
        registry.write(self._layout.topic_mark(topic.id, IMPORTING), topic)
        self._fs.fsync_dir(self._layout.topics)

    def complete_import(self, registry: TopicRegistry, topic: Topic) -> None:
        """All of the topic is in place, durably: from here on the import goes forward. Raises TopicExists."""
        begun, complete = (self._layout.topic_mark(topic.id, kind) for kind in (IMPORTING, IMPORTED))
        self._fs.rename(begun, complete)
        self._fs.fsync_dir(self._layout.topics)
        try:
            registry.link(complete, topic)
        except TopicExists:  # another process was faster: the import is undone
            self._fs.rename(complete, begun)
            raise
        self.drop(complete)

    def drop(self, path: str) -> None:
        """Remove a mark whose work is done. It may come back after a power cut: the work can be done again."""
        with contextlib.suppress(FileNotFoundError):
            self._fs.unlink(path)


def _is_id(text: str) -> bool:
    try:
        return parse_uuid(text).int != 0
    except ValueError:
        return False
