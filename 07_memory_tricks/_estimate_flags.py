"""The flags of estimate.py: which question each belongs to, and the shape and the plan that they name."""

import argparse
from collections.abc import Iterable
from dataclasses import replace

from _estimate_config import read_shape
from _estimate_frameworks import FRAMEWORKS, LOSSES
from _estimate_inference import CACHE_DTYPES, WEIGHTS
from _estimate_plan import CHECKPOINTING, DTYPES, OPTIMIZERS, Plan, check, flag
from _estimate_shapes import Shape

from old import cli
from old.exits import UserError

SEARCHED = ("zero", "tp", "pp", "cp", "ep", "micro_batch_size", "checkpointing")
OF_TRAINING = ("zero", "pp", "cp", "ep", "micro_batch_size", "global_batch_size", "checkpointing")
OF_TRAINING += ("optimizer", "loss", "framework")
OF_INFERENCE = ("concurrency", "weights", "group_size", "kv_cache_dtype")


def parser(description: str) -> cli.Parser:
    found = cli.Parser(description)
    add = found.add_argument
    add("--model", default="llama-8b", help="our sizes, a name of model_shapes.csv, or a config.json")
    add("--layers", type=cli.positive_int, help="cut the model to so many layers")
    add("--gpus", type=cli.positive_int, default=8, help="of all nodes")
    add("--device", default="NVIDIA H100 80GB HBM3", help="a name of common/devices.csv, or cpu")
    add("--zero", type=int, choices=(0, 1, 2, 3), help="what data-parallel ranks divide (default: 3, on one GPU 0)")
    add("--tp", type=cli.positive_int, default=1, help="tensor parallel, with sequence parallel")
    add("--pp", type=cli.positive_int, default=1, help="pipeline stages, 1F1B")
    add("--cp", type=cli.positive_int, default=1, help="context parallel")
    add("--ep", type=cli.positive_int, default=1, help="expert parallel")
    add("--seq-len", type=cli.positive_int, help="tokens per sequence (default: 4096, or the model's limit)")
    add("--micro-batch-size", type=cli.positive_int, default=1, help="sequences per rank and forward")
    add(
        "--global-batch-size",
        type=cli.positive_int,
        help="sequences per optimizer step (default: one micro-batch each)",
    )
    add("--dtype", choices=DTYPES, default="bf16", help="what matrices are multiplied in")
    add("--checkpointing", choices=CHECKPOINTING, default="none")
    add("--optimizer", choices=OPTIMIZERS, default="adamw")
    add("--loss", choices=LOSSES, default="plain", help="how the cross-entropy is computed")
    add("--framework", choices=FRAMEWORKS, default="ours", help="whose bytes per parameter and kernels")
    add("--advise", action="store_true", help="search what fits, fastest first")
    add("--is-my-mfu-right", type=cli.positive, metavar="TOKENS_PER_SECOND", help="of one device")
    add("--inference", action="store_true", help="weights and KV cache instead of a training step")
    add("--concurrency", type=cli.positive_int, default=1, help="sequences of --seq-len tokens in the cache")
    add("--weights", choices=WEIGHTS, default="bf16", help="of --inference")
    add("--group-size", type=cli.positive_int, default=32, help="weights per scale of --weights int4")
    add("--kv-cache-dtype", choices=CACHE_DTYPES, default="bf16")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the answer as one JSON object")
    return found


def parse_flags(description: str) -> argparse.Namespace:
    """The flags as given. UserError names one that the question would not read."""
    args = parser(description).parse_args()
    if sum(map(bool, (args.inference, args.advise, args.is_my_mfu_right))) > 1:
        raise UserError("--inference, --advise and --is-my-mfu-right are three questions: ask one")
    for name in given_flags(vars(args)):
        if args.inference and name in OF_TRAINING:
            raise UserError(f"{flag(name)} is of training, and --inference does not read it: leave it out")
        if args.advise and name in SEARCHED:
            raise UserError(f"{flag(name)} is among what --advise searches: leave it out")
        if not args.inference and name in OF_INFERENCE:
            raise UserError(f"{flag(name)} is of serving, and is read with --inference only")
        if name == "group_size" and args.weights != "int4":
            raise UserError(f"--group-size is of --weights int4, and these are {args.weights}")
    return args


def given_flags(names: Iterable[str]) -> list[str]:
    """Of all flags, those on the command line: the same parser, whose defaults are nobody's value."""
    absent = object()
    bare = parser("")
    bare.set_defaults(**dict.fromkeys(names, absent))
    return [name for name, value in vars(bare.parse_args()).items() if value is not absent]


def length(args: argparse.Namespace, shape: Shape) -> int:
    if args.seq_len and shape.positions and args.seq_len > shape.positions:
        raise UserError(f"--seq-len {args.seq_len} is over the limit of --model {shape.name}: {shape.positions}")
    return args.seq_len or min(4096, shape.positions or 4096)


def plan_of(args: argparse.Namespace, shape: Shape) -> Plan:
    plan = Plan(
        gpus=args.gpus,
        zero=(3 if args.gpus > 1 else 0) if args.zero is None else args.zero,
        tp=args.tp,
        pp=args.pp,
        cp=args.cp,
        ep=args.ep,
        seq_len=length(args, shape),
        micro_batch_size=args.micro_batch_size,
        micro_batches=args.pp,
        dtype=args.dtype,
        checkpointing=args.checkpointing,
        optimizer=args.optimizer,
        framework=args.framework,
        loss=args.loss,
        on_cpu=args.device == "cpu",
    )
    check(shape, plan)
    if args.global_batch_size and not args.advise:
        unit = plan.dp * plan.micro_batch_size
        if args.global_batch_size % unit:
            raise UserError(
                f"--global-batch-size {args.global_batch_size} is no multiple of dp x micro-batch = {unit}: "
                f"use {cli.nearest_multiples(args.global_batch_size, unit)}"
            )
        plan = replace(plan, micro_batches=args.global_batch_size // unit)
    return plan


def shape_of(args: argparse.Namespace) -> Shape:
    shape = read_shape(args.model)
    if args.layers is None:
        return shape
    if shape.experts:
        dense_layers = min(args.layers, shape.experts.dense_layers)
        shape = replace(shape, experts=replace(shape.experts, dense_layers=dense_layers))
    return replace(shape, layers=args.layers)
