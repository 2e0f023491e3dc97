"""Cross-entropy without the full logits: compute the largest tensor of a step chunk by chunk.

With a vocabulary of V, each token has V logits. For N tokens the plain loss holds three fp32
tensors of [N, V] at once in backward: log-softmax, its gradient, and the gradient of the logits.
Together they take 12 N V bytes: 25 GB for 16,384 tokens and the 128,256 entries of Llama 3.

But the loss of a token needs only its own logits. So a loop takes a chunk of tokens, computes their
logits, their loss and the gradient of the logits, adds from it to the gradients of hidden states
and head, and uses the memory again for the next chunk. Gradients are computed in forward, while the
logits exist. With a hidden size of H each of the three matmuls takes 2 N V H FLOPs, so 6 N V H.
Computing the logits again in backward would make it 8 N V H.

    laptop    python 07_memory_tricks/chunked_loss.py
    one GPU   python 07_memory_tricks/chunked_loss.py --device cuda
              python 07_memory_tricks/chunked_loss.py --tokens 16384 --hidden-size 2048 \\
                  --chunk-tokens 512 --dtype bf16
    cluster   it uses one process only: every rank has its own tokens, and the same loss

What to look at: memory and time beside the plain loss's; torch's linear_cross_entropy, which is
chunked only if it is given options; what torch.compile alone saves. Small chunks are slow, because
each reads and writes the whole gradient of the head, [V, H]. Expected on an H100, at its own
default sizes: a sixth of the plain loss's memory, and by the data sheet's 67 TFLOP/s in fp32 at
least 36 ms for the matmuls of either.
Previous: gradient_accumulation.py. Next: optimizer_memory.py.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _chunked_loss as helper
import torch
import torch.nn.functional as F
from torch import Tensor

from common import hardware, lesson
from common.measure import seconds_in_turns
from training.batches import PADDING

# --- 1. the plain loss


def plain_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Compute all logits, then their mean loss in fp32, as lm/model.py does.

    hidden is [tokens, hidden], head is [vocabulary, hidden], targets is [tokens]. Targets of
    PADDING do not count.
    """
    logits = F.linear(hidden, head)  # [tokens, vocabulary]
    return F.cross_entropy(logits.float(), targets, ignore_index=PADDING)


# --- 2. chunk by chunk


class ChunkedCrossEntropy(torch.autograd.Function):
    """Compute the same loss, and its gradients in forward."""

    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        weights = head.to(hidden.dtype)  # under autocast: hidden states in bf16, weights in fp32
        # A frozen head, as in LoRA, saves a third of the matmuls.
        wants_hidden, wants_head, *_ = ctx.needs_input_grad
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        head_gradient = torch.zeros_like(head) if wants_head else None
        total = torch.zeros((), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                total += chunk_loss(
                    hidden[rows],
                    weights,
                    targets[rows],
                    hidden_gradient[rows] if wants_hidden else None,
                    head_gradient,
                )
        count = (targets != PADDING).sum()
        ctx.save_for_backward(count, hidden_gradient, head_gradient)
        return total / count

    @staticmethod
    def backward(ctx, loss_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        # What is missing is the division by the count and what follows the loss: a loss scale, or
        # the number of micro-batches. In place: a second backward raises instead of scaling twice.
        count, hidden_gradient, head_gradient = ctx.saved_tensors
        factor = loss_gradient / count.clamp(min=1)  # without targets gradients are 0, as above
        for gradient in (hidden_gradient, head_gradient):
            if gradient is not None:
                gradient.mul_(factor)
        return hidden_gradient, head_gradient, None, None


def chunk_loss(
    hidden: Tensor,
    weights: Tensor,
    targets: Tensor,
    hidden_gradient: Tensor | None,
    head_gradient: Tensor | None,
) -> Tensor:
    """Return the sum of a chunk's losses. Set hidden_gradient and add to head_gradient, if given.

    It is a function so that its tensors are freed before the next chunk allocates its own.
    """
    counted = (targets != PADDING)[:, None]  # [chunk, 1]
    index = targets[:, None].where(counted, 0)
    logits = F.linear(hidden, weights)  # [chunk, vocabulary]
    log_probabilities = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    at_target = log_probabilities.gather(1, index)  # [chunk, 1]
    if hidden_gradient is not None or head_gradient is not None:
        # The gradient of the logits is softmax - one-hot. It takes the memory of the logits.
        # expm1(log p) is p - 1, exact near 1.
        logits_gradient = torch.exp(log_probabilities, out=logits)
        logits_gradient.scatter_(1, index, at_target.expm1().to(logits.dtype))
        if hidden_gradient is not None:
            torch.mul(logits_gradient @ weights, counted, out=hidden_gradient)
        if head_gradient is not None:
            add_matmul(head_gradient, logits_gradient.T, hidden * counted)
    return -at_target.where(counted, 0).sum()


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a @ b to `total`. If the types match, addmm_ does so without a temporary for a @ b."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)  # bf16 weights get a bf16 sum, which is rounded once per chunk
    else:
        total += a @ b


def chunked_cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, chunk_tokens: int
) -> Tensor:
    """Return the loss of plain_cross_entropy, with chunks of this many tokens."""
    # Here, because grad mode is always off in Function.forward. An evaluation computes no gradient.
    if not torch.is_grad_enabled():
        hidden = hidden.detach()
        head = head.detach()
    return ChunkedCrossEntropy.apply(hidden, head, targets, chunk_tokens)


# --- 3. all of them


def loss_functions(chunk_tokens: int, device: torch.device) -> dict[str, Callable]:
    """Return the loss functions by name, the plain one first. Print what is left out, and why."""
    losses = {"plain": plain_cross_entropy}
    if hardware.can_compile(device):
        losses["plain, compiled"] = torch.compile(plain_cross_entropy, dynamic=False)
    else:
        print("left out: plain, compiled (torch.compile on a CPU needs g++ and Python.h)")
    losses[helper.CHUNKED] = partial(chunked_cross_entropy, chunk_tokens=chunk_tokens)
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_tokens)
        theirs = partial(F.linear_cross_entropy, ignore_index=PADDING)
        losses["torch, no options"] = theirs
        losses["torch, chunked"] = partial(theirs, options=options)
    else:
        print(
            "left out: torch's linear_cross_entropy "
            f"(torch {torch.__version__} does not have it, 2.13 does)"
        )
    return losses


