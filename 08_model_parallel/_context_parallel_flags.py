"""The flags of context_parallel.py, and the sizes that its ranks cannot divide, refused with the nearest they can."""

import argparse

from old import cli, runtime, shapes
from old.exits import UserError


def parse_args(description: str) -> tuple[argparse.Namespace, shapes.Config]:
    """The flags and the model's shape. UserError, before any rank starts, if something does not divide."""
    parser = cli.Parser(description)
    add = parser.add_argument
    add("--model", default="nano", help="as in 05_ddp/train.py")
    add("--attention", choices=("all", "all-gather", "ulysses", "ring"), default="all", help="which to compare")
    add("--seq-len", type=cli.positive_int, default=128, help="tokens per sequence, over all ranks")
    add("--steps", type=cli.positive_int, default=10)
    add("--global-batch-size", type=cli.positive_int, default=4, help="sequences per step; each rank has a part of all")
    add("--micro-batch-size", type=cli.positive_int, default=2, help="sequences per forward")
    add("--clip-norm", type=cli.positive_or_inf, default=1.0, help="largest gradient norm")
    add("--seed", type=cli.natural, default=0)
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    config = shapes.load_config(args.model, 256, args.seq_len)
    cli.split_batch(args.global_batch_size, args.micro_batch_size, 1)
    check_sizes(args, config, runtime.processes(args.device))
    return args, config


def check_sizes(args: argparse.Namespace, config: shapes.Config, world_size: int) -> None:
    """UserError if the ranks do not divide the tokens, or Ulysses not the heads."""
    zigzag = args.attention in ("all", "ring")
    unit = 2 * world_size if zigzag else world_size
    if args.seq_len % unit:
        nearest = cli.nearest_multiples(args.seq_len, unit, config.max_position_embeddings)
        parts = f"2 x {world_size} parts (zigzag order: two per process)" if zigzag else f"{world_size} processes"
        raise UserError(f"--seq-len {args.seq_len} does not divide over {parts}: use {nearest}")
    heads = config.num_key_value_heads
    if args.attention in ("all", "ulysses") and heads % world_size:
        divisors = [count for count in range(1, heads + 1) if heads % count == 0]
        fewer = [str(count) for count in divisors if count < world_size][-1:]
        more = [str(count) for count in divisors if count > world_size][:1]
        raise UserError(
            f"--attention {args.attention}: Ulysses cannot divide the {heads} key-value heads of --model {args.model} "
            f"over {world_size} processes: start {' or '.join(fewer + more)}, or use --attention ring or all-gather"
        )
