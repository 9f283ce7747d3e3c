"""`quarantine/NNNNNN/` in a partition's directory: bytes that recovery took out of the log, and why.

A folder holds raw regions (`FILE.from-POSITION`), from older versions also whole segments, and a `reason.json`. Each
recovery has a folder of its own. Nothing here is part of the log; `duramen dump` reads it and `recover --readmit` puts
back what is intact.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from logstore.directory.state import Loss
from logstore.files import File, FileSystem, read_whole
from logstore.partition.losses import merged
from logstore.segment.names import FileKind, Transient, parse_file_name

QUARANTINE = "quarantine"
REASON = "reason.json"
_BLOCK_BYTES = 1 << 20
_REASON_BYTES_MAX = 16 << 20
_REGION = re.compile(r"([0-9]{20}\.log)\.from-([0-9]{1,19})", re.ASCII)


@dataclass(frozen=True, slots=True)
class QuarantinedRegion:
    """Bytes [position, end) of a file."""

    path: str
    position: int
    end: int


def region_name(file: str, position: int) -> str:
    return f"{os.path.basename(file)}.from-{position}"


def parse_region_name(name: str) -> tuple[str, int] | None:
    """The file a region was cut from, and where it began there."""
    match = _REGION.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def new_folder(fs: FileSystem, directory: str) -> str:
    """A folder for one recovery; numbered, so that a later one never overwrites an earlier."""
    root = os.path.join(directory, QUARANTINE)
    fs.mkdir(root)
    taken = [int(name) for name in fs.listdir(root) if name.isdigit()]
    folder = os.path.join(root, f"{max(taken, default=0) + 1:06d}")
    fs.mkdir(folder)
    fs.fsync_dir(root)
    return folder


def quarantine(
    fs: FileSystem, directory: str, regions: Sequence[QuarantinedRegion], reason: Mapping[str, object]
) -> list[str]:
    """Copies of the regions in a new folder with their reason, all on disk when this returns; their paths."""
    folder = new_folder(fs, directory)
    kept = []
    for region in regions:
        target = os.path.join(folder, region_name(region.path, region.position))
        source = fs.open(region.path)
        try:
            copy_range(fs, source, region.position, region.end, target)
        finally:
            source.close()
        kept.append(target)
    write_reason(fs, folder, reason)
    fs.fsync_dir(folder)
    fs.fsync_dir(directory)
    return kept


def write_reason(fs: FileSystem, folder: str, reason: Mapping[str, object]) -> None:
    file = fs.open(os.path.join(folder, REASON), create=True)
    try:
        file.pwrite(json.dumps(reason, indent=2).encode() + b"\n", 0)
        file.fsync()
    finally:
        file.close()


def copy_range(fs: FileSystem, source: File, position: int, end: int, target: str) -> None:
    file = fs.open(target, create=True)
    try:
        written = 0
        while position + written < end:
            block = source.pread(min(_BLOCK_BYTES, end - position - written), position + written)
            if not block:
                break
            file.pwrite(block, written)
            written += len(block)
        file.fsync()
    finally:
        file.close()


def folders(fs: FileSystem, directory: str) -> list[str]:
    root = os.path.join(directory, QUARANTINE)
    if not fs.exists(root):
        return []
    return [os.path.join(root, name) for name in fs.listdir(root) if name.isdigit()]


def data_files(fs: FileSystem, folder: str) -> Iterator[str]:
    """Files of a folder that may hold batches: regions, and the whole segments older versions set aside."""
    for name in fs.listdir(folder):
        numbered = parse_file_name(name)
        whole = numbered is not None and numbered.kind is FileKind.LOG and numbered.transient is Transient.NONE
        if whole or parse_region_name(name):
            yield os.path.join(folder, name)


def read_reason(fs: FileSystem, folder: str) -> bytes | None:
    path = os.path.join(folder, REASON)
    return read_whole(fs, path, limit=_REASON_BYTES_MAX) if fs.exists(path) else None


def reasons(documents: Iterable[bytes]) -> tuple[Loss, ...]:
    """Losses that `reason.json` files of earlier recoveries speak of; what cannot be read is left out."""
    found: tuple[Loss, ...] = ()
    for data in documents:
        try:
            body = json.loads(data)
            losses = [Loss(int(b), int(e), str(r), int(s), m is True) for b, e, r, s, m in body.get("losses", ())]
        except (ValueError, TypeError, AttributeError):
            continue
        found = merged(found, [each for each in losses if 0 <= each.base_offset < each.end_offset])
    return found


def tombstones_beyond_reasons(fs: FileSystem, directory: str) -> int:
    """A count of dropped tombstones that no reason has: how many were dropped since is not known."""
    documents = (read_reason(fs, folder) for folder in folders(fs, directory))
    noted = (None if data is None else dropped_tombstones(data) for data in documents)
    return max((count + 1 for count in noted if count is not None), default=0)


def dropped_tombstones(document: bytes) -> int | None:
    """The partition's count at the time of the reason; None where it does not say."""
    try:
        value = json.loads(document).get("dropped_tombstones")
    except (ValueError, AttributeError):
        return None
    return value if type(value) is int else None
