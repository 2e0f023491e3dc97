"""The flags of infer_70b.py, the shape that --model names, and whether the ranks can share it."""

import argparse

import _infer_70b_pipeline as pipeline
import _infer_70b_zero3 as zero3
from _infer_70b_placement import undivided

from old import cli, shapes
from old.exits import UserError
from old.inference import check_drawing, inference_parser

STRATEGIES = ("device-map", "tensor-parallel", "zero3", "pipeline")
LLAMA2_70B = shapes.Config(32_000, 8192, 28_672, 80, 64, 8, 128, 4096)  # "llama-70b" has Llama 3's vocabulary


def parse_args(description: str) -> argparse.Namespace:
    parser = inference_parser(description)
    add = parser.add_argument
    add("--strategy", choices=STRATEGIES, default="tensor-parallel", help="(%(default)s; one process holds it all)")
    add("--random-weights", action="store_true", help="made, not read: implied for named sizes and llama2-70b")
    add("--compile", action="store_true", help="torch.compile the decode step of --strategy tensor-parallel")
    add("--micro-batches", type=cli.natural, default=0, help="of --strategy pipeline (0: as many as stages)")
    add("--offload", choices=("none", "cpu", "nvme"), default="none", help="where zero3 keeps a rank's part")
    add("--nvme", type=cli.path, metavar="FOLDER", help="for --offload nvme: a folder on a fast local disk")
    add("--memory", type=cli.positive, metavar="GIB", help="of each device (default: what is free)")
    add("--dry-run", action="store_true", help="tell what each of --world-size devices would hold, and load nothing")
    add("--world-size", type=cli.positive_int, help="for --dry-run: the number of devices")
    args = parser.parse_args()
    if (args.world_size is not None) != args.dry_run:
        raise UserError("--dry-run and --world-size N go together: one device of N is computed, none is used")
    if args.compile and args.strategy != "tensor-parallel":
        raise UserError(f"--compile is for --strategy tensor-parallel, not {args.strategy}")
    check_drawing(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    if args.micro_batches and args.strategy != "pipeline":
        raise UserError(f"--micro-batches is for --strategy pipeline, not {args.strategy}")
    if args.offload != "none" and args.strategy != "zero3":
        raise UserError(f"--offload {args.offload} is for --strategy zero3, not {args.strategy}")
    args.random_weights |= args.model in shapes.SIZES or args.model == "llama2-70b"
    return args


def read_shape(name: str) -> shapes.Config:
    return LLAMA2_70B if name == "llama2-70b" else shapes.read_config(name)


def check_strategy(args: argparse.Namespace, config: shapes.Config, world_size: int) -> None:
    """UserError if so many ranks cannot share the model in this way."""
    if args.strategy == "device-map" and world_size > 1 and not args.dry_run:
        raise UserError(
            f"--strategy device-map: one process uses all GPUs, and {world_size} were started: start it with python"
        )
    if args.strategy == "tensor-parallel" and (parts := undivided(config, world_size)):
        possible = [ranks for ranks in range(1, 1 + config.num_attention_heads) if not undivided(config, ranks)]
        raise UserError(
            f"--strategy tensor-parallel: {world_size} ranks do not divide {', '.join(parts)}: start "
            f"{' or '.join(map(str, possible))}, or use --strategy pipeline"
        )
    if args.strategy == "pipeline":
        pipeline.check(args, config, world_size)
    if args.strategy == "zero3":
        zero3.check(args)
