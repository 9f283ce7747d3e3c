"""The store's format version: one small file, written last when a store is made and read first when it is opened."""

from __future__ import annotations

import errno
import os
import re

from logstore.directory.layout import TOPIC_SUFFIX, Layout
from logstore.errors import CorruptState, NotAStore, StoreVersionError
from logstore.files import FileSystem, read_whole, replace_file
from logstore.segment.names import META_PROPERTIES

STORE_VERSION = 1
_RECOVER = "`duramen recover` writes it again"


def read_version(fs: FileSystem, path: str) -> int:
    """Raises NotAStore where there is no store, CorruptState where one lost the file, StoreVersionError for a version
    this release lacks.
    """
    try:
        text = read_whole(fs, path, limit=64).decode("ascii")
    except (FileNotFoundError, NotADirectoryError):
        if looks_like_a_store(fs, Layout(os.path.dirname(path))):
            raise CorruptState("the store's version file is missing", file=path, hint=_RECOVER) from None
        if fs.exists(Layout(os.path.dirname(path)).unfinished):
            raise NotAStore(
                "a backup that was not finished", file=path, hint="Remove the directory and take it again."
            ) from None
        raise _no_store(fs, os.path.dirname(path)) from None
    except UnicodeDecodeError:
        text = ""
    except OSError as error:
        if error.errno != errno.EFBIG:
            raise  # an error of the system says nothing about the store
        text = ""
    found = re.fullmatch(r"([0-9]{1,9})\n?", text)
    if not found:
        if looks_like_a_store(fs, Layout(os.path.dirname(path))):
            raise CorruptState("the version file does not hold a number", file=path, hint=_RECOVER)
        raise NotAStore("the version file does not hold a number", file=path)
    version = int(found.group(1))
    if version > STORE_VERSION:
        raise StoreVersionError(
            f"the store has format version {version}, this release knows {STORE_VERSION}",
            file=path,
            hint="Install the release that wrote it, or a newer one.",
        )
    if version < STORE_VERSION:
        raise StoreVersionError(
            f"the store has format version {version}, this release writes {STORE_VERSION}",
            file=path,
            hint="Upgrade it with the release that came after it first.",
        )
    return version


def _no_store(fs: FileSystem, root: str) -> NotAStore:
    try:
        fs.listdir(root)
    except NotADirectoryError:
        return NotAStore("no store here: this is a file, and a store is a directory", file=root, hint="Check the path.")
    except FileNotFoundError:
        return NotAStore(
            "no store here",
            file=root,
            hint="There is no such directory. Check the path, or make a store with `duramen topics create`.",
        )
    return NotAStore(
        "no store here",
        file=root,
        hint="The directory exists, but is not a store. Check the path, or make a store with `duramen topics create`.",
    )


def looks_like_a_store(fs: FileSystem, layout: Layout) -> bool:
    """Whether all but the version file of a store is here. A copy that was not finished says so itself."""
    try:
        if fs.exists(layout.unfinished) or not fs.exists(layout.state) or not fs.exists(layout.logs):
            return False
        if fs.exists(layout.topics) and any(name.endswith(TOPIC_SUFFIX) for name in fs.listdir(layout.topics)):
            return True
        # Topic files may be lost as well. An older release did not mark a copy that it had not finished; but it
        # copied this file last.
        return bool(fs.listdir(layout.state)) and fs.exists(os.path.join(layout.logs, META_PROPERTIES))
    except (FileNotFoundError, NotADirectoryError):
        return False


def write_version(fs: FileSystem, path: str) -> None:
    replace_file(fs, path, b"%d\n" % STORE_VERSION)
