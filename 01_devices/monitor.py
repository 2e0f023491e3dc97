"""Watch a machine train: its GPUs, the host and the run itself, as a live table and as a Prometheus exporter.

What nvidia-smi calls utilisation is the share of time in which any kernel ran, not how much of the GPU it used. An
NCCL kernel that waits for a rank that never comes spins: 100 % utilisation for hours, at little more than idle power.
So utilisation of at least 90 % at less than 20 % of the power limit is flagged as a likely hang. That idea is
`likely_hang` in _monitor.py, which also takes the samples. This file shows and exports them.

    laptop    python 01_devices/monitor.py --once
    one GPU   python 01_devices/monitor.py --run-dir runs/my-run
    node      python 01_devices/monitor.py --prometheus 9835 --address 0.0.0.0

Without a terminal it prints one table and ends, or with --prometheus serves until SIGTERM or Ctrl-C.
Look for: power and utilisation that disagree; the one GPU unlike the others (if all but one are flagged, they wait for
that one); a last record that only grows older. A value that the driver does not report is n/a, never 0.
Next: 02_tensors_precision/.
"""

import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _monitor import sample
from _shared import THROTTLE_REASONS

from common import cli, exits, report, runtime

# All that is shown and exported: part of a sample, key in it; the base unit last, and _total for a counter.
METRICS = [
    "gpu_likely_hang",
    "gpu_utilization_ratio",
    "gpu_power_watts",
    "gpu_power_limit_watts",
    "gpu_memory_used_bytes",
    "gpu_memory_total_bytes",
    "gpu_temperature_celsius",
    "gpu_sm_clock_hertz",
    "gpu_memory_clock_hertz",
    "gpu_throttle_reasons",
    "gpu_processes",
    "gpu_pcie_rx_bytes_per_second",
    "gpu_pcie_tx_bytes_per_second",
    "gpu_nvlink_rx_bytes_total",
    "gpu_nvlink_tx_bytes_total",
    "host_cpus",
    "host_cpu_busy_seconds_total",
    "host_memory_used_bytes",
    "host_memory_total_bytes",
    "host_disk_read_bytes_total",
    "host_disk_written_bytes_total",
    "host_network_rx_bytes_total",
    "host_network_tx_bytes_total",
    "training_step",
    "training_loss",
    "training_tokens_per_second",
    "training_mfu_ratio",
    "training_last_record_timestamp_seconds",
]
HELP = {  # where the name does not say it all
    "gpu_likely_hang": "1 if utilisation is at least 90 % and power below 20 % of its limit",
    "gpu_utilization_ratio": "Share of time in which any kernel ran, were it only waiting",
    "gpu_throttled": "1 if the clock is held down for this reason",
}
LABELS = {"gpu": {"gpu": "index", "uuid": "uuid", "name": "name"}, "host": {}, "training": {"run": "run"}}


def watch(run_dir: Path | None, interval: float) -> Iterator[dict]:
    """A sample after each interval, with every counter's rate since the one before; without end."""
    before, then = sample(run_dir), time.monotonic()
    while True:
        time.sleep(interval)
        view, now = sample(run_dir), time.monotonic()
        for row, old in zip(view["host"] + view["gpu"], before["host"] + before["gpu"], strict=False):
            add_rates(row, old, now - then)
        yield {**view, "interval_seconds": now - then}
        before, then = view, now


def add_rates(row: dict, old: dict, seconds: float) -> None:
    """Give `row` the rate of each of its counters; None where it is not known or has begun anew."""
    for total in [key for key in row if key.endswith("_total")]:
        known = row[total] is not None and old[total] is not None and row[total] >= old[total]
        row[f"{total.removesuffix('_total')}_per_second"] = (row[total] - old[total]) / seconds if known else None


def show(views: Iterator[dict], live: bool) -> dict:
    """Draw metrics down and GPUs across, a counter as its rate; in place for ever, or once and return that view."""
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table

    with Live(console=Console(markup=False), auto_refresh=False) as screen:
        for view in views:
            drawn: list = []
            if view["no_gpu"]:
                drawn.append(f"no GPU seen, so nothing of it measured: {view['no_gpu']}")
            if not view["training"]:
                drawn.append("no training record seen (--run-dir; default: the newest in runs/)")
            for part in LABELS:
                if not view[part]:
                    continue
                labels = [of for of in LABELS[part].values() if of != "uuid"]
                table = Table(part, *(" ".join(str(row[of]) for of in labels) for row in view[part]))
                for key in [name.removeprefix(f"{part}_") for name in METRICS if name.startswith(part)]:
                    title = key.removesuffix("_total").replace("_", " ")
                    table.add_row(title, *(cell(key, row) for row in view[part]))
                drawn.append(table)
            screen.update(Group(*drawn, ""), refresh=True)
            if not live:
                return view


