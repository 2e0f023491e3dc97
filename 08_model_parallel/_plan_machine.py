"""What plan.py assumes of machines: their links, and the share of each data sheet's rate that programs reach.

One set of shares per device. `python benchmarks/planner_cases.py --fit` finds them on every other measured row of
tests/data/planner_cases.csv; the rows between check them. The constants below belong to no device. They, and those of
_plan_habits.py, were set by reasoning and with all rows in view.
"""

from dataclasses import dataclass

from _estimate_time import read_device

from old import hardware
from old.exits import UserError


@dataclass(frozen=True)
class Efficiency:
    """Shares of the data sheet's rate."""

    products: float  # of a matrix product whose three sizes are large
    attention: float
    links: float  # inside a node
    network: float = 0.6  # between nodes


DEFAULT = Efficiency(products=0.65, attention=0.4, links=0.6)  # a device of which no row is measured
EFFICIENCIES = {
    "NVIDIA B200": Efficiency(products=0.49, attention=0.4, links=0.59),
    "NVIDIA H200": Efficiency(products=0.65, attention=0.31, links=0.6),
    "NVIDIA H100 80GB HBM3": Efficiency(products=0.65, attention=0.4, links=0.6),
    "H100 96GB HBM2e": Efficiency(products=0.56, attention=0.4, links=0.6),  # limited to 500 W
    "NVIDIA A100-SXM4-80GB": Efficiency(products=0.85, attention=0.27, links=0.6),
    "NVIDIA A100 80GB PCIe": Efficiency(products=0.85, attention=0.41, links=0.84),
}
MEMORY = 0.75  # of the bandwidth to the device's own memory, in kernels that only move numbers
HALF_SIZE = 256  # a product of which one size is so small reaches half of the rate
START = 12e-6  # seconds until a collective moves its first byte
HOP = 1.5e-6  # and for each further rank of its ring
NETWORK_HOP = 15e-6  # and for each further node
ACROSS_SOCKETS = 0.5  # of the speed, where a node has no NVLink and a group needs more than half of its GPUs
MARGIN = 0.05  # of the memory stays free: the formulas of estimate.py miss measured peaks by 3 % in the median
OVERLAP = 0.85  # of two things that run at once, the shorter one costs the rest: they share memory and multiprocessors


@dataclass(frozen=True)
class Machine:
    device: str
    gpus_per_node: int
    memory_bytes: float  # that a plan may fill
    peak_flops: float  # in 16 bits
    peak_flops_fp8: float
    memory_bandwidth: float
    link: float  # bytes per second and GPU inside a node, in one direction
    network: float  # and between nodes
    efficiency: Efficiency


def read_machine(device: str, *, gpus_per_node: int, network: float) -> Machine:
    """A row of common/devices.csv with its links; network in bytes per second and GPU."""
    known = read_device(device, "bf16")
    bandwidth = hardware.memory_bandwidth(device)
    if not (known.peak_flops and known.memory_bytes and bandwidth):
        raise UserError(f"--device {device}: its memory, bandwidth or bf16 rate is not known: name a GPU that trains")
    return Machine(
        device=device,
        gpus_per_node=gpus_per_node,
        memory_bytes=known.memory_bytes * (1 - MARGIN),
        peak_flops=known.peak_flops,
        peak_flops_fp8=hardware.peak_flops(device, "fp8") or known.peak_flops,
        memory_bandwidth=bandwidth,
        link=known.link,
        network=network,
        efficiency=EFFICIENCIES.get(device, DEFAULT),
    )
