"""The probe on real servers, again and again: some must pass every time, the others never.

`make soak SUITES=probe` runs it. It needs Maven and npm, and takes some minutes more the first time: rclone is built.
"""

from __future__ import annotations

import functools
import time
import uuid
from collections import Counter
from pathlib import Path

import pytest

from bucket import servers
from bucket.servers import Server
from logstore.errors import UnsuitableObjectStore
from logstore.objects.probe import probe_objects
from logstore.objects.remote import RemoteObjects

TIMES = 20
#: of a probe that passes, on a small machine that does other things, too
SECONDS_MAX = 5.0

SOUND = {"ministack": servers.ministack, "versitygw": servers.versitygw, "azurite": servers.azurite}
UNFIT = {
    "rclone": servers.rclone,
    "s3proxy, filesystem-nio2": functools.partial(servers.s3proxy, provider="filesystem-nio2"),
    "s3proxy, filesystem": functools.partial(servers.s3proxy, provider="filesystem"),
}


def judged(server: Server) -> Counter[str]:
    """What each probe says, and that it takes no long time."""
    said: Counter[str] = Counter()
    seconds = []
    for _ in range(TIMES):
        began = time.monotonic()
        try:
            probe_objects(RemoteObjects(server.url(uuid.uuid4().hex), server.options))
            said["passes"] += 1
        except UnsuitableObjectStore as error:
            said[str(error).partition(" (")[0]] += 1
        seconds.append(time.monotonic() - began)
    print(dict(said), f"in {sorted(seconds)[TIMES // 2]:.2f} s each")
    assert sorted(seconds)[TIMES // 2] < SECONDS_MAX
    return said


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_server_passes_every_time(name: str, tmp_path: Path) -> None:
    with SOUND[name](tmp_path) as server:
        assert judged(server) == {"passes": TIMES}


@pytest.mark.parametrize("name", UNFIT)
def test_an_unfit_server_never_passes(name: str, tmp_path: Path) -> None:
    with UNFIT[name](tmp_path) as server:
        assert not judged(server)["passes"]
