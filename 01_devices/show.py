"""What this machine is, as far as it decides how to train on it, and which models fit.

Memory decides what fits; a dtype's FLOP/s and the memory bandwidth, how fast one device can be; the links, how far
more of them help. NVML tells what the driver knows, even of GPUs that torch cannot use; peaks come from data sheets;
whether a dtype works is tried, not believed. GB is 1e9 bytes throughout.

    laptop    python 01_devices/show.py
    one node  python 01_devices/show.py --json machine.json
    cluster   srun --ntasks-per-node=1 python 01_devices/show.py

Look for: GPUs that torch cannot use; SYS between two of them, a path through both sockets; dtypes that are only
emulated, and slow; the last table. Next: doctor.py says what is wrong here, benchmark.py how fast it really is.
"""

import math
import os
import platform
import sys
from pathlib import Path

import psutil
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from common import cli, exits, hardware, model, nvml, report, runtime

UNITS = {  # torch's dtype; CPU instruction sets that are a unit for it
    "fp32": (torch.float32, "sse2 asimd neon"),
    "tf32": (torch.float32, "amx_tf32"),
    "bf16": (torch.bfloat16, "avx512_bf16 amx_bf16 bf16 svebf16"),
    "fp16": (torch.float16, "avx512_fp16 amx_fp16 asimdhp fp16_arith"),
    "fp8": (torch.float8_e4m3fn, "amx_fp8"),
    "int8": (torch.int8, "avx512_vnni avx_vnni amx_int8 asimddp i8mm dot"),
}
SHEET = ["fp32_tflops", "tf32_tflops", "bf16_tflops", "fp8_tflops", "int8_tops", "terabytes_per_second", "source"]
TO_COMPARE = ["NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 4090"]
LLAMA2 = {  # vocabulary, hidden, ffn, layers, heads, key-value heads, head_dim, positions
    "7B": model.Config(32_000, 4096, 11_008, 32, 32, 32, 128, 4096),
    "13B": model.Config(32_000, 5120, 13_824, 40, 40, 40, 128, 4096),
    "70B": model.Config(32_000, 8192, 28_672, 80, 64, 8, 128, 4096),
}


def needs(c: model.Config) -> tuple[int, dict[str, tuple[float, float]]]:
    """N parameters; by use, the bytes spread evenly over the devices and those that each needs besides.
    For L layers of width h, vocabulary V, one sequence of 4096 tokens; a tenth of each device is left free.

    inference  weights N·bits/8 (int8, int4: an fp16 scale per 128) + KV cache 4096·2·L·kv_heads·head_dim·2
    full       16·N: bf16 weights and gradients 2 + 2, fp32 master weights 4, AdamW 8 (fp32 gradients: 18·N)
    LoRA       bf16 weights (QLoRA: int4) + 16 per adapter parameter, rank 16 on every matrix of every layer
    each       training, activations 4096·(2·h·L checkpoints + 56·h for the layer recomputed + 12·V for logits)
    """
    h, ffn, layers, vocabulary = c.hidden_size, c.intermediate_size, c.num_hidden_layers, c.vocab_size
    q, kv = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
    matrices = [(h, q), (h, kv), (h, kv), (q, h), (h, ffn), (h, ffn), (ffn, h)]
    layer = sum(rows * columns for rows, columns in matrices) + 2 * h  # and two norms
    n = layers * layer + h + vocabulary * h * (1 if c.tie_word_embeddings else 2)
    weights, cache = {"bf16": 2 * n, "int8": n + n / 64, "int4": n / 2 + n / 64}, 4096 * 2 * layers * kv * 2
    adapters = 16 * 16 * layers * sum(rows + columns for rows, columns in matrices)
    activations = 4096 * (2 * h * layers + 56 * h + 12 * vocabulary)
    return n, {f"inference {dtype}": (size + cache, 0) for dtype, size in weights.items()} | {
        "full training": (16 * n, activations),
        "LoRA training": (weights["bf16"] + adapters, activations),
        "QLoRA training": (weights["int4"] + adapters, activations),
    }


def devices_needed(spread: float, each: float, memory: float) -> int | None:
    """How many devices of `memory` bytes; None if not even what each needs fits."""
    room = 0.9 * memory - each  # a tenth for the CUDA context, workspaces, weights gathered for a moment, fragments
    return math.ceil(spread / room) if room > 0 else None


