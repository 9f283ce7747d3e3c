"""The report: one file, everything in it, nothing that runs but what its own policy names, nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from console.asking import check
from duramen.cli import run
from duramen.console.contract import PREFIX
from duramen.console.report import embedded
from duramen.console.requests import find_operation
from logstore.store import LogStore


class Parts(HTMLParser):
    """The elements as a browser would see them."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[tuple[str, dict[str, str | None], str]] = []
        self._open: tuple[str, dict[str, str | None]] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag in ("script", "style"):
            self._open = (tag, dict(attrs))
            self.texts.append((*self._open, ""))

    def handle_endtag(self, tag: str) -> None:
        if self._open is not None and tag == self._open[0]:
            self._open = None

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            tag, attributes, text = self.texts.pop()
            self.texts.append((tag, attributes, text + data))


def report_of(store: LogStore, file: Path, *options: str) -> tuple[str, Parts, dict[str, Any]]:
    assert run(["--store", store.path, "report", str(file), *options]) == 0
    html = file.read_text(encoding="utf-8")
    parts = Parts()
    parts.feed(html)
    [data] = [text for _, attributes, text in parts.texts if attributes.get("id") == "duramen-report"]
    return html, parts, json.loads(data)


def test_a_report_holds_every_page_as_the_api_documents_it(shop: LogStore, tmp_path: Path) -> None:
    _, _, document = report_of(shop, tmp_path / "r.html")
    answers = document["answers"]
    for path, answer in answers.items():
        operation, _ = find_operation("GET", path.partition("?")[0])
        check(operation.answer, answer)
    names = ("store", "topics", "explain", "runs", "what-if", "horizons", "apps", "commits", "settings", "actions")
    assert {f"{PREFIX}/{name}" for name in names} <= set(answers)
    for topic in shop.topics():
        assert f"{PREFIX}/topics/{topic.name}" in answers
        for number in range(topic.partitions):
            strip = answers[f"{PREFIX}/topics/{topic.name}/partitions/{number}"]
            assert sum(each["size_bytes"] for each in strip["segments"]) == shop.log_bytes(topic, number)
    assert answers[f"{PREFIX}/store"]["actions"]["enabled"] is False
    assert not [path for path in answers if "/messages" in path]


def test_a_report_runs_only_what_its_policy_names_and_asks_for_nothing(shop: LogStore, tmp_path: Path) -> None:
    html, parts, _ = report_of(shop, tmp_path / "r.html", "--messages", "20")
    [policy] = [str(a["content"]) for tag, a in parts.tags if a.get("http-equiv") == "Content-Security-Policy"]
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "'self'" not in policy
    allowed = set(re.findall(r"'sha256-([^']+)'", policy))
    blocks = [text for _, attributes, text in parts.texts if attributes.get("id") != "duramen-report"]
    hashes = {base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in blocks}
    assert hashes == allowed
    assert len(blocks) > 1
    for tag, attributes in parts.tags:
        assert not [name for name in attributes if name.startswith("on") or name == "style"]
        assert "src" not in attributes
        assert tag != "link" or str(attributes.get("href", "")).startswith("data:")
    # The policy stands before anything that could run.
    assert html.index("Content-Security-Policy") < html.index("<script")


def test_nothing_of_a_record_is_markup_or_changes_the_direction_of_writing(shop: LogStore, tmp_path: Path) -> None:
    html, _, document = report_of(shop, tmp_path / "r.html", "--messages", "20")
    messages = document["answers"][f"{PREFIX}/topics/strange/messages?partition=0"]["messages"]
    assert "<script>alert(1)</script>" in [each["value"]["text"] for each in messages if each["value"]]
    start = html.index('id="duramen-report">') + len('id="duramen-report">')
    block = html[start : html.index("</script>", start)]
    assert block.isascii()
    assert not set("<>&") & set(block)
    assert json.loads(block) == document
    assert "<img" not in html


def test_what_is_embedded_cannot_end_its_element() -> None:
    nasty = {"</script><script>alert(1)</script>": ["<!--", "]]>", "&lt;", "\u2028\u202e", "\ud800"[:0]]}
    text = embedded(nasty)
    assert json.loads(text) == nasty
    assert text.isascii()
    assert not set("<>&") & set(text)