def cell(key: str, row: dict) -> str:
    """A value for people; a counter's is its rate."""
    value = row.get(f"{key.removesuffix('_total')}_per_second" if key.endswith("_total") else key)
    if value is None:
        return "n/a"
    if isinstance(value, bool):
        return "LIKELY HANG" if value else "no"
    if isinstance(value, list):  # reasons, or processes and whose they are
        return ", ".join(f"{v['user'] or '?'} {v['pid']}" if key == "processes" else v for v in value) or "none"
    if key.endswith("timestamp_seconds"):
        return f"{time.time() - value:,.0f} s ago"
    if value >= 1e9:
        text = f"{value / 1e9:,.5g} G"
    elif value >= 1e6:
        text = f"{value / 1e6:,.5g} M"
    else:
        text = f"{value:,.5g}"
    return f"{text}/s" if key.endswith("_total") else text


def serve(port: int, address: str, run_dir: Path | None) -> None:
    """Answer scrapes from now on, each in a thread of its own."""
    from prometheus_client import CollectorRegistry, Metric, start_http_server

    class Exporter:  # samples on each scrape and in no loop of its own: Prometheus sets the rhythm and stamps values
        # with the time of the scrape; a loop would hand it old ones, and work between scrapes
        def collect(self) -> Iterator[Metric]:
            view = sample(run_dir)
            for name in METRICS:
                part, key = name.split("_", 1)
                name = name.replace("throttle_reasons", "throttled")  # no count: a sample per reason, 0 or 1
                kind = "counter" if name.endswith("_total") else "gauge"
                metric = Metric(name.removesuffix("_total"), HELP.get(name, name.replace("_", " ")), kind)
                for row in [row for row in view[part] if row.get(key) is not None]:  # what is not known is absent
                    labels = {label: str(row[of]) for label, of in LABELS[part].items() if row[of] is not None}
                    if key == "throttle_reasons":
                        for reason in THROTTLE_REASONS:
                            metric.add_sample(name, {**labels, "reason": reason}, reason in row[key])
                    else:
                        metric.add_sample(name, labels, len(row[key]) if isinstance(row[key], list) else row[key])
                yield metric

    registry = CollectorRegistry()
    registry.register(Exporter())
    try:
        server, _ = start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        raise exits.UserError(f"--prometheus {port} --address {address}: {error}; port 0 takes a free one") from None
    print(f"serving http://{f'[{address}]' if ':' in address else address}:{server.server_port}/metrics", flush=True)


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--run-dir", type=Path, help="folder of the run whose metrics.jsonl is read (default: the newest in runs/)")
    add("--interval", type=cli.positive, default=2.0, metavar="SECONDS", help="between two samples of the table")
    add("--once", action="store_true", help="print one table and end, as it does without a terminal")
    add("--prometheus", type=cli.natural, metavar="PORT", help="serve /metrics there; 0 takes a free port")
    add("--address", default="127.0.0.1", help="where --prometheus listens; 0.0.0.0: on every network")
    add("--json", type=cli.writable_file, metavar="PATH", help="print one table, end, write it as one JSON object")
    args = parser.parse_args()
    runtime.single_device("cpu")
    if args.prometheus is not None and (args.once or args.json):
        raise exits.UserError("--prometheus serves until it is stopped: leave out --once and --json")
    if args.run_dir and not args.run_dir.is_dir():
        raise exits.UserError(f"--run-dir {args.run_dir}: no such folder")
    if args.interval > 3600:
        raise exits.UserError(f"--interval {args.interval:g}: at most an hour, 3600")
    if find_spec(package := "rich" if args.prometheus is None else "prometheus_client") is None:
        raise exits.UserError(f"the package {package} is missing: pip install -r requirements.txt")
    views, live = watch(args.run_dir, args.interval), sys.stdout.isatty() and not (args.once or args.json)
    if not live and args.prometheus is None:
        view = show(views, live)
        report.write_json({"device": view["gpu"][0]["name"] if view["gpu"] else "cpu", **view}, args.json)
        return 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        if args.prometheus is not None:
            serve(args.prometheus, args.address, args.run_dir)
        if live:
            show(views, live)
        else:
            while True:  # not signal.pause(): a signal that one of the server's threads took would not end it
                time.sleep(1)
    return 0


if __name__ == "__main__":
    exits.run(main)
