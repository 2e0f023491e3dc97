"""Make the folder that Sphinx reads, and make of GitHub's Markdown what Sphinx expects.

The folder has the READMEs, the pictures and the source files. Beside each source file stands a
generated page that shows it, beside some folders one that lists them. Symbolic links would not do:
Sphinx looks up where they lead.
"""

import re
import shutil
import sys
from itertools import chain
from pathlib import Path

from docutils import nodes
from pygments.lexers import TextLexer, get_lexer_for_filename
from pygments.util import ClassNotFound
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.errors import ExtensionError
from sphinx.transforms import SphinxTransform

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # so that `import common` works
from common import files

# The pages in the order of the menu. Each pattern is relative to the repository.
MENU = {
    "Chapters": ("[0-9]*/README.md",),
    "How to": ("launch/README.md", "docs/*.md"),
    "More": ("benchmarks/README.md", "CLAIMS.md"),
    "For contributors": (
        "ONBOARDING.md",
        "CONTRIBUTING.md",
        "tests/nogpu/README.md",
        "CHANGELOG.md",
    ),
    "中文": ("README.zh-CN.md", "[0-9]*/README.zh-CN.md"),
}
OTHER_PAGES = ("[0-9]*/*.md", "benchmarks/results/*.md", "launch/**/*.md", "docs/*.md", "*.md")
SOURCES = (
    *("[0-9]*/*.py", "common/*.py", "lm/*.py", "planner/*.py", "training/*.py"),
    *("benchmarks/*.py", "launch/**/*.*", "take.py", "gym.py", "models/*.py"),
)
FOLDERS = ("common", "training", "lm", "planner", "benchmarks/results")
ORPHAN = "---\norphan: true\n---\n"  # not in the menu, only linked
DOWNLOADED = {".json"}  # too long for a page

LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
CODE_BLOCK = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
PICTURE = re.compile(
    r"<picture>\s*<source[^>]*srcset=\"(?P<dark>[^\"]+)\"[^>]*>\s*"
    r"<img(?P<attributes>[^>]*)>\s*</picture>"
)
ATTRIBUTE = re.compile(r'(\w+)="([^"]*)"')


def setup(app: Sphinx) -> None:
    """Register what this file does at its moments of a build."""
    collect(Path(app.srcdir))
    app.add_lexer("mermaid", TextLexer)  # GitHub draws it, here it is text
    app.add_transform(LinksToSources)
    app.connect("source-read", prepare)
    app.connect("html-page-context", set_language)
    app.connect("build-finished", add_index)


# --- the folder that Sphinx reads


def collect(target: Path) -> None:
    """Fill the folder with copies and generated pages. What an earlier build put there is removed.

    Raise ExtensionError if something else is in the folder.
    """
    if any(target.iterdir()):
        if files.read_mark(target) is None:
            raise ExtensionError(f"{target} is not empty: give a new folder for the pages")
        files.delete(target)
        target.mkdir()
    files.set_mark(target, "docs/pages.py")
    pages = _files(chain(OTHER_PAGES, *MENU.values()))
    for page in pages:
        _copy(page, target)
    for source in (_files(SOURCES) | _linked_files(pages)) - pages:
        _copy(source, target)
        if source.suffix not in DOWNLOADED:
            _write_source_page(source.relative_to(ROOT), target)
    for folder in FOLDERS:
        _write_folder_page(Path(folder), target)
    for picture in (ROOT / "docs/images").iterdir():
        _copy(picture, target)


def _files(patterns) -> set[Path]:
    found = set()
    for pattern in patterns:
        for path in ROOT.glob(pattern):
            if path.is_file() and path.suffix != ".pyc":
                found.add(path)
    return found


def _linked_files(pages: set[Path]) -> set[Path]:
    """Return the files to which the pages have links, and which are no pages themselves."""
    linked = set()
    for page in pages:
        for address in LINK.findall(CODE_BLOCK.sub("", page.read_text(encoding="utf-8"))):
            path = (page.parent / address).resolve()
            if path.is_file() and path.is_relative_to(ROOT):
                linked.add(path)
    images = {path for path in linked if path.suffix in (".png", ".svg")}
    return linked - images - pages


def _copy(path: Path, target: Path) -> None:
    place = target / path.relative_to(ROOT)
    place.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, place)


def _write_source_page(source: Path, target: Path) -> None:
    try:
        [language, *_] = get_lexer_for_filename(source.name).aliases
    except ClassNotFound:
        language = "bash" if source.suffix == ".sbatch" else "text"
    options = f":language: {language}\n:linenos:\n:class: source\n"
    block = f"```{{literalinclude}} {source.name}\n{options}```\n"
    (target / f"{source}.md").write_text(f"{ORPHAN}# {source}\n\n{block}", encoding="utf-8")


