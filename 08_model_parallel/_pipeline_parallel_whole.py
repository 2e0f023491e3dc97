"""What the schedules of pipeline_parallel.py must equal: one process with the whole model and the whole batch."""

import torch
import torch.nn.functional as F
from _pipeline_parallel_batches import Batch
from torch import Tensor, nn


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Divided by the tokens of the whole batch it adds up to the mean. Means of micro-batches do not."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def train_whole(net: nn.Module, batch: Batch, clip_norm: float) -> tuple[Tensor, Tensor]:
    """Loss and gradient norm of one process that has the whole model and the whole batch, which all must equal."""
    loss = summed_loss(net(torch.cat(batch.inputs)), torch.cat(batch.targets)) / batch.tokens
    loss.backward()
    norm = nn.utils.clip_grad_norm_(net.parameters(), clip_norm)
    return loss.detach(), norm
