"""Builds the wheel: the packages under `duramen`, their imports rewritten, and the kernels compiled.

In the source tree `logstore`, `streaming` and `compaction_job` lie at the top. Installed like that they would collide
with other distributions of those names, so the wheel has them as `duramen.logstore` and so on (docs/decisions/0010).
An editable install keeps the tree as it is, and compiles nothing.
"""

from __future__ import annotations

import json
import os
import platform
import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
MOVED = ("logstore", "streaming", "compaction_job")
#: folders with files for operators, and what these end in
CONF = [
    f"duramen.{name}"
    for name in ("conf", *(f"conf.{each.name}" for each in (ROOT / "conf").iterdir() if each.is_dir()))
]
CONF_FILES = ["*.toml", "*.yml", "*.yaml", "*.json", "*.service", "*.timer", "*.conf"]
EDITABLE = bool({"editable_wheel", "develop"} & set(sys.argv))
#: the machine the kernels are compiled for; another one than this needs the package ziglang for its linker
MACHINE = os.environ.get("DURAMEN_WHEEL_MACHINE") or platform.machine()

# Import statements only, at the beginning of a line: a name inside a string is never a module of ours by accident.
_FROM = re.compile(rf"^(\s*from )({'|'.join(MOVED)})(?=[. ])", re.MULTILINE)
_IMPORT = re.compile(rf"^(\s*import )({'|'.join(MOVED)})(?=[.\s,])", re.MULTILINE)


def moved(text: str) -> str:
    """The module's text with our imports as the wheel has them."""
    return _IMPORT.sub(r"\1duramen.\2", _FROM.sub(r"\1duramen.\2", text))


def compiled_levels() -> list[str]:
    sys.path.insert(0, str(ROOT))
    from logstore.records.processor import LEVELS

    return [level.name for level in LEVELS if level.machine == MACHINE]


class BuildPackages(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self._compile_kernels(Path(self.build_lib) / "duramen" / "logstore" / "records" / "compiled")

    def build_module(self, module: str, module_file: str, package: str) -> object:
        built, copied = super().build_module(module, module_file, package)
        path = Path(built)
        if not EDITABLE and path.parts[-2:-1] != ("airflow_dags",):
            path.write_text(moved(path.read_text(encoding="utf-8")), encoding="utf-8")
        return built, copied

    def _compile_kernels(self, folder: Path) -> None:
        names = compiled_levels()
        if not names:
            return
        from logstore.records.compiler import build_library
        from logstore.records.kernels import PARAMETERS
        from logstore.records.processor import level_named

        folder.mkdir(parents=True, exist_ok=True)
        print(f"compiling the kernels for {', '.join(names)}", file=sys.stderr)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(lambda name: build_library(level_named(name), folder.resolve()), names))
        (folder / "kernels.json").write_text(json.dumps({"functions": PARAMETERS}))


class WithLibraries(Distribution):
    def has_ext_modules(self) -> bool:
        """Whether the wheel is for one kind of machine."""
        return not EDITABLE and bool(compiled_levels())


class PlatformWheel(bdist_wheel):
    """For any Python, but for one machine: the libraries are loaded by ctypes and need no C library of their own."""

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, tag = super().get_tag()
        return (python, abi, tag) if self.root_is_pure else ("py3", "none", f"manylinux_2_17_{MACHINE}")


if EDITABLE:
    # One plain path: a new package is found without installing again, and no import hook slows the command's start.
    packages = find_packages(str(ROOT), include=["logstore*", "streaming*", "compaction_job*", "duramen*"])
    package_dir = {"": "."}
else:
    inner = [name for top in MOVED for name in find_packages(str(ROOT), include=[top, f"{top}.*"])]
    packages = [
        *find_packages(str(ROOT), include=["duramen", "duramen.*"]),
        *(f"duramen.{name}" for name in inner),
        "duramen.airflow_dags",
        *CONF,
    ]
    package_dir = {f"duramen.{name}": name.replace(".", "/") for name in inner}
    package_dir |= {"duramen.airflow_dags": "airflow_dags"}
    package_dir |= {name: name.removeprefix("duramen.").replace(".", "/") for name in CONF}

setup(
    distclass=WithLibraries,
    packages=packages,
    package_dir=package_dir,
    py_modules=["pyspark_duramen"],
    package_data={
        "": ["py.typed", "*.in"],
        "duramen.console": ["page/*", "page/*/*"],
        **({} if EDITABLE else dict.fromkeys(CONF, CONF_FILES)),
    },
    cmdclass={"build_py": BuildPackages, "bdist_wheel": PlatformWheel},
)
