r"""What reaches a terminal: no control character that came with the data.

A key, a value, a header or a file name may hold anything, including the sequences that make a terminal move its
cursor, change its title or answer as if it was typed. Text shows such characters as escapes (`\x1b`), JSON writes them
as `\u001b`, which reads back as what it was. Everything the command writes passes through `SafeStream`.
"""

from __future__ import annotations

import contextlib
import json
import re
import sys
from collections.abc import Iterator
from typing import TextIO

# C0, DEL and C1 (0x9b is an escape sequence in one character), what turns the direction of text, line separators, and
# halves of surrogate pairs, which stand for bytes of file names and cannot be written.
_LATER = "\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff"
_CONTROL = re.compile(f"[\x00-\x1f{_LATER}]")
_CONTROL_BUT_LINES = re.compile(f"[\x00-\x08\x0b-\x1f{_LATER}]")
_CONTROL_IN_JSON = re.compile(f"[{_LATER}]")


def printable(text: str) -> str:
    """The text on one line, with control characters as escapes."""
    return _CONTROL.sub(_escaped, text)


def printable_lines(text: str) -> str:
    """The same, with line ends and tabs as they are."""
    return _CONTROL_BUT_LINES.sub(_escaped, text)


def json_text(document: object) -> str:
    """JSON on one line in which every control character is an escape; `json.dumps` leaves some of them as they are."""
    text = json.dumps(document, ensure_ascii=False, default=str)
    return _CONTROL_IN_JSON.sub(lambda found: f"\\u{ord(found.group()):04x}", text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found.group())
    short = {9: "\\t", 10: "\\n", 13: "\\r"}.get(code)
    return short or (f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}")


class SafeStream:
    """A text stream that writes control characters other than line ends and tabs as escapes."""

    def __init__(self, stream: TextIO) -> None:
        #: for callers that draw with escape sequences, and have made the data printable
        self.raw = stream

    def write(self, text: str) -> int:
        return self.write_exactly(printable_lines(text))

    def write_exactly(self, text: str) -> int:
        """The text as it is, but for characters that the stream's encoding does not have."""
        try:
            return self.raw.write(text)
        except UnicodeEncodeError:
            encoding = self.raw.encoding or "ascii"
            return self.raw.write(text.encode(encoding, "backslashreplace").decode(encoding))

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> object:
        return getattr(self.raw, name)


def raw(stream: TextIO) -> TextIO:
    """The stream behind a safe one."""
    return stream.raw if isinstance(stream, SafeStream) else stream


@contextlib.contextmanager
def safe_streams() -> Iterator[None]:
    """Standard output and error are safe within."""
    with (
        contextlib.redirect_stdout(SafeStream(raw(sys.stdout))),  # type: ignore[type-var]
        contextlib.redirect_stderr(SafeStream(raw(sys.stderr))),  # type: ignore[type-var]
    ):
        yield
