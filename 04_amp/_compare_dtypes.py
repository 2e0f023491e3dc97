"""How compare.py multiplies in each number type: which run here, fp8 layers written out, fp16 emulated.

What a device multiplies in hardware is in common/hardware.py. Next: compare.py, which runs them all.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from old import hardware
from old.exits import UserError

Batch = tuple[Tensor, Tensor]  # inputs and targets

NAMES = ["fp32", "tf32", "bf16", "fp16", "fp16-unscaled", "fp8"]


@cache
def is_native(name: str, device: torch.device) -> bool:
    return name.removesuffix("-unscaled") in hardware.native_types(device)[0]


def obstacle(name: str, net: nn.Module, device: torch.device, tokens: int) -> str | None:
    """Why `name` cannot run here at all, not even slowly; None if it can. `tokens` are those of a batch."""
    if name in ("tf32", "fp8") and torch.version.hip:
        return "not written for AMD GPUs: ROCm wants a variable for tf32, and the MI300's fp8 is another format"
    if name == "tf32" and not is_native(name, device):
        return "a mode of NVIDIA's tensor cores from compute capability 8.0 on"
    if name == "tf32" and os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return "NVIDIA_TF32_OVERRIDE=0 switches it off"
    if name == "fp8" and not is_native(name, device) and device.type != "cpu":
        return "needs compute capability 8.9"
    sizes = {tokens}
    for layer in linear_layers(net):
        sizes.update(layer.weight.shape)
    odd_sizes = sorted(size for size in sizes if size % 16)
    if name == "fp8" and odd_sizes:
        return f"rows and columns must be multiples of 16, here {', '.join(map(str, odd_sizes))}"
    return None


def choose(asked: str | None, net: nn.Module, device: torch.device, tokens: int) -> tuple[list[str], dict[str, str]]:
    """The types to run, fp32 first, and those left out with the reason. UserError if one of these was asked for."""
    names = asked.split(",") if asked else NAMES
    if unknown := set(names) - set(NAMES):
        raise UserError(f"--dtypes {asked}: {', '.join(sorted(unknown))} is none of {', '.join(NAMES)}")
    left_out = {}
    for name in names:
        reason = obstacle(name, net, device, tokens)
        if reason and asked:
            raise UserError(f"--dtypes {asked}: {name}: {reason}; leave it out")
        if not asked and not is_native(name, device) and not name.startswith("fp16"):
            reason = reason or f"not native: --dtypes {name} runs it nevertheless"
        if reason:
            left_out[name] = reason
    chosen = [name for name in NAMES if name in names and name not in left_out]
    return ["fp32", *(name for name in chosen if name != "fp32")], left_out


def linear_layers(net: nn.Module) -> list[nn.Linear]:
    """Those of all blocks. Not lm_head: its errors would go straight into the loss."""
    return [module for module in net.model.layers.modules() if isinstance(module, nn.Linear)]


def to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale in fp8, and the scale: one per tensor, from its values now, so that the largest just fits."""
    largest = x.abs().amax().float()
    scale = (largest / torch.finfo(dtype).max).clamp(min=1e-30)
    return (x.float() / scale).to(dtype), scale


def multiply_fp8(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, result: torch.dtype) -> Tensor:
    """a @ b on tensor cores for fp8: a is stored row by row, b column by column.

    With use_fast_accum=True Hopper adds up in fewer bits and is faster: the speed shown here is the exact way's.
    """
    return torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=result, use_fast_accum=False)


class Fp8Linear(torch.autograd.Function):
    """x @ weight.T: activations and weights in e4m3 (3 bits of fraction), gradients in e5m2 (2, but more range).

    Every maximum, division, cast and transpose here reads and writes memory once more. Libraries fuse them.
    """

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = to_fp8(x, torch.float8_e4m3fn)
        w8, w_scale = to_fp8(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, x_scale, weight)  # one byte per activation; the weight is there anyway
        return multiply_fp8(x8, x_scale, w8.t(), w_scale, x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, weight = ctx.saved_tensors
        g8, g_scale = to_fp8(grad.contiguous(), torch.float8_e5m2)
        w8, w_scale = to_fp8(weight, torch.float8_e4m3fn)
        grad_x = multiply_fp8(g8, g_scale, column_by_column(w8), w_scale, grad.dtype)
        grad_weight = multiply_fp8(g8.t().contiguous(), g_scale, column_by_column(x8), x_scale, torch.float32)
        return grad_x, grad_weight


def column_by_column(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def use_fp8(net: nn.Module) -> None:
    """Linear layers of the blocks take and return bf16, as under autocast, and multiply in fp8."""
    for layer in linear_layers(net):
        layer.forward = partial(fp8_linear, layer.weight)


def fp8_linear(weight: Tensor, x: Tensor) -> Tensor:
    tokens = x.bfloat16().flatten(0, -2)
    return Fp8Linear.apply(tokens, weight).unflatten(0, x.shape[:-1])


class EmulatedFp16(TorchDispatchMode):
    """fp16 products as tensor cores make them: summed in fp32, rounded once at the end."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default and args[0].dtype is torch.float16:
            return torch.mm(args[0].float(), args[1].float()).half()
        return func(*args, **(kwargs or {}))


@contextmanager
def multiplying_in(name: str, device: torch.device) -> Iterator[None]:
    """What autocast does not do: tf32 is a switch for fp32 products, and fp16 needs help where the device has none."""
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    try:
        if name.startswith("fp16") and not is_native(name, device):
            with EmulatedFp16():
                yield
        else:
            yield
    finally:
        torch.set_float32_matmul_precision("highest")
