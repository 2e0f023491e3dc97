"""Before infer_70b.py loads: how many ranks may share the model, what each will hold, and whether it fits."""

import dataclasses
import math
from collections.abc import Callable

import torch
from _generate import DTYPES, Text
from torch import Tensor, nn

from common import cli, exits, report, runtime
from common.report import table
from lm import model, shapes
from lm.weights import build
from planner import inference
from planner.shape import from_config

# what a decoder shows for a character whose last bytes are missing
INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
ROOM = 0.95  # of the free memory; the rest is for activations and workspaces


def printer(text: Text) -> Callable[[list[int | None]], None]:
    """For generate's on_tokens: print the first row's text as it grows, whole characters only."""
    ids = []

    def on_tokens(fresh: list[int | None]) -> None:
        if fresh[0] is not None:
            printed = text.decode(ids).rstrip(INCOMPLETE)
            ids.append(fresh[0])
            print(text.decode(ids).rstrip(INCOMPLETE)[len(printed) :], end="", flush=True)

    return on_tokens


def local(weight: Tensor) -> Tensor:
    return weight.to_local() if hasattr(weight, "to_local") else weight


def held_bytes(net: nn.Module, *, read: bool = False) -> int:
    """Bytes of this rank's weights. `read`: of those that a decode step reads whole, so without an untied embedding."""
    weights = dict(net.named_parameters())  # tied ones once
    if read and "lm_head.weight" in weights:
        weights.pop("model.embed_tokens.weight")
    return sum(local(weight).nbytes for weight in weights.values())


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


def undivided(config: shapes.Config, ranks: int) -> list[str]:
    """What so many ranks cannot share. A vocabulary may be shared unevenly."""
    sizes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "MLP channels": config.intermediate_size,
    }
    return [f"{size} {what}" for what, size in sizes.items() if size % ranks]


def check_layout(args, config: shapes.Config) -> int:
    """The number of ranks. UserError for a number that cannot share the model, and for several nodes."""
    if (args.world_size is not None) != args.dry_run:
        raise exits.UserError(
            "--dry-run and --world-size N go together; to run N ranks: torchrun --nproc_per_node=N"
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
    if parts := undivided(config, ranks):
        fit = [str(fewer) for fewer in range(1, ranks) if not undivided(config, fewer)]
        raise exits.UserError(
            f"{ranks} ranks do not divide {', '.join(parts)} of {args.model}: use {' or '.join(fit)}"
        )
    return ranks


def check_room(
    args, config: shapes.Config, ranks: int, cache_tokens: int, device: torch.device
) -> dict:
    """What a rank will hold, as a row. UserError if that is more than --memory, or than is free on the fullest GPU."""
    free = None  # not known on a CPU
    if args.memory is not None:
        free = round(args.memory * 2**30)
    elif device.type == "cuda":
        free = min(runtime.all_gather(torch.cuda.mem_get_info(device)[0]))
    weights, cache = planned_bytes(args, config, ranks, cache_tokens)
    row = {"ranks": ranks, "weight_bytes": weights, "cache_bytes": cache, "free_bytes": free}
    if free is None or weights + cache <= ROOM * free:
        return row
    ways = []
    for more in range(ranks + 1, config.num_key_value_heads + 1):
        if (
            not undivided(config, more)
            and sum(planned_bytes(args, config, more, cache_tokens)) <= ROOM * free
        ):
            ways.append(f"{more} ranks")
            break
    shape = from_config(args.model, config)
    if inference.weight_bytes(shape, weights="int4") + cache * ranks <= ROOM * free:
        ways.append("09_inference/quantized.py --weights int4 on one GPU")
    needs = " and ".join(report.for_people("bytes", each) for each in (weights, cache))
    raise exits.UserError(
        f"--model {args.model}: a rank of {ranks} needs {needs} of cache, and has {report.for_people('bytes', free)}: "
        f"use {' or '.join([*ways, '09_inference/offloaded.py'])}"
    )


def dry_run(args, config: shapes.Config, cache_tokens: int, cut: Callable) -> int:
    """Show a rank's bytes, and check the planner's figure against rank 0's bytes, cut on the meta device."""
    args.dtype = "bf16" if args.dtype == "auto" else args.dtype
    row = check_room(args, config, args.world_size, cache_tokens, torch.device("cpu"))
    net = build(args.model, config, seed=args.seed, device="meta").to(DTYPES[args.dtype])
    if args.world_size > 1:
        runtime.join_fake_ranks(0, args.world_size)
        cut(net, args.world_size, "cpu")
    check_bytes(net, args, rank=0, ranks=args.world_size)
    print(table([[*row], [report.for_people(key, value) for key, value in row.items()]]))
    print(
        f"checked: rank 0, cut on the meta device, has {held_bytes(net):,} bytes of weights, as planned"
    )
    known = {"world_size": args.world_size, "dtype": args.dtype, "model": args.model}
    report.write_json(
        {**known, "parameters": shapes.parameter_count(config), "checked": [], **row}, args.json
    )
    return 0


def check_bytes(net: model.Transformer, args, rank: int, ranks: int) -> None:
    """Assert that this rank holds exactly the bytes of weights that were planned for it."""
    held = held_bytes(net)
    planned = planned_weight_bytes(args, net.config, rank, ranks)
    both = f"{held:,} bytes of weights, {planned:,} were planned"
    assert held == planned, f"rank {rank} of {ranks} holds {both}"
