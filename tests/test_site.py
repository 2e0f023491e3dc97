"""The site of the READMEs: it builds without a warning, and each link in it leads somewhere."""

import json
import subprocess
import sys
from html.parser import HTMLParser
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from support.harness import ROOT

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        any(find_spec(name) is None for name in ("sphinx", "myst_parser", "furo")),
        reason="pip install -r requirements-docs.txt, or make site",
    ),
]


class Page(HTMLParser):
    """The addresses that a page refers to, its anchors, and its text outside of tags."""

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.addresses: set[str] = set()
        self.anchors = {""}
        self.words: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attributes: list) -> None:
        for name, value in attributes:
            if name == "id":
                self.anchors.add(value)
            elif name in ("href", "src"):
                self.addresses.add(value)

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the site as `make site` does, and return its folder."""
    folder = tmp_path_factory.mktemp("site")
    pages = folder / "pages"
    pages.mkdir()
    command = [sys.executable, "-m", "sphinx", "-q", "-n", "-W", "--keep-going", "-c", "docs"]
    result = subprocess.run(
        [*command, pages, folder / "html"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    return folder / "html"


@pytest.fixture(scope="module")
def pages(site) -> dict[Path, Page]:
    return {file.resolve(): Page(file) for file in site.rglob("*.html")}


def test_each_link_and_anchor_is_there(site, pages):
    broken = []
    for file, page in pages.items():
        for address in page.addresses:
            parts = urlsplit(address)
            if parts.scheme in ("http", "https", "mailto", "data"):
                continue
            target = file
            if parts.path:
                target = (file.parent / unquote(parts.path)).resolve()
            if not target.is_file():
                broken.append(f"{file.relative_to(site)}: {address}: no such file")
            elif target in pages and unquote(parts.fragment) not in pages[target].anchors:
                broken.append(f"{file.relative_to(site)}: {address}: no such anchor")
    assert not broken, "\n".join(broken)


def test_each_readme_and_each_lesson_has_a_page_and_nothing_comes_from_the_network(site, pages):
    missing = []
    for source in [*ROOT.glob("*.md"), *ROOT.glob("[0-9]*/*.md"), *ROOT.glob("[0-9]*/*.py")]:
        name = str(source.relative_to(ROOT)).removesuffix(".md")
        if (site / f"{name}.html").resolve() not in pages:
            missing.append(name)
    assert not missing

    loaded = set()
    for page in pages.values():
        loaded |= {address for address in page.addresses if address.startswith("http")}
    assert not {address for address in loaded if address.endswith((".js", ".css", ".woff2"))}


def test_what_only_github_understands_is_a_picture_or_hidden(site, pages):
    front = pages[(site / "index.html").resolve()]
    shown = {Path(address).name for address in front.addresses}
    assert {"who_holds_what.svg", "who_holds_what-dark.svg"} <= shown
    text = "".join(front.words)
    assert "All scripts" in text  # the summary of <details>
    for leftover in ("<picture", "<details", "<!--", "](", "orphan: true"):
        assert leftover not in text


def test_the_search_finds_words_of_both_languages(site):
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    for word in ("gradient", "梯度"):
        assert json.dumps(word) + ":" in index


def test_a_lesson_links_to_its_script_and_shows_it_all(site, pages):
    chapter = pages[(site / "05_ddp/README.html").resolve()]
    assert "train.py.html" in chapter.addresses
    shown = "".join(pages[(site / "05_ddp/train.py.html").resolve()].words)
    for line in (ROOT / "05_ddp/train.py").read_text(encoding="utf-8").splitlines():
        assert line in shown


def test_a_folder_with_something_else_is_left_alone(site, tmp_path):
    (tmp_path / "mine.txt").write_text("mine", encoding="utf-8")
    command = [sys.executable, "-m", "sphinx", "-q", "-c", "docs", tmp_path, tmp_path / "html"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode != 0
    assert (tmp_path / "mine.txt").read_text(encoding="utf-8") == "mine"
