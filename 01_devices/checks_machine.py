"""What doctor.py asks of the machine: driver and torch build, GPUs, memory limits, disk, versions.

A check is a function that returns (name, ok | warn | fail | skip, what was seen, the fix). fail: it breaks, or
numbers come out wrong; warn: it costs speed, or may break later. `gpus` is what common/nvml.py found.
"""

import importlib.metadata
import os
import platform
import re
import resource
import shutil
import sys
import tempfile
import time
import tomllib
from collections.abc import Mapping
from itertools import permutations
from pathlib import Path

import torch

Check = tuple[str, str, str, str]


def nvidia_cards(devices: Path = Path("/sys/bus/pci/devices")) -> int:
    """GPUs by NVIDIA (vendor 10de, class 03) on the PCI bus, which needs no driver to be seen."""
    ids = [[(card / file).read_text() for file in ("vendor", "class")] for card in devices.glob("*")]
    return sum(vendor.startswith("0x10de") and kind.startswith("0x03") for vendor, kind in ids)


def driver(gpus: list[dict], torch_cuda: str | None, broken: str | None = None) -> Check:
    """A driver runs CUDA up to its own version, and any minor version of its major. `broken`: why NVML sees none."""
    name, offered = "driver", gpus[0]["cuda"] if gpus else None
    if lost := [f"GPU {g['index']}: {g['refused']['handle']}" for g in gpus if "handle" in g.get("refused", {})]:
        return name, "fail", "; ".join(lost), "if dmesg names an Xid, it has fallen off the bus: reboot, or replace it"
    if broken:
        return name, "fail", f"an NVIDIA card on the PCI bus; {broken}", "reinstall the driver, reboot after an update"
    if not offered or not torch_cuda:
        return name, "skip", f"driver's CUDA {offered or 'n/a'}, torch's CUDA {torch_cuda or 'none'}", ""
    seen = f"driver {gpus[0]['driver']} runs CUDA {offered}, torch was built for {torch_cuda}"
    if int(offered.split(".")[0]) >= int(torch_cuda.split(".")[0]):
        return name, "ok", seen, ""
    return name, "fail", seen, f"update the driver, or install a torch built for CUDA {offered} or older"


def torch_build(gpus: list[dict], torch_cuda: str | None, usable: bool) -> Check:
    name, version = "torch build", f"torch {torch.__version__}"
    if not gpus or torch_cuda is None:
        seen = f"{version} is a build without CUDA, beside {len(gpus)} GPU(s)" if gpus else f"{version}, no GPU by NVML"
        return name, "fail" if gpus else "ok", seen, "install a CUDA build" if gpus else ""
    if not usable:
        fix = "look at the driver and CUDA_VISIBLE_DEVICES; python -c 'import torch; torch.cuda.init()' says more"
        return name, "fail", f"{version} cannot use any of {len(gpus)} GPU(s)", fix
    return name, "ok", f"{version} uses CUDA {torch_cuda}", ""


def visible_devices(gpus: list[dict], environ: Mapping[str, str]) -> Check:
    """CUDA counts the entries up to the first that names no GPU, and says nothing about the rest."""
    name, value = "visible GPUs", environ.get("CUDA_VISIBLE_DEVICES")
    if not gpus:
        return name, "skip", "no NVIDIA GPU", ""
    if value is None or value.startswith("MIG"):
        return name, "ok", f"all {len(gpus)}" if value is None else f"a part of a GPU: {value}", ""
    shown = 0
    for entry in (part.strip() for part in value.split(",")):
        if not any(entry == str(g["index"]) or (g["uuid"] or "").startswith(entry or "-") for g in gpus):
            break
        shown += 1
    seen = f"CUDA_VISIBLE_DEVICES={value!r} shows {shown} of {len(gpus)}"
    status = "ok" if shown == len(gpus) else "warn" if shown else "fail"
    return name, status, seen, "" if status == "ok" else "unset it, unless you or a scheduler hid the others on purpose"


def peer_access(count: int) -> Check:
    name = "peer access"
    if count < 2:
        return name, "skip", f"{count} GPU(s) visible to torch: needs 2", ""
    pairs = list(permutations(range(count), 2))
    without = [f"{i}->{j}" for i, j in pairs if not torch.cuda.can_device_access_peer(i, j)]
    if without:
        fix = "their traffic goes through host memory; show.py has the topology; ACS, IOMMU or the model may forbid it"
        return name, "warn", f"none for {', '.join(without)}", fix
    return name, "ok", f"all {len(pairs)} ordered pairs of {count} GPUs", ""


def clocks(gpus: list[dict]) -> Check:
    name, asked = "clocks", [g for g in gpus if g["throttle_reasons"] is not None]
    if not asked:
        return name, "skip", "not told by the driver" if gpus else "no NVIDIA GPU", ""
    slowed = [f"GPU {g['index']}: {', '.join(g['throttle_reasons'])}" for g in asked if g["throttle_reasons"]]
    if slowed:
        fix = "thermal or brake: cooling and power supply; power cap: nvidia-smi -q -d POWER"
        return name, "warn", f"throttled, {'; '.join(slowed)}", fix
    return name, "ok", f"{len(asked)} GPU(s) not throttled now", ""


