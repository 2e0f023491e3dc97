"""Cross-entropy without the whole logits tensor: the largest tensor of a step, made and forgotten in pieces.

A head with a vocabulary of V gives V logits per token. For N tokens the plain loss holds three fp32 tensors of N x V at
once, in backward: log-softmax, its gradient, and the gradient of the logits. Together 12 N V bytes: 25 GB for 16,384
tokens and the 128,256 entries of Llama 3. But a token's loss needs that token's logits alone. So a loop takes a chunk
of tokens, computes logits, loss and the gradient of the logits, adds from it to the gradients of hidden states and
head, and uses the memory again for the next chunk. Gradients are computed in forward, while the logits are there. Each
of the three matmuls takes 2 N V H FLOPs, H being the hidden size: 6 N V H. Logits computed anew in backward: 8.

    laptop    python 07_memory_tricks/chunked_loss.py
    one GPU   python 07_memory_tricks/chunked_loss.py --tokens 16384 --hidden-size 2048 --chunk-tokens 512 --dtype bf16
    cluster   one process is all it uses: every rank has its own tokens, and the same loss

Look for: memory and time beside the plain loss's; torch's linear_cross_entropy, which is chunked only if it is given
options; what torch.compile alone saves. Small chunks are slow: each reads and writes the whole V x H gradient of the
head. Before: gradient_accumulation.py. Next:
optimizer_memory.py.
"""

