"""The flags of the training scripts, and which of them a resume must find unchanged."""

import argparse
import hashlib
from pathlib import Path

from common.cli import Parser, add_device_and_json, natural, not_negative, positive, positive_int
from common.exits import UserError
from lm.shapes import recipe

# Flags that must be the same on a resume. The rest may change (processes, micro-batch, device, logging), and --steps.
IDENTITY = (
    "model",
    "data",
    "tokenizer",
    "seq_len",
    "global_batch_size",
    "lr",
    "warmup_steps",
    "weight_decay",
)
IDENTITY += ("clip_norm", "dtype", "seed")


class TrainingParser(Parser):
    """The flags of a training script. A chapter adds its own with add_argument."""

    def __init__(self, description: str) -> None:
        super().__init__(description)
        add = self.add_argument
        sizes = "nano, llama-124m, -1b, -8b, -70b, -405b, or a path to an HF config.json or folder"
        add("--model", default="nano", help=sizes)
        add(
            "--data",
            default="stdlib",
            help="stdlib, a text, .jsonl or .parquet, a folder, hf:NAME, or prepare_data's",
        )
        add(
            "--tokenizer", help="bytes, or a Hugging Face name or folder (default: the model's own)"
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
        add("--steps", type=positive_int, default=100, help="optimizer steps; may grow on --resume")
        add("--lr", type=positive, help="peak learning rate (default: the model's, nano 2e-3)")
        add("--warmup-steps", type=natural, help="steps of warm-up (default: the model's, nano 10)")
        add("--weight-decay", type=not_negative, default=0.1)
        add("--clip-norm", type=positive, default=1.0, help="largest gradient norm; inf: any")
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
        add("--seed", type=natural, default=0)
        add(
            "--deterministic",
            action="store_true",
            help="bit-identical from run to run, slower on a GPU",
        )
        add(
            "--eval-every",
            type=natural,
            default=0,
            help="steps between evaluations (0: at the end only)",
        )
        add(
            "--run-dir",
            type=Path,
            help="folder for checkpoints, metrics and plot (default: a new one in runs/)",
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
        add("--log-every", type=positive_int, default=5, help="steps between log lines")
        add("--num-workers", type=natural, default=0, help="data loading processes per rank")
        add_device_and_json(self)

    def parse_args(self, *arguments) -> argparse.Namespace:
        """--seq-len, --lr and --warmup-steps that are not given come from the model's recipe."""
        args = super().parse_args(*arguments)
        if args.resume and args.run_dir is None:
            raise UserError("--resume needs --run-dir, the folder of the run to go on with")
        for name, value in recipe(args.model)._asdict().items():
            if getattr(args, name) is None:
                setattr(args, name, value)
        return args


def settings(args: argparse.Namespace, **contents: str) -> dict:
    """What a resume must find unchanged, by flag. `contents` is what stands behind some of them, such as the text that
    --data names: a file may change under its name."""
    found = {f"--{name.replace('_', '-')}": getattr(args, name) for name in IDENTITY}
    for name, content in contents.items():
        found[f"--{name}"] += f" (SHA-256 {hashlib.sha256(content.encode()).hexdigest()[:12]})"
    return found
