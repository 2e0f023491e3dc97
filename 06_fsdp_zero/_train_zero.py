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

from common import checkpoint, model, runtime, shapes
from common.exits import UserError


def check_flags(args) -> None:
    """UserError for flags that contradict each other, or without DeepSpeed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("train_zero.py needs the package deepspeed: pip install deepspeed==0.19.8")
    if args.dtype == "fp16":
        raise UserError("--dtype fp16: 05_ddp/train.py has a GradScaler; use bf16 or fp32 here")
    if args.offload != "none" and args.stage == 0:
        raise UserError(f"--offload {args.offload}: stage 0 shares nothing that could be moved; use --stage 1, 2 or 3")
    if args.offload == "params" and args.stage < 3:
        raise UserError(f"--offload params: at --stage {args.stage} each rank computes with all weights; use --stage 3")
    if args.async_save:
        raise UserError("--async-save: DeepSpeed writes its own files while training waits; leave it out")


def import_deepspeed(device: torch.device):
    """The package, for this device and in the process group that is there."""
    os.environ["DS_ACCELERATOR"] = device.type  # read by the import; left alone it takes a GPU wherever it sees one
    os.environ.setdefault("LOCAL_RANK", "0")  # read by zero.Init, also where one process was started without torchrun
    logging.disable(logging.INFO)  # the import itself logs, to stdout
    import deepspeed

    logging.disable(logging.NOTSET)
    deepspeed.utils.logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed.", FutureWarning)  # names that torch has since changed
    # on a CPU it would compile an all-reduce through shared memory, for two minutes; only its inference uses that
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    return deepspeed


def same_timeouts() -> None:
    """Have DeepSpeed's groups wait as long as ours; it makes some with torch's own 30 minutes."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(runtime.timeout(), group)


def parameter_groups(net: nn.Module, weight_decay: float) -> list[dict]:
    """For AdamW: matrices decay, vectors do not."""
    matrices, vectors = [], []
    for parameter in net.parameters():
        dimensions = len(getattr(parameter, "ds_shape", parameter.shape))  # stage 3 has left a flat part of it
        (matrices if dimensions >= 2 else vectors).append(parameter)
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


@torch.no_grad()
def set_weights(deepspeed, net: nn.Module, name: str, seed: int) -> None:
    """What model.materialize does, for stage 3: one tensor at a time is whole."""
    import torch.distributed.checkpoint as dcp

    reader = None
    if shapes.has_weights(name):
        reader = dcp.HuggingFaceStorageReader(name)
        runtime.say(f"weights from the .safetensors files in {name}")
    for path, parameter in net.named_parameters():
        if reader is None:
            weight = model.random_weight(path, parameter.ds_shape, seed)
        else:
            weight = torch.empty(parameter.ds_shape, device="cpu")
            try:
                dcp.load({path: weight}, storage_reader=reader, no_dist=True)
            except dcp.api.CheckpointException as error:
                raise UserError(f"--model {name}: {path} cannot be read: {error}") from None
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            parameter.copy_(weight)


class Run(checkpoint.Run):
    """A run's folder whose checkpoints are DeepSpeed's files. By itself DeepSpeed writes them to their final place and
    loads what it finds. Here they go to a temporary name, which becomes step-N when every file is there with its hash.
    zero_to_fp32 and ds_to_universal read such a step."""

    def _write_part(self, folder: Path, engine, config: dict) -> dict[str, str]:
        try:
            engine.save_checkpoint(str(folder.parent), tag=folder.name, save_latest=False)
            torch.save(checkpoint.random_states(), folder / f"rng-{dist.get_rank()}.pt")
            if runtime.is_rank0():
                checkpoint.write_json(folder / "config.json", config)
        except (OSError, RuntimeError) as error:
            if isinstance(error, OSError) or "unexpected pos" in str(error):  # what torch.save makes of a full disk
                free = f"{shutil.disk_usage(self.folder).free / 2**20:.0f} MiB free there"
                raise UserError(f"cannot save {folder} ({free}): {error}; older checkpoints are untouched") from None
            raise
        runtime.gather(None)  # all files are there: each rank hashes some
        files = sorted(file for file in folder.iterdir() if file.is_file())
        return {file.name: checkpoint.file_sha256(file) for file in files[dist.get_rank() :: dist.get_world_size()]}

    def universal(self, path: Path, stage: int) -> Path | None:
        """Where ranks differ from those that have saved `path`: its tensors whole, one in a file, made by DeepSpeed's
        own program. None where none is needed."""
        if stage == 0 or len(list(path.glob("rng-*.pt"))) == dist.get_world_size():
            return None
        folder = path.with_name(f"{path.name}-universal.tmp") / "step"  # Run clears away what ends in .tmp
        runtime.on_rank0(lambda: make_universal(path, folder))
        return folder


