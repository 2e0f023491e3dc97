"""DeepSpeed as train_zero.py wants it: asked for by name, silent, and compiling nothing."""

import importlib.util
import logging
import math
import os
import warnings

import torch
import torch.distributed as dist

from old import runtime
from old.exits import UserError


def check_flags(args) -> None:
    """UserError for flags that contradict each other, or without DeepSpeed."""
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("train_zero.py needs the package deepspeed: pip install deepspeed==0.19.8")
    if args.offload != "none" and args.stage == 0:
        raise UserError(f"--offload {args.offload}: stage 0 shares nothing that could be moved; use --stage 1, 2 or 3")
    if args.offload == "params" and args.stage < 3:
        raise UserError(f"--offload params: at --stage {args.stage} each rank computes with all weights; use --stage 3")
    if args.nvme is not None:
        check_nvme_flags(args)
    if args.stage == 0 and args.dtype == "fp16":
        raise UserError(
            "--stage 0 --dtype fp16: DeepSpeed's fp16 optimizer without ZeRO does not follow AdamW; use --stage 1"
        )


def check_nvme_flags(args) -> None:
    if args.stage < 3:
        raise UserError(f"--nvme {args.nvme}: at --stage {args.stage} DeepSpeed keeps it in memory; use --stage 3")
    if args.offload == "none":
        raise UserError(f"--nvme {args.nvme}: nothing would go there; add --offload optimizer or --offload params")
    for flag, given in (
        ("--save-every", args.save_every),
        ("--resume", args.resume),
        ("--async-save", args.async_save),
    ):
        if given:
            raise UserError(
                f"--nvme {args.nvme} with {flag}: DeepSpeed cannot resume a run whose state was in files; its weights "
                "alone are saved, at the end"
            )


def parameter_groups(net: torch.nn.Module, weight_decay: float) -> list[dict]:
    """For AdamW: matrices decay, vectors do not."""
    matrices, vectors = [], []
    for parameter in net.parameters():
        dimensions = len(getattr(parameter, "ds_shape", parameter.shape))  # stage 3 has left a flat part of it
        (matrices if dimensions >= 2 else vectors).append(parameter)
    return [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]


def warmup_cosine(step: int, warmup_steps: int, steps: int) -> float:
    """Factor on --lr for 0-based step: up in a line, down to a tenth along a cosine."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return 0.55 + 0.45 * math.cos(math.pi * done)


def import_deepspeed(device: torch.device, args):
    """The package, for this device and in the process group that is there. UserError for what it cannot do here."""
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
    if args.dtype == "fp16" and not deepspeed.accelerator.get_accelerator().is_fp16_supported():
        raise UserError(f"--dtype fp16: DeepSpeed has no fp16 for this {device.type}; use bf16 or fp32")
    return deepspeed


def same_timeouts() -> None:
    """Have DeepSpeed's groups wait as long as ours; it makes some with torch's own 30 minutes."""
    for group in dist.distributed_c10d._world.pg_map:
        dist.distributed_c10d._set_pg_timeout(runtime.collective_timeout(), group)
