"""`duramen consume` and `duramen get`: records of topics, one JSON object a line, and the latest value of one key."""

from __future__ import annotations

import base64
import binascii
import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.options import Encoding, OneTopic, Partition, complete_topic, partition_numbers
from duramen.moments import EXAMPLES, moment_ms
from duramen.record_format import FIELDS, encoder, format_pieces, kafka_pieces
from duramen.session import bad_usage, key_values, print_pairs, session, stop, time_text
from duramen.terminal import json_text, printable, raw

if TYPE_CHECKING:
    from logstore.commit.store_face import Store
    from logstore.directory.ends import TopicEnds
    from logstore.records.record import Record
    from logstore.topics.registry import Topic

Show = Callable[[str, int, "Record"], str]
Write = Callable[[str, int, "Record"], object]

NOT_FOUND = 1
_POLL_S = 0.1
#: partitions whose records are interleaved; more of them would need too many open files
_INTERLEAVED_MAX = 32


class IsolationLevel(str, Enum):
    READ_UNCOMMITTED = "read_uncommitted"
    READ_COMMITTED = "read_committed"


class OutOfRange(str, Enum):
    FAIL = "fail"
    EARLIEST = "earliest"
    LATEST = "latest"


FormatText = Annotated[
    str | None,
    typer.Option("--format", "-f", metavar="TEXT", help=f"Instead of JSON: {FIELDS}.", show_default=False),
]
FromOffset = Annotated[
    str | None,
    typer.Option(
        "--from-offset", "--offset", metavar="N|earliest|latest", help="Where to begin.", show_default="earliest"
    ),
]
FromTimestamp = Annotated[
    int | None,
    typer.Option(
        "--from-timestamp",
        metavar="TIME",
        parser=moment_ms,
        help=f"Begin at the first record at or after this time: {EXAMPLES}.",
        show_default=False,
    ),
]
Isolation = Annotated[
    IsolationLevel,
    typer.Option("--isolation", "--isolation-level", help="read_committed leaves out aborted and open transactions."),
]
Properties = Annotated[
    list[str] | None,
    typer.Option(
        "--property",
        metavar="NAME=VALUE",
        help="Print as Kafka's console consumer does: print.key=true, key.separator=:, …",
        show_default=False,
    ),
]
MaxRecords = Annotated[
    int | None,
    typer.Option("--max-records", "--max-messages", min=0, help="Stop after this many records.", show_default=False),
]


def consume(
    topics: Annotated[
        list[str] | None,
        typer.Argument(metavar="TOPIC...", help="The topics.", show_default=False, autocompletion=complete_topic),
    ] = None,
    encoding: Annotated[
        Encoding, typer.Option("--encoding", help="How keys, values and headers are shown.")
    ] = Encoding.UTF8,
    format_: FormatText = None,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more at the end, until interrupted.")] = False,
    partition: Partition = None,
    from_offset: FromOffset = None,
    from_beginning: Annotated[
        bool, typer.Option("--from-beginning", help="The same as --from-offset earliest.")
    ] = False,
    from_timestamp: FromTimestamp = None,
    max_records: MaxRecords = None,
    isolation: Isolation = IsolationLevel.READ_UNCOMMITTED,
    on_out_of_range: Annotated[
        OutOfRange, typer.Option("--on-out-of-range", help="What to do when --from-offset lies outside the log.")
    ] = OutOfRange.FAIL,
    property_: Properties = None,
    kafka_topic: Annotated[list[str] | None, typer.Option("--topic", hidden=True)] = None,
) -> None:
    """Print records, one JSON object a line; stops at the end unless --follow. Several partitions come interleaved, by
    the times of their records.
    """
    topics = [*(topics or ()), *(kafka_topic or ())]
    if not topics:
        raise bad_usage("Missing argument 'TOPIC...'")
    from_offset = _beginning(from_offset, from_timestamp, from_beginning=from_beginning)
    show = _writer(encoding, format_, property_, several=len(set(topics)) > 1)
    with session.open_any() as store:
        from logstore.restore.visibility import visible_ends

        found = [store.topic(name) for name in sorted(set(topics))]
        chosen = [(topic, number) for topic in found for number in partition_numbers(topic, partition)]
        ends = visible_ends(store, found)
        tails = [
            _Tail(
                store,
                topic,
                number,
                isolation is IsolationLevel.READ_COMMITTED,
                _start(store, topic, number, from_offset, from_timestamp, len(chosen), ends[topic.id]),
                on_out_of_range.value,
            )
            for topic, number in chosen
        ]
        try:
            _print_records(store, found, tails, show, left=max_records, follow=follow)
        except KeyboardInterrupt:
            if not follow:
                raise  # with --follow it is the way to stop


