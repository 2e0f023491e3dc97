"""The weights for infer_70b.py: what a rank holds is read from the files, or made, and nothing besides."""

import math
import time
from contextlib import ExitStack
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tqdm import tqdm

from old import hf, model, runtime
from old.exits import UserError
from old.report import for_people
from old.shapes import Config

CHUNK = 2**24  # numbers that are on their way at a time
TILE = 1_000_003  # random numbers that a large matrix repeats; a prime: no row of a matrix is like another


def check_folder(folder: Path, config: Config) -> dict[str, Path]:
    """The file of each weight. UserError if one is missing, or does not have the shape that the config gives it."""
    expected = {
        name: [*weight.shape] for name, weight in hf.named_weights(model.build("", config, seed=0, device="meta"))
    }
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    stored = hf.stored_weights(folder)
    if not stored:
        raise UserError(
            f"--model {folder}: no weights (.safetensors files) there: --random-weights makes some, "
            "06_fsdp_zero/convert_checkpoint.py --to hf converts a checkpoint"
        )
    found = {}
    for name, (file, shape) in stored.items():
        if name in ignored or name.endswith(".rotary_emb.inv_freq"):  # computed, not learned
            continue
        if name.endswith(".codes"):
            raise UserError(
                f"--model {folder}: its weights are rounded: 07_memory_tricks/quantized_inference.py --model {folder} "
                "reads it"
            )
        if name not in expected:
            raise UserError(f"--model {folder}: weights do not fit its config: {name} is not a weight of this model")
        if shape != expected[name]:
            told = f"{name} has shape {tuple(shape)}, not {tuple(expected[name])}"
            raise UserError(f"--model {folder}: weights do not fit its config: {told}")
        found[name] = file
    if missing := [name for name in expected if name not in found]:
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise UserError(f"--model {folder}: weights do not fit its config: {missing[0]}{more} missing")
    return found


class RandomMatrix:
    """A weight that is made where it is needed: any part of it, without the rest. A function of (seed, name) alone.

    To draw all of a 70B model's numbers takes a CPU a quarter of an hour, so a large matrix repeats its first million.
    """

    def __init__(self, name: str, shape: list[int], seed: int) -> None:
        self.rows, self.columns = shape
        generator = model.weight_generator(name, seed)  # a small matrix is init_weights' own
        self.tile = torch.empty(min(self.rows * self.columns, TILE)).normal_(std=0.02, generator=generator)

    def __getitem__(self, part: tuple[slice, slice]) -> Tensor:
        rows, columns = part
        begin = rows.start * self.columns % len(self.tile)
        end = begin + (rows.stop - rows.start) * self.columns
        numbers = self.tile.repeat(-(-end // len(self.tile)))[begin:end]
        return numbers.view(-1, self.columns)[:, columns]


def own_part(parameter: Tensor) -> tuple[slice, ...]:
    """Which rows, and columns, of the whole tensor this rank holds: all, or of a DTensor its part."""
    if not hasattr(parameter, "placements"):
        return tuple(slice(0, size) for size in parameter.shape)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sizes, starts = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    return tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))


@torch.no_grad()
def fill(net: nn.Module, args) -> None:
    """Give a model that has its memory its weights, tensor by tensor: all, or those of a stage or of a shard.

    args.weight_files is what check_folder has found."""
    started = time.perf_counter()
    parameters = dict(hf.named_weights(net))
    mine = sum(held_bytes(parameter) for parameter in parameters.values())
    with (
        ExitStack() as opened,
        # None: no bar where stderr is no terminal
        tqdm(
            total=mine, unit="B", unit_scale=True, desc="loading", disable=None if runtime.is_rank0() else True
        ) as bar,
    ):
        readers = {}
        for name, parameter in parameters.items():
            shape = getattr(parameter, "ds_shape", parameter.shape)
            if not args.random_weights:
                stored = open_once(args.weight_files[name], readers, opened).get_slice(name)
            else:
                stored = RandomMatrix(name, shape, args.seed) if len(shape) == 2 else None
            if hasattr(parameter, "ds_tensor") and parameter.ds_tensor.final_location is None:  # not on a disk
                copy_run(parameter, stored)
            else:
                with runtime.gathered(parameter, to_set=True):
                    copy_part(parameter, stored)
            bar.update(held_bytes(parameter))
    runtime.say(f"loaded {for_people('_bytes', mine)} per rank in {time.perf_counter() - started:.1f} s")


def copy_part(parameter: Tensor, stored) -> None:
    """Copy this rank's part of a tensor, some rows at a time. `stored` None: a norm, which starts at one."""
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    if stored is None:
        local.fill_(1)
        return
    rows, *columns = own_part(parameter)
    step = max(1, CHUNK // math.prod(parameter.shape[1:]))
    for begin in range(rows.start, rows.stop, step):
        end = min(begin + step, rows.stop)
        local[begin - rows.start : end - rows.start].copy_(stored[(slice(begin, end), *columns)])


def copy_run(parameter: Tensor, stored) -> None:
    """Copy this rank's part of a tensor that DeepSpeed has cut: of all its numbers, row after row, the rank-th run.

    Gathered to be filled, as DeepSpeed's manual has it, every rank would hold the tensor twice."""
    own = parameter.ds_tensor
    if stored is None:
        own.fill_(1)
        return
    rows, *rest = parameter.ds_shape
    width = math.prod(rest)
    begin = dist.get_rank() * own.numel()
    end = min(begin + own.numel(), parameter.ds_numel)  # the last runs are padded
    step = max(1, CHUNK // width)
    for row in range(begin // width, -(-end // width), step):
        part = (slice(row, min(row + step, rows)), *(slice(0, size) for size in rest))
        numbers = stored[part].flatten()
        low, high = max(begin, row * width), min(end, row * width + len(numbers))
        own[low - begin : high - begin].copy_(numbers[low - row * width : high - row * width])


def open_once(file: Path, readers: dict, opened: ExitStack):
    """A mapped file: what is read of it is a copy, and the rest stays on the disk."""
    from safetensors import safe_open

    if file not in readers:
        readers[file] = opened.enter_context(safe_open(file, "pt"))
    return readers[file]


def held_bytes(parameter: Tensor) -> int:
    """What this rank holds of a parameter: all, or its part of a DTensor or of one that DeepSpeed has cut."""
    if hasattr(parameter, "ds_tensor"):
        return parameter.ds_tensor.nbytes
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).nbytes


def bytes_per_step(net: nn.Module) -> int:
    """What a decode step reads here: all weights, of an embedding that is not the head as well only a row."""
    weights = dict(net.named_parameters())
    if "lm_head.weight" in weights:  # else tied, and named but once
        weights.pop("model.embed_tokens.weight", None)
    return sum(held_bytes(weight) for weight in weights.values())