def forward_backward(
    loss_function: Callable[..., Tensor], hidden: Tensor, head: Tensor, targets: Tensor
) -> list[Tensor]:
    """Return the loss and the gradients of hidden states and head."""
    hidden.grad = None
    head.grad = None
    loss = loss_function(hidden, head, targets)
    loss.backward()
    return [loss.detach(), hidden.grad, head.grad]


def run(
    name: str,
    loss_function: Callable[..., Tensor],
    batch: tuple[Tensor, Tensor, Tensor],
    exact: list[Tensor],
) -> dict:
    """Return the memory of a loss, and how far it and its gradients are from the plain ones."""
    hidden, head, _ = batch
    hidden.grad = None
    head.grad = None
    one_step = partial(forward_backward, loss_function, *batch)
    step_bytes = helper.peak_bytes(one_step, hidden.device)
    results = one_step()
    return {
        "name": name,
        "loss": results[0].item(),
        "largest_relative_error": helper.largest_error(results, exact),
        "gradient_bytes": hidden.grad.nbytes + head.grad.nbytes,
        "step_bytes": step_bytes,
    }


def main() -> int:
    args = lesson.parse_flags(
        __doc__,
        gpu={"tokens": 3072, "hidden_size": 1024, "chunk_tokens": 256},
        tokens=512,
        hidden_size=256,
        vocab_size=128_256,  # Llama 3's
        chunk_tokens=64,
        dtype=("fp32", "bf16"),
        rounds=3,
    )
    device = lesson.start(args.device)
    batch = helper.random_batch(args, device)
    losses = loss_functions(args.chunk_tokens, device)
    steps = {name: partial(forward_backward, loss, *batch) for name, loss in losses.items()}
    seconds = seconds_in_turns(steps, device, args.rounds)
    exact = forward_backward(plain_cross_entropy, *batch)

    rows = []
    for name, loss_function in losses.items():
        row = run(name, loss_function, batch, exact)
        row |= seconds[name]
        rows.append(row)
    for row in rows:
        row["step_bytes_ratio"] = row["step_bytes"] / rows[0]["step_bytes"]
    tolerance = helper.tolerance_of(args.dtype, device)
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=helper.check(rows, args, tolerance),
        args=args,
        device=device,
        parameters=args.vocab_size * args.hidden_size,
        first_loss=rows[0]["loss"],
        last_loss=rows[0]["loss"],
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
