"""A Markdown table that is readable as plain text."""

import re


def table(rows: list[list[str]]) -> str:
    """The first row is the head, columns of figures are right-aligned."""
    columns = []
    for head, *cells in zip(*rows, strict=True):
        width = max(3, *map(len, (head, *cells)))
        figures = len(cells) > 0 and all(re.match(r"[-+]?[\d.]|n/a", cell) for cell in cells)
        align = str.rjust if figures else str.ljust
        rule = "-" * (width - 1) + ":" if figures else "-" * width
        columns.append([align(head, width), rule, *(align(cell, width) for cell in cells)])
    return "\n".join("| " + " | ".join(line) + " |" for line in zip(*columns, strict=True))
