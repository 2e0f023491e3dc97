"""Cross-entropy without the whole logits tensor: the largest tensor of a step, made and forgotten in pieces.

A head with a vocabulary of V gives V logits per token. For N tokens the plain loss holds three fp32 tensors of N x V at
once, in backward: log-softmax, its gradient, and the gradient of the logits. Together 12 N V bytes: 25 GB for 16,384
tokens and the 128,256 entries of Llama 3. But a token's loss needs that token's logits alone. So a loop takes a chunk
of tokens, computes logits, loss and the gradient of the logits, multiplies the latter into the gradients of hidden
states and head, and uses the memory again for the next chunk. Gradients are computed in forward, while the logits are
there. To compute them in backward would take the logits a second time: 8 N V H operations instead of 6.

    laptop    python 07_memory_tricks/chunked_loss.py
    one GPU   python 07_memory_tricks/chunked_loss.py --tokens 16384 --hidden-size 2048 --chunk-tokens 512 --dtype bf16
    cluster   one process is all it uses: every rank has its own tokens, and the same loss

Look for: memory beside the plain loss's, at the same loss and gradients; torch's own linear_cross_entropy, which is
chunked only if it is given options. Before: gradient_accumulation.py. Next: optimizer_memory.py.
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _chunked_loss_report import Measured, bytes_held, cannot_compile, conclude, record_allocations

from old import cli, exits, runtime
from old.data import PADDING
from old.step_cost import time_in_turns

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS = 5
PADDED_SHARE = 0.1  # of the targets: a batch of texts of unequal length has some


def plain_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """The last lines of common/model.py: all logits, then their mean loss in fp32. Targets of PADDING do not count."""
    return F.cross_entropy(F.linear(hidden, head).float(), targets, ignore_index=PADDING)


def chunked_cross_entropy(hidden: Tensor, head: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
    """The same, of hidden states [tokens, hidden], a head [vocabulary, hidden] and targets [tokens]."""
    # an evaluation must not pay for gradients; inside Function.forward they always look switched off
    if not torch.is_grad_enabled():
        hidden, head = hidden.detach(), head.detach()
    return ChunkedCrossEntropy.apply(hidden, head, targets, chunk_tokens)


class ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: Tensor, head: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
        weights = head.to(hidden.dtype)  # under autocast: hidden states in bf16, weights in fp32
        wants_hidden, wants_head, *_ = ctx.needs_input_grad  # a frozen head, as in LoRA, saves a third of the products
        hidden_gradient = torch.empty_like(hidden) if wants_hidden else None
        head_gradient = torch.zeros_like(head) if wants_head else None
        total = torch.zeros((), device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(hidden), chunk_tokens):
                rows = slice(start, start + chunk_tokens)
                hidden_rows = hidden_gradient[rows] if wants_hidden else None
                total += chunk_loss(hidden[rows], weights, targets[rows], hidden_rows, head_gradient)
        count = (targets != PADDING).sum()
        ctx.save_for_backward(count, hidden_gradient, head_gradient)
        return total / count

    @staticmethod
    def backward(ctx, loss_gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        """The gradients are there. What is missing is the division by the count, and what follows the loss: a loss
        scale, or the number of micro-batches. In place: autograd raises an error if backward comes a second time."""
        count, hidden_gradient, head_gradient = ctx.saved_tensors
        factor = loss_gradient / count.clamp(min=1)  # without any target the gradients are 0, as in the plain loss
        for gradient in (hidden_gradient, head_gradient):
            if gradient is not None:
                gradient.mul_(factor)
        return hidden_gradient, head_gradient, None, None


def chunk_loss(
    hidden: Tensor, weights: Tensor, targets: Tensor, hidden_gradient: Tensor | None, head_gradient: Tensor | None
) -> Tensor:
    """The sum of a chunk's losses. Its gradients: hidden_gradient is set, and head_gradient added to, if given.

    A function of its own, because its tensors must be gone before the next chunk makes its.
    """
    counted = (targets != PADDING)[:, None]
    index = targets[:, None].where(counted, 0)
    logits = F.linear(hidden, weights)
    log_probabilities = F.log_softmax(logits, dim=-1, dtype=torch.float32)
    at_target = log_probabilities.gather(1, index)
    if hidden_gradient is not None or head_gradient is not None:
        # The gradient of the logits is softmax - one-hot. It takes the memory of the logits. p - 1 = expm1(log p).
        logits_gradient = torch.exp(log_probabilities, out=logits)
        logits_gradient.scatter_(1, index, at_target.expm1().to(logits.dtype))
        if hidden_gradient is not None:
            torch.mul(logits_gradient @ weights, counted, out=hidden_gradient)
        if head_gradient is not None:
            add_product(head_gradient, logits_gradient.T, hidden * counted)
    return -at_target.where(counted, 0).sum()


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b. In one type the sum is made where the product is, and the product needs no memory of its own."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)  # bf16 weights get a bf16 sum, which is rounded once per chunk
    else:
        total += a @ b


def forward_backward(loss_function: Callable[..., Tensor], hidden: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    hidden.grad = head.grad = None
    loss = loss_function(hidden, head, targets)
    loss.backward()
    return loss.detach()


def ways_to_compute(chunk_tokens: int, device: torch.device) -> tuple[dict[str, Callable], dict[str, str]]:
    """The loss functions by name, the plain one first; and why one is left out."""
    ways = {"plain": plain_cross_entropy}
    left_out = {}
    if missing := cannot_compile(device):
        left_out["plain, compiled"] = missing
    else:
        ways["plain, compiled"] = torch.compile(plain_cross_entropy, dynamic=False)
    ways["chunked, by hand"] = partial(chunked_cross_entropy, chunk_tokens=chunk_tokens)
    if hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions"):
        options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_tokens)
        ways["torch, no options"] = partial(F.linear_cross_entropy, ignore_index=PADDING)
        ways["torch, chunked"] = partial(F.linear_cross_entropy, ignore_index=PADDING, options=options)
    else:
        left_out["torch's linear_cross_entropy"] = f"torch {torch.__version__} does not have it, 2.13 does"
    return ways, left_out


def main() -> int:
    began = time.perf_counter()
    args = parse_args()
    device = runtime.single_device(args.device)
    if args.dtype == "fp32":
        runtime.exact_fp32(device)  # some containers set variables that turn fp32 products into tf32
    batch = random_batch(args, device)
    ways, left_out = ways_to_compute(args.chunk_tokens, device)
    for name, reason in left_out.items():
        print(f"left out: {name} ({reason})")

    steps = {name: partial(forward_backward, way, *batch) for name, way in ways.items()}
    seconds = time_in_turns(steps, device, ROUNDS)
    measured = []
    hidden, head, _ = batch
    for name, step in steps.items():
        hidden.grad = head.grad = None  # of the way before
        held_bytes = bytes_held(batch, device)
        memory = record_allocations(step, device, held_bytes, compiled="compiled" in name)
        loss = step().item()
        measured.append(Measured(name, loss, hidden.grad, head.grad, held_bytes, memory, seconds[name]))
    conclude(measured, batch[-1], args, left_out, device, began)
    return 0


def parse_args() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--tokens", type=cli.positive_int, default=512, help="of a batch, all sequences together")
    add("--hidden-size", type=cli.positive_int, default=64)
    add("--vocab-size", type=cli.positive_int, default=128_256, help="Llama 3 has the default")
    add("--chunk-tokens", type=cli.positive_int, default=16, help="tokens whose logits are there at a time")
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="of hidden states and head")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    add("--plot", type=cli.plot_file, metavar="PNG", default="runs/chunked_loss.png", help="memory over the step")
    return parser.parse_args()


def random_batch(args: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states as the last norm leaves them, a head as it is initialised, and targets, a tenth of them padding."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(args.tokens, args.hidden_size, generator=generator)
    head = 0.02 * torch.randn(args.vocab_size, args.hidden_size, generator=generator)
    targets = torch.randint(args.vocab_size, (args.tokens,), generator=generator)
    targets[: int(PADDED_SHARE * args.tokens)] = PADDING
    dtype = DTYPES[args.dtype]
    return (
        hidden.to(device, dtype).requires_grad_(),
        head.to(device, dtype).requires_grad_(),
        targets.to(device),
    )


if __name__ == "__main__":
    exits.run(main)
