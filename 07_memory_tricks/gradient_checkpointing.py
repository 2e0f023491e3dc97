"""Gradient checkpointing: keep fewer activations, and compute them again in backward.

Autograd keeps what backward needs of each operator's forward: the activations. A checkpointed block
keeps only its input. When backward reaches the block, its forward runs again. So the activations of
one block are in memory at a time, for one more forward: a third more FLOPs. Selective checkpointing
also keeps what attention and matmuls returned, and computes only the cheap operators again.

    laptop    python 07_memory_tricks/gradient_checkpointing.py
    one GPU   python 07_memory_tricks/gradient_checkpointing.py --device cuda
              python 07_memory_tricks/gradient_checkpointing.py --model llama-1b --dtype bf16 \\
                  --seq-len 4096
    cluster   it uses one process only; the training scripts take --checkpointing full or selective

What to look at: the bytes kept for backward beside the time of a step. Gradients are equal to the
bit on a CPU. Expected on an H100, where the model is wider and a step takes at least 83 ms by the
data sheet's 67 TFLOP/s in fp32: full takes about a third more time, selective a few percent.
Previous: memory_profile.py. Next: gradient_accumulation.py.
"""

import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _gradient_checkpointing as helper
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from common import lesson, measure
from lm import shapes, stdlib_text, weights
from lm.activation_checkpointing import down_proj_shape, selective_contexts

# --- 1. by hand


class Recompute(torch.autograd.Function):
    """Run a block without keeping its activations, and run it again in backward.

    The block must draw no random numbers: dropout would draw others the second time.
    """

    @staticmethod
    def forward(ctx, x: Tensor, run_block: Callable, *rotation: Tensor) -> Tensor:
        ctx.run_block = run_block
        ctx.save_for_backward(x, *rotation)  # nothing else is kept
        ctx.autocast = torch.is_autocast_enabled(x.device.type)
        # Autograd is off inside a Function, so what the block computes is freed.
        return run_block(x, *rotation)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple:
        x, *rotation = ctx.saved_tensors
        x = x.detach().requires_grad_()
        autocast = torch.autocast(x.device.type, torch.bfloat16, enabled=ctx.autocast)
        with torch.enable_grad(), autocast:
            y = ctx.run_block(x, *rotation)  # the second forward
        y.backward(gradient)  # adds to the gradients of the block's weights, frees the activations
        return x.grad, None, *(None for _ in rotation)


def recompute(run_block: Callable, x: Tensor, *rotation: Tensor) -> Tensor:
    """Call Recompute as torch's `checkpoint` is called."""
    return Recompute.apply(x, run_block, *rotation)


# --- 2. by torch, and selective

METHODS = ("none", "selective", "full", "full, by hand")


def checkpointed(block: nn.Module, method: str) -> Callable:
    """Return the forward of a block under a method. It takes x and the tables of RoPE."""
    run_block = partial(type(block).forward, block)
    if method == "full, by hand":
        return partial(recompute, run_block)
    if method == "full":
        return partial(checkpoint, run_block, use_reentrant=False)
    if method == "selective":
        # The policy of the training scripts. torch asks it at each operator what to keep: the
        # results of attention and of matmuls, but not of down_proj, which no backward reads.
        seen = set()  # the policy adds the operator of attention
        contexts = partial(selective_contexts, down_proj_shape(block.mlp), seen)
        return partial(checkpoint, run_block, use_reentrant=False, context_fn=contexts)
    return run_block


def forward(net: nn.Module, method: str, batch: tuple[Tensor, Tensor], dtype: str) -> Tensor:
    """Return the loss of a batch, with each block under this method."""
    net.zero_grad(set_to_none=True)
    for block in net.model.layers.values():
        block.forward = checkpointed(block, method)
    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=dtype == "bf16"):
        return net(*batch)


# --- 3. what each method keeps


def run(
    net: nn.Module, method: str, batch: tuple[Tensor, Tensor], dtype: str, exact: list[Tensor]
) -> dict:
    """Return what a method keeps, its peak, and the error of its gradients."""
    net.zero_grad(set_to_none=True)
    with measure.LiveBytes(net.parameters(), batch[0].device) as memory:
        bytes_before = memory.now
        loss = forward(net, method, batch, dtype)
        # As long as the loss exists, autograd keeps what its backward needs.
        kept_bytes = memory.now - bytes_before
        loss.backward()
    gradients = [weight.grad.cpu() for weight in net.parameters()]
    return {
        "name": method,
        "kept_bytes": kept_bytes,
        "peak_bytes": memory.peak,
        "gradient_relative_error": measure.relative_error(gradients, exact),
    }


def main() -> int:
    args = lesson.parse_flags(
        __doc__,
        gpu={"model": "wide", "seq_len": 4096, "batch_size": 4},
        model="nano",
        seq_len=256,
        batch_size=8,
        rounds=3,
        dtype=("fp32", "bf16"),
    )
    config = weights.load_config(args.model, 256, args.seq_len)
    device = lesson.start(args.device)
    net = weights.build(args.model, config, seed=0, device=device)
    batch = stdlib_text.one_batch(args.batch_size, args.seq_len, device)

    def step(method: str) -> None:
        forward(net, method, batch, args.dtype).backward()

    step("none")  # libraries allocate memory of their own in the first step
    exact = [weight.grad.cpu() for weight in net.parameters()]
    rows = [run(net, method, batch, args.dtype, exact) for method in METHODS]

    steps = {method: partial(step, method) for method in METHODS}
    seconds = measure.seconds_in_turns(steps, device, args.rounds)
    for row in rows:
        row |= seconds[row["name"]]
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=helper.check(rows, args.dtype),
        args=args,
        device=device,
        parameters=shapes.parameter_count(config),
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
