"""Defaults, limits and checks of train_3d.py, and its dry run."""

import logging
import math
import os
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from common import report, runtime
from common.exits import UserError
from common.report import table
from lm import exchange, weights
from lm.shapes import Config
from lm.stages import STAGES_PER_RANK
from training.batches import Batches

# DTensor warns of two collectives in a row, one over tensor ranks and one over shards. The gradient
# norm and the hash of the weights need both.
logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)


# The weights that each tensor rank has whole: of norms, and of the routers of experts.
ON_ALL_TENSOR_RANKS = ("norm.weight", "mlp.gate.weight")

# --- defaults and limits


def adapt_defaults(args) -> None:
    """Set the default of --reshard-after-forward.

    A pipeline stage computes many micro-batches in a row. With "on", each of them would gather the
    weights of the stage again.
    """
    if args.reshard_after_forward is None:
        args.reshard_after_forward = "off" if args.pp > 1 else "on"


def count_data_ranks(args, world_size: int) -> int:
    """Return how many ranks read different sequences. Raise UserError for a wrong world size."""
    multiple = args.tp * args.pp * args.cp * args.replicate
    if world_size % multiple != 0:
        right_size = math.ceil(world_size / multiple) * multiple
        command = shlex.join(["torchrun", f"--nproc_per_node={right_size}", *sys.argv])
        raise UserError(
            f"--tp {args.tp} x --pp {args.pp} x --cp {args.cp} x --replicate {args.replicate} = "
            f"{multiple} does not divide a world size of {world_size}: use {right_size} ranks, "
            f"`{command}`"
        )
    return world_size // (args.tp * args.pp * args.cp)


