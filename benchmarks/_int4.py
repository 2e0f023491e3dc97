"""For ab.py --case int4: the kernels of 09_inference/quantized.py, matrix by matrix, on one GPU.

A version is torch's kernel, or matvec_kernel with some launch parameters. Each is captured as a
CUDA graph that multiplies by copies of a matrix which together are larger than the L2 cache.
Versions take turns.
"""

import sys
import time
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from _measure import REPO, verdict
from torch import Tensor, nn

from common import exits, hardware, measure, report
from lm import matvec
from lm.weights import read_config

sys.path.insert(0, str(REPO / "09_inference"))
import quantized

SECONDS = 130  # no new matrix after that
REPLAYS = 20  # of a graph at a time, so that starting them takes little of it
COPIES_BYTES = 400e6  # of one matrix: several times the L2 cache
READ_BYTES = 2**31
GROUP_SIZE = 32
ALLOWED_ERROR = 1e-2  # outputs are rounded to bf16
# rows of weights of a program, warps, stages of the loop; the first is what quantized.py uses
LAUNCHES = [(8, 4, 1), (8, 1, 1), (8, 4, 3), (4, 4, 1), (16, 4, 1), (8, 8, 1), (8, 2, 2)]
SEVERAL_ROWS = (2, 4, 8)  # of activations, beside 1
LAUNCHES_OF_SEVERAL_ROWS = [(8, 4, 1), (4, 4, 1)]


def compare(model: str, device: torch.device, rounds: int) -> tuple[list[dict], list[str]]:
    """Return a row for each matrix and version, and what was checked. Print rows as they come."""
    if device.type != "cuda" or matvec.tl is None:
        raise exits.UserError("--case int4 needs a GPU and Triton")
    deadline = time.monotonic() + SECONDS
    rows = [read_rate(device, rounds)]
    print_row(rows[0])
    errors = []
    for name, bits, out_features, in_features, tokens in plan(model):
        if time.monotonic() > deadline:
            print(f"no time left for {name}, int{bits}, and what follows")
            break
        x = torch.randn(tokens, in_features, device=device).bfloat16()
        steps, matrix_bytes, copies = steps_of_versions(x, bits, out_features, in_features, errors)
        for version, row in measure.seconds_in_turns(steps, device, rounds).items():
            speeds = {
                "n": rounds,
                "min": 1 / row["max_time_ratio"],
                "max": 1 / row["min_time_ratio"],
            }
            for key in ("seconds", "min_seconds", "max_seconds"):
                row[key] /= copies * REPLAYS
            row["time_us"] = round(1e6 * row["seconds"], 1)
            row["bandwidth_share"] = share(matrix_bytes / row["seconds"], device)
            described = {"case": f"{name}, int{bits}, {tokens} rows", "version": version}
            rows.append({**described, **row, "verdict": verdict(speeds)})
            print_row(rows[-1])
        del steps  # graphs and matrices, before the next
    checked = [f"{len(errors)} results are off by at most {max(errors, default=0):.0e}"]
    return rows, checked


