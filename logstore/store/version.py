"""The store's format version: one small file, written last when a store is made and read first when it is opened."""

from __future__ import annotations

import re

from logstore.errors import NotAStore, StoreVersionError
from logstore.files import FileSystem, read_whole, replace_file

STORE_VERSION = 1


def read_version(fs: FileSystem, path: str) -> int:
    """Raises NotAStore when the file is missing or says nothing, StoreVersionError for a version this release lacks."""
    try:
        text = read_whole(fs, path, limit=64).decode("ascii")
    except (FileNotFoundError, NotADirectoryError):
        raise NotAStore("no store here", file=path, hint="`duramen topics create` makes one.") from None
    except (OSError, UnicodeDecodeError) as error:
        raise NotAStore("the version file cannot be read", file=path) from error
    found = re.fullmatch(r"([0-9]{1,9})\n?", text)
    if not found:
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


def write_version(fs: FileSystem, path: str) -> None:
    replace_file(fs, path, b"%d\n" % STORE_VERSION)
