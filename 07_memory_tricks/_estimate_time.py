"""How long a step takes: arithmetic at an assumed share of the peak, and communication that nothing hides."""

from dataclasses import dataclass

import _estimate_shapes as shapes
from _estimate_frameworks import FRAMEWORKS
from _estimate_plan import DTYPES, Plan
from _estimate_shapes import Shape

from old import hardware
from old.exits import UserError

EFFICIENCY = 0.5  # of the data sheet's rate, in products and attention: assumed; published runs reach 0.3 to 0.6
RECOMPUTED = {"none": 0.0, "selective": 0.0, "full": 1 / 3}  # of forward and backward: the forward pass once more
GPUS_PER_NODE = 8
NETWORK = 50e9  # bytes per second and GPU between nodes: one 400 Gb/s port each, assumed
PCIE = 25e9  # where no NVLink is known: PCIe 4.0 x16, less its overhead
# NVLink in one direction, bytes per second and GPU (NVIDIA's data sheets, half of the sum that they print)
NVLINK = {
    "GB200": 900e9,
    "B200": 900e9,
    "GH200": 450e9,
    "H200": 450e9,
    "H100 80GB HBM3": 450e9,
    "H100 NVL": 300e9,
    "H800": 200e9,
    "H20": 450e9,
    "A100-SXM": 300e9,
    "A800-SXM": 200e9,
    "V100-SXM": 150e9,
}
# A data sheet's 80 GB are 80 GiB, of which the driver leaves 79.2; of 141 it leaves 139.8, of 180 178.4.
USABLE = 0.99


@dataclass(frozen=True)
class Device:
    name: str
    memory_bytes: float | None  # None: not known, as RAM is not
    peak_flops: float | None
    link: float  # bytes per second to a GPU of the same node


def read_device(name: str, dtype: str) -> Device:
    """A row of common/devices.csv, or cpu."""
    if name == "cpu":
        return Device(name, None, None, PCIE)
    sheet = hardware.peak(name)
    if sheet is None:
        alike = [known for known in hardware.peaks() if name and name.lower() in known.lower()]
        hint = f"did you mean {' or '.join(map(repr, alike))}?" if alike else "its first column has the names"
        raise UserError(f"--device {name!r} is neither cpu nor in common/devices.csv: {hint}")
    link = next((speed for part, speed in NVLINK.items() if part in name), PCIE)
    memory = sheet.memory / 1e9 * 2**30 * USABLE if sheet.memory else None
    return Device(name, memory, hardware.peak_flops(name, dtype), link)


def speed_of(device: Device, ranks: int) -> float:
    """Of the slowest link in a group of so many neighbouring ranks."""
    return device.link if ranks <= GPUS_PER_NODE else NETWORK


def communication_seconds(shape: Shape, plan: Plan, device: Device) -> tuple[float, float]:
    """Seconds of a step in which ranks wait (tensor and expert parallel), and that may hide behind arithmetic."""
    e = DTYPES[plan.dtype]
    layers = shape.layers / plan.pp
    passes = 3 if plan.checkpointing == "full" else 2  # forward, backward, and forward again
    hidden = plan.tokens * plan.micro_batches * shape.hidden * e
    # two gathers and two scatters a layer and pass, each of (tp - 1) / tp of the hidden states (arXiv:2205.05198)
    waited = 4 * passes * layers * hidden * (plan.tp - 1) / plan.tp / speed_of(device, plan.tp)
    if shape.experts and plan.ep > 1:
        sent = 2 * passes * layers * hidden * shape.experts.active * (plan.ep - 1) / plan.ep / plan.tp
        waited += sent / speed_of(device, plan.ep * plan.tp)
    held = shapes.parameter_count(shape) / (plan.tp * plan.pp)
    share = (plan.shards - 1) / plan.shards
    if plan.zero == 3:  # weights for forward and for backward, gradients once, in every micro-batch
        sent = held * share * (2 * e + 4) * plan.micro_batches
    else:  # an all-reduce of the gradients, or its two halves
        sent = 2 * held * share * FRAMEWORKS[plan.framework].gradient
    hidden_behind = sent / speed_of(device, plan.gpus // plan.pp)
    keys_and_values = 2 * shape.kv_width / plan.tp * e * plan.tokens * plan.micro_batches * layers
    hidden_behind += passes * keys_and_values * (plan.cp - 1) / speed_of(device, plan.tp * plan.cp)
    return waited, hidden_behind


def step_seconds(shape: Shape, plan: Plan, device: Device, flops_per_token: float) -> float | None:
    """Arithmetic, times 1 + (pp - 1) / micro-batches for the pipeline's bubble, plus the waiting; None if no peak."""
    if not device.peak_flops:
        return None
    flops = flops_per_token * (1 + RECOMPUTED[plan.checkpointing]) * plan.tokens * plan.micro_batches
    arithmetic = flops / (plan.tp * plan.pp) / (device.peak_flops * EFFICIENCY)
    waited, hidden_behind = communication_seconds(shape, plan, device)
    bubble = arithmetic * (plan.pp - 1) / plan.micro_batches
    return arithmetic + bubble + waited + max(0.0, hidden_behind - arithmetic)
