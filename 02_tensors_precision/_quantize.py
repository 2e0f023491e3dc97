"""For quantize.py: torch's own kernels for integers, and the weights of Llama 2. Which kernels there are depends on
device and torch version. Each is compared with the written-out arithmetic before it is used or timed."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from _shared import Forward, Quantized, dequantizing, linears, quantize, unpack
from torch import Tensor

from common import hardware, measure, model, shapes

Kernel = Callable[[], Forward]  # makes one, or raises where it is missing
INT8_SETS = {"avx512_vnni", "avx_vnni", "amx_int8", "asimddp", "i8mm"}  # of a CPU that multiplies int8
LLAMA2 = {  # vocabulary, hidden, ffn, layers, heads, key-value heads, head_dim, length; lm_head is not tied
    "7B": (6_738_415_616, shapes.Config(32_000, 4096, 11_008, 32, 32, 32, 128, 4096)),
    "13B": (13_015_864_320, shapes.Config(32_000, 5120, 13_824, 40, 40, 40, 128, 4096)),
    "70B": (68_976_648_192, shapes.Config(32_000, 8192, 28_672, 80, 64, 8, 128, 4096)),
}


def on_matrices(forward: Forward) -> Forward:
    """Kernels take matrices: tokens of all sequences one below the other."""
    return lambda x: forward(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def has_int8_units(device: torch.device) -> bool:
    """A CPU without them multiplies in a plain loop, or in one that cuts its sums off at 16 bits."""
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (7, 5)
    cpuinfo = Path("/proc/cpuinfo")
    return device.type == "cpu" and cpuinfo.is_file() and not INT8_SETS.isdisjoint(cpuinfo.read_text().split())


def torch_kernel(w: Quantized) -> Forward:
    """torch's own for weights of w's kind and bf16 activations. int8: one scale per row. int4: packed in its own order;
    it takes whole groups, codes from 0 to 15, and beside each scale an offset, here 0."""
    if w.codes.dtype == torch.int8:
        mm8 = torch.ops.aten._weight_int8pack_mm
        return on_matrices(lambda x: mm8(x.bfloat16(), w.codes, w.scale[:, 0]).to(x.dtype))
    codes, scale, width = unpack(w.codes), w.scale, w.width
    missing = -codes.shape[1] % width
    codes = F.pad(codes + 8, (0, missing), value=8)
    scales = torch.stack((scale, torch.zeros_like(scale)), -1).transpose(0, 1).contiguous()
    if codes.is_cuda:
        if torch.cuda.get_device_capability(codes.device) < (8, 0):
            raise RuntimeError("the int4 kernel needs compute capability 8.0")
        tiles = next((t for t in (8, 4, 2) if codes.shape[1] % (16 * t) == 0), 2)  # the widest loads that fit
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).view(torch.uint8)
        packed = torch.ops.aten._convert_weight_to_int4pack(pairs, tiles)
        mm = torch.ops.aten._weight_int4pack_mm
    else:
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1)
        mm = torch.ops.aten._weight_int4pack_mm_for_cpu
    return on_matrices(lambda x: mm(F.pad(x.bfloat16(), (0, missing)), packed, width, scales).to(x.dtype))


def agrees(name: str, kernel: Kernel, exact: Forward, x: Tensor) -> Forward | None:
    """The kernel, compared with the written-out arithmetic on x; None if this device or this torch does not have it."""
    try:
        forward = kernel()
        found = forward(x)
    except (RuntimeError, AttributeError) as error:  # NotImplementedError is a RuntimeError
        print(f"{name}: no kernel for {tuple(x.shape)} on {x.device.type}: {str(error).splitlines()[0][:90]}")
        return None
    error = measure.relative_error(found, exact(x))
    assert error <= 0.01, f"{name}: kernel and arithmetic differ by {error:.1e}"
    return forward


def bf16(weight: Tensor) -> Forward:
    return lambda x: F.linear(x.bfloat16(), weight).to(x.dtype)


def all_agree(name: str, kernels: dict, exact: dict, weights: dict, sizes: dict | None = None) -> dict | None:
    """The kernels of all layers, each tried on random input times the layer's size, since small activations would all
    round to 0, which proves nothing; None if they do not run here."""
    forwards = {}
    for layer, weight in weights.items():
        x = torch.randn(32, weight.shape[1], device=weight.device) * (sizes[layer] if sizes else 1)
        forwards[layer] = agrees(f"{name}, {layer}", kernels[layer], exact[layer], x)
        if forwards[layer] is None:
            return None
    return forwards


def time_large_layer(w8a8: Callable, device: torch.device, rounds: int) -> tuple[int, dict[tuple[str, str], dict]]:
    """(side, seconds of one layer of side x side in every way that speed may come from, and their ratio to fp32). For 1
    token, where reading the weights takes the time, and for 256, where multiplying does."""
    slow = device.type == "cpu" and hardware.choose_dtype("auto", device) == "fp32"
    side = 1024 if slow else 2048 if device.type == "cpu" else 16_384
    weight = torch.randn(side, side, device=device) / side**0.5
    plain = partial(F.linear, weight=weight)
    int8, int4 = quantize(weight, 8, "channel"), quantize(weight, 4, 32)
    kind = "fp32" if weight.is_cuda else "bf16"
    ways = {  # a kernel, and the arithmetic that it must agree with
        ("fp32", "fp32"): (lambda: plain, plain),
        ("bf16", "bf16"): (lambda: bf16(weight.bfloat16()), plain),
        ("int8 per channel", f"torch's kernel, {kind}"): (lambda: torch_kernel(int8), dequantizing(int8)),
        ("int4 per 32", "torch's kernel, bf16"): (lambda: torch_kernel(int4), dequantizing(int4)),
        ("int4 per 32", "fp32, dequantized"): (lambda: dequantizing(int4), dequantizing(int4)),
        ("W8A8, min-max of text", "torch's kernel, int8"): (lambda: w8a8(int8, -5, 5), w8a8(int8, -5, 5, kernel=False)),
    }
    found = {way: {} for way in ways}
    for tokens in (1, 256):
        x = torch.randn(tokens, side, device=device)
        forwards = {way: agrees(" ".join(way), kernel, exact, x) for way, (kernel, exact) in ways.items()}
        steps = {way: partial(forward, x) for way, forward in forwards.items() if forward is not None}
        for way, measured in measure.seconds_in_turns(steps, device, rounds).items():
            for prefix in ("", "min_", "max_"):
                found[way][f"{prefix}at_{tokens}_seconds"] = measured[f"{prefix}seconds"]
                found[way][f"{prefix}at_{tokens}_time_ratio"] = measured[f"{prefix}time_ratio"]
    return side, found


def llama2_lines() -> list[str]:
    """Gigabytes of the weights alone, computed on the meta device: from all matrices quantized with few scales to those
    of the blocks alone with many, embedding and lm_head then in bf16. Norms are bf16."""
    lines = []
    for name, (published, config) in LLAMA2.items():
        with torch.device("meta"):  # tensors with a shape and no storage: any size fits
            in_blocks = Counter(layer.weight.shape for layer in linears(model.Transformer(config)).values())
        everywhere = in_blocks + Counter({(config.vocab_size, config.hidden_size): 2})
        parameters = shapes.parameter_count(config)
        assert parameters == published, f"Llama 2 {name}: {parameters:,} parameters, published are {published:,}"
        sizes = f"{2 * parameters / 1e9:.1f} GB in bf16"
        for bits, few, many in ((8, "channel", "channel"), (4, 128, 32)):
            least = _bytes(everywhere, bits, few, parameters) / 1e9
            most = _bytes(in_blocks, bits, many, parameters) / 1e9
            sizes += f", {least:.1f} to {most:.1f} GB in int{bits}"
        lines.append(f"Llama 2 {name} has its published {parameters:,} parameters; weights alone: {sizes}")
    return lines


def _bytes(matrices: Counter, bits: int, group: str | int, parameters: int) -> int:
    """Of all parameters, these matrices quantized and the others in bf16."""
    found = 2 * parameters
    for shape, count in matrices.items():
        weight = torch.empty(shape, device="meta")
        found += count * (quantize(weight, bits, group).nbytes - 2 * weight.numel())
    return found
