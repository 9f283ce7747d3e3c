"""`duramen cost`: requests and money a day of a store in a bucket.

The requests that each step of the protocol takes are written once: `COMMIT`, `SEAL`, `COMPACTION`, `LOOK`, `READING`,
`POLL`. `tests/bucket/test_cost.py` counts them, and docs/bucket.md has the same table. Prices are options.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from duramen.session import bad_usage, print_pairs, print_table, session

#: list prices of S3 Standard in us-east-1, in dollars; what else is charged (traffic out of the region) is not here
PRICES_AS_OF = "2025-01"
WRITE_PRICE, READ_PRICE, STORAGE_PRICE = 0.005, 0.0004, 0.023
_DAY_MS = 86_400_000
_DAYS_A_MONTH = 30
#: a larger object is sent in parts, each a request
PART_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Requests:
    """Writes (PUT, LIST, parts of an upload) and reads (GET, HEAD). Deletions cost nothing."""

    writes: float = 0.0
    reads: float = 0.0

    def __add__(self, other: Requests) -> Requests:
        return Requests(self.writes + other.writes, self.reads + other.reads)

    def times(self, count: float) -> Requests:
        return Requests(self.writes * count, self.reads * count)


#: a micro-batch beside its tasks' objects: the plan, the commit, a quarter of a summary; two looks at the ledger
COMMIT = Requests(writes=2.25, reads=2)
#: of one partition, beside a look and what it holds: the segment and the manifest; manifest and ledger, some times each
SEAL = Requests(writes=2, reads=8)
#: of one partition: the new segment, the manifest (twice: its garbage gets its time), a list of pins; what is looked at
COMPACTION = Requests(writes=4, reads=11)
#: an object that a pass reads
FETCH = Requests(reads=1)
#: a run of maintenance that finds nothing to do, beside one read for each partition
RUN = Requests(writes=3, reads=12)
LOOK = Requests(reads=1)
#: of one micro-batch by one reader, beside its objects
READING = Requests(reads=4)
#: a reader's question for something new
POLL = Requests(reads=1)
#: segments that a pass over a partition reads
_SOURCES = 2


@dataclass(frozen=True, slots=True)
class Load:
    """What a store in a bucket is used for."""

    partitions: int
    trigger_ms: int
    tasks: int
    batch_bytes: int
    seal_ms: int
    compact_ms: int
    readers: int
    poll_ms: int
    maintain_ms: int = 600_000


@dataclass(frozen=True, slots=True)
class Prices:
    """In dollars: a thousand writes, a thousand reads, a GB in a month."""

    writes: float
    reads: float
    storage: float


_LISTED = Prices(WRITE_PRICE, READ_PRICE, STORAGE_PRICE)


def requests_a_day(load: Load) -> dict[str, Requests]:
    """By what makes them, where every partition gets something between two seals."""
    batches = _DAY_MS / load.trigger_ms
    parts = max(1, -(-load.batch_bytes // load.tasks // PART_BYTES))
    object_writes = 1 if parts == 1 else parts + 2  # an upload in parts is begun and completed
    seals = min(batches, _DAY_MS / load.seal_ms)
    objects = Requests(reads=load.tasks)
    plan_and_objects = Requests(reads=1) + objects
    one_tail = READING + objects
    one_pass = COMPACTION + FETCH.times(_SOURCES)
    return {
        "commit": (COMMIT + Requests(writes=load.tasks * object_writes)).times(batches),
        "seal": SEAL.times(seals * load.partitions) + plan_and_objects.times(batches),
        "compaction": one_pass.times(_DAY_MS / load.compact_ms * load.partitions),
        "maintenance": (RUN + LOOK.times(load.partitions)).times(_DAY_MS / load.maintain_ms),
        "readers": (one_tail.times(batches) + POLL.times(_DAY_MS / load.poll_ms)).times(load.readers),
    }


def money(requests: Requests, prices: Prices) -> float:
    return requests.writes / 1000 * prices.writes + requests.reads / 1000 * prices.reads


def _duration(option: str, text: str) -> int:
    """`10s` or `5m` as milliseconds."""
    from logstore.setting import parse_units, units_of

    found = parse_units(text, units_of("retention.ms"))
    if not found:
        raise bad_usage(f"{option} is {text!r}; write a duration with its unit, such as 10s, 5m, 1h or 1d")
    return found


def _size(option: str, text: str) -> int:
    from logstore.setting import parse_units, units_of

    found = parse_units(text, units_of("segment.bytes"))
    if found is None:
        raise bad_usage(f"{option} is {text!r}; write a size with its unit, such as 500k, 64MB or 2g")
    return found


def _option(name: str, metavar: str, text: str) -> Any:
    return typer.Option(name, metavar=metavar, help=text)


def cost(
    partitions: Annotated[
        int, typer.Option("--partitions", min=1, max=1_000_000, help="Partitions of all topics.", show_default=False)
    ],
    trigger: Annotated[
        str, typer.Option("--trigger", metavar="DURATION", help="Time between two micro-batches.", show_default=False)
    ],
    tasks: Annotated[int, typer.Option("--tasks", min=1, max=100_000, help="Tasks that write a micro-batch.")] = 8,
    batch_bytes: Annotated[str, _option("--batch-bytes", "SIZE", "Size of a micro-batch.")] = "1MB",
    seal_every: Annotated[str, _option("--seal-every", "DURATION", "Time between two seals.")] = "1h",
    compact_every: Annotated[
        str, _option("--compact-every", "DURATION", "Time between two passes over a partition.")
    ] = "1d",
    maintain_every: Annotated[
        str, _option("--maintain-every", "DURATION", "Time between two runs of maintenance.")
    ] = "10m",
    readers: Annotated[int, typer.Option("--readers", min=0, max=100_000, help="Streams that read everything.")] = 1,
    poll: Annotated[str, _option("--poll", "DURATION", "How often a reader asks for more.")] = "1s",
    stored: Annotated[str, _option("--stored", "SIZE", "What the store holds on average.")] = "0b",
    write_price: Annotated[
        float, typer.Option("--write-price", min=0, help="Dollars for a thousand writes (PUT, LIST).")
    ] = WRITE_PRICE,
    read_price: Annotated[
        float, typer.Option("--read-price", min=0, help="Dollars for a thousand reads (GET, HEAD).")
    ] = READ_PRICE,
    storage_price: Annotated[
        float, typer.Option("--storage-price", min=0, help="Dollars for a GB in a month.")
    ] = STORAGE_PRICE,
) -> None:
    """Estimate the requests and dollars a day of a store in a bucket. No store is opened."""
    load = Load(
        partitions,
        _duration("--trigger", trigger),
        tasks,
        _size("--batch-bytes", batch_bytes),
        _duration("--seal-every", seal_every),
        _duration("--compact-every", compact_every),
        readers,
        _duration("--poll", poll),
        _duration("--maintain-every", maintain_every),
    )
    stored_bytes = _size("--stored", stored)
    document = _estimate(load, stored_bytes, Prices(write_price, read_price, storage_price))
    session.answer(document, lambda: _show(document))


def _estimate(load: Load, stored_bytes: int, prices: Prices) -> dict[str, Any]:
    found = requests_a_day(load)
    rows = [
        {
            "what": what,
            "writes": round(each.writes),
            "reads": round(each.reads),
            "dollars": round(money(each, prices), 4),
        }
        for what, each in found.items()
    ]
    total = sum(found.values(), Requests())
    requests, storage = money(total, prices), stored_bytes / (1 << 30) * prices.storage / _DAYS_A_MONTH
    return {
        "a_day": rows,
        "writes": round(total.writes),
        "reads": round(total.reads),
        "request_dollars": round(requests, 4),
        "storage_dollars": round(storage, 4),
        "dollars": round(requests + storage, 4),
        "assumed": asdict(load) | {"stored_bytes": stored_bytes},
        "prices": asdict(prices) | {"as_of": PRICES_AS_OF if prices == _LISTED else None},
    }


def _show(document: dict[str, Any]) -> None:
    print_table(
        ["a day", "writes", "reads", "dollars"],
        [[each["what"], each["writes"], each["reads"], f"{each['dollars']:.2f}"] for each in document["a_day"]],
    )
    print()
    print_pairs(
        [
            (
                "requests",
                f"{document['writes']} writes and {document['reads']} reads, ${document['request_dollars']:.2f}",
            ),
            ("storage", f"${document['storage_dollars']:.2f}"),
            ("a day", f"${document['dollars']:.2f}"),
            ("a month", f"${document['dollars'] * _DAYS_A_MONTH:.2f}"),
        ]
    )
    as_of = document["prices"]["as_of"]
    print()
    print(f"List prices of S3 Standard in us-east-1, {as_of}." if as_of else "The prices are yours.")
    print("An estimate by counted requests, of one writer whom nobody disturbs. Traffic is not in it.")
