"""The flags of the training scripts, and the settings that a resumed run must have, too."""

import argparse
import hashlib
import re
from pathlib import Path

from common import runtime
from common.cli import (
    Parser,
    add_device_and_json,
    environment_number,
    natural,
    not_negative,
    positive,
    positive_int,
)
from common.exits import UserError
from lm.shapes import has_weights, recipe
from lm.trackers import check_packages
from lm.weight_files import weight_files

# The flags that must be the same on --resume, because they change the losses. All other flags may
# change, such as --steps, --micro-batch-size and --device. So may the number of ranks. --eval-data
# may change, too, but not be added or left out: then the training data would change.
FIXED_FLAGS = (
    "model",
    "data",
    "tokenizer",
    "seq_len",
    "global_batch_size",
    "lr",
    "warmup_steps",
    "weight_decay",
    "clip_norm",
    "dtype",
    "seed",
)
# Settings that are no flags. Runs of version 0.2.0 do not have them.
WEIGHTS = "weights of --model"
FORMAT = "format of these settings"

# weights_fingerprint reads so many samples of so many bytes from each file.
SAMPLES = 16
SAMPLE_BYTES = 2**16


class TrainingParser(Parser):
    """Parse the flags of a training script. A chapter adds its own flags with add_argument."""

    def __init__(self, description: str) -> None:
        super().__init__(description)
        add = self.add_argument

        # Model and data.
        add(
            "--model",
            default="nano",
            help="nano, wide, llama-124m, -1b, -8b, -70b, -405b, or an HF config.json or folder",
        )
        add(
            "--data",
            default="stdlib",
            help="stdlib, a text, .jsonl or .parquet, a folder, hf:NAME, or prepare_data's",
        )
        add(
            "--eval-data",
            help="evaluate on this, as --data, and train on all of --data (default: hold out 5 %%)",
        )
        add(
            "--tokenizer",
            help="bytes, or a Hugging Face name or folder (default: the model's own)",
        )
        add(
            "--seq-len",
            type=positive_int,
            help="tokens per sequence (default: the model's, nano 64)",
        )
        add(
            "--global-batch-size",
            type=positive_int,
            default=24,
            help="sequences per step, all ranks",
        )
        add(
            "--micro-batch-size",
            type=positive_int,
            help="sequences per rank and forward (default: a rank's share)",
        )
        add("--num-workers", type=natural, default=0, help="data loading processes per rank")

        # Optimization.
        add("--steps", type=positive_int, default=100, help="optimizer steps; may grow on --resume")
        add("--lr", type=positive, help="peak learning rate (default: the model's, nano 2e-3)")
        add("--warmup-steps", type=natural, help="steps of warm-up (default: the model's, nano 10)")
        add("--weight-decay", type=not_negative, default=0.1)
        add("--clip-norm", type=positive, default=1.0, help="largest gradient norm; inf: any")
        add("--seed", type=natural, default=0)

        # Precision, speed and memory.
        add(
            "--dtype",
            choices=("auto", "fp32", "bf16", "fp16"),
            default="auto",
            help="of matmuls (auto: bf16 or fp32)",
        )
        add("--compile", action="store_true", help="torch.compile the model")
        add(
            "--checkpointing",
            choices=("none", "full", "selective"),
            default="none",
            help="what backward recomputes",
        )
        add(
            "--deterministic",
            action="store_true",
            help="bit-identical from run to run, slower on a GPU",
        )

        # The run's folder, its checkpoints and its log.
        add(
            "--run-dir",
            type=Path,
            help="folder for checkpoints and metrics (default: a new one in runs/)",
        )
        add(
            "--save-every",
            type=natural,
            default=0,
            help="steps between checkpoints (0: at the end only)",
        )
        add("--keep", type=natural, default=3, help="newest checkpoints to keep (0: save none)")
        add("--async-save", action="store_true", help="write checkpoints while training goes on")
        add(
            "--resume",
            action="store_true",
            help="go on from the newest whole checkpoint in --run-dir, if any",
        )
        add(
            "--eval-every",
            type=natural,
            default=0,
            help="steps between evaluations (0: at the end only)",
        )
        add("--log-every", type=positive_int, default=5, help="steps between log lines")
        add("--tensorboard", action="store_true", help="write event files to --run-dir, too")
        add("--wandb", action="store_true", help="log to Weights & Biases, too")
        add_device_and_json(self)

    def parse_args(self, *arguments) -> argparse.Namespace:
        """Parse the command line. --seq-len, --lr and --warmup-steps default to the model's recipe.

        Raise UserError for --resume without --run-dir, for missing packages, and for environment
        variables with which the run would fail later.
        """
        args = super().parse_args(*arguments)
        runtime.refuse_tasks_without_rank()
        lock_seconds()
        if args.resume and args.run_dir is None:
            raise UserError("--resume needs --run-dir, the folder of the run to go on with")
        check_packages(tensorboard=args.tensorboard, wandb=args.wandb)
        for name, value in recipe(args.model)._asdict().items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        return args


def lock_seconds() -> float:
    """Return how many seconds a run waits for the lock of its folder: RUN_DIR_LOCK_SECONDS or 10.

    Raise UserError if it is not a number of at least 0.
    """
    return environment_number("RUN_DIR_LOCK_SECONDS", not_negative, "10")


def settings(args: argparse.Namespace, **contents: str) -> dict:
    """Return the settings of a run that must be the same on --resume, by flag.

    `contents` are texts that some flags stand for, such as data=the hash of all tokens. A file may
    change and keep its name, or move and keep its content. So the setting of such a flag is its
    value, for people, and a hash of the text, which same_setting compares. A name that is no flag
    in FIXED_FLAGS is a setting of its own.
    """
    values = {}
    for name in FIXED_FLAGS:
        flag = "--" + name.replace("_", "-")
        values[flag] = getattr(args, name)
    if args.eval_data is not None:
        values["--data"] += f" with --eval-data {args.eval_data}"
    for name, content in contents.items():
        flag = f"--{name}"
        values[flag] = with_hash(values.get(flag, name), content)
    if has_weights(args.model):
        values[WEIGHTS] = with_hash(args.model, weights_fingerprint(Path(args.model)))
    values[FORMAT] = 2
    return values


def with_hash(value: str, content: str) -> str:
    """Return a setting with a hash of the content it stands for: "nano (SHA-256 1b4f0e985197)"."""
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    return f"{value} (SHA-256 {sha256[:12]})"


def same_setting(one: object, other: object) -> bool:
    """Return whether two values of a setting are equal. Of values with a hash, only that counts."""
    hashes = [re.search(r" \(SHA-256 (\w+)\)$", str(value)) for value in (one, other)]
    if all(hashes):
        return hashes[0][1] == hashes[1][1]
    return one == other


def weights_fingerprint(folder: Path) -> str:
    """Return a hash of the sizes of the weight files in a folder, and of samples from each file.

    Large models have hundreds of gigabytes, which would take minutes to read.
    """
    fingerprint = hashlib.sha256()
    for path in weight_files(folder):
        size = path.stat().st_size
        fingerprint.update(f"{size} ".encode())
        with open(path, "rb") as file:
            for sample in range(SAMPLES):
                file.seek(size * sample // SAMPLES)
                fingerprint.update(file.read(SAMPLE_BYTES))
    return fingerprint.hexdigest()
