"""Making an empty store: its directories, its identity and, last, its version."""

from __future__ import annotations

import os

from logstore.directory.identity import make_identity
from logstore.directory.layout import BROKER_GUARD, TOP_NAMES, Layout
from logstore.directory.probe import probe_file_system
from logstore.directory.projection import checkpoint_entries, write_checkpoints
from logstore.directory.version import looks_like_a_store, read_version, write_version
from logstore.errors import NotAStore
from logstore.files import FileSystem


def make_store(fs: FileSystem, layout: Layout) -> None:
    """Make an empty store; the version file comes last, so a half-made one is simply made again."""
    if fs.exists(layout.version):
        return
    if looks_like_a_store(fs, layout):
        read_version(fs, layout.version)  # raises: a store that lost its version is not made again
    if fs.exists(layout.root):
        try:
            foreign = sorted(set(fs.listdir(layout.root)) - TOP_NAMES)
        except NotADirectoryError:
            raise NotAStore(
                "no store here: this is a file, and a store is a directory", file=layout.root, hint="Check the path."
            ) from None
        if foreign:
            raise NotAStore(
                f"the directory holds other things ({foreign[0]})", file=layout.root, hint="Give a new directory."
            )
    for directory in layout.directories:
        fs.mkdir(directory)
    probe_file_system(fs, layout.locks)
    fs.mkdir(os.path.join(layout.logs, BROKER_GUARD))
    make_identity(fs, layout)
    write_checkpoints(fs, layout.logs, checkpoint_entries([]))
    write_version(fs, layout.version)
    fs.fsync_dir(layout.root)
