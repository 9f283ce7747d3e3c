"""Compiles the kernels with numba: into an image for this machine's cache, or into a shared library that is shipped.

Nothing but the build, and a machine for which no library was shipped, imports this. numba knows only the processor it
runs on, so the build compiles each level in a process of its own (`python -m logstore.records.compiler LEVEL FOLDER`):
numba is told the level's features, and where the machine is another one its LLVM code is emitted for that.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from logstore.records.processor import ARM_CRC, LEVEL_VARIABLE, Level, level_named

#: what a kernel is called in a shared library
SYMBOL_PREFIX = "duramen_"


def compiled_kernels(only: Sequence[str] = ()) -> Iterator[tuple[str, str, int, Any]]:
    """(name, symbol, number of parameters, numba's library) of each kernel, or of these; seconds of work."""
    from numba.core import compiler, types
    from numba.core.registry import cpu_target

    from logstore.records.kernels import KERNELS, PARAMETERS

    flags = compiler.Flags()
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    flags.release_gil = True
    flags.error_model = "numpy"
    for kernel in KERNELS:
        name = kernel.__name__
        if only and name not in only:
            continue
        compiled = compiler.compile_extra(
            cpu_target.typing_context,
            cpu_target.target_context,
            kernel.py_func,
            (types.int64,) * PARAMETERS[name],
            types.int64,
            flags,
            {},
        )
        yield name, compiled.fndesc.llvm_func_name, PARAMETERS[name], compiled.library


def build_library(level: Level, folder: Path, only: Sequence[str] = ()) -> Path:
    """Compile all kernels (or these) for `level` in a process of its own; returns the shared library in `folder`.

    Raises RuntimeError with what the compiler said.
    """
    local = level if level.machine == "x86_64" else level_named("x86_64-v1")
    environment = {**os.environ, LEVEL_VARIABLE: level.name}
    if platform.machine() == "x86_64":
        environment |= {"NUMBA_CPU_NAME": local.cpu, "NUMBA_CPU_FEATURES": local.features}
    command = [sys.executable, "-m", "logstore.records.compiler", level.name, str(folder), *only]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"compiling the kernels for {level.name} failed:\n{done.stderr[-4000:]}")
    return folder / f"{level.name}.so"


def _emit(level: Level, folder: Path, only: Sequence[str]) -> None:
    import llvmlite.binding as llvm

    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    triple = f"{level.machine}-unknown-linux-gnu"
    machine = llvm.Target.from_triple(triple).create_target_machine(
        cpu=level.cpu, features=level.features, opt=3, reloc="pic", codemodel="small"
    )
    llvm.add_symbol(ARM_CRC, 1)  # numba links its own machine's code, which is never called
    objects = []
    for name, symbol, _, library in compiled_kernels(only):
        # The layout of the machine that numba ran on gives way to that of the machine the code is for.
        text = re.sub(r"^target (datalayout|triple) = .*$", "", str(library._final_module), flags=re.MULTILINE)
        text = text.replace(ARM_CRC, "llvm.aarch64.crc32cx")
        module = llvm.parse_assembly(f'target datalayout = "{machine.target_data}"\ntarget triple = "{triple}"\n{text}')
        for function in module.functions:
            if function.name == symbol:
                function.name = SYMBOL_PREFIX + name
                function.linkage = "external"
            elif not function.is_declaration:
                function.linkage = "internal"
        for variable in module.global_variables:
            if not variable.is_declaration:
                variable.linkage = "internal"
        path = folder / f"{level.name}-{name}.o"
        path.write_bytes(machine.emit_object(module))
        objects.append(path)
    _link(level, objects, folder / f"{level.name}.so")
    for path in objects:
        path.unlink()


def _link(level: Level, objects: list[Path], target: Path) -> None:
    """Without a C library: the kernels need nothing but memcpy and its like, which every process has."""
    own = shutil.which("cc") if level.machine == platform.machine() else None
    linker = [own] if own else [sys.executable, "-m", "ziglang", "cc", f"--target={level.machine}-linux-gnu"]
    arguments = ["-shared", "-nostdlib", "-s", "-Wl,--build-id=none", "-Wl,-z,noexecstack", "-o", str(target)]
    subprocess.run([*linker, *arguments, *map(str, objects)], check=True)


if __name__ == "__main__":
    _emit(level_named(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
