"""What train_zero.py does beside the concept: DeepSpeed imported in silence, its checkpoints, and who holds what."""

import importlib.util
import logging
import math
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

from common import runtime
from common.exits import UserError
from lm import checkpoint, runs
from lm.weights import hash_rows, open_weights, random_weight


def check_flags(args) -> None:
    """UserError for flags that contradict each other, or without DeepSpeed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("train_zero.py needs the package deepspeed: pip install deepspeed==0.19.8")
    if args.dtype == "fp16":
        raise UserError("--dtype fp16: 05_ddp/train.py has a GradScaler; use bf16 or fp32 here")
    # what the ranks share can be moved
    lowest_stage = {"none": 0, "optimizer": 1, "params": 3}[args.offload]
    if args.stage < lowest_stage:
        raise UserError(
            f"--offload {args.offload} with --stage {args.stage}: use --stage {lowest_stage} or more"
        )
    if args.async_save:
        raise UserError(
            "--async-save: DeepSpeed writes its own files while training waits; leave it out"
        )


def import_deepspeed(device: torch.device):
    """The package, for this device and in the process group that is there."""
    # read by the import; left alone it takes a GPU wherever it sees one
    os.environ["DS_ACCELERATOR"] = device.type
    # read by zero.Init, also where one process was started without torchrun
    os.environ.setdefault("LOCAL_RANK", "0")
    logging.disable(logging.WARNING)  # DeepSpeed logs to stdout, and its import does
    import deepspeed

    # names that torch has since changed
    warnings.filterwarnings("ignore", "`torch.distributed.", FutureWarning)
    # on a CPU it would compile an all-reduce through shared memory, for two minutes; only its inference uses that
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    return deepspeed


@torch.no_grad()
def set_weights(deepspeed, net: nn.Module, name: str, seed: int) -> None:
    """Fill the model as weights.materialize does, for stage 3: one tensor at a time is whole."""
    stored = open_weights(name, net.config)
    for path, parameter in net.named_parameters():
        if stored is None:
            weight = random_weight(path, parameter.ds_shape, seed)
        else:
            weight = stored.read(path)
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(weight)


class Run(checkpoint.Run):
    """A run's folder whose checkpoints are DeepSpeed's files, which zero_to_fp32 and ds_to_universal read. DeepSpeed
    writes them to their final place. Here they go to a temporary name, which becomes step-N when all are there."""

    def _write_files(self, folder: Path, engine, config: dict) -> dict[str, str]:
        try:
            engine.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)
            if runtime.is_rank0():
                checkpoint.write_json(folder / "config.json", config)
        except RuntimeError as error:  # "unexpected pos" is what torch.save makes of a full disk
            raise (OSError(error) if "unexpected pos" in str(error) else error) from None
        runtime.all_gather(None)  # all files are there: each rank hashes some
        files = sorted(file for file in folder.iterdir() if file.is_file())
        return {
            file.name: runs.file_sha256(file)
            for file in files[dist.get_rank() :: dist.get_world_size()]
        }


def make_universal(path: Path, stage: int) -> Path | None:
    """Where ranks differ from those that have saved `path`: its tensors whole, one in a file, made by DeepSpeed's own
    program. None where none is needed."""
    if stage == 0 or len(list(path.glob("*_optim_states.pt"))) == dist.get_world_size():
        return None
    # Run clears away what ends in .tmp
    folder = path.with_name(f"{path.name}-universal.tmp") / "step"
    words = ["--input_folder", str(path), "--output_folder", str(folder), "--inject_missing_state"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *words]
    runtime.on_rank0(lambda: subprocess.run(command, check=True, stdout=subprocess.DEVNULL))
    return folder


def load(path: Path, engine, universal: Path | None) -> int:
    """Load a checkpoint, or what has been made of it for other ranks; returns its step."""
    source = universal or path
    weight_decays = [group["weight_decay"] for group in engine.optimizer.param_groups]
    loaded, _ = engine.load_checkpoint(str(source.parent), tag=source.name)
    # it would train on from random weights
    assert loaded is not None, f"DeepSpeed found no checkpoint in {source}"
    groups = engine.optimizer.param_groups  # load_checkpoint has replaced the list
    scheduler = engine.lr_scheduler
    for group, weight_decay in zip(groups, weight_decays, strict=True):
        # a universal load at stage 3 gives every group those of the first
        group["weight_decay"] = weight_decay
    for state in engine.basic_optimizer.state.values():
        if "step" in state:
            # and every group one counter, which each then counts up
            state["step"] = state["step"].clone()
    for group, lr, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = lr * factor(scheduler.last_epoch)  # the saved one, unless --steps has changed
    runtime.all_gather(None)  # all have read it
    if universal and runtime.is_rank0():
        shutil.rmtree(universal.parent)
    return int(path.name.removeprefix("step-"))


@torch.no_grad()
def digest(deepspeed, net: nn.Module) -> str:
    """weights.digest of the whole model: at stage 3 each parameter is gathered in turn, so every rank must call this."""
    total = 0
    for name, parameter in net.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):  # of a whole one it does nothing
            total += hash_rows(name, parameter)
    return f"{total % 2**256:064x}"


def check_parts(engine, stage: int) -> dict[str, list[int]]:
    """The bytes of weights and of AdamW's two moments by rank. AssertionError if a rank holds anything but its part.
    Stages 1 and 2 lay a group of parameters end to end and cut it into equal parts of an even number of elements.
    Stage 3 cuts each parameter. What comes last is padded."""
    ranks = dist.get_world_size()
    weights = list(engine.module.parameters())
    groups = [
        sum(p.numel() for p in weights if (p.ndim >= 2) == matrices) for matrices in (True, False)
    ]
    weights_due = sum(groups)
    part = sum(2 * math.ceil(size / (2 * ranks)) for size in groups) if stage else weights_due
    if stage == 3:
        whole = [tuple(p.ds_shape) for p in weights if p.numel() and not p.ds_persist]
        assert not whole, f"gathered and not forgotten: {whole}"
        weights_due = part = sum(math.ceil(parameter.ds_numel / ranks) for parameter in weights)
        weights = [parameter.ds_tensor for parameter in weights]
    moments = [
        t for state in engine.basic_optimizer.state.values() for t in state.values() if t.ndim
    ]
    held = [sum(tensor.nbytes for tensor in tensors) for tensors in (weights, moments)]
    due = [4 * weights_due, 8 * part]
    assert held == due, f"{held} bytes are here, {due} are due"
    by_rank = map(list, zip(*runtime.all_gather(held), strict=True))
    return dict(zip(("parameter_bytes_per_rank", "optimizer_bytes_per_rank"), by_rank, strict=True))
