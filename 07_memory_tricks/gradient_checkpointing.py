"""Gradient checkpointing: keep less of what forward computes, and compute it again when backward asks for it.

    laptop    python 07_memory_tricks/gradient_checkpointing.py
    one GPU   python 07_memory_tricks/gradient_checkpointing.py --model llama-1b --dtype bf16 --seq-len 4096
    cluster   one process is all it uses; every training script takes --checkpointing full or selective

Look for: bytes kept for backward beside the time of a step; gradients that are equal to the bit.
Before: memory_profile.py. Next: gradient_accumulation.py.
"""

import sys
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits, measure, report
from lm import data, shapes, weights


class Recompute(torch.autograd.Function):
    """Checkpointing by hand, for a block that draws no random numbers: dropout would draw others the second time."""

    @staticmethod
    def forward(context, x: Tensor, block: nn.Module, *rotation: Tensor) -> Tensor:
        context.block = block
        context.save_for_backward(x, *rotation)  # all that is kept
        context.autocast = torch.is_autocast_enabled(x.device.type)
        # inside a Function autograd records nothing, so what the block computes is freed
        return block(x, *rotation)

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple:
        x, *rotation = context.saved_tensors
        x = x.detach().requires_grad_()
        with (
            torch.enable_grad(),
            torch.autocast(x.device.type, torch.bfloat16, enabled=context.autocast),
        ):
            # the second forward; its activations live until the next line has run
            y = context.block(x, *rotation)
        y.backward(gradient)  # adds to the gradients of the block's weights
        return x.grad, None, *(None for _ in rotation)


def keep_the_expensive() -> tuple:
    """Selective: keep what attention and matmuls give, but not that of the last of a block's 7 matmuls, which backward
    never reads. torch calls this at each forward of a block, and asks the policy at each operator."""
    matmuls = {False: 0, True: 0}  # seen in forward; seen in backward, where torch 2.11 asks again

    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        # attention, whatever kernel computes it
        keep = operator.name().startswith("aten::_scaled_dot_product_")
        if operator is torch.ops.aten.mm.default:
            matmuls[context.is_recompute] += 1
            keep = matmuls[context.is_recompute] < 7
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


WAYS = {  # how a block is called
    "none": lambda block, *inputs: block(*inputs),
    "selective": partial(checkpoint, use_reentrant=False, context_fn=keep_the_expensive),
    "full": partial(checkpoint, use_reentrant=False),
    "full, by hand": lambda block, x, *rotation: Recompute.apply(x, block, *rotation),
}


def forward(net: nn.Module, way: str, batch: tuple[Tensor, Tensor], dtype: str) -> Tensor:
    """The loss, with each block called in this way."""
    net.zero_grad(set_to_none=True)
    for block in net.model.layers.values():
        block.forward = partial(WAYS[way], partial(type(block).forward, block))
    with torch.autocast(batch[0].device.type, torch.bfloat16, enabled=dtype == "bf16"):
        return net(*batch)


def run(
    net: nn.Module, way: str, batch: tuple[Tensor, Tensor], dtype: str, exact: list[Tensor]
) -> dict:
    """One way: what it keeps, its peak, and how far its gradients are from those with everything kept."""
    net.zero_grad(set_to_none=True)
    with measure.LiveBytes(net.parameters(), batch[0].device) as memory:
        before = memory.now
        loss = forward(net, way, batch, dtype)
        kept = memory.now - before  # while the loss is there, so is what its backward needs
        loss.backward()
    error = measure.relative_error([weight.grad.cpu() for weight in net.parameters()], exact)
    return {
        "name": way,
        "kept_bytes": kept,
        "peak_bytes": memory.peak,
        "gradient_relative_error": error,
    }


def check(rows: list[dict], tolerance: float) -> list[str]:
    none, selective, full, _ = rows
    errors = [row["gradient_relative_error"] for row in rows]
    assert all(error <= tolerance for error in errors), (
        f"gradients differ from those of none: relative errors {errors}"
    )
    checked = [
        f"gradients of all ways equal those of none: largest relative error {max(errors):.1g} (0: to the bit)"
    ]
    for row, above in ((selective, none), (full, selective)):
        assert row["kept_bytes"] < above["kept_bytes"], f"{row['name']}: no less is kept"
        less, off_peak = (1 - row[key] / none[key] for key in ("kept_bytes", "peak_bytes"))
        checked.append(
            f"{row['name']}: {less:.1%} less kept for backward, {off_peak:.1%} off the peak of a step"
        )
    return checked


def main() -> int:
    args = report.lesson_flags(
        __doc__, model="nano", seq_len=256, batch_size=8, rounds=3, dtype=("fp32", "bf16")
    )
    config = shapes.load_config(args.model, 256, args.seq_len)
    device = report.start_lesson(args.device)
    net = weights.build(args.model, config, seed=0, device=device)
    batch = data.one_batch(args.batch_size, args.seq_len, device)
    # the first one also pays for what libraries set aside
    forward(net, "none", batch, args.dtype).backward()
    exact = [weight.grad.cpu() for weight in net.parameters()]
    rows = [run(net, way, batch, args.dtype, exact) for way in WAYS]
    steps = {way: lambda way=way: forward(net, way, batch, args.dtype).backward() for way in WAYS}
    seconds = measure.seconds_in_turns(steps, device, args.rounds)
    rows = [{**row, **seconds[row["name"]]} for row in rows]
    columns = {
        "name": "recomputed",
        "kept_bytes": "kept for backward",
        "peak_bytes": "peak",
        "time_ratio": "time",
    }
    # a GPU may add up in another order
    checked = check(rows, tolerance=1e-5 if args.dtype == "fp32" else 2e-2)
    count = shapes.parameter_count(config)
    report.end_lesson(
        rows, columns=columns, checked=checked, args=args, device=device, parameters=count
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
