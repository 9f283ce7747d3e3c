from __future__ import annotations

import random
from pathlib import Path

import pytest

from logstore.files import OS_FILES
from logstore.segment.resync import Effort, intact_at, next_intact
from simulation.logs import sized_batch


def test_the_next_intact_batch_is_found_wherever_it_begins(tmp_path: Path) -> None:
    rng = random.Random(3)
    whole = sized_batch(200, count=3, base_offset=500)
    for junk_bytes in (1, 60, 1000, (1 << 20) - 100, (1 << 20) + 5):
        path = tmp_path / "f"
        junk = rng.randbytes(junk_bytes)
        path.write_bytes(junk + whole + junk)
        file = OS_FILES.open(str(path))
        found = next_intact(file, 0, file.size(), low=0, high=1000, effort=Effort.for_file(file.size()))
        assert found is not None
        assert (found.position, found.base_offset, found.last_offset) == (junk_bytes, 500, 502)
        assert intact_at(file, junk_bytes, file.size()) == found
        assert intact_at(file, junk_bytes + 1, file.size()) is None
        assert next_intact(file, 0, file.size(), low=500, high=503, effort=Effort(1 << 30)) == found
        for low, high in ((501, 1000), (0, 502)):
            assert next_intact(file, 0, file.size(), low=low, high=high, effort=Effort(1 << 30)) is None
        file.close()


def test_the_effort_of_a_search_is_bounded(tmp_path: Path) -> None:
    """Headers of large batches at many positions, each of which would have to be read to be refused."""
    path = tmp_path / "f"
    header = bytearray(sized_batch(100, base_offset=7)[:61])
    header[8:12] = (4 << 20).to_bytes(4, "big")
    path.write_bytes(bytes(header) * 100_000 + bytes(4 << 20))
    file = OS_FILES.open(str(path))
    effort = Effort(64 << 20)
    assert next_intact(file, 0, file.size(), low=0, high=1000, effort=effort) is None
    assert -(5 << 20) < effort.left_bytes < 0, "it ends with the batch that exceeds it"
    path.write_bytes(random.Random(1).randbytes(8 << 20))
    file = OS_FILES.open(str(path))
    assert next_intact(file, 0, file.size(), low=0, high=1 << 40, effort=Effort(1 << 20)) is None


@pytest.mark.parametrize("cut", [0, 10, 25])
def test_the_end_of_a_file_is_no_batch(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "f"
    path.write_bytes(sized_batch(100)[:cut])
    file = OS_FILES.open(str(path))
    assert next_intact(file, 0, file.size(), low=0, high=10, effort=Effort(1 << 20)) is None
