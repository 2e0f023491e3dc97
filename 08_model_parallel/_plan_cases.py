"""Measured step times beside plan.py: a row of planner_cases.csv to a layout, a machine and our figure."""

import re
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import _estimate_planner_cases as memory_cases
import estimate
from _plan_layout import Layout
from _plan_machine import DEFAULT, EFFICIENCIES, Efficiency, Machine, read_machine
from plan import step_seconds

# How the rows name devices, in the order in which they are tried, and the names of common/devices.csv.
DEVICES = {
    "GB200": "NVIDIA GB200",
    "GB300": "NVIDIA GB200",
    "B200": "NVIDIA B200",
    "H200": "NVIDIA H200",
    "A100 80GB PCIe": "NVIDIA A100 80GB PCIe",
    "A100": "NVIDIA A100-SXM4-80GB",
    "H100": "NVIDIA H100 80GB HBM3",
}
# torchtitan's H100s have 96 GB of HBM2e and are limited to 500 W. Where a row does not say so, their 95 GiB do.
H100_96GB = "H100 96GB HBM2e"
H100_96GB_BANDWIDTH = 2.4e12
# What common/hardware.py does not know: rows that are printed and not counted.
UNKNOWN = ("GB300", "power limited")
FITTED_ON = Path(__file__).resolve().parents[1] / "tests/data/planner_cases.csv"
UNSEEN = FITTED_ON.with_name("more_planner_cases.csv")  # nobody looked at them before the model was finished
NETWORK = 50e9  # a 400 Gb/s port for each GPU, as the clusters of these rows have
NETWORK_OF_A100 = 25e9  # and those with A100s one of 200 Gb/s
ASYNC_TP_HIDES = 0.5  # of the collectives, behind parts of the products: assumed


@dataclass(frozen=True)
class Answer:
    id: str
    source: str
    device: str
    counted: bool  # is the device known?
    fitted: bool  # was the row used to find the device's efficiencies?
    group: str  # rows of one model on one machine
    measured_seconds: float
    predicted_seconds: float
    tokens: float  # per step and GPU
    causes: dict[str, float]

    @property
    def error(self) -> float:
        return self.predicted_seconds / self.measured_seconds - 1


def device_of(row: dict) -> str | None:
    """None: not in common/devices.csv."""
    if "H100" in row["gpu"] and re.search(r"HBM2e|\(95\.0", row["gpu"]):
        return H100_96GB
    return next((name for part, name in DEVICES.items() if part in row["gpu"]), None)


def machine_of(row: dict, efficiencies: dict[str, Efficiency]) -> Machine:
    device = device_of(row)
    sheet = DEVICES["H100"] if device == H100_96GB else device
    machine = read_machine(sheet, gpus_per_node=8, network=NETWORK_OF_A100 if "A100" in device else NETWORK)
    if device == H100_96GB:
        machine = replace(machine, memory_bandwidth=H100_96GB_BANDWIDTH)
    if "fake communication" in row["notes"]:
        machine = replace(machine, link=inf, network=inf)
    return replace(machine, efficiency=efficiencies.get(device, DEFAULT))


def layout_of(row: dict) -> Layout:
    fp8 = "" if "float8" not in row["dtype"] else "rowwise" if "rowwise" in row["notes"] else "tensorwise"
    return Layout(
        **vars(memory_cases.plan_of(row)),
        virtual=int(row["vpp"] or 1),
        fp8=fp8,
        tp_hidden=ASYNC_TP_HIDES if "async TP" in row["notes"] else 0.0,
    )


def tokens_of(layout: Layout) -> float:
    """Tokens per step and GPU."""
    return layout.tokens * layout.micro_batches / (layout.tp * layout.pp)


def measured_seconds(row: dict, layout: Layout, peak_flops: float) -> float | None:
    if row["measured_iteration_s"]:
        return float(row["measured_iteration_s"])
    if row["measured_tokens_per_second_per_gpu"]:
        return tokens_of(layout) / float(row["measured_tokens_per_second_per_gpu"])
    if row["measured_mfu"]:
        flops = estimate.flops_per_token(memory_cases.shape_of(row), seq_len=layout.seq_len)
        return tokens_of(layout) * flops / (peak_flops * float(row["measured_mfu"]) / 100)
    return None


def answer(row: dict, efficiencies: dict[str, Efficiency], *, fitted: bool = False) -> Answer | None:
    """None: the row has no time, or a device that nothing is known of."""
    if device_of(row) is None:
        return None
    layout, machine = layout_of(row), machine_of(row, efficiencies)
    measured = measured_seconds(row, layout, machine.peak_flops)
    if measured is None:
        return None
    causes = step_seconds(memory_cases.shape_of(row), layout, machine)
    return Answer(
        id=row["id"],
        source=row["source"].split(":")[0],
        device=device_of(row),
        counted=is_known(row),
        fitted=fitted,
        group=f"{row['model']}, {row['gpus']} x {row['gpu']}, {row['framework']}, {row['seq']}",
        measured_seconds=measured,
        predicted_seconds=sum(causes.values()),
        tokens=tokens_of(layout),
        causes=causes,
    )


def is_known(row: dict) -> bool:
    return not any(word in row["gpu"] for word in UNKNOWN)


def timed_rows(file: Path) -> list[dict]:
    return [row for row in memory_cases.read_rows(file) if answer(row, {})]


def rows_to_fit(file: Path) -> list[dict]:
    """Every other row that has a time, of known devices."""
    return [row for row in timed_rows(file)[::2] if is_known(row)]


def answers(file: Path) -> list[Answer]:
    """Every row that has a time. FITTED_ON has the rows that the efficiencies come from."""
    used = {row["id"] for row in rows_to_fit(FITTED_ON)}
    return [answer(row, EFFICIENCIES, fitted=row["id"] in used) for row in timed_rows(file)]
