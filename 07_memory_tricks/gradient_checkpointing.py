"""Gradient checkpointing: keep less of what forward computes, and compute it again when backward asks for it.

Backward needs what forward computed: the inputs of products, of norms, of activation functions. They take more memory
than the weights as soon as the batch is large. A block that is checkpointed keeps its input alone. When backward comes
to the block, its forward runs again. That is one more forward for each block. Selective checkpointing keeps what is
expensive to compute again, attention and matrix products, and recomputes only what is cheap: norms, rotations and
SiLU. The arithmetic is the same, so the gradients are the same.

    laptop    python 07_memory_tricks/gradient_checkpointing.py
    one GPU   python 07_memory_tricks/gradient_checkpointing.py --model llama-1b --dtype bf16 \\
                  --seq-len 4096 --batch-size 2
    cluster   one process is all it uses; every training script takes --checkpointing full or selective

Look for: bytes kept for backward beside the time of a step; the FLOP, which are counted, not estimated; gradients
that are equal to the bit. Before: memory_profile.py. Next: gradient_accumulation.py.
"""

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _gradient_checkpointing_flops import ATTENTION_FLOPS, attention_flops
from _gradient_checkpointing_report import Measured, conclude, largest_relative_error

from old import cli, data, exits, hardware, model, runtime, shapes
from old.step_cost import LiveMemory, record_memory, time_in_turns

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
PRODUCTS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")  # of a block, in their order
# Nothing in a block's backward reads what down_proj gives: it is only added to the residual stream. o_proj's result is
# added too, but the norm behind that addition reads the sum, so without it the product would have to be computed again.
READ_BY_BACKWARD = PRODUCTS[:-1]
Batch = tuple[Tensor, Tensor]


class Recompute(torch.autograd.Function):
    """Checkpointing by hand, for a block that draws no random numbers: dropout would draw others the second time."""

    @staticmethod
    def forward(context, x: Tensor, block: nn.Module, cos: Tensor, sin: Tensor) -> Tensor:
        context.block = block
        context.save_for_backward(x, cos, sin)  # all that is kept
        context.autocast = torch.is_autocast_enabled(x.device.type)
        return block(x, cos, sin)  # inside a Function autograd records nothing, so what the block computes is freed

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple:
        x, cos, sin = context.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad(), torch.autocast(x.device.type, torch.bfloat16, enabled=context.autocast):
            y = context.block(x, cos, sin)  # the second forward; its activations live until the next line has run
        y.backward(gradient)  # adds to the gradients of the block's weights
        return x.grad, None, None, None


class ByHand(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        return Recompute.apply(x, self.block, cos, sin)


def keep(products: tuple[str, ...]) -> tuple:
    """A policy for torch's checkpoint: keep what attention and these products give, recompute the rest.

    torch calls this at each forward of a block, and asks the policy at each operator.
    """
    # A policy sees a product without its name, so it is told by its order: in forward (False), and in backward (True),
    # where torch 2.11 asks again.
    names = {False: iter(PRODUCTS), True: iter(PRODUCTS)}

    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        if operator.name().startswith("aten::_scaled_dot_product_"):  # attention, whatever kernel computes it
            return CheckpointPolicy.MUST_SAVE
        if operator is torch.ops.aten.mm.default and next(names[context.is_recompute]) in products:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def every(n: int, blocks: list[nn.Module]) -> list[nn.Module]:
    return [checkpoint_wrapper(block) if i % n == 0 else block for i, block in enumerate(blocks, start=1)]


def make_variants(blocks: list[nn.Module]) -> dict[str, list[nn.Module]]:
    """The blocks of the model under each way to keep their activations. All share the same weights."""
    return {
        "none": blocks,
        "every 3rd block": every(3, blocks),
        "every 2nd block": every(2, blocks),
        "selective, all products": [checkpoint_wrapper(b, context_fn=partial(keep, PRODUCTS)) for b in blocks],
        "selective": [checkpoint_wrapper(b, context_fn=partial(keep, READ_BY_BACKWARD)) for b in blocks],
        "full": every(1, blocks),
        "full, by hand": [ByHand(block) for block in blocks],
    }


def train_step(net: nn.Module, blocks: list[nn.Module], batch: Batch, autocast: Callable) -> None:
    """Forward and backward with these blocks. The gradients are left in the weights."""
    forward(net, blocks, batch, autocast).backward()


def forward(net: nn.Module, blocks: list[nn.Module], batch: Batch, autocast: Callable) -> Tensor:
    net.zero_grad(set_to_none=True)
    for name, block in zip(net.model.layers, blocks, strict=True):
        net.model.layers[name] = block
    with autocast():
        return net(*batch)


def measure(
    step: Callable[[], None],
    run_forward: Callable[[], Tensor],
    net: nn.Module,
    plain: list[nn.Module],
    exact: list[Tensor] | None,
) -> tuple[Measured, list[Tensor]]:
    """One variant: bytes, calls of each block's forward, FLOP, and how far its gradients are from `exact`; and its
    gradients."""
    device = next(net.parameters()).device
    with LiveMemory() as memory:
        loss = run_forward()
    kept = memory.bytes_now()  # while the loss is there, so is what its backward needs
    del loss

    calls = [0] * len(plain)

    def count_call(i: int, *_) -> None:
        calls[i] += 1

    hooks = [block.register_forward_pre_hook(partial(count_call, i)) for i, block in enumerate(plain)]
    with FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS) as counter:
        step()
    for hook in hooks:
        hook.remove()
    gradients = [weight.grad.cpu() for weight in net.parameters()]
    error = largest_relative_error(gradients, exact or gradients)

    net.zero_grad(set_to_none=True)
    over_step = record_memory(step, device, held=(*net.parameters(), *net.buffers()))
    return Measured(kept, over_step, calls, counter.get_total_flops(), error), gradients


