"""Is this machine fit to train on, and is that script? The troubleshooting list, as checks that run.

The GPUs, the machine, and a job on it, where two processes really add up numbers. With --script a training script runs
for --steps optimizer steps under watch and is judged (_doctor.py); its own flags come last, after a bare `--`.

    laptop    python 01_devices/doctor.py
    a script  python 01_devices/doctor.py --script 04_amp/train.py
    ranks     python 01_devices/doctor.py --script 05_ddp/train.py --nproc 2
    cluster   srun --ntasks-per-node=1 python 01_devices/doctor.py --run-dir runs

Look for: fail (it breaks, or numbers come out wrong), warn (it costs speed, or may break later), each with its fix, and
skip (could not be seen here). The exit code is 1 if anything failed. Before: show.py. Next: benchmark.py.
"""

import json
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import Iterator
from importlib.metadata import distributions
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _shared as machine
from _doctor import RENDEZVOUS, TORCHRUN, Check, examine, first_error, run_command, wrong_variables

from common import cli, exits, hardware, report
from common.exits import UserError
from common.report import table

MULTIPLY = """
import torch
for place in range(torch.cuda.device_count()):
    matrix = torch.ones(64, 64, device=f"cuda:{place}", dtype=torch.float16)
    assert (matrix @ matrix).eq(64).all(), f"GPU {place} multiplies wrong"
"""
ATTENTION = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
from common import hardware
facts = {"cudnn": hardware.cudnn_version(), "kernel": hardware.attention_kernel()}
facts["hopper"] = torch.cuda.get_device_capability()[0] == 9
print(json.dumps(facts))
"""
ALL_REDUCE = """
import datetime, faulthandler, os, sys, torch, torch.distributed as dist
faulthandler.dump_traceback_later(120, exit=True)
backend, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group(backend, timeout=datetime.timedelta(seconds=60))
numbers = torch.full((2**20,), rank + 1.0, device=f"cuda:{rank}" if backend == "nccl" else "cpu")
dist.all_reduce(numbers)
assert numbers.eq(3).all(), "1 + 2 came out wrong"
dist.barrier()
os._exit(0)  # gloo's thread may abort Python's own end
"""


def gpu_checks(gpus: list[dict], why_none: str | None, usable: int) -> Iterator[Check]:
    """`gpus` are those that NVML sees, `usable` how many of them torch can use."""
    lost = [
        f"GPU {gpu['index']}: {gpu['refused']['handle']}"
        for gpu in gpus
        if "handle" in gpu["refused"]
    ]
    displays = [
        file.parent
        for file in Path("/sys/bus/pci/devices").glob("*/class")
        if "0x03" in file.read_text()
    ]
    cards = any("0x10de" in Path(display, "vendor").read_text() for display in displays)  # NVIDIA's
    offered, built = gpus[0]["cuda"] if gpus else None, torch.version.cuda
    # any minor version will do
    older = offered and built and int(offered.split(".")[0]) < int(built.split(".")[0])
    broken = lost or older or (cards and not gpus)
    seen = (
        "; ".join(lost)
        or why_none
        or f"runs CUDA {offered or 'n/a'}, torch was built for {built or 'none'}"
    )
    fix = "update or reinstall the driver, reboot; an Xid in dmesg: the GPU fell off the bus, reboot or replace it"
    yield "driver", "fail" if broken else "ok" if offered and built else "skip", seen, fix
    if not gpus:
        return

    visible = f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')}"
    seen = f"torch {torch.__version__} for CUDA {built or 'none'} can use {usable} of {len(gpus)}; {visible}"
    fix = "unset it, unless the others are hidden on purpose; CUDA stops counting at the first entry that names no GPU"
    result = "ok" if usable >= len(gpus) else "warn" if usable else "fail"
    yield "visible GPUs", result, seen, fix if built else "install a build of torch for CUDA"
    if not usable:
        return

    # in a process of its own: its contexts are gone afterwards, and its hang becomes an answer
    code, output = run_command([sys.executable, "-c", MULTIPLY], 150)
    error = "" if code == 0 else first_error(output) or f"exit code {code}"
    seen = (
        error
        or f"{usable} GPUs multiply; torch is built for {' '.join(torch.cuda.get_arch_list())}"
    )
    fix = "no kernel image: a newer torch for a new GPU, an older one for an old GPU; else monitor.py, dmesg"
    yield "architecture", "fail" if error else "ok", seen, fix
    if not error:
        yield attention_check()


def attention_check() -> Check:
    """Check which kernel computes attention in a training step.

    On Hopper torch takes cuDNN's attention, which transformers measured 1.7 to 2.3 times as fast as
    FlashAttention 2 at training shapes (huggingface/transformers#48163). It does so only if the cuDNN
    that is loaded at run time is newer than 9.15, and falls back without a message.
    """
    repository = Path(hardware.__file__).resolve().parents[1]
    code, output = run_command([sys.executable, "-c", ATTENTION, repository], 150)
    fix = (
        "take an older cuDNN out of LD_LIBRARY_PATH, or install a newer one "
        "(pip install -U nvidia-cudnn-cu13); do not set TORCH_CUDNN_SDPA_DEPRIORITIZED"
    )
    if code != 0:
        return "attention", "fail", first_error(output) or f"exit code {code}", fix
    facts = json.loads(output.splitlines()[-1])
    seen = f"cuDNN {facts['cudnn'] or 'n/a'}, {facts['kernel']} in a causal bf16 training step"
    slow = facts["kernel"] == "MATH" or (facts["hopper"] and facts["kernel"] != "CUDNN_ATTENTION")
    return "attention", "warn" if slow else "ok", seen, fix


def machine_checks(run_dir: Path) -> Iterator[Check]:
    # workers hand batches over in it: a container has 64 MiB, and ends in a bus error
    if Path("/dev/shm").is_dir():
        free = shutil.disk_usage("/dev/shm").free / 2**30
        fix = "docker run --shm-size=8g (or --ipc=host), Kubernetes: an emptyDir of medium Memory; or --num-workers 0"
        yield (
            "shared memory",
            "fail" if free < 0.125 else "warn" if free < 1 else "ok",
            f"{free:.2f} GiB free",
            fix,
        )

    folder = next(
        folder for folder in (run_dir.resolve(), *run_dir.resolve().parents) if folder.is_dir()
    )
    free, writable = shutil.disk_usage(folder).free / 2**30, os.access(folder, os.W_OK)
    result = "fail" if free < 1 or not writable else "warn" if free < 10 else "ok"
    seen = f"{folder}: {free:.0f} GiB free{'' if writable else ', not writable'}"
    yield "disk", result, seen, "another --run-dir; --keep fewer checkpoints"
    requirements = (
        Path(__file__)
        .resolve()
        .parents[1]
        .joinpath("requirements.txt")
        .read_text()
        .replace("_", "-")
    )
    pins = re.findall(r"^([\w.-]+)==([\w.]+)", requirements, re.MULTILINE)
    found = {
        d.name.replace("_", "-"): d.version.split("+")[0] for d in reversed([*distributions()])
    }
    off = [
        f"{name} {found.get(name, 'missing')} (pinned {pin})"
        for name, pin in pins
        if found.get(name) != pin
    ]
    yield (
        "versions",
        "warn" if off else "ok",
        ", ".join(off) or "all as pinned",
        "pip install -r requirements.txt",
    )


def job_checks(gpus: int) -> Iterator[Check]:
    """`gpus`: those that torch can use; as many processes will start here."""
    wrong = wrong_variables(
        {name: os.environ[name] for name in RENDEZVOUS if name in os.environ}, gpus
    )
    fix = f"unset them and start with torchrun, or set all: {', '.join(RENDEZVOUS)}"
    yield "environment variables", "fail" if wrong else "ok", wrong or "none is wrong", fix

    # what torchrun takes without --standalone or --rdzv-endpoint
    port = os.environ.get("MASTER_PORT", "29500")
    with socket.socket() as probe:  # rank 0 will listen there
        taken = (
            port.isdecimal()
            and int(port) < 65536
            and probe.connect_ex(("localhost", int(port))) == 0
        )
    result = "ok" if not taken else "fail" if "MASTER_PORT" in os.environ else "warn"
    yield (
        "port",
        result,
        f"{port} is {'taken' if taken else 'free'}",
        "end what listens there, or another MASTER_PORT",
    )

    for backend in ("gloo", "nccl") if gpus > 1 else ("gloo",):
        argv = [
            *TORCHRUN,
            "--nproc_per_node=2",
            "--no-python",
            sys.executable,
            "-c",
            ALL_REDUCE,
            backend,
        ]
        code, output = run_command(argv, 150)
        error = "" if code == 0 else first_error(output) or f"exit code {code}"
        fix = f"{backend.upper()}_SOCKET_IFNAME=<an interface that is up>; a firewall; the host's name; NCCL_DEBUG=INFO"
        yield f"{backend} all-reduce", "fail" if error else "ok", error or "2 processes agree", fix


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--script", type=Path, help="a training script to run under watch")
    add("--nproc", type=cli.positive_int, default=1, help="ranks of --script, under torchrun")
    add("--steps", type=cli.positive_int, default=10, help="optimizer steps to watch")
    add("--timeout", type=cli.positive, default=300, help="seconds until --script counts as hung")
    add("--run-dir", type=Path, default=Path("runs"), help="whose disk to check (default: runs)")
    add(
        "--json",
        type=cli.writable_file,
        metavar="PATH",
        help="write every check as one JSON object",
    )
    add("flags", nargs="*", metavar="-- FLAG", help="flags of --script")
    args = parser.parse_args()
    if args.script and not args.script.is_file():
        raise UserError(f"--script {args.script} is not a file")
    start = time.monotonic()
    gpus, why_none = machine.gpus()
    # it counts those with too old a driver, too
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
    found = [
        *gpu_checks(gpus, why_none, usable),
        *machine_checks(args.run_dir),
        *job_checks(usable),
    ]
    if args.script:
        found += examine(args.script, args.flags, args.nproc, args.steps, args.timeout)
    print(table([["check", "result", "seen"], *(check[:3] for check in found)]))
    for name, result, _, fix in found:
        if result in ("warn", "fail"):
            print(f"{result}: {name}: {fix}")
    failures, warnings = (sum(check[1] == result for check in found) for result in ("fail", "warn"))
    print(f"{failures} failures, {warnings} warnings")
    summary = {
        "device": (gpus[0]["name"] or "cuda") if gpus else "cpu",
        "world_size": args.nproc,
        "seconds": time.monotonic() - start,
        "checks": [
            dict(zip(("check", "result", "seen", "fix"), check, strict=True)) for check in found
        ],
        "failures": failures,
        "warnings": warnings,
    }
    report.write_json(summary, args.json)
    return min(1, failures)


if __name__ == "__main__":
    exits.run(main)
