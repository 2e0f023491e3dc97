"""Is this machine fit to train on, and is that script? The troubleshooting list, as checks that run.

The GPUs: driver, torch build, clocks under a second of load (_doctor_gpu.py). The machine: limits, disk, versions
(_doctor_machine.py). A job on it: environment variables, port, threads, NCCL, and two processes that really add up
numbers, with a timeout, so that a hang becomes an answer (_doctor_job.py). With --script a training script runs for
--steps optimizer steps under watch (_doctor_watch.py) and what was seen is judged (_doctor_script.py); its own flags
come last, after a bare `--`. This file only runs the checks and prints what they found: read them in those four files.

    laptop    python 01_devices/doctor.py
    a script  python 01_devices/doctor.py --script 04_amp/train.py
    ranks     python 01_devices/doctor.py --script 05_ddp/train.py --nproc 2
    cluster   python 01_devices/doctor.py --run-dir runs

Look for: fail (it breaks, or numbers come out wrong) and warn (it costs speed, or may break later), each with its fix;
skip says what could not be seen here. The exit code is 1 if anything failed. Next: 01_devices/benchmark.py.
"""

import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
import _doctor_gpu as checks_gpu
import _doctor_job as checks_job
import _doctor_machine as checks_machine
import _doctor_script as checks_script
import torch

from old import cli, exits, nvml, report
from old.exits import UserError


def parse_args():
    parser = cli.Parser(__doc__)
    parser.add_argument("--script", type=cli.path, help="a training script to run under watch")
    parser.add_argument("--nproc", type=cli.positive_int, default=1, help="ranks of --script, under torchrun")
    parser.add_argument("--steps", type=cli.positive_int, default=10, help="optimizer steps to watch")
    parser.add_argument("--timeout", type=cli.positive, default=300, help="seconds until --script counts as hung")
    parser.add_argument("--run-dir", type=cli.path, default=Path("runs"), help="whose disk to check (default: runs)")
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write every check as one JSON object")
    parser.add_argument("flags", nargs="*", metavar="-- FLAG", help="flags of --script")
    args = parser.parse_args()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise UserError("doctor.py is one process: start it without torchrun; --nproc gives --script its ranks")
    if args.script and not args.script.is_file():
        raise UserError(f"--script {args.script} is not a file")
    if args.flags and not args.script:
        raise UserError(f"{args.flags[0]!r}: what follows -- goes to --script, which is not given")
    return args


def main() -> int:
    args = parse_args()
    start = time.monotonic()
    gpus, why_none = nvml.gpus()
    print(f"{len(gpus)} NVIDIA GPU(s){f': {why_none}' if why_none else ''}", flush=True)
    usable = torch.cuda.device_count() if torch.cuda.is_available() else 0  # it counts those with too old a driver, too
    found = checks_gpu.checks(gpus, why_none, os.environ, usable) + checks_machine.checks(args.run_dir)
    found += checks_job.checks(os.environ, usable)
    if args.script:
        watched = checks_script.watch(args.script, args.flags, args.nproc, args.steps, args.timeout)
        found += checks_script.checks(watched)

    print(report.table([["check", "result", "seen"], *([name, status, seen] for name, status, seen, _ in found)]))
    for name, status, _, fix in found:
        if status in ("warn", "fail"):
            print(f"{status}: {name}: {fix}")
    count = {status: sum(check[1] == status for check in found) for status in ("ok", "warn", "fail", "skip")}
    print(", ".join(f"{number} {status}" for status, number in count.items()))

    summary = {
        "device": (gpus[0]["name"] or "cuda") if gpus else "cpu",
        "world_size": args.nproc,
        "seconds": time.monotonic() - start,
        "checks": [dict(zip(("check", "result", "seen", "fix"), check, strict=True)) for check in found],
        "failures": count["fail"],
        "warnings": count["warn"],
    }
    report.write_json(summary, args.json)
    return min(1, count["fail"])


if __name__ == "__main__":
    exits.run(main)
