"""A checkpoint's proof: an empty file beside the table whose name has the checkpoint's version and checksum.

It is made after the checkpoint was synced without an error. A checkpoint without one may be torn by the next power cut,
so nothing is deleted because of it: a process was killed before the sync, the sync failed, or an older release made
it. With one, a flipped bit is noticed that still decodes: delta-rs writes checkpoints without checksums.
"""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Container

from logstore.files import FileSystem

_NAME = re.compile(r"(.+)\.proved-(\d{20})-([0-9a-f]{8})\Z")


def read_proofs(fs: FileSystem, table_path: str) -> dict[int, set[int]]:
    """By version, the checksums of checkpoints that were synced; several if the table was replaced by a copy."""
    folder, table = os.path.split(table_path)
    found: dict[int, set[int]] = {}
    for name in fs.listdir(folder):
        match = _NAME.match(name)
        if match and match[1] == table:
            found.setdefault(int(match[2]), set()).add(int(match[3], 16))
    return found


def is_as_proved(proofs: dict[int, set[int]], version: int, data: bytes) -> bool:
    """False if these are not the bytes that were proved; True where nothing was."""
    return version not in proofs or zlib.crc32(data) in proofs[version]


def write_proof(fs: FileSystem, table_path: str, version: int, data: bytes) -> None:
    """After the checkpoint's own sync, never before it."""
    fs.open(_path(table_path, version, zlib.crc32(data)), create=True).close()
    fs.fsync_dir(os.path.dirname(table_path))


def remove_proofs(fs: FileSystem, table_path: str, keep: Container[int] = ()) -> None:
    """Those of checkpoints that are gone."""
    for version, checksums in read_proofs(fs, table_path).items():
        if version not in keep:
            for checksum in checksums:
                fs.unlink(_path(table_path, version, checksum))


def _path(table_path: str, version: int, checksum: int) -> str:
    return f"{table_path}.proved-{version:020d}-{checksum:08x}"
