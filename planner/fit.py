"""Set --micro-batch-size of a training script to what fits on its GPUs, and explain out of memory.

The only file of planner/ that asks the GPUs of this job.
"""

import argparse
from dataclasses import replace
from functools import partial

from common import exits, runtime
from lm.shapes import Config
from planner import micro_batch
from planner.plan import Plan
from planner.shape import Shape, from_config

GIB = 2**30


def fit_micro_batch(
    args: argparse.Namespace,
    config: Config,
    device,
    *,
    gpus: int,
    zero: int = 0,
    deepspeed: bool = False,
    tp: int = 1,
    pp: int = 1,
    cp: int = 1,
    replicate: int = 1,
    schedule: str = "1f1b",
    reshard_after_forward: bool = True,
) -> int | None:
    """Return --micro-batch-size or, if it was not given, the largest size that fits on every GPU.

    On other devices than GPUs it is None, which means a rank's share of the batch. A resumed run
    keeps the size that it had, where that divides the share and fits. Every rank must call this.

    If the script runs out of memory later, its error message names what helps.

    Arguments:
        gpus: ranks of the job
        others: as in planner.plan.Plan
    """
    plan = Plan(
        gpus=gpus,
        zero=zero,
        deepspeed=deepspeed,
        tp=tp,
        pp=pp,
        cp=cp,
        replicate=replicate,
        schedule=schedule,
        reshard_after_forward=reshard_after_forward,
        seq_len=args.seq_len,
        dtype=args.dtype,
        compile=bool(args.compile),
        checkpointing=args.checkpointing,
        on_cpu=device.type != "cuda",
    )
    size = args.micro_batch_size
    if args.global_batch_size % plan.dp != 0:
        return size  # lm.data.Batches raises
    share = args.global_batch_size // plan.dp
    earlier = args.earlier_micro_batch_size
    if device.type != "cuda":
        if size is None and earlier is not None and share % earlier == 0:
            return earlier
        return size

    shape = from_config(args.model, config)
    try:
        if size is None:
            free_bytes = least_free_bytes(device)
            choice = micro_batch.choose(
                shape, plan, share=share, free_bytes=free_bytes, earlier=earlier
            )
            size = choice.size
            runtime.print0(
                f"micro-batch {choice.size}: {choice.planned_bytes / GIB:.1f} of "
                f"{free_bytes / GIB:.1f} GiB planned"
            )
    except ValueError:
        return size  # the script itself says what is wrong with its layout
    if share % size == 0:
        plan = micro_batch.with_size(plan, size, share)
        exits.out_of_memory_help.append(partial(what_helps, shape, plan, share))
    return size


def least_free_bytes(device) -> int:
    """Return the free memory of the GPU with the least free memory. Every rank must call this.

    What this process has reserved for itself counts as free.
    """
    import torch

    free_bytes, _ = torch.cuda.mem_get_info(device)
    return min(runtime.all_gather(free_bytes + torch.cuda.memory_reserved(device)))


def what_helps(shape: Shape, plan: Plan, share: int) -> str:
    """Return what a step needs, and the flags that make it less, the cheapest first."""
    needed = micro_batch.planned_bytes(shape, plan)
    cheaper = []
    size = plan.micro_batch_size
    if size % 2 == 0:
        halved = micro_batch.with_size(plan, size // 2, share)
        cheaper.append((f"--micro-batch-size {size // 2}", halved))
    if not plan.compile:
        cheaper.append(("--compile", replace(plan, compile=True)))
    if plan.checkpointing == "none":
        for checkpointing in ("selective", "full"):
            changed = replace(plan, checkpointing=checkpointing)
            cheaper.append((f"--checkpointing {checkpointing}", changed))

    flags = []
    for flag, changed in cheaper:
        changed_bytes = micro_batch.planned_bytes(shape, changed)
        if changed_bytes < needed:
            flags.append(f"{flag} ({changed_bytes / GIB:.1f} GiB)")
    if plan.is_fsdp:
        flags += ["more GPUs", "--cpu-offload"]
    else:
        flags.append("06_fsdp_zero/train_fsdp.py on several GPUs")
    return (
        f"a step with micro-batches of {size} is planned to need {needed / GIB:.1f} GiB per GPU; "
        f"what helps, the cheapest first: {', '.join(flags)}; 07_memory_tricks/estimate.py "
        "shows the parts"
    )