def try_product(dtype: str, device: torch.device) -> str | None:
    """Multiply matrices of -1, 0 and 1, which every dtype here can do exactly; None if it does, else why not."""
    a, b = (torch.randint(-1, 2, (256, 256), generator=torch.Generator().manual_seed(seed)) for seed in range(2))
    try:
        x, y = (matrix.to(UNITS[dtype][0]).to(device) for matrix in (a, b.t()))  # fp8 units want columns
        if dtype == "tf32":
            torch.set_float32_matmul_precision("high")
            x = torch.full_like(x, 1 + 2**-12) @ torch.eye(256, device=device)  # 12 bits, of which tf32 keeps 10
            return None if bool((x == 1).all()) else "computed in fp32: 1 + 2^-12 was not rounded"
        if dtype == "fp8":
            one = torch.ones((), device=device)  # the scale of each matrix
            x = torch._scaled_mm(x, y, one, one, out_dtype=torch.bfloat16)
        else:
            x = torch._int_mm(x, y) if dtype == "int8" else x @ y
        return None if torch.equal(x.cpu().double(), a.double() @ b.t().double()) else "wrong result"
    except Exception as error:  # what is missing says so in many forms
        return (str(error).splitlines() or [type(error).__name__])[0]
    finally:
        torch.set_float32_matmul_precision("highest")


