"""torch's own kernels for int8 and int4 weights, where device and version have them.

Each takes integers and scales as quantize.py makes them and returns a function that stands in for a layer's
forward. None is trusted: each is held against the written-out arithmetic before it is used or timed.
"""

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.benchmark import Timer

Forward = Callable[[Tensor], Tensor]
Kernel = Callable[[], Forward]  # makes one, or raises where it is missing
ROUNDS = 5  # the kernels take turns, so that a disturbance hits all alike


def on_matrices(forward: Forward) -> Forward:
    """Kernels take matrices: tokens of all sequences one below the other."""
    return lambda x: forward(x.flatten(0, -2)).unflatten(0, x.shape[:-1])


def bf16(weight: Tensor) -> Forward:
    low = weight.bfloat16()
    return lambda x: F.linear(x.bfloat16(), low).to(x.dtype)


def int8_kernel(codes: Tensor, scale: Tensor) -> Forward:
    """torch's for int8 weights [out, in] and bf16 activations, one scale per row."""
    mm = torch.ops.aten._weight_int8pack_mm
    return on_matrices(lambda x: mm(x.bfloat16(), codes, scale[:, 0]).to(x.dtype))


def int4_kernel(codes: Tensor, scale: Tensor, width: int) -> Forward:
    """torch's for int4 weights, given as int8 [out, in] and packed here in its own order, and bf16
    activations: whole groups, codes from 0 to 15, beside each scale an offset, here 0."""
    aten, missing = torch.ops.aten, -codes.shape[1] % width
    codes = F.pad(codes + 8, (0, missing), value=8)
    scales = torch.stack((scale, torch.zeros_like(scale)), -1).transpose(0, 1).contiguous()
    if codes.is_cuda:
        if torch.cuda.get_device_capability(codes.device) < (8, 0):
            raise RuntimeError("the int4 kernel needs compute capability 8.0")
        tiles = next((t for t in (8, 4, 2) if codes.shape[1] % (16 * t) == 0), 2)  # the widest loads that fit
        pairs = (codes[:, ::2] << 4 | codes[:, 1::2]).view(torch.uint8)
        packed, mm = aten._convert_weight_to_int4pack(pairs, tiles), aten._weight_int4pack_mm
    else:
        packed, mm = aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1), aten._weight_int4pack_mm_for_cpu
    return on_matrices(lambda x: mm(F.pad(x.bfloat16(), (0, missing)), packed, width, scales).to(x.dtype))


def runs(kernel: Kernel, x: Tensor) -> Forward | None:
    """The kernel if this device and this torch have it for x; else None, and the reason is told."""
    try:
        forward = kernel()
        forward(x)
    except (RuntimeError, AttributeError) as error:  # NotImplementedError is a RuntimeError
        print(f"not here, {tuple(x.shape)} on {x.device.type}: {str(error).splitlines()[0][:90]}")
        return None
    return forward


def agrees(name: str, kernel: Kernel, exact: Forward, x: Tensor) -> Forward | None:
    """The kernel, held against the written-out arithmetic on x; None if it does not run here."""
    if (forward := runs(kernel, x)) is not None:
        expected = exact(x)
        assert (forward(x) - expected).norm() <= 0.01 * expected.norm(), f"{name}: kernel and arithmetic differ"
    return forward


def checked(
    layers: dict[str, nn.Linear], kernels: dict[str, Kernel], exact: dict[str, Forward]
) -> dict[str, Forward] | None:
    """The kernels of all layers, each tried on random input; None if they do not run here."""
    forwards = {}
    for name, kernel in kernels.items():
        weight = layers[name].weight
        x = torch.randn(32, weight.shape[1], device=weight.device)
        if (forward := agrees(name, kernel, exact[name], x)) is None:
            return None
        forwards[name] = forward
    return forwards


def time_layer(
    ways: Callable[[Tensor], dict[str, tuple[Kernel, Forward]]], side: int, device: torch.device
) -> list[dict]:
    """Microseconds in one large layer, computed in `ways`: for 1 token, where reading the weights takes the time, and
    for 256. Median, lowest and highest of ROUNDS, in which the ways take turns."""
    kernels = ways(torch.randn(side, side, device=device) / side**0.5)
    rows = [{"layer": name, "side": side} for name in kernels]
    for tokens in (1, 256):
        x = torch.randn(tokens, side, device=device)
        forwards = [agrees(name, kernel, exact, x) for name, (kernel, exact) in kernels.items()]
        times: list[list[float]] = [[] for _ in kernels]
        for _ in range(ROUNDS):
            for forward, mine in zip(forwards, times, strict=True):
                timer = Timer("f(x)", globals={"f": forward, "x": x}, num_threads=torch.get_num_threads())
                # blocked_autorange warms up and waits for the GPU
                if forward is not None:
                    mine.append(timer.blocked_autorange(min_run_time=0.02).median * 1e6)
        for row, mine in zip(rows, times, strict=True):
            for key, of in (("microseconds", statistics.median), ("lowest", min), ("highest", max)):
                row[f"{key}_at_{tokens}"] = of(mine) if mine else None
    return rows
