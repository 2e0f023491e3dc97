"""Compare what pages quote of a script's output with what the script prints, numbers apart."""

import ast
import re
from functools import cache
from typing import NamedTuple

from support.harness import ROOT

NUMBER = re.compile(r"(?<![A-Za-z_])[-+]?\d[\d,]*(\.\d+)?(e[-+]?\d+)?")
SHORTEST = 15  # characters of a text in a script that a line may be recognized by


class Quoted(NamedTuple):
    page: str
    command: str  # without `$ `
    lines: list[str]  # what stands below it

    @property
    def script(self) -> str:
        [script] = re.findall(r"\S+\.py", self.command)
        return script

    @property
    def folder(self) -> str:
        return self.script.split("/")[0]


def quoted_outputs() -> list[Quoted]:
    """Return each command of the chapters and of docs/ that has its output below it."""
    found = []
    for page in sorted([*ROOT.glob("[0-9]*/README.md"), *ROOT.glob("docs/*.md")]):
        text = page.read_text(encoding="utf-8")
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
            if language == "":
                found += _commands_of(page.parent.name, block)
    return found


def _commands_of(page: str, block: str) -> list[Quoted]:
    commands = []
    for line in block.splitlines():
        if line.startswith("$ "):
            command = re.sub(r"\s+\(.*|\s{2,}.*", "", line.removeprefix("$ "))
            commands.append(Quoted(page, command, []))
        elif commands:
            commands[-1].lines.append(line)
    return commands


def checked_lines(lines: list[str]) -> list[str]:
    """Return the lines with `checked:`, each with the lines that it is folded into."""
    found = []
    is_folded = False
    for line in lines:
        if line.startswith("checked:"):
            found.append(line)
        elif is_folded and line.startswith("  "):
            found[-1] += " " + line.strip()
        is_folded = bool(found) and line.startswith(("checked:", "  "))
    return found


def headings(lines: list[str]) -> list[list[str]]:
    """Return the cells of the first row of each table."""
    rows = []
    above = ""
    for line in lines:
        if line.startswith("|") and not above.startswith("|"):
            rows.append([cell.strip() for cell in line.strip("|").split("|")])
        above = line
    return rows


def shape(text: str) -> str:
    """Return a text without its numbers and with single spaces."""
    return re.sub(r"\s+", " ", NUMBER.sub("#", text)).strip()


def not_printed(quoted: Quoted, printed: str) -> list[str]:
    """Return the quoted lines with `checked:` and the headings that are not in the output.

    Where a quoted line has `...`, anything may stand. A quoted table may leave out columns,
    and may be one where the script prints two, because all its columns would be too wide.
    """
    lines = printed.splitlines()
    missing = []
    shapes = [shape(line) for line in checked_lines(lines)]
    for line in checked_lines(quoted.lines):
        parts = [re.escape(shape(part)) for part in line.split("...")]
        if not any(re.fullmatch(".*".join(parts), known) for known in shapes):
            missing.append(line)
    printed_cells = set()
    for cells in headings(lines):
        printed_cells.update(map(shape, cells))
    for cells in headings(quoted.lines):
        if not printed_cells.issuperset(map(shape, cells)):
            missing.append(" | ".join(cells))
    return missing


def not_in_source(quoted: Quoted) -> list[str]:
    """Return the quoted lines with `checked:` and the cells of headings that no script can print.

    A text in the source is recognized where it has at least SHORTEST characters. What an f-string
    inserts may be anything.
    """
    texts = _texts(quoted.folder)
    for package in ("common", "training", "lm", "planner"):
        texts += _texts(package)
    missing = []
    for line in checked_lines(quoted.lines):
        message = line.removeprefix("checked:").strip()
        if not any(text.match(message) for text in texts):
            missing.append(line)
    sources = "\n".join(file.read_text(encoding="utf-8") for file in _files(quoted.folder))
    for cells in headings(quoted.lines):
        for cell in cells:
            words = max(re.split(r"\d+|, |\b[KMG]i?B\b", cell), key=len).strip()
            if words and words not in sources:
                missing.append(cell)
    return missing


def _files(folder: str) -> list:
    return sorted((ROOT / folder).glob("*.py"))


@cache
def _texts(folder: str) -> list[re.Pattern]:
    """Return a pattern for each long text in the scripts of a folder."""
    patterns = []
    for file in _files(folder):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                values = node.values
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                values = [node]
            else:
                continue
            pattern = ""
            length = 0
            for value in values:
                if isinstance(value, ast.Constant):
                    text = value.value.strip("\n").removeprefix("checked: ")
                    pattern += re.escape(text)
                    length += len(text)
                else:
                    pattern += ".*"
            if length >= SHORTEST:
                patterns.append(re.compile(pattern))
    return patterns