def _beginning(from_offset: str | None, from_timestamp: int | None, *, from_beginning: bool) -> str | None:
    given = [
        name
        for name, is_given in (
            ("--from-offset", from_offset is not None),
            ("--from-timestamp", from_timestamp is not None),
            ("--from-beginning", from_beginning),
        )
        if is_given
    ]
    if len(given) > 1:
        raise bad_usage(f"{' and '.join(given)} exclude each other")
    return "earliest" if from_beginning else from_offset


def _print_records(
    store: Store, topics: list[Topic], tails: list[_Tail], write: Write, *, left: int | None, follow: bool
) -> None:
    """Up to `left` records, or to the end; with `follow`, then those that come."""
    from logstore.restore.visibility import visible_ends

    while True:
        # One moment for all: what was committed to several topics is in all of them or in none.
        ends = visible_ends(store, topics)
        for first in range(0, len(tails), _INTERLEAVED_MAX):
            group = tails[first : first + _INTERLEAVED_MAX]
            for tail, record in _interleaved([each.records(ends[each.topic.id]) for each in group], group):
                if left is not None and left <= 0:
                    return
                write(tail.topic.name, tail.number, record)
                left = None if left is None else left - 1
        if not follow or left == 0:
            return
        sys.stdout.flush()
        time.sleep(_POLL_S)


def _interleaved(records: Sequence[Iterator[Record]], tails: Sequence[_Tail]) -> Iterator[tuple[_Tail, Record]]:
    """By timestamp, looking at the next record of each partition; the order within a partition stays as it is."""
    import heapq

    if len(tails) == 1:
        return ((tails[0], record) for record in records[0])
    pairs = [zip(itertools.repeat(tail), each) for tail, each in zip(tails, records, strict=True)]
    return heapq.merge(*pairs, key=lambda pair: pair[1].timestamp_ms)


def _start(
    store: Store,
    topic: Topic,
    number: int,
    from_offset: str | None,
    from_timestamp: int | None,
    partitions: int,
    ends: TopicEnds,
) -> int:
    """The offset to begin at."""
    end = ends.high_watermarks[number]
    if from_timestamp is not None:
        found = store.reader(topic, number, end_offset=end).offset_for_timestamp(from_timestamp, exact=True)
        return end if found is None else found.offset
    if from_offset is None or from_offset == "earliest":
        return store.partition_state(topic, number).log_start_offset
    if from_offset == "latest":
        return end
    if not (from_offset.isascii() and from_offset.isdigit() and len(from_offset) <= 19):
        raise bad_usage(f"--from-offset takes a number, earliest or latest, not {from_offset!r}")
    if partitions > 1:
        raise bad_usage("an offset means something in one partition only: give one topic, and --partition too")
    return int(from_offset)


@dataclass(slots=True)
class _Tail:
    """One partition read from a position to its end, again and again."""

    store: Store
    topic: Topic
    number: int
    committed: bool
    position: int
    on_out_of_range: str
    #: this read up to the position
    goes_on: bool = False

    def records(self, ends: TopicEnds) -> Iterator[Record]:
        """Up to the ends given."""
        from logstore.partition.reading import OnOutOfRange

        end = ends.visible(committed=self.committed)[self.number]
        how = OnOutOfRange(self.on_out_of_range)
        if end <= self.position <= ends.high_watermarks[self.number]:
            return
        reader = self.store.reader(self.topic, self.number, end_offset=end)
        reader.open_segments_max = 1  # many partitions are read at once
        reader.goes_on = self.goes_on
        try:
            yield from reader.records(self.position, end, committed=self.committed, on_out_of_range=how)
        finally:
            reader.close()
        # Past control records and what compaction removed too, so that waiting is not reading again.
        self.position, self.goes_on = end, True


