"""`duramen prove-erased`: where keys may still be, and which run removed them."""

from __future__ import annotations

import base64
import binascii
from typing import TYPE_CHECKING, Annotated, Any

import typer

from duramen.commands.compact import reasons_text
from duramen.commands.options import Encoding, NowMs, OneTopic
from duramen.session import FAILED, bad_usage, print_pairs, print_table, session, stop, time_text

if TYPE_CHECKING:
    from collections.abc import Callable

    from logstore.compaction.erasure import Erasure


def prove_erased(
    topic: OneTopic,
    keys: Annotated[list[str], typer.Argument(metavar="KEY...", help="The keys.", show_default=False)],
    encoding: Annotated[
        Encoding, typer.Option("--encoding", help="How the keys are written on the command line.")
    ] = Encoding.UTF8,
    now_ms: NowMs = None,
) -> None:
    """Look for keys in every file of the store that may still hold them; exit 1 while one does."""
    find_keys, unseen = _search()
    wanted = [_key(each, encoding) for each in keys]
    with session.open_any() as store:
        found_topic = store.topic(topic)
        now = store.clock.now_ms() if now_ms is None else now_ms
        total = sum(store.log_bytes(found_topic, number) for number in range(found_topic.partitions))
        with session.progress(f"looking through {topic}", total) as step:
            found = find_keys(store, found_topic, wanted, now_ms=now, progress=step)
    documents = [_erasure(text, each) for text, each in zip(keys, found, strict=True)]

    def text() -> None:
        for number, document in enumerate(documents):
            if number:
                print()
            print(f"{document['key']}: {document['verdict']}")
            if document["places"]:
                print_table(
                    ["place", "partition", "offsets", "holds", "goes", "not before", "file"],
                    [
                        [
                            each["kind"],
                            "-" if each["partition"] is None else each["partition"],
                            "-" if each["first_offset"] is None else f"{each['first_offset']}..{each['last_offset']}",
                            each["holds"],
                            each["goes"],
                            time_text(each["goes_ms"]),
                            each["file"],
                        ]
                        for each in document["places"]
                    ],
                )
            run = document["removed_by"]
            if run is not None:
                print_pairs(
                    [
                        ("run", run["run_id"]),
                        ("partition", f"{topic}-{run['partition']}"),
                        ("ended", time_text(run["ended_ms"])),
                        ("removed", reasons_text(run["removed"])),
                    ]
                )

        for line in unseen:
            print(f"not seen: {line}")

    session.answer({"topic": topic, "now_ms": now, "keys": documents, "unseen": list(unseen)}, text)
    if not all(each.erased for each in found):
        stop(FAILED)


def _search() -> tuple[Callable[..., list[Erasure]], tuple[str, ...]]:
    """How a store of this kind is looked through, and what that cannot see."""
    if session.is_in_bucket:
        from logstore.bucket.erasing import UNSEEN, find_keys_in_bucket

        return find_keys_in_bucket, UNSEEN
    from logstore.compaction.erasure import find_keys

    return find_keys, ()


def _key(text: str, encoding: Encoding) -> bytes:
    if encoding is Encoding.UTF8:
        return text.encode("utf-8", "surrogateescape")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise bad_usage(f"{text!r} is not base64") from None


def _erasure(text: str, found: Erasure) -> dict[str, Any]:
    run = found.removed_by
    return {
        "key": text,
        "erased": found.erased,
        "verdict": _verdict(found),
        "places": [each.document() for each in found.places],
        "removed_by": None
        if run is None
        else {
            "run_id": run.run_id,
            "partition": run.partition,
            "ended_ms": run.ended_ms,
            "removed": dict(run.removed),
        },
    }


def _verdict(found: Erasure) -> str:
    if not found.erased:
        return f"still in {len(found.places)} places" if len(found.places) > 1 else "still in 1 place"
    if found.removed_by is not None:
        return "nothing holds it; the last run that removed deleted keys from its partition"
    if found.log_starts:
        below = ", ".join(f"{start} of partition {number}" for number, start in sorted(found.log_starts.items()))
        return f"nothing holds it; never written, or gone with what retention deleted below offset {below}"
    return "never written"
