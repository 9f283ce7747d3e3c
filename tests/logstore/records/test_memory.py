"""Memory that is used again, and never while somebody still looks at it."""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from logstore.records.memory import Memory
from logstore.records.native import address_of


def test_a_block_nobody_looks_at_is_used_again() -> None:
    memory = Memory()
    first = address_of(memory.block(1000))
    assert address_of(memory.block(900)) == first
    assert address_of(memory.block(1000)) == first


def test_a_block_is_in_use_through_the_smallest_view_of_it() -> None:
    for look in (
        lambda block: block,
        lambda block: block[10:20],
        lambda block: block[8:16].view(np.int64),
        lambda block: block[8:16].view(np.int64)[:0],
        lambda block: memoryview(block)[3:4],
        lambda block: pa.py_buffer(block[4:8]),
        lambda block: pa.Array.from_buffers(pa.int8(), 4, [None, pa.py_buffer(block[4:8])])[1:2],
    ):
        memory = Memory()
        block = memory.block(1000)
        address = address_of(block)
        seen = look(block)
        del block
        assert address_of(memory.block(1000)) != address
        del seen
        assert address in {address_of(memory.block(1000)) for _ in range(2)}


def test_a_larger_block_is_made_when_none_is_large_enough() -> None:
    memory = Memory()
    memory.block(1000)
    assert len(memory.block(2000)) >= 2000


def test_only_so_many_blocks_of_so_many_bytes_are_kept() -> None:
    memory = Memory(blocks=2, block_bytes_max=1000)
    held = [memory.block(1000) for _ in range(5)]
    assert len({address_of(block) for block in held}) == 5
    assert len(memory._blocks) == 2
    memory.block(1001)
    assert all(len(block) == 1000 for block in memory._blocks)
    assert Memory(blocks=0).block(10).size == 10


def test_arrays_of_numbers() -> None:
    memory = Memory()
    first, second = memory.array(10), memory.array(10)
    first[:], second[:] = 1, 2
    assert first.tolist() == [1] * 10
    assert second.dtype == np.int64
