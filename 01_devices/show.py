"""What this machine is, as far as it decides how to train on it, and which models fit.

Memory decides what fits; a type's FLOP/s and the memory bandwidth, how fast one device can be; the links, how far
more of them help. NVML tells what the driver knows, even of GPUs that torch cannot use; peaks come from data sheets;
whether a type works is tried, not believed. GB is 1e9 bytes throughout.

    laptop    python 01_devices/show.py
    one node  python 01_devices/show.py --json machine.json
    cluster   srun --ntasks-per-node=1 python 01_devices/show.py

Look for: GPUs that torch cannot use; SYS between two of them, a path through both sockets; types that are only
emulated, and slow; the last table. Next: doctor.py says what is wrong here, benchmark.py how fast it really is.
"""

import math
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/ and planner/, with nothing installed
from _show_machine import host, topology
from _show_report import print_dtypes, print_fits, print_gpus, print_host, print_peaks

from old import cli, exits, hardware, model, nvml, report, runtime, shapes
from planner.inference import kv_cache_bytes
from planner.memory import peak
from planner.plan import Plan
from planner.shape import from_config

TYPES = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
    "int8": torch.int8,
}
LLAMA2 = {  # vocabulary, hidden, ffn, layers, heads, key-value heads, head_dim, positions
    "7B": shapes.Config(32_000, 4096, 11_008, 32, 32, 32, 128, 4096),
    "13B": shapes.Config(32_000, 5120, 13_824, 40, 40, 40, 128, 4096),
    "70B": shapes.Config(32_000, 8192, 28_672, 80, 64, 8, 128, 4096),
}


def needs(c: shapes.Config) -> tuple[int, dict[str, tuple[float, float]]]:
    """N parameters; by use, the bytes spread evenly over the devices and those that each needs besides.
    For L layers of width h, vocabulary V, one sequence of 4096 tokens; a tenth of each device is left free.

    inference  weights N·bits/8 (int8, int4: an fp16 scale per 128) + KV cache 4096·2·L·kv_heads·head_dim·2
    full       16·N: bf16 weights and gradients 2 + 2, fp32 master weights 4, AdamW 8 (fp32 gradients: 18·N)
    LoRA       bf16 weights (QLoRA: int4) + 16 per adapter parameter, rank 16 on every matrix of every layer
    each       training, by planner/ with every block checkpointed: 4096·2·h·L for their inputs, and
               the larger of one block recomputed and 4096·12·V for the logits
    """
    shape = from_config("", c)
    plan = Plan(seq_len=4096, checkpointing="full", framework="deepspeed")
    training = peak(shape, plan)
    states = training.weight_bytes() + training.gradient_bytes() + training.optimizer_bytes()
    each = training.allocated_bytes() - states
    n = shapes.parameter_count(c)
    h, ffn, layers = c.hidden_size, c.intermediate_size, c.num_hidden_layers
    q = c.num_attention_heads * c.head_dim
    kv = c.num_key_value_heads * c.head_dim
    matrices = [(h, q), (h, kv), (h, kv), (q, h), (h, ffn), (h, ffn), (ffn, h)]
    weights = {"bf16": 2 * n, "int8": n + n / 64, "int4": n / 2 + n / 64}
    cache = kv_cache_bytes(shape, tokens=4096)
    adapters = 16 * 16 * layers * sum(rows + columns for rows, columns in matrices)
    return n, {
        "inference bf16": (weights["bf16"] + cache, 0),
        "inference int8": (weights["int8"] + cache, 0),
        "inference int4": (weights["int4"] + cache, 0),
        "full training": (states, each),
        "LoRA training": (weights["bf16"] + adapters, each),
        "QLoRA training": (weights["int4"] + adapters, each),
    }


def devices_needed(spread: float, each: float, memory: float) -> int | None:
    """How many devices of `memory` bytes; None if not even what each needs fits."""
    room = 0.9 * memory - each  # a tenth for the CUDA context, workspaces, weights gathered for a moment, fragments
    return math.ceil(spread / room) if room > 0 else None


def try_product(dtype: str, device: torch.device) -> str | None:
    """Multiply matrices of -1, 0 and 1, which every type here can do exactly; None if it does, else why not."""
    a = torch.randint(-1, 2, (256, 256), generator=torch.Generator().manual_seed(0))
    b = torch.randint(-1, 2, (256, 256), generator=torch.Generator().manual_seed(1))
    try:
        torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
        x = a.to(TYPES[dtype]).to(device)
        y = b.t().to(TYPES[dtype]).to(device)  # by columns, as fp8 units want it
        if dtype == "tf32":
            x = torch.full_like(x, 1 + 2**-12) @ torch.eye(256, device=device)  # 12 bits, of which tf32 keeps 10
            return None if bool((x == 1).all()) else "computed in fp32: 1 + 2^-12 was not rounded"
        if dtype == "fp8":
            one = torch.ones((), device=device)  # the scale of each matrix
            product = torch._scaled_mm(x, y, one, one, out_dtype=torch.bfloat16)
        elif dtype == "int8":
            product = torch._int_mm(x, y)
        else:
            product = x @ y
        return None if torch.equal(product.cpu().double(), a.double() @ b.t().double()) else "wrong result"
    except Exception as error:  # what is missing says so in many forms
        return (str(error).splitlines() or [type(error).__name__])[0]
    finally:
        torch.set_float32_matmul_precision("highest")


