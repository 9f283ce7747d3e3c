"""`duramen verify`: every committed byte is checked, and nothing is changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from duramen.commands.health import examined, print_store, store_document
from duramen.commands.options import Partition, Topics, chosen_partitions
from duramen.losses import loss_documents, print_losses
from duramen.session import DAMAGE, print_table, session, size_text, stop

if TYPE_CHECKING:
    from logstore.bucket.verifying import VerifiedPartition
    from logstore.directory.finding import Finding, StoreReport
    from logstore.store import LogStore
    from logstore.topics.registry import Topic
    from logstore.upkeep.strays import Stray
    from logstore.upkeep.verify import Verification


def verify(topics: Topics = None, partition: Partition = None) -> None:
    """Check every committed byte: checksums, order, indexes, segment lists, the ledger. Changes nothing; exit 3 on
    damage.
    """
    from logstore.upkeep.strays import find_strays

    if session.is_in_bucket:
        return _verify_bucket(topics, partition)
    with session.open() as store:
        whole = examined(store)
        strays = find_strays(store, topics)
        results = verify_all(store, chosen_partitions(store, topics, partition, tolerant=True))
    document = verification_document(results, strays, whole)
    session.answer(document, lambda: print_verification(results, strays, whole))
    if not document["sound"]:
        stop(DAMAGE)


def _verify_bucket(topics: list[str] | None, partition: int | None) -> None:
    """The same of a store in a bucket: every object that is named, byte by byte."""
    from logstore.bucket.examining import examine
    from logstore.bucket.verifying import verify_partition

    with session.open_bucket() as store:
        whole = [str(finding) for finding in examine(store)]
        results = [
            verify_partition(store, store.source(topic, number))
            for topic, number in chosen_partitions(store, topics, partition)
        ]
    document = {
        "sound": not whole and not any(result.findings for result in results),
        "store": {"sound": not whole, "findings": whole},
        "partitions": [
            {
                "topic": result.partition.topic,
                "partition": result.partition.partition,
                "log_start_offset": result.log_start_offset,
                "sealed_offset": result.sealed_offset,
                "high_watermark": result.high_watermark,
                "segments": result.segments,
                "tail_commits": result.tail_commits,
                "records": result.records,
                "size_bytes": result.size_bytes,
                "findings": [str(finding) for finding in result.findings],
                "losses": loss_documents(result.losses),
            }
            for result in results
        ],
    }
    rows = [
        [each.partition, each.records, each.segments, each.tail_commits, size_text(each.size_bytes), _verdict(each)]
        for each in results
    ]
    header = ["partition", "records", "segments", "commits in its tail", "size", "verdict"]

    def text() -> None:
        print_table(header, rows)
        for result in results:
            print_losses(str(result.partition), loss_documents(result.losses))
        for finding in whole:
            print(f"store: {finding}")

    session.answer(document, text)
    if not document["sound"]:
        stop(DAMAGE)


def _verdict(result: VerifiedPartition) -> str:
    return "; ".join(str(finding) for finding in result.findings) or "sound"


def verify_all(store: LogStore, partitions: list[tuple[Topic, int]]) -> list[Verification]:
    """In the order of `partitions`, of which `num.recovery.threads.per.data.dir` are checked side by side."""
    total = sum(_size_or_nothing(store, topic, number) for topic, number in partitions) if session.is_watched else 0
    threads = store.given("num.recovery.threads.per.data.dir") or 1
    with session.progress("verifying", total) as step:
        if threads == 1:
            return [_verified(store, topic, number, step) for topic, number in partitions]
        stopped = threading.Event()

        def go_on(size_bytes: int) -> None:
            if stopped.is_set():
                raise KeyboardInterrupt
            step(size_bytes)

        with ThreadPoolExecutor(threads) as pool:
            looking = [pool.submit(_verified, store, topic, number, go_on) for topic, number in partitions]
            try:
                return [each.result() for each in looking]
            except BaseException:
                stopped.set()
                pool.shutdown(cancel_futures=True)
                raise


def _verified(store: LogStore, topic: Topic, number: int, progress: Callable[[int], None]) -> Verification:
    from logstore.directory.finding import Finding
    from logstore.errors import CorruptState
    from logstore.upkeep.verify import verify_partition

    try:
        high_watermark = store.high_watermark(topic, number)
        damage = None
    except CorruptState as error:
        high_watermark, damage = 0, error
    result = verify_partition(
        store.fs,
        store.layout.partition(topic.partition(number)),
        partition=topic.partition(number),
        topic_id=topic.id,
        state_path=store.layout.partition_state(topic.id, number),
        high_watermark=high_watermark,
        limits=store.limits,
        progress=progress,
    )
    if damage is not None:
        result.findings.append(Finding(damage.what, damage.file, damage.position, damage.offset))
    return result


def _size_or_nothing(store: LogStore, topic: Topic, number: int) -> int:
    from logstore.errors import DuramenError

    try:
        return store.log_bytes(topic, number)
    except DuramenError:
        return 0


def verification_document(results: list[Verification], strays: list[Stray], whole: StoreReport) -> dict[str, Any]:
    return {
        "sound": whole.sound and not strays and all(result.sound for result in results),
        "store": store_document(whole),
        "partitions": [
            {
                "topic": result.partition.topic,
                "partition": result.partition.partition,
                "sound": result.sound,
                "segments": result.segments,
                "batches": result.batches,
                "size_bytes": result.size_bytes,
                "findings": finding_documents(result.findings),
                "losses": loss_documents(result.losses),
                "unplaced": result.unplaced,
            }
            for result in results
        ],
        "strays": list(map(stray_document, strays)),
    }


def finding_documents(findings: list[Finding]) -> list[dict[str, Any]]:
    return [
        {"what": each.what, "file": each.file, "position": each.position, "offset": each.offset} for each in findings
    ]


def stray_document(stray: Stray) -> dict[str, Any]:
    return {
        "kind": stray.kind.value,
        "what": stray.what,
        "file": stray.file,
        "topic": stray.name,
        "partition": stray.partition,
        "topic_id": stray.topic_id,
    }


def print_verification(results: list[Verification], strays: list[Stray], whole: StoreReport) -> None:
    print_table(
        ["partition", "segments", "batches", "size", "result"],
        [
            [result.partition, result.segments, result.batches, size_text(result.size_bytes), _result(result)]
            for result in results
        ],
    )
    for result in results:
        for each in result.findings:
            places = [
                f"{name} {value}"
                for name, value in (("file", each.file), ("position", each.position), ("offset", each.offset))
                if value is not None
            ]
            print(f"{result.partition}: {each.what}" + (f" ({', '.join(places)})" if places else ""))
        print_losses(str(result.partition), loss_documents(result.losses))
    for name, numbers in _unplaced(results).items():
        named = ", ".join(map(str, numbers[:10])) + (f" and {len(numbers) - 10} more" if len(numbers) > 10 else "")
        print(
            f"{name}: not made yet, partitions {named}: a process died while it created or widened the topic. "
            "No record is missing; the first write or `duramen recover` makes them."
        )
    for stray in strays:
        print(f"{stray.what} (file {stray.file})")
    print_store(whole)


def _result(result: Verification) -> str:
    if result.unplaced:
        return "not made yet"
    return "sound" if result.sound else f"DAMAGED, {len(result.findings)} findings"


def _unplaced(results: list[Verification]) -> dict[str, list[int]]:
    """By topic, the partitions that a creation or widening did not get to."""
    found: dict[str, list[int]] = {}
    for result in results:
        if result.unplaced:
            found.setdefault(result.partition.topic, []).append(result.partition.partition)
    return found