def make_universal(path: Path, folder: Path) -> None:
    words = ["--input_folder", path, "--output_folder", folder, "--inject_missing_state"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        last_line = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise UserError(f"{path} cannot be turned into a universal checkpoint: {last_line}")


def load(path: Path, engine, universal: Path | None) -> int:
    """Load a checkpoint, or what has been made of it for other ranks; returns its step."""
    source = universal or path
    groups, scheduler = engine.optimizer.param_groups, engine.lr_scheduler
    weight_decays = [group["weight_decay"] for group in groups]
    loaded, _ = engine.load_checkpoint(str(source.parent), tag=source.name)
    assert loaded is not None, f"DeepSpeed found no checkpoint in {source}"  # it would train on from random weights
    for group, weight_decay in zip(groups, weight_decays, strict=True):
        group["weight_decay"] = weight_decay  # a universal load at stage 3 gives every group those of the first
    for state in engine.basic_optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()  # and every group one counter, which each then counts up
    for group, lr, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = lr * factor(scheduler.last_epoch)  # the saved one, unless --steps has changed
    own = path / f"rng-{dist.get_rank()}.pt"
    if own.exists():  # a rank that the saving job did not have keeps its own
        checkpoint.restore_random_states(torch.load(own, weights_only=False))
    runtime.gather(None)  # all have read it
    if universal and runtime.is_rank0():
        shutil.rmtree(universal.parent)
    return int(path.name.removeprefix("step-"))


@torch.no_grad()
def digest(deepspeed, net: nn.Module) -> str:
    """model.digest of the whole model: at stage 3 each parameter is gathered in turn, so every rank must call this."""
    total = 0
    for name, parameter in net.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter]):  # of a whole one it does nothing
            total += model.hash_rows(name, parameter)
    return f"{total % 2**256:064x}"


def check_parts(engine, stage: int) -> dict[str, list[int]]:
    """The bytes that each rank holds, in rank order: of weights, of AdamW's two moments, and of the fp32 copy of its
    part of the weights that DeepSpeed's optimizer updates from stage 1 on, also where the weights are in fp32.

    AssertionError if a rank holds anything but its part. Stages 1 and 2 lay a group of parameters end to end and cut it
    into equal parts of an even number of elements. Stage 3 cuts each parameter. What comes last is padded.
    """
    ranks, fp32 = dist.get_world_size(), 4
    parameters = list(engine.module.parameters())
    if stage == 3:
        whole = [tuple(p.ds_shape) for p in parameters if p.numel() and not p.ds_persist]
        assert not whole, f"gathered and not forgotten: {whole}"
        weights = [parameter.ds_tensor for parameter in parameters]
        weights_due = part = sum(math.ceil(parameter.ds_numel / ranks) for parameter in parameters)
    else:
        weights = parameters
        groups = [sum(p.numel() for p in parameters if (p.ndim >= 2) == matrices) for matrices in (True, False)]
        weights_due = sum(groups)
        part = sum(2 * math.ceil(size / (2 * ranks)) for size in groups) if stage else weights_due
    updated = engine.basic_optimizer.state  # the tensors that AdamW updates, each with its state
    known = {tensor.untyped_storage().data_ptr() for tensor in weights}
    copies = [tensor for tensor in updated if tensor.untyped_storage().data_ptr() not in known]
    moments = [t for state in updated.values() for t in state.values() if t.ndim]
    due = {
        "parameter_bytes_per_rank": (weights, weights_due),
        "optimizer_bytes_per_rank": (moments, 2 * part),
        "fp32_copy_bytes_per_rank": (copies, part if stage else 0),
    }
    held = {name: sum(tensor.nbytes for tensor in tensors) for name, (tensors, _) in due.items()}
    assert held == {name: fp32 * elements for name, (_, elements) in due.items()}, (held, part)
    by_rank = runtime.gather(held)
    return {name: [ranks_own[name] for ranks_own in by_rank] for name in held}
