"""Levels of processors that compiled kernels are shipped for, and which of them this machine reaches.

The build compiles the kernels once a level; the loader takes the best one whose flags the processor has. Reads
`/proc/cpuinfo`, imports no compiler.
"""

from __future__ import annotations

import functools
import os
import platform
from dataclasses import dataclass

#: set by the build while it compiles for another processor than its own
LEVEL_VARIABLE = "DURAMEN_KERNEL_LEVEL"

#: stands for ARM's CRC-32C instruction until LLVM emits code for ARM: numba makes code for its own machine, too
ARM_CRC = "duramen_arm_crc32cx"


@dataclass(frozen=True, slots=True)
class Level:
    name: str
    machine: str
    #: the processor's name for LLVM, and what it has beyond that
    cpu: str
    features: str
    #: what `/proc/cpuinfo` must show
    flags: frozenset[str]

    @property
    def has_crc(self) -> bool:
        """Whether it has an instruction for CRC-32C."""
        return bool({"sse4_2", "crc32"} & self.flags)

    @property
    def has_wide_crc(self) -> bool:
        """Whether it multiplies eight 64-bit polynomials at once."""
        return {"avx512f", "vpclmulqdq"} <= self.flags


_V2 = frozenset(["sse4_2", "ssse3", "popcnt", "cx16"])
_V3 = _V2 | frozenset(["movbe", "avx", "avx2", "f16c", "fma", "bmi1", "bmi2", "abm"])
_V4 = _V3 | frozenset(["pclmulqdq", "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl", "vpclmulqdq"])

#: best first
LEVELS = (
    Level("x86_64-v4", "x86_64", "x86-64-v4", "+pclmul,+vpclmulqdq", _V4),
    Level("x86_64-v3", "x86_64", "x86-64-v3", "", _V3),
    Level("x86_64-v2", "x86_64", "x86-64-v2", "", _V2),
    Level("x86_64-v1", "x86_64", "x86-64", "", frozenset()),
    Level("aarch64-crc", "aarch64", "generic", "+neon,+crc", frozenset({"crc32"})),
    Level("aarch64", "aarch64", "generic", "+neon", frozenset()),
)


def level_named(name: str) -> Level:
    """Raises KeyError."""
    return {level.name: level for level in LEVELS}[name]


@functools.lru_cache(maxsize=1)
def processor_flags() -> frozenset[str]:
    """What the first processor can do, in Linux's words; empty where the system does not tell."""
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                name, _, words = line.partition(":")
                if name.strip() in ("flags", "Features"):
                    return frozenset(words.split())
    except OSError:
        pass
    return frozenset()


def levels_of(machine: str, flags: frozenset[str]) -> tuple[Level, ...]:
    """The levels such a processor reaches, best first."""
    return tuple(level for level in LEVELS if level.machine == machine and level.flags <= flags)


def compiled_for() -> Level | None:
    """The level the kernels are being compiled for: the build's choice, else the best this machine reaches."""
    chosen = os.environ.get(LEVEL_VARIABLE)
    if chosen:
        return level_named(chosen)
    return next(iter(levels_of(platform.machine(), processor_flags())), None)
