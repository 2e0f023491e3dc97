"""Watch a machine train: its GPUs, the host and the run, as a live table or a Prometheus exporter.

What nvidia-smi calls utilisation is the share of time in which any kernel ran. It does not say how
much of the GPU the kernel used. An NCCL kernel that waits for a rank that never comes spins: the
GPU shows 100 % utilisation for hours, at a fraction of the power that training draws. So this
script flags utilisation of at least 90 % as a likely hang, if the power is below half of what the
GPU drew in the last ten minutes, or of what another busy GPU draws now, or below 30 % of the power
limit. These shares were not measured here. In one public report (NVIDIA/nccl#1550) a hung H100 drew
152 of 700 W. A job that does little arithmetic may be flagged, too.

    laptop    python 01_devices/monitor.py --once
    one GPU   python 01_devices/monitor.py --run-dir runs/my-run
    node      python 01_devices/monitor.py --prometheus 9835 --address 0.0.0.0

Without a terminal it prints one table and ends. With --prometheus it serves until SIGTERM or
Ctrl-C.

What to look at: power and utilisation that disagree. The one GPU unlike the others: if all but one
are flagged, they wait for that one. A last record that only grows older. A value that the driver
does not report is n/a, never 0.
Previous: benchmark.py. Next: 02_tensors_precision/.
"""

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _machine
import psutil

from common import cli, report, runtime
from common.report import table

# The values that are shown and exported: the part of a sample, _, and the key in it. The names are
# Prometheus's: the base unit last, and _total for a counter.
METRICS = [
    "gpu_likely_hang",
    "gpu_utilization_ratio",
    "gpu_power_watts",
    "gpu_power_limit_watts",
    "gpu_memory_used_bytes",
    "gpu_memory_total_bytes",
    "gpu_temperature_celsius",
    "gpu_sm_clock_hertz",
    "gpu_throttle_reasons",
    "gpu_processes",
    "gpu_nvlink_rx_bytes_total",
    "gpu_nvlink_tx_bytes_total",
    "host_cpus",
    "host_load",
    "host_cpu_busy_seconds_total",
    "host_memory_used_bytes",
    "host_memory_total_bytes",
    "training_step",
    "training_loss",
    "training_tokens_per_second",
    "training_mfu_ratio",
    "training_last_record_timestamp_seconds",
]
# By part: Prometheus's labels, and the keys that they are read from.
LABELS = {
    "gpu": {"gpu": "index", "uuid": "uuid", "name": "name"},
    "host": {},
    "training": {"run": "run"},
}
HELP = {  # for metrics whose name does not say it all
    "gpu_likely_hang": "1 if a GPU is busy at far less power than before, or than others",
    "gpu_utilization_ratio": "Share of time in which any kernel ran, even one that only waits",
    "gpu_throttled": "1 if the clock is held down for this reason",
    "host_load": "Processes that ran or waited for a core, mean of the last minute",
}
BUSY_TIMES = ("user", "nice", "system", "irq", "softirq")
LAST_BYTES = 2**14  # of a metrics.jsonl, in which the last record is searched

BUSY = 0.9  # utilisation from which a GPU may be one that waits
# A GPU that waits draws less than these shares. Not measured: see the docstring of this script.
SHARE_OF_USUAL = 0.5
SHARE_OF_LIMIT = 0.3
SECONDS_BACK = 600  # how long a GPU is compared with its own power before


