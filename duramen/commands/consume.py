"""`duramen consume` and `duramen get`: records of topics, one JSON object a line, and the latest value of one key."""

from __future__ import annotations

import base64
import binascii
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.options import Encoding, OneTopic, Partition, partition_numbers
from duramen.session import bad_usage, print_pairs, session, stop, time_text
from duramen.terminal import json_text

if TYPE_CHECKING:
    from logstore.directory.ends import TopicEnds
    from logstore.records.record import Record
    from logstore.store import LogStore
    from logstore.topics.registry import Topic

Show = Callable[[str, int, "Record"], str]

NOT_FOUND = 1
_POLL_S = 0.1


class IsolationLevel(str, Enum):
    READ_UNCOMMITTED = "read_uncommitted"
    READ_COMMITTED = "read_committed"


class OutOfRange(str, Enum):
    FAIL = "fail"
    EARLIEST = "earliest"
    LATEST = "latest"


def consume(
    topics: Annotated[list[str], typer.Argument(metavar="TOPIC...", help="The topics.", show_default=False)],
    encoding: Annotated[
        Encoding, typer.Option("--encoding", help="How keys, values and headers are shown.")
    ] = Encoding.UTF8,
    follow: Annotated[bool, typer.Option("--follow", help="Wait for more at the end, until interrupted.")] = False,
    partition: Partition = None,
    from_offset: Annotated[
        str | None,
        typer.Option("--from-offset", metavar="N|earliest|latest", help="Where to begin.", show_default="earliest"),
    ] = None,
    from_timestamp: Annotated[
        int | None,
        typer.Option(
            "--from-timestamp",
            metavar="MS",
            min=0,
            help="Begin at the first record at or after this time.",
            show_default=False,
        ),
    ] = None,
    max_records: Annotated[
        int | None, typer.Option("--max-records", min=0, help="Stop after this many records.", show_default=False)
    ] = None,
    isolation: Annotated[
        IsolationLevel, typer.Option("--isolation", help="read_committed leaves out aborted and open transactions.")
    ] = IsolationLevel.READ_UNCOMMITTED,
    on_out_of_range: Annotated[
        OutOfRange, typer.Option("--on-out-of-range", help="What to do when --from-offset lies outside the log.")
    ] = OutOfRange.FAIL,
) -> None:
    """Print records, one JSON object a line; stops at the end unless --follow."""
    if from_offset is not None and from_timestamp is not None:
        raise bad_usage("--from-offset and --from-timestamp exclude each other")
    show = _shower(encoding, several=len(set(topics)) > 1)
    with session.open() as store:
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


def _print_records(
    store: LogStore, topics: list[Topic], tails: list[_Tail], show: Show, *, left: int | None, follow: bool
) -> None:
    """Up to `left` records, or to the end; with `follow`, then those that come."""
    from logstore.restore.visibility import visible_ends

    while True:
        # One moment for all: what was committed to several topics is in all of them or in none.
        ends = visible_ends(store, topics)
        for tail in tails:
            for record in tail.records(ends[tail.topic.id]):
                if left is not None and left <= 0:
                    return
                sys.stdout.write(show(tail.topic.name, tail.number, record))
                left = None if left is None else left - 1
        if not follow or left == 0:
            return
        sys.stdout.flush()
        time.sleep(_POLL_S)


def _start(
    store: LogStore,
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
        found = store.reader(topic, number, end_offset=end).offset_for_timestamp(from_timestamp)
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

    store: LogStore
    topic: Topic
    number: int
    committed: bool
    position: int
    on_out_of_range: str

    def records(self, ends: TopicEnds) -> Iterator[Record]:
        """Up to the ends given."""
        from logstore.partition.reading import OnOutOfRange

        end = ends.visible(committed=self.committed)[self.number]
        how = OnOutOfRange(self.on_out_of_range)
        if end <= self.position <= ends.high_watermarks[self.number]:
            return
        reader = self.store.reader(self.topic, self.number, end_offset=end)
        try:
            yield from reader.records(self.position, end, committed=self.committed, on_out_of_range=how)
        finally:
            reader.close()
        # Past control records and what compaction removed too, so that waiting is not reading again.
        self.position = end


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
    with session.open() as store:
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