def _write_folder_page(folder: Path, target: Path) -> None:
    names = sorted(path.name for path in (target / folder).iterdir())
    lines = []
    for name in names:
        is_generated = name.endswith(".md") and name.removesuffix(".md") in names
        if not is_generated:
            lines.append(f"- [{name}]({folder.name}/{name})")
    (target / f"{folder}.md").write_text(
        f"{ORPHAN}# {folder}\n\n" + "\n".join(lines) + "\n", encoding="utf-8"
    )


# --- the text of the pages


def prepare(app: Sphinx, docname: str, content: list[str]) -> None:
    """Change the text of a page before it is parsed."""
    content[0] = PICTURE.sub(_two_images, content[0])
    if docname == "README":
        content[0] += _menu(Path(app.srcdir))
    elif re.fullmatch(r"\d\d_\w+/README", docname):
        content[0] += _scripts_of_chapter(Path(app.srcdir, docname).parent)
    elif not _is_in_menu(docname):
        # a generated page says so itself
        content[0] = (
            content[0] if content[0].startswith("---") else f"---\norphan: true\n---\n{content[0]}"
        )


def _two_images(match: re.Match) -> str:
    """Return a picture for light and one for dark pages.

    GitHub's <picture> asks the system. On the site the reader may have chosen otherwise.
    """
    attributes = dict(ATTRIBUTE.findall(match["attributes"]))
    alt = attributes["alt"]
    return f"![{alt}]({attributes['src']}){{.only-light}}![{alt}]({match['dark']}){{.only-dark}}"


def _menu(folder: Path) -> str:
    """Return the tables of contents of the front page. They are shown in the menu only."""
    trees = ""
    for title, patterns in MENU.items():
        names = []
        for pattern in patterns:
            names += sorted(str(path.relative_to(folder)) for path in folder.glob(pattern))
        trees += _toctree(names, f":caption: {title}\n")
    return trees


def _toctree(names: list[str], options: str = "") -> str:
    lines = "\n".join(names)
    return f"\n```{{toctree}}\n:hidden:\n{options}\n{lines}\n```\n"


def _is_in_menu(docname: str) -> bool:
    path = Path(f"{docname}.md")
    return any(path.match(pattern) for pattern in chain.from_iterable(MENU.values()))


def _scripts_of_chapter(folder: Path) -> str:
    """Return a table of contents of a chapter's scripts, for the menu."""
    return _toctree(sorted(f"{path.name}.md" for path in folder.glob("[!_]*.py")))


class LinksToSources(SphinxTransform):
    """Make a link to a source file, and the name of one as code, a link to its page."""

    default_priority = 400

    def apply(self, **kwargs) -> None:
        for reference in list(self.document.findall(addnodes.download_reference)):
            page = self._page_of(reference["reftarget"])
            if page:
                _replace(reference, page, self.env.docname, reference.children)
        for reference in list(self.document.findall(addnodes.pending_xref)):
            page = self._folder_of(reference["reftarget"])
            if reference["refdomain"] is None and page:
                _replace(reference, page, self.env.docname, reference.children)
        for literal in list(self.document.findall(nodes.literal)):
            page = self._page_of(literal.astext()) or self._page_of(f"/{literal.astext()}")
            if page and not _is_inside_of_copy(literal):
                _replace(literal, page, self.env.docname, [literal.deepcopy()])

    def _page_of(self, path: str) -> str | None:
        """Return the name of the page that shows a file."""
        relative, _ = self.env.relfn2path(path, self.env.docname)
        return relative if relative in self.env.found_docs else None

    def _folder_of(self, path: str) -> str | None:
        relative, _ = self.env.relfn2path(path.rstrip("/"), self.env.docname)
        for page in (relative, f"{relative}/README"):
            if page in self.env.found_docs:
                return page
        return None


def _replace(node: nodes.Node, page: str, docname: str, children: list[nodes.Node]) -> None:
    reference = addnodes.pending_xref(
        refdomain="doc",
        reftarget=page,
        reftargetid=None,
        refdoc=docname,
        reftype="myst",
        refexplicit=True,
    )
    reference += children
    node.replace_self(reference)


def _is_inside_of_copy(node: nodes.Node) -> bool:
    while node.parent is not None:
        node = node.parent
        if isinstance(node, nodes.reference | addnodes.pending_xref | nodes.title):
            return True
    return False


# --- the pages as HTML


def set_language(app: Sphinx, pagename: str, template: str, context: dict, doctree) -> None:
    """Mark the pages that are Chinese, for fonts and screen readers."""
    if pagename.endswith(".zh-CN"):
        context["language"] = "zh-CN"


def add_index(app: Sphinx, error: Exception | None) -> None:
    """Make the front page the one that a web server shows first."""
    if error is None and app.builder.format == "html":
        shutil.copy(Path(app.outdir, "README.html"), Path(app.outdir, "index.html"))
