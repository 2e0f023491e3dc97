"""The flags of the training scripts, and the settings that a resumed run must have, too.

A flag that is not given on the command line gets its value from

    1. the run that is resumed: run.json in its folder, which checkpoint.Run writes
    2. training/defaults.py: --model, --global-batch-size, --steps and --compile, by device
    3. the model: shapes.use_recipe sets --seq-len, --lr and --warmup-steps for a model of lm/. A
       model of your own has those of a small model
"""

import argparse
import hashlib
import importlib.util
import re
from pathlib import Path
from typing import NamedTuple

import torch

from common import runtime
from common.cli import (
    Parser,
    add_device_and_json,
    check_not_input,
    environment_number,
    has_mixture_weights,
    natural,
    not_negative,
    positive,
    positive_int,
    positive_or_inf,
    processes,
)
from common.exits import UserError
from training.defaults import MODEL_NAMES, ON_CPU, ON_GPU, SMALL, default_flags
from training.run_folder import RUN_FILES, read_run
from training.trackers import check_packages

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
    "lr_schedule",
    "warmup_steps",
    "weight_decay",
    "clip_norm",
    "dtype",
    "seed",
)
# The flags that a resumed run takes from the run if they are not given. Flags that say how ranks
# are used, such as --replicate and --tp, are not among them: a run may resume on other machines.
REMEMBERED_FLAGS = (
    *FIXED_FLAGS,
    "eval_data",
    "steps",
    "compile",
    "checkpointing",
    "loss",
    "deterministic",
    "save_every",
    "keep",
    "keep_best",
    "async_save",
    "eval_every",
    "log_every",
    "tensorboard",
    "wandb",
    "balance_loss",
    "balance_bias",
    "adapters",  # this and what follows, of 06_fsdp_zero/finetune.py
    "alpha",
    "dropout",
    "target_modules",
    "too_long",
    "save_dtype",
    "packing",
)


