"""The flags that scripts share, checked before anything expensive starts."""

import argparse
import contextlib
import os
from pathlib import Path

from common.exits import UserError


class Parser(argparse.ArgumentParser):
    """argparse that states an error in one line and prints a script's docstring unchanged."""

    def __init__(self, description: str) -> None:
        unchanged = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=unchanged, allow_abbrev=False)

    def error(self, message: str) -> None:
        raise UserError(f"{message} (--help lists the flags)")


def _number(kind: type, least: float, *, exclusive: bool = False):
    condition = f"{'a whole number' if kind is int else 'a number'} {'above' if exclusive else 'of at least'} {least}"

    def convert(text: str) -> float:
        with contextlib.suppress(ValueError):
            value = kind(text)
            if value > least or (value == least and not exclusive):
                return value
        raise argparse.ArgumentTypeError(f"{text!r} is not {condition}")

    return convert


positive_int, natural = _number(int, 1), _number(int, 0)
positive, not_negative = _number(float, 0, exclusive=True), _number(float, 0)


def writable_file(text: str) -> Path:
    """A path whose folder exists: better said now than after the last step."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written: a folder, or in none that can be written"
        )
    return path


def add_device_and_json(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    parser.add_argument(
        "--json", type=writable_file, metavar="PATH", help="write the summary as one JSON object"
    )
