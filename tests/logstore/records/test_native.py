"""The compiled kernels: found again, never stale, made anew when damaged, and there even where nothing can be written.

Compiling takes seconds, so most of these tests run on copies of one image, in processes of their own. A folder is made
unusable by a file that stands in its place: permissions would not stop root.
"""

from __future__ import annotations

import gc
import json
import os
import platform
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import numpy as np
import pytest

from logstore.records import compiler, native
from logstore.records import kernels as source
from logstore.records.native import Kernels, address_of, kernels

PACKAGE = Path(native.__file__).parents[1]
IMAGE = f"kernels-{native._fingerprint()}.bin"
CHECK = 0xE3069283  # CRC-32C of 123456789

#: prints what the kernels answer, whether numba had to be imported for it, and where images were looked for
PROGRAM = """
    import sys
    from logstore.records import native
    compiled = []
    if {fake!r}:
        native.compile_image = lambda: compiled.append(1) or open({fake!r}, "rb").read()
    data = b"123456789"
    answer = native.kernels().crc32c(native.address_of(data), len(data))
    print(hex(answer), len(compiled), "numba" in sys.modules)
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound image of the kernels as they are now."""
    kernels()
    for folder in native._cache_folders():
        if (folder / IMAGE).exists():
            return folder / IMAGE
    path = tmp_path_factory.mktemp("image") / IMAGE
    path.write_bytes(native.compile_image())
    return path


