"""GPUs and their links, and the seconds of a collective on them."""

from dataclasses import dataclass

from common import hardware
from planner import measured

# Of 80 GB on a data sheet, which are 80 GiB, the driver leaves 79.2. Of 141 it leaves 139.8.
USABLE = 0.99
PCIE = 25e9  # bytes per second without NVLink: PCIe 4.0 x16, less its overhead
# NVLink in one direction, bytes per second and GPU: NVIDIA's data sheets, half of the sum that they
# print.
NVLINK = {
    "GB200": 900e9,
    "B200": 900e9,
    "GH200": 450e9,
    "H200": 450e9,
    "H100 80GB HBM3": 450e9,
    "H20": 450e9,
    "H100 NVL": 300e9,
    "A100-SXM": 300e9,
    "H800": 200e9,
    "A800-SXM": 200e9,
    "V100-SXM": 150e9,
}


@dataclass(frozen=True)
class Machine:
    """A device by its data sheet, and the links between several of them."""

    device: str
    memory_bytes: float | None  # None: not known, as a computer's RAM is not
    peak_flops: float | None  # in --dtype
    memory_bandwidth: float | None
    link: float  # bytes per second and GPU inside a node, in one direction
    gpus_per_node: int = 8
    network: float = 50e9  # bytes per second and GPU between nodes: a 400 Gb/s port each

    def moved(self, size: float, share: float = measured.KERNELS) -> float:
        """Return the seconds of kernels that read and write so many bytes of the device's memory.

        share: what they reach of its bandwidth
        """
        assert self.memory_bandwidth is not None
        return size / (self.memory_bandwidth * share)

    def gather(
        self, ranks: int, stride: int, size: float, calls: float = 1, *, all_to_all: bool = False
    ) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `size` bytes.

        `ranks` ranks take part, which are `stride` apart. A ring crosses the border of nodes once,
        and its members in a node use their ports together. An all-to-all goes through the rank's
        own port. The latency counts for each of `calls` calls.
        """
        if ranks <= 1:
            return 0.0
        inside = max(1, min(ranks, self.gpus_per_node // stride))
        speed = self.link * measured.LINK
        if self.link == PCIE and inside * stride > self.gpus_per_node / 2:
            speed /= 2  # the path goes through both sockets
        latency = measured.START_SECONDS + measured.HOP_SECONDS * (ranks - 1)

        if inside < ranks:
            ports = 1 if all_to_all else inside
            network = self.network * measured.NETWORK * ports
            speed = min(speed, network) if inside > 1 else network
            latency += measured.NETWORK_HOP_SECONDS * ranks / inside
        return calls * latency + size * (ranks - 1) / ranks / speed


def behind(work: float, other: float) -> float:
    """Return the seconds by which `other`, running beside `work`, makes both together longer."""
    return max(0.0, other - work) + (1 - measured.OVERLAP) * min(other, work)


def read(device: str, dtype: str = "bf16") -> Machine:
    """Return a row of common/devices.csv with its links, or cpu.

    Raise ValueError for a name that is neither.
    """
    sheet = hardware.devices().get(device, {})
    if not sheet and device != "cpu":
        similar = [name for name in hardware.devices() if device.lower() in name.lower()]
        names = " or ".join(similar) if device and similar else "its names"
        raise ValueError(f"--device {device!r} is not in common/devices.csv, nor cpu: use {names}")

    memory = None
    if memory_of_sheet := sheet.get("memory"):
        memory = memory_of_sheet / 1e9 * 2**30 * USABLE
    link = PCIE
    for name, speed in NVLINK.items():
        if name in device:
            link = speed
            break
    return Machine(
        device=device,
        memory_bytes=memory,
        peak_flops=hardware.peak_flops(device, dtype),
        memory_bandwidth=sheet.get("bandwidth"),
        link=link,
    )