def expected_extra_flops(
    config: shapes.Config, batch: Batch, blocks: list[nn.Module], dtype: torch.dtype
) -> dict[str, int]:
    """What each variant multiplies more than none does: the forward of the blocks that are computed again.

    torch stops as soon as it has what backward reads, so down_proj is not computed again. By hand all of a block is.
    """
    products = {
        name.split(".")[-1]: 2 * batch[0].numel() * module.weight.numel()
        for name, module in blocks[0].named_modules()
        if isinstance(module, nn.Linear)
    }
    assert tuple(sorted(products)) == tuple(sorted(PRODUCTS))
    attention, kept_by_selective = attention_flops(config, batch, dtype)
    whole_block = sum(products.values()) + attention
    until_down_proj = whole_block - products["down_proj"]
    layers = len(blocks)
    return {
        "none": 0,
        "every 3rd block": layers // 3 * until_down_proj,
        "every 2nd block": layers // 2 * until_down_proj,
        "selective, all products": layers * (attention - kept_by_selective),
        "selective": layers * (attention - kept_by_selective),
        "full": layers * until_down_proj,
        "full, by hand": layers * whole_block,
    }


def main() -> int:
    began = time.perf_counter()
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="nano", help="as in 04_amp/train.py")
    add("--seq-len", type=cli.positive_int, default=256)
    add("--batch-size", type=cli.positive_int, default=8, help="sequences of the step")
    add("--dtype", choices=tuple(DTYPES), default="fp32", help="what matrices are multiplied in")
    add("--rounds", type=cli.positive_int, default=3, help="timed steps of each variant, in turns")
    add("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    add("--plot", type=cli.plot_file, metavar="PNG", default="runs/gradient_checkpointing.png", help="(%(default)s)")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    config = shapes.load_config(args.model, 256, args.seq_len)
    runtime.seed(0, deterministic=False)
    device = runtime.single_device(args.device)
    if args.dtype == "fp32":
        runtime.exact_fp32(device)
    autocast = partial(torch.autocast, device.type, DTYPES[args.dtype], enabled=args.dtype != "fp32")
    print(f"{args.model}, {args.batch_size} x {args.seq_len} tokens, {args.dtype}, {hardware.device_name(device)}")

    text = data.load_corpus().train
    data.require_sequences(text, seq_len=args.seq_len, count=args.batch_size, asked=f"--batch-size {args.batch_size}")
    stream = data.train_batches(
        text,
        seq_len=args.seq_len,
        global_batch_size=args.batch_size,
        micro_batch_size=args.batch_size,
        seed=0,
        device=device,
    )
    batch = tuple(tensor.to(device) for tensor in next(stream))
    net = model.build(args.model, config, seed=0, device=device)
    plain = list(net.model.layers.values())
    variants = make_variants(plain)
    steps = {name: partial(train_step, net, blocks, batch, autocast) for name, blocks in variants.items()}
    measured, exact = {}, None
    for name, blocks in variants.items():
        run_forward = partial(forward, net, blocks, batch, autocast)
        measured[name], gradients = measure(steps[name], run_forward, net, plain, exact)
        exact = exact or gradients  # of the first, which keeps everything
    seconds = time_in_turns(steps, device, args.rounds)
    extra_flops = expected_extra_flops(config, batch, plain, DTYPES[args.dtype])
    conclude(measured, seconds, extra_flops, args, config, device, began)
    return 0


if __name__ == "__main__":
    exits.run(main)