class TrainingParser(Parser):
    """Parse the flags of a training script. A chapter adds its own flags with add_argument."""

    names = Parser.names | set(MODEL_NAMES)
    folders_of_outputs = frozenset({"--run-dir"})
    mixtures = frozenset({"--data", "--eval-data"})

    def __init__(self, description: str) -> None:
        super().__init__(description)

        add = self.add_argument_group("model and data").add_argument
        add(
            "--model",
            help="nano, wide, llama-124m, -1b, -8b, -70b, -405b, or an HF config.json or folder "
            f"(default: {ON_CPU.model}, on a GPU {ON_GPU.model})",
        )
        add(
            "--data",
            default="stdlib",
            help="stdlib, a text, .jsonl or .parquet, a folder, hf:NAME, or prepare_data's; "
            "several: A,B (all of each), A:0.7,B:0.3 (mixed by weight)",
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
            help=f"sequences per step, all ranks (default: {ON_CPU.global_batch_size}, "
            f"on a GPU without --model {ON_GPU.global_batch_size})",
        )
        add(
            "--micro-batch-size",
            type=positive_int,
            help="sequences per rank and forward (default: a rank's share; on a GPU what fits)",
        )
        add("--num-workers", type=processes, default=0, help="data loading processes per rank")

        optimization = self.add_argument_group("optimization")
        length = optimization.add_mutually_exclusive_group()
        length.add_argument(
            "--steps",
            type=positive_int,
            help="optimizer steps; may grow on --resume "
            f"(default: {ON_CPU.steps}, on a GPU without --model {ON_GPU.steps})",
        )
        length.add_argument(
            "--epochs",
            type=positive,
            help="in place of --steps: how often to train on each sample of --data",
        )
        add = optimization.add_argument
        add("--lr", type=positive, help="peak learning rate (default: the model's, nano 2e-3)")
        add("--warmup-steps", type=natural, help="steps of warm-up (default: the model's, nano 10)")
        add(
            "--lr-schedule",
            choices=("constant", "linear", "cosine"),
            default="cosine",
            help="learning rate after the warm-up: it falls to 0 (linear) or a tenth (cosine)",
        )
        add("--weight-decay", type=not_negative, default=0.1)
        add(
            "--clip-norm", type=positive_or_inf, default=1.0, help="largest gradient norm; inf: any"
        )
        add("--seed", type=natural, default=0)
        add(
            "--balance-loss",
            type=not_negative,
            help="of a mixture of experts: weight of the balance loss (default: the model's)",
        )
        add(
            "--balance-bias",
            type=not_negative,
            default=0.0,
            help="of a mixture of experts: step of the router's bias (0: no bias)",
        )

        add = self.add_argument_group("precision, speed and memory").add_argument
        add(
            "--dtype",
            choices=("auto", "fp32", "bf16", "fp16"),
            default="auto",
            help="of matmuls (auto: bf16 or fp32)",
        )
        add(
            "--compile",
            action=argparse.BooleanOptionalAction,
            help="torch.compile the model (default: on a GPU without --model)",
        )
        add(
            "--checkpointing",
            choices=("none", "full", "selective"),
            default="none",
            help="what backward recomputes",
        )
        add(
            "--loss",
            choices=("plain", "chunked"),
            default="plain",
            help="chunked: an eighth of the logits at once",
        )
        add(
            "--deterministic",
            action=argparse.BooleanOptionalAction,
            default=False,
            help="bit-identical from run to run, slower on a GPU",
        )

        add = self.add_argument_group("folder, checkpoints and log of the run").add_argument
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
        add(
            "--keep-best",
            action=argparse.BooleanOptionalAction,
            default=False,
            help="keep the checkpoint with the lowest held-out loss, too",
        )
        add(
            "--async-save",
            action=argparse.BooleanOptionalAction,
            default=False,
            help="write checkpoints while training goes on",
        )
        add(
            "--resume",
            action="store_true",
            help="continue from the newest intact checkpoint in --run-dir, if there is one; flags "
            "that are not given are those of the run",
        )
        add(
            "--eval-every",
            type=natural,
            default=0,
            help="steps between evaluations (0: at the end only)",
        )
        add("--log-every", type=positive_int, default=5, help="steps between log lines")
        add(
            "--tensorboard",
            action=argparse.BooleanOptionalAction,
            default=False,
            help="write event files to --run-dir, too",
        )
        add(
            "--wandb",
            action=argparse.BooleanOptionalAction,
            default=False,
            help="log to Weights & Biases, too",
        )
        add_device_and_json(self)

    def parse_args(self, arguments: list[str] | None = None) -> argparse.Namespace:
        """Parse the command line, and fill in the flags that were not given.

        Raise UserError for --resume without --run-dir, for missing packages, and for environment
        variables with which the run would fail later.
        """
        args = super().parse_args(arguments)
        runtime.refuse_tasks_without_rank()
        lock_seconds()
        if args.resume and args.run_dir is None:
            raise UserError("--resume needs --run-dir, the folder of the run to go on with")

        args.given = self._given(arguments)
        args.earlier_micro_batch_size = None
        if args.resume:
            earlier = read_run(args.run_dir)["flags"]
            args.earlier_micro_batch_size = earlier.get("micro_batch_size")
            for name in REMEMBERED_FLAGS:
                if name not in args.given and name in earlier:
                    setattr(args, name, earlier[name])
                    args.given.add(name)
        _fill(args, default_flags(on_gpu=uses_gpu(args.device), model=args.model))
        _fill(args, SMALL)
        check_mixtures(args)
        if args.keep_best:
            check_keep_best(args)
        check_packages(tensorboard=args.tensorboard, wandb=args.wandb)
        self.check_outputs(args)  # again, with the flags of the run that is resumed
        return args

    def check_outputs(self, args: argparse.Namespace) -> None:
        """Raise UserError if an output is an input.

        The outputs are --json and the files of --run-dir. --run-dir may hold --data. It must not be
        the folder of --model or --tokenizer.
        """
        super().check_outputs(args)
        if args.run_dir is None:
            return
        inputs = self.input_paths(args)
        if args.json is not None:
            inputs["--json"] = args.json  # two outputs in one file
        for name in RUN_FILES:
            check_not_input("--run-dir", args.run_dir / name, inputs, with_content=False)
        models: dict[str, Path] = {}
        for flag in ("--model", "--tokenizer"):
            if flag in inputs:
                models[flag] = inputs[flag]
        check_not_input("--run-dir", args.run_dir, models, with_content=False)

    def _given(self, arguments: list[str] | None) -> set[str]:
        """Return the names of the flags that are on the command line."""
        defaults = {}
        for action in self._actions:
            defaults[action.dest] = action.default
            action.default = argparse.SUPPRESS
        set_defaults = self._defaults  # by set_defaults, also of flags
        self._defaults = {}
        given = vars(argparse.ArgumentParser.parse_args(self, arguments)).keys()
        self._defaults = set_defaults
        for action in self._actions:
            action.default = defaults[action.dest]
        return set(given)


