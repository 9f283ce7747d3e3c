"""Records by offset, time or key, a page at a time. One request looks at so many bytes at most, for so long at most."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from duramen.console.formats import Decode, shown
from duramen.console.position import read_position, write_position
from duramen.console.problems import Refused, bad_request
from duramen.console.view import View
from logstore.limits import INT64_MAX
from logstore.partition.reader import PartitionReader
from logstore.partition.reading import OnOutOfRange
from logstore.records.partitioner import partition_for_key
from logstore.records.record import Record
from logstore.topics.registry import Topic

_SCANNED_BYTES_MAX, _SECONDS_MAX = 64 << 20, 3.0
#: keys and values of one page together, before they are cut
_PAGE_BYTES_MAX = 32 << 20
_HEADERS_MAX = 100
_WINDOW_MIN, _WINDOW_MAX = 512, 1 << 20


@dataclass(frozen=True, slots=True)
class Shown:
    """How bytes are shown."""

    key_as: str
    value_as: str
    value_bytes: int
    keys: Mapping[str, Decode]
    values: Mapping[str, Decode]

    def message(self, number: int, record: Record) -> dict[str, Any]:
        headers = record.headers[:_HEADERS_MAX]
        sizes = [len(record.key or b""), len(record.value or b"")]
        sizes += [len(name.encode()) + len(value or b"") for name, value in record.headers]
        return {
            "partition": number,
            "offset": record.offset,
            "timestamp_ms": record.timestamp_ms if record.timestamp_ms >= 0 else None,
            "timestamp_type": str(record.timestamp_type),
            "key": shown(record.key, self.key_as, self.value_bytes, self.keys),
            "value": shown(record.value, self.value_as, self.value_bytes, self.values),
            "tombstone": record.value is None,
            "headers": [
                {"name": name[: self.value_bytes], "value": shown(value, "auto", self.value_bytes, {})}
                for name, value in headers
            ],
            "headers_left_off": len(record.headers) - len(headers),
            "size_bytes": sum(sizes),
        }


@dataclass(slots=True)
class _Work:
    """What one request may still do."""

    limit: int
    began: float = field(default_factory=time.monotonic)
    scanned_bytes: int = 0
    page_bytes: int = 0
    #: everything below was looked at
    reached: int = 0

    @property
    def is_over(self) -> bool:
        return self.scanned_bytes >= _SCANNED_BYTES_MAX or time.monotonic() - self.began > _SECONDS_MAX


@dataclass(frozen=True, slots=True)
class _Place:
    """A partition that is read, for whom, and between which offsets."""

    view: View
    topic: Topic
    number: int
    start: int
    end: int
    committed: bool
    key: bytes | None

    def records(self, first: int, last: int, work: _Work, *, scan_bytes_max: int | None = None) -> Iterator[Record]:
        """Those of [first, last) that are wanted, in order; ends early when so many bytes were looked at, or when the
        work is over: `work.reached` says where.
        """
        before, work.reached = work.scanned_bytes, first
        reader = self.view.store.reader(self.topic, self.number, end_offset=self.end)
        try:
            for columns in reader.columns(first, last, committed=self.committed, on_out_of_range=OnOutOfRange.EARLIEST):
                work.scanned_bytes += len(columns.values.data) + len(columns.keys.data) + 16 * len(columns)
                yield from columns.records() if self.key is None else columns.having_key(self.key)
                work.reached = int(columns.offsets[-1]) + 1
                if work.is_over if scan_bytes_max is None else work.scanned_bytes - before > scan_bytes_max:
                    return
            work.reached = last
        finally:
            reader.close()


def key_bytes(key: str, key_format: str) -> bytes:
    """A key as it was written in a request. Raises Refused."""
    try:
        if key_format == "hex":
            return bytes.fromhex(key)
        if key_format == "long":
            return int(key).to_bytes(8, "big", signed=True)
        if key_format == "json":
            json.loads(key)
    except (ValueError, OverflowError, RecursionError):
        raise bad_request(f"the key is not {key_format}", parameter="key") from None
    return key.encode()


@dataclass(frozen=True, slots=True)
class Asked:
    """The parameters of a question for messages, as the contract has them."""

    partition: int | None = None
    at_offset: int | None = None
    at_ms: int | None = None
    key: str | None = None
    key_format: str = "text"
    direction: str | None = None
    limit: int = 50
    position: str | None = None
    isolation: str = "read_uncommitted"
    key_as: str = "auto"
    value_as: str = "auto"
    value_bytes: int = 2048

    @property
    def is_backward(self) -> bool:
        """Unless it is said, from the newest record on when nothing says where to begin."""
        if self.direction is not None:
            return self.direction == "backward"
        return self.key is None and self.at_offset is None and self.at_ms is None


def messages(view: View, *, topic: str, **given: Any) -> dict[str, Any]:
    """`given` has the parameters of `Asked`."""
    asked = Asked(**given)
    if asked.at_offset is not None and asked.at_ms is not None:
        raise bad_request("at_offset and at_ms exclude each other")
    found = view.store.topic(topic)
    wanted = None if asked.key is None else key_bytes(asked.key, asked.key_format)
    backward, committed = asked.is_backward, asked.isolation == "read_committed"
    ends = view.store.ends(found).visible(committed=committed)
    places = [
        _Place(view, found, number, _log_start(view, found, number), ends[number], committed, wanted)
        for number in _numbers(found, asked.partition, wanted)
    ]
    if asked.position is None:
        at, offset = 0, _begin(places[0], asked.at_offset, asked.at_ms, backward)
    else:
        at, offset = _read(asked.position, backward, len(places))
    work = _Work(asked.limit)
    form = _form(view, topic, asked.key_as, asked.value_as, asked.value_bytes)
    page, more = _page(places, at, offset, backward, form, work)
    one = places[0] if len(places) == 1 else None
    return {
        "now_ms": view.now_ms,
        "topic": topic,
        "partition": None if one is None else one.number,
        "log_start_offset": None if one is None else one.start,
        "log_end_offset": None if one is None else one.end,
        "messages": page,
        "next": None if more is None else write_position("b" if backward else "f", *more),
        "complete": not work.is_over,
        "scanned_bytes": work.scanned_bytes,
    }


def _form(view: View, topic: str, key_as: str, value_as: str, value_bytes: int) -> Shown:
    return Shown(key_as, value_as, value_bytes, view.schemas.of(topic, "key"), view.schemas.of(topic, "value"))


def _numbers(topic: Topic, partition: int | None, key: bytes | None) -> list[int]:
    if partition is not None:
        topic.partition(partition)  # raises UnknownTopic
        return [partition]
    if key is None:
        return [0]
    return [partition_for_key(key, topic.partitions)] if topic.keyed else list(range(topic.partitions))


def _log_start(view: View, topic: Topic, number: int) -> int:
    return view.store.partition_state(topic, number).log_start_offset


def _read(position: str, backward: bool, places: int) -> tuple[int, int]:
    at, offset = read_position(position, "b" if backward else "f", 2)
    if not 0 <= at < places or offset < 0:
        raise bad_request("the position is none of ours", parameter="position")
    return at, offset


def _begin(place: _Place, at_offset: int | None, at_ms: int | None, backward: bool) -> int | None:
    """The offset to begin at; for going backward, the first that is not shown. None: where the log begins or ends."""
    if at_offset is not None:
        return min(at_offset + 1, INT64_MAX) if backward else at_offset
    if at_ms is None:
        return None
    reader = place.view.store.reader(place.topic, place.number, end_offset=place.end)
    try:
        found = reader.offset_for_timestamp(at_ms, exact=True)
        return _first_since(place, reader, at_ms) if found is None else found.offset
    finally:
        reader.close()


def _first_since(place: _Place, reader: PartitionReader, at_ms: int) -> int:
    """The same by looking: as Kafka does, the lookup takes an emptied segment to be as young as its file, and then
    finds nothing in it.
    """
    segments = place.view.store.partition_state(place.topic, place.number).segments
    held = [each for each in segments if each.size_bytes and each.largest_timestamp_ms >= at_ms] or segments[-1:]
    scanned = 0
    for columns in reader.columns(
        max(held[0].base_offset, place.start) if held else place.start,
        place.end,
        on_out_of_range=OnOutOfRange.EARLIEST,
        headers=False,
    ):
        rows = np.nonzero(columns.timestamps_ms >= at_ms)[0]
        if len(rows):
            return int(columns.offsets[rows[0]])
        scanned += len(columns.values.data) + len(columns.keys.data)
        if scanned > _SCANNED_BYTES_MAX:
            return int(columns.offsets[-1]) + 1
    return place.end


def _page(
    places: list[_Place], at: int, offset: int | None, backward: bool, form: Shown, work: _Work
) -> tuple[list[dict[str, Any]], tuple[int, int] | None]:
    """Messages, and where the next page begins: which place, and its offset."""
    page: list[dict[str, Any]] = []
    while at < len(places):
        place = places[at]
        walk = _backward if backward else _forward
        more = walk(place, offset, page, form, work)
        if more is not None:
            return page, (at, more)
        at, offset = at + 1, None
        if at < len(places) and (work.is_over or len(page) >= work.limit):
            return page, (at, places[at].end if backward else places[at].start)
    return page, None


def _forward(place: _Place, offset: int | None, page: list[dict[str, Any]], form: Shown, work: _Work) -> int | None:
    """Adds to the page; returns where to go on, None at the end."""
    first = place.start if offset is None else max(offset, place.start)
    if first >= place.end:
        return None
    for record in place.records(first, place.end, work):
        if len(page) >= work.limit or work.page_bytes >= _PAGE_BYTES_MAX:
            return record.offset
        _add(page, place, record, form, work)
    return work.reached if work.reached < place.end else None


def _backward(place: _Place, offset: int | None, page: list[dict[str, Any]], form: Shown, work: _Work) -> int | None:
    """The same from the end: windows of offsets that grow where compaction has left few records."""
    last = place.end if offset is None else min(offset, place.end)
    window = _WINDOW_MIN
    while last > place.start:
        if work.is_over or len(page) >= work.limit or work.page_bytes >= _PAGE_BYTES_MAX:
            return last
        first = max(last - window, place.start)
        left = work.limit - len(page)
        newest: deque[Record] = deque(maxlen=left)
        size, count = 0, 0
        # A window counts only as a whole: the newest of it come last. The smallest is read however large it is.
        scan_bytes_max = _SCANNED_BYTES_MAX if window > _WINDOW_MIN else 1 << 62
        for record in place.records(first, last, work, scan_bytes_max=scan_bytes_max):
            count += 1
            size += len(record.value or b"") + len(record.key or b"")
            newest.append(record)
            if size > _PAGE_BYTES_MAX and len(newest) > 1:
                size -= len(newest[0].value or b"") + len(newest[0].key or b"")
                newest.popleft()
        if work.reached < last:
            window = max(window // 8, _WINDOW_MIN)
            continue
        for record in reversed(newest):
            _add(page, place, record, form, work)
        last = first if count <= len(newest) else newest[0].offset
        window = min(window * 4, _WINDOW_MAX) if work.scanned_bytes < _SCANNED_BYTES_MAX // 8 else window
    return None


def _add(page: list[dict[str, Any]], place: _Place, record: Record, form: Shown, work: _Work) -> None:
    message = form.message(place.number, record)
    work.page_bytes += message["size_bytes"]
    page.append(message)


def message(
    view: View,
    *,
    topic: str,
    partition: int,
    message_offset: int,
    key_as: str = "auto",
    value_as: str = "auto",
    value_bytes: int = 2048,
) -> dict[str, Any]:
    found = view.store.topic(topic)
    found.partition(partition)
    end = view.store.ends(found).high_watermarks[partition]
    place = _Place(view, found, partition, _log_start(view, found, partition), end, False, None)
    form = _form(view, topic, key_as, value_as, value_bytes)
    if place.start <= message_offset < end:
        for record in place.records(message_offset, message_offset + 1, _Work(1)):
            return form.message(partition, record)
    raise Refused(
        404,
        "NoSuchMessage",
        f"{topic}-{partition} has no record at offset {message_offset}",
        hint="It may have been compacted away, or is not written yet.",
    )
