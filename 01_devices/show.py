"""What this machine is, as far as it decides how to train on it, and which models fit.

Memory decides what fits; a type's FLOP/s and the memory bandwidth, how fast one device can be; the links, how far
more of them help. NVML reports what the driver knows, even of GPUs that torch cannot use; peaks come from data sheets.
GB is 1e9 bytes throughout.

    laptop    python 01_devices/show.py
    one node  python 01_devices/show.py --json machine.json
    cluster   srun --ntasks-per-node=1 python 01_devices/show.py

Look for: GPUs that torch cannot use; SYS between two of them, a path through both sockets; types without hardware,
which are slow; the last table. Next: doctor.py says what is wrong here, benchmark.py how fast it really is.
"""

import math
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import torch

# so that `import common` works
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import _shared as machine

from common import cli, exits, hardware, report, runtime
from common.report import table
from lm import shapes
from planner.inference import kv_cache_bytes
from planner.memory import peak
from planner.plan import Plan
from planner.shape import from_config

LLAMA2 = {  # vocabulary, hidden, ffn, layers, heads, key-value heads, head_dim, positions
    "7B": shapes.Config(32_000, 4096, 11_008, 32, 32, 32, 128, 4096),
    "13B": shapes.Config(32_000, 5120, 13_824, 40, 40, 40, 128, 4096),
    "70B": shapes.Config(32_000, 8192, 28_672, 80, 64, 8, 128, 4096),
}


def needs(c: shapes.Config) -> dict[str, tuple[float, float]]:
    """By use, the bytes spread evenly over the devices and those that each needs besides; one sequence of 4,096 tokens.

    inference  weights of N parameters (int8, int4: an fp16 scale per 128) + KV cache
    full       16 N: fp32 weights, gradients and AdamW's two moments
    LoRA       bf16 weights (QLoRA: int4) + 16 bytes per adapter parameter, rank 16 on every matrix of every layer
    each       training: what planner/ adds to the states, with every block checkpointed
    """
    shape = from_config("", c)
    n = shapes.parameter_count(c)
    gpus = 8  # the rank's share of the states is subtracted again
    training = peak(shape, Plan(gpus=gpus, zero=3, seq_len=4096, checkpointing="full"))
    states = 16 * n
    each = training.step_bytes() - states / gpus
    weights = {"bf16": 2 * n, "int8": n + n / 64, "int4": n / 2 + n / 64}
    cache = kv_cache_bytes(shape, tokens=4096)
    matrices = shape.attention_matrices() + shape.feed_forward_matrices(shape.ffn)
    adapters = 16 * 16 * shape.layers * sum(inputs + outputs for inputs, outputs in matrices)
    inference = {f"inference {dtype}": (size + cache, 0) for dtype, size in weights.items()}
    return {
        **inference,
        "full training": (states, each),
        "LoRA training": (weights["bf16"] + adapters, each),
        "QLoRA training": (weights["int4"] + adapters, each),
    }


def devices_needed(spread: float, each: float, memory: float) -> int | None:
    """How many devices of `memory` bytes; None if not even what each needs fits."""
    # a tenth for the CUDA context, workspaces, weights gathered for a moment, fragments
    room = 0.9 * memory - each
    return math.ceil(spread / room) if room > 0 else None


def what_fits(cards: list[tuple[str, int]]) -> list[dict]:
    """Each Llama 2 in each use, on devices as large as the smallest of `cards`, (name, bytes)."""
    memory = min(size for _, size in cards)
    rows = []
    for name, config in LLAMA2.items():
        for use, (spread, each) in needs(config).items():
            count = devices_needed(spread, each, memory)
            rows.append(
                {
                    "model": name,
                    "use": use,
                    "spread_bytes": spread,
                    "each_bytes": each,
                    "fits_here": count is not None and count <= len(cards),
                    "devices_needed": count,
                    "reference_80_gb_gpus": devices_needed(spread, each, 80e9),
                }
            )
    return rows


def peaks_of(name: str) -> dict:
    """What the data sheet says of a device, without sparsity: None is not known, 0 a type without units."""
    sheet = hardware.devices().get(name, {})
    rates = {f"{dtype}_tflops": sheet.get(dtype) for dtype in machine.CUDA_SINCE}
    rates["terabytes_per_second"] = sheet.get("bandwidth")
    in_tera = {key: None if value is None else value / 1e12 for key, value in rates.items()}
    return {
        "device": name,
        **in_tera,
        "memory_bytes": sheet.get("memory"),
        "tdp_watts": sheet.get("tdp"),
    }