def host(proc: str = "/proc", groups: str = "/sys/fs/cgroup") -> dict:
    def read(file: str | Path) -> str:
        return Path(file).read_text() if Path(file).is_file() else ""

    told = {k.strip(): v.strip() for k, _, v in (line.partition(":") for line in read(f"{proc}/cpuinfo").splitlines())}
    sets = told.get("flags", told.get("Features", "")).split()  # x86, ARM
    sets = sets or [name for name, there in getattr(torch.cpu, "get_capabilities", dict)().items() if there is True]
    telling = " ".join(["avx2 avx512f avx512_f amx_tile sve sve2", *(names for _, names in UNITS.values())]).split()
    # a limit may be set on this process's control group or on any above it, in version 1 or 2
    own = [line.split(":", 2)[1:] for line in read(f"{proc}/self/cgroup").splitlines()]
    folders = [folder for names, path in own for folder in Path(f"{groups}/{names}{path}", "_").parents]
    limits = [read(folder / file).strip() for folder in folders for file in ("memory.max", "memory.limit_in_bytes")]
    quotas = [said.split() for folder in folders if (said := read(folder / "cpu.max")) and not said.startswith("max")]
    memory = psutil.virtual_memory()
    return {
        "cpu": told.get("model name") or platform.processor() or platform.machine(),
        "cores_physical": psutil.cpu_count(logical=False),
        "cores_usable": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cores_limit": min((int(quota) / int(period) for quota, period in quotas), default=None),
        "memory_total_bytes": memory.total,
        "memory_available_bytes": memory.available,
        "memory_limit_bytes": min((int(s) for s in limits if s.isdigit() and int(s) < memory.total), default=None),
        "instruction_sets": [name for name in sets if name in telling],
        "mps": torch.backends.mps.is_available(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else None,
    }


def words(name: str, value: object) -> str:
    if isinstance(value, list):
        return ", ".join(f"{v['pid']} ({v['user'] or '?'})" if isinstance(v, dict) else v for v in value) or "none"
    if value is None or isinstance(value, bool):
        return {None: "n/a", True: "yes", False: "no"}[value]
    return f"{value / 1e9:.1f} GB" if name.endswith("_bytes") else f"{value:.5g}" if name in SHEET[:-1] else str(value)


def show(title: str, rows: list[dict]) -> None:
    table = report.table([[*rows[0]], *([words(*item) for item in row.items()] for row in rows)])
    print(f"{title}\n\n{table}\n")


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto", help="where to try dtypes")
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write all of it as one JSON object")
    args = parser.parse_args()
    device = runtime.single_device(args.device)
    here, (gpus, why), topology = host(), nvml.gpus(), nvml.topology()
    count = torch.cuda.is_available() * torch.cuda.device_count()  # which counts GPUs with too old a driver, too
    usable = [torch.cuda.get_device_properties(i) for i in range(count)]
    show("This machine", [{"fact": name, "value": words(name, value)} for name, value in here.items()])
    if gpus:
        heads, facts = [f"GPU {g['index']}" for g in gpus], [f for f in gpus[0] if f not in ("index", "refused")]
        rows = [{"fact": f, **{head: words(f, g[f]) for head, g in zip(heads, gpus, strict=True)}} for f in facts]
        show("GPUs, as the driver knows them; n/a: it refuses to say", rows)
        rows = [{"": head, **dict(zip(heads, row, strict=True))} for head, row in zip(heads, topology, strict=True)]
        show("Between them: NV4 is 4 NVLink lanes; by PCIe from near to far PIX, PXB, PHB, NODE, SYS", rows)
    build = "" if torch.version.cuda or torch.version.hip else " (this torch is built without CUDA)"
    print(f"NVML sees {len(gpus)} GPUs{f' ({why})' if why else ''}, torch can use {len(usable)}{build}\n")

    name, dtypes = hardware.device_name(device), []
    for dtype, (_, sets) in UNITS.items():
        unit = bool(set(here["instruction_sets"]) & set(sets.split())) if device.type == "cpu" else None
        if device.type == "cuda" and not torch.version.hip:  # AMD's numbers mean something else
            unit = torch.cuda.get_device_capability(device) >= hardware.SINCE[dtype]
        problem = try_product(dtype, device)
        verdict = "missing" if problem else {True: "native", False: "emulated", None: "works"}[unit]
        dtypes.append({"dtype": dtype, "unit": unit, "verdict": verdict, "tried": problem or "the product is right"})
    show(f"Dtypes on {name}; emulated: no unit for it, and the product is right", dtypes)
    peaks = []
    for gpu in dict.fromkeys([*(g["name"] or "n/a" for g in gpus), *(p.name for p in usable), *TO_COMPARE]):
        sheet = hardware.peak(gpu)
        values = (
            [
                *(
                    getattr(sheet, key.split("_")[0]) / 1e12
                    if key != "terabytes_per_second"
                    else sheet.bandwidth / 1e12
                    for key in SHEET[:-1]
                ),
                sheet.source,
            ]
            if sheet
            else [None] * len(SHEET)
        )
        peaks.append({"device": gpu, **dict(zip(SHEET, values, strict=True))})
    show(f"Data sheet peaks, without sparsity; 0: no unit. To compare with: {', '.join(TO_COMPARE)}", peaks)

    cards = [(p.name, p.total_memory) for p in usable] or [(g["name"], g["memory_total_bytes"]) for g in gpus]
    cards = [c for c in cards if c[1]] or [("RAM", here["memory_limit_bytes"] or here["memory_total_bytes"])]
    memory, fits = min(size for _, size in cards), []
    for llama, config in LLAMA2.items():
        n, uses = needs(config)
        with torch.device("meta"):
            assert n == sum(p.numel() for p in model.Transformer(config).parameters())
        for use, (spread, each) in uses.items():
            count, reference = (devices_needed(spread, each, size) for size in (memory, 80e9))
            demand = {"parameters": n, "use": use, "spread_bytes": spread, "each_bytes": each}
            answer = {"fits_here": bool(count) and count <= len(cards), "devices_needed": count}
            fits.append({"model": llama, **demand, **answer, "reference_80_gb_gpus": reference})
    show(f"What fits into {len(cards)} x {cards[0][0]} of {memory / 1e9:.1f} GB\n\n    {needs.__doc__.strip()}", fits)

    pairs = [(g, p) for g in gpus for p in usable if g["uuid"] == f"GPU-{p.uuid}" and not g["mig"]]
    for g, p in pairs:  # not MIG's slices; a refused query is None; NVML counts what the driver keeps for itself
        assert g["name"] in (None, p.name), (g["name"], p.name)
        assert g["compute_capability"] in (None, f"{p.major}.{p.minor}"), (g["compute_capability"], p.major, p.minor)
        assert abs((g["memory_total_bytes"] or p.total_memory) / p.total_memory - 1) < 0.05, g["memory_total_bytes"]
    print(f"checked: N is what common/model.py builds; NVML and torch agree about {len(pairs)} GPUs that both see")
    summary = {"device": name, "world_size": 1, "host": here, "gpus": gpus, "topology": topology, "dtypes": dtypes}
    report.write_json({**summary, "peaks": peaks, "fits": fits}, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