import os
import shutil
import sys
import sysconfig
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits, measure, report
from lm.data import PADDING

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def plain_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The last lines of lm/model.py: all logits, then their mean loss in fp32. Targets of PADDING do not count."""
    return F.cross_entropy(F.linear(hidden, head).float(), targets, ignore_index=PADDING)


def chunked_cross_entropy(
    hidden: Tensor, head: Tensor, targets: Tensor, chunk_tokens: int
) -> Tensor:
    """The same, of hidden states [tokens, hidden], a head [vocabulary, hidden] and targets [tokens]."""
    # checked here, as grad mode is always off inside Function.forward: an evaluation must not pay for gradients
    if not torch.is_grad_enabled():
        hidden, head = hidden.detach(), head.detach()
    return ChunkedCrossEntropy.apply(hidden, head, targets, chunk_tokens)


class ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        weights = head.to(hidden.dtype)  # under autocast: hidden states in bf16, weights in fp32
        # a frozen head, as in LoRA, saves a third of the matmuls
        wants_hidden, wants_head, *_ = ctx.needs_input_grad
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        head_gradient = torch.zeros_like(head) if wants_head else None
        total = torch.zeros((), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                hidden_rows = hidden_gradient[rows] if wants_hidden else None
                total += chunk_loss(
                    hidden[rows], weights, targets[rows], hidden_rows, head_gradient
                )
        count = (targets != PADDING).sum()
        ctx.save_for_backward(count, hidden_gradient, head_gradient)
        return total / count

    @staticmethod
    def backward(ctx, loss_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """The gradients are there. What is missing is the division by the count, and what follows the loss: a loss
        scale, or the number of micro-batches. In place: a second backward raises an error, it does not scale twice."""
        count, hidden_gradient, head_gradient = ctx.saved_tensors
        # without any target the gradients are 0, as in the plain loss
        factor = loss_gradient / count.clamp(min=1)
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
    """The sum of a chunk's losses. Its gradients: hidden_gradient is set, and head_gradient added to, if given.

    A function of its own, because its tensors must be gone before the next chunk makes its."""
    counted = (targets != PADDING)[:, None]
    index = targets[:, None].where(counted, 0)
    logits = F.linear(hidden, weights)
    log_probabilities = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    at_target = log_probabilities.gather(1, index)
    if hidden_gradient is not None or head_gradient is not None:
        # The gradient of the logits is softmax - one-hot. It takes their memory. expm1(log p) is p - 1, exact near 1.
        logits_gradient = torch.exp(log_probabilities, out=logits)
        logits_gradient.scatter_(1, index, at_target.expm1().to(logits.dtype))
        if hidden_gradient is not None:
            torch.mul(logits_gradient @ weights, counted, out=hidden_gradient)
        if head_gradient is not None:
            add_matmul(head_gradient, logits_gradient.T, hidden * counted)
    return -at_target.where(counted, 0).sum()


def add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b. If the types match, addmm_ adds to total without a temporary for a @ b."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)  # bf16 weights get a bf16 sum, which is rounded once per chunk
    else:
        total += a @ b


def ways_to_compute(chunk_tokens: int, device: torch.device) -> dict[str, Callable]:
    """The loss functions by name, the plain one first. Says which are left out here, and why."""
    ways = {"plain": plain_cross_entropy}
    has_compiler = shutil.which("g++") and Path(sysconfig.get_path("include"), "Python.h").exists()
    if device.type == "cuda" or has_compiler:
        ways["plain, compiled"] = torch.compile(plain_cross_entropy, dynamic=False)
    else:
        print("left out: plain, compiled (torch.compile on a CPU needs g++ and Python.h)")
    ways["chunked, by hand"] = partial(chunked_cross_entropy, chunk_tokens=chunk_tokens)
    if hasattr(F, "linear_cross_entropy"):
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_tokens)
        ways["torch, no options"] = partial(F.linear_cross_entropy, ignore_index=PADDING)
        ways["torch, chunked"] = partial(
            F.linear_cross_entropy, ignore_index=PADDING, options=options
        )
    else:
        print(
            f"left out: torch's linear_cross_entropy (torch {torch.__version__} does not have it, 2.13 does)"
        )
    return ways


def random_batch(args, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states as the last norm leaves them, a head as it is initialised, and targets, a tenth of them padding."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden_size, generator=generator)
    head = 0.02 * torch.randn(args.vocab_size, args.hidden_size, generator=generator)
    targets = torch.randint(args.vocab_size, (args.tokens,), generator=generator)
    targets[: args.tokens // 10] = PADDING  # a batch of texts of unequal length has some
    dtype = DTYPES[args.dtype]
    return (
        hidden.to(device, dtype).requires_grad_(),
        head.to(device, dtype).requires_grad_(),
        targets.to(device),
    )


def forward_backward(
    way: Callable[..., Tensor], hidden: Tensor, head: Tensor, targets: Tensor
) -> list[Tensor]:
    hidden.grad = head.grad = None
    loss = way(hidden, head, targets)
    loss.backward()
    return [loss.detach(), hidden.grad, head.grad]


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """The most that a step holds over what is there before it. On a CPU by the allocator's own log: torch's chunked
    loss is one operator, into which measure.LiveBytes does not see."""
    if device.type == "cuda":
        memory = measure.LiveBytes(device=device)
        before = memory.now
        step()
        return memory.peak - before
    stderr = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the profiler writes lines about itself there
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
            step()
    finally:
        os.dup2(stderr, 2)
    events = [event for event in log.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    return max(accumulate((event.nbytes() for event in events), initial=0))


def run(
    name: str, way: Callable[..., Tensor], batch: tuple[Tensor, Tensor, Tensor], exact: list[Tensor]
) -> dict:
    """One way to compute the loss: its memory, and how far loss and gradients are from those of the plain loss."""
    hidden, head, _ = batch
    hidden.grad = head.grad = None
    step_bytes = peak_bytes(lambda: forward_backward(way, *batch), hidden.device)
    results = forward_backward(way, *batch)
    errors = [
        (a - b).norm() / (b.norm().item() or 1.0) for a, b in zip(results, exact, strict=True)
    ]
    return {
        "name": name,
        "loss": results[0].item(),
        "largest_relative_error": torch.stack([error.float() for error in errors]).max().item(),
        "gradient_bytes": hidden.grad.nbytes + head.grad.nbytes,
        "step_bytes": step_bytes,
    }


def plain_bytes(args) -> tuple[int, str]:
    """Of N tokens, a vocabulary of V and a hidden size of H; and the formula. Two moments can be the peak: backward of
    the loss (log-softmax, its gradient and that of the logits, in fp32), or of the head (the gradient of the logits, in
    the dtype of the matmuls, and the gradients of hidden states and head)."""
    element = DTYPES[args.dtype].itemsize
    logits = args.tokens * args.vocab_size
    gradients = element * args.hidden_size * (args.tokens + args.vocab_size)
    if element * logits + gradients > 12 * logits:
        return element * logits + gradients, f"{element} (N V + N H + V H)"
    return 12 * logits, "12 N V"


def check(rows: list[dict], args, tolerance: float) -> list[str]:
    for row in rows[1:]:
        error = row["largest_relative_error"]
        assert error <= tolerance, f"{row['name']}: loss and gradients are off by {error:.1e}"
    plain = rows[0]
    chunked = next(row for row in rows if row["name"] == "chunked, by hand")
    formula, in_words = plain_bytes(args)
    # what has a number per token, and the allocator's rounding
    few_bytes = formula // 100 + 16 * args.tokens + 4096
    assert abs(plain["step_bytes"] - formula) <= few_bytes, (
        f"{in_words} is {formula:,}, not {plain['step_bytes']:,}"
    )
    if args.dtype == "fp32":  # in bf16 a CPU's matmuls make copies of their own
        chunk = min(args.chunk_tokens, args.tokens)
        # logits, log-softmax, rows
        most = chunked["gradient_bytes"] + 8 * chunk * (args.vocab_size + args.hidden_size)
        most += 64 * (args.tokens + chunk) + 2**16  # what has a number per token
        assert chunked["step_bytes"] <= most, (
            f"the chunked loss takes {chunked['step_bytes']:,} bytes, not {most:,}"
        )
    share = plain["step_bytes"] / formula
    of_chunked, gradients = (chunked[key] / 2**20 for key in ("step_bytes", "gradient_bytes"))
    return [
        f"losses and gradients of all rows equal the plain loss's within {tolerance:g} (relative)",
        f"the plain loss takes {in_words} = {formula / 2**20:,.1f} MiB (measured: {share:.4f} of it)",
        f"the chunked loss takes {of_chunked:,.1f} MiB, {gradients:,.1f} of them the gradients",
    ]


def main() -> int:
    # Llama 3's vocabulary
    sizes = {"tokens": 512, "hidden_size": 256, "vocab_size": 128_256, "chunk_tokens": 64}
    args = report.lesson_flags(__doc__, **sizes, dtype=tuple(DTYPES), rounds=3)
    device = report.start_lesson(args.device)
    batch = random_batch(args, device)
    ways = ways_to_compute(args.chunk_tokens, device)
    steps = {name: partial(forward_backward, way, *batch) for name, way in ways.items()}
    seconds = measure.seconds_in_turns(steps, device, args.rounds)
    exact = forward_backward(plain_cross_entropy, *batch)
    rows = [run(name, way, batch, exact) | seconds[name] for name, way in ways.items()]
    for row in rows:
        row["step_bytes_ratio"] = row["step_bytes"] / rows[0]["step_bytes"]
    # sums of thousands of terms, which each kernel adds in another order
    tolerance = 2e-2 if args.dtype == "bf16" else 1e-6 if device.type == "cpu" else 1e-5
    checked = check(rows, args, tolerance)
    columns = {
        "name": "loss",
        "seconds": "time",
        "time_ratio": "of plain",
        "step_bytes": "memory of the step",
        "step_bytes_ratio": "of plain's",
        "largest_relative_error": "largest error",
    }
    loss, parameters = rows[0]["loss"], args.vocab_size * args.hidden_size
    own = {"parameters": parameters, "first_loss": loss, "last_loss": loss}
    report.end_lesson(rows, columns=columns, checked=checked, args=args, device=device, **own)
    return 0


if __name__ == "__main__":
    exits.run(main)
