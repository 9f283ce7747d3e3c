"""A data file of a ledger table: Parquet, with its newest version and its checksum in its name."""

from __future__ import annotations

import contextlib
import io
import os
import re
import uuid
import zlib
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa
import pyarrow.parquet as pq

from logstore.files import FileSystem

MERGED_BYTES_MAX = 8 << 20
DATA_FILE_BYTES_MAX = 256 << 20
_DATA_NAME = re.compile(r"\d{20}-[0-9a-f]{32}-([0-9a-f]{8})\.parquet\Z")


@dataclass(frozen=True, slots=True)
class DataFile:
    """A live data file; names sort by the version of their newest rows."""

    name: str
    size_bytes: int
    rows: int


def write_data(fs: FileSystem, folder: str, newest: int, rows: pa.Table) -> tuple[str, int]:
    """A data file whose newest row has version `newest`, durable with its name when this returns; its name and size.

    The name carries the checksum of the file: Parquet's own do not cover its footer.
    """
    sink = io.BytesIO()
    pq.write_table(rows, sink, compression="zstd", store_schema=False)
    data = sink.getvalue()
    name = f"{newest:020d}-{uuid.uuid4().hex}-{zlib.crc32(data):08x}.parquet"
    path = os.path.join(folder, name)
    file = fs.open(path, create=True, exclusive=True)
    try:
        file.pwrite(data, 0)
        file.fsync()
    except OSError:
        with contextlib.suppress(OSError):
            fs.unlink(path)
        raise
    finally:
        file.close()
    fs.fsync_dir(folder)
    return name, len(data)


def files_to_merge(files: Sequence[DataFile]) -> int:
    """How many of the newest files become one: as far back as they hold no more rows than all newer ones together.

    So sizes double from tier to tier, and a row is rewritten about log2(rows / upkeep_every) times. A file near
    MERGED_BYTES_MAX stays as it is. 0 when nothing is to be merged.
    """
    count = rows = size_bytes = 0
    for file in reversed(files):
        if count and (file.rows > rows or size_bytes + file.size_bytes > MERGED_BYTES_MAX):
            break
        count, rows, size_bytes = count + 1, rows + file.rows, size_bytes + file.size_bytes
    return count if count > 1 else 0


def is_parquet(data: bytes) -> bool:
    """Whether these bytes are a Parquet file that can be read to its end."""
    try:
        parse_parquet(data)
    except ValueError:
        return False
    return True


def empty_table(schema: pa.Schema) -> pa.Table:
    """Without rows. PyArrow's own `Schema.empty_table` loads pandas where it is installed, which takes its time."""
    return pa.Table.from_batches([], schema)


def parse_data(name: str, data: bytes, columns: list[str] | None = None) -> pa.Table:
    """The rows of a data file. Raises ValueError when the bytes are not those that were written under this name."""
    found = _DATA_NAME.match(name)  # an older release gave names without a checksum
    if found and zlib.crc32(data) != int(found[1], 16):
        raise ValueError("the checksum in its name does not match")
    return parse_parquet(data, columns)


def parse_parquet(data: bytes, columns: list[str] | None = None) -> pa.Table:
    """The rows of a Parquet file in memory. Raises ValueError when the bytes are not one, MemoryError as it is."""
    try:
        return pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True).read(
            columns=columns,
            use_threads=False,  # where no thread can be started, that would look like damage
        )
    except MemoryError:  # Arrow's own out-of-memory error is one, too
        raise
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:  # of bytes in memory: they do not parse
        raise ValueError(str(error)) from error
