"""Flags that scripts share. A wrong value is found here, before anything expensive starts."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from common.exits import UserError


class Parser(argparse.ArgumentParser):
    """argparse's parser with one-line errors, and with a script's docstring unchanged as --help."""

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> None:
        raise UserError(f"{message} (--help lists the flags)")


# --- types for add_argument(type=...)


def positive_int(text: str) -> int:
    """Return the whole number in `text`. Raise argparse's error if it is less than 1."""
    return _number(text, int, lambda value: value >= 1, "a whole number of at least 1")


def natural(text: str) -> int:
    """Return the whole number in `text`. Raise argparse's error if it is less than 0."""
    return _number(text, int, lambda value: value >= 0, "a whole number of at least 0")


def positive(text: str) -> float:
    """Return the number in `text`. Raise argparse's error if it is 0 or less, or NaN."""
    return _number(text, float, lambda value: value > 0, "a number above 0")


def not_negative(text: str) -> float:
    """Return the number in `text`. Raise argparse's error if it is less than 0, or NaN."""
    return _number(text, float, lambda value: value >= 0, "a number of at least 0")


def _number(
    text: str, kind: type, is_allowed: Callable[[float], bool], description: str
) -> int | float:
    """Convert `text` to int or float, or raise argparse's error, which names what is allowed."""
    try:
        value = kind(text)
        allowed = is_allowed(value)
    except ValueError:
        allowed = False
    if not allowed:
        raise argparse.ArgumentTypeError(f"{text!r} is not {description}")
    return value


def writable_file(text: str) -> Path:
    """Return `text` as a path. Raise argparse's error if no file can be written there.

    The folder must exist: a long run must not fail after its last step.
    """
    path = Path(text)
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written: it is a folder, or its folder is missing or read-only"
        )
    return path


# --- environment variables


def environment_number(name: str, kind: Callable[[str], int | float], default: str) -> int | float:
    """Return the environment variable `name` as a number, or `default` if it is not set or empty.

    `kind` is one of the types above. Raise UserError if it does not accept the value.
    """
    text = os.environ.get(name) or default
    try:
        return kind(text)
    except argparse.ArgumentTypeError as error:
        raise UserError(f"the environment variable {name}: {error}") from None


# --- flags


def add_device_and_json(parser: argparse.ArgumentParser) -> None:
    """Add --device and --json, which every script has."""
    parser.add_argument("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    parser.add_argument(
        "--json", type=writable_file, metavar="PATH", help="write the summary as one JSON object"
    )