def _fill(args: argparse.Namespace, values: NamedTuple) -> None:
    """Set the flags that are None to the values of a NamedTuple."""
    for name, value in values._asdict().items():
        if getattr(args, name) is None:
            setattr(args, name, value)


def uses_gpu(device: str) -> bool:
    """Return whether `--device device` is a GPU on which torch.compile works.

    torch.compile needs Triton, and Triton needs compute capability 7.0. On ROCm, GPUs are cuda
    devices, too.
    """
    if device not in ("auto", "cuda") or not torch.cuda.is_available():
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    return torch.version.hip is not None or torch.cuda.get_device_capability() >= (7, 0)


def check_mixtures(args: argparse.Namespace) -> None:
    """Raise UserError for weights of --data or --eval-data that do not fit the other flags."""
    if args.eval_data is not None and has_mixture_weights("--eval-data", args.eval_data):
        raise UserError(
            f"--eval-data {args.eval_data}: evaluation reads all of each part: remove the weights"
        )
    if args.epochs is not None and has_mixture_weights("--data", args.data):
        raise UserError(
            f"--epochs {args.epochs:g}: each part of a mixture has epochs of its own: use --steps, "
            "or --data without weights"
        )


def check_keep_best(args: argparse.Namespace) -> None:
    """Raise UserError for --keep-best if checkpoints are not saved, or not evaluated."""
    is_evaluated = args.eval_every and args.save_every and args.save_every % args.eval_every == 0
    if not is_evaluated or args.keep == 0:
        raise UserError(
            f"--keep-best compares checkpoints by their held-out loss: --save-every "
            f"{args.save_every} has to be a multiple of --eval-every {args.eval_every}, both at "
            f"least 1, and --keep {args.keep} at least 1"
        )


def remembered_flags(args: argparse.Namespace, micro_batch_size: int | None) -> dict:
    """Return the flags that a resumed run has if they are not given."""
    flags = {"micro_batch_size": micro_batch_size}
    for name in REMEMBERED_FLAGS:
        if hasattr(args, name):
            flags[name] = getattr(args, name)
    return flags


def lock_seconds() -> float:
    """Return how many seconds a run waits for the lock of its folder: RUN_DIR_LOCK_SECONDS or 10.

    Raise UserError if it is not a number of at least 0.
    """
    return environment_number("RUN_DIR_LOCK_SECONDS", not_negative, "10")


def settings(args: argparse.Namespace, **contents: str | None) -> dict:
    """Return the settings of a run that must be the same on --resume, by flag.

    `contents` maps a setting to the text behind it, such as data to the hash of all tokens: a file
    may change and keep its name, or move and keep its content. The setting is the value of the
    flag, for people, and a hash of the text, which same_setting compares. A name that is no flag in
    FIXED_FLAGS is a setting of its own. A text that is None is left out.
    """
    values = {}
    for name in FIXED_FLAGS:
        flag = "--" + name.replace("_", "-")
        values[flag] = getattr(args, name)
    if args.eval_data is not None:
        values["--data"] += f" with --eval-data {args.eval_data}"
    for name, content in contents.items():
        if content is None:
            continue
        flag = f"--{name}" if name in FIXED_FLAGS else name
        values[flag] = with_hash(values.get(flag, ""), content)
    return values


def with_hash(value: str, content: str) -> str:
    """Return a setting with a hash of the content it stands for: "nano (SHA-256 1b4f0e985197)"."""
    sha256 = hashlib.sha256(content.encode()).hexdigest()
    return f"{value} (SHA-256 {sha256[:12]})".lstrip()


def same_setting(one: object, other: object) -> bool:
    """Return whether two values of a setting are equal. If both have a hash, compare the hashes."""
    hash_of_one = re.search(r"\(SHA-256 (\w+)\)$", str(one))
    hash_of_other = re.search(r"\(SHA-256 (\w+)\)$", str(other))
    if hash_of_one and hash_of_other:
        return hash_of_one[1] == hash_of_other[1]
    return one == other
