"""What this machine is, and which models fit on it.

Memory decides which model fits. The FLOP/s of a dtype and the memory bandwidth decide how fast one
device can be. The links between devices decide how far more devices help. This script prints all
of these. NVML reports what the driver knows, even about GPUs that torch cannot use. Peak rates come
from data sheets (common/devices.csv). GB is 1e9 bytes throughout.

    laptop    python 01_devices/show.py
    one node  python 01_devices/show.py --json machine.json
    cluster   srun --ntasks-per-node=1 python 01_devices/show.py

What to look at: the last table, with the models that fit. GPUs that the driver sees and torch
cannot use. SYS between two GPUs: their traffic crosses both sockets. Dtypes without hardware, which
are slow. The script launches no kernels. Expected from the formulas in `needs`, on one H100 of
80 GB: 7B and 13B fit for inference in bf16, 70B fits in int8 and int4, and full training of 7B does
not fit.
Next: doctor.py checks the machine, benchmark.py measures it.
"""

import math
import sys
from pathlib import Path

# so that `import common` works
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from common import exits  # before torch: it says what to do without it

# isort: split

import _machine
import _show
import torch

from common import cli, hardware, report, runtime
from lm import shapes
from planner.inference import kv_cache_bytes
from planner.memory import peak
from planner.plan import Plan
from planner.shape import from_config

SEQ_LEN = 4096  # tokens of the one sequence that every use has
ADAPTER_RANK = 16
USABLE = 0.9  # a tenth goes to the CUDA context, workspaces, gathered weights and fragmentation
REFERENCE_BYTES = 80e9  # the memory of an A100 or H100, to compare with
ASSUMPTIONS = f"""
    One sequence of {SEQ_LEN:,} tokens. N is the number of parameters.
    inference  weights (int8 and int4 with an fp16 scale per 128 weights) and the KV cache
    full       16 N bytes: fp32 weights and gradients, and AdamW's two moments
    LoRA       bf16 weights (QLoRA: int4) and 16 bytes per adapter parameter, rank {ADAPTER_RANK},
               on every matrix of every layer
    spread     bytes that can be sharded evenly over the devices
    each       bytes that every device needs besides, in training: activations, with every block
               checkpointed
"""


def needs(config: shapes.Config) -> dict[str, tuple[float, float]]:
    """Return the bytes that each use of a model needs: (sharded over the devices, on each device).

    ASSUMPTIONS says what is counted.
    """
    parameters = shapes.parameter_count(config)
    shape = from_config("", config)

    # Weights, in bytes. An fp16 scale per 128 weights takes 2 / 128 = 1 / 64 byte per weight.
    bf16 = 2 * parameters
    int8 = parameters + parameters / 64
    int4 = parameters / 2 + parameters / 64

    # A matrix of [outputs, inputs] gets two adapters: [rank, inputs] and [outputs, rank].
    matrices = shape.attention_matrices() + shape.feed_forward_matrices(shape.ffn)
    adapter_parameters = 0
    for inputs, outputs in matrices:
        adapter_parameters += shape.layers * ADAPTER_RANK * (inputs + outputs)
    adapters = 16 * adapter_parameters  # weights, gradients and optimizer, as in full training

    # The planner counts what a training step holds, here on one of 8 devices. What is not the
    # device's share of weights, gradients and optimizer state, each device needs besides.
    states = 16 * parameters
    plan = Plan(gpus=8, zero=3, seq_len=SEQ_LEN, checkpointing="full")
    activations = peak(shape, plan).step_bytes() - states / plan.gpus

    cache = kv_cache_bytes(shape, tokens=SEQ_LEN)
    return {
        "inference bf16": (bf16 + cache, 0),
        "inference int8": (int8 + cache, 0),
        "inference int4": (int4 + cache, 0),
        "full training": (states, activations),
        "LoRA training": (bf16 + adapters, activations),
        "QLoRA training": (int4 + adapters, activations),
    }


