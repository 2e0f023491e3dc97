"""What doctor.py asks of the GPUs: driver, torch build, cuDNN, peer access, clocks under load, other processes.

The form of a check is told in _doctor_machine.py. `gpus` is what common/nvml.py found, `usable` how many torch can use.
"""

import os
import re
import time
from collections.abc import Callable, Mapping
from itertools import permutations
from multiprocessing import TimeoutError, get_context
from pathlib import Path

import torch
from _doctor_machine import Check

from old import nvml


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


def architecture(capabilities: list[tuple[int, int]], built_for: list[str]) -> Check:
    """sm_86 is machine code for 8.6 and later 8.x (sm_90a for 9.0 only); compute_86 is PTX, which the driver compiles
    for any later GPU."""
    name, wanted = "architecture", sorted({*capabilities})
    parts = re.findall(r"(sm|compute)_(\d+)(\d)(a?)", " ".join(built_for))  # AMD's gfx90a and the like: not told
    codes = [(kind, (int(major), int(minor)), only) for kind, major, minor, only in parts]
    if not wanted or not codes:
        return name, "skip", "no GPU that torch can use" if codes or not wanted else f"built for {built_for}", ""
    binary = [(code, only) for kind, code, only in codes if kind == "sm"]
    ready = {g for g in wanted for c, only in binary if g == c or (g[0] == c[0] and g > c and not only)}
    later = {g for g in wanted for kind, c, only in codes if kind == "compute" and c <= g and not only}
    seen = f"{', '.join('{}.{}'.format(*g) for g in wanted)}; torch is built for {' '.join(built_for)}"
    fix = "a torch build that names it: a newer one for a new GPU, an older one for an old GPU"
    if not ready | later >= {*wanted}:
        return name, "fail", seen, fix
    if not ready >= {*wanted}:
        return name, "warn", f"{seen}: only PTX, compiled when first used", fix
    return name, "ok", seen, ""


def cudnn(usable: int, version: Callable[[], int | None] = torch.backends.cudnn.version) -> Check:
    """torch brings its own; another one on LD_LIBRARY_PATH comes first, and torch refuses it when asked."""
    if not usable:
        return "cuDNN", "skip", "no GPU that torch can use", ""
    try:
        number = version()
    except RuntimeError as error:
        return "cuDNN", "fail", f"{error}".split(". ")[0], "unset LD_LIBRARY_PATH; or the torch build of this cuDNN"
    if number is None:
        return "cuDNN", "warn", "not in this torch build", "another torch build: convolutions are slow without it"
    return "cuDNN", "ok", f"version {number}", ""


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


def load(place: int, seconds: float) -> None:
    """Keep torch's GPU number `place` at work: one round of products, and then more for so many seconds."""
    matrix = torch.randn(4096, 4096, device=f"cuda:{place}", dtype=torch.float16)
    deadline = None
    while deadline is None or time.monotonic() < deadline:
        for _ in range(8):  # queued, and not waited for
            matrix @ matrix
        torch.cuda.synchronize(place)
        deadline = deadline or time.monotonic() + seconds  # the first round loads the kernels


def under_load(
    pairs: list[tuple[int, int]], work: Callable[[int, float], None], seconds: float, timeout: float = 90
) -> tuple[dict[int, set[str]], str]:
    """Every throttle reason that NVML gives of each GPU while `work(place, seconds)` keeps it busy; and its error.

    `pairs`: torch's number of a GPU, and NVML's. One GPU after the other, and only that one is asked about meanwhile.
    In a process of its own: its context is gone afterwards, its errors harm nobody, its hang becomes an answer.
    """
    seen: dict[int, set[str]] = {}
    with get_context("spawn").Pool(1) as pool:  # which kills the process at its end
        for place, index in pairs:
            try:
                pool.apply_async(work, (place, 0.0)).get(timeout)  # starts the process, loads the kernels
                answer = pool.apply_async(work, (place, seconds))
                deadline = time.monotonic() + timeout
                while not answer.ready() and time.monotonic() < deadline:
                    reasons = nvml.throttle_reasons(index)
                    if reasons is not None:
                        seen.setdefault(index, set()).update(reasons)
                    answer.wait(0.02)
                answer.get(0)
            except TimeoutError:
                return seen, f"GPU {index}: no answer in {timeout:g} s"
            except Exception as error:  # out of memory, no kernel for it, an exclusive one that another process has
                return seen, f"GPU {index}: {type(error).__name__}: {error}".splitlines()[0]
    return seen, ""


def clocks(gpus: list[dict], loaded: dict[int, set[str]], error: str = "") -> Check:
    """`loaded`: the reasons under load, by GPU; of the others what NVML said at once, and an idle one has none to tell.

    The power cap under load is no fault: large products take many cards to it, and the clock is what gives way. Heat,
    a weak supply and what the hardware does about them are faults, at any load.
    """
    name, now = "clocks", {g["index"]: g["throttle_reasons"] for g in gpus}
    asked = {index: {*reasons} for index, reasons in {**now, **loaded}.items() if reasons is not None}
    if error:
        return name, "fail", f"products: {error}", "see architecture, other processes; nvidia-smi; dmesg"
    if not asked:
        return name, "skip", "not told by the driver" if gpus else "no NVIDIA GPU", ""
    faults = {i: sorted(reasons - ({"power cap"} if i in loaded else set())) for i, reasons in asked.items()}
    where = f"{len(loaded)} of {len(asked)} GPU(s) under load" if loaded else f"{len(asked)} GPU(s), idle: not loaded"
    if any(faults.values()):
        slowed = "; ".join(f"GPU {i}: {', '.join(reasons)}" for i, reasons in faults.items() if reasons)
        fix = "thermal or brake: cooling and power supply; power cap: nvidia-smi -q -d POWER"
        return name, "warn", f"throttled, {slowed} ({where})", fix
    capped = [f"GPU {i}" for i, reasons in asked.items() if reasons]
    return name, "ok", f"not throttled, {where}{'; at its power cap: ' * bool(capped)}{', '.join(capped)}", ""


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


def checks(gpus: list[dict], why_none: str | None, environ: Mapping[str, str], usable: int) -> list[Check]:
    mine = [torch.cuda.get_device_properties(i) for i in range(usable)]
    index_of = {gpu["uuid"]: gpu["index"] for gpu in gpus}
    # without MIG's slices, which NVML lists under another name
    pairs = [(i, index_of[f"GPU-{p.uuid}"]) for i, p in enumerate(mine) if f"GPU-{p.uuid}" in index_of]
    loaded, error = under_load(pairs, load, 1.0) if pairs else ({}, "")
    return [
        driver(gpus, torch.version.cuda, why_none if nvidia_cards() else None),
        torch_build(gpus, torch.version.cuda, bool(usable)),
        visible_devices(gpus, environ),
        architecture([(p.major, p.minor) for p in mine], torch.cuda.get_arch_list()),
        cudnn(usable),
        peer_access(usable),
        clocks(gpus, loaded, error),
        other_processes(gpus),
    ]
