"""The files of the page, as they lie in the package. Only what is found here at the start is ever served."""

from __future__ import annotations

from pathlib import Path

FOLDER = Path(__file__).resolve().parent / "page"
_TYPES = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".ico": "image/x-icon",
    ".woff2": "font/woff2",
    ".txt": "text/plain; charset=utf-8",
}
INDEX = "index.html"


def page_files(folder: Path = FOLDER) -> dict[str, tuple[Path, str]]:
    """By the path a browser asks for: the file and its type."""
    found = {}
    for path in sorted(folder.rglob("*")) if folder.is_dir() else ():
        if path.is_file() and not path.is_symlink() and path.suffix in _TYPES:
            found["/" + path.relative_to(folder).as_posix()] = (path, _TYPES[path.suffix])
    if f"/{INDEX}" in found:
        found["/"] = found[f"/{INDEX}"]
    return found
