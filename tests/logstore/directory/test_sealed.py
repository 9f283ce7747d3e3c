"""The sealed frame: what is written reads back, anything else is a typed error."""

from __future__ import annotations

from pathlib import Path

import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st

from logstore.directory.sealed import read_sealed, seal, unseal, whole_number, whole_numbers, write_sealed
from logstore.errors import CorruptState, StoreVersionError
from logstore.files import OS_FILES

_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
_DOCUMENTS = st.dictionaries(st.text(max_size=5).filter(lambda key: key != "version"), _JSON, max_size=4)


def _sealed(line: bytes) -> bytes:
    return line + b"crc32c %08x\n" % crc32c(line)


def test_the_frame_is_two_lines() -> None:
    assert seal({"a": [1, "x"]}, version=1) == b'{"version":1,"a":[1,"x"]}\ncrc32c d95d5fc0\n'


@settings(max_examples=200)
@given(_DOCUMENTS)
def test_documents_read_back(document: dict[str, object]) -> None:
    assert unseal(seal(document, version=3), version=3, file="f") == document


@settings(max_examples=300)
@given(st.data())
def test_every_single_damage_is_noticed(data: st.DataObject) -> None:
    whole = seal({"high_watermarks": [1, 2, 3], "applied_sequence": 7}, version=1)
    if data.draw(st.booleans()):
        broken = whole[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at, bit = data.draw(st.integers(0, len(whole) - 1)), data.draw(st.integers(0, 7))
        broken = whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]
    with pytest.raises(CorruptState) as caught:
        unseal(broken, version=1, file="some/file")
    assert caught.value.file == "some/file"


@settings(max_examples=300)
@given(st.binary(max_size=100))
def test_any_bytes_give_a_typed_error(content: bytes) -> None:
    with pytest.raises(CorruptState):
        unseal(content, version=1, file="f")


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"not json\n", "not a JSON document"),
        (b"[1]\n", "not a JSON object"),
        (b"{}\n", "no version"),
        (b'{"version":true}\n', "no version"),
        (b'{"version":0}\n', "no version"),
        (b"[" * 100_000 + b"\n", "not a JSON document"),
        (b'{"version":' + b"9" * 5000 + b"}\n", "not a JSON document"),
        (b'{"version":"\xff"}\n', "not a JSON document"),
    ],
)
def test_content_with_a_right_checksum_is_still_checked(line: bytes, says: str) -> None:
    with pytest.raises(CorruptState, match=says):
        unseal(_sealed(line), version=1, file="f")


def test_a_newer_document_asks_for_a_newer_release() -> None:
    with pytest.raises(StoreVersionError, match="newer release"):
        unseal(seal({}, version=2), version=1, file="f")


def test_a_file_beyond_the_limit_is_not_read(tmp_path: Path) -> None:
    path = str(tmp_path / "big")
    write_sealed(OS_FILES, path, {"a": "x" * 100}, version=1)
    assert read_sealed(OS_FILES, path, version=1, limit=1000) == {"a": "x" * 100}
    with pytest.raises(CorruptState, match="larger than the limit"):
        read_sealed(OS_FILES, path, version=1, limit=100)


def test_numbers_within_their_range_are_taken() -> None:
    assert whole_number({"n": 2**63 - 1}, "n", file="f") == 2**63 - 1
    assert whole_number({"n": 0}, "n", file="f", high=0) == 0
    assert whole_numbers({"n": [0, 2**63 - 1]}, "n", file="f") == (0, 2**63 - 1)
    assert whole_numbers({"n": []}, "n", file="f") == ()


@pytest.mark.parametrize("value", [None, 1, "12", {"0": 1}])
def test_a_list_of_numbers_is_a_list(value: object) -> None:
    with pytest.raises(CorruptState, match="n is not a list of offsets"):
        whole_numbers({"n": value}, "n", file="f")


@pytest.mark.parametrize("value", [None, True, -1, 2**63, 1.0, "1", [1]])
def test_numbers_are_checked(value: object) -> None:
    with pytest.raises(CorruptState, match="n is not"):
        whole_number({"n": value}, "n", file="f")
    with pytest.raises(CorruptState, match="n is not"):
        whole_numbers({"n": [0, value]}, "n", file="f")
