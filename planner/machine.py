"""GPUs, their links, and the share of each data sheet's rate that programs reach; seconds of a collective on them.

The shares of a device were fitted to every other row of tests/data/planner_cases.csv (the fit: commit 59fb97a). The
constants belong to no device; they were set by reasoning, with those rows in view."""

from dataclasses import dataclass

from common import hardware

# a data sheet's 80 GB are 80 GiB, of which the driver leaves 79.2; of 141 it leaves 139.8
USABLE = 0.99
PCIE = 25e9  # bytes per second where no NVLink is known: PCIe 4.0 x16, less its overhead
# NVLink in one direction, bytes per second and GPU (NVIDIA's data sheets, half of the sum that they print)
NVLINK = {
    **dict.fromkeys(("GB200", "B200"), 900e9),
    **dict.fromkeys(("GH200", "H200", "H100 80GB HBM3", "H20"), 450e9),
    **dict.fromkeys(("H100 NVL", "A100-SXM"), 300e9),
    **dict.fromkeys(("H800", "A800-SXM"), 200e9),
    "V100-SXM": 150e9,
}
# Shares of the data sheet's rate: of a large matmul, of attention, of the links inside a node.
EFFICIENCIES = {
    "NVIDIA B200": (0.49, 0.4, 0.59),
    "NVIDIA H200": (0.65, 0.31, 0.6),
    "NVIDIA H100 80GB HBM3": (0.65, 0.4, 0.6),
    "NVIDIA A100-SXM4-80GB": (0.85, 0.27, 0.6),
    "NVIDIA A100 80GB PCIe": (0.85, 0.41, 0.84),
}
DEFAULT = (0.65, 0.4, 0.6)  # a device of which no step is measured
NETWORK_SHARE = 0.6  # of the links between nodes
# of the bandwidth to the device's own memory, in kernels that only move numbers
MEMORY_SHARE = 0.75
START = 12e-6  # seconds until a collective moves its first byte
HOP, NETWORK_HOP = 1.5e-6, 15e-6  # and for each further rank of its ring, and each further node
# of two things that run at once, the shorter one costs the rest: they share memory and
# multiprocessors
OVERLAP = 0.85


@dataclass(frozen=True)
class Machine:
    device: str
    memory_bytes: float | None  # None: not known, as a computer's RAM is not
    peak_flops: float | None  # in --dtype
    fp8_flops: float | None
    memory_bandwidth: float | None
    link: float  # bytes per second and GPU inside a node, in one direction
    efficiency: tuple[float, float, float]
    gpus_per_node: int = 8
    network: float = 50e9  # bytes per second and GPU between nodes: one 400 Gb/s port each

    def moved(self, size: float) -> float:
        """Seconds in which kernels read and write so many bytes of the device's own memory."""
        return size / (self.memory_bandwidth * MEMORY_SHARE)

    def gather(
        self, ranks: int, stride: int, size: float, calls: float = 1, *, all_to_all: bool = False
    ) -> float:
        """Seconds of an all-gather or reduce-scatter of `size` bytes among ranks `stride` apart. A ring crosses the
        border of nodes once, its members use their ports together; an all-to-all goes through the rank's own port."""
        if ranks <= 1:
            return 0.0
        inside = max(1, min(ranks, self.gpus_per_node // stride))
        across_sockets = self.link == PCIE and inside * stride > self.gpus_per_node / 2
        speed = self.link * self.efficiency[2] / (2 if across_sockets else 1)
        if inside < ranks:
            network = self.network * NETWORK_SHARE * (1 if all_to_all else inside)
            speed = min(speed, network) if inside > 1 else network
        latency = START + HOP * (ranks - 1) + NETWORK_HOP * ranks / inside * (inside < ranks)
        return calls * latency + size * (ranks - 1) / ranks / speed


def behind(work: float, other: float) -> float:
    """Seconds by which `other`, running beside `work`, makes the sum longer."""
    return max(0.0, other - work) + (1 - OVERLAP) * min(other, work)


def read(device: str, dtype: str = "bf16") -> Machine:
    """A row of common/devices.csv with its links, or cpu. ValueError for a name that is neither."""
    sheet = hardware.devices().get(device, {})
    if not sheet and device != "cpu":
        alike = [name for name in hardware.devices() if device and device.lower() in name.lower()]
        use = " or ".join(alike) or "its names"
        raise ValueError(f"--device {device!r} is not in common/devices.csv, nor cpu: use {use}")
    return Machine(
        device=device,
        memory_bytes=sheet["memory"] / 1e9 * 2**30 * USABLE if sheet.get("memory") else None,
        peak_flops=hardware.peak_flops(device, dtype),
        fp8_flops=hardware.peak_flops(device, "fp8"),
        memory_bandwidth=sheet.get("bandwidth"),
        link=next((speed for part, speed in NVLINK.items() if part in device), PCIE),
        efficiency=EFFICIENCIES.get(device, DEFAULT),
    )
