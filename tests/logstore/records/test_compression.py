"""What all codecs share: Kafka's numbers and names, levels, limits, buffers, threads, and bytes from outside."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import textwrap
import tracemalloc
import zlib
from array import array
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cramjam
import pytest
from hypothesis import given
from hypothesis import strategies as st

from logstore.errors import CorruptBatch, DecompressionLimit, InvalidConfig, UnsupportedFormat
from logstore.records.compression import CODECS, Codec, OutputTooSmall, codec_by_id, codec_by_name

MIB = 1 << 20
COMPRESSING = CODECS[1:]
LEVELS = [
    *((codec_by_name("gzip"), level) for level in (None, -1, *range(1, 10))),
    (codec_by_name("snappy"), None),
    *((codec_by_name("lz4"), level) for level in (None, *range(1, 18))),
    *((codec_by_name("zstd"), level) for level in (None, -131072, -100, -1, 0, 1, 3, 9, 19, 22)),
]
REFUSED_LEVELS = [
    *(("gzip", level) for level in (-2, 0, 10)),
    *(("snappy", level) for level in (-1, 0, 1)),
    *(("lz4", level) for level in (-1, 0, 18)),
    *(("zstd", level) for level in (-131073, 23)),
    ("none", 1),
]

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)
every_compressing_codec = pytest.mark.parametrize("codec", COMPRESSING, ids=lambda codec: codec.name)


def wordy(size: int, seed: int = 1) -> bytes:
    """Text that shrinks to about a half."""
    rng = random.Random(seed)
    words = [bytes(rng.choices(b"abcdefghijklmnopqrstuvwxyz", k=rng.randint(2, 9))) for _ in range(500)]
    return b" ".join(rng.choices(words, k=size // 3 + 1))[:size]


# Around every block size: 32 KiB of snappy, 64 KiB of lz4, 128 KiB of zstd.
PAYLOADS = {
    "empty": b"",
    "one byte": b"k",
    "short": b"key" * 9,
    "batch of words": wordy(16_384),
    "batch of noise": random.Random(2).randbytes(16_384),
    "one snappy block": wordy(32 * 1024),
    "one byte above a snappy block": wordy(32 * 1024 + 1),
    "one lz4 block": wordy(64 * 1024),
    "one byte above an lz4 block": wordy(64 * 1024 + 1),
    "many blocks": wordy(700_001),
    "many blocks of noise": random.Random(3).randbytes(300_001),
    "zeros": bytes(1_000_003),
}

#: pieces repeated and cut, so that matches, runs and block borders all occur
payloads = st.builds(
    lambda piece, times, tail: piece * times + tail,
    st.binary(max_size=400),
    st.integers(min_value=0, max_value=600),
    st.binary(max_size=200),
)


def test_codecs_have_kafkas_numbers_and_names() -> None:
    assert [(codec.id, codec.name) for codec in CODECS] == [
        (0, "none"),
        (1, "gzip"),
        (2, "snappy"),
        (3, "lz4"),
        (4, "zstd"),
    ]
    assert [codec_by_id(codec.id) for codec in CODECS] == list(CODECS)
    assert [codec_by_name(codec.name) for codec in CODECS] == list(CODECS)


@pytest.mark.parametrize("codec_id", [5, 6, 7, -1, 8])
def test_a_number_without_meaning_is_unsupported(codec_id: int) -> None:
    with pytest.raises(UnsupportedFormat, match=str(codec_id)):
        codec_by_id(codec_id)


def test_an_unknown_name_is_answered_with_the_known_ones() -> None:
    with pytest.raises(InvalidConfig, match=r"'brotli'.*none, gzip, snappy, lz4, zstd"):
        codec_by_name("brotli")


@pytest.mark.parametrize("payload", PAYLOADS.values(), ids=PAYLOADS.keys())
@every_codec
def test_a_payload_comes_back(codec: Codec, payload: bytes) -> None:
    compressed = codec.compress(payload)
    assert isinstance(compressed, bytes)
    restored = codec.decompress(compressed, limit=len(payload))
    assert isinstance(restored, bytes)
    assert restored == payload


@pytest.mark.parametrize(
    ("codec", "level"), LEVELS, ids=[f"{codec.name}-{level}".replace("--", "-minus-") for codec, level in LEVELS]
)
def test_a_payload_comes_back_at_every_level(codec: Codec, level: int | None) -> None:
    for payload in (b"", wordy(5_000), wordy(150_000)):
        assert codec.decompress(codec.compress(payload, level), limit=MIB) == payload


@pytest.mark.parametrize(("name", "level"), REFUSED_LEVELS)
def test_a_level_outside_kafkas_range_is_refused(name: str, level: int) -> None:
    with pytest.raises(InvalidConfig):
        codec_by_name(name).compress(b"payload", level)


@given(payload=payloads, level=st.sampled_from(LEVELS))
def test_any_payload_comes_back(payload: bytes, level: tuple[Codec, int | None]) -> None:
    codec, at = level
    assert codec.decompress(codec.compress(payload, at), limit=len(payload)) == payload


@every_codec
def test_any_kind_of_buffer_is_taken(codec: Codec) -> None:
    numbers = array("I", range(5_000))
    payload = numbers.tobytes()
    compressed = codec.compress(payload)
    for same in (bytearray(payload), memoryview(payload), numbers, memoryview(numbers), memoryview(payload)[:]):
        assert codec.compress(same) == compressed
    padded = b"xx" + compressed + b"yy"
    for same in (bytearray(compressed), memoryview(compressed), memoryview(padded)[2:-2]):
        assert codec.decompress(same, limit=MIB) == payload


@every_codec
def test_output_goes_to_the_start_of_a_larger_buffer_and_nowhere_else(codec: Codec) -> None:
    payload = wordy(100_000)
    backing = bytearray(b"\xaa" * 400_000)
    written = codec.decompress_into(codec.compress(payload), memoryview(backing)[1_000:300_000])
    assert written == len(payload)
    assert backing[1_000 : 1_000 + written] == payload
    assert set(backing[:1_000]) == {0xAA}
    assert set(backing[300_000:]) == {0xAA}


@pytest.mark.parametrize("payload", [p for p in PAYLOADS.values() if p], ids=[k for k, p in PAYLOADS.items() if p])
@every_codec
def test_a_buffer_that_fits_exactly_is_enough_and_one_byte_less_is_not(codec: Codec, payload: bytes) -> None:
    compressed = codec.compress(payload)
    out = bytearray(len(payload))
    assert codec.decompress_into(compressed, memoryview(out)) == len(payload)
    assert out == payload
    for room in (len(payload) - 1, 0):
        with pytest.raises(OutputTooSmall):
            codec.decompress_into(compressed, memoryview(bytearray(room)))
        with pytest.raises(DecompressionLimit, match=str(room)):
            codec.decompress(compressed, limit=room)


def bomb(codec: Codec, total_bytes: int = 1024 * MIB) -> bytes:
    """Zeros, made without compressing all of them."""
    if codec.name == "gzip":
        # One member: after a full flush deflate data can be repeated.
        deflate = zlib.compressobj(9, zlib.DEFLATED, 31)
        head = deflate.compress(bytes(MIB)) + deflate.flush(zlib.Z_FULL_FLUSH)
        repeated = deflate.compress(bytes(16 * MIB)) + deflate.flush(zlib.Z_FULL_FLUSH)
        return head + repeated * (total_bytes // (16 * MIB))
    if codec.name == "zstd":
        # A block of one byte repeated takes four bytes.
        run = ((128 * 1024) << 3 | 1 << 1).to_bytes(3, "little") + b"\x00"
        return bytes.fromhex("28b52ffd0058") + run * (total_bytes // (128 * 1024)) + b"\x01\x00\x00"
    if codec.name == "lz4":
        block = codec.compress(bytes(64 * 1024))[7:-4]
        return codec.compress(b"")[:7] + block * (total_bytes // (64 * 1024)) + bytes(4)
    block = codec.compress(bytes(32 * 1024))[16:]
    return codec.compress(b"")[:16] + block * (total_bytes // (32 * 1024))


@every_compressing_codec
def test_a_small_bomb_is_a_valid_payload(codec: Codec) -> None:
    size = 32 * MIB
    explosive = bomb(codec, size)
    if codec.name == "gzip":
        explosive = codec.compress(bytes(size))
    assert codec.decompress(explosive, limit=size) == bytes(size)


@every_compressing_codec
def test_a_bomb_of_a_gibibyte_costs_no_more_memory_than_the_limit(codec: Codec) -> None:
    limit = 24 * MIB
    explosive = bomb(codec)
    tracemalloc.start()
    try:
        with pytest.raises(DecompressionLimit, match=str(limit)):
            codec.decompress(explosive, limit=limit)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes <= limit + 3 * MIB


def test_bombs_are_refused_by_a_process_that_has_no_memory_to_spare() -> None:
    # The allocations of native libraries do not show in tracemalloc; a limit on the address space catches them as well.
    script = """
        import resource, sys
        from pathlib import Path
        from logstore.errors import DecompressionLimit
        from logstore.records.compression import CODECS

        bombs = [sys.stdin.buffer.read(int(size)) for size in sys.argv[1:]]
        for codec in CODECS:
            codec.decompress(codec.compress(bytes(100_000)), limit=1 << 20)
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        ceiling = pages * resource.getpagesize() + (48 << 20)
        resource.setrlimit(resource.RLIMIT_AS, (ceiling, ceiling))
        for codec, explosive in zip(CODECS[1:], bombs):
            try:
                codec.decompress(explosive, limit=24 << 20)
            except DecompressionLimit:
                print(codec.name)
    """
    bombs = [bomb(codec, 256 * MIB) for codec in COMPRESSING]
    finished = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *(str(len(explosive)) for explosive in bombs)],
        input=b"".join(bombs),
        capture_output=True,
        cwd=Path(__file__).resolve().parents[3],
        check=False,
    )
    assert finished.stderr == b""
    assert finished.stdout.decode().split() == [codec.name for codec in COMPRESSING]


@every_compressing_codec
def test_a_stream_cut_anywhere_is_corrupt_or_visibly_shorter(codec: Codec) -> None:
    payload = wordy(66_000)
    compressed = codec.compress(payload)
    cuts = {*range(200), *range(len(compressed) - 200, len(compressed)), *range(0, len(compressed), 97)}
    for cut in sorted(cuts):
        shorter, position = None, None
        try:
            shorter = codec.decompress(compressed[:cut], limit=MIB)
        except CorruptBatch as error:
            position = error.position
        if shorter is None:
            assert position is not None
            assert 0 <= position <= cut
        else:
            # Only a snappy stream has no end mark; there the number of records gives the loss away.
            assert codec.name == "snappy"
            assert len(shorter) % (32 * 1024) == 0
            assert shorter == payload[: len(shorter)]
            assert len(shorter) < len(payload)


@every_compressing_codec
def test_short_streams_cut_at_every_byte(codec: Codec) -> None:
    for payload in (b"", b"k", wordy(700)):
        compressed = codec.compress(payload)
        for cut in range(len(compressed)):
            if codec.name == "snappy" and cut == 16 and payload:
                assert codec.decompress(compressed[:cut], limit=MIB) == b""
                continue
            with pytest.raises(CorruptBatch):
                codec.decompress(compressed[:cut], limit=MIB)


SAMPLES = [
    (codec, codec.compress(payload))
    for codec in COMPRESSING
    for payload in (b"", b"k", wordy(900), wordy(70_000), bytes(5_000), random.Random(4).randbytes(3_000))
]


def decompress_hostile(codec: Codec, data: bytes, magic: int) -> None:
    """Whatever the bytes are: a payload within the limit or a typed error, and the same answer when asked again."""
    limit = 200_000
    answers: list[object] = []
    for _ in range(2):
        try:
            payload = codec.decompress(data, limit=limit, magic=magic)
            assert len(payload) <= limit
            answers.append(payload)
        except (CorruptBatch, DecompressionLimit) as error:
            answers.append(str(error))
    assert answers[0] == answers[1]


@given(data=st.data(), sample=st.sampled_from(SAMPLES), magic=st.sampled_from([0, 1, 2]))
def test_flipped_bits_give_a_typed_error_or_a_bounded_payload(
    data: st.DataObject, sample: tuple[Codec, bytes], magic: int
) -> None:
    codec, compressed = sample
    damaged = bytearray(compressed)
    # Headers are where the decisions are.
    places = st.integers(0, min(len(damaged), 40) - 1) | st.integers(0, len(damaged) - 1)
    for place, bit in data.draw(st.lists(st.tuples(places, st.integers(0, 7)), min_size=1, max_size=6)):
        damaged[place] ^= 1 << bit
    decompress_hostile(codec, bytes(damaged), magic)


@given(
    data=st.data(),
    sample=st.sampled_from(SAMPLES),
    piece=st.binary(max_size=12) | st.sampled_from([b"\xff" * 4, b"\x7f\xff\xff\xff", b"\x80\x00\x00\x00", bytes(9)]),
)
def test_spliced_bytes_give_a_typed_error_or_a_bounded_payload(
    data: st.DataObject, sample: tuple[Codec, bytes], piece: bytes
) -> None:
    codec, compressed = sample
    start = data.draw(st.integers(0, len(compressed)))
    end = data.draw(st.integers(start, min(len(compressed), start + 20)))
    decompress_hostile(codec, compressed[:start] + piece + compressed[end:], magic=2)


@given(codec=st.sampled_from(COMPRESSING), noise=st.binary(max_size=300), sized=st.booleans())
def test_noise_gives_a_typed_error_or_a_bounded_payload(codec: Codec, noise: bytes, sized: bool) -> None:
    header = codec.compress(b"")[: {"gzip": 10, "snappy": 16, "lz4": 7, "zstd": 4}[codec.name]] if sized else b""
    decompress_hostile(codec, header + noise, magic=2)


@every_compressing_codec
def test_codecs_may_be_shared_by_threads(codec: Codec) -> None:
    levels = [level for other, level in LEVELS if other is codec][:4]

    def work(seed: int) -> bool:
        out = memoryview(bytearray(64 * 1024))
        for turn in range(20):
            payload = wordy(10_000 + seed, seed * 100 + turn)
            compressed = codec.compress(payload, levels[turn % len(levels)])
            written = codec.decompress_into(compressed, out)
            if out[:written] != payload or codec.decompress(compressed, limit=MIB) != payload:
                return False
        return True

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))


@every_compressing_codec
def test_words_shrink(codec: Codec) -> None:
    assert len(codec.compress(wordy(100_000))) < 70_000


V2_CASES = {
    case["name"]: bytes.fromhex(case["hex"])
    for case in json.loads((Path(__file__).resolve().parents[2] / "vectors" / "batches_v2.json").read_text())["cases"]
}


@every_compressing_codec
def test_what_kafka_compressed_is_what_it_stores_uncompressed(codec: Codec) -> None:
    compared = 0
    for name, batch in V2_CASES.items():
        plain = V2_CASES.get(name.removesuffix(codec.name) + "none")
        if plain is None or not name.endswith("_" + codec.name):
            continue
        assert codec.decompress(batch[61:], limit=MIB) == plain[61:], name
        compared += 1
    assert compared >= 3


def test_the_engine_uses_the_library_it_names() -> None:
    # The raw blocks of the other build of this library are of another make and have not been tried.
    assert getattr(cramjam, "backend", "c") == "c"