def check_agreement(gpus: list[dict], usable: list) -> int:
    """NVML and torch must say the same of each GPU that both see; how many these are."""
    # not MIG's slices
    pairs = [(g, p) for g in gpus for p in usable if g["uuid"] == f"GPU-{p.uuid}" and not g["mig"]]
    # NVML counts what the driver keeps for itself; a value that it does not report is None
    for g, p in pairs:
        assert g["name"] in (None, p.name), (g["name"], p.name)
        assert g["compute_capability"] in (None, f"{p.major}.{p.minor}"), (
            g["compute_capability"],
            p.major,
            p.minor,
        )
        assert abs((g["memory_total_bytes"] or p.total_memory) / p.total_memory - 1) < 0.05, g[
            "memory_total_bytes"
        ]
    return len(pairs)


def host() -> dict:
    """The processor, its cores and memory with the limits of this process's control group, and torch's build."""
    memory_limit, cores_limit = machine.limits()
    return {
        "cpu": machine.cpu_fact("model name") or platform.machine(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "cores_limit": cores_limit,
        "memory_total_bytes": psutil.virtual_memory().total,
        "memory_limit_bytes": memory_limit,
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": hardware.cudnn_version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version()))
        if torch.distributed.is_nccl_available()
        else None,
    }


def topology() -> str | None:
    """How each GPU reaches each other and the processor, in nvidia-smi's words; None without nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    told = subprocess.run(
        ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=60, check=False
    )
    return told.stdout if told.returncode == 0 else None


def print_rows(heading: str, rows: list[dict]) -> None:
    """One line for each row; bytes in GB, rates in powers of ten."""
    heads = [name.removesuffix("_bytes").replace("_", " ") for name in rows[0]]
    cells = [[_words(row.get("", name), value) for name, value in row.items()] for row in rows]
    print(f"{heading}\n\n{table([heads, *cells])}\n")


def _words(name: str, value: object) -> str:
    if value is None or isinstance(value, bool):
        return {None: "n/a", True: "yes", False: "no"}[value]
    if isinstance(value, list):
        return (
            ", ".join(
                f"{v['pid']} ({v['user'] or '?'})" if isinstance(v, dict) else v for v in value
            )
            or "none"
        )
    if isinstance(value, int | float) and name.endswith("_bytes"):
        return f"{value / 1e9:,.1f} GB"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def main() -> int:
    parser = cli.Parser(__doc__)
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    device = runtime.single_device(args.device)
    here = host()
    gpus, why_none = machine.gpus()
    paths = topology()
    # device_count() counts GPUs with too old a driver, too
    usable_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    usable = [torch.cuda.get_device_properties(i) for i in range(usable_count)]

    print_rows("This machine", [{"": name, "value": value} for name, value in here.items()])
    for row in gpus:
        facts = [{"": name, "value": row[name]} for name in row if name != "refused"]
        print_rows(f"GPU {row['index']}, as the driver knows it (n/a: it does not say)", facts)
    if gpus:
        print(f"Between GPUs\n\n{paths or 'n/a: nvidia-smi does not say'}\n")
    build = "" if torch.version.cuda or torch.version.hip else " (this torch is built without CUDA)"
    reason = f" ({why_none})" if why_none else ""
    print(f"NVML sees {len(gpus)} GPUs{reason}, torch can use {len(usable)}{build}\n")

    name = hardware.device_name(device)
    native, how = machine.native_types(device)
    print(
        f"{name} multiplies in hardware: {', '.join(sorted(native))}; other types it can only emulate ({how})\n"
    )
    seen = [gpu["name"] or "n/a" for gpu in gpus] + [properties.name for properties in usable]
    compared = ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"]
    peaks = [peaks_of(gpu) for gpu in dict.fromkeys(seen + compared)]
    print_rows("Data sheets, without sparsity (0: no units for the type)", peaks)

    cards = [(p.name, p.total_memory) for p in usable] or [
        (g["name"], g["memory_total_bytes"]) for g in gpus
    ]
    cards = [card for card in cards if card[1]]
    cards = cards or [("RAM", here["memory_limit_bytes"] or here["memory_total_bytes"])]
    fits = what_fits(cards)
    size = min(size for _, size in cards) / 1e9
    heading = f"What fits into {len(cards)} x {cards[0][0]} of {size:.1f} GB\n\n    {needs.__doc__.strip()}"
    print_rows(heading, fits)

    agreeing = check_agreement(gpus, usable)
    print(f"checked: NVML and torch agree about {agreeing} GPUs that both see")
    summary = {
        "device": name,
        "world_size": 1,
        "host": here,
        "gpus": gpus,
        "topology": paths,
        "native_dtypes": sorted(native),
        "peaks": peaks,
        "fits": fits,
    }
    report.write_json(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
