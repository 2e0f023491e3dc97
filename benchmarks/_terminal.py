"""Record commands and what they print, and draw a terminal in which they appear once.

Without animation, or where the reader has asked for less motion, the picture is the last frame.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from _draw import GREEN, ORANGE, RED, color, theme

COLUMNS = 66
CHARACTER = 8.4  # pixels, as all sizes of the picture
LINE = 20
MARGIN = 14
TITLE = 30
WIDTH = round(COLUMNS * CHARACTER) + 2 * MARGIN

# Seconds of the animation. What the commands really took is left out.
TYPED = 1.0
PRINTED = 0.05
PAUSE = 1.2

# The color behind a line that starts like this.
MARKED = {"<": GREEN, ">": RED, "exit code": GREEN, "step": ORANGE, "E ": RED, "FAILED": RED}


class Line(NamedTuple):
    """A line of the terminal: what was typed or printed."""

    text: str
    typed: bool


def record(session: str, folder: Path) -> list[Line]:
    """Run the commands of a session in one bash, in `folder`. Return them and their outputs.

    A blank line ends a command. Lines that start with # are comments.
    """
    commands = session.strip().split("\n\n")
    # After each command a byte of 0, and again its exit code in $?.
    script = "exec 2>&1\n"
    for command in commands:
        script += f"{command}\ncode=$?; printf '\\0'; (exit $code)\n"
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # with torchrun of this venv
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    how = {"cwd": folder, "env": env, "timeout": 900, "capture_output": True, "text": True}
    printed = subprocess.run(["bash", "-c", script], check=False, **how).stdout

    lines = []
    for command, output in zip(commands, printed.split("\0"), strict=False):
        prompt = "$ "
        for text in command.splitlines():
            is_comment = text.startswith("#")
            lines.append(Line(text if is_comment else prompt + text, typed=True))
            prompt = prompt if is_comment else "> "
        for text in output.expandtabs().splitlines():
            lines.append(Line(text, typed=False))
    longest = max(len(line.text) for line in lines)
    assert longest <= COLUMNS, f"a line of {longest} characters, in {COLUMNS} columns"
    return lines


def draw(lines: Sequence[Line], title: str) -> str:
    """Return the SVG of these lines, in the colors of the current theme."""
    body = ""
    start = 0.0
    for number, line in enumerate(lines):
        top = TITLE + number * LINE
        seconds = TYPED if line.typed else PRINTED
        steps = COLUMNS if line.typed else 1
        start += PAUSE if line.typed and not lines[number - 1].typed else 0
        # A cover becomes narrower from the left, so the line appears.
        body += (
            f'{_draw_line(line, top)}<rect x="1" y="{top}" width="{WIDTH - 2}" height="{LINE}" '
            f'opacity="0" fill="{theme().box}" '
            f'style="animation:cover {seconds}s steps({steps}) {start:.2f}s both"/>\n'
        )
        start += seconds
    height = TITLE + len(lines) * LINE + MARGIN
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"
 viewBox="0 0 {WIDTH} {height}" font-size="14"
 font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace">
<style>@keyframes cover{{from{{opacity:1}}to{{opacity:1;transform:scaleX(0)}}}}
rect{{transform-origin:{WIDTH - 1}px 0}}
@media (prefers-reduced-motion:reduce){{rect{{animation:none!important}}}}</style>
<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{height - 1}" rx="8" fill="{theme().box}"
 stroke="{theme().line}"/>
<text x="{WIDTH / 2}" y="20" text-anchor="middle" font-size="12.5"
 fill="{theme().quiet}">{escape(title)}</text>
{body}</svg>
"""


def _draw_line(line: Line, top: float) -> str:
    """Draw the text as wide as its columns, whatever font there is."""
    drawn = ""
    fill = theme().quiet if line.text.startswith("#") else theme().text
    weight = "bold" if line.typed and fill == theme().text else "normal"
    for beginning, number in MARKED.items():
        if not line.typed and line.text.startswith(beginning):
            drawn = f'<rect x="{MARGIN / 2}" y="{top + 1}" width="{WIDTH - MARGIN}" height="18" '
            drawn += f'rx="3" fill="{color(number)}" fill-opacity="0.22"/>'
    width = f'textLength="{len(line.text) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs"'
    drawn += f'<text x="{MARGIN}" y="{top + 15}" {width} fill="{fill}" font-weight="{weight}">'
    text = escape(line.text).replace(" ", "\u00a0")  # browsers merge other spaces
    return f"{drawn}{text}</text>\n"
