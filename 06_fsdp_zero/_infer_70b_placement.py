"""Before infer_70b.py loads: which layer goes where, how many bytes that is, whether it fits, else what would."""

import os
import shutil
from typing import NamedTuple

import torch
from _infer_70b_pipeline import layers_of

from old import hardware, report, runtime, shapes
from old.exits import UserError
from planner import inference
from planner.plan import DTYPES as BYTES
from planner.shape import Shape, from_config

ROOM = 0.95  # of what is free: the rest is for activations, workspaces and fragments


class Place(NamedTuple):
    """What one device holds; free_bytes is None where it is not known."""

    device: str
    holds: str
    weight_bytes: int
    cache_bytes: int
    free_bytes: int | None = None

    @property
    def missing_bytes(self) -> int:
        """How far it is from fitting; 0 if it fits."""
        if self.free_bytes is None:
            return 0
        return max(0, round(self.weight_bytes + self.cache_bytes - ROOM * self.free_bytes))


def places(args, config: shapes.Config, world_size: int, free: list[int | None]) -> list[Place]:
    """What each rank holds, by the formulas of planner/. `free`: bytes by rank."""
    shape = from_config(args.model, config)
    cache_bytes = bytes_of_cache(args, config)
    layers = config.num_hidden_layers
    if args.strategy == "tensor-parallel":
        every, weights = "all layers" if world_size == 1 else f"1/{world_size} of each layer", tensor_parallel_bytes
        held = [(every, weights(shape, args.dtype, world_size), cache_bytes // world_size)] * world_size
    elif args.strategy == "zero3":
        return zero3_places(args, shape, world_size, cache_bytes, free)
    else:
        stages = [layers_of(rank, world_size, layers) for rank in range(world_size)]
        held = [
            (describe(stage, layers), stage_bytes(shape, args.dtype, stage), cache_bytes * len(stage) // layers)
            for stage in stages
        ]
    return [Place(f"rank {rank}", *part, free[rank]) for rank, part in enumerate(held)]


def bytes_of_cache(args, config: shapes.Config) -> int:
    """Of all prompts and layers together."""
    tokens = args.batch * args.tokens_per_prompt
    return round(inference.kv_cache_bytes(from_config(args.model, config), tokens=tokens, bytes_each=BYTES[args.dtype]))


def tensor_parallel_bytes(shape: Shape, dtype: str, ranks: int) -> int:
    """Every matrix is divided. Norms are whole on each rank."""
    divided = inference.weight_bytes(shape, weights=dtype, tp=ranks, head_divided=True, count_embedding=False)
    embedding = 0 if shape.tied else BYTES[dtype] * shape.embedding / ranks
    return round(divided + embedding)


def zero3_places(args, shape: Shape, ranks: int, cache_bytes: int, free: list[int | None]) -> list[Place]:
    """A part of each tensor, and what is gathered at a time: two layers, or the embedding. The prompts are divided."""
    part = round(BYTES[args.dtype] * shape.parameter_count() / ranks)
    gathered = BYTES[args.dtype] * max(2 * shape.largest_layer(), shape.embedding)
    cache_bytes = cache_bytes * -(-args.batch // ranks) // args.batch  # a rank without a prompt computes one as well
    if args.offload == "none":
        holds, weights = f"1/{ranks} of all, two layers whole", part + gathered
        return [Place(f"rank {rank}", holds, weights, cache_bytes, free[rank]) for rank in range(ranks)]
    on_device = [Place(f"rank {rank}", "two layers whole", gathered, cache_bytes, free[rank]) for rank in range(ranks)]
    room = None
    if not args.dry_run:  # which takes place somewhere else
        there = shutil.disk_usage(args.nvme).free if args.offload == "nvme" else hardware.available_memory()
        room = there // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    return on_device + [Place(f"{args.offload}, rank {r}", f"1/{ranks} of all", part, 0, room) for r in range(ranks)]


def stage_bytes(shape: Shape, dtype: str, stage: range) -> int:
    """Its layers. The first stage holds the embedding, the last one the final norm and the head."""
    first, last = stage.start == 0, stage.stop == shape.layers
    numbers = shape.largest_layer() * len(stage)
    if first or (last and shape.tied):  # tied: one matrix, which both ends need
        numbers += shape.embedding
    if last:
        numbers += shape.embedding * (not shape.tied) + shape.hidden
    return BYTES[dtype] * numbers


def describe(stage: range, layers: int) -> str:
    first = "embedding, " if stage.start == 0 else ""
    last = ", head" if stage.stop == layers else ""
    return f"{first}layers {stage.start} to {stage.stop - 1}{last}"


def free_bytes(args, device: torch.device) -> int:
    """--memory, or what nobody uses: on this GPU; of the computer's memory, this rank's share."""
    if args.memory is not None:
        return round(args.memory * 2**30)
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return hardware.available_memory() // int(os.environ.get("LOCAL_WORLD_SIZE", 1))


def print_places(found: list[Place]) -> None:
    """The table; ranks that hold the same share a line."""
    alike = {}
    for place in found:
        alike.setdefault(place[1:4], []).append(place)
    rows = [["device", "holds", "weights", "cache", "free", "fits"]]
    for (holds, weight_bytes, cache_bytes), group in alike.items():
        name = group[0].device if len(group) == 1 else f"{group[0].device} to {group[-1].device.split()[-1]}"
        fits = "no" if any(place.missing_bytes for place in group) else "yes"
        known = [place.free_bytes for place in group if place.free_bytes is not None]
        free = size(min(known)) if known else "n/a"
        rows.append([name, holds, size(weight_bytes), size(cache_bytes), free, fits if known else "n/a"])
    runtime.say(report.table(rows) + "\n")


def size(number: int) -> str:
    return f"{number / 2**30:,.2f} GiB" if number >= 2**30 else f"{number / 2**20:,.1f} MiB"


def refuse_what_does_not_fit(args, config: shapes.Config, found: list[Place]) -> None:
    """UserError in one line: how much is missing where, and what would fit."""
    worst = max(found, key=lambda place: place.missing_bytes)
    if not worst.missing_bytes:
        return
    # a rank's part in the computer's memory or on a disk may be too large: what would fit is a question of devices
    computing = [place for place in found if place.device.startswith(("rank", "cuda"))] or [worst]
    device = worst if worst in computing else min(computing, key=lambda place: place.free_bytes)
    ways = what_would_fit(args, config, device.free_bytes, alone=on_gpus(args))
    if device is not worst:
        ways = f"on devices with {size(device.free_bytes)} free: {ways}"
    if worst.device == "disk":
        ways = "set TMPDIR to a disk with room, or save the weights as a folder, which is read where it lies"
    takes = f"{size(worst.weight_bytes)} of weights and {size(worst.cache_bytes)} of cache"
    raise UserError(
        f"--model {args.model} does not fit: {worst.device} would hold {takes}, {size(worst.missing_bytes)} more than "
        f"{ROOM:.0%} of the {size(worst.free_bytes)} that it has free; {ways}"
    )


def what_would_fit(args, config: shapes.Config, free: int, *, alone: bool) -> str:
    """The fewest such devices that share it, in this type and in int4, and what to try. `alone`: each has a memory of
    its own, as GPUs have and ranks on a CPU have not."""
    shape = from_config(args.model, config)
    cache_bytes = bytes_of_cache(args, config)
    ways = []
    for ranks in range(1, config.num_key_value_heads + 1) if alone else ():
        needed = tensor_parallel_bytes(shape, args.dtype, ranks) + cache_bytes / ranks
        if not undivided(config, ranks) and needed <= ROOM * free:
            ways.append(f"--strategy tensor-parallel on {ranks} of them")
            break
    if inference.weight_bytes(shape, weights="int4") + cache_bytes <= ROOM * free:
        ways.append("09_inference/quantized.py --weights int4 on one")
    told = f"it fits with {', or with '.join(ways)}" if ways else "no number of such devices has the room"
    if args.strategy == "zero3" and args.offload == "none":
        told += "; --offload cpu keeps the parts in the computer's memory, if it has the room"
    if args.strategy != "device-map":
        told += "; --strategy device-map leaves layers on the CPU and the disk, and says whether they have the room"
    return told


def on_gpus(args) -> bool:
    """Whether the devices are GPUs, or those of a dry run."""
    return args.dry_run or args.memory is not None or (args.device in ("auto", "cuda") and torch.cuda.is_available())


def undivided(config: shapes.Config, ranks: int) -> list[str]:
    """What so many ranks cannot share; a vocabulary they may share unevenly."""
    wholes = {
        "attention heads": config.num_attention_heads,
        "key-value heads": config.num_key_value_heads,
        "columns of the feed-forward part": config.intermediate_size,
    }
    return [f"{number} {name}" for name, number in wholes.items() if number % ranks]