def devices_needed(sharded: float, on_each: float, memory: float) -> int | None:
    """Return how many devices of `memory` bytes are needed, or None if no number is enough."""
    room = USABLE * memory - on_each
    if room <= 0:
        return None
    return math.ceil(sharded / room)


def llama2(
    hidden_size: int, intermediate_size: int, layers: int, heads: int, key_value_heads: int
) -> shapes.Config:
    """Return the shape of a Llama 2 (Touvron et al. 2023, arXiv:2307.09288)."""
    return shapes.Config(
        vocab_size=32_000,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_value_heads,
        head_dim=128,
        max_position_embeddings=4096,
    )


LLAMA2 = {
    "7B": llama2(4096, 11_008, 32, heads=32, key_value_heads=32),
    "13B": llama2(5120, 13_824, 40, heads=40, key_value_heads=40),
    "70B": llama2(8192, 28_672, 80, heads=64, key_value_heads=8),
}


def what_fits(devices: list[tuple[str, int]]) -> list[dict]:
    """Return a row per model and use. `devices` are (name, bytes); the smallest one counts."""
    smallest = min(size for _, size in devices)
    rows = []
    for name, config in LLAMA2.items():
        for use, (sharded, on_each) in needs(config).items():
            count = devices_needed(sharded, on_each, smallest)
            row = {
                "model": name,
                "use": use,
                "spread_bytes": sharded,
                "each_bytes": on_each,
                "fits_here": count is not None and count <= len(devices),
                "devices_needed": count,
                "reference_80_gb_gpus": devices_needed(sharded, on_each, REFERENCE_BYTES),
            }
            rows.append(row)
    return rows


def memories(usable: list, gpus: list[dict], host: dict) -> list[tuple[str, int]]:
    """Return (name, bytes) of the GPUs that torch can use, else those of the driver, else RAM."""
    devices = [(gpu.name, gpu.total_memory) for gpu in usable]
    if not devices:
        devices = [(gpu["name"], gpu["memory_total_bytes"]) for gpu in gpus]
    known = [device for device in devices if device[1]]
    if known:
        return known
    return [("RAM", host["memory_limit_bytes"] or host["memory_total_bytes"])]


def main() -> int:
    parser = cli.Parser(__doc__)
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    device = runtime.single_device(args.device)

    # 1. what there is
    host = _show.host()
    gpus, why_none = _machine.gpus()
    topology = _show.topology()
    usable = []
    if torch.cuda.is_available():  # device_count also counts GPUs whose driver is too old
        for index in range(torch.cuda.device_count()):
            usable.append(torch.cuda.get_device_properties(index))
    agreeing = _show.check_agreement(gpus, usable)
    _show.print_machine(host, gpus, why_none, topology, usable)

    # 2. what it multiplies, and the peaks of data sheets
    name = hardware.device_name(device)
    native, reason = _machine.native_types(device)
    print(f"{name} multiplies in hardware: {', '.join(sorted(native))} ({reason})")
    print("Other dtypes are computed in one of these, which is slower.\n")
    peaks = _show.peaks(gpus, usable)
    _show.print_rows("Data sheets: TFLOP/s without sparsity (0: no units for the dtype)", peaks)

    # 3. what fits
    devices = memories(usable, gpus, host)
    fits = what_fits(devices)
    size = min(size for _, size in devices) / 1e9
    heading = f"What fits into {len(devices)} x {devices[0][0]} of {size:.1f} GB"
    _show.print_rows(f"{heading}\n{ASSUMPTIONS.rstrip()}", fits)

    print(f"checked: NVML and torch agree about {agreeing} GPUs that both see")
    summary = {
        "device": name,
        "world_size": 1,
        "host": host,
        "gpus": gpus,
        "topology": topology,
        "native_dtypes": sorted(native),
        "peaks": peaks,
        "fits": fits,
    }
    report.write_json(summary, args.json)
    return 0


if __name__ == "__main__":
    exits.run(main)
