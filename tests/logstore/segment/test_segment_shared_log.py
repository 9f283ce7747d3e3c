"""Files that a backup or an export shares: ours gets a copy of its own before it is changed in place."""

from __future__ import annotations

import random

import pytest

from logstore.segment.segment import LogSegment
from logstore.segment.segment_reader import SegmentSettings
from simulation.filesystem import PowerCut, SimulatedFileSystem
from simulation.logs import DIRECTORY, contents, open_log, recs


@pytest.mark.parametrize("power", [False, True], ids=["killed", "power cut"])
def test_a_shared_log_is_copied_before_it_is_changed_whatever_happens(power: bool) -> None:
    """A backup has the file under another name; wherever a cut of ours ends, it keeps every byte."""
    start = SimulatedFileSystem()
    log = open_log(start)
    for _ in range(4):
        log.append(recs(3))
    log.close()
    name = f"{DIRECTORY}/{0:020d}.log"
    start.mkdir("/backup")
    start.link(name, "/backup/copy")
    start.fsync_dir("/backup")
    start.fsync_dir("/")
    whole = start.files()["/backup/copy"]

    def cut(fs: SimulatedFileSystem) -> None:
        segment = LogSegment(fs, DIRECTORY, 0, writable=True, settings=SegmentSettings())
        segment.truncate_to(6)
        segment.flush()
        segment.close(clean=False)

    done = start.kill()
    before = done.operations
    cut(done)
    assert len(done.files()[name]) < len(whole)
    for step in range(done.operations - before):
        fs = start.kill()
        fs.fail_after(step)
        with pytest.raises(PowerCut):
            cut(fs)
        survivor = fs.crash(random.Random(step)) if power else fs.kill()
        assert survivor.files()["/backup/copy"] == whole, step
        left = survivor.files()[name]
        assert whole.startswith(left), step
        again = open_log(survivor, clean=False)
        assert [row[0] for row in contents(again)] == list(range(again.log_end_offset)), step
        assert again.log_end_offset in (6, 12), step
        assert not [each for each in survivor.listdir(DIRECTORY) if each.endswith(".tmp")]
