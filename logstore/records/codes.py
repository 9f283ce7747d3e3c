"""What a kernel returns. Zero is success; the rest says why it stopped."""

from __future__ import annotations

OK = 0
FULL = 1
PARTIAL = 2
BAD_LENGTH = 3
BAD_MAGIC = 4
BAD_CRC = 5
BAD_OFFSET = 6
BAD_COUNT = 7
BAD_RECORD = 8

ROLL_SIZE = 11
ROLL_TIME = 12
ROLL_INDEX_FULL = 13
ROLL_TIME_INDEX_FULL = 14
ROLL_OFFSET_OVERFLOW = 15
ROLL_APPEND_TOO_LARGE = 16

EXPLAINED = {
    PARTIAL: "the file ends inside a batch",
    BAD_LENGTH: "the batch length is impossible",
    BAD_MAGIC: "the magic byte is not 0, 1 or 2",
    BAD_CRC: "the checksum does not match",
    BAD_OFFSET: "the batch's offsets are impossible",
    BAD_COUNT: "the record count does not fit the batch",
    BAD_RECORD: "a record inside the batch is malformed",
}
