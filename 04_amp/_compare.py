"""How compare.py multiplies in each number type, and what fp16 cannot hold: it reaches from 2^-24, its smallest
subnormal, to 65,504. What is under 2^-25 = 3.0e-8 becomes zero; a larger sum or exponential becomes infinite."""

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import clip_grad_norm_, get_total_norm, parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode

from common import hardware, measure

NAMES = ["fp32", "tf32", "bf16", "fp16", "fp16-unscaled", "fp8"]
SINCE = {"fp16": (7, 0), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}  # compute capability of NVIDIA's GPUs
CPU_SETS = {"bf16": hardware.CPU_BF16, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}  # instruction sets
EMULATED = [("bf16", "cpu"), ("bf16", "cuda"), ("fp8", "cpu")]  # if asked for; fp16 is in any case
MICRO_BATCHES = 1024  # gradient accumulation divides the loss by their number, and so every gradient


@cache
def is_native(name: str, device: torch.device) -> bool:
    """Whether the device multiplies this type in hardware. Another may still work, by way of one that it has."""
    name = name.removesuffix("-unscaled")
    if name == "fp32":
        return True
    if name == "tf32" and os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return False
    if device.type == "cuda" and torch.version.hip:  # ROCm answers with a "capability" that is not CUDA's
        return name in ("bf16", "fp16")
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= SINCE[name]
    if device.type == "mps":
        return name == "fp16"
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and not CPU_SETS.get(name, set()).isdisjoint(cpuinfo.read_text().split())


def choose(asked: str, net: nn.Module, device: torch.device, tokens: int) -> list[str]:
    """The types to run, fp32 first; `tokens` are those of a batch."""
    odd = {size for layer in linear_layers(net) for size in (tokens, *layer.weight.shape) if size % 16}
    chosen = []
    for name in NAMES:
        emulated = name.startswith("fp16") or (asked == "all" and (name, device.type) in EMULATED)
        if not emulated and not is_native(name, device):
            print(f"left out: {name} is not native here")
        elif name == "fp8" and odd:
            print(f"left out: fp8 needs rows and columns in multiples of 16, not {sorted(odd)}")
        else:
            chosen.append(name)
    return chosen


def linear_layers(net: nn.Module) -> list[nn.Linear]:
    """Those of all blocks. Not lm_head: its errors would go straight into the loss."""
    return [module for module in net.model.layers.modules() if isinstance(module, nn.Linear)]


