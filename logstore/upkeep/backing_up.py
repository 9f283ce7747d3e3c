"""A backup of a store of either kind into a directory or a bucket: a store that knows what it is a copy of.

Between stores of one kind everything is copied as it is. Between the kinds every topic is, under its id, with its
records and offsets, and how far every app has come. A backup that is not finished is not a store.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from logstore.directory.layout import Layout
from logstore.directory.origin import Origin, write_origin
from logstore.directory.trees import is_directory, remove_tree
from logstore.errors import BackupRefused
from logstore.files import OS_FILES
from logstore.objects.opening import is_url
from logstore.topics.opened import OpenStore
from logstore.transfer.copying import copy_topics
from logstore.upkeep import backup

if TYPE_CHECKING:
    from logstore.bucket.store import BucketStore
    from logstore.commit.store_face import Store
    from logstore.topic import TopicPartition


@dataclass(frozen=True, slots=True)
class BackedUpPartition:
    partition: TopicPartition
    log_start_offset: int
    log_end_offset: int
    linked_bytes: int
    copied_bytes: int


def check_target(store: Store, target: str, storage_options: Mapping[str, str] | None = None) -> None:
    """Raises BackupRefused unless the target can become a copy."""
    if is_url(target):
        from logstore.bucket.backing_up import check_empty
        from logstore.objects.opening import open_objects

        check_empty(open_objects(target.rstrip("/"), storage_options), target)
    elif isinstance(store, OpenStore):
        backup.check_target(store, target)
    elif os.path.lexists(target) and (not is_directory(OS_FILES, target) or os.listdir(target)):
        raise BackupRefused("the target is not an empty directory", file=target, hint="Give a new directory.")


def back_up(
    store: Store,
    target: str,
    make: Callable[[str], Store],
    *,
    link: bool = True,
    storage_options: Mapping[str, str] | None = None,
    progress: Callable[[int], None] = lambda size_bytes: None,
) -> list[BackedUpPartition]:
    """Copy the store to a directory or a URL. `make` makes a store in a directory.

    Raises BackupRefused, LockHeld, DamagedLog, and what buckets raise."""
    if is_url(target):
        return _to_bucket(store, target, storage_options, progress)
    if isinstance(store, OpenStore):
        done = backup.backup(store, target, link=link, progress=progress)
        return [
            BackedUpPartition(p.partition, p.log_start_offset, p.log_end_offset, p.linked_bytes, p.copied_bytes)
            for p in done.partitions
        ]
    return _to_directory(store, os.path.abspath(target), make, progress)


def _to_bucket(
    store: Store, target: str, storage_options: Mapping[str, str] | None, progress: Callable[[int], None]
) -> list[BackedUpPartition]:
    from logstore.bucket.store import BucketStore

    check_target(store, target, storage_options)
    draft = BucketStore(target, storage_options=storage_options, clock=store.clock, limits=store.limits, is_draft=True)
    return back_up_into(store, draft, progress)


def back_up_into(
    store: Store, draft: BucketStore, progress: Callable[[int], None] = lambda size_bytes: None
) -> list[BackedUpPartition]:
    """Into a store in a bucket that is none yet, and that this makes one."""
    from logstore.bucket.store import BucketStore

    draft.check_writable()
    if isinstance(store, BucketStore):
        from logstore.bucket.backing_up import copy_objects

        copied = copy_objects(store, draft.objects, progress)
        draft.publish(Origin(store.path, copied.taken_ms), copied.ledger_version, store.own_settings())
        return [BackedUpPartition(*each[:3], 0, each[3]) for each in copied.partitions]
    draft.ledger.make()
    done = copy_topics(store, draft, store.topics(), same_ids=True, progress=progress)
    draft.publish(Origin(store.path, done.taken_ms), draft.ledger.view.version)
    return [
        BackedUpPartition(p.partition, p.log_start_offset, p.log_end_offset, 0, p.copied_bytes) for p in done.partitions
    ]


def _to_directory(
    store: Store, target: str, make: Callable[[str], Store], progress: Callable[[int], None]
) -> list[BackedUpPartition]:
    """Made beside the target, and renamed when it is whole."""
    check_target(store, target)
    draft = f"{target}.unfinished-{uuid.uuid4().hex[:8]}"
    try:
        with make(draft) as copy:
            done = copy_topics(store, copy, store.topics(), same_ids=True, progress=progress)
            write_origin(copy.fs, Layout(draft), Origin(store.path, done.taken_ms))
        OS_FILES.rename(draft, target)
        OS_FILES.fsync_dir(os.path.dirname(target))
    except BaseException:
        remove_tree(OS_FILES, draft)
        raise
    return [
        BackedUpPartition(p.partition, p.log_start_offset, p.log_end_offset, 0, p.copied_bytes) for p in done.partitions
    ]
