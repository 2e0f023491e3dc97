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
    narrow = weight.bfloat16()
    return lambda x: F.linear(x.bfloat16(), narrow).to(x.dtype)


def int8_kernel(codes: Tensor, scale: Tensor) -> Forward:
    """torch's for int8 weights [out, in] and bf16 activations, one scale per row."""
    mm = torch.ops.aten._weight_int8pack_mm
    return on_matrices(lambda x: mm(x.bfloat16(), codes, scale[:, 0]).to(x.dtype))


def int4_kernel(codes: Tensor, scale: Tensor, width: int) -> Forward:
    """torch's for int4 weights, given as int8 [out, in] and packed here in its own order, and bf16 activations.

    It takes whole groups, codes from 0 to 15, and beside each scale an offset, here 0.
    """
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


def runs(kernel: Kernel, x: Tensor) -> Forward | None:
    """The kernel if this device and this torch have it for x; else None, and the reason is told."""
    try:
        forward = kernel()
        forward(x)
    except (RuntimeError, AttributeError) as error:  # NotImplementedError is a RuntimeError
        print(f"not supported, {tuple(x.shape)} on {x.device.type}: {str(error).splitlines()[0][:90]}")
        return None
    return forward


def agrees(name: str, kernel: Kernel, exact: Forward, x: Tensor) -> Forward | None:
    """The kernel, held against the written-out arithmetic on x; None if it does not run here."""
    forward = runs(kernel, x)
    if forward is None:
        return None
    expected = exact(x)
    relative_error = (forward(x) - expected).norm() / expected.norm()
    assert relative_error <= 0.01, f"{name}: kernel and arithmetic differ"
    return forward


def checked(
    layers: dict[str, nn.Linear],
    kernels: dict[str, Kernel],
    exact: dict[str, Forward],
    sizes: dict[str, float] | None = None,
) -> dict[str, Forward] | None:
    """The kernels of all layers, each tried on random input; None if they do not run here. `sizes`: what the inputs of
    a layer are multiplied with, where activations have a scale: small ones would all round to 0, which proves nothing.
    """
    forwards = {}
    for name, kernel in kernels.items():
        weight = layers[name].weight
        x = torch.randn(32, weight.shape[1], device=weight.device) * (sizes[name] if sizes else 1)
        if (forward := agrees(name, kernel, exact[name], x)) is None:
            return None
        forwards[name] = forward
    return forwards


def time_layer(
    ways: Callable[[Tensor], dict[str, tuple[Kernel, Forward]]], side: int, device: torch.device
) -> list[dict]:
    """Microseconds in one large layer, computed in `ways`: median, lowest and highest of ROUNDS of taking turns.

    For 1 token, where reading the weights takes the time, and for 256, where multiplying does.
    """
    kernels = ways(torch.randn(side, side, device=device) / side**0.5)
    rows = [{"layer": name, "side": side} for name in kernels]
    for tokens in (1, 256):
        x = torch.randn(tokens, side, device=device)
        forwards = [agrees(name, kernel, exact, x) for name, (kernel, exact) in kernels.items()]
        microseconds: list[list[float]] = [[] for _ in kernels]
        for _ in range(ROUNDS):
            for forward, own in zip(forwards, microseconds, strict=True):
                if forward is None:
                    continue
                timer = Timer("f(x)", globals={"f": forward, "x": x}, num_threads=torch.get_num_threads())
                measured = timer.blocked_autorange(min_run_time=0.02)  # warms up and waits for the GPU
                own.append(measured.median * 1e6)
        for row, own in zip(rows, microseconds, strict=True):
            row[f"microseconds_at_{tokens}"] = statistics.median(own) if own else None
            row[f"lowest_at_{tokens}"] = min(own, default=None)
            row[f"highest_at_{tokens}"] = max(own, default=None)
    return rows
