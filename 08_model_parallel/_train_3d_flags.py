"""What a mesh must divide. UserError names the flag, the value and the nearest that would do."""

import argparse
import math
from dataclasses import dataclass
from pathlib import Path

from old import cli, data, hf
from old.exits import UserError
from old.shapes import SIZES, Config, load_config


@dataclass(frozen=True)
class Layout:
    """A model, and how it and its batch are divided."""

    config: Config
    data_ranks: int  # parts of the batch
    shards: int  # parts of a copy of the model: context ranks too, which read other tokens as data ranks do
    micro_batch_size: int
    accumulation_steps: int


def check_layout(args: argparse.Namespace, world_size: int) -> tuple[Layout, data.Corpus]:
    """What the flags ask for on so many ranks; UserError for what cannot be."""
    sizes = {"tp": args.tp, "pp": args.pp, "cp": args.cp}
    check_proved(args.compile, args.cpu_offload, args.dtype, **sizes)
    data_ranks = data_parallel_size(world_size, **sizes, replicate=args.replicate)
    micro_batch_size, accumulation_steps = cli.split_batch(args.global_batch_size, args.micro_batch_size, data_ranks)
    check_schedule(micro_batch_size, accumulation_steps, args.pp)
    corpus = data.load_corpus(args.data, args.tokenizer)
    config = load_config(args.model, corpus.vocab_size, args.seq_len)
    shards = data_ranks * args.cp // args.replicate
    check_model(args.model, config, args.seq_len, **sizes, shards=shards)
    return Layout(config, data_ranks, shards, micro_batch_size, accumulation_steps), corpus


def data_parallel_size(world_size: int, *, tp: int, pp: int, cp: int, replicate: int) -> int:
    """Over how many parts the batch is divided: replicas times shards."""
    ranks_of_one = tp * pp * cp * replicate
    if world_size % ranks_of_one:
        raise UserError(
            f"--tp {tp} x --pp {pp} x --cp {cp} x --replicate {replicate} takes a multiple of {ranks_of_one} "
            f"processes, and {world_size} were started: use {cli.nearest_multiples(world_size, ranks_of_one)}"
        )
    return world_size // (tp * pp * cp)


def check_model(model: str, config: Config, seq_len: int, *, tp: int, pp: int, cp: int, shards: int) -> None:
    """UserError if the model cannot be cut so."""
    if pp > 1 and config.tie_word_embeddings:
        raise UserError(
            f"--pp {pp}: --model {model} has tied embeddings, one matrix for the first and the last stage: "
            'use --pp 1, or a config.json with "tie_word_embeddings": false'
        )
    if pp > config.num_hidden_layers:
        layers = config.num_hidden_layers
        raise UserError(f"--pp {pp}: --model {model} has {layers} layers, one stage would have none: use --pp {layers}")
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "MLP columns": config.intermediate_size,
    }
    if shards > 1:  # fully_shard cuts tensor ranks' parts of unequal size at other rows than distribute_tensor
        sizes["tokens of the vocabulary"] = config.vocab_size
    not_divided = [f"{size} {what}" for what, size in sizes.items() if size % tp]
    if not_divided:
        common = math.gcd(*sizes.values())
        nearest = max(n for n in range(1, tp) if common % n == 0)
        raise UserError(
            f"--tp {tp} does not divide the {', '.join(not_divided)} of --model {model}: use --tp {nearest}"
        )
    if seq_len % (cp * tp):
        raise UserError(
            f"--seq-len {seq_len} does not divide over --cp {cp} x --tp {tp} = {cp * tp} ranks: "
            f"use {cli.nearest_multiples(seq_len, cp * tp, config.max_position_embeddings)}"
        )
    if tp * pp > 1 and model not in SIZES and hf.weight_files(Path(model)):
        raise UserError(f"--model {model} has weights, and --tp and --pp start from random ones: use --tp 1 --pp 1")


def check_schedule(micro_batch_size: int, accumulation_steps: int, pp: int) -> None:
    """UserError if there are too few micro-batches to keep the stages busy."""
    sequences = micro_batch_size * accumulation_steps
    if accumulation_steps < pp:
        fit = [size for size in range(1, sequences // pp + 1) if sequences % size == 0]
        use = f"--micro-batch-size {fit[-1]}" if fit else f"a --global-batch-size {-(-pp // sequences)} times as large"
        raise UserError(
            f"--pp {pp} takes at least {pp} micro-batches per step, and {sequences} sequences per rank in parts of "
            f"--micro-batch-size {micro_batch_size} are {accumulation_steps}: use {use}"
        )


def check_proved(compiled: bool, offloaded: bool, dtype: str, *, tp: int, pp: int, cp: int) -> None:
    """UserError for combinations that nobody has compared with one process."""
    given = {"--compile": compiled, "--cpu-offload": offloaded, "--dtype fp16": dtype == "fp16"}
    for flag in (flag for flag, is_given in given.items() if is_given and tp * pp * cp > 1):
        raise UserError(f"{flag} with --tp {tp} --pp {pp} --cp {cp} was never compared with one process: leave it out")
