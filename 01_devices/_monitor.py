"""What monitor.py shows: one sample of the GPUs, of the host and of the run, and what it says about a hang."""

import contextlib
import json
import os
from pathlib import Path

import psutil
from _shared import gpus as all_gpus


def likely_hang(gpu: dict) -> bool | None:
    """Utilisation of at least 90 % at less than 20 % of the power limit; None where too little is known to tell.

    NVML cannot say what a kernel does. But NCCL's spin while they wait: some multiprocessors poll a flag, the matrix
    units stay dark, so utilisation reads 100 % and power stays low. Where a kernel always runs there is a process,
    also if a container hides it. Evidence, not proof: ranks that wait for one that saves look the same for a while
    (an alert needs `for: 5m`), and so may a model of tiny kernels, whose log grows.
    """
    power, limit, utilization = gpu["power_watts"], gpu["power_limit_watts"], gpu["utilization"]
    signs = [
        None if utilization is None else utilization >= 0.9,
        None if power is None or not limit else power < 0.2 * limit,
    ]
    return False if False in signs else None if None in signs else True


def physical(counters: dict, folder: Path) -> dict:
    """Those of the whole disks or network cards with hardware behind them. Partitions, loop, dm, md and zram devices,
    bridges and veths hand their bytes on to another device, which counts them, too."""
    if not folder.is_dir():  # no Linux
        return counters
    real = {d.name for d in folder.iterdir() if d.resolve().parent.parent.name != "virtual"}
    paths = {file.parent.name for file in folder.glob("*/hidden") if file.read_text() == "1\n"}  # to a multipath NVMe
    return {name: counter for name, counter in counters.items() if name in real - paths}


def sample(run_dir: Path | None) -> dict:
    """What can be known at this moment. Remembers nothing, so that any number of scrapes may ask at once."""
    gpus, no_gpu = all_gpus()
    for gpu in gpus:
        gpu["likely_hang"] = likely_hang(gpu)
        gpu["utilization_ratio"] = gpu["utilization"]
        for clock in ("sm_clock", "memory_clock"):
            megahertz = gpu[f"{clock}_mhz"]
            gpu[f"{clock}_hertz"] = None if megahertz is None else megahertz * 1e6
        gpu["nvlink_rx_bytes_total"] = gpu["nvlink_rx_bytes"]
        gpu["nvlink_tx_bytes_total"] = gpu["nvlink_tx_bytes"]
    # not psutil.cpu_percent: what it compares with is kept per thread identifier, and each scrape has its own thread
    times = psutil.cpu_times()
    memory = psutil.virtual_memory()
    disks = {}
    with contextlib.suppress(NotImplementedError):  # a sandbox without /proc/diskstats
        disks = physical(psutil.disk_io_counters(perdisk=True), Path("/sys/block"))
    cards = {name: c for name, c in psutil.net_io_counters(pernic=True).items() if not name.startswith("lo")}
    cards = physical(cards, Path("/sys/class/net")) or cards  # a container's eth0 is one end of a veth
    host = {
        "cpus": psutil.cpu_count(),
        "cpu_busy_seconds_total": sum(getattr(times, k, 0) for k in ("user", "nice", "system", "irq", "softirq")),
        "memory_used_bytes": memory.total - memory.available,
        "memory_total_bytes": memory.total,
        "disk_read_bytes_total": sum(disk.read_bytes for disk in disks.values()) if disks else None,
        "disk_written_bytes_total": sum(disk.write_bytes for disk in disks.values()) if disks else None,
        "network_rx_bytes_total": sum(card.bytes_recv for card in cards.values()),  # RDMA passes the kernel by
        "network_tx_bytes_total": sum(card.bytes_sent for card in cards.values()),
    }
    return {"gpu": gpus, "no_gpu": no_gpu, "host": [host], "training": training(run_dir)}


def training(run_dir: Path | None) -> list[dict]:
    """The last training record of the run (None: of the run in runs/ that wrote last), if there is one."""
    files = [run_dir / "metrics.jsonl"] if run_dir else Path("runs").glob("*/metrics.jsonl")
    for written, file in sorted((file.stat().st_mtime, file) for file in files if file.exists())[-1:]:
        for record in [record for record in last_records(file) if "loss" in record][-1:]:
            more = {"mfu_ratio": record.get("mfu"), "last_record_timestamp_seconds": written}
            return [{**record, **more, "run": file.parent.resolve().name}]
    return []


def last_records(file: Path, window: int = 2**14) -> list[dict]:
    """The records in the last bytes of a metrics.jsonl, however long it has grown. Of a line that the window cuts, is
    half written or was damaged by a kill, nothing is taken."""
    with file.open("rb") as stream:
        start = max(0, stream.seek(0, os.SEEK_END) - window)
        stream.seek(max(0, start - 1))  # the byte before, too: a newline if no line is cut
        lines = stream.read().split(b"\n")[bool(start) : -1]
    records = []
    for line in lines:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and "step" in record]
