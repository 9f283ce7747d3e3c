"""Files that are closed and opened again behind the back of who uses them."""

from __future__ import annotations

from pathlib import Path

from descriptors import open_files
from logstore.config import LogConfig
from logstore.directory.few_files import OPEN_MAX, FewFiles
from logstore.files import OS_FILES
from logstore.records.record import Record
from logstore.topic import TopicPartition
from reference.partition_writer import PartitionWriter


def test_a_file_is_the_same_after_others_were_used(tmp_path: Path) -> None:
    before = open_files()
    fs = FewFiles(OS_FILES, open_max=3)
    files = [fs.open(str(tmp_path / str(number)), create=True) for number in range(10)]
    for number, file in enumerate(files):
        file.pwrite(b"%d" % number, 0)
    assert open_files() == before + 3
    for number, file in enumerate(files):
        assert file.pread(10, 0) == b"%d" % number
        file.pwrite(b"!", file.size())
        file.fsync()
    assert [(tmp_path / str(number)).read_bytes() for number in range(10)] == [b"%d!" % n for n in range(10)]
    for file in files:
        file.close()
    assert open_files() == before


def test_a_log_of_many_segments_is_opened_with_few_descriptors(tmp_path: Path) -> None:
    def opened(clean: bool) -> PartitionWriter:
        return PartitionWriter.open(
            str(tmp_path / "t-0"),
            partition=TopicPartition("t", 0),
            config=LogConfig(segment_bytes=150),
            clean=clean,
            state_path=str(tmp_path / "state"),
            long_lived=False,
        )

    before = open_files()
    with opened(clean=False) as log:
        for number in range(150):
            log.append([Record(b"k%d" % number, b"v" * 60, 1)])
        assert len(log.segments) == 150
        assert open_files() <= before + OPEN_MAX + 5
    for clean in (True, False):
        with opened(clean) as log:
            assert open_files() <= before + OPEN_MAX + 5
            assert [record.key for record in log.records()] == [b"k%d" % number for number in range(150)]
            log.truncate_to(149 if clean else 148)
            log.append([Record(b"again", b"v" * 60, 1)])
            log.truncate_to(149 if clean else 148)
            log.append([Record(b"k149" if clean else b"k148", b"v" * 60, 1)])
    assert open_files() == before
