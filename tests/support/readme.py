"""The parts of the READMEs that are generated: the diff between neighbouring chapters.

python tests/support/readme.py   writes them anew (make readme)
"""

import ast
import difflib
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"(<!-- diff (\S+) (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)


def lesson(before: str, after: str) -> str:
    """What changes from one script to the next, docstrings left out: they are read at the top of each."""
    lines = list(difflib.unified_diff(_code(before), _code(after), n=1, lineterm=""))[2:]
    return "\n".join(re.sub(r"^@@.*@@$", "@@", line) for line in lines)


def _code(script: str) -> list[str]:
    text = (ROOT / script).read_text()
    return text.splitlines()[ast.parse(text).body[0].end_lineno :]


def regenerate(text: str) -> str:
    return BLOCK.sub(lambda m: f"{m[1]}```diff\n{lesson(m[2], m[3])}\n```\n{m[4]}", text)


if __name__ == "__main__":
    for file in ROOT.glob("0*/README.md"):
        file.write_text(regenerate(file.read_text()))
