"""Moments as people write them: milliseconds, ISO 8601, or how long ago."""

from __future__ import annotations

import datetime
import re
import time

from duramen.session import bad_usage

EXAMPLES = "milliseconds, ISO 8601 (2026-11-01T10:00Z) or how long ago (-90s, -15m, -1h, -7d)"
_AGO = re.compile(r"-([0-9]{1,12})(ms|s|m|h|d)")
_UNIT_MS = {"ms": 1, "s": 1000, "m": 60_000, "h": 3_600_000, "d": 86_400_000}
_DIGITS_MAX = 18
_YEAR = re.compile(r"[0-9]{4}-[0-9]{2}-[0-9]{2}")


def moment_ms(text: str) -> int:
    """Milliseconds since 1970. Without a time zone UTC is meant. Raises BadUsage."""
    text = str(text).strip()
    if text.isascii() and text.isdigit() and len(text) <= _DIGITS_MAX:
        return int(text)
    ago = _AGO.fullmatch(text)
    if text == "now" or ago is not None:
        before_ms = int(ago[1]) * _UNIT_MS[ago[2]] if ago is not None else 0
        return max(time.time_ns() // 1_000_000 - before_ms, 0)
    if _YEAR.match(text):
        try:
            # Python 3.10 knows no Z.
            found = datetime.datetime.fromisoformat(re.sub(r"[zZ]$", "+00:00", text))
            aware = found if found.tzinfo is not None else found.replace(tzinfo=datetime.timezone.utc)
            since = aware - datetime.datetime(1970, 1, 1, tzinfo=datetime.timezone.utc)
            found_ms = since // datetime.timedelta(milliseconds=1)
        except (ValueError, OverflowError):
            found_ms = -1
        if found_ms >= 0:
            return found_ms
    raise bad_usage(f"{text!r} is not a time; write {EXAMPLES}")
