"""Environments that differ from the one that runs the tests in their Spark alone, made once, outside the checkout.

Each has the packages of a lock file of this folder, and finds all others where the running interpreter has them. They
lie in `$DURAMEN_VERSIONS_DIR`, or in the user's cache folder, and are made again when the lock file changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path


def folder() -> Path:
    given = os.environ.get("DURAMEN_VERSIONS_DIR")
    if given:
        return Path(given)
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "duramen-versions"


def environment(lock: Path) -> Path:
    """The Python interpreter of an environment that has what `lock` names."""
    digest = hashlib.sha256(lock.read_bytes() + sys.version.encode()).hexdigest()[:16]
    place = folder() / f"{lock.stem}-{digest}"
    place.mkdir(parents=True, exist_ok=True)
    python = place / "bin" / "python"
    with open(place / ".lock", "w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        if not (place / ".complete").exists():
            venv.create(place, with_pip=False)
            command = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps"]
            command += ["--disable-pip-version-check", "--require-hashes", "-r", lock]
            subprocess.run(list(map(str, command)), check=True)
            (place / ".complete").touch()
        version = f"python{sys.version_info.major}.{sys.version_info.minor}"
        # After its own site-packages, so that the environment's Spark wins.
        shared = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        (place / "lib" / version / "site-packages" / "shared.pth").write_text("\n".join(sorted(shared)) + "\n")
    return python
