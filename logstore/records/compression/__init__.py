"""The compression codecs of record batches, one module each, and the registry by Kafka's numbers and names.

Kafka's framings are built and checked here; the compression itself is done by native libraries that release the
interpreter lock. Decompression never writes or allocates beyond what the caller allows.
"""

from __future__ import annotations

from logstore.errors import InvalidConfig, UnsupportedFormat
from logstore.records.compression.codec import Codec, OutputTooSmall
from logstore.records.compression.gzip import Gzip
from logstore.records.compression.lz4 import Lz4
from logstore.records.compression.none import NoCompression
from logstore.records.compression.snappy import Snappy
from logstore.records.compression.zstd import Zstd

__all__ = ["CODECS", "Codec", "OutputTooSmall", "codec_by_id", "codec_by_name"]

#: indexed by codec id
CODECS: tuple[Codec, ...] = (NoCompression(), Gzip(), Snappy(), Lz4(), Zstd())

_BY_NAME = {codec.name: codec for codec in CODECS}


def codec_by_id(codec_id: int) -> Codec:
    """The codec of a batch's attributes; raises UnsupportedFormat for a number Kafka has given no meaning."""
    if not 0 <= codec_id < len(CODECS):
        raise UnsupportedFormat(f"compression codec {codec_id} is unknown")
    return CODECS[codec_id]


def codec_by_name(name: str) -> Codec:
    """The codec of that name; raises InvalidConfig for any other."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise InvalidConfig(f"compression {name!r} is not one of {', '.join(_BY_NAME)}") from None
