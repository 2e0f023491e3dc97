"""Watch a machine train: its GPUs, the host and the run itself, as a live table and as a Prometheus exporter.

What nvidia-smi calls utilisation is the share of time in which any kernel ran, not how much of the GPU it used. An
NCCL kernel that waits for a rank that never comes spins: 100 % utilisation for hours, at little more than idle power.
So utilisation of at least 90 % at less than 20 % of the power limit is flagged as a likely hang.

    laptop    python 01_devices/monitor.py --once
    one GPU   python 01_devices/monitor.py --run-dir runs/my-run
    node      python 01_devices/monitor.py --prometheus 9835 --address 0.0.0.0

Without a terminal it prints one table and ends, or with --prometheus serves until SIGTERM or Ctrl-C.
Look for: power and utilisation that disagree; the one GPU unlike the others (if all but one are flagged, they wait for
that one); a last record that only grows older. A value that the driver does not report is n/a, never 0.
Next: 02_tensors_precision/.
"""

import contextlib
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _shared as machine

from common import cli, exits, report, runtime
from common.report import table

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
HELP = {  # where the name does not say it all
    "gpu_likely_hang": "1 if utilisation is at least 90 % and power below 20 % of its limit",
    "gpu_utilization_ratio": "Share of time in which any kernel ran, were it only waiting",
    "gpu_throttled": "1 if the clock is held down for this reason",
    "host_load": "Processes that ran or waited for a core, mean of the last minute",
}
LABELS = {
    "gpu": {"gpu": "index", "uuid": "uuid", "name": "name"},
    "host": {},
    "training": {"run": "run"},
}


def likely_hang(gpu: dict) -> bool | None:
    """Utilisation of at least 90 % at less than 20 % of the power limit; None where too little is known to tell.

    NVML cannot say what a kernel does. But NCCL's spin while they wait: some multiprocessors poll a flag, the matrix
    units stay dark, so utilisation reads 100 % and power stays low. Evidence, not proof: ranks that wait for one that
    saves look the same for a while (an alert needs `for: 5m`), and so may a model of tiny kernels, whose log grows.
    """
    power, limit, utilization = gpu["power_watts"], gpu["power_limit_watts"], gpu["utilization"]
    signs = [
        None if utilization is None else utilization >= 0.9,
        None if power is None or not limit else power < 0.2 * limit,
    ]
    return False if False in signs else None if None in signs else True


def sample(run_dir: Path | None) -> dict:
    """What can be known at this moment. Remembers nothing, so that any number of scrapes may ask at once."""
    gpus, no_gpu = machine.gpus()
    for gpu in gpus:
        gpu["likely_hang"] = likely_hang(gpu)
        gpu["utilization_ratio"] = gpu["utilization"]
        gpu["sm_clock_hertz"] = None if gpu["sm_clock_mhz"] is None else gpu["sm_clock_mhz"] * 1e6
        gpu["nvlink_rx_bytes_total"] = gpu["nvlink_rx_bytes"]
        gpu["nvlink_tx_bytes_total"] = gpu["nvlink_tx_bytes"]
    times = psutil.cpu_times()
    memory = psutil.virtual_memory()
    host = {
        "cpus": psutil.cpu_count(),
        "load": psutil.getloadavg()[0],
        "cpu_busy_seconds_total": sum(
            getattr(times, k, 0) for k in ("user", "nice", "system", "irq", "softirq")
        ),
        "memory_used_bytes": memory.total - memory.available,
        "memory_total_bytes": memory.total,
    }
    return {"gpu": gpus, "no_gpu": no_gpu, "host": [host], "training": training(run_dir)}


def training(run_dir: Path | None) -> list[dict]:
    """The last training record of the run (None: of the run in runs/ that wrote last), if there is one."""
    files = [run_dir / "metrics.jsonl"] if run_dir else Path("runs").glob("*/metrics.jsonl")
    written, file = max(
        ((file.stat().st_mtime, file) for file in files if file.exists()), default=(0.0, None)
    )
    record = last_record(file) if file else None
    if record is None:
        return []
    more = {"mfu_ratio": record.get("mfu"), "last_record_timestamp_seconds": written}
    return [{**record, **more, "run": file.parent.resolve().name}]


def last_record(file: Path, window: int = 2**14) -> dict | None:
    """The last record with a loss in the last bytes of a metrics.jsonl, however long it has grown. A line that the
    window cuts, that is half written or that a kill has damaged is no JSON object, and is passed over."""
    with file.open("rb") as stream:
        stream.seek(max(0, stream.seek(0, os.SEEK_END) - window))
        lines = stream.read().splitlines()
    for line in reversed(lines):
        with contextlib.suppress(ValueError):
            record = json.loads(line)
            if isinstance(record, dict) and {"step", "loss"} <= record.keys():
                return record
    return None


