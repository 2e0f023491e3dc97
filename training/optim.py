"""The optimizer of the training scripts, AdamW, its schedule, and clipping on several meshes."""

import math
from collections.abc import Iterable
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from common.runtime import full_tensor


def adamw(
    net: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    warmup_steps: int,
    steps: int,
    schedule: str = "cosine",
) -> tuple[torch.optim.AdamW, LambdaLR]:
    """Create AdamW and its learning-rate schedule.

    Only parameters that require gradients are optimized. Weight decay applies to parameters with
    two or more dimensions. Vectors, which are norm weights and biases, get none: a norm weight
    starts at 1 and scales its layer's input, and decay would pull it towards 0.

    Args:
        lr: Peak learning rate, which the warm-up ends with.
        weight_decay: Weight decay of the matrices.
        warmup_steps: Optimizer steps of the warm-up.
        steps: Optimizer steps of the whole run.
        schedule: "constant", "linear" or "cosine": see lr_factor.

    Returns:
        The optimizer and the scheduler. Call scheduler.step() after each optimizer step.
    """
    matrices = []
    vectors = []
    for parameter in net.parameters():
        if not parameter.requires_grad:
            continue
        if parameter.ndim >= 2:
            matrices.append(parameter)
        else:
            vectors.append(parameter)

    groups = []
    if matrices:
        groups.append({"params": matrices, "weight_decay": weight_decay})
    if vectors:
        groups.append({"params": vectors, "weight_decay": 0.0})

    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    factor = partial(lr_factor, schedule=schedule, warmup_steps=warmup_steps, steps=steps)
    return optimizer, LambdaLR(optimizer, factor)


def lr_factor(step: int, schedule: str, warmup_steps: int, steps: int) -> float:
    """Return the factor on the peak learning rate at a step, counted from 0.

    The factor rises linearly and reaches 1 at the last step of the warm-up. Then it depends on the
    schedule: "constant" stays at 1, "linear" falls to 0 at `steps`, and "cosine" falls along half a
    cosine to 0.1 at `steps`.
    """
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    if schedule == "constant":
        return 1.0
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))  # from 0 to 1
    if schedule == "linear":
        return 1.0 - done
    return 0.55 + 0.45 * math.cos(math.pi * done)


def clip_grad_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    stages: dist.ProcessGroup | None = None,
) -> Tensor:
    """Clip gradients by their norm over all ranks, and return the norm.

    torch takes the norm of gradients on one mesh. Experts may be on a mesh of their own. If ranks
    clipped by the norm of their own experts, or stages by their own norm, they would scale their
    gradients by different factors.

    Args:
        parameters: DTensors, on one mesh or on several.
        max_norm: The largest norm.
        stages: The ranks that have the other stages of a pipeline.
    """
    parameters_of_mesh: dict = {}
    for parameter in parameters:
        if parameter.grad is not None:
            parameters_of_mesh.setdefault(parameter.device_mesh, []).append(parameter)
    norms = []
    for group in parameters_of_mesh.values():
        gradients = [parameter.grad for parameter in group]
        # over tensor ranks, expert ranks and shards, each gradient once
        norms.append(full_tensor(nn.utils.get_total_norm(gradients)))
    norm = torch.stack(norms).norm() if len(norms) > 1 else norms[0]
    if stages is not None:
        squared_norm = norm**2
        dist.all_reduce(squared_norm, group=stages)
        norm = squared_norm.sqrt()
    for group in parameters_of_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, norm)
    return norm
