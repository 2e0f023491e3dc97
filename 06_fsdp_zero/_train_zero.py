"""What train_zero.py needs around DeepSpeed: its checkpoints, and a check of the shards.

At stage 3 a parameter is an empty tensor, except while its module computes. DeepSpeed keeps what
belongs to it as attributes: ds_shape and ds_numel are those of the full parameter, ds_tensor is the
shard of this rank, flat and padded, and ds_persist says that the parameter is never sharded in use.
"""

import importlib.util
import math
import subprocess
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from common import files, report, runtime
from common.exits import UserError
from lm.weights import check_model
from training import checkpoint
from training.digest import hash_rows
from training.run_folder import file_sha256

LOWEST_STAGE = {"none": 0, "optimizer": 1, "params": 3}  # by --offload: only shards are offloaded


def check_flags(args) -> None:
    """Raise UserError if DeepSpeed is not installed, or if it cannot do what the flags say."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("train_zero.py needs the package deepspeed: pip install deepspeed==0.19.8")
    if args.dtype == "fp16":
        raise UserError("--dtype fp16: 05_ddp/train.py has a GradScaler; use bf16 or fp32 here")
    lowest_stage = LOWEST_STAGE[args.offload]
    if args.stage < lowest_stage:
        more = "" if lowest_stage == 3 else " or more"
        raise UserError(
            f"--offload {args.offload} with --stage {args.stage}: use --stage {lowest_stage}{more}"
        )
    if args.async_save:
        raise UserError(
            "--async-save: DeepSpeed writes its checkpoints while training waits; leave it out"
        )


def check_model_fits(args, world_size: int, device: torch.device) -> None:
    """Raise UserError if --model is not known, or if this node's memory is too small to train it.

    The optimizer of stages 1 and 2 has a second copy of the weights, which is sharded, as its state
    is. Their gradients are not counted.
    """
    if args.stage == 0:
        check_model(args.model, device, copies=world_size)
    elif args.stage == 3:
        check_model(args.model, device, copies=1)
    else:
        check_model(args.model, device, copies=1, bytes_per_parameter=4 * world_size + 12)


def set_timeouts() -> None:
    """Give the process groups that DeepSpeed has created the timeout of the job."""
    for group in dist.distributed_c10d._world.pg_map:
        runtime.set_timeout(group)


# --- weights


def full_shape(parameter: nn.Parameter) -> torch.Size:
    """Return the shape of the full parameter, also if it is sharded."""
    return getattr(parameter, "ds_shape", parameter.shape)


@torch.no_grad()
def digest(model: nn.Module) -> str:
    """Return the digest of the full model; every rank must call this.

    At stage 3 one parameter at a time is gathered. At other stages all of them are full.
    """
    import deepspeed

    total = 0
    for name, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):
            total += hash_rows(name, parameter)
    return f"{total % 2**256:064x}"


# --- checkpoints


class Run(checkpoint.Run):
    """Manage the folder of a run whose checkpoints DeepSpeed writes.

    zero_to_fp32 and ds_to_universal, the programs of DeepSpeed, read these checkpoints. As in
    training/checkpoint.py, the files are written to a folder that is renamed when it is complete.
    """

    def _write_files(self, folder: Path, engine, config: dict | None) -> dict[str, str]:
        """Write this rank's files to `folder`. Return the SHA-256 of its share of all files."""
        try:
            engine.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)
        except RuntimeError as error:
            # On a full disk, torch.save raises RuntimeError with these words.
            if "unexpected pos" in str(error):
                raise OSError(str(error)) from None
            raise
        if runtime.is_rank0() and config is not None:
            files.write_json(folder / "config.json", config)

        runtime.all_gather(None)  # now the files of all ranks are there
        rank, world_size, _ = runtime.ranks()
        written = []
        for file in sorted(folder.iterdir()):
            if file.is_file() and file.name != files.MARK:  # the mark goes when all is complete
                written.append(file)
        return {file.name: file_sha256(file) for file in written[rank::world_size]}


