"""The batch, the counted bytes, the table and the checks of chunked_loss.py."""

import os
from collections.abc import Callable
from itertools import accumulate

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from common import measure, runtime
from training.batches import PADDING

CHUNKED = "chunked, by hand"
COLUMNS = {
    "name": "loss",
    "seconds": "time",
    "time_ratio": "of plain",
    "step_bytes": "memory of the step",
    "step_bytes_ratio": "of plain's",
    "largest_relative_error": "largest error",
}


def random_batch(args, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden states [tokens, hidden], a head [vocabulary, hidden] and targets [tokens].

    The hidden states are as the last norm leaves them, the head is as it is initialized, and a
    tenth of the targets is padding, as in a batch of texts of unequal lengths.
    """
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden_size, generator=generator)
    head = 0.02 * torch.randn(args.vocab_size, args.hidden_size, generator=generator)
    targets = torch.randint(args.vocab_size, (args.tokens,), generator=generator)
    targets[: args.tokens // 10] = PADDING
    dtype = runtime.DTYPES[args.dtype]
    hidden = hidden.to(device, dtype).requires_grad_()
    head = head.to(device, dtype).requires_grad_()
    return hidden, head, targets.to(device)


# --- bytes


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """Return the most bytes that a step allocates beside what exists before it."""
    if device.type != "cuda":
        return peak_by_profiler(step)
    memory = measure.LiveBytes(device=device)
    bytes_before = memory.now
    step()
    return memory.peak - bytes_before


def peak_by_profiler(step: Callable[[], object]) -> int:
    """Return the same by the log of the CPU's allocator.

    torch's chunked loss is one operator, and measure.LiveBytes does not see inside an operator.
    """
    stderr = os.dup(2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # the profiler writes lines about itself there
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as log:
            step()
    finally:
        os.dup2(stderr, 2)
    events = [event for event in log.profiler.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    sizes = [event.nbytes() for event in events]  # negative where memory is freed
    return max(accumulate(sizes, initial=0))


def largest_error(found: list[Tensor], expected: list[Tensor]) -> float:
    """Return the largest relative error of pairs of tensors. NaN if one of them is."""
    errors = []
    for one, other in zip(found, expected, strict=True):
        norm = other.norm().item() or 1.0
        errors.append(((one - other).norm() / norm).float())
    return torch.stack(errors).max().item()


def plain_bytes(args) -> tuple[int, str]:
    """Return the bytes of the plain loss, and the formula.

    N is the number of tokens, V the vocabulary and H the hidden size. Two moments can be the peak.
    In backward of the loss, log-softmax, its gradient and the gradient of the logits are alive, all
    fp32. In backward of the head, the gradient of the logits, in the dtype of the matmuls, and the
    gradients of hidden states and head.
    """
    element = runtime.DTYPES[args.dtype].itemsize
    logits = args.tokens * args.vocab_size
    gradients = element * args.hidden_size * (args.tokens + args.vocab_size)
    if element * logits + gradients > 12 * logits:
        return element * logits + gradients, f"{element} (N V + N H + V H)"
    return 12 * logits, "12 N V"


# --- checks


def tolerance_of(dtype: str, device: torch.device) -> float:
    """Return the relative error that is allowed: kernels sum thousands of terms in any order."""
    if dtype == "bf16":
        return 2e-2
    if device.type == "cpu":
        return 1e-6
    return 1e-5


def check(rows: list[dict], args, tolerance: float) -> list[str]:
    """Assert that all losses are equal, and that memory is what the formulas give."""
    for row in rows[1:]:
        error = row["largest_relative_error"]
        assert error <= tolerance, f"{row['name']}: loss and gradients are off by {error:.1e}"

    plain = rows[0]
    formula, in_words = plain_bytes(args)
    # what has a number per token, and the allocator's rounding
    slack = formula // 100 + 16 * args.tokens + 4096
    assert abs(plain["step_bytes"] - formula) <= slack, (
        f"{in_words} is {formula:,}, not {plain['step_bytes']:,}"
    )

    (chunked,) = [row for row in rows if row["name"] == CHUNKED]
    if args.dtype == "fp32":  # in bf16 a CPU's matmuls make copies of their own
        check_chunked(chunked, args)
    share = plain["step_bytes"] / formula
    chunked_mib = chunked["step_bytes"] / 2**20
    gradient_mib = chunked["gradient_bytes"] / 2**20
    return [
        f"losses and gradients of all rows equal the plain loss's within {tolerance:g} (relative)",
        f"the plain loss takes {in_words} = {formula / 2**20:,.1f} MiB "
        f"(measured: {share:.4f} of it)",
        f"the chunked loss takes {chunked_mib:,.1f} MiB, {gradient_mib:,.1f} of them the gradients",
    ]


def check_chunked(chunked: dict, args) -> None:
    """Assert that the chunked loss holds the gradients and one chunk."""
    chunk = min(args.chunk_tokens, args.tokens)
    one_chunk = 8 * chunk * (args.vocab_size + args.hidden_size)  # logits, log-softmax, rows
    per_token = 64 * (args.tokens + chunk) + 2**16
    most = chunked["gradient_bytes"] + one_chunk + per_token
    assert chunked["step_bytes"] <= most, (
        f"the chunked loss takes {chunked['step_bytes']:,} bytes, not {most:,}"
    )