def run(fake: Path | None = None, **environment: str) -> subprocess.Popen[str]:
    """A process that uses the kernels; `fake` is the image it gets instead of compiling."""
    program = textwrap.dedent(PROGRAM).format(fake="" if fake is None else str(fake))
    inherited = {name: os.environ[name] for name in ("PATH",) if name in os.environ}
    return subprocess.Popen(
        [sys.executable, "-c", program],
        env={**inherited, "PYTHONPATH": str(PACKAGE.parent), **environment},
        cwd="/",  # the current folder would come before PYTHONPATH
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def answer(process: subprocess.Popen[str]) -> str:
    out, err = process.communicate(timeout=100)
    _check_message(out, err)
    return out.strip()


def _check_message(out: str, err: str) -> None:
    """Who compiles says so, once, and where nothing can be kept, that too; nobody else says a word."""
    lines = err.splitlines()
    assert len(lines) <= 2, err
    assert sum("compiling the kernels" in line for line in lines) == (out.strip() == COMPILED)
    assert all("compiling the kernels" in line or "DURAMEN_CACHE_DIR" in line for line in lines), err


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the engine whose own folder cannot hold a cache; its parent belongs on the path."""
    copy = tmp_path / "copy"
    target = copy / "logstore"
    for path in PACKAGE.rglob("*.py"):
        place = target / path.relative_to(PACKAGE)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(path.read_bytes())
    (target / "records" / ".cache").write_text("a file where a folder should be")
    return copy


LOADED, COMPILED = f"{hex(CHECK)} 0 False", f"{hex(CHECK)} 1 False"


# --- the cache --------------------------------------------------------------------------------------------------------


def test_an_image_is_stored_once_and_found_by_the_next_process_without_numba(tmp_path: Path, image: Path) -> None:
    folder = tmp_path / "deep" / "cache"
    assert answer(run(image, DURAMEN_CACHE_DIR=str(folder))) == COMPILED
    assert [path.name for path in folder.glob("kernels-*")] == [IMAGE]
    assert (folder / IMAGE).stat().st_mode & 0o777 == 0o644
    assert answer(run(image, DURAMEN_CACHE_DIR=str(folder))) == LOADED


@pytest.mark.parametrize("damage", ["empty", "short", "flipped", "noise", "another version"])
def test_a_damaged_image_is_made_anew(tmp_path: Path, image: Path, damage: str) -> None:
    sound = image.read_bytes()
    (tmp_path / IMAGE).write_bytes(
        {
            "empty": b"",
            "short": sound[:-100],
            "flipped": sound[:50_000] + bytes([sound[50_000] ^ 1]) + sound[50_001:],
            "noise": os.urandom(1000),
            "another version": sound.replace(b"duramen-kernels-1", b"duramen-kernels-0", 1),
        }[damage]
    )
    assert answer(run(image, DURAMEN_CACHE_DIR=str(tmp_path))) == COMPILED
    assert (tmp_path / IMAGE).read_bytes() == sound


def test_the_key_is_made_of_sources_versions_and_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.metadata

    import llvmlite.binding as llvm

    before = native._fingerprint()
    assert before == native._fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr(importlib.metadata, "version", lambda name: "9.9")
        versions = native._fingerprint()
    with monkeypatch.context() as patch:
        patch.setattr(llvm, "get_host_cpu_name", lambda: "another")
        processor = native._fingerprint()
    keys = {before, versions, processor}
    real = Path.read_bytes
    for changed in native._sources():
        with monkeypatch.context() as patch:
            patch.setattr(Path, "read_bytes", lambda path, n=changed: real(path) + (b"#" if path == n else b""))
            keys.add(native._fingerprint())
    assert len(keys) == 3 + len(native._sources())


def test_everything_the_kernels_are_made_of_is_in_the_key() -> None:
    import ast

    modules = set(Path(source.__file__).parent.glob("*.py"))
    imports = [
        f"{node.module}.{name.name}"
        for module in modules
        for node in ast.walk(ast.parse(module.read_text()))
        if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("logstore")
        for name in node.names
    ]
    # What is imported is a module, or a name in one.
    paths = [PACKAGE.parent / name.replace(".", "/") for name in imports]
    ours = {(path if path.with_suffix(".py").exists() else path.parent).with_suffix(".py") for path in paths}
    machinery = {PACKAGE / "records" / "compiler.py", PACKAGE / "records" / "native.py"}
    assert ours | modules | machinery == set(native._sources())


def test_old_images_are_removed_but_those_of_other_processors_are_not(tmp_path: Path) -> None:
    for i in range(20):
        path = tmp_path / f"kernels-{i:02}.bin"
        path.write_bytes(b"")
        os.utime(path, (1_000_000 + i, 1_000_000 + i))
    assert native._store(tmp_path, "kernels-new.bin", b"x")
    left = sorted(path.name for path in tmp_path.iterdir())
    assert left == [f"kernels-{i}.bin" for i in range(13, 20)] + ["kernels-new.bin"]


def test_an_image_that_cannot_be_put_in_place_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "kernels-x.bin").mkdir()  # nothing can be renamed over a folder
    assert not native._store(tmp_path, "kernels-x.bin", b"x")
    assert [path.name for path in tmp_path.iterdir()] == ["kernels-x.bin"]


# --- places that cannot be written ------------------------------------------------------------------------------------


def test_a_package_that_cannot_be_written_uses_the_users_cache(tmp_path: Path, package: Path, image: Path) -> None:
    home = tmp_path / "home"
    environment = {"PYTHONPATH": str(package), "HOME": str(home), "TMPDIR": str(tmp_path)}
    assert answer(run(image, **environment)) == COMPILED
    assert (home / ".cache" / "duramen" / IMAGE).exists()
    assert answer(run(image, **environment)) == LOADED

    chosen = {**environment, "XDG_CACHE_HOME": str(tmp_path / "xdg")}
    assert answer(run(image, **chosen)) == COMPILED
    assert (tmp_path / "xdg" / "duramen" / IMAGE).exists()


def test_without_a_home_a_private_temporary_folder_is_used(tmp_path: Path, package: Path, image: Path) -> None:
    environment = {
        "PYTHONPATH": str(package),
        "HOME": "/proc/none",
        "XDG_CACHE_HOME": "/dev/null",
        "TMPDIR": str(tmp_path),
    }
    assert answer(run(image, **environment)) == COMPILED
    private = tmp_path / f"duramen-{os.getuid()}"
    assert private.stat().st_mode & 0o777 == 0o700
    assert answer(run(image, **environment)) == LOADED


def test_a_temporary_folder_that_others_may_write_is_not_trusted(tmp_path: Path, package: Path, image: Path) -> None:
    private = tmp_path / f"duramen-{os.getuid()}"
    private.mkdir()
    private.chmod(0o777)
    (private / IMAGE).write_bytes(image.read_bytes())
    environment = {
        "PYTHONPATH": str(package),
        "HOME": "/proc/none",
        "XDG_CACHE_HOME": "/dev/null",
        "TMPDIR": str(tmp_path),
    }
    assert answer(run(image, **environment)) == COMPILED
    assert answer(run(image, **environment)) == COMPILED


@pytest.mark.parametrize("chosen", ["/proc/none", "/dev/null", "/dev/null/below"])
def test_a_chosen_folder_that_is_none_means_compiling_for_this_process_alone(chosen: str, image: Path) -> None:
    assert answer(run(image, DURAMEN_CACHE_DIR=chosen)) == COMPILED


def test_a_machine_without_any_writable_folder(tmp_path: Path, package: Path, image: Path) -> None:
    # Not even a temporary one: then the standard library would try the current folder, which is one of the kernel's.
    program = textwrap.dedent(PROGRAM).format(fake=str(image))
    program = "import tempfile\ntempfile._candidate_tempdir_list = lambda: ['/proc/none']\n" + program
    environment = {"PYTHONPATH": str(package), "HOME": "/proc/none", "XDG_CACHE_HOME": "/dev/null"}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=environment,
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert done.stdout.strip() == COMPILED
    _check_message(done.stdout, done.stderr)
    assert "DURAMEN_CACHE_DIR" in done.stderr


# --- several at once --------------------------------------------------------------------------------------------------


def test_of_processes_that_need_an_image_at_once_one_makes_it_and_the_others_wait(tmp_path: Path, image: Path) -> None:
    processes = [run(image, DURAMEN_CACHE_DIR=str(tmp_path)) for _ in range(4)]
    assert sorted(answer(process) for process in processes) == [LOADED] * 3 + [COMPILED]
    assert [path.name for path in tmp_path.glob("kernels-*")] == [IMAGE]
    assert (tmp_path / IMAGE).read_bytes() == image.read_bytes()


def test_a_reader_never_sees_half_an_image(tmp_path: Path, image: Path) -> None:
    sound = image.read_bytes()
    native._store(tmp_path, IMAGE, sound)
    stop = threading.Event()

    def rewrite() -> None:
        while not stop.is_set():
            native._store(tmp_path, IMAGE, sound)

    writer = threading.Thread(target=rewrite)
    writer.start()
    try:
        for _ in range(200):
            native._parse_image((tmp_path / IMAGE).read_bytes())
    finally:
        stop.set()
        writer.join()


def test_a_kernel_outlives_what_it_was_taken_from(image: Path) -> None:
    data = np.frombuffer(b"123456789", np.uint8)
    checksum = Kernels(image.read_bytes()).crc32c
    gc.collect()
    assert checksum(address_of(data), 9) == CHECK


def test_threads_that_load_an_image_at_once_all_get_kernels(image: Path) -> None:
    data = np.frombuffer(b"123456789", np.uint8)
    sound = image.read_bytes()
    answers: list[int] = []

    def ask() -> None:
        answers.append(Kernels(sound).crc32c(address_of(data), 9))

    threads = [threading.Thread(target=ask) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [CHECK] * 8


def test_compiling_from_nothing_gives_the_same_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The one test here that really compiles; two kernels tell as much as all."""
    chosen = ("crc32c", "crc32c_tables")
    monkeypatch.setattr(source, "KERNELS", [kernel for kernel in source.KERNELS if kernel.__name__ in chosen])
    fresh = Kernels(native.compile_image())
    assert sorted(vars(fresh)) == sorted(chosen)
    data = np.frombuffer(b"123456789", np.uint8)
    assert fresh.crc32c(address_of(data), 9) == fresh.crc32c_tables(address_of(data), 9) == CHECK


def test_the_image_has_every_kernel_and_every_kernel_a_type(image: Path) -> None:
    assert set(vars(Kernels(image.read_bytes()))) == set(source.PARAMETERS) == set(Kernels.__annotations__)


# --- shipped kernels --------------------------------------------------------------------------------------------------


def test_a_shipped_library_answers_as_the_image_does_and_needs_no_compiler(tmp_path: Path, package: Path) -> None:
    """One small kernel at the level every such machine reaches; the wheel's own suite runs them all."""
    level = native.levels_of(platform.machine(), frozenset())[-1]
    folder = package / "logstore" / "records" / native.COMPILED_FOLDER
    folder.mkdir()
    compiler.build_library(level, folder, only=("crc32c",))
    (folder / native.MANIFEST).write_text(json.dumps({"functions": {"crc32c": 2}}))
    program = textwrap.dedent(PROGRAM).format(fake="")
    program = "import sys\nsys.modules['llvmlite'] = sys.modules['numba'] = None\n" + program
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"PYTHONPATH": str(package)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
        timeout=100,
    )
    assert (done.stdout.split()[0], done.stderr) == (hex(CHECK), "")