class PowerBefore:
    """The power that each GPU drew in the last SECONDS_BACK seconds. Scrapes may run at once."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.watts: dict[object, list[tuple[float, float]]] = {}  # by GPU: time and watts

    def highest(self, gpu: dict) -> float | None:
        """Return the highest power before, None if there is none. Note the power of now."""
        now = time.monotonic()
        with self.lock:
            recent = []
            for noted_at, watts in self.watts.get(gpu["index"], []):
                if now - noted_at <= SECONDS_BACK:
                    recent.append((noted_at, watts))
            highest = max((watts for _, watts in recent), default=None)
            if gpu["power_watts"] is not None:
                recent.append((now, gpu["power_watts"]))
            self.watts[gpu["index"]] = recent
        return highest


def usual_watts(gpu: dict, gpus: list[dict], before: float | None) -> float | None:
    """Return the power to expect of a busy GPU, or None if it is unknown.

    It is the highest of the GPU's own power before and the power of other busy GPUs now.
    """
    watts = []
    if before is not None:
        watts.append(before)
    for other in gpus:
        is_busy = (other["utilization"] or 0) >= BUSY
        if other is not gpu and is_busy and other["power_watts"] is not None:
            watts.append(other["power_watts"])
    return max(watts, default=None)


def likely_hang(gpu: dict, usual: float | None) -> bool | None:
    """Return whether a GPU probably waits for another rank, or None if too little is known.

    NVML cannot say what a kernel does. But an NCCL kernel that waits spins: some multiprocessors
    poll a flag, and the tensor cores are idle. So utilisation is 100 % and power stays low. This is
    evidence, not proof. Ranks that wait for one that saves look the same for a while, so an alert
    needs `for: 5m`. A model with tiny kernels may look the same, too, but its log grows.

    `usual` is in watts, see usual_watts. If all GPUs of a node hang, and this script starts after
    that, only the power limit is left to compare with.
    """
    utilization = gpu["utilization"]
    power = gpu["power_watts"]
    limit = gpu["power_limit_watts"]
    if utilization is not None and utilization < BUSY:
        return False
    low_watts = []
    if usual is not None:
        low_watts.append(SHARE_OF_USUAL * usual)
    if limit:
        low_watts.append(SHARE_OF_LIMIT * limit)
    if power is None or not low_watts:
        return None
    if power >= max(low_watts):
        return False
    if utilization is None:
        return None
    return True


# --- one sample


def sample(run_dir: Path | None, power_before: PowerBefore) -> dict:
    """Return what can be known now. Several scrapes may run at once."""
    gpus, why_none = _machine.gpus()
    for gpu in gpus:
        clock = gpu["sm_clock_mhz"]
        usual = usual_watts(gpu, gpus, power_before.highest(gpu))
        gpu["likely_hang"] = likely_hang(gpu, usual)
        gpu["utilization_ratio"] = gpu["utilization"]
        gpu["sm_clock_hertz"] = None if clock is None else clock * 1e6
        gpu["nvlink_rx_bytes_total"] = gpu["nvlink_rx_bytes"]
        gpu["nvlink_tx_bytes_total"] = gpu["nvlink_tx_bytes"]

    times = psutil.cpu_times()
    memory = psutil.virtual_memory()
    host = {
        "cpus": psutil.cpu_count(),
        "load": psutil.getloadavg()[0],
        "cpu_busy_seconds_total": sum(getattr(times, name, 0) for name in BUSY_TIMES),
        "memory_used_bytes": memory.total - memory.available,
        "memory_total_bytes": memory.total,
    }
    return {"gpu": gpus, "no_gpu": why_none, "host": [host], "training": training(run_dir)}


def training(run_dir: Path | None) -> list[dict]:
    """Return the last record of a run, as a list of one, or an empty list if there is none.

    Without `run_dir` it is the run in runs/ that wrote last.
    """
    files = list(Path("runs").glob("*/metrics.jsonl"))
    if run_dir is not None:
        files = [run_dir / "metrics.jsonl"]
    files = [file for file in files if file.exists()]
    if not files:
        return []
    file = max(files, key=lambda file: file.stat().st_mtime)
    record = last_record(file)
    if record is None:
        return []
    record["run"] = file.parent.resolve().name
    record["mfu_ratio"] = record.get("mfu")
    record["last_record_timestamp_seconds"] = file.stat().st_mtime
    return [record]


def last_record(file: Path) -> dict | None:
    """Return the last record with a loss in the last bytes of a metrics.jsonl.

    The end is enough, however long the file is. The first line read may be cut, and the last one
    half written or damaged by a kill: what is not a JSON object is skipped.
    """
    with file.open("rb") as stream:
        size = stream.seek(0, os.SEEK_END)
        stream.seek(max(0, size - LAST_BYTES))
        lines = stream.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and {"step", "loss"} <= record.keys():
                return record
    return None


# --- the table


def draw(view: dict) -> str:
    """Return a sample as text, with metrics down and GPUs across.

    Counters are left to Prometheus, which turns them into rates.
    """
    parts = []
    if view["no_gpu"]:
        parts.append(f"no GPU found, so none is shown: {view['no_gpu']}")
    if not view["training"]:
        parts.append("no training record found (--run-dir; default: the newest in runs/)")
    for part, labels in LABELS.items():
        if view[part]:
            parts.append(_table_of(part, labels, view[part]))
    return "\n\n".join(parts)


def _table_of(part: str, labels: dict[str, str], rows: list[dict]) -> str:
    heading = [part]
    for row in rows:
        shown = [str(row[key]) for label, key in labels.items() if label != "uuid"]
        heading.append(" ".join(shown))
    lines = [heading]
    for metric in METRICS:
        if metric.startswith(part) and not metric.endswith("_total"):
            name = metric.removeprefix(f"{part}_")
            lines.append([name, *[_cell(name, row.get(name)) for row in rows]])
    return table(lines)


def _cell(name: str, value: object) -> str:
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "LIKELY HANG" if value else "no"
    if name == "processes":
        return ", ".join(f"{item['user'] or '?'} {item['pid']}" for item in value) or "none"
    if isinstance(value, list):  # reasons
        return ", ".join(value) or "none"
    if name == "last_record_timestamp_seconds":
        return f"{time.time() - value:,.0f} s ago"
    if name.endswith("ratio"):
        return f"{value:.1%}"
    return report.for_people(name, value)


# --- Prometheus


def serve(port: int, address: str, run_dir: Path | None) -> None:
    """Answer scrapes in the background, each in a thread of its own.

    A sample is taken at each scrape. Prometheus decides how often, and gives the values the time of
    the scrape. A loop of our own would hand it old values.
    """
    from prometheus_client import CollectorRegistry, Metric, start_http_server

    power_before = PowerBefore()

    class Exporter:
        def collect(self) -> Iterator[Metric]:
            view = sample(run_dir, power_before)
            for metric in METRICS:
                part, key = metric.split("_", 1)
                # each reason becomes a value of its own, 0 or 1
                name = metric.replace("throttle_reasons", "throttled")
                family = Metric(
                    name.removesuffix("_total"),
                    HELP.get(name, name.replace("_", " ")),
                    "counter" if name.endswith("_total") else "gauge",
                )
                for row in view[part]:
                    if row.get(key) is not None:  # what is not known is absent, never 0
                        add_samples(family, name, key, _labels(part, row), row[key])
                yield family

    registry = CollectorRegistry()
    registry.register(Exporter())
    try:
        server, _ = start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        raise exits.UserError(
            f"--prometheus {port} --address {address}: {error}; port 0 takes a free one"
        ) from None
    host = f"[{address}]" if ":" in address else address  # IPv6
    print(f"serving http://{host}:{server.server_port}/metrics", flush=True)


def add_samples(family, name: str, key: str, labels: dict[str, str], value: object) -> None:
    """Add a value to a Prometheus metric: a list as its length, reasons one by one."""
    if key == "throttle_reasons":
        for reason in _machine.THROTTLE_REASONS:
            family.add_sample(name, {**labels, "reason": reason}, reason in value)
    elif isinstance(value, list):
        family.add_sample(name, labels, len(value))
    else:
        family.add_sample(name, labels, value)


def _labels(part: str, row: dict) -> dict[str, str]:
    labels = {}
    for label, key in LABELS[part].items():
        if row[key] is not None:
            labels[label] = str(row[key])
    return labels


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add(
        "--run-dir",
        type=Path,
        help="folder of the run whose metrics.jsonl is read (default: the newest in runs/)",
    )
    add("--once", action="store_true", help="print one table and end, the default in a pipe")
    add(
        "--prometheus",
        type=cli.natural,
        metavar="PORT",
        help="serve /metrics on this port; 0 takes a free port",
    )
    add(
        "--address",
        default="127.0.0.1",
        help="where --prometheus listens; 0.0.0.0: on every network",
    )
    add(
        "--json",
        type=cli.writable_file,
        metavar="PATH",
        help="print one table, end, write it as one JSON object",
    )
    args = parser.parse_args()
    runtime.single_device("cpu")
    if args.prometheus is not None and (args.once or args.json):
        raise exits.UserError(
            "--prometheus serves until it is stopped: leave out --once and --json"
        )
    if args.run_dir and not args.run_dir.is_dir():
        raise exits.UserError(f"--run-dir {args.run_dir}: no such folder")

    live = sys.stdout.isatty() and not args.once and not args.json
    if args.prometheus is None and not live:
        view = sample(args.run_dir, PowerBefore())
        print(draw(view))
        device = view["gpu"][0]["name"] if view["gpu"] else "cpu"
        report.write_json({"device": device, **view}, args.json)
        return 0

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    power_before = PowerBefore()
    with contextlib.suppress(KeyboardInterrupt):
        if args.prometheus is not None:
            serve(args.prometheus, args.address, args.run_dir)
        # Not signal.pause(): a signal that one of the server's threads received would not end it.
        # stdout is no terminal any more when its window has been closed
        while args.prometheus is not None or sys.stdout.isatty():
            if args.prometheus is None:
                clear_screen = "\x1b[H\x1b[2J"
                print(f"{clear_screen}{draw(sample(args.run_dir, power_before))}", flush=True)
            time.sleep(1)
    return 0


if __name__ == "__main__":
    exits.run(main)
