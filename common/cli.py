"""Flags that scripts share. A wrong value is found here, before anything expensive starts."""

import argparse
import difflib
import math
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NoReturn, TypeVar

from common.exits import UserError

# What the first bytes of a file hold if a script has written it: write_json of common/report.py
# and matplotlib.
SUMMARY_MARK = b'"script":'
PICTURE_MARK = b"Matplotlib"
MARKED_BYTES = 4096
# How torchrun's flags begin. After the name of the script they would be those of the script.
FLAGS_OF_TORCHRUN = ("--nproc", "--nnodes", "--node", "--standalone", "--rdzv", "--master")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Show the description as it is, and the default of each flag that does not mention one."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        is_switch = action.nargs == 0
        has_default = action.default is not None and action.default != argparse.SUPPRESS
        if not action.option_strings or is_switch or not has_default or "default" in text:
            return text
        return f"{text} (default: %(default)s)".lstrip()

    def _format_action(self, action: argparse.Action) -> str:
        # argparse asks for the text of a flag only if it has one
        if action.help is None:
            action.help = self._get_help_string(action) or None
        return super()._format_action(action)


class Parser(argparse.ArgumentParser):
    """argparse's parser with one-line errors, and with a script's docstring unchanged as --help."""

    # Values of flags that are no paths, although a file of such a name may exist.
    names = frozenset({"stdlib", "bytes"})
    # Flags whose value may have several parts: see split_mixture.
    mixtures = frozenset()
    # Flags of folders with outputs and other files.
    folders_of_outputs = frozenset()

    def __init__(self, description: str) -> None:
        super().__init__(
            description=description,
            formatter_class=HelpFormatter,
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (--help lists the flags)")

    def set_helps(self, helps: dict[str, str]) -> None:
        """Set the help of flags by name, as set_defaults sets their defaults."""
        for action in self._actions:
            action.help = helps.get(action.dest, action.help)

    def _check_value(self, action: argparse.Action, value: object) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            choices = [str(choice) for choice in action.choices or ()]
            error.message += did_you_mean(str(value), choices)
            raise

    def _hint(self, unknown: list[str]) -> str:
        """Return what to say about the first flag that is not known."""
        for argument in unknown:
            flag = argument.split("=")[0]
            if flag.startswith(FLAGS_OF_TORCHRUN):
                return f"; {flag} is a flag of torchrun: it stands before the name of the script"
            if flag.startswith("-"):
                return did_you_mean(flag, self._option_string_actions)
        return ""

    def parse_args(self, arguments: list[str] | None = None) -> argparse.Namespace:
        """Parse the command line. Raise UserError for an unknown flag.

        Raise it also if an output is an input, by the same path or by a link.
        """
        args, unknown = self.parse_known_args(arguments)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}{self._hint(unknown)}")
        self.check_outputs(args)
        return args

    def check_outputs(self, args: argparse.Namespace) -> None:
        """Raise UserError if the value of a flag for an output is that of another flag."""
        inputs = self.input_paths(args)
        for action in self._actions:
            output = getattr(args, action.dest, None)
            if action.type in OUTPUT_TYPES and isinstance(output, Path):
                check_not_input(_flag(action), output, inputs, with_content=False)

    def input_paths(self, args: argparse.Namespace) -> dict[str, Path]:
        """Return the values of flags that are existing files or folders and no outputs, by flag."""
        inputs = {}
        for action in self._actions:
            value = getattr(args, action.dest, None)
            is_output = action.type in OUTPUT_TYPES or _flag(action) in self.folders_of_outputs
            if is_output or not isinstance(value, str | Path):
                continue
            flag = _flag(action)
            names = [str(value)]
            if flag in self.mixtures:
                names = [name for name, _ in split_mixture(flag, str(value))]
            for number, name in enumerate(names, 1):
                path = Path(name.removeprefix("hf:"))  # a data set that save_to_disk wrote
                # not Path.exists, which raises for a text that is too long to be a name
                if name not in self.names and os.path.exists(path):
                    inputs[flag if number == 1 else f"{flag}, part {number}:"] = path
        return inputs


def _flag(action: argparse.Action) -> str:
    """Return the flag of an action, or the name of a positional argument."""
    return action.option_strings[0] if action.option_strings else str(action.metavar)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """Return "; did you mean X?" with the most similar of `names`, or an empty string."""
    matches = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def split_mixture(flag: str, value: str) -> list[tuple[str, float | None]]:
    """Return the names and weights in a value such as "a.jsonl:0.7,b/:0.2".

    Without weights, as in "a.jsonl,b/", they are None. A file may have a comma in its name. Raise
    UserError for any other form.
    """
    if "," not in value or os.path.exists(value):
        return [(value, None)]
    parts: list[tuple[str, float | None]] = []
    for part in value.split(","):
        name, _, text = part.rpartition(":")
        try:
            parts.append((name, positive(text)))
        except argparse.ArgumentTypeError:
            parts.append((part, None))
    names = [name for name, _ in parts]
    weights = [weight for _, weight in parts]
    if "" in names or len(set(names)) < len(names):
        raise UserError(f"{flag} {value}: a part is empty or named twice: leave it out")
    if None in weights and set(weights) != {None}:
        name = names[weights.index(None)]
        raise UserError(
            f"{flag} {value}: {name} has no weight above 0: write a weight behind each part, such "
            f"as {name.partition(':')[0]}:0.5, or none at all"
        )
    return parts


