"""The flags that all training scripts share, checked before anything expensive starts."""

import argparse
import contextlib
import dataclasses
import math
import os
from pathlib import Path

from old.exits import UserError
from old.shapes import recipe


class Parser(argparse.ArgumentParser):
    """argparse that states an error in one line and shows a script's docstring as it stands."""

    def __init__(self, description: str) -> None:
        layout = argparse.RawDescriptionHelpFormatter
        super().__init__(description=description, formatter_class=layout, allow_abbrev=False)

    def error(self, message: str) -> None:
        raise UserError(f"{message} (--help lists the flags)")


def _number(kind: type, low: float, exclusive: bool = False, finite: bool = True):
    def convert(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            value = math.nan
        if math.isnan(value) or (finite and math.isinf(value)) or value < low or (exclusive and value == low):
            what = "a whole number" if kind is int else "a number"
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} {'above' if exclusive else 'of at least'} {low}")
        if kind is int and value >= 2**63:  # what generators, shapes and counters of torch can hold
            raise argparse.ArgumentTypeError(f"{text} has more than 63 bits")
        return value

    return convert


positive_int, natural = _number(int, 1), _number(int, 0)
positive, not_negative = _number(float, 0, exclusive=True), _number(float, 0)
positive_or_inf = _number(float, 0, exclusive=True, finite=False)


def share(text: str) -> float:
    """A part of a whole: above 0, at most 1."""
    if (value := positive(text)) > 1:
        raise argparse.ArgumentTypeError(f"{text} is above 1")
    return value


def path(text: str) -> Path:
    """Any path but that of a variable that is not set: Path("") is the folder that a script was started in."""
    if not text:
        raise argparse.ArgumentTypeError("'' is no path")
    return Path(text)


def writable_file(text: str) -> Path:
    """A path whose folder exists: better said now than after the last step."""
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK):
        raise argparse.ArgumentTypeError(
            f"{text!r} cannot be written: a folder, or in one that does not exist or is read-only"
        )
    return path


def plot_file(text: str) -> Path:
    """As writable_file, and the last folder is made. argparse passes a default through here, too."""
    if not text.lower().endswith(".png"):
        raise argparse.ArgumentTypeError(f"{text!r} does not end with .png")
    with contextlib.suppress(OSError):  # the next line tells
        Path(text).parent.mkdir(exist_ok=True)
    return writable_file(text)


class TrainingParser(Parser):
    """The flags of a training script. A chapter adds its own with add_argument.

    identity=True marks a flag that makes a run this run: it must be the same on a resume. The rest (processes,
    micro-batch, device, logging) may change, and so may --steps: a run can be made longer.
    """

    def __init__(self, description: str) -> None:
        self.identity: list[str] = []
        super().__init__(description)

    def add_argument(self, *names, identity: bool = False, **more) -> argparse.Action:
        action = super().add_argument(*names, **more)
        self.identity += [action.dest] if identity else []
        return action

    def parse_args(self, args=None, namespace=None) -> argparse.Namespace:
        """UserError for flags that contradict each other. --seq-len, --lr and --warmup-steps that are not given come
        from the model's recipe."""
        found = super().parse_args(args, namespace)
        if found.resume and found.run_dir is None:
            raise UserError("--resume needs --run-dir, the folder of the run to go on with")
        for name, value in dataclasses.asdict(recipe(found.model)).items():
            if getattr(found, name) is None:
                setattr(found, name, value)
        return found

    def settings(self, args: argparse.Namespace) -> dict:
        """The values of the flags marked identity, by name."""
        return {name: getattr(args, name) for name in self.identity}


