"""AdamW, and the learning rate's warm-up and cosine."""

import math
from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR


def adamw_cosine(
    net: nn.Module, *, lr: float, weight_decay: float, warmup_steps: int, steps: int
) -> tuple:
    """The optimizer and its schedule; call scheduler.step() after each optimizer step. `lr` is the peak."""
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    # norms: decay would shrink them
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [
        {"params": p, "weight_decay": d} for p, d in ((matrices, weight_decay), (vectors, 0.0)) if p
    ]
    optimizer = torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=True)
    return optimizer, LambdaLR(
        optimizer, partial(warmup_cosine, warmup_steps=warmup_steps, steps=steps)
    )


def warmup_cosine(step: int, warmup_steps: int, steps: int) -> float:
    """Factor on the peak learning rate for 0-based `step`: up in a line, down to a tenth along a cosine."""
    if step < warmup_steps:
        return (step + 1) / warmup_steps
    done = min(1.0, (step - warmup_steps) / max(1, steps - warmup_steps))
    return 0.55 + 0.45 * math.cos(math.pi * done)
