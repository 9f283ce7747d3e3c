"""The inner loops, compiled by numba, one module a concern.

Every kernel takes and returns int64 only. Addresses carry no bounds, so each kernel validates every length it reads
before it follows it, and never touches a byte outside [address, address + size). Parameters that are many travel in a
block of int64 whose slots are named in `slots`; results come back in the same block. Nothing here is imported at run
time unless the compiled object is missing (see `native`), and no kernel allocates.

v2 record batch, big endian:

    baseOffset:8 batchLength:4 leaderEpoch:4 magic:1 crc:4 | attributes:2 lastOffsetDelta:4 baseTimestamp:8
    maxTimestamp:8 producerId:8 producerEpoch:2 baseSequence:4 recordsCount:4 records…  (the CRC covers what follows |)

v2 record: length attributes:1 timestampDelta offsetDelta keyLength key valueLength value headerCount
           (keyLength key valueLength value)*, with all lengths, deltas and counts as zig-zag varints
"""

from __future__ import annotations

from logstore.records.kernels import (
    checksum,
    decode,
    encode,
    hashing,
    judge,
    judge_batches,
    latest,
    offset_map,
    place,
    rewrite,
    route,
    scan,
    survivors,
)

#: everything `native` compiles and loads
KERNELS = (
    checksum.crc32c,
    checksum.crc32c_striped,
    checksum.crc32c_tables,
    encode.encode,
    encode.finish_batch,
    scan.scan,
    decode.decode,
    place.stamp_append_time,
    place.set_max_timestamp,
    place.place,
    route.murmur2,
    route.route,
    hashing.sip_hash,
    latest.keep_latest,
    hashing.md5,
    offset_map.index_keys,
    offset_map.merge_maps,
    survivors.mark_offsets,
    survivors.skip_superseded,
    judge_batches.judge_batches,
    judge.judge,
    judge_batches.choose_actions,
    rewrite.rewrite_room,
    rewrite.rewrite,
)

#: how many parameters each has, by name
PARAMETERS = {kernel.__name__: kernel.py_func.__code__.co_argcount for kernel in KERNELS}