def training_parser(description: str) -> TrainingParser:
    """A parser of the flags that all training scripts share."""
    parser = TrainingParser(description)
    add = parser.add_argument
    add(
        "--model",
        identity=True,
        default="nano",
        help="nano, llama-124m, -1b, -8b, -70b, -405b, or a path to an HF config.json or folder",
    )
    add("--data", identity=True, default="stdlib", help="stdlib, a text, .jsonl or .parquet file, or hf:NAME")
    add("--tokenizer", identity=True, default="bytes", help="bytes, or a Hugging Face name or folder")
    add(
        "--seq-len",
        identity=True,
        type=positive_int,
        help="tokens per sequence (default: from the model, nano 64)",
    )
    add(
        "--global-batch-size",
        identity=True,
        type=positive_int,
        default=24,
        help="sequences per optimizer step, over all ranks",
    )
    add("--micro-batch-size", type=positive_int, help="sequences per rank and forward (default: a rank's whole share)")
    add(
        "--steps",
        type=positive_int,
        default=100,
        help="optimizer steps; may grow on --resume, and the cosine stretches",
    )
    add("--lr", identity=True, type=positive, help="peak learning rate (default: from the model, nano 2e-3)")
    add(
        "--warmup-steps",
        identity=True,
        type=natural,
        help="steps of linear warm-up before the cosine (default: from the model, nano 10)",
    )
    add("--weight-decay", identity=True, type=not_negative, default=0.1)
    add(
        "--clip-norm",
        identity=True,
        type=positive_or_inf,
        default=1.0,
        help="largest gradient norm; inf switches clipping off",
    )
    add(
        "--dtype",
        identity=True,
        choices=("auto", "fp32", "bf16", "fp16"),
        default="auto",
        help="what matrices are multiplied in (auto: bf16 where the device has units for it, else fp32)",
    )
    add("--compile", action="store_true", help="torch.compile the model")
    add(
        "--checkpointing",
        choices=("none", "full", "selective"),
        default="none",
        help="what backward computes again: full: blocks; selective: all of them but attention and matrix products",
    )
    add("--seed", identity=True, type=natural, default=0)
    add("--deterministic", action="store_true", help="bit-identical from run to run, slower on a GPU")
    add("--eval-every", type=natural, default=0, help="steps between evaluations (0: at the end only)")
    add("--run-dir", type=path, help="folder for checkpoints, metrics and plot (default: a new one in runs/)")
    add("--save-every", type=natural, default=0, help="steps between checkpoints (0: at the end only)")
    add("--keep", type=positive_int, default=3, help="newest checkpoints to keep")
    add("--async-save", action="store_true", help="write checkpoints while training goes on")
    add("--resume", action="store_true", help="go on from the newest whole checkpoint in --run-dir, if there is one")
    add("--log-every", type=positive_int, default=5, help="steps between log lines")
    add("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    add("--num-workers", type=natural, default=0, help="data loading processes per rank")
    add("--json", type=writable_file, metavar="PATH", help="write the summary as one JSON object")
    return parser


def split_batch(global_batch_size: int, micro_batch_size: int | None, world_size: int) -> tuple[int, int]:
    """(sequences per forward on a rank, forwards per step); UserError names the sizes that divide."""
    unit = world_size * (micro_batch_size or 1)
    if global_batch_size % unit:
        if world_size == 1:
            parts = f"into micro-batches of --micro-batch-size {micro_batch_size}"
        else:
            micro = f" with --micro-batch-size {micro_batch_size}" if micro_batch_size else ""
            parts = f"over {world_size} process(es){micro}"
        raise UserError(
            f"--global-batch-size {global_batch_size} does not divide {parts}: "
            f"use {nearest_multiples(global_batch_size, unit)}"
        )
    micro_batch_size = micro_batch_size or global_batch_size // world_size
    return micro_batch_size, global_batch_size // (world_size * micro_batch_size)


def nearest_multiples(size: int, unit: int, most: float = math.inf) -> str:
    """The multiples of `unit` around a size that is none, above 0 and up to `most`, in words: "8 or 12". If there are
    none, `unit` itself is more than `most`, and what made it so large has to shrink: "fewer processes"."""
    below = size // unit * unit
    fitting = [str(multiple) for multiple in (below, below + unit) if 0 < multiple <= most]
    return " or ".join(fitting) or "fewer processes"
