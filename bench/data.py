"""The records that both sides get: one file of keys and values, back to back, and the same as Arrow columns.

Keys are random letters. Values are either random letters, which compress by little more than the alphabet's share, or
words, which compress as real text does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pyarrow as pa

KEY_BYTES = 10
VALUE_BYTES = 100
RECORD_BYTES = KEY_BYTES + VALUE_BYTES
NOW_MS = 1_700_000_000_000
RECORDS_PER_MS = 1000
ROWS_PER_BATCH = 65_536  # of an Arrow record batch

_WORDS = 2000
_TEXT_BYTES = 4 << 20  # that values are cut from
_BLOCK = 100_000  # records made at once

Values: TypeAlias = Callable[[np.random.Generator, int], npt.NDArray[np.uint8]]


@dataclass(frozen=True, slots=True)
class Records:
    """`path` has them for Kafka's side; `batches()` for ours."""

    name: str
    path: Path
    count: int

    def batches(self) -> list[pa.RecordBatch]:
        """Arrow record batches in memory of key, value and timestamp, exactly what Kafka's side writes."""
        rows = np.fromfile(self.path, dtype=np.uint8).reshape(self.count, RECORD_BYTES)
        keys = np.ascontiguousarray(rows[:, :KEY_BYTES]).reshape(-1)
        values = np.ascontiguousarray(rows[:, KEY_BYTES:]).reshape(-1)
        del rows
        timestamps = NOW_MS + np.arange(self.count, dtype=np.int64) // RECORDS_PER_MS
        return [
            pa.RecordBatch.from_arrays(
                [
                    _binary(keys, start, end, KEY_BYTES),
                    _binary(values, start, end, VALUE_BYTES),
                    pa.array(timestamps[start:end]),
                ],
                names=["key", "value", "timestamp"],
            )
            for start in range(0, self.count, ROWS_PER_BATCH)
            for end in [min(start + ROWS_PER_BATCH, self.count)]
        ]


def _binary(data: npt.NDArray[np.uint8], start: int, end: int, width: int) -> pa.Array:
    offsets = np.arange(0, (end - start + 1) * width, width, dtype=np.int32)
    part = data[start * width : end * width]
    return pa.Array.from_buffers(pa.binary(), end - start, [None, pa.py_buffer(offsets), pa.py_buffer(part)])


def letters(folder: Path, count: int) -> Records:
    """Random letters."""
    return _made(folder, "random letters", count, lambda randomness, n: _letters(randomness, n, VALUE_BYTES))


def words(folder: Path, count: int) -> Records:
    """Words of a small vocabulary, the common ones far more often than the rare."""
    randomness = np.random.default_rng(0)
    vocabulary = [_letters(randomness, 1, int(n)).tobytes() for n in randomness.integers(2, 12, _WORDS)]
    # Squares of evenly drawn numbers: the first words come up most.
    chosen = (randomness.random(_TEXT_BYTES // 4) ** 2 * _WORDS).astype(np.int64)
    text = np.frombuffer(b" ".join([vocabulary[i] for i in chosen.tolist()]), dtype=np.uint8)
    cuts = np.lib.stride_tricks.sliding_window_view(text, VALUE_BYTES)
    return _made(folder, "words", count, lambda randomness, n: cuts[randomness.integers(0, len(cuts), n)])


def _letters(randomness: np.random.Generator, rows: int, width: int) -> npt.NDArray[np.uint8]:
    return randomness.integers(ord("a"), ord("z") + 1, size=(rows, width), dtype=np.uint8)


def _made(folder: Path, name: str, count: int, values: Values) -> Records:
    path = folder / f"{name.replace(' ', '-')}-{count}.records"
    randomness = np.random.default_rng(count)
    with open(path, "wb") as file:
        for start in range(0, count, _BLOCK):
            n = min(_BLOCK, count - start)
            np.hstack([_letters(randomness, n, KEY_BYTES), values(randomness, n)]).tofile(file)
    return Records(name, path, count)