def other_processes(gpus: list[dict]) -> Check:
    name, asked = "other processes", [g for g in gpus if g["processes"] is not None]
    if not asked:
        return name, "skip", "not told by the driver" if gpus else "no NVIDIA GPU", ""
    others = []
    for gpu in asked:
        for process in (p for p in gpu["processes"] if p["pid"] != os.getpid()):
            held = process["memory_bytes"]
            size = "n/a" if held is None else f"{held / 2**30:.1f} GiB"
            others.append(f"GPU {gpu['index']}: pid {process['pid']} of {process['user'] or 'unknown user'}, {size}")
    if others:
        return name, "warn", "; ".join(others), "wait, ask its owner, or hide that GPU with CUDA_VISIBLE_DEVICES"
    return name, "ok", f"none on {len(asked)} GPU(s)", ""


def shared_memory(path: Path = Path("/dev/shm"), least: int = 2**27, enough: int = 2**30) -> Check:
    """Workers hand batches over in it; a container has 64 MiB unless told otherwise, and then dies of a bus error."""
    name = "shared memory"
    if not path.is_dir():
        return name, "skip", f"no {path} here", ""
    total, _, free = shutil.disk_usage(path)
    status = "fail" if free < least else "warn" if free < enough else "ok"
    fix = "docker run --shm-size=8g (or --ipc=host), Kubernetes: an emptyDir of medium Memory; or --num-workers 0"
    seen = f"{path}: {free / 2**30:.2f} of {total / 2**30:.2f} GiB free"
    return name, status, seen, "" if status == "ok" else fix


def open_files(limit: int) -> Check:
    if limit == resource.RLIM_INFINITY or limit >= 4096:
        return "open files", "ok", f"limit {'none' if limit == resource.RLIM_INFINITY else limit}", ""
    fix = "ulimit -n 65536 (each tensor that a worker hands over holds a file open)"
    return "open files", "warn" if limit >= 256 else "fail", f"limit {limit}", fix


def locked_memory(limit: int, rdma: Path = Path("/dev/infiniband")) -> Check:
    """The CUDA driver pins memory past this limit; network cards that read memory themselves, InfiniBand, do not."""
    name, cards = "pinned memory", sorted(card.name for card in rdma.glob("uverbs*") if os.access(card, os.R_OK))
    if limit == resource.RLIM_INFINITY:
        return name, "ok", "no limit", ""
    seen = f"limit {limit / 2**20:g} MiB, RDMA cards: {', '.join(cards) or 'none'}"
    status, fix = ("warn", "ulimit -l unlimited (docker run --ulimit memlock=-1)") if cards else ("ok", "")
    return name, status, seen, fix


def disk(run_dir: Path, least: int = 2**30, enough: int = 10 * 2**30, slow: float = 50e6) -> Check:
    """Its space, and a small write that counts as done when the disk says so."""
    name, folder, size = "disk", run_dir.resolve(), 2**24
    while not folder.is_dir():
        folder = folder.parent
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            data = os.urandom(size)
            start = time.perf_counter()
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
            rate = size / (time.perf_counter() - start)
    except OSError as error:
        return name, "fail", f"{folder}: {error.strerror}", "another --run-dir"
    free = shutil.disk_usage(folder).free
    status = "fail" if free < least else "warn" if free < enough or rate < slow else "ok"
    seen = f"{folder}: {free / 2**30:.0f} GiB free, {rate / 1e6:.0f} MB/s"
    return name, status, seen, "" if status == "ok" else "another --run-dir; --keep fewer checkpoints; --async-save"


def python_version(project: Path) -> Check:
    wanted = tomllib.loads(project.read_text())["project"]["requires-python"].removeprefix(">=")
    new_enough = sys.version_info[:2] >= tuple(int(part) for part in wanted.split("."))
    status, fix = ("ok", "") if new_enough else ("fail", f"make PYTHON=python{wanted} train")
    return "Python", status, f"{platform.python_version()}, at least {wanted}", fix


def packages(requirements: Path) -> Check:
    """Other versions may well work, but nobody has tried; torch 2.11 is tried too."""
    pins, off = re.findall(r"^([\w.-]+)==([\w.]+)", requirements.read_text(), re.MULTILINE), []
    for package, pinned in pins:
        try:
            found = importlib.metadata.version(package).split("+")[0]  # 2.13.0+cpu is 2.13.0
        except importlib.metadata.PackageNotFoundError:
            found = "missing"
        if found != pinned and not (package == "torch" and found.startswith("2.11.")):
            off.append(f"{package} {found} (pinned {pinned})")
    if off:
        return "packages", "warn", ", ".join(off), f"pip install -r {requirements.name}"
    return "packages", "ok", f"all {len(pins)} as pinned", ""


def checks(gpus: list[dict], why_none: str | None, environ: Mapping[str, str], run_dir: Path) -> list[Check]:
    repo = Path(__file__).resolve().parents[1]
    return [
        driver(gpus, torch.version.cuda, why_none if nvidia_cards() else None),
        torch_build(gpus, torch.version.cuda, torch.cuda.is_available()),
        visible_devices(gpus, environ),
        peer_access(torch.cuda.device_count() if torch.cuda.is_available() else 0),
        clocks(gpus),
        other_processes(gpus),
        shared_memory(),
        open_files(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
        locked_memory(resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]),
        disk(run_dir),
        python_version(repo / "pyproject.toml"),
        packages(repo / "requirements.txt"),
    ]
