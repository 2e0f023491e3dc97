"""The flags of pipeline_parallel.py, and the sizes that no schedule can do."""

import argparse
import dataclasses

from old import cli, runtime, shapes
from old.exits import UserError

UNTIED_NANO = "untied-nano"
LAYERS = 8  # of UNTIED_NANO, if it has no more stages than that
MICRO_BATCHES_PER_RANK = 4  # Huang et al. 2019, section 3.3: from there on the bubble is small


def parse(description: str) -> tuple[argparse.Namespace, shapes.Config, int]:
    """Flags, shape and number of micro-batches. UserError before any rank starts."""
    parser = cli.Parser(description)
    add = parser.add_argument
    add("--model", default=UNTIED_NANO, help="a named size or a config.json, without tied embeddings")
    add("--seq-len", type=cli.positive_int, default=24, help="tokens of the longest sequence")
    add("--micro-batch-size", type=cli.positive_int, default=2, help="sequences per forward")
    add(
        "--global-batch-size", type=cli.positive_int, help="sequences per step (default: 4 micro-batches for each rank)"
    )
    add("--chunks", type=cli.positive_int, default=2, help="stages per rank where they are interleaved; 1: do not")
    add("--steps", type=cli.positive_int, default=10)
    add("--clip-norm", type=cli.positive_or_inf, default=1.0, help="largest gradient norm, over all stages")
    add("--plot", type=cli.plot_file, metavar="PATH", help="a PNG: who did what when")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--seed", type=cli.natural, default=0)
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    ranks = runtime.processes(args.device)
    args.chunks = args.chunks if ranks > 1 else 1  # one rank has no neighbour to wait for
    config = load_config(args.model, args.seq_len, stages=ranks * args.chunks)
    return args, config, check_sizes(args, config, ranks)


def load_config(name: str, seq_len: int, stages: int) -> shapes.Config:
    """The shape of that name. nano has tied embeddings: the default is nano without, and with a layer per stage."""
    if name == UNTIED_NANO:
        nano = shapes.load_config("nano", 256, seq_len)
        return dataclasses.replace(nano, tie_word_embeddings=False, num_hidden_layers=max(LAYERS, stages))
    return shapes.load_config(name, 256, seq_len)


def check_sizes(args: argparse.Namespace, config: shapes.Config, ranks: int) -> int:
    """The number of micro-batches. UserError for what no schedule can do."""
    if config.tie_word_embeddings:
        raise UserError(
            f"--model {args.model} has tied embeddings: the first and the last stage would hold the same matrix, and "
            f"would have to add up its gradients; use --model {UNTIED_NANO}, llama-8b or a config.json with "
            "tie_word_embeddings false"
        )
    layers = config.num_hidden_layers
    if ranks * args.chunks > layers:
        fix = f"--chunks {layers // ranks}" if layers >= ranks else f"at most {layers} processes"
        raise UserError(
            f"--chunks {args.chunks} on {ranks} processes makes {ranks * args.chunks} stages, and {args.model} has "
            f"{layers} layers: a stage would have none; use {fix}"
        )
    if args.global_batch_size is None:
        args.global_batch_size = MICRO_BATCHES_PER_RANK * ranks * args.micro_batch_size
    size = args.micro_batch_size
    micro_batches, rest = divmod(args.global_batch_size, size)
    unit = ranks * size if args.chunks > 1 else size
    nearest = f"use {cli.nearest_multiples(args.global_batch_size, unit)}"
    if rest:
        raise UserError(
            f"--global-batch-size {args.global_batch_size} is no whole number of micro-batches of --micro-batch-size "
            f"{size}: {nearest}"
        )
    if micro_batches < ranks:
        raise UserError(
            f"--global-batch-size {args.global_batch_size} makes {micro_batches} micro-batch(es) of {size} for {ranks} "
            f"stages, and 1F1B needs one for each: use {ranks * size} or more"
        )
    if args.chunks > 1 and micro_batches % ranks:
        raise UserError(
            f"--global-batch-size {args.global_batch_size} makes {micro_batches} micro-batches of {size}, and "
            f"interleaving takes {ranks} at a time, one for each process: {nearest}, or --chunks 1"
        )
    return micro_batches