def plan(model: str) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield name, bits, outputs, inputs and rows of activations, the most important first."""
    config = read_config(model)
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    ffn = config.intermediate_size
    matrices = {
        "gate, up": (2 * ffn, hidden),
        "down": (hidden, ffn),
        "q, k, v": (queries + 2 * keys, hidden),
        "o": (hidden, queries),
        "k": (keys, hidden),
    }
    for bits in (4, 8):
        for name, (out_features, in_features) in matrices.items():
            yield name, bits, out_features, in_features, 1
    for tokens in SEVERAL_ROWS:
        yield "gate, up", 4, *matrices["gate, up"], tokens


def read_rate(device: torch.device, rounds: int) -> dict:
    """Return a row that shows how fast this card reads: no kernel can be expected to be faster."""
    buffer = torch.zeros(READ_BYTES // 4, device=device)
    timing = measure.seconds_in_turns({"read": buffer.sum}, device, rounds)["read"]
    row = {"case": "a sum of 2 GiB", "version": "torch", **timing}
    row["time_us"] = round(1e6 * row["seconds"], 1)
    row["bandwidth_share"] = share(READ_BYTES / row["seconds"], device)
    return row


def share(bytes_per_second: float, device: torch.device) -> float | None:
    """Return the share of the bandwidth in the data sheet, or None for an unknown card."""
    known = hardware.devices().get(hardware.device_name(device), {})
    bandwidth = known.get("bandwidth")
    return bytes_per_second / bandwidth if bandwidth else None


def print_row(row: dict) -> None:
    """Print a row at once: a run that is killed has shown what it measured."""
    rate = report.for_people("bandwidth_share", row["bandwidth_share"])
    time_taken = f"{1e6 * row['seconds']:.1f} microseconds"
    print(f"{row['case']}: {row['version']}: {time_taken}, {rate}", flush=True)


def steps_of_versions(
    x: Tensor, bits: int, out_features: int, in_features: int, errors: list[float]
) -> tuple[dict[str, Callable], int, int]:
    """Return the versions as functions that multiply by all copies, a matrix's bytes, and copies.

    Assert that each version multiplies as the dequantized matrix does, and append its error.
    """
    parts = random_parts(bits, out_features, in_features, x.device)
    matrix_bytes = sum(part[0].nbytes for part in parts)
    copies = len(parts[0])
    kind = {4: quantized.Int4Linear, 8: quantized.Int8Linear}[bits]
    torch_layers = []
    triton_layers = []
    for one_copy in zip(*parts, strict=True):
        torch_layers.append(kind(*one_copy, torch.bfloat16))
        triton_layers.append(matvec.triton_layer(*one_copy))
    expected = F.linear(x.float(), kind.dequantize(*(part[0] for part in parts)))

    versions = {"torch": (multiply_by_layer, torch_layers)}
    if bits == 8:
        versions = {"torch, compiled": (multiply_int8_compiled, torch_layers)}
    launches = LAUNCHES if len(x) == 1 else LAUNCHES_OF_SEVERAL_ROWS
    for launch in launches:
        rows, warps, stages = launch
        name = f"triton: {rows} rows, {warps} warps, {stages} stages"
        versions[name] = (multiply_by_matvec(launch), triton_layers)
    if len(x) > 1:
        versions["triton: dequantize"] = (multiply_by_dequantized, triton_layers)

    steps = {}
    for name, (multiply, layers) in versions.items():
        error = measure.relative_error(multiply(x, layers[0]).float(), expected)
        assert error <= ALLOWED_ERROR, f"{name}: off by {error:.1e}"
        errors.append(error)
        steps[name] = captured(multiply, x, layers)
    return steps, matrix_bytes, copies


def random_parts(bits: int, out_features: int, in_features: int, device) -> list[Tensor]:
    """Return codes, scales and in int4 zeros of copies of a matrix, [copies, out, ...]."""
    row_bytes = in_features * bits // 8
    copies = max(2, round(COPIES_BYTES / (out_features * row_bytes)))
    codes = torch.randint(
        0, 256, (copies, out_features, row_bytes), dtype=torch.uint8, device=device
    )
    if bits == 8:
        scale = torch.rand(copies, out_features, device=device).bfloat16()
        return [codes.view(torch.int8), scale]
    scale = torch.rand(copies, out_features, in_features // GROUP_SIZE, device=device)
    zero = torch.randn_like(scale)
    return [codes, scale.bfloat16(), zero.bfloat16()]


def multiply_by_layer(x: Tensor, layer: nn.Module) -> Tensor:
    return layer(x)


def multiply_int8(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    return F.linear(x, codes.to(x.dtype)) * scale


def multiply_int8_compiled(x: Tensor, layer: nn.Module) -> Tensor:
    """Multiply as Int8Linear in a compiled decode step, which converts the codes as it reads them.

    `compiled` in lm/generate.py has the same options.
    """
    options = {"coordinate_descent_tuning": True}
    multiply = torch.compile(multiply_int8, dynamic=False, options=options)
    return multiply(x, layer.codes, layer.scale)


def multiply_by_matvec(launch: tuple[int, int, int]) -> Callable[[Tensor, nn.Module], Tensor]:
    """Return a function that multiplies with these rows, warps and stages."""

    def multiply(x: Tensor, layer: nn.Module) -> Tensor:
        return matvec.matvec(x, layer.words, layer.scales, layer.bits, *launch)

    return multiply


def multiply_by_dequantized(x: Tensor, layer: nn.Module) -> Tensor:
    return F.linear(x, matvec.dequantize_words(layer.words, layer.scales, layer.bits))


def captured(multiply: Callable, x: Tensor, layers: list[nn.Module]) -> Callable[[], None]:
    """Return a function that replays a CUDA graph, which multiplies by each layer once."""
    for layer in layers[:2]:
        multiply(x, layer)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for layer in layers:
            multiply(x, layer)

    def replay() -> None:
        for _ in range(REPLAYS):
            graph.replay()

    return replay
