"""The compiled kernels as callables, without numba at run time.

A wheel brings them compiled, as one shared library for each level of processors (`compiled/`, see `processor`); the
best one that this processor reaches is loaded with ctypes. Without it (a checkout, another machine) numba compiles
`kernels` once into an image that is kept in a cache folder and linked by llvmlite in about two milliseconds, in this
process and every later one. The cache is keyed by the kernels' source, the compiler's version and the processor, so it
can never be stale. Where no folder is writable the image is compiled for this process alone.

A kernel is called with ints and gives an int; the GIL is released while it runs, unless it is a quick one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import hashlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import platform
import struct
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from logstore.errors import KernelsMissing
from logstore.records.processor import levels_of, processor_flags

_LOG = logging.getLogger("duramen")
#: what an image is made of, beside this module
_SOURCES = ("kernels/*.py", "codes.py", "slots.py", "table.py", "marks.py", "processor.py", "compiler.py", "native.py")
#: beside this module, in a wheel: one library a level, and what they hold
COMPILED_FOLDER = "compiled"
MANIFEST = "kernels.json"
_IMAGES_MAX = 8  # kept in a folder: one home may serve processors of several kinds, and releases side by side
_MAGIC = b"duramen-kernels-1\n"
_LOCK = "compiling"
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
    stamp_append_time: Callable[[int, int, int, int], int]
    set_max_timestamp: Callable[[int, int, int], int]
    place: Callable[[int, int, int, int, int, int], int]
    murmur2: Callable[[int, int], int]
    route: Callable[[int], int]
    sip_hash: Callable[[int, int, int, int, int], int]
    keep_latest: Callable[[int, int, int, int], int]
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

    @classmethod
    def load(cls, library: Path, functions: dict[str, int]) -> Kernels:
        """From a shared library with `functions`, each a name and its number of parameters. Raises OSError."""
        loaded = ctypes.CDLL(str(library))
        self = cls.__new__(cls)
        for name, parameters in functions.items():
            address = ctypes.cast(getattr(loaded, f"duramen_{name}"), ctypes.c_void_p).value
            assert address is not None
            setattr(self, name, _callable(name, address, parameters, loaded))
        return self


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
    """The kernels of this process: shipped, from the cache, or compiled now and cached for the next.

    Raises KernelsMissing where none were shipped for this machine and numba is not installed.
    """
    with _LOADING:  # threads that come at once wait for the first one's kernels
        return _shipped() or _cached() or _compiled()


def _shipped(folder: Path = Path(__file__).parent / COMPILED_FOLDER) -> Kernels | None:
    try:
        functions = json.loads((folder / MANIFEST).read_bytes())["functions"]
    except FileNotFoundError:
        return None
    for level in levels_of(platform.machine(), processor_flags()):
        library = folder / f"{level.name}.so"
        if library.exists():
            with contextlib.suppress(OSError):  # a mount without the right to execute: the cache may lie elsewhere
                return Kernels.load(library, functions)
    return None


def _image_name() -> str:
    return f"kernels-{_fingerprint()}.bin"


def _cached() -> Kernels | None:
    if importlib.util.find_spec("llvmlite") is None:
        return None
    name = _image_name()
    for folder in _cache_folders():
        # Absent, or damaged: rebuilt.
        with contextlib.suppress(OSError, ValueError):
            return Kernels((folder / name).read_bytes())
    return None


def _compiled() -> Kernels:
    if importlib.util.find_spec("numba") is None or importlib.util.find_spec("llvmlite") is None:
        raise KernelsMissing(
            f"this installation has no compiled kernels for {platform.system()} on {platform.machine()}",
            hint="`pip install 'duramen[compile]'` brings the compiler; the first use then takes about half a minute.",
        )
    with _compiling_alone():
        made_meanwhile = _cached()
        if made_meanwhile is not None:
            return made_meanwhile
        _LOG.warning("duramen: compiling the kernels for this processor; this takes about half a minute, once")
        image = compile_image()
        if not any(_store(folder, _image_name(), image) for folder in _cache_folders()):
            _LOG.warning(
                "duramen: no cache folder can be written, so the next process compiles again; set DURAMEN_CACHE_DIR"
            )
    return Kernels(image)


@contextlib.contextmanager
def _compiling_alone() -> Iterator[None]:
    """Of several processes that find no image, one compiles and the others wait for it, where a lock can be had."""
    with contextlib.ExitStack() as held:
        for folder in _cache_folders():
            with contextlib.suppress(OSError):
                folder.mkdir(parents=True, exist_ok=True)
                lock = held.enter_context(open(folder / _LOCK, "w"))
                fcntl.flock(lock, fcntl.LOCK_EX)
                break
        yield


def compile_image() -> bytes:
    """All kernels, compiled for this processor; seconds of work."""
    from logstore.records.compiler import compiled_kernels

    functions: dict[str, tuple[str, int]] = {}
    objects: list[bytes] = []
    for name, symbol, parameters, library in compiled_kernels():
        objects.append(library.codegen._tm.emit_object(library._final_module))
        functions[name] = (symbol, parameters)
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


def _sources() -> list[Path]:
    return [path for pattern in _SOURCES for path in sorted(Path(__file__).parent.glob(pattern))]


def _fingerprint() -> str:
    import llvmlite.binding as llvm

    digest = hashlib.sha256()
    for path in _sources():
        digest.update(path.read_bytes())
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
                os.fchmod(file.fileno(), 0o644)  # readable by whoever may read the package
            os.replace(temporary, folder / name)
        except OSError:
            os.unlink(temporary)
            raise
    except OSError:
        return False
    with contextlib.suppress(OSError):  # another process may clean up at the same time
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