def make_universal(saved: Path, stage: int) -> Path | None:
    """Convert a checkpoint that another number of ranks has saved; every rank must call this.

    DeepSpeed can load it only in its universal form, which has a file per full tensor. Return the
    folder of that, or None if the checkpoint can be loaded as it is.
    """
    saved_by_ranks = len(list(saved.glob("*_optim_states.pt")))
    if stage == 0 or saved_by_ranks == dist.get_world_size():
        return None
    # If this process is killed, the next start deletes the folder.
    start = partial(files.start_folder, saved.with_name(f"{saved.name}-universal"))
    universal = runtime.on_rank0(start) / "step"
    # Without the option, Python warns that deepspeed has imported this module before it runs it.
    command = [sys.executable, "-W", "ignore::RuntimeWarning:runpy"]
    command += ["-m", "deepspeed.checkpoint.ds_to_universal"]
    command += ["--input_folder", str(saved), "--output_folder", str(universal)]
    command += ["--inject_missing_state"]
    convert = partial(subprocess.run, command, check=True, stdout=subprocess.DEVNULL)
    runtime.on_rank0(convert)
    return universal


def resume(engine, saved: Path, universal: Path | None) -> int:
    """Load a checkpoint, or its universal form, into the engine. Return its step.

    Every rank must call this. The universal form is removed afterwards.
    """
    source = saved if universal is None else universal
    weight_decays = [group["weight_decay"] for group in engine.optimizer.param_groups]
    loaded, _ = engine.load_checkpoint(str(source.parent), tag=source.name)
    # load_checkpoint does not raise, and the run would start again from random weights.
    assert loaded is not None, f"DeepSpeed found no checkpoint in {source}"
    groups = engine.optimizer.param_groups  # load_checkpoint has replaced the list

    # From the universal form, stage 3 of DeepSpeed 0.19.8 gives every group the weight decay of the
    # first. All groups also get the same tensor as their step count, which each then increases.
    for group, weight_decay in zip(groups, weight_decays, strict=True):
        group["weight_decay"] = weight_decay
    for state in engine.basic_optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()

    # --steps may change on a resume, and the schedule with it.
    scheduler = engine.lr_scheduler
    for group, base_lr, schedule in zip(
        groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = base_lr * schedule(scheduler.last_epoch)

    runtime.all_gather(None)  # now all ranks have read it
    if universal is not None and runtime.is_rank0():
        files.delete(universal.parent)
    return int(saved.name.removeprefix("step-"))


# --- the check


def check_shards(engine, stage: int) -> dict[str, list[int]]:
    """Assert that each rank holds its shards in fp32 and nothing else; return how many bytes.

    The result lists the bytes of weights and of AdamW's two moments by rank.
    """
    world_size = dist.get_world_size()
    parameters = list(engine.module.parameters())
    full_count = sum(math.prod(full_shape(parameter)) for parameter in parameters)

    if stage == 0:
        weights = parameters
        weight_count = full_count
        moment_count = full_count
    elif stage < 3:
        weights = parameters
        weight_count = full_count
        moment_count = _shard_of_groups(parameters, world_size)
    else:
        for parameter in parameters:
            freed = parameter.numel() == 0 or parameter.ds_persist
            assert freed, f"a weight of shape {tuple(parameter.ds_shape)} is still gathered"
        weights = [parameter.ds_tensor for parameter in parameters]
        weight_count = sum(math.ceil(parameter.ds_numel / world_size) for parameter in parameters)
        moment_count = weight_count

    moments = []
    for state in engine.basic_optimizer.state.values():
        moments += [value for value in state.values() if value.ndim > 0]  # not the step count
    return {
        "parameter_bytes_per_rank": _check_bytes(weights, "weights", weight_count, full_count),
        "optimizer_bytes_per_rank": _check_bytes(
            moments, "optimizer state", 2 * moment_count, 2 * full_count
        ),
    }


def _shard_of_groups(parameters: list[nn.Parameter], world_size: int) -> int:
    """Return how many elements stages 1 and 2 give to each rank.

    All matrices are put into one flat tensor and all vectors into another. Each is padded, so that
    every rank gets the same number of its elements, an even one.
    """
    count = 0
    for is_matrix in (True, False):
        sizes = [p.numel() for p in parameters if (p.ndim >= 2) == is_matrix]
        count += 2 * math.ceil(sum(sizes) / (2 * world_size))
    return count


def _check_bytes(tensors: list, what: str, expected_count: int, full_count: int) -> list[int]:
    """Assert that this rank holds so many numbers in fp32; return the bytes of all ranks."""
    local_bytes = sum(tensor.nbytes for tensor in tensors)
    assert local_bytes == 4 * expected_count, f"{local_bytes} bytes, not {4 * expected_count}"
    bytes_per_rank = runtime.all_gather(local_bytes)
    held = report.for_people("bytes", local_bytes)
    full = report.for_people("bytes", 4 * full_count)
    runtime.print0(f"checked: each rank holds {held} of {full} of {what}, in {torch.float32}")
    return bytes_per_rank
