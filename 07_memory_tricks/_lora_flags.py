"""The flags of lora.py."""

import argparse
from pathlib import Path

from old import cli, shapes
from old.exits import UserError

METHODS = ("full", "lora", "qlora")
LORA_LR_FACTOR = 10  # adapters take a learning rate about so many times that of full fine-tuning


def parse_args(description: str) -> argparse.Namespace:
    parser = cli.Parser(description)
    add = parser.add_argument
    add("--model", default="nano", help="as in 04_amp/train.py; a folder with a tokenizer is adapted to instructions")
    add("--method", choices=("all", *METHODS), default="all")
    add("--rank", type=cli.positive_int, default=8, help="columns of B and rows of A")
    add("--alpha", type=cli.positive, default=16.0, help="the product B A counts alpha / rank times")
    add("--steps", type=cli.positive_int, default=20)
    add("--lr", type=cli.positive, help="of the adapters (default: from the model); full fine-tuning takes a tenth")
    add("--batch-size", type=cli.positive_int, default=4, help="sequences per step")
    add("--seq-len", type=cli.positive_int, help="tokens per sequence (default: 128, or the longest instruction's)")
    add("--dtype", choices=("auto", "fp32", "bf16"), default="auto", help="of products, and of what LoRA freezes")
    add("--save", type=cli.path, metavar="FOLDER", help="adapters go to FOLDER/lora and /qlora, as peft keeps them")
    add("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    add("--seed", type=cli.natural, default=0)
    add("--plot", type=cli.plot_file, metavar="PNG", default="runs/lora.png", help="(%(default)s)")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    if args.save and (not has_weights(args.model) or args.method == "full"):
        raise UserError(f"--save {args.save}: adapters need --method lora or qlora, and --model FOLDER with their base")
    if args.save:
        try:
            args.save.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"--save {args.save}: {error.strerror}; name another folder") from None
    if args.lr is None:
        # for nano, 1e-2 ended lower than 1e-3 and 2e-2 did; 1e-3 is a common choice for a model that has been trained
        args.lr = 1e-3 if has_weights(args.model) else 5 * shapes.recipe(args.model).lr
    args.methods = METHODS if args.method == "all" else (args.method,)
    return args


def has_weights(model_name: str) -> bool:
    """Whether the model is a folder with weights; else they are random."""
    return model_name not in shapes.SIZES and any(Path(model_name).glob("*.safetensors"))
