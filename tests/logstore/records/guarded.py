"""Memory that borders an unmapped page, so that one byte too far ends the process instead of going unnoticed.

`at_end` and `at_start` give NumPy arrays; the pages live as long as the array or any view of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

PAGE = mmap.PAGESIZE
_PROT_NONE, _PROT_READ_WRITE = 0, mmap.PROT_READ | mmap.PROT_WRITE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

Bytes = npt.NDArray[np.uint8]
Place = Callable[..., npt.NDArray[Any]]


def at_end(content: bytes | npt.NDArray[Any] | int, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
    """A copy of `content` (or that many zero bytes) whose last byte is the last one before an unmapped page."""
    return _placed(content, dtype, end=True)


def at_start(content: bytes | npt.NDArray[Any] | int, dtype: npt.DTypeLike = np.uint8) -> npt.NDArray[Any]:
    """A copy of `content` (or that many zero bytes) whose first byte is the first one after an unmapped page."""
    return _placed(content, dtype, end=False)


def _placed(content: bytes | npt.NDArray[Any] | int, dtype: npt.DTypeLike, *, end: bool) -> npt.NDArray[Any]:
    raw = bytes(content) if isinstance(content, bytes | int) else content.tobytes()
    room = (len(raw) // PAGE + 1) * PAGE  # a whole page even for nothing: an empty array must have a real address
    begin = _libc.mmap(None, room + 2 * PAGE, _PROT_NONE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    if begin in (None, ctypes.c_void_p(-1).value) or _libc.mprotect(begin + PAGE, room, _PROT_READ_WRITE):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    first = begin + PAGE + (room - len(raw) if end else 0)
    memory = (ctypes.c_uint8 * len(raw)).from_address(first)
    weakref.finalize(memory, _libc.munmap, begin, room + 2 * PAGE)
    array = np.ndarray((len(raw),), dtype=np.uint8, buffer=memory) if raw else _empty_at(first, memory)
    array[:] = np.frombuffer(raw, dtype=np.uint8)
    return array.view(dtype)


class _Empty:
    """NumPy gives an empty buffer an address of its own; the interface makes it keep ours."""

    def __init__(self, address: int, owner: object) -> None:
        self.owner = owner
        self.__array_interface__ = {"data": (address, False), "shape": (0,), "typestr": "|u1", "version": 3}


def _empty_at(address: int, owner: object) -> Bytes:
    return np.asarray(_Empty(address, owner))
