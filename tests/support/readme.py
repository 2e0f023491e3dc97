"""Write the parts of the READMEs that are generated from the scripts.

    python tests/support/readme.py    writes them again (make readme)

A generated part stands between two comments. The first one says what it is, the second one is
<!-- end -->. There are four kinds:

    <!-- diff BEFORE.py AFTER.py -->
        The whole diff between two scripts.

    <!-- hunk BEFORE.py AFTER.py: TEXT | TEXT | ... -->
        Some hunks of that diff. Each TEXT is part of a changed line, and names the hunk with that
        line. Exactly one hunk must have such a line.

    <!-- code FILE.py: FIRST ... LAST -->
        The lines of a script from FIRST to LAST. Exactly one line starts with FIRST, apart from its
        indentation. LAST is the start of that line or of one after it.

    <!-- sizes -->
        A table. In each row with a link to a script, the last two cells become what take.py copies
        with the script: the number of files, and of lines, rounded to hundreds.

A diff leaves out the docstrings of the scripts, because they stand at the top of each.
"""

import ast
import difflib
import re
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))
from take import closure, count_lines

BLOCK = re.compile(r"(<!-- (diff|hunk|code|sizes)(?: (.+?))? -->\n)(.*?)(<!-- end -->)", re.DOTALL)


class Change(NamedTuple):
    """Consecutive lines that a script replaces by other lines: ranges of line numbers."""

    before_start: int
    before_end: int
    after_start: int
    after_end: int


class Hunk(NamedTuple):
    """Changes that are shown together, each line with "+", "-" or " " in front of it."""

    lines: list[str]

    def changes(self, text: str) -> bool:
        """Return whether a text is part of a line that was added or removed."""
        return any(text in line[1:] for line in self.lines if line[0] != " ")

    def __str__(self) -> str:
        return "\n".join(self.lines)


def regenerate(text: str) -> str:
    """Return the text of a README with its generated parts written again.

    Raise ValueError if a part names no lines, or does not say which of several.
    """
    return BLOCK.sub(_block, text)


def _block(match: re.Match) -> str:
    start, kind, arguments, old, end = match.groups()
    if kind == "sizes":
        content = "\n".join(with_sizes(row) for row in old.strip().splitlines())
    elif kind == "diff":
        before, after = arguments.split()
        content = f"```diff\n{whole_diff(before, after)}\n```"
    elif kind == "hunk":
        scripts, texts = arguments.split(": ", 1)
        before, after = scripts.split()
        chosen = [find_hunk(before, after, text) for text in texts.split(" | ")]
        content = "```diff\n" + "\n@@\n".join(str(hunk) for hunk in chosen) + "\n```"
    else:
        script, first_and_last = arguments.split(": ", 1)
        first, last = first_and_last.split(" ... ")
        content = f"```python\n{code(script, first, last)}\n```"
    return f"{start}{content}\n{end}"


def with_sizes(row: str) -> str:
    """Return a row of a table with the size of the script that it links to in its last cells."""
    script = re.search(r"\[(\w+/\w+\.py)\]", row)
    if script is None:
        return row
    files = closure(ROOT / script[1])
    cells = row.split(" | ")
    cells[-2:] = [f"{len(files)}", f"{round(count_lines(files), -2):,} |"]
    return " | ".join(cells)


def whole_diff(before: str, after: str) -> str:
    """Return the diff between two scripts, with one line of context."""
    lines = list(difflib.unified_diff(_body(before), _body(after), n=1, lineterm=""))[2:]
    return "\n".join(re.sub(r"^@@.*@@$", "@@", line) for line in lines)


def find_hunk(before: str, after: str, text: str) -> Hunk:
    """Return the hunk that changes a line with this text. Raise ValueError if it is not one."""
    found = [hunk for hunk in hunks(before, after) if hunk.changes(text)]
    if len(found) != 1:
        raise ValueError(f"{len(found)} hunks from {before} to {after} change a line with {text!r}")
    return found[0]


def hunks(before: str, after: str) -> list[Hunk]:
    """Return the hunks of the diff between two scripts, with one line of context.

    Two changes with one line between them are in one hunk, unless that line is blank.
    """
    before_lines = _body(before)
    after_lines = _body(after)
    matcher = difflib.SequenceMatcher(None, before_lines, after_lines, autojunk=False)
    groups: list[list[Change]] = []
    for kind, *numbers in matcher.get_opcodes():
        if kind == "equal":
            continue
        change = Change(*numbers)
        if groups:
            between = after_lines[groups[-1][-1].after_end : change.after_start]
            if len(between) == 1 and between[0].strip():
                groups[-1].append(change)
                continue
        groups.append([change])
    return [_hunk(group, before_lines, after_lines) for group in groups]


def _hunk(group: list[Change], before_lines: list[str], after_lines: list[str]) -> Hunk:
    first = group[0].after_start
    lines = _context(after_lines[first - 1 : first])
    position = first
    for change in group:
        lines += _context(after_lines[position : change.after_start])
        lines += ["-" + line for line in before_lines[change.before_start : change.before_end]]
        lines += ["+" + line for line in after_lines[change.after_start : change.after_end]]
        position = change.after_end
    lines += _context(after_lines[position : position + 1])
    return Hunk(lines)


def _context(lines: list[str]) -> list[str]:
    """Return unchanged lines of a hunk. A blank line at its start or end is of no use."""
    return [" " + line for line in lines if line.strip()]


def code(script: str, first: str, last: str) -> str:
    """Return the lines of a script from one to another, without their common indentation.

    Raise ValueError if not exactly one line starts with `first`, or none from there on with `last`.
    """
    lines = (ROOT / script).read_text(encoding="utf-8").splitlines()
    starts = [number for number, line in enumerate(lines) if line.strip().startswith(first)]
    if len(starts) != 1:
        raise ValueError(f"{len(starts)} lines of {script} start with {first!r}")
    for end in range(starts[0], len(lines)):
        if lines[end].strip().startswith(last):
            return textwrap.dedent("\n".join(lines[starts[0] : end + 1]))
    raise ValueError(f"no line of {script} starts with {last!r}, from {first!r} on")


def _body(script: str) -> list[str]:
    """Return the lines of a script after its docstring."""
    text = (ROOT / script).read_text(encoding="utf-8")
    return text.splitlines()[ast.parse(text).body[0].end_lineno :]


if __name__ == "__main__":
    pages = [*ROOT.glob("README*.md"), *ROOT.glob("[0-9]*/README.md"), *ROOT.glob("docs/*.md")]
    for file in pages:
        file.write_text(regenerate(file.read_text(encoding="utf-8")), encoding="utf-8")