def has_mixture_weights(flag: str, value: str) -> bool:
    """Return whether the parts of a value have weights, as in a.jsonl:0.7,b.jsonl:0.3."""
    return split_mixture(flag, value)[0][1] is not None


# --- types for add_argument(type=...)

Number = TypeVar("Number", int, float)

# The largest whole number of a flag.
MOST = 10**15
MOST_PROCESSES = 1024


def positive_int(text: str) -> int:
    """Return the whole number in `text`. Raise argparse's error if it is less than 1."""
    return _number(text, int, 1, MOST, "a whole number of at least 1")


def natural(text: str) -> int:
    """Return the whole number in `text`. Raise argparse's error if it is less than 0."""
    return _number(text, int, 0, MOST, "a whole number of at least 0")


def processes(text: str) -> int:
    """Return the number of processes in `text`. Raise argparse's error for one out of range."""
    return _number(text, int, 0, MOST_PROCESSES, "a whole number of at least 0")


def positive(text: str) -> float:
    """Return the number in `text`. Raise argparse's error if it is 0 or less, NaN or infinite."""
    return _number(text, float, sys.float_info.min, sys.float_info.max, "a number above 0")


def positive_or_inf(text: str) -> float:
    """Return the number in `text`. Raise argparse's error if it is 0 or less, or NaN."""
    return _number(text, float, sys.float_info.min, math.inf, "a number above 0, or inf")


def not_negative(text: str) -> float:
    """Return the number in `text`. Raise argparse's error if it is below 0, NaN or infinite."""
    return _number(text, float, 0, sys.float_info.max, "a number of at least 0")


def share(text: str) -> float:
    """Return the number in `text`. Raise argparse's error unless it is from 0 to below 1."""
    return _number(text, float, 0, 1 - sys.float_info.epsilon, "a number from 0 to below 1")


def _number(text: str, kind: type[Number], least: float, most: float, description: str) -> Number:
    """Convert `text` to int or float, or raise argparse's error, which names what is allowed."""
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not least <= value <= most:
        if kind is int and value is not None and value > most:
            description += f" and at most {most:,}"
        raise argparse.ArgumentTypeError(f"{text!r} is not {description}")
    return value


def writable_file(text: str) -> Path:
    """Return `text` as the path of a summary. Raise argparse's error if none can be written there.

    The folder must exist: a long run must not fail after its last step. Of the files that exist,
    only the summaries of earlier runs are overwritten.
    """
    return _writable_file(text, SUMMARY_MARK, "a summary")


def writable_picture(text: str) -> Path:
    """Return `text` as the path of a picture. Raise argparse's error as writable_file does."""
    return _writable_file(text, PICTURE_MARK, "a picture")


def _writable_file(text: str, mark: bytes, content: str) -> Path:
    path = Path(text)
    folder = path.parent
    if path.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written: it is a folder, or its folder is missing or read-only"
        )
    if path.is_file() and not os.access(path, os.W_OK):
        raise argparse.ArgumentTypeError(f"{text!r} is read-only")
    if path.is_file() and path.stat().st_size > 0:
        with open(path, "rb") as file:
            is_own = mark in file.read(MARKED_BYTES)
        if not is_own:
            raise argparse.ArgumentTypeError(
                f"{text!r} exists, and is not {content} that a script wrote: it is not "
                "overwritten, name another file"
            )
    return path


def output_folder(text: str) -> Path:
    """Return `text` as the path of a folder that the script writes to."""
    return Path(text)


def check_not_input(
    output_flag: str, output: Path, inputs: dict[str, Path], *, with_content: bool
) -> None:
    """Raise UserError if an output is one of the inputs, also by a link.

    Args:
        output_flag: The flag of the output, for the error.
        output: The file or folder that will be written.
        inputs: Files and folders that are read, by flag.
        with_content: Whether what is inside the output is an output, too.
    """
    real_output = os.path.realpath(output)
    for input_flag, path in inputs.items():
        real_input = os.path.realpath(path)
        is_output = real_input == real_output
        if os.path.exists(output) and os.path.exists(path):
            is_output = os.path.samefile(output, path)  # also for a hard link
        if with_content and not is_output:
            is_output = os.path.commonpath([real_output, real_input]) == real_output
        if is_output:
            raise UserError(
                f"{input_flag} {path} would be overwritten by {output}: "
                f"choose another {output_flag}"
            )


# A flag of one of these types is an output. All other paths are inputs.
OUTPUT_TYPES = (writable_file, writable_picture, output_folder)


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