def test_without_kernels_and_without_a_compiler_the_error_says_what_to_install(package: Path, tmp_path: Path) -> None:
    program = "import sys\nsys.modules['llvmlite'] = sys.modules['numba'] = None\n" + textwrap.dedent(PROGRAM).format(
        fake=""
    )
    environment = {"PYTHONPATH": str(package), "DURAMEN_CACHE_DIR": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "KernelsMissing" in done.stderr
    assert "pip install 'duramen[compile]'" in done.stderr


@pytest.mark.parametrize(
    ("machine", "flags", "best"),
    [
        ("x86_64", "sse4_2 ssse3", "x86_64-v1"),
        ("x86_64", "sse4_2 ssse3 popcnt cx16", "x86_64-v2"),
        ("x86_64", "sse4_2 ssse3 popcnt cx16 movbe avx avx2 f16c fma bmi1 bmi2 abm", "x86_64-v3"),
        ("aarch64", "fp asimd", "aarch64"),
        ("aarch64", "fp asimd crc32", "aarch64-crc"),
        ("riscv64", "", None),
    ],
)
def test_the_best_level_a_processor_reaches(machine: str, flags: str, best: str | None) -> None:
    levels = native.levels_of(machine, frozenset(flags.split()))
    assert (levels[0].name if levels else None) == best


# --- calling ----------------------------------------------------------------------------------------------------------


def test_another_thread_runs_while_a_kernel_does() -> None:
    data = np.zeros(64 << 20, np.uint8)
    kernels().crc32c_tables(address_of(data), 1)
    go, ran = threading.Event(), threading.Event()
    thread = threading.Thread(target=lambda: (go.wait(), ran.set()))
    thread.start()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(100)  # nobody is made to give up the lock: only who gives it away lets another run
    try:
        go.set()
        assert not any(ran.is_set() for _ in range(100_000))
        for _ in range(20):
            kernels().crc32c_tables(address_of(data), len(data))
            if ran.is_set():
                break
        assert ran.is_set()
    finally:
        sys.setswitchinterval(interval)
        thread.join()


def test_a_kernel_takes_ints_and_refuses_others() -> None:
    with pytest.raises(Exception, match="argument"):
        kernels().crc32c("x", 1)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        kernels().crc32c(1)  # type: ignore[call-arg]


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_the_address_of_any_buffer(kind: type) -> None:
    buffer = kind(b"123456789")
    assert kernels().crc32c(address_of(buffer), 9) == CHECK


def test_the_address_of_a_slice_is_its_own() -> None:
    array = np.arange(100, dtype=np.int64)
    assert address_of(array[10:]) == address_of(array) + 80


def test_the_command_warms_the_cache(tmp_path: Path, image: Path) -> None:
    (tmp_path / IMAGE).write_bytes(image.read_bytes())
    command = [sys.executable, "-m", "logstore.records.native"]
    environment = {**os.environ, "DURAMEN_CACHE_DIR": str(tmp_path), "PYTHONPATH": str(PACKAGE.parent)}
    for arguments, code in (([], 0), (["--warm"], 0), (["--cold"], 1)):
        done = subprocess.run([*command, *arguments], env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, "usage" in done.stderr) == (code, code == 1)