def check_layout(args, config: Config, batches: Batches, world_size: int) -> None:
    """Raise UserError if the model or the batch cannot be sharded as the flags say."""
    model = f"--model {args.model}"
    check_experts(args, config, world_size)
    # The vocabulary is among them because fully_shard and DTensor share out unequal shards in
    # different ways.
    sizes = {}
    for name in ("num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size"):
        sizes[name] = getattr(config, name)
    not_divisible = [f"{name} {size}" for name, size in sizes.items() if size % args.tp != 0]
    if not_divisible:
        common_divisor = math.gcd(*sizes.values())
        largest = max(tp for tp in range(1, args.tp) if common_divisor % tp == 0)
        raise UserError(
            f"--tp {args.tp} does not divide {', '.join(not_divisible)} of {model}: "
            f"use --tp {largest}"
        )

    multiple = args.cp * args.tp
    if args.cp > 1:
        multiple = math.lcm(multiple, 2 * args.cp)  # a context rank has two chunks of a sequence
    if args.seq_len % multiple != 0:
        right_length = max(1, args.seq_len // multiple) * multiple
        raise UserError(
            f"--seq-len {args.seq_len} is not a multiple of {multiple}, as --cp {args.cp} and "
            f"--tp {args.tp} require: use {right_length}"
        )

    stages_per_rank = STAGES_PER_RANK[args.schedule]
    pipeline = f"--pp {args.pp}"
    if stages_per_rank > 1:
        pipeline += f" --schedule {args.schedule}"
        if args.pp == 1:
            raise UserError(f"{pipeline}: one rank is no pipeline: add --pp 2, or leave it out")
    if args.pp * stages_per_rank > config.num_hidden_layers:
        raise UserError(
            f"{pipeline} needs {args.pp * stages_per_rank} layers, {model} has "
            f"{config.num_hidden_layers}: use fewer stages"
        )
    if args.pp > 1 and config.tie_word_embeddings:
        raise UserError(
            f"--pp {args.pp}: embedding and head of {model} are one matrix, and would be in two "
            "stages: use --pp 1, or a config.json with tie_word_embeddings false"
        )
    if batches.accumulation_steps < args.pp:
        per_rank = batches.micro_batch_size * batches.accumulation_steps  # sequences in a step
        if per_rank < args.pp:
            enough = args.global_batch_size // per_rank * args.pp
            fix = f"use --global-batch-size {enough} --micro-batch-size 1"
        else:
            sizes = [size for size in range(1, per_rank // args.pp + 1) if per_rank % size == 0]
            fix = f"use --micro-batch-size {sizes[-1]}"
        raise UserError(
            f"--pp {args.pp} needs {args.pp} micro-batches per step, and has "
            f"{batches.accumulation_steps}: {fix}"
        )
    if stages_per_rank > 1 and batches.accumulation_steps % args.pp != 0:
        right_steps = batches.accumulation_steps // args.pp * args.pp
        right_batch = args.global_batch_size // batches.accumulation_steps * right_steps
        raise UserError(
            f"{pipeline} needs a multiple of {args.pp} micro-batches per step, and has "
            f"{batches.accumulation_steps}: use --global-batch-size {right_batch} "
            f"--micro-batch-size {batches.micro_batch_size}"
        )


def check_experts(args, config: Config, world_size: int) -> None:
    """Raise UserError if the experts cannot be shared as the flags say."""
    exchange.check_ranks(args.ep, args.model, config, world_size // args.replicate)
    if config.experts is None:
        return
    if args.pp > 1:
        raise UserError(f"--pp {args.pp}: --model {args.model} has experts: use --pp 1, and --ep")
    if args.compile and max(args.ep, args.tp) > 1:
        raise UserError(
            f"--compile with --ep {args.ep} --tp {args.tp}: torch.compile cannot trace experts "
            "that are sharded apart from their layer: use --no-compile"
        )


# --- the check of a run


def check_bytes(
    model: nn.Module, optimizer: torch.optim.Optimizer, args, mesh: DeviceMesh
) -> dict[str, list[int]]:
    """Assert that each rank holds its shards in fp32 and nothing else; return how many bytes.

    The result lists the bytes of weights and of optimizer state by rank.
    """
    full_model = weights.build("", model.config, seed=0, device="meta")
    full_parameters = dict(full_model.named_parameters())

    weight_bytes = 0
    state_bytes = 0
    expected_bytes = 0
    for name, parameter in model.named_parameters():
        weight_bytes += parameter.to_local().nbytes
        for value in optimizer.state[parameter].values():
            if value.ndim > 0:  # not the step count
                state_bytes += value.to_local().nbytes
        expected_bytes += shard_bytes(name, full_parameters[name], args, mesh)

    by_rank = runtime.all_gather((weight_bytes, state_bytes, expected_bytes))
    for rank, (weight_bytes, state_bytes, expected_bytes) in enumerate(by_rank):
        assert weight_bytes == expected_bytes, f"rank {rank}: {weight_bytes}, not {expected_bytes}"
        assert state_bytes == 2 * expected_bytes  # AdamW's two moments

    # The ranks together hold each copy of the model once, and what each tensor rank has, as often.
    total_bytes = 0
    for name, parameter in full_parameters.items():
        copies = args.replicate
        if name.endswith(ON_ALL_TENSOR_RANKS):
            copies *= args.tp
        total_bytes += copies * parameter.nbytes
    weight_bytes_per_rank = [weight_bytes for weight_bytes, _, _ in by_rank]
    assert sum(weight_bytes_per_rank) == total_bytes, f"{weight_bytes_per_rank} of {total_bytes}"

    largest = report.for_people("bytes", max(weight_bytes_per_rank))
    runtime.print0(
        f"checked: each rank holds its shards of weights and optimizer state in {torch.float32}, "
        f"at most {largest} of weights"
    )
    return {
        "parameter_bytes_per_rank": weight_bytes_per_rank,
        "optimizer_bytes_per_rank": [state_bytes for _, state_bytes, _ in by_rank],
    }


def shard_bytes(name: str, parameter: Tensor, args, mesh: DeviceMesh) -> int:
    """Return the bytes of this rank's shard of a parameter: some of its rows, on a tensor rank."""
    if ".mlp.experts." in name:
        return expert_bytes(parameter, args)
    shard = parameter
    if args.tp > 1 and not name.endswith(ON_ALL_TENSOR_RANKS):
        dim = 0  # outputs: a weight is [outputs, inputs]
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            dim = 1  # inputs
        shard = shard.chunk(args.tp, dim)[mesh["tensor"].get_local_rank()]
    return row_bytes(shard, mesh["shard"].get_local_rank(), mesh["shard"].size())


def expert_bytes(stack: Tensor, args) -> int:
    """Return the bytes of this rank's shard of a stack: some of the experts of an expert rank."""
    shards = dist.get_world_size() // args.replicate // args.ep
    copy_rank = dist.get_rank() % (shards * args.ep)
    shard_rank, expert_rank = divmod(copy_rank, args.ep)
    return row_bytes(stack.chunk(args.ep)[expert_rank], shard_rank, shards)


def row_bytes(parameter: Tensor, rank: int, ranks: int) -> int:
    """Return the bytes of the rows that fully_shard gives to one of `ranks` ranks.

    As torch.chunk, it gives ceil(rows / ranks) rows to each. The last ranks may have fewer, or
    none.
    """
    shards = parameter.chunk(ranks)
    if rank >= len(shards):
        return 0
    return shards[rank].nbytes


# --- the dry run


def dry_run(
    args, load_training_objects: Callable, make_mesh: Callable, parallelize: Callable
) -> int:
    """Print the bytes that the first rank of each stage holds, and write them to --json.

    The functions are those of train_3d.py. The ranks do not exist, and the model has no memory.
    """
    if not args.dry_run or runtime.ranks().world_size > 1:
        raise UserError(
            "--world-size goes with --dry-run, which is one process without torchrun: "
            "give both or none"
        )
    if args.dtype == "auto":
        args.dtype = "bf16"  # as on a GPU
    if args.world_size is None:
        args.world_size = math.lcm(args.tp * args.pp * args.cp, args.ep) * args.replicate
    data_ranks = count_data_ranks(args, args.world_size)
    objects = load_training_objects(args, 0, data_ranks, torch.device("cpu"))
    config = objects.model.config
    if args.pp > 1 and args.micro_batch_size is None:
        objects.batches.micro_batch_size = 1  # the default of a pipeline
    check_layout(args, config, objects.batches, args.world_size)

    count = partial(count_stage_bytes, args, config, data_ranks, make_mesh, parallelize)
    # A process for each stage, because a process cannot become another rank later.
    with ProcessPoolExecutor(
        min(args.pp, os.cpu_count()), get_context("spawn"), max_tasks_per_child=1
    ) as pool:
        rows = list(pool.map(count, range(args.pp)))

    print(f"{args.model}: bytes on the first rank of each stage, of {args.world_size} fake ranks\n")
    if args.schedule == "interleaved":
        print(f"interleaved: the rank of stage s also has stage s + {args.pp}, in the same row\n")
    lines = [list(rows[0])]
    for row in rows:
        lines.append([report.for_people(key, value) for key, value in row.items()])
    print(table(lines))
    summary = {}
    for name in ("model", "dtype", "world_size", "tp", "pp", "cp", "ep", "replicate", "schedule"):
        summary[name] = getattr(args, name)
    report.write_json({**summary, "device": "fake", "stages": rows}, args.json)
    return 0


def count_stage_bytes(
    args, config: Config, data_ranks: int, make_mesh: Callable, parallelize: Callable, stage: int
) -> dict[str, int]:
    """Return the bytes that the first rank of a stage holds, in fp32 and with AdamW's moments."""
    device = runtime.join_fake_ranks(stage * args.world_size // args.pp, args.world_size)
    mesh = make_mesh(args, data_ranks, device)
    model = weights.build(args.model, config, seed=args.seed, device="meta")
    parallelize(model, args, mesh, stage)
    weight_bytes = sum(parameter.to_local().nbytes for parameter in model.parameters())
    return {
        "stage": stage,
        "layers": len(model.model.layers),
        "weight_bytes": weight_bytes,
        "gradient_bytes": weight_bytes,
        "optimizer_bytes": 2 * weight_bytes,
    }