def _writer(encoding: Encoding, format_: str | None, properties: list[str] | None, *, several: bool) -> Write:
    """Writes a record as JSON, or as asked for: exactly into a pipe, without control characters on a terminal."""
    if format_ is None and not properties:
        show = _shower(encoding, several=several)
        return lambda topic, number, record: sys.stdout.write(show(topic, number, record))
    if session.json:
        raise bad_usage("--format and --property are for text; leave out --output json")
    if format_ is not None and properties:
        raise bad_usage("--format and --property exclude each other")
    is_terminal = sys.stdout.isatty()
    encode = encoder(is_base64=encoding is Encoding.BASE64)
    shown = (
        encode if not is_terminal else lambda data: printable(encode(data).decode("utf-8", "backslashreplace")).encode()
    )
    if format_ is not None:
        pieces = format_pieces(format_, shown)
    else:
        pieces = kafka_pieces(key_values(properties, "--property"), shown)

    def write(topic: str, number: int, record: Record) -> None:
        data = b"".join([piece(topic, number, record) for piece in pieces])
        if is_terminal:
            sys.stdout.write(data.decode("utf-8", "backslashreplace"))
        else:
            raw(sys.stdout).buffer.write(data)

    return write


def _shower(encoding: Encoding, *, several: bool) -> Show:
    """A record as a line; with its topic where there are several."""
    text = text_of(encoding)

    def show(topic: str, number: int, record: Record) -> str:
        document: dict[str, Any] = {
            **({"topic": topic} if several else {}),
            "partition": number,
            "offset": record.offset,
            "timestamp": record.timestamp_ms,
            "key": text(record.key, "key", record.offset),
            "value": text(record.value, "value", record.offset),
            "headers": [[name, text(value, f"header {name}", record.offset)] for name, value in record.headers],
        }
        return json_text(document) + "\n"

    return show


def text_of(encoding: Encoding) -> Callable[[bytes | None, str, int], str | None]:
    """Shows bytes; raises InvalidRecord, with what they are and their offset, where they are not UTF-8."""

    def utf8(data: bytes | None, what: str, offset: int) -> str | None:
        try:
            return None if data is None else data.decode("utf-8")
        except UnicodeDecodeError as error:
            from logstore.errors import InvalidRecord

            raise InvalidRecord(f"the {what} is not UTF-8", offset=offset, hint="Use --encoding base64.") from error

    def base64_(data: bytes | None, what: str, offset: int) -> str | None:
        return None if data is None else base64.b64encode(data).decode("ascii")

    return base64_ if encoding is Encoding.BASE64 else utf8


def get(
    topic: OneTopic,
    key: Annotated[str, typer.Argument(metavar="KEY", help="The key.", show_default=False)],
    encoding: Annotated[Encoding, typer.Option("--encoding", help="How key and value are written.")] = Encoding.UTF8,
) -> None:
    """Print the latest value of a key, with its offset and time. Exit code 1 when the key has no value."""
    from logstore.restore.lookup import latest_of_key

    try:
        wanted = base64.b64decode(key, validate=True) if encoding is Encoding.BASE64 else key.encode()
    except binascii.Error as error:
        raise bad_usage(f"KEY is not base64: {error}") from None
    with session.open_any() as store:
        found = latest_of_key(store, store.topic(topic), wanted)
    if found is None or found.record.value is None:
        state = "was deleted" if found is not None else "has no value"
        session.answer(
            {"topic": topic, "key": key, "found": False}, lambda: print(f"{key} {state} in {topic}", file=sys.stderr)
        )
        stop(NOT_FOUND)
    record = found.record
    value = record.value
    assert value is not None
    shown = base64.b64encode(value).decode() if encoding is Encoding.BASE64 else value.decode("utf-8", "replace")
    document = {
        "topic": topic,
        "key": key,
        "found": True,
        "value": shown,
        "partition": found.partition,
        "offset": record.offset,
        "timestamp": record.timestamp_ms,
    }
    session.answer(
        document,
        lambda: print_pairs(
            [
                ("value", shown),
                ("partition", found.partition),
                ("offset", record.offset),
                ("time", time_text(record.timestamp_ms)),
            ]
        ),
    )