def to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale in fp8, and the scale: one per tensor, from its values now, so that the largest just fits."""
    scale = (x.abs().amax().float() / torch.finfo(dtype).max).clamp(min=1e-30)
    return (x.float() / scale).to(dtype), scale


def multiply_fp8(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor], result: torch.dtype) -> Tensor:
    """a @ b.T, each in fp8 with its scale. Tensor cores read a row by row, b.T column by column: transposed copies."""
    (a8, a_scale), (b8, b_scale) = a, b
    rows, columns = a8.contiguous(), b8.contiguous().t()
    return torch._scaled_mm(rows, columns, a_scale, b_scale, out_dtype=result, use_fast_accum=False)  # True: less exact


class Fp8Linear(torch.autograd.Function):
    """x @ weight.T: activations and weights in e4m3 (3 bits of fraction), gradients in e5m2 (2, but more range).
    Each maximum, division, cast and transpose here reads and writes memory once more; libraries fuse them."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = to_fp8(x, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, x_scale, weight)  # one byte per activation; the weight is there anyway
        return multiply_fp8((x8, x_scale), to_fp8(weight, torch.float8_e4m3fn), x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, weight = ctx.saved_tensors
        g8, g_scale = to_fp8(grad, torch.float8_e5m2)
        w8, w_scale = to_fp8(weight, torch.float8_e4m3fn)
        grad_x = multiply_fp8((g8, g_scale), (w8.t(), w_scale), grad.dtype)
        return grad_x, multiply_fp8((g8.t(), g_scale), (x8.t(), x_scale), torch.float32)


def fp8_linear(layer: nn.Linear, x: Tensor) -> Tensor:  # takes and returns bf16, as under autocast
    y = Fp8Linear.apply(x.bfloat16().flatten(0, -2), layer.weight).unflatten(0, x.shape[:-1])
    return y if layer.bias is None else y + layer.bias.bfloat16()


class EmulatedFp16(TorchDispatchMode):
    """fp16 matmuls as tensor cores make them: summed in fp32, rounded once at the end."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default and args[0].dtype is torch.float16:
            return torch.mm(args[0].float(), args[1].float()).half()
        return func(*args, **(kwargs or {}))


def measure_memory(run, batch: tuple) -> tuple[int, int]:
    """Of a backward pass: bytes that autograd keeps for it, without weights and their narrow copies; and all bytes at
    the peak beside those that live from step to step."""
    saved, weights = {}, {weight.untyped_storage().data_ptr() for weight in run.net.parameters()}

    def note(tensor: Tensor) -> Tensor:
        node = tensor.grad_fn
        while node is not None and node.name() in ("TBackward0", "ToCopyBackward0"):  # transposed or cast
            node = node.next_functions[0][0]
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and not (node is not None and node.name().endswith("AccumulateGrad")):
            saved[storage.data_ptr()] = storage.nbytes()  # by address: what is saved twice counts once
        return tensor

    with measure.LiveBytes(run.net.parameters(), run.device) as memory:
        before = memory.now
        with saved_tensors_hooks(note, lambda tensor: tensor):
            run.backward(batch)
    run.optimizer.zero_grad(set_to_none=True)
    return sum(saved.values()), memory.peak - before


def underflow(gradients: Tensor, factor: float) -> dict[str, float]:
    """Shares of fp32 gradients x factor that fp16 turns into zero, keeps with fewer bits, makes infinite."""
    half = (gradients * factor).half()
    few = (half != 0) & (half.abs() < torch.finfo(torch.float16).smallest_normal)
    counts = {"zero_share": (half == 0) & (gradients != 0), "fewer_bits_share": few, "infinite_share": half.isinf()}
    return {"factor": factor, **{key: int(found.sum()) / half.numel() for key, found in counts.items()}}


@torch.no_grad()
def change(run, net: nn.Module) -> Tensor:
    """By how much each weight differs from that of `net`, of which the run has a copy."""
    return parameters_to_vector(run.net.parameters()) - parameters_to_vector(net.parameters())


def overflowing_gradients(new_run: Callable, net: nn.Module, batch: tuple) -> tuple[str, float]:
    """Too large a scale makes gradients infinite, and a step with them ruins the weights: the scaler skips it."""
    scale = 2.0**32  # more than fp16 can bear of any model
    naive = new_run("fp16-unscaled", net)
    naive.backward(batch, divide=1 / scale)
    for p in naive.net.parameters():
        p.grad /= scale  # infinity stays infinity
    naive.optimizer.step()
    cured = new_run("fp16", net, scale)
    while not change(cured, net).any() and len(cured.losses) < 50:  # nothing has moved: the step was skipped
        cured.train([batch] * 50, 1)
    ruined, still = (int((~change(run, net).isfinite()).sum()) for run in (naive, cured))
    skipped, fitting = len(cured.losses) - 1, cured.scaler.get_scale()
    text = (
        f"overflowing gradients: at scale {scale:,.0f} a step makes {ruined:,} weights NaN; the scaler skips {skipped} "
        f"steps, halves the scale each time and goes on at {fitting:,.0f} with {still} weights NaN"
    )
    assert ruined > still == 0, text
    assert fitting == scale / 2**skipped < scale, text
    return text, fitting / 2  # rounding differs from run to run: with room for that


def vanishing_gradients(new_run: Callable, net: nn.Module, batch: tuple, scale: float) -> str:
    """A loss divided by 1,024 has gradients that fp16 rounds to zero, and weights stay where they are. More than
    their own gradients say: the gradients of activations, which come before, are zero already."""
    changes = []
    for name, factor in (("fp32", 1.0), ("fp16-unscaled", 1.0), ("fp16", scale * MICRO_BATCHES)):
        tried = new_run(name, net, factor)
        tried.backward(batch, divide=MICRO_BATCHES)
        tried.scaler.step(tried.optimizer)
        changes.append(change(tried, net))
    naive, cured = ((found == 0)[changes[0] != 0].float().mean().item() for found in changes[1:])
    text = (
        f"vanishing gradients: with the loss divided by {MICRO_BATCHES:,}, {naive:.1%} of the weights that fp32 moves "
        f"stay where they are in fp16; with a scaler {cured:.2%}"
    )
    assert max(0.01, 10 * cured) < naive, text
    return text


def clipping_scaled_gradients(new_run: Callable, net: nn.Module, batch: tuple, scale: float) -> str:
    """Clipped before unscale_, gradients end up `scale` times too small; the right order clips true ones."""
    norms, updates = [], []
    for right in (False, True):
        tried = new_run("fp16", net, scale)
        tried.backward(batch)
        gradients = [p.grad for p in tried.net.parameters()]
        limit = get_total_norm(gradients).item() / scale / 2  # half of the true norm: clipping has something to do
        if right:
            tried.scaler.unscale_(tried.optimizer)
        clip_grad_norm_(tried.net.parameters(), limit)
        if not right:
            tried.scaler.unscale_(tried.optimizer)
        norms.append(get_total_norm(gradients).item())
        tried.scaler.step(tried.optimizer)
        updates.append(change(tried, net).norm().item())
    text = (
        f"clipping scaled gradients: clipped to {limit:.2f} before unscale_, gradients have norm {norms[0]:.1e}, sink "
        f"into AdamW's eps and move the weights {updates[1] / updates[0]:.1f} times less; clipped after it, the norm "
        f"is {norms[1]:.2f}"
    )
    assert abs(norms[0] / (limit / scale) - 1) < 0.01, text
    assert abs(norms[1] / limit - 1) < 0.01, text
    return text


@torch.no_grad()
def softmax_by_hand(net: nn.Module, batch: tuple) -> str:
    """exp(12) is beyond fp16, and infinity / infinity is NaN: compute sums and exponentials in fp32."""
    logits = net(batch[0][:1])
    scores = (logits * (20 / logits.max())).half()  # as of a model that is sure of itself
    wrong, right = (x.exp() / x.exp().sum(-1, keepdim=True) for x in (scores, scores.float()))
    nan_share = wrong.isnan().any(-1).float().mean().item()
    error = (right - torch.softmax(scores.float(), -1)).abs().max().item()
    text = (
        f"softmax by hand: exp(x) / sum(exp(x)) in fp16 gives NaN for {nan_share:.1%} of the tokens with logits up to "
        f"20; in fp32 it differs from torch.softmax by {error:.0e}"
    )
    assert nan_share > 0, text
    assert error < 1e-5, text
    return text


def provoke(new_run: Callable, net: nn.Module, batch: tuple) -> list[str]:
    """The four failures and their cures. `new_run` is compare.py's Run, `batch` its inputs and targets."""
    overflow, scale = overflowing_gradients(new_run, net, batch)
    vanished = vanishing_gradients(new_run, net, batch, scale)
    clipped = clipping_scaled_gradients(new_run, net, batch, scale)
    return [overflow, vanished, clipped, softmax_by_hand(net, batch)]
