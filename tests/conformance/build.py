#!/usr/bin/env python3
"""Builds the conformance driver with Maven.

Owns `target/`: the driver's classes, Kafka's jars in `target/lib`, and Maven's cache in `target/m2` (a cache of its
own, because half-filled entries in the user's cache confuse other resolvers). Builds only when `pom.xml` or a source
has changed. Never names a repository: a mirror goes into Maven's settings, or into the variable MVN_ARGS.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGET = HERE / "target"
INSTALL_COMMAND = "apt-get install openjdk-17-jdk-headless maven"


class BuildError(Exception):
    """The driver could not be built; the text has the end of Maven's output."""


class ToolMissing(BuildError):
    """Java or Maven is not installed; the text names the command that installs both."""


def missing_tools() -> list[str]:
    """The commands that are needed and not there."""
    return [tool for tool in ("java", "javac", "mvn") if shutil.which(tool) is None]


def _fingerprint() -> str:
    """Content, not file times: a fresh checkout gives every file a new time."""
    digest = hashlib.sha256(os.environ.get("MVN_ARGS", "").encode())
    for path in [HERE / "pom.xml", *sorted((HERE / "src").rglob("*"))]:
        if path.is_file():
            digest.update(str(path.relative_to(HERE)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def classpath() -> str:
    return os.pathsep.join([str(TARGET / "classes"), str(TARGET / "lib" / "*")])


def build() -> str:
    """Builds what is out of date and returns the class path; raises ToolMissing or BuildError."""
    missing = missing_tools()
    if missing:
        raise ToolMissing(f"{' and '.join(missing)} not found; install with: {INSTALL_COMMAND}")
    TARGET.mkdir(exist_ok=True)
    stamp = TARGET / "built"
    with open(TARGET / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fingerprint = _fingerprint()
        if stamp.exists() and stamp.read_text() == fingerprint:
            return classpath()
        stamp.unlink(missing_ok=True)
        # A class or a jar of the build before must not linger on the class path.
        for stale in ("classes", "lib"):
            shutil.rmtree(TARGET / stale, ignore_errors=True)
        command = ["mvn", "-B", "-q", "-Dstyle.color=never", f"-Dmaven.repo.local={TARGET / 'm2'}"]
        command += shlex.split(os.environ.get("MVN_ARGS", ""))
        command += ["compile", "dependency:copy-dependencies", f"-DoutputDirectory={TARGET / 'lib'}"]
        done = subprocess.run(command, cwd=HERE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode != 0:
            raise BuildError(f"{shlex.join(command)} ended with {done.returncode}:\n{done.stdout[-4000:]}")
        stamp.write_text(fingerprint)
    return classpath()


if __name__ == "__main__":
    try:
        print(build())
    except BuildError as error:
        sys.exit(str(error))
