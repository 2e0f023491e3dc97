"""Report what collectives.py has measured."""

import statistics
from collections.abc import Callable

import torch.distributed as dist

from common import report, runtime

FITTED = {
    "collective": "collective",
    "latency_us": "latency, µs",
    "bandwidth_gb_per_s": "bandwidth, GB/s",
    "typical_error_share": "typical error",
}
LARGEST = {
    "collective": "collective",
    "bytes": "largest size",
    "seconds": "its time",
    "bus_gb_per_s": "bus GB/s",
    "link_share": "of the link",
}


def row_of(
    name: str, measurements: list[dict], line: tuple[float, float] | None, link: float
) -> dict:
    """Return the row of a collective: its line, and its measurement at the largest size.

    `line` is (latency, seconds per byte), or None. `link` is in bytes per second, or 0.
    """
    row = {
        "collective": name,
        "latency_us": None,
        "bandwidth_gb_per_s": None,
        "typical_error_share": None,
    }
    if line is not None:
        latency, seconds_per_byte = line
        errors = []
        for measurement in measurements:
            seconds = latency + seconds_per_byte * measurement["bytes"]
            errors.append(abs(seconds / measurement["seconds"] - 1))
        row["latency_us"] = latency * 1e6
        row["bandwidth_gb_per_s"] = 1e-9 / seconds_per_byte
        row["typical_error_share"] = statistics.median(errors)

    largest = measurements[-1]
    row.update(largest)
    row["bus_gb_per_s"] = largest["bus_bytes_per_second"] / 1e9
    row["link_share"] = largest["bus_bytes_per_second"] / link if link else None
    row["measurements"] = measurements
    return row


def print_predictions(predicted: dict[str, float], measured_nano: float) -> None:
    """Print the predicted seconds of each model, and the measured ones of nano."""
    texts = []
    for name, seconds in predicted.items():
        texts.append(f"{name} {report.for_people('seconds', seconds)}")
    line = f"predicted, all-reduce of the gradients in fp32: {', '.join(texts)}"
    runtime.print0(report.fold(line))
    runtime.print0(
        f"measured, nano: {report.for_people('seconds', measured_nano)}, "
        f"{measured_nano / predicted['nano']:.2f} times the prediction"
    )


def check(rows: list[dict], link: float, bus_factor: Callable[[str, int], float]) -> list[str]:
    """Assert that nothing was faster than the link, of `link` bytes per second, if it is known.

    Return a line for each thing that was checked. The results were checked before they were timed.
    """
    n = dist.get_world_size()
    count = sum(len(row["measurements"]) for row in rows)
    checked = [f"{count} results of {len(rows)} collectives are exact on all {n} ranks"]
    if not link:
        return checked
    for row in rows:
        name = row["collective"]
        # An NVLink switch can add up, so a rank may send its buffer only once.
        least_factor = min(1.0, bus_factor(name, n))
        for measurement in row["measurements"]:
            rate = least_factor * measurement["bytes"] / measurement["min_seconds"]
            assert rate <= link, (
                f"BUG: {name} of {measurement['bytes']} bytes is faster than the link, "
                "so the timing is wrong"
            )
    checked.append("nothing is faster than the link")
    return checked
