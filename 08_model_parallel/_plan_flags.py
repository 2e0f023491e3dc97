"""The flags of plan.py, and what is refused before anything is searched."""

import argparse
import re
from math import prod

from _estimate_plan import check
from _estimate_shapes import Shape
from _plan_layout import Layout
from _plan_search import check_cuts, divisors

from old import cli
from old.exits import UserError

SUFFIXES = {"": 1, "K": 2**10, "M": 2**20}


def token_count(text: str) -> int:
    """A number with K (1,024) or M (1,048,576)."""
    found = re.fullmatch(r"(\d+)([KM]?)", text)
    if not found or int(found[1]) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of tokens such as 524288, 512K or 4M")
    return int(found[1]) * SUFFIXES[found[2]]


def parser(description: str) -> cli.Parser:
    found = cli.Parser(description)
    add = found.add_argument
    add("--model", default="llama-1b", help="our sizes, a name of model_shapes.csv, or a config.json")
    add("--gpus", type=cli.positive_int, default=8, help="of all nodes")
    add("--device", default="NVIDIA H100 80GB HBM3", help="a name of common/devices.csv")
    add("--nodes-of", type=cli.positive_int, default=8, metavar="N", help="GPUs that NVLink connects")
    add("--link", type=cli.positive, default=50.0, metavar="GB/s", help="between nodes, per GPU, in one direction")
    add("--sequence", type=cli.positive_int, help="tokens per sequence (default: 4096, or the model's limit)")
    add("--global-batch-tokens", type=token_count, default=2**19, metavar="N", help="per step: 524288, 512K, 4M")
    add("--tp", type=cli.positive_int, help="tensor parallel (default: searched)")
    add("--pp", type=cli.positive_int, help="pipeline stages (default: searched)")
    add("--cp", type=cli.positive_int, help="context parallel (default: searched)")
    add("--check", action="store_true", help="build the best one with fake ranks, and compare the bytes that they hold")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the answer as one JSON object")
    return found


def check_mesh(args: argparse.Namespace, shape: Shape, base: Layout) -> None:
    """UserError where the sizes that the user gave cannot multiply to the GPUs, or the model cannot be cut so."""
    if args.gpus > args.nodes_of and args.gpus % args.nodes_of:
        raise UserError(
            f"--gpus {args.gpus} is no multiple of --nodes-of {args.nodes_of}: "
            f"use {cli.nearest_multiples(args.gpus, args.nodes_of)}"
        )
    sizes = {name: getattr(args, name) or 1 for name in ("tp", "pp", "cp")}
    product = prod(sizes.values())
    if args.gpus % product:
        given = " x ".join(f"--{name} {size}" for name, size in sizes.items() if size > 1)
        nearest = min(divisors(args.gpus), key=lambda size: abs(size - product))
        raise UserError(f"{given} is {product}, which does not divide --gpus {args.gpus}: the nearest is {nearest}")
    cuts = Layout(**{**vars(base), **sizes})
    check(shape, cuts)
    check_cuts(shape, cuts)
    if args.check and (shape.experts or shape.latent or shape.gpt2 or shape.qkv_bias or shape.qk_norm):
        raise UserError(f"--check builds the model of train_3d.py, a Llama, and --model {args.model} is none")


def sequences_of(args: argparse.Namespace, seq_len: int) -> int:
    sequences, rest = divmod(args.global_batch_tokens, seq_len)
    if rest:
        raise UserError(
            f"--global-batch-tokens {args.global_batch_tokens} is no multiple of --sequence {seq_len}: "
            f"use {cli.nearest_multiples(args.global_batch_tokens, seq_len)}"
        )
    return sequences


def nearest_batch(args: argparse.Namespace) -> int:
    """Sequences that every rank can have one of, if none is divided."""
    return args.gpus // ((args.tp or 1) * (args.cp or 1))