def tried_types(device: torch.device) -> list[dict]:
    """For each type: has `device` units for it, and does a product come out right?"""
    native, _ = hardware.native_types(device)
    found = []
    for dtype in TYPES:
        problem = try_product(dtype, device)
        works = "native" if dtype in native else "emulated"
        found.append(
            {
                "dtype": dtype,
                "unit": dtype in native,
                "verdict": "missing" if problem else works,
                "tried": problem or "right",
            }
        )
    return found


SHEET = [
    *("fp32_tflops", "tf32_tflops", "bf16_tflops", "fp16_tflops", "fp8_tflops", "int8_tops"),
    *("terabytes_per_second", "memory_bytes", "tdp_watts", "source"),
]
TO_COMPARE = ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"]


def sheet_of(name: str) -> dict:
    """What the data sheet says of a device; None where there is none."""
    sheet = hardware.peak(name)
    if sheet is None:
        return {"device": name, **dict.fromkeys(SHEET)}
    rates = [sheet.fp32, sheet.tf32, sheet.bf16, sheet.fp16, sheet.fp8, sheet.int8, sheet.bandwidth]
    scaled = [None if rate is None else rate / 1e12 for rate in rates]
    return {"device": name, **dict(zip(SHEET, [*scaled, sheet.memory, sheet.tdp, sheet.source], strict=True))}


def what_fits(cards: list[tuple[str, int]]) -> list[dict]:
    """Each Llama 2 in each use, on devices as large as the smallest of `cards`, (name, bytes)."""
    memory = min(size for _, size in cards)
    found = []
    for name, config in LLAMA2.items():
        n, uses = needs(config)
        with torch.device("meta"):
            assert n == sum(p.numel() for p in model.Transformer(config).parameters())
        for use, (spread, each) in uses.items():
            count = devices_needed(spread, each, memory)
            found.append(
                {
                    "model": name,
                    "parameters": n,
                    "use": use,
                    "spread_bytes": spread,
                    "each_bytes": each,
                    "fits_here": count is not None and count <= len(cards),
                    "devices_needed": count,
                    "reference_80_gb_gpus": devices_needed(spread, each, 80e9),
                }
            )
    return found


def check_agreement(gpus: list[dict], usable: list) -> int:
    """NVML and torch must say the same of each GPU that both see; how many these are."""
    pairs = [(g, p) for g in gpus for p in usable if g["uuid"] == f"GPU-{p.uuid}" and not g["mig"]]  # not MIG's slices
    for g, p in pairs:  # NVML counts what the driver keeps for itself; a value that it does not report is None
        assert g["name"] in (None, p.name), (g["name"], p.name)
        assert g["compute_capability"] in (None, f"{p.major}.{p.minor}"), (g["compute_capability"], p.major, p.minor)
        assert abs((g["memory_total_bytes"] or p.total_memory) / p.total_memory - 1) < 0.05, g["memory_total_bytes"]
    return len(pairs)


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto", help="where to try types")
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write all of it as one JSON object")
    args = parser.parse_args()
    device = runtime.single_device(args.device)
    here = host()
    gpus, why_none = nvml.gpus()
    paths = topology()
    # device_count() counts GPUs with too old a driver, too
    usable_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    usable = [torch.cuda.get_device_properties(i) for i in range(usable_count)]

    print_host(here)
    if gpus:
        print_gpus(gpus, paths)
    build = "" if torch.version.cuda or torch.version.hip else " (this torch is built without CUDA)"
    reason = f" ({why_none})" if why_none else ""
    print(f"NVML sees {len(gpus)} GPUs{reason}, torch can use {len(usable)}{build}\n")

    name = hardware.device_name(device)
    dtypes = tried_types(device)
    print_dtypes(dtypes, name, hardware.native_types(device)[1])

    seen = [gpu["name"] or "n/a" for gpu in gpus] + [properties.name for properties in usable]
    peaks = [sheet_of(gpu) for gpu in dict.fromkeys(seen + TO_COMPARE)]
    print_peaks(peaks)

    cards = [(p.name, p.total_memory) for p in usable] or [(g["name"], g["memory_total_bytes"]) for g in gpus]
    cards = [card for card in cards if card[1]]
    cards = cards or [("RAM", here["memory_limit_bytes"] or here["memory_total_bytes"])]
    fits = what_fits(cards)
    size = min(size for _, size in cards) / 1e9
    print_fits(fits, f"What fits into {len(cards)} x {cards[0][0]} of {size:.1f} GB\n\n    {needs.__doc__.strip()}")

    agreeing = check_agreement(gpus, usable)
    print(f"checked: N is what common/model.py builds; NVML and torch agree about {agreeing} GPUs that both see")
    summary = {
        "device": name,
        "world_size": 1,
        "host": here,
        "gpus": gpus,
        "topology": paths,
        "dtypes": dtypes,
        "peaks": peaks,
        "fits": fits,
    }
    report.write_json(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
