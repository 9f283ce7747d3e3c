"""The pictures of README and docs are of the page as it is.

`docs/images/console.sha256` says of which sources of the page they were taken. `make screenshots` takes them anew and
writes it; `make docs` does that by itself when the page has changed since; and `test_site.py` fails until somebody did.
"""

from __future__ import annotations

import hashlib
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "duramen" / "console" / "page"
TAKEN = ROOT / "build" / "screenshots"
IMAGES = ROOT / "docs" / "images"
NOTE = IMAGES / "console.sha256"


def digest() -> str:
    """Of everything that the page is drawn with."""
    found = hashlib.sha256()
    for path in sorted(each for each in PAGE.rglob("*") if each.suffix in (".js", ".css", ".html")):
        found.update(f"{path.relative_to(PAGE).as_posix()}\n".encode() + path.read_bytes())
    return found.hexdigest()


def is_fresh() -> bool:
    return NOTE.exists() and NOTE.read_text().strip() == digest()


def keep() -> None:
    """Take over what the tests have drawn."""
    for path in TAKEN.glob("*.png"):
        shutil.copy(path, IMAGES / path.name)
    NOTE.write_text(digest() + "\n")


if __name__ == "__main__":
    if sys.argv[1:] == ["--keep"]:
        keep()
    else:
        sys.exit(0 if is_fresh() else 1)
