"""Record commands and what they print, and draw them as an animated terminal.

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
END = 10

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
    script = "".join(f"{command}\ncode=$?; printf '\\0'; (exit $code)\n" for command in commands)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # with torchrun of this venv
    env = os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    bash = ["bash", "-c", script]
    printed = subprocess.run(bash, cwd=folder, env=env, timeout=900, check=False, **pipes).stdout

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
    starts = []  # seconds
    end = 0.5
    for line, next_line in zip(lines, [*lines[1:], lines[0]], strict=True):
        starts.append(end)
        end += TYPED if line.typed else PRINTED
        end += PAUSE if next_line.typed and not line.typed else PRINTED
    end += END

    keyframes = ""
    body = ""
    for number, (line, start) in enumerate(zip(lines, starts, strict=True)):
        top = TITLE + number * LINE
        body += _draw_line(line, top)
        # A cover becomes narrower from the left, so the line appears.
        steps = COLUMNS if line.typed else 1
        first = 100 * start / end
        last = 100 * (start + (TYPED if line.typed else PRINTED)) / end
        covering = f"opacity:1;transform:scaleX(1);animation-timing-function:steps({steps})"
        keyframes += f"@keyframes k{number}{{0%,{first:.2f}%{{{covering}}}"
        keyframes += f"{last:.2f}%,100%{{opacity:1;transform:scaleX(0)}}}}\n"
        body += (
            f'<rect x="1" y="{top}" width="{WIDTH - 2}" height="{LINE}" fill="{theme().box}" '
            f'opacity="0" style="animation:k{number} {end:.2f}s infinite"/>\n'
        )
    height = TITLE + len(lines) * LINE + MARGIN
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"
 viewBox="0 0 {WIDTH} {height}" font-size="14"
 font-family="ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace">
<style>{keyframes}rect{{transform-origin:{WIDTH - 1}px 0}}
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
    fill = theme().text
    weight = "normal"
    if line.text.startswith("#"):
        fill = theme().quiet
    elif line.typed:
        weight = "bold"
    for beginning, number in MARKED.items():
        if not line.typed and line.text.startswith(beginning):
            drawn = f'<rect x="{MARGIN / 2}" y="{top + 1}" width="{WIDTH - MARGIN}" height="18" '
            drawn += f'rx="3" fill="{color(number)}" fill-opacity="0.22"/>'
    width = f'textLength="{len(line.text) * CHARACTER:.1f}" lengthAdjust="spacingAndGlyphs"'
    drawn += f'<text x="{MARGIN}" y="{top + 15}" {width} fill="{fill}" font-weight="{weight}">'
    text = escape(line.text).replace(" ", "\u00a0")  # browsers merge other spaces
    return f"{drawn}{text}</text>\n"
