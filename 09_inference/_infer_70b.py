"""The checks of infer_70b.py before it loads a model, and its output.

How many ranks can share the model, how many bytes each will hold, and whether they fit.
"""

import dataclasses
import math
from collections.abc import Callable

import torch
from _prompts import Text
from torch import nn

from common import cli, exits, report, runtime
from common.report import table
from common.runtime import DTYPES
from lm import model, shapes
from lm.moe import mixtures
from lm.weights import build
from planner import inference
from planner.shape import from_config

# A tokenizer decodes the first bytes of a character as this character, until the last byte comes.
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
ROOM = 0.95  # of the free memory; the rest is for activations and workspaces
COLUMNS = {
    "weight_bytes": "weights per rank",
    "cache_bytes": "cache",
    "time_to_first_token_seconds": "first token",
    "prefill_tokens_per_second": "prefill",
    "decode_tokens_per_second": "decode",
    "bandwidth_share": "of memory bandwidth",
    "copy_rate_share": "of copy rate",
}


def printer(text: Text) -> Callable[[list[int | None]], None]:
    """Return a function for generate's on_tokens that prints the first answer as it grows.

    It prints complete characters only.
    """
    ids = []

    def on_tokens(new_tokens: list[int | None]) -> None:
        token = new_tokens[0]
        if token is None:  # the first answer has ended
            return
        printed = text.decode(ids).rstrip(INCOMPLETE)
        ids.append(token)
        answer = text.decode(ids).rstrip(INCOMPLETE)
        print(answer[len(printed) :], end="", flush=True)

    return on_tokens


# --- bytes


def bytes_read_per_step(net: nn.Module, texts: int) -> int:
    """Return the bytes of the weights that a decode step of so many texts reads on this rank.

    These are all, except an embedding that is not also the head, of which a step reads one row, and
    except experts that no text chooses: each chooses others here, as far as there are enough.
    """
    size = runtime.held_bytes(net.parameters())
    for mixture in mixtures(net):
        experts = mixture.gate.out_features
        read = min(experts, texts * mixture.experts_per_token)
        held = runtime.held_bytes(mixture.experts.parameters())
        size -= held * (experts - read) // experts
    if not net.config.tie_word_embeddings:
        size -= runtime.local_shard(net.model.embed_tokens.weight).nbytes
    return size


def vocab_rows(vocab_size: int, rank: int, ranks: int) -> int:
    """Return how many rows of the vocabulary a rank holds, by torch.chunk: rank 0 has the most."""
    most_rows = math.ceil(vocab_size / ranks)
    rows_before = most_rows * rank
    return max(0, min(most_rows, vocab_size - rows_before))


def planned_weight_bytes(args, config: shapes.Config, rank: int, ranks: int) -> int:
    """Return a rank's planned bytes of weights. Matrices and biases are sharded, norms are not."""
    shape = from_config(args.model, config)
    # the planner divides a vocabulary evenly: give it one that has this rank's rows on every rank
    shape = dataclasses.replace(shape, vocab=ranks * vocab_rows(config.vocab_size, rank, ranks))
    planned = inference.weight_bytes(
        shape,
        weights=args.dtype,
        tp=ranks,
        head_divided=True,
        count_embedding=False,
    )
    if not shape.tied:
        planned += DTYPES[args.dtype].itemsize * shape.embedding / ranks
    return round(planned)


def planned_bytes(args, config: shapes.Config, ranks: int, cache_tokens: int) -> tuple[int, int]:
    """Return the bytes of (weights, cache) of rank 0, which holds the most, by the planner."""
    cache = inference.kv_cache_bytes(
        from_config(args.model, config),
        tokens=cache_tokens,
        bytes_each=DTYPES[args.dtype].itemsize,
        tp=ranks,
    )
    return planned_weight_bytes(args, config, 0, ranks), round(cache)


# --- what is not possible


def undivided(config: shapes.Config, ranks: int) -> list[str]:
    """Return the sizes that so many ranks do not divide. The vocabulary may be divided unevenly."""
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "MLP channels": config.intermediate_size,
    }
    if config.experts:
        sizes["channels of an expert"] = config.experts.moe_intermediate_size
    return [f"{size} {name}" for name, size in sizes.items() if size % ranks != 0]


def check_layout(args, config: shapes.Config) -> int:
    """Return the number of ranks, started or planned.

    Raise UserError if so many ranks cannot share the model, or if they are on several nodes.
    """
    if (args.world_size is not None) != args.dry_run:
        raise exits.UserError(
            "--dry-run and --world-size N go together; "
            "to run N ranks: torchrun --standalone --nproc_per_node=N"
        )
    started = runtime.ranks()[1]
    ranks = args.world_size or started
    local_world_size = cli.environment_number(
        "LOCAL_WORLD_SIZE", cli.positive_int, default=str(started)
    )
    if local_world_size < started:
        raise exits.UserError(
            "tensor parallelism needs the links inside one node. Over several: vllm serve MODEL "
            "--tensor-parallel-size GPUS_PER_NODE --pipeline-parallel-size NODES"
        )
    sizes = undivided(config, ranks)
    if sizes:
        possible = [str(fewer) for fewer in range(1, ranks) if not undivided(config, fewer)]
        raise exits.UserError(
            f"{ranks} ranks do not divide {', '.join(sizes)} of {args.model}: "
            f"use {' or '.join(possible)}"
        )
    return ranks


