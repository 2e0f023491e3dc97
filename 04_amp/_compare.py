"""How compare.py multiplies in each number type, and what fp16 cannot hold: it reaches from 2^-24, its smallest
subnormal, to 65,504. What is under 2^-25 = 3.0e-8 becomes zero; a larger sum or exponential becomes infinite."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import clip_grad_norm_, get_total_norm, parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode

from common import hardware

SINCE = {"fp16": (7, 0), "tf32": (8, 0), "bf16": (8, 0)}  # compute capability of NVIDIA's GPUs
# instruction sets
CPU_SETS = {"bf16": hardware.CPU_BF16, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}
# gradient accumulation divides the loss by their number, and so every gradient
MICRO_BATCHES = 1024


@cache
def is_native(name: str, device: torch.device) -> bool:
    """Whether the device multiplies this type in hardware. Another works, too, by way of one that it has."""
    if name == "fp32":
        return True
    # ROCm answers with a "capability" that is not CUDA's
    if device.type == "cuda" and torch.version.hip:
        return name in ("bf16", "fp16")
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= SINCE[name]
    if device.type == "mps":
        return name == "fp16"
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and not CPU_SETS.get(name, set()).isdisjoint(
        cpuinfo.read_text().split()
    )


class EmulatedFp16(TorchDispatchMode):
    """fp16 matmuls as tensor cores make them: summed in fp32, rounded once at the end."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default and args[0].dtype is torch.float16:
            return torch.mm(args[0].float(), args[1].float()).half()
        return func(*args, **(kwargs or {}))


def bytes_for_backward(run, batch: tuple) -> int:
    """What autograd keeps between forward and backward, without weights and their narrow copies."""
    saved, weights = {}, {weight.untyped_storage().data_ptr() for weight in run.net.parameters()}

    def note(tensor: Tensor) -> Tensor:
        node = tensor.grad_fn
        # transposed or cast
        while node is not None and node.name() in ("TBackward0", "ToCopyBackward0"):
            node = node.next_functions[0][0]
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and not (
            node is not None and node.name().endswith("AccumulateGrad")
        ):
            # by address: what is saved twice counts once
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        run.backward(batch)
    run.optimizer.zero_grad(set_to_none=True)
    return sum(saved.values())


def underflow(gradients: Tensor, factor: float) -> dict[str, float]:
    """Shares of fp32 gradients x factor that fp16 turns into zero, keeps with fewer bits, makes infinite."""
    half = (gradients * factor).half()
    few = (half != 0) & (half.abs() < torch.finfo(torch.float16).smallest_normal)
    counts = {
        "zero_share": (half == 0) & (gradients != 0),
        "fewer_bits_share": few,
        "infinite_share": half.isinf(),
    }
    return {
        "factor": factor,
        **{key: int(found.sum()) / half.numel() for key, found in counts.items()},
    }


def overflowing_gradients(new_run: Callable, net: nn.Module, batch: tuple) -> tuple[str, float]:
    """Too large a scale makes gradients infinite, and a step with them ruins the weights: the scaler skips it."""
    scale = 2.0**32  # more than fp16 can bear of any model
    naive = new_run("fp16", net, 1.0)
    naive.backward(batch, divide=1 / scale)
    for parameter in naive.net.parameters():
        parameter.grad /= scale  # infinity stays infinity
    naive.optimizer.step()
    cured = new_run("fp16", net, scale)
    # all were skipped
    while cured.scaler.get_scale() == scale / 2 ** len(cured.losses) and len(cured.losses) < 50:
        cured.train([batch] * 50, 1)
    ruined, still = (
        int((~parameters_to_vector(run.net.parameters()).isfinite()).sum())
        for run in (naive, cured)
    )
    skipped, fitting = len(cured.losses) - 1, cured.scaler.get_scale()
    text = f"scale 2^32: a step makes {ruined:,} weights NaN; a scaler skips {skipped}, goes on at {fitting:,.0f}"
    assert ruined > still == 0, f"{text} with {still} weights NaN"
    assert fitting == scale / 2**skipped < scale, text
    return text, fitting / 2  # rounding differs from run to run: with room for that


def vanishing_gradients(new_run: Callable, net: nn.Module, batch: tuple, scale: float) -> str:
    """A loss divided by 1,024 has gradients that fp16 rounds to zero. More than their own size says: the gradients of
    activations, which come before, are zero already."""
    gradients = []
    for name, factor in (("fp32", 1.0), ("fp16", 1.0), ("fp16", scale * MICRO_BATCHES)):
        tried = new_run(name, net, factor)
        tried.backward(batch, divide=MICRO_BATCHES)
        gradients.append(
            parameters_to_vector(parameter.grad for parameter in tried.net.parameters())
        )
    naive, cured = (
        (found == 0)[gradients[0] != 0].float().mean().item() for found in gradients[1:]
    )
    text = f"gradients of a loss / {MICRO_BATCHES:,}: {naive:.1%} become zero in fp16, with a scaler {cured:.2%}"
    assert max(0.01, 10 * cured) < naive, text
    return text


def clipping_scaled_gradients(new_run: Callable, net: nn.Module, batch: tuple, scale: float) -> str:
    """Clipped before unscale_, gradients end up `scale` times too small; the right order clips true ones."""
    norms = []
    for right in (False, True):
        tried = new_run("fp16", net, scale)
        tried.backward(batch)
        gradients = [parameter.grad for parameter in tried.net.parameters()]
        # half of the true norm: clipping has something to do
        limit = get_total_norm(gradients).item() / scale / 2
        if right:
            tried.scaler.unscale_(tried.optimizer)
        clip_grad_norm_(tried.net.parameters(), limit)
        if not right:
            tried.scaler.unscale_(tried.optimizer)
        norms.append(get_total_norm(gradients).item())
    wrong_norm, right_norm = norms
    text = f"clipping to {limit:.2f}: before unscale_ it leaves a norm of {wrong_norm:.1e}, after it {right_norm:.2f}"
    assert abs(wrong_norm * scale / limit - 1) < 0.01, text
    assert abs(right_norm / limit - 1) < 0.01, text
    return text
