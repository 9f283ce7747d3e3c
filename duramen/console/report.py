"""The report: the console's page and what it would ask for, of one moment, in one HTML file that needs nothing else.

The answers lie in a block of JSON in which nothing can end the block or mean anything to HTML. Scripts and styles are
inlined, and the file's own Content-Security-Policy allows exactly these, by their hashes, and no network at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from duramen.console import commits, horizons, messages, overview, runs, settings, topics, what_if, why
from duramen.console.contract import PREFIX
from duramen.console.page_files import FOLDER, INDEX
from duramen.console.problems import Refused
from duramen.console.view import View
from logstore.errors import DuramenError, UsageError

#: of partitions that are shown one by one, and of the newest runs and commits
PARTITIONS_MAX, RUNS_MAX, COMMITS_MAX = 5000, 2000, 200
ELEMENT = "duramen-report"
_STYLE = re.compile(r'<link rel="stylesheet" href="([^"]+)">')
_SCRIPT = re.compile(r'<script src="([^"]+)"></script>')
_HEAD = re.compile(r"<head>", re.IGNORECASE)

Answers = Iterator[tuple[str, dict[str, Any]]]


def report_html(view: View, *, messages_each: int = 0, folder: Path = FOLDER) -> str:
    """The whole file. Raises DuramenError."""
    answers = dict(_answers(view, messages_each))
    document = {
        "format": 1,
        "made_ms": view.now_ms,
        "store": answers[f"{PREFIX}/store"]["store"]["path"],
        "answers": answers,
    }
    return _page(folder, embedded(document))


def _answers(view: View, messages_each: int) -> Answers:
    """By path what the page would get, lists complete."""
    yield f"{PREFIX}/store", overview.store(view)
    listed = topics.topics(view)
    yield f"{PREFIX}/topics", listed
    yield f"{PREFIX}/explain", why.explain(view, topic=None, state=None, limit=None)
    yield f"{PREFIX}/runs", runs.runs(view, limit=RUNS_MAX)
    yield f"{PREFIX}/what-if", what_if.what_if(view)
    yield f"{PREFIX}/horizons", horizons.horizons(view)
    yield f"{PREFIX}/apps", commits.apps(view)
    yield f"{PREFIX}/commits", commits.commits(view, limit=COMMITS_MAX)
    yield f"{PREFIX}/settings", settings.settings(view)
    yield f"{PREFIX}/actions", {"now_ms": view.now_ms, "actions": []}
    left = PARTITIONS_MAX
    for each in listed["topics"]:
        try:
            yield from _of_topic(view, each["name"], min(left, each["partitions"]), messages_each)
        except DuramenError:
            continue  # deleted meanwhile, or damaged: the list says so
        left -= min(left, each["partitions"])


def _of_topic(view: View, name: str, partitions: int, messages_each: int) -> Answers:
    path = f"{PREFIX}/topics/{name}"
    yield path, topics.topic(view, topic=name)
    yield f"{path}/history", topics.history(view, topic=name, range="2d")
    for number in range(partitions):
        yield f"{path}/partitions/{number}", topics.partition(view, topic=name, partition=number)
        if messages_each:
            try:
                newest = messages.messages(view, topic=name, partition=number, limit=messages_each)
            except (DuramenError, Refused):
                continue
            yield f"{path}/messages?partition={number}", newest | {"next": None}


def embedded(document: dict[str, Any]) -> str:
    """JSON for the inside of a script element: ASCII, and without a character that HTML knows."""
    text = json.dumps(document, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _page(folder: Path, data: str) -> str:
    try:
        html = (folder / INDEX).read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError("the console's page is not in this installation", file=str(folder)) from error
    hashes: dict[str, list[str]] = {"script": [], "style": []}

    def inlined(kind: str, name: str) -> str:
        text = (folder / name).read_text(encoding="utf-8").replace("\r\n", "\n")
        if f"</{kind}" in text.lower() or "<!--" in text:
            raise UsageError(f"{name} cannot be inlined: it holds the end of its own element", file=name)
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
        return f"<{kind}>{text}</{kind}>"

    html = _STYLE.sub(lambda found: inlined("style", found.group(1)), html)
    before, found, after = html.partition('<script src="')
    block = f'<script type="application/json" id="{ELEMENT}">{data}</script>\n'
    html = before + block + _SCRIPT.sub(lambda match: inlined("script", match.group(1)), found + after)
    policy = (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; style-src {' '.join(hashes['style'])}; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    meta = f'<head>\n<meta http-equiv="Content-Security-Policy" content="{policy}">'
    return _HEAD.sub(lambda _: meta, html, count=1)
