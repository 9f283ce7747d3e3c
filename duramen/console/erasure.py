"""Where a key may still be, until when, and the run that removed it. Reads every byte of a topic, within limits."""

from __future__ import annotations

import threading
import time
from typing import Any

from duramen.console.formats import shown
from duramen.console.messages import key_bytes
from duramen.console.problems import Refused
from duramen.console.runs import run_document
from duramen.console.view import View
from logstore.compaction.erasure import Place, find_keys
from logstore.ledger.rows import RunRow

_SECONDS_MAX = 60.0
_SCANNED_BYTES_MAX = 4 << 30
_NOTE = "Backups, exports and what consumers made of the records are not seen."
#: a search reads the whole topic: one at a time
_ONE_AT_A_TIME = threading.Lock()


def erasure(view: View, *, topic: str, key: str = "", key_format: str = "text") -> dict[str, Any]:
    wanted = key_bytes(key, key_format)
    store = view.directory()
    found = store.topic(topic)
    scanned = 0
    deadline = time.monotonic() + _SECONDS_MAX

    def progress(size_bytes: int) -> None:
        nonlocal scanned
        scanned += size_bytes
        if scanned > _SCANNED_BYTES_MAX or time.monotonic() > deadline:
            raise Refused(
                422,
                "TooMuchWork",
                f"the topic is too large to be searched here: {scanned} bytes were looked at",
                hint=f"Run `duramen prove-erased {topic} KEY`.",
                topic=topic,
            )

    if not _ONE_AT_A_TIME.acquire(timeout=1.0):
        raise Refused(429, "Busy", "another search is under way", hint="Try again in a moment.")
    try:
        [result] = find_keys(store, found, [wanted], now_ms=view.now_ms, progress=progress)
    finally:
        _ONE_AT_A_TIME.release()
    moments = [place.goes_ms for place in result.places]
    return {
        "now_ms": view.now_ms,
        "topic": topic,
        "key": shown(wanted, "auto", 4096, view.schemas.of(topic, "key")),
        "erased": result.erased,
        "places": [_place(view, place) for place in result.places],
        "gone_ms": max(ms for ms in moments if ms is not None) if moments and None not in moments else None,
        "removed_by": None if result.removed_by is None else _run(result.removed_by),
        "log_starts": {str(number): start for number, start in result.log_starts.items()},
        "scanned_bytes": scanned,
        "note": _NOTE,
    }


def _place(view: View, place: Place) -> dict[str, Any]:
    root = view.store.path + "/"
    file = place.file.removeprefix(root)
    return place.document() | {"file": file.encode("utf-8", "backslashreplace").decode()}


def _run(run: RunRow) -> dict[str, Any]:
    names = RunRow.__dataclass_fields__
    row = {name: getattr(run, name) for name in names}
    return run_document(row | {"removed": list(run.removed.items())})
