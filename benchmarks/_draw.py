"""How the pictures in docs/images look: colors, boxes, and files that are the same each time.

A picture is drawn twice, for a light and for a dark page. Its function takes nothing, and reads the
colors of the page from `theme()`. Text becomes outlines, so that no font is needed to show it.
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyBboxPatch, Rectangle

REPO = Path(__file__).resolve().parents[1]
IMAGES = Path(os.environ.get("OUT") or REPO / "docs/images")


@dataclass(frozen=True)
class Theme:
    """The colors of a page. `suffix` is part of the file name."""

    suffix: str
    text: str
    quiet: str  # small text, axes
    line: str  # outlines of boxes
    box: str  # what is inside of an outline
    pale: float  # how opaque a pale area is
    series: tuple[str, ...]


# after Okabe and Ito: also for those who do not tell red from green
LIGHT = Theme(
    suffix="",
    text="#1f2328",
    quiet="#59636e",
    line="#b1b9c2",
    box="#f3f5f7",
    pale=0.35,
    series=("#2f74b5", "#e08e0b", "#1f9a74", "#b25d99", "#c9503c", "#6fb2dc", "#8a8f98"),
)
DARK = Theme(
    suffix="-dark",
    text="#f0f6fc",
    quiet="#a3abb5",
    line="#59626d",
    box="#1a2028",
    pale=0.5,
    series=("#5a9fe0", "#e9a13b", "#3fb68f", "#cf83b9", "#e0705c", "#9bd0f2", "#9aa1ab"),
)
BLUE, ORANGE, GREEN, PURPLE, RED, PALE_BLUE, GREY = range(7)

_current = LIGHT


def theme() -> Theme:
    """Return the theme of the picture that is being drawn."""
    return _current


def color(number: int) -> str:
    """Return a color of the current theme: BLUE, ORANGE, ..."""
    return _current.series[number]


def text_on(number: int) -> str:
    """Return the color of text on a color of the theme."""
    if _current is DARK:
        return "#0d1117"
    return "#ffffff" if number == BLUE else _current.text


def save(name: str, draw: Callable[[], Figure | str], kind: str = "svg") -> None:
    """Draw a picture for both themes: docs/images/NAME.svg and NAME-dark.svg.

    `draw` returns a figure, or the text of an SVG. `kind` is "png" for what has thousands of
    points. The same picture gives the same bytes: no date, no version, and ids that do not depend
    on chance.
    """
    global _current
    unset = ("Date", "Creator") if kind == "svg" else ("Software",)
    for _current in (LIGHT, DARK):
        with matplotlib.rc_context(_settings(_current)):
            figure = draw()
            file = IMAGES / f"{name}{_current.suffix}.{kind}"
            if isinstance(figure, str):
                file.write_text(figure, encoding="utf-8")
                continue
            figure.savefig(
                file,
                transparent=True,
                dpi=144,
                bbox_inches="tight",
                pad_inches=0.05,
                metadata=dict.fromkeys(unset),
            )
    _current = LIGHT
    print(f"picture: {IMAGES / name}.{kind}", flush=True)


def _settings(page: Theme) -> dict:
    return {
        "svg.hashsalt": "docs/images",
        "svg.fonttype": "path",
        "font.family": "DejaVu Sans",  # matplotlib brings it along
        "font.size": 10,
        "text.color": page.text,
        "axes.labelcolor": page.text,
        "axes.titlecolor": page.text,
        "axes.titlesize": 10.5,
        "axes.edgecolor": page.line,
        "axes.facecolor": "none",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.prop_cycle": cycler(color=page.series),
        "xtick.color": page.line,
        "ytick.color": page.line,
        "xtick.labelcolor": page.text,
        "ytick.labelcolor": page.text,
        "grid.color": page.line,
        "legend.frameon": False,
        "hatch.linewidth": 0.8,
    }


def canvas(width: float, height: float) -> tuple[Figure, Axes]:
    """Return a figure without axes, in inches from its upper left corner."""
    figure = Figure(figsize=(width, height))
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set(xlim=(0, width), ylim=(height, 0))
    axes.axis("off")
    return figure, axes


def rounded(axes: Axes, left: float, top: float, width: float, height: float) -> None:
    """Draw a box with round corners, such as a GPU."""
    axes.add_patch(
        FancyBboxPatch(
            (left, top),
            width,
            height,
            boxstyle="round,pad=0,rounding_size=0.06",
            facecolor=_current.box,
            edgecolor=_current.line,
            linewidth=1,
            clip_on=False,
        )
    )


def block(
    axes: Axes,
    left: float,
    top: float,
    width: float,
    height: float,
    number: int,
    *,
    filled: bool = True,
    alpha: float = 1.0,
) -> None:
    """Draw a rectangle: in a color of the theme, or as an outline of what is not there."""
    axes.add_patch(
        Rectangle(
            (left, top),
            width,
            height,
            facecolor=color(number) if filled else "none",
            edgecolor="none" if filled else _current.line,
            linewidth=0.6,
            alpha=alpha,
            clip_on=False,
        )
    )


def arrow(axes: Axes, start: tuple[float, float], end: tuple[float, float], **how) -> None:
    """Draw an arrow. `how` replaces parts of its style: a color, a linestyle, a bend."""
    style = {"arrowstyle": "-|>", "color": _current.quiet, "linewidth": 1.1}
    axes.annotate("", xy=end, xytext=start, arrowprops=style | how)
