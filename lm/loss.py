"""Compute a Transformer's loss chunk by chunk, for --loss chunked of the training scripts.

07_memory_tricks/chunked_loss.py explains it and has the same function, for a mean.
torch.nn.functional.linear_cross_entropy (torch 2.13) has it, too, but rounds the loss of bf16
hidden states to bf16.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from lm.model import Transformer
from training.batches import PADDING

CHUNKS = 8  # of a micro-batch. The logits of one chunk exist at once


class ChunkedCrossEntropy(torch.autograd.Function):
    """Compute the sum of the losses, and its gradients in forward, while the logits exist."""

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
        # hidden is [tokens, hidden], head is [vocabulary, hidden], targets is [tokens].
        weight = head.to(hidden.dtype)  # under autocast: hidden states in bf16, weights in fp32
        wants_hidden, wants_head, _ = ctx.needs_input_grad
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        head_gradient = torch.zeros_like(head) if wants_head else None  # a frozen head has none
        chunk_tokens = max(1, -(-len(hidden) // CHUNKS))
        total = torch.zeros((), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                total += one_chunk(
                    hidden[rows],
                    weight,
                    targets[rows],
                    None if hidden_gradient is None else hidden_gradient[rows],
                    head_gradient,
                )
        ctx.save_for_backward(hidden_gradient, head_gradient)
        return total

    @staticmethod
    def backward(ctx, loss_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        # In place: a second backward raises an error instead of scaling twice.
        hidden_gradient, head_gradient = ctx.saved_tensors
        for gradient in (hidden_gradient, head_gradient):
            if gradient is not None:
                gradient.mul_(loss_gradient)
        return hidden_gradient, head_gradient, None


def one_chunk(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    hidden_gradient: Tensor | None,
    head_gradient: Tensor | None,
) -> Tensor:
    """Return the sum of a chunk's losses. Set hidden_gradient and add to head_gradient, if given.

    It is a function so that its tensors are freed before the next chunk allocates its own.
    """
    counted = (targets != PADDING)[:, None]  # [chunk, 1]
    index = targets[:, None].where(counted, 0)
    # One expression, so that 16-bit logits are freed. log_softmax(dtype=) would keep them.
    log_probabilities = F.log_softmax(F.linear(hidden, weight).float(), dim=-1)
    at_target = log_probabilities.gather(1, index)  # [chunk, 1]
    if hidden_gradient is not None or head_gradient is not None:
        # softmax - one-hot, [chunk, vocabulary]. expm1(log p) is p - 1, exact near 1.
        logits_gradient = log_probabilities.exp_().scatter_(1, index, at_target.expm1())
        logits_gradient = logits_gradient.to(hidden.dtype)
        if hidden_gradient is not None:
            torch.mul(logits_gradient @ weight, counted, out=hidden_gradient)
        if head_gradient is not None:
            counted_hidden = hidden * counted
            if head_gradient.dtype == hidden.dtype:
                head_gradient.addmm_(logits_gradient.T, counted_hidden)  # without a temporary
            else:
                head_gradient += logits_gradient.T @ counted_hidden
    return -at_target.where(counted, 0).sum()


# torch.compile would unroll the loop. Its graph ends here, and goes on behind the loss.
@torch.compiler.disable
def chunked_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """Return the cross-entropy in fp32 over targets other than -100, as a "mean" or a "sum".

    hidden is [batch, tokens, hidden], head is [vocabulary, hidden], targets is [batch, tokens]. The
    mean is NaN if every target is -100.
    """
    hidden = hidden.flatten(0, 1)
    targets = targets.flatten()
    # Here, because grad mode is always off in Function.forward. An evaluation needs no gradient.
    if not torch.is_grad_enabled():
        hidden = hidden.detach()
        head = head.detach()
    loss = ChunkedCrossEntropy.apply(hidden, head, targets)
    if reduction == "mean":
        loss = loss / (targets != PADDING).sum()
    return loss


def use_loss(model: Transformer, method: str) -> None:
    """Make a model compute its loss by a method: "plain", as it does, or "chunked"."""
    if method == "chunked":
        replace_loss(model, chunked_cross_entropy)


def replace_loss(
    model: Transformer, cross_entropy: Callable[[Tensor, Tensor, Tensor, str], Tensor]
) -> None:
    """Make a model compute its loss with cross_entropy(hidden, head, targets, reduction).

    The function runs within the forward of lm_head: hooks of fully_shard and DeepSpeed gather the
    weight of the head only there.
    """
    head = model.lm_head
    logits = head.forward

    def logits_or_loss(hidden: Tensor, targets: Tensor | None = None, reduction="mean") -> Tensor:
        if targets is None:
            return logits(hidden)
        return cross_entropy(hidden, head.weight, targets, reduction)

    def loss(hidden: Tensor, targets: Tensor, reduction: str) -> Tensor:
        return head(hidden, targets, reduction)

    head.forward = logits_or_loss
    model.loss = loss  # type: ignore[method-assign]
