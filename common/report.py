"""Report results: tables for people, one JSON object for programs.

This module does not import torch: 07_memory_tricks/estimate.py runs without it.
"""

import re
import resource
import sys
import textwrap
from pathlib import Path

from common import exits, files
from common.progress import progress_bar as progress_bar  # part of this module for its callers

# The keys that every --json has, null where a script does not know the value.
SUMMARY = [
    "script",
    "torch",
    "device",
    "world_size",
    "dtype",
    "model",
    "parameters",
    "steps",
    "tokens",
    "first_loss",
    "last_loss",
    "val_loss",
    "tokens_per_second",
    "mfu",
    "peak_memory_bytes",
    "seconds",
]
MIB = 2**20
WIDTH = 100  # columns of what a lesson prints
STARTS_LIKE_A_FIGURE = re.compile(r"[-+]?[\d.]|n/a")

_earlier_peak_bytes = 0  # of GPU memory, before torch's peak was reset


# --- figures


def for_people(name: str, value: object) -> str:
    """Format a value in the unit that its name ends with.

    For example 592 MiB, 4,538 tokens/s, 34.6 s, 1.31x or 45.7%. None is n/a, and the items of a
    list are formatted one by one.
    """
    if isinstance(value, list):
        return ", ".join(for_people(name, item) for item in value)
    if value is None:
        return "n/a"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if name.endswith("tokens_per_second"):
        return f"{value:,.0f} tokens/s"
    if name.endswith(("share", "mfu")):
        return f"{value:.1%}"
    if name.endswith("ratio"):
        return f"{value:.2f}x"
    if name.endswith("error"):
        return f"{value:.1e}" if value else "0"
    if name.endswith(("bytes", "bytes_per_rank")):
        mib = value / MIB
        return f"{mib:,.1f} MiB" if mib < 100 else f"{mib:,.0f} MiB"
    if name.endswith("seconds"):
        return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def table(rows: list[list[str]]) -> str:
    """Return rows of text as a Markdown table. The first row holds the headings.

    A column is right-aligned if all of its cells start like a figure or are n/a.
    """
    columns = []
    for heading, *cells in zip(*rows, strict=True):
        width = max(3, len(heading), *[len(cell) for cell in cells])
        if cells and all(STARTS_LIKE_A_FIGURE.match(cell) for cell in cells):
            align = str.rjust
            rule = ":".rjust(width, "-")
        else:
            align = str.ljust
            rule = "-".ljust(width, "-")
        column = [align(heading, width), rule]
        for cell in cells:
            column.append(align(cell, width))
        columns.append(column)

    lines = []
    for texts in zip(*columns, strict=True):
        lines.append("| " + " | ".join(texts) + " |")
    return "\n".join(lines)


def print_table(rows: list[list[str]]) -> None:
    """Print a table, and an empty line. What is wider than WIDTH becomes several tables.

    Each has the first column, and the second if rows differ there alone, and as many of the others
    as fit.
    """
    columns = list(zip(*rows, strict=True))
    count = 1
    if len(set(columns[0])) < len(rows) and len(columns) > 2:
        count = 2
    names = columns[:count]
    shown = names
    for column in columns[count:]:
        wider = [*shown, column]
        if len(shown) > count and len(_table_of(wider).splitlines()[0]) > WIDTH:
            print(f"{_table_of(shown)}\n")
            wider = [*names, column]
        shown = wider
    print(f"{_table_of(shown)}\n")


def _table_of(columns: list[tuple[str, ...]]) -> str:
    return table([list(row) for row in zip(*columns, strict=True)])


def fold(text: str) -> str:
    """Return a line of text as lines of at most WIDTH columns. All but the first are indented."""
    return textwrap.fill(
        text,
        WIDTH,
        subsequent_indent="  ",
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
    )


def peak_memory_bytes(device) -> int:
    """Return the most memory that this process has held so far, in bytes.

    On a GPU this is what torch has allocated there, else the resident set of the process.
    """
    if device.type == "cuda":
        import torch

        return max(_earlier_peak_bytes, torch.cuda.max_memory_allocated(device))
    if sys.platform == "darwin":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # Not ru_maxrss: on Linux it also counts the program that started this one.
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak_kib = status.split("VmHWM:")[1].split()[0]
    return int(peak_kib) * 1024


def remember_peak(device) -> None:
    """Keep the peak of GPU memory for `peak_memory_bytes`. Call it before torch's peak is reset."""
    global _earlier_peak_bytes
    _earlier_peak_bytes = peak_memory_bytes(device)


# --- summaries


def summary(summary: dict, json_path: Path | None, details: dict | None = None) -> None:
    """Print the summary of a run, a line per value, and write it to `json_path` if there is one.

    `details` are further values of the file, which are not printed.
    """
    details = details or {}
    values = write_json(summary | details, json_path)
    values = {name: value for name, value in values.items() if name not in details}
    width = max(22, *[len(name) for name in values])
    print()
    for name, value in values.items():
        if isinstance(value, list):  # texts in quotes, so that blanks can be seen
            value = [repr(item) if isinstance(item, str) else item for item in value]
        print(f"{name:<{width}} {for_people(name, value)}")


def write_json(summary: dict, json_path: Path | None) -> dict:
    """Return `summary` with all keys of SUMMARY, and write it to `json_path` if there is one."""
    script = Path(sys.argv[0]).resolve()
    torch_module = sys.modules.get("torch")  # None in a script that does not import it
    full_summary = dict.fromkeys(SUMMARY)
    full_summary["script"] = "/".join(script.parts[-2:])
    full_summary["torch"] = getattr(torch_module, "__version__", None)
    full_summary.update(summary)
    if json_path:
        with exits.writing("the summary", json_path):
            file = json_path.resolve() if json_path.is_file() else json_path  # a link stays
            files.write_json(file, full_summary, allow_nan=False, default=str)
    return full_summary