def drawn(view: dict) -> str:
    """Metrics down and GPUs across. Counters are left to Prometheus, which makes rates of them."""
    parts = []
    if view["no_gpu"]:
        parts.append(f"no GPU seen, so nothing of it measured: {view['no_gpu']}")
    if not view["training"]:
        parts.append("no training record seen (--run-dir; default: the newest in runs/)")
    for part, labels in LABELS.items():
        head = [
            part,
            *(
                " ".join(str(row[labels[name]]) for name in labels if name != "uuid")
                for row in view[part]
            ),
        ]
        gauges = [name for name in METRICS if name.startswith(part) and not name.endswith("_total")]
        names = [name.removeprefix(f"{part}_") for name in gauges]
        lines = [[name, *(cell(name, row.get(name)) for row in view[part])] for name in names]
        if view[part]:
            parts.append(table([head, *lines]))
    return "\n\n".join(parts)


def cell(name: str, value: object) -> str:
    if isinstance(value, bool):
        return "LIKELY HANG" if value else "no"
    if isinstance(value, list):  # reasons, or processes and whose they are
        return (
            ", ".join(f"{v['user'] or '?'} {v['pid']}" if name == "processes" else v for v in value)
            or "none"
        )
    if value is not None and name == "last_record_timestamp_seconds":
        return f"{time.time() - value:,.0f} s ago"
    return (
        f"{value:.1%}"
        if value is not None and name.endswith("ratio")
        else report.for_people(name, value)
    )


def serve(port: int, address: str, run_dir: Path | None) -> None:
    """Answer scrapes from now on, each in a thread of its own."""
    from prometheus_client import CollectorRegistry, Metric, start_http_server

    # samples on each scrape and in no loop of its own: Prometheus sets the rhythm and stamps values
    class Exporter:
        # with the time of the scrape; a loop would hand it old ones, and work between scrapes
        def collect(self) -> Iterator[Metric]:
            view = sample(run_dir)
            for name in METRICS:
                part, key = name.split("_", 1)
                # no count: a sample per reason, 0 or 1
                name = name.replace("throttle_reasons", "throttled")
                kind = "counter" if name.endswith("_total") else "gauge"
                metric = Metric(
                    name.removesuffix("_total"), HELP.get(name, name.replace("_", " ")), kind
                )
                # what is not known is absent
                for row in [row for row in view[part] if row.get(key) is not None]:
                    labels = {
                        label: str(row[of])
                        for label, of in LABELS[part].items()
                        if row[of] is not None
                    }
                    if key == "throttle_reasons":
                        for reason in machine.THROTTLE_REASONS:
                            metric.add_sample(
                                name, {**labels, "reason": reason}, reason in row[key]
                            )
                    else:
                        metric.add_sample(
                            name, labels, len(row[key]) if isinstance(row[key], list) else row[key]
                        )
                yield metric

    registry = CollectorRegistry()
    registry.register(Exporter())
    try:
        server, _ = start_http_server(port, address, registry)
    except (OSError, OverflowError) as error:
        raise exits.UserError(
            f"--prometheus {port} --address {address}: {error}; port 0 takes a free one"
        ) from None
    print(
        f"serving http://{f'[{address}]' if ':' in address else address}:{server.server_port}/metrics",
        flush=True,
    )


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add(
        "--run-dir",
        type=Path,
        help="folder of the run whose metrics.jsonl is read (default: the newest in runs/)",
    )
    add(
        "--once", action="store_true", help="print one table and end, as it does without a terminal"
    )
    add(
        "--prometheus",
        type=cli.natural,
        metavar="PORT",
        help="serve /metrics there; 0 takes a free port",
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
    live = args.prometheus is None and sys.stdout.isatty() and not (args.once or args.json)
    if not live and args.prometheus is None:
        view = sample(args.run_dir)
        print(drawn(view))
        report.write_json(
            {"device": view["gpu"][0]["name"] if view["gpu"] else "cpu", **view}, args.json
        )
        return 0
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.default_int_handler)
    with contextlib.suppress(KeyboardInterrupt):
        if args.prometheus is not None:
            serve(args.prometheus, args.address, args.run_dir)
        # not signal.pause(): a signal that one of the server's threads took would not end it
        while True:
            if live:
                # from the top of an empty screen
                print(f"\x1b[H\x1b[2J{drawn(sample(args.run_dir))}", flush=True)
            time.sleep(1)
    return 0


if __name__ == "__main__":
    exits.run(main)
