"""Tables as text: numbers to the right, and no wider than the terminal.

Where a table is too wide, its headings are stacked first; then a long last column moves below its row; then words and
names are folded; and what still does not fit is written as a list of names and values. Numbers are never cut.
"""

from __future__ import annotations

import itertools
import re
import textwrap
import unicodedata
from collections.abc import Sequence

#: cells that are numbers, sizes, rates and shares, or stand for one that is not known
_NUMBER = re.compile(r"|[-?]|≤?-?[0-9][0-9,]*(\.[0-9]+)?( ?([KMGT]?i?B|s|%)(/s)?|/s)?")
_MOMENT = re.compile(r"(\d{4}-\d\d-\d\dT)(\d\d:\d\d:\d\d)")
_MOMENT_APART = re.compile(r"(\d{4}-\d\d-\d\dT) (\d\d:\d\d:\d\d)")
_UNKNOWN = ("", "-", "?")
_GAP = "  "
_LONG = 20
_FOLDED_MIN = 8
_RED, _PLAIN = "\x1b[31m", "\x1b[0m"


class Wrong(str):
    """A cell that says something is wrong: the only thing with a colour, and only on a terminal."""

    __slots__ = ()


def table_lines(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, width: int | None = None, colour: bool = False
) -> list[str]:
    """The lines of a table at most `width` wide, or as wide as it gets. Cells are on one line and printable."""
    numeric = [_is_numeric([row[at] for row in rows]) for at in range(len(columns))]
    heads = [[name] for name in columns]
    below = False
    widths = _widths(heads, rows)
    if width is not None and _total(widths) > width:
        heads = [name.split() or [""] for name in columns]
        widths = _widths(heads, rows)
        last = len(columns) - 1
        if _total(widths) > width and last > 1 and not numeric[last] and widths[last] > _LONG:
            below = True
            widths = widths[:last]
        words = [
            max((text_width(word) for row in rows for word in _broken(row[at]).split()), default=0)
            for at in range(len(widths))
        ]
        widths = _folded(widths, words, numeric, width)
        if _total(widths) > width:
            return _as_pairs(columns, rows, width, colour)
    lines = _stacked(heads[: len(widths)], widths, numeric)
    for row in rows:
        lines += _row(row[: len(widths)], widths, numeric, colour)
        if below:
            wrapped = textwrap.wrap(row[-1], max((width or 80) - 4, _FOLDED_MIN))
            lines += [f"    {_painted(line, row[-1], colour)}" for line in wrapped]
    return lines


def pair_lines(pairs: Sequence[tuple[str, str]], *, colour: bool = False) -> list[str]:
    """Names and values, a line each."""
    width = max((text_width(name) for name, _ in pairs), default=0)
    return [f"{_padded(name, width)}{_GAP}{_painted(value, value, colour)}".rstrip() for name, value in pairs]


def text_width(text: str) -> int:
    """Columns of a terminal: wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(each) else 2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in text
    )


def _is_numeric(cells: Sequence[str]) -> bool:
    return any(cell not in _UNKNOWN for cell in cells) and all(_NUMBER.fullmatch(cell) for cell in cells)


def _widths(heads: Sequence[Sequence[str]], rows: Sequence[Sequence[str]]) -> list[int]:
    return [
        max([*map(text_width, head), *(text_width(row[at]) for row in rows)], default=0)
        for at, head in enumerate(heads)
    ]


def _total(widths: Sequence[int]) -> int:
    return sum(widths) + len(_GAP) * (len(widths) - 1)


def _folded(widths: list[int], words: Sequence[int], numeric: Sequence[bool], width: int) -> list[int]:
    """The widest texts give way: first down to their longest word, then inside of words, down to a few characters."""
    widths = list(widths)
    texts = [at for at in range(len(widths)) if not numeric[at]]
    for least in (words, [_FOLDED_MIN] * len(widths)):
        while _total(widths) > width:
            wide = [at for at in texts if widths[at] > max(least[at], _FOLDED_MIN)]
            if not wide:
                break
            widths[max(wide, key=lambda at: widths[at])] -= 1
    return widths


def _broken(text: str) -> str:
    """With a place to break behind the day of a moment, which is nowhere else to be broken."""
    return _MOMENT.sub(r"\1 \2", text)


def _wrapped(text: str, width: int) -> list[str]:
    return [_MOMENT_APART.sub(r"\1\2", line) for line in textwrap.wrap(_broken(text), width)]


def _stacked(heads: Sequence[Sequence[str]], widths: Sequence[int], numeric: Sequence[bool]) -> list[str]:
    height = max(map(len, heads), default=0)
    padded = [[""] * (height - len(head)) + list(head) for head in heads]
    return [_line([head[at] for head in padded], widths, numeric) for at in range(height)]


def _row(row: Sequence[str], widths: Sequence[int], numeric: Sequence[bool], colour: bool) -> list[str]:
    folded = [
        [cell] if text_width(cell) <= width else _wrapped(cell, width) for cell, width in zip(row, widths, strict=True)
    ]
    height = max(map(len, folded), default=1)
    lines = []
    for at in range(height):
        cells = [
            Wrong(part) if isinstance(cell, Wrong) else part
            for part, cell in zip((each[at] if at < len(each) else "" for each in folded), row, strict=True)
        ]
        lines.append(_line(cells, widths, numeric, colour=colour))
    return lines


def _line(cells: Sequence[str], widths: Sequence[int], numeric: Sequence[bool], *, colour: bool = False) -> str:
    shown = [
        _painted(_padded(cell, width, right=is_right), cell, colour)
        for cell, width, is_right in zip(cells, widths, numeric, strict=False)
    ]
    return _GAP.join(shown).rstrip()


def _padded(text: str, width: int, *, right: bool = False) -> str:
    room = " " * (width - text_width(text))
    return room + text if right else text + room


def _painted(text: str, cell: str, colour: bool) -> str:
    return f"{_RED}{text}{_PLAIN}" if colour and isinstance(cell, Wrong) and text.strip() else text


def _as_pairs(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int, colour: bool) -> list[str]:
    lines: list[str] = []
    names = [textwrap.wrap(name, max(width // 2, _FOLDED_MIN)) for name in columns]
    names_width = max((text_width(part) for name in names for part in name), default=0)
    room = max(width - names_width - len(_GAP), _FOLDED_MIN)
    for number, row in enumerate(rows):
        lines += [""] * bool(number)
        pairs: list[tuple[str, str]] = []
        for name, cell in zip(names, row, strict=True):
            parts = [Wrong(part) if isinstance(cell, Wrong) else part for part in textwrap.wrap(cell, room)]
            pairs += itertools.zip_longest(name, parts, fillvalue="")
        lines += pair_lines(pairs, colour=colour)
    return lines
