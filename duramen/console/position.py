"""Where a page goes on: a few numbers as an opaque word. It comes back from outside, so it is checked like anything."""

from __future__ import annotations

import re

from duramen.console.problems import bad_request
from logstore.limits import INT64_MAX

_WORD = re.compile(r"([a-z])((?:-?[0-9]{1,19}\.)*-?[0-9]{1,19})\Z")


def write_position(kind: str, *numbers: int) -> str:
    return kind + ".".join(map(str, numbers))


def read_position(text: str, kind: str, count: int) -> list[int]:
    """The numbers of a position of this kind. Raises Refused."""
    found = _WORD.match(text)
    numbers = [int(each) for each in found.group(2).split(".")] if found and found.group(1) == kind else []
    if len(numbers) != count or any(abs(each) > INT64_MAX for each in numbers):
        raise bad_request("the position is none of ours: give `next` of the answer before", parameter="position")
    return numbers
