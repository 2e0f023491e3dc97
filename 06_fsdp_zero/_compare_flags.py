"""The flags of compare.py, and what they stand for."""

import argparse
import os
from dataclasses import dataclass

import torch
from _compare_least_time import BETWEEN_NODES, WITHIN_NODE, parse_links, read_fits

from old import cli, exits, hardware, runtime, shapes

METHODS = ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP", "HSDP"]
RANKS_PER_NODE = 8  # in a dry run


@dataclass(frozen=True)
class Job:
    """What all methods have in common."""

    model: str
    config: shapes.Config
    device: torch.device
    dtype: str
    micro_batch_size: int
    seq_len: int
    recompute: bool
    replicas: int  # of HSDP; 1 where it is left out
    ranks_per_node: int
    dry: bool


def parse(docstring: str) -> argparse.Namespace:
    """Every flag with its value. UserError for one that cannot be."""
    parser = cli.Parser(docstring)
    add = parser.add_argument
    add("--model", default="nano", help="as in train_fsdp.py")
    add("--seq-len", type=cli.positive_int, help="tokens per sequence (default: from the model, nano 64)")
    add("--micro-batch-size", type=cli.positive_int, help="sequences per rank (default: about 8 / ranks; dry run: 1)")
    add("--dtype", choices=("fp32", "bf16"), help="what matrices are multiplied in (default: fp32; dry run: bf16)")
    add("--checkpointing", choices=("none", "full"), default="none", help="full: recompute in backward")
    add("--replicate", type=cli.positive_int, help="copies of the model in HSDP (default: one for each node, or 2)")
    add("--steps", type=cli.positive_int, default=5, help="of each method for tokens/s, after the counted one")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--dry-run", action="store_true", help="one process takes itself for rank 0 of --world-size")
    add("--world-size", type=cli.positive_int, help="with --dry-run: how many ranks, 8 on each node")
    add("--device-name", help="for the least time, as in common/devices.csv (dry run: NVIDIA H100 80GB HBM3)")
    add("--link", type=parse_links, help="GB/s of each rank, or BETWEEN,WITHIN nodes (dry run: 50,450, an H100 node's)")
    add("--link-fit", type=cli.path, metavar="PATH", help="instead: what 05_ddp/collectives.py --json has written")
    add("--plot", type=cli.plot_file, metavar="PATH", default="runs/compare.png", help="a PNG (%(default)s)")
    add("--json", type=cli.writable_file, metavar="PATH", help="write every figure as one JSON object")
    args = parser.parse_args()
    if args.dry_run == (args.world_size is None):
        raise exits.UserError(
            f"--dry-run and --world-size go together: {'add --world-size N' if args.dry_run else 'add --dry-run'}"
            ", or start so many processes with torchrun"
        )
    if args.link and args.link_fit:
        raise exits.UserError("--link and --link-fit are two answers to one question: give one of them")
    if args.dry_run and exits.world_from_env()[1] > 1:
        raise exits.UserError("--dry-run needs one process and no torchrun: python 06_fsdp_zero/compare.py --dry-run")
    if args.device_name and hardware.peak(args.device_name) is None:
        known = ", ".join(hardware.peaks())
        raise exits.UserError(f"--device-name {args.device_name!r} is not in common/devices.csv, which has {known}")
    args.seq_len = args.seq_len or shapes.recipe(args.model).seq_len
    args.config = shapes.load_config(args.model, 256, args.seq_len)
    if args.dry_run:
        args.ranks_per_node = RANKS_PER_NODE
        args.micro_batch_size = args.micro_batch_size or 1
        args.dtype = args.dtype or "bf16"
        args.device_name = args.device_name or "NVIDIA H100 80GB HBM3"
        args.link = args.link or (None if args.link_fit else (BETWEEN_NODES, WITHIN_NODE))
    else:
        args.world_size = runtime.processes(args.device, on_cpu=4)
        args.ranks_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size))
        args.micro_batch_size = args.micro_batch_size or max(1, 8 // args.world_size)
        args.dtype = args.dtype or "fp32"
    args.replicate = copies_of_hsdp(args.replicate, args.world_size, args.ranks_per_node)
    args.methods = METHODS if 1 < args.replicate < args.world_size else METHODS[:-1]
    args.fits = read_fits(args.link_fit) if args.link_fit else None
    return args


def make_job(args: argparse.Namespace, device: torch.device) -> Job:
    return Job(
        model=args.model,
        config=args.config,
        device=device,
        dtype=args.dtype,
        micro_batch_size=args.micro_batch_size,
        seq_len=args.seq_len,
        recompute=args.checkpointing == "full",
        replicas=args.replicate,
        ranks_per_node=args.ranks_per_node,
        dry=args.dry_run,
    )


def copies_of_hsdp(asked: int | None, world_size: int, ranks_per_node: int) -> int:
    """--replicate, or one copy for each node, or two; 1 where neither divides the ranks. UserError for a wrong one."""
    if asked:
        if world_size % asked:
            raise exits.UserError(f"--replicate {asked} does not divide {world_size} processes into equal parts")
        return asked
    for copies in (world_size // ranks_per_node, 2):
        if 1 < copies < world_size and world_size % copies == 0:
            return copies
    return 1
