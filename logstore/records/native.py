"""The compiled kernels as callables, without numba at run time.

numba compiles `kernels.py` once into machine code that needs nothing but memcpy; the object is kept in a cache folder
and loaded by llvmlite in about two milliseconds, in this process and every later one (Spark workers, the command).
The cache is keyed by the kernels' source, the compiler's version and the processor, so it can never be stale. Where
no folder is writable the object is compiled for this process alone.

A kernel is called with ints and gives an int; the GIL is released while it runs, unless it is a quick one.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import importlib.metadata
import json
import os
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_SOURCES = ("kernels.py", "compaction_kernels.py", "codes.py", "slots.py", "table.py", "marks.py", "native.py")
_IMAGES_MAX = 8  # kept in a folder: one home may serve processors of several kinds, and releases side by side
_MAGIC = b"duramen-kernels-1\n"
_LOADING = threading.Lock()
#: a few microseconds of work for headers alone: other threads would have to be waited for longer than that
_QUICK = frozenset({"place", "skip_superseded", "judge_batches", "choose_actions", "rewrite_room"})


class Kernels:
    """The loaded kernels; every attribute is a function of int64 to int64."""

    crc32c: Callable[[int, int], int]
    crc32c_striped: Callable[[int, int], int]
    crc32c_tables: Callable[[int, int], int]
    encode: Callable[[int], int]
    finish_batch: Callable[[int, int], int]
    scan: Callable[[int, int, int, int], int]
    decode: Callable[[int, int, int, int], int]
    check: Callable[[int, int, int, int], int]
    stamp_append_time: Callable[[int, int, int, int], int]
    set_max_timestamp: Callable[[int, int, int], int]
    place: Callable[[int, int, int, int, int, int], int]
    murmur2: Callable[[int, int], int]
    route: Callable[[int], int]
    sip_hash: Callable[[int, int, int, int, int], int]
    map_put: Callable[[int, int, int, int], int]
    map_keep: Callable[[int, int, int, int], int]
    map_grow: Callable[[int, int, int, int], int]
    md5: Callable[[int, int, int, int], int]
    index_keys: Callable[[int, int, int, int], int]
    merge_maps: Callable[[int, int, int], int]
    mark_offsets: Callable[[int, int, int, int, int, int], int]
    skip_superseded: Callable[[int, int, int, int, int], int]
    judge_batches: Callable[[int, int, int], int]
    judge: Callable[[int, int, int, int], int]
    choose_actions: Callable[[int, int, int, int], int]
    rewrite_room: Callable[[int, int, int, int], int]
    rewrite: Callable[[int, int, int, int, int, int], int]

    def __init__(self, image: bytes) -> None:
        """Link `image` (as `compile_image` makes it) into this process."""
        import llvmlite.binding as llvm

        functions, objects = _parse_image(image)
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        machine = llvm.Target.from_default_triple().create_target_machine()
        engine = llvm.create_mcjit_compiler(llvm.parse_assembly(""), machine)
        for data in objects:
            engine.add_object_file(llvm.ObjectFileRef.from_data(data))
        engine.finalize_object()
        for name, (symbol, parameters) in functions.items():
            address = engine.get_function_address(symbol)
            if not address:
                raise RuntimeError(f"kernel {name} is missing from the compiled object")
            setattr(self, name, _callable(name, address, parameters, engine))


def _callable(name: str, address: int, parameters: int, engine: object) -> Callable[..., int]:
    # numba's calling convention: int32 status (int64 *result, void **exception, int64...)
    kind = ctypes.PYFUNCTYPE if name in _QUICK else ctypes.CFUNCTYPE
    prototype = kind(ctypes.c_int32, ctypes.c_void_p, ctypes.c_void_p, *[ctypes.c_int64] * parameters)
    native = prototype(address)
    byref, c_int64, c_void_p = ctypes.byref, ctypes.c_int64, ctypes.c_void_p

    def call(*arguments: int) -> int:
        result = c_int64()
        exception = c_void_p()
        status = native(byref(result), byref(exception), *arguments)
        if status != 0:
            raise RuntimeError(f"kernel {name} failed with status {status}")
        return result.value

    call.__name__ = name
    # The engine owns the code: it must live as long as any function taken from it, even where the `Kernels` does not.
    call.__dict__["engine"] = engine
    return call


@functools.lru_cache(maxsize=1)
def kernels() -> Kernels:
    """The kernels of this process: from the cache, or compiled now and cached for the next."""
    name = f"kernels-{_fingerprint()}.bin"
    with _LOADING:  # threads that come at once wait for the first one's image
        for folder in _cache_folders():
            try:
                return Kernels((folder / name).read_bytes())
            except (OSError, ValueError):
                continue  # absent, or damaged: made anew below
        image = compile_image()
        for folder in _cache_folders():
            if _store(folder, name, image):
                break
    return Kernels(image)


def compile_image() -> bytes:
    """Compile all kernels with numba for this processor; seconds of work."""
    from numba.core import compiler, types
    from numba.core.registry import cpu_target

    from logstore.records import compaction_kernels
    from logstore.records import kernels as source

    flags = compiler.Flags()
    flags.no_cpython_wrapper = True
    flags.no_cfunc_wrapper = True
    flags.release_gil = True
    flags.error_model = "numpy"
    functions: dict[str, tuple[str, int]] = {}
    objects: list[bytes] = []
    named = [(module, *item) for module in (source, compaction_kernels) for item in module.KERNELS.items()]
    for module, name, parameters in named:
        compiled = compiler.compile_extra(
            cpu_target.typing_context,
            cpu_target.target_context,
            getattr(module, name).py_func,
            (types.int64,) * parameters,
            types.int64,
            flags,
            {},
        )
        library = compiled.library
        objects.append(library.codegen._tm.emit_object(library._final_module))
        functions[name] = (compiled.fndesc.llvm_func_name, parameters)
    header = json.dumps({"functions": functions, "sizes": [len(data) for data in objects]}).encode()
    body = struct.pack("<I", len(header)) + header + b"".join(objects)
    return _MAGIC + hashlib.sha256(body).digest() + body


def _parse_image(image: bytes) -> tuple[dict[str, tuple[str, int]], list[bytes]]:
    """Raises ValueError when the image is not whole."""
    start = len(_MAGIC) + 32
    body = image[start:]
    if not image.startswith(_MAGIC) or hashlib.sha256(body).digest() != image[len(_MAGIC) : start]:
        raise ValueError("damaged kernel image")
    (length,) = struct.unpack_from("<I", body)
    header = json.loads(body[4 : 4 + length])
    objects = []
    position = 4 + length
    for size in header["sizes"]:
        objects.append(body[position : position + size])
        position += size
    return {name: (symbol, parameters) for name, (symbol, parameters) in header["functions"].items()}, objects


def _fingerprint() -> str:
    import llvmlite.binding as llvm

    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for name in _SOURCES:
        digest.update((folder / name).read_bytes())
    # The versions are read from package metadata: importing numba would cost what this module saves.
    for package in ("numba", "llvmlite"):
        digest.update(importlib.metadata.version(package).encode())
    digest.update(llvm.get_host_cpu_name().encode())
    digest.update(llvm.get_host_cpu_features().flatten().encode())
    return digest.hexdigest()[:32]


def _cache_folders() -> Iterator[Path]:
    """Where a compiled object may lie, best first. Only folders nobody else can write to are trusted with code."""
    chosen = os.environ.get("DURAMEN_CACHE_DIR")
    if chosen:
        yield Path(chosen)
        return
    yield Path(__file__).parent / ".cache"
    base = os.environ.get("XDG_CACHE_HOME")
    with contextlib.suppress(RuntimeError):  # no home directory
        yield (Path(base) if base else Path.home() / ".cache") / "duramen"
    with contextlib.suppress(OSError):  # there may be no temporary folder at all
        private = Path(tempfile.gettempdir()) / f"duramen-{os.getuid()}"
        private.mkdir(mode=0o700, exist_ok=True)
        found = private.lstat()
        if found.st_uid == os.getuid() and found.st_mode & 0o077 == 0:
            yield private


def _store(folder: Path, name: str, image: bytes) -> bool:
    """Put the image in place atomically; False when the folder is not writable."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(image)
                os.fchmod(file.fileno(), 0o644)  # whoever may read the package may read this
            os.replace(temporary, folder / name)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError:
        return False
    with contextlib.suppress(OSError):  # another process may tidy at the same time
        images = sorted(folder.glob("kernels-*.bin"), key=lambda path: path.stat().st_mtime, reverse=True)
        for old in images[_IMAGES_MAX:]:
            old.unlink(missing_ok=True)
    return True


def address_of(buffer: Any) -> int:
    """Address of the first byte of a NumPy array or of any contiguous buffer (the caller keeps it alive)."""
    interface = getattr(buffer, "__array_interface__", None)
    if interface is not None:
        return int(interface["data"][0])
    import numpy as np

    return int(np.frombuffer(buffer, dtype=np.uint8).__array_interface__["data"][0])


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--warm"]):
        sys.exit("usage: python -m logstore.records.native [--warm]")
    kernels()
