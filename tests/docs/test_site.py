"""The site as `make docs` builds it: links, nothing fetched from elsewhere, and the tutorial typed from the page."""

from __future__ import annotations

import json
import re
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from docs.page import ROOT, Shell, blocks, check_output
from docs.pictures import IMAGES, is_fresh

SITE = ROOT / "build" / "site"
PYTHON = ROOT / "build" / "docs-venv" / "bin" / "python"
#: where the attribute makes a browser fetch something when the page is opened
FETCHED = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href", "object": "data"}


@pytest.fixture(scope="module")
def site() -> Path:
    """`make docs` makes its environment, too, from pinned packages with hashes."""
    done = subprocess.run(["make", "docs"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return SITE


class Tags(HTMLParser):
    """Start tags with their attributes, and ids."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))


def test_nothing_is_fetched_from_another_server(site: Path) -> None:
    for page in site.rglob("*.html"):
        for tag, attributes in Tags(page.read_text()).tags:
            address = attributes.get(FETCHED.get(tag, "")) or ""
            canonical = tag == "link" and attributes.get("rel") == "canonical"
            assert canonical or not re.match(r"(https?:)?//", address), f"{page}: {tag} {address}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(https?:)?//|@import", style.read_text()), style


def test_every_link_leads_to_a_page_and_a_place_on_it(site: Path) -> None:
    ids: dict[Path, set[str]] = {}
    for page in site.rglob("*.html"):
        ids[page.resolve()] = {str(found["id"]) for _, found in Tags(page.read_text()).tags if found.get("id")}
    broken = []
    for page in ids:
        if page.name == "404.html":
            continue
        for tag, attributes in Tags(page.read_text()).tags:
            link = attributes.get("href") or ""
            if tag != "a" or not link or re.match(r"[a-z]+:|//", link):
                continue
            path, _, place = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            target = target / "index.html" if target.is_dir() else target
            if not target.exists() or (place and target in ids and place not in ids[target]):
                broken.append(f"{page.relative_to(SITE.resolve())}: {link}")
    assert not broken, broken


def test_the_pictures_are_of_the_console_as_it_is_and_all_are_used() -> None:
    assert is_fresh(), "the console's page has changed: run `make screenshots`"
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    used = {name for page in pages for name in re.findall(r"images/([\w-]+\.png)", page.read_text())}
    assert used == {path.name for path in IMAGES.glob("*.png")}


def test_every_page_is_reached_from_the_navigation(site: Path) -> None:
    """MkDocs warns about a page that is not; decisions are reached from their list."""
    listed = (site / "decisions" / "index.html").read_text()
    for path in (ROOT / "docs" / "decisions").glob("0*.md"):
        assert f'href="{path.stem}.html"' in listed


def test_manifests_on_the_pages_parse(site: Path) -> None:
    """With the YAML parser of the site's environment; the project itself needs none."""
    pages = [str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")]
    texts = [block.text for page in pages for block in blocks(page) if block.language == "yaml"]
    assert texts
    code = "import json, sys, yaml; print(json.dumps([list(yaml.safe_load_all(t)) for t in json.load(sys.stdin)]))"
    found = subprocess.run([PYTHON, "-c", code], input=json.dumps(texts), capture_output=True, text=True, check=True)
    assert all(manifest["kind"] for documents in json.loads(found.stdout) for manifest in documents)


# --- the tutorial ----------------------------------------------------------------------------------------------------


class Typed(HTMLParser):
    """The code blocks of a built page as a reader sees them: language, file name, text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str, str]] = []
        self._language = self._title = ""
        self._text: list[str] | None = None
        self._in_title = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        classes = (dict(attrs).get("class") or "").split()
        if tag == "div" and "highlight" in classes:
            self._language = next(name.removeprefix("language-") for name in classes if name.startswith("language-"))
            self._title = ""
        self._in_title = self._in_title or (tag == "span" and "filename" in classes)
        if tag == "pre":
            self._text = []

    def handle_endtag(self, tag: str) -> None:
        if tag == "span":
            self._in_title = False
        if tag == "pre" and self._text is not None:
            self.found.append((self._language, self._title, "".join(self._text)))
            self._text = None

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self._title += data
        elif self._text is not None:
            self._text.append(data)


def test_the_tutorial_works_when_it_is_typed_from_the_built_page(site: Path, tmp_path: Path) -> None:
    typed = Typed((site / "tutorial.html").read_text()).found
    written = blocks("docs/tutorial.md")
    assert [text.strip() for *_, text in typed] == [block.text.strip() for block in written]
    shell, output = Shell(tmp_path), ""
    try:
        for number, (language, title, text) in enumerate(typed):
            if title:
                (tmp_path / title).write_text(text)
            elif language == "text":
                check_output(f"tutorial, block {number}", text, output)
            else:
                assert language == "bash"
                output = shell.run(text)
    finally:
        shell.close()
