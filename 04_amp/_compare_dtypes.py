"""How compare.py multiplies in each number type: autocast, fp8 layers by hand, and fp16 where the device has none.

A type is native if the device multiplies it in hardware: by compute capability on a GPU, by instruction set on a CPU.
Next: compare.py, which runs them all.
"""

import re
import sys
from contextlib import nullcontext
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from common import hardware
from common.exits import UserError

Batch = tuple[Tensor, Tensor]  # inputs and targets

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp16-unscaled": torch.float16, "fp8": torch.bfloat16}
NAMES = ["fp32", "tf32", *AUTOCAST]
CPU_UNITS = {"bf16": {"avx512_bf16", "amx_bf16", "bf16"}, "fp16": {"avx512_fp16", "amx_fp16"}}  # in /proc/cpuinfo


@cache
def native_types(device: torch.device) -> tuple[set[str], str]:
    """What this device multiplies in hardware, and how we know."""
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        found = {name for name, since in hardware.SINCE.items() if capability >= since and name in NAMES}
        return found, "compute capability {}.{}".format(*capability)
    if device.type == "mps":
        return {"fp32", "fp16"}, "Metal"
    info = Path("/proc/cpuinfo")
    flags = set(re.findall(r"\w+", info.read_text() if info.exists() else "")) & set.union(*CPU_UNITS.values())
    found = {name for name, units in CPU_UNITS.items() if units & flags}
    return {"fp32", *found}, f"instruction sets for 16-bit matrices: {', '.join(sorted(flags)) or 'none'}"


def is_native(name: str, device: torch.device) -> bool:
    return name.removesuffix("-unscaled") in native_types(device)[0]


def obstacle(name: str, net: nn.Module, device: torch.device, tokens: int) -> str | None:
    """Why `name` cannot run here at all, not even slowly; None if it can. `tokens` are those of a batch."""
    if name == "tf32" and not is_native(name, device):
        return "a mode of NVIDIA's matrix units from compute capability 8.0 on"
    if name == "fp8" and not is_native(name, device) and device.type != "cpu":
        return "needs compute capability 8.9"
    sizes = {tokens, *(size for layer in linear_layers(net) for size in layer.weight.shape)}
    if name == "fp8" and (odd := sorted(size for size in sizes if size % 16)):
        return f"rows and columns must be multiples of 16, here {', '.join(map(str, odd))}"
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
    return ["fp32", *(name for name in NAMES[1:] if name in names and name not in left_out)], left_out


def linear_layers(net: nn.Module) -> list[nn.Linear]:
    """Those of all blocks. Not lm_head: its errors would go straight into the loss."""
    return [module for module in net.model.layers.modules() if isinstance(module, nn.Linear)]


def to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale in fp8, and the scale: one per tensor, from its values now, so that the largest just fits."""
    scale = (x.abs().amax().float() / torch.finfo(dtype).max).clamp(min=1e-30)
    return (x.float() / scale).to(dtype), scale


class Fp8Linear(torch.autograd.Function):
    """x @ weight.T: activations and weights in e4m3 (3 bits of fraction), gradients in e5m2 (2, but more range)."""

    # Every maximum, division, cast and transpose here reads and writes memory once more; libraries fuse them.

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        (x8, x_scale), (w8, w_scale) = (to_fp8(t, torch.float8_e4m3fn) for t in (x, weight))
        ctx.save_for_backward(x8, x_scale, weight)  # one byte per activation; the weight is there anyway
        return torch._scaled_mm(x8, w8.t(), x_scale, w_scale, out_dtype=x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, weight = ctx.saved_tensors
        (g8, g_scale), (w8, w_scale) = to_fp8(grad.contiguous(), torch.float8_e5m2), to_fp8(weight, torch.float8_e4m3fn)
        w8, x8 = (t.t().contiguous().t() for t in (w8, x8))  # column-major, as the hardware wants its second operand
        grad_x = torch._scaled_mm(g8, w8, g_scale, w_scale, out_dtype=grad.dtype)
        grad_weight = torch._scaled_mm(g8.t().contiguous(), x8, g_scale, x_scale, out_dtype=torch.float32)
        return grad_x, grad_weight


def use_fp8(net: nn.Module) -> None:
    for layer in linear_layers(net):
        layer.forward = lambda x, w=layer.weight: Fp8Linear.apply(x.flatten(0, -2), w).unflatten(0, x.shape[:-1])


class MatrixUnit(TorchDispatchMode):
    """Emulates one for fp16: products summed in fp32, rounded once at the end."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default and args[0].dtype is torch.float16:
            return torch.mm(args[0].float(), args[1].float()).half()
        return func(*args, **(kwargs or {}))


def backward(net: nn.Module, batch: Batch, name: str, scaler: GradScaler, divide: int = 1) -> Tensor:
    """Gradients of loss / divide x the scaler's scale, matrices multiplied in type `name`; returns the loss."""
    device = batch[0].device
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    with MatrixUnit() if name.startswith("fp16") and not is_native(name, device) else nullcontext():
        with torch.autocast(device.type, AUTOCAST.get(name), enabled=name in AUTOCAST):
            loss = net(*batch)
        scaler.scale(loss / divide).backward()
    return loss.detach()


def saved_bytes(net: nn.Module, batch: Batch, name: str) -> tuple[int, int]:
    """What autograd keeps from forward to backward: bytes of activations, bytes of low-precision weight copies."""
    activations, copies = {}, {}

    def note(t: Tensor) -> Tensor:
        node, storage = t.grad_fn, t.untyped_storage()
        while node is not None and node.name() in ("TBackward0", "ToCopyBackward0"):  # a weight, transposed or cast?
            node = node.next_functions[0][0]
        of_weight = isinstance(t, nn.Parameter) or (node is not None and node.name().endswith("AccumulateGrad"))
        (copies if of_weight else activations)[storage.data_ptr()] = storage.nbytes()  # a storage counts once
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        backward(net, batch, name, GradScaler(batch[0].device.type, enabled=False))
    net.zero_grad(set_to_none=True)
    for weight in net.parameters():
        copies.pop(weight.untyped_storage().data_ptr(), None)  # itself, not a copy
    return sum(activations.values()), sum(copies.values())