def check_graph(args, config: shapes.Config, ranks: int, device: torch.device) -> None:
    """Raise UserError for a mixture of experts that --compile cannot capture as a CUDA graph.

    Without grouped_mm, the CPU reads how many tokens chose each expert: see lm/moe.py.
    """
    if not args.compile or device.type != "cuda" or config.experts is None:
        return
    channels = config.experts.moe_intermediate_size // ranks
    if args.dtype == "bf16" and channels % 8 == 0 and config.hidden_size % 8 == 0:
        return
    raise exits.UserError(
        f"--compile with --dtype {args.dtype} and {channels} channels of an expert on a rank: a "
        "CUDA graph of a mixture of experts needs bf16 and a multiple of 8: leave out --compile"
    )


def check_room(
    args, config: shapes.Config, ranks: int, cache_tokens: int, device: torch.device
) -> dict:
    """Return what a rank will hold, as a row of the table.

    Raise UserError if that is more than --memory or, without the flag, more than what is free on
    the fullest GPU.
    """
    free = None  # not known on a CPU
    if args.memory is not None:
        free = round(args.memory * 2**30)
    elif device.type == "cuda":
        free = min(runtime.all_gather(torch.cuda.mem_get_info(device)[0]))
    weights, cache = planned_bytes(args, config, ranks, cache_tokens)
    row = {"ranks": ranks, "weight_bytes": weights, "cache_bytes": cache, "free_bytes": free}
    if free is None or weights + cache <= ROOM * free:
        return row
    fixes = fixes_for_memory(args, config, ranks, cache_tokens, free)
    raise exits.UserError(
        f"--model {args.model}: a rank of {ranks} needs {report.for_people('bytes', weights)} "
        f"and {report.for_people('bytes', cache)} of cache, and has "
        f"{report.for_people('bytes', free)}: use {' or '.join(fixes)}"
    )


def fixes_for_memory(
    args, config: shapes.Config, ranks: int, cache_tokens: int, free: int
) -> list[str]:
    """Return what would fit instead: more ranks, 4 bits, or offloading."""
    fixes = []
    for more_ranks in range(ranks + 1, config.num_key_value_heads + 1):
        if undivided(config, more_ranks):
            continue
        if sum(planned_bytes(args, config, more_ranks, cache_tokens)) <= ROOM * free:
            fixes.append(f"{more_ranks} ranks")
            break
    _, cache = planned_bytes(args, config, 1, cache_tokens)
    int4 = inference.weight_bytes(from_config(args.model, config), weights="int4")
    if int4 + cache <= ROOM * free:
        fixes.append("09_inference/quantized.py --weights int4 on one GPU")
    fixes.append("09_inference/offloaded.py")
    return fixes


def dry_run(args, config: shapes.Config, cache_tokens: int, shard_model: Callable) -> int:
    """Show the bytes of a rank, and compare the planner's with rank 0 of a model without memory."""
    if args.dtype == "auto":
        args.dtype = "bf16"
    row = check_room(args, config, args.world_size, cache_tokens, torch.device("cpu"))
    net = build(args.model, config, seed=args.seed, device="meta").to(DTYPES[args.dtype])
    if args.world_size > 1:
        runtime.join_fake_ranks(0, args.world_size)
        shard_model(net, args.world_size, "cpu")
    check_bytes(net, args, rank=0, ranks=args.world_size)
    values = [report.for_people(key, value) for key, value in row.items()]
    print(table([list(row), values]))
    held = runtime.held_bytes(net.parameters())
    print(f"checked: rank 0, sharded on the meta device, has {held:,} bytes of weights, as planned")
    summary = {
        "world_size": args.world_size,
        "dtype": args.dtype,
        "model": args.model,
        "parameters": shapes.parameter_count(config),
        "checked": [],
    }
    report.write_json(summary | row, args.json)
    return 0


def check_bytes(net: model.Transformer, args, rank: int, ranks: int) -> None:
    """Assert that this rank holds exactly the bytes of weights that were planned for it."""
    held = runtime.held_bytes(net.parameters())
    planned = planned_weight_bytes(args, net.config, rank, ranks)
    assert held == planned, (
        f"rank {rank} of {ranks} holds {held:,} bytes of weights, {planned:,} were planned"
    )
