"""What doctor.py asks of a training script: it runs for a few steps under _doctor_watch.py, and is judged here."""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psutil
from _doctor_job import RENDEZVOUS
from _doctor_machine import Check

from old import nvml

HERE = Path(__file__).resolve().parent
# the program of each rank: the script then takes its place as the main module
RANK_PROGRAM = f"""
import sys
sys.path[0] = {str(HERE)!r}
from _doctor_watch import watch
watch(*sys.argv[1:], run_name=__name__)
"""
WAIT_SHARE, WAIT_SECONDS = 0.2, 0.005  # of a step, waiting for data: less than 5 ms is the loader's own Python
LAG = 2.0  # the slowest rank's own time over the fastest's: ranks that share a machine differ a little anyway


class Watched(NamedTuple):
    ranks: list[dict]  # the facts of _doctor_watch.py
    stacks: list[str]  # where each rank was when its time was up
    code: int | None  # None: it had to be killed
    error: str  # the first that was printed
    where: str  # file:line of the script's own code
    utilization: list[float]  # of each GPU, the mean of what NVML said


def watch(script: Path, flags: list[str], nproc: int, steps: int, seconds: float) -> Watched:
    """Run a script under _doctor_watch.py, and leave no process of it behind."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}"]
    launcher = [*torchrun, "--no-python"] if nproc > 1 else []
    environ = {key: value for key, value in os.environ.items() if key not in RENDEZVOUS}
    environ["TORCHDYNAMO_DISABLE"] = "1"  # torch.compile is off: every module is looked at
    samples: list[list[float]] = []
    family: set[psutil.Process] = set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        argv = [*launcher, sys.executable, "-c", RANK_PROGRAM, folder, steps, seconds, script, *flags]
        with (folder / "output").open("w") as output:
            process = subprocess.Popen([*map(str, argv)], env=environ, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + seconds + 120  # the ranks' start is not counted
        facts = [folder / f"rank-{rank}.json" for rank in range(nproc)]
        stacks = [folder / f"stack-{rank}" for rank in range(nproc)]
        try:
            while process.poll() is None and time.monotonic() < deadline:
                with contextlib.suppress(psutil.Error):
                    family |= {*psutil.Process(process.pid).children(recursive=True)}
                if any(stack.exists() and stack.stat().st_size for stack in stacks):
                    deadline = min(deadline, time.monotonic() + 5)  # for the other ranks to say where they are
                samples.append([gpu["utilization"] or 0.0 for gpu in nvml.gpus()[0]])
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(0.5)
        finally:
            code = process.poll()
            for left in (process, *family):
                with contextlib.suppress(psutil.Error):
                    left.kill()
            process.wait()
        ranks = [json.loads(file.read_text()) for file in facts if file.exists()]
        traces = [file.read_text() if file.exists() else "" for file in stacks]
        told = (folder / "output").read_text(errors="replace")
    error = re.search(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception)\b.*|.*: error: .*)", told, re.MULTILINE)
    where = places(told[: error.start()])[-1:] if code and error else []
    utilization = [sum(shares) / len(shares) for shares in zip(*samples, strict=False)]
    return Watched(ranks, traces, code, error[1] if code and error else "", "".join(where), utilization)


def places(trace: str) -> list[str]:
    """file:line of the frames that are neither torch's nor Python's nor the watch's."""
    frames = re.findall(r'File "([^<"]+)", line (\d+)', trace)
    watch_file = str(HERE / "_doctor_watch.py")
    return [f"{Path(file).name}:{line}" for file, line in frames if "/lib/python" not in file and file != watch_file]


def first(run: Watched, fact: str) -> str | None:
    return next((rank[fact] for rank in run.ranks if rank[fact]), None)


def ended(run: Watched) -> Check:
    done = min((rank["steps"] for rank in run.ranks), default=0)
    if run.code is None:
        stuck = []
        for rank, stack in enumerate(run.stacks):
            main = stack.split("Thread 0x")[-1]  # printed last, its innermost frame first
            if inner := re.search(r"line \d+ in (\S+)", main):
                stuck.append(f"rank {rank} in {inner[1]}, from {(places(main) or ['?'])[0]}")
        fix = "in a collective: another rank is not there; in a data loader: its dataset; only slow: --timeout"
        return "script", "fail", f"hangs in step {done + 1}: {'; '.join(stuck) or 'killed'}", fix
    if run.code:
        seen = f"exit code {run.code} in step {done + 1}: {run.error or 'no error was printed'} {run.where}"
        return "script", "fail", seen, "the checks below say more where they know the error"
    nothing = ("script", "fail", "ended without one optimizer.step()", "nothing was trained")
    return ("script", "ok", f"{done} steps", "") if done else nothing


def devices(run: Watched) -> Check:
    name, used = "devices", sorted({device for rank in run.ranks for device in rank["devices"]})
    if meta := first(run, "meta"):
        return name, "fail", f"parameter {meta} is on meta: a shape without memory", "to_empty(device=...), then load"
    if re.search(r"same device|expected device|meta tensor|device type", run.error):
        fix = "net.to(device) once, and batch = batch.to(device) for each batch: not in place for a tensor"
        return name, "fail", f"{first(run, 'raised') or 'outside of modules'} {run.where}", fix
    return name, "ok", ", ".join(used), ""


def dtypes(run: Watched) -> Check:
    if re.search(r"dtype|scalar type", run.error):
        fix = "cast the batch to the model's dtype, or run the forward under torch.autocast"
        return "dtypes", "fail", f"{first(run, 'raised') or 'outside of modules'} {run.where}", fix
    return "dtypes", "ok", "no mismatch", ""


def float64(run: Watched) -> Check:
    where, fix = first(run, "float64"), "numpy makes float64: .float(), or torch.as_tensor(..., dtype=torch.float32)"
    return ("float64", "warn", where, fix) if where else ("float64", "ok", "none", "")


def finite(run: Watched) -> Check:
    name, skipped = "NaN, overflow", max(rank["scaler_skipped_steps"] for rank in run.ranks)
    if where := first(run, "not_finite"):
        return name, "fail", where, "log of 0, 0/0, lr too high, fp16 without GradScaler (bf16 has the range of fp32)"
    if skipped and skipped == max(rank["steps"] for rank in run.ranks):
        return name, "warn", f"GradScaler skipped all {skipped} steps", "watch more --steps; if it stays so, use bf16"
    return name, "ok", "outputs, losses and gradients are finite", ""


def memory(run: Watched) -> Check:
    seen = f"peak {max(rank['peak_memory_bytes'] for rank in run.ranks) / 2**30:.2f} GiB per rank"
    if re.search(r"out of memory|allocate memory|not enough memory|MemoryError", run.error):
        fix = "smaller micro-batches with accumulation, bf16, gradient checkpointing, sharding"
        return "memory", "fail", f"{seen}; {run.where} {run.error[:80]}", fix
    return "memory", "ok", seen, ""


def busy_gpus(run: Watched) -> Check:
    name, used = "GPUs in use", {gpu for rank in run.ranks for gpu in rank["gpus"]}
    visible = max([len(used), *(rank["gpus_visible"] for rank in run.ranks)])
    if not visible:
        return name, "skip", "no GPU visible to torch", ""
    seen = f"{len(used)} of {visible}; mean utilisation {', '.join(f'{s:.0%}' for s in run.utilization) or 'n/a'}"
    fix = f"torchrun --nproc_per_node={visible}, and torch.cuda.set_device(LOCAL_RANK) in each rank"
    return (name, "warn", seen, fix) if len(used) < visible else (name, "ok", seen, "")


def data_wait(run: Watched) -> Check:
    name, timed = "data wait", [rank for rank in run.ranks if rank["steps"] > 1]
    if not timed:
        return name, "skip", "needs two steps", ""
    slowest = max(timed, key=lambda rank: rank["data_seconds"])
    share, seconds = slowest["data_seconds"] / slowest["seconds"], slowest["data_seconds"] / (slowest["steps"] - 1)
    seen = f"{seconds:.3f} s per step, {share:.0%} of its time"
    fix = "num_workers, persistent_workers, pin_memory; or do the work on the data once, beforehand"
    return (name, "warn", seen, fix) if share > WAIT_SHARE and seconds > WAIT_SECONDS else (name, "ok", seen, "")


def in_step(run: Watched) -> Check:
    name, hung = "ranks in step", run.code is None
    steps = [len(rank["batches"]) if hung else rank["steps"] for rank in run.ranks]
    counts = f"{', '.join(map(str, steps))} steps{' begun' if hung else ''}"
    if max(steps) - min(steps) > (1 if run.code else 0):  # when one rank fails, torchrun ends the others in any step
        return name, "fail", counts, "equal numbers of batches for all: drop_last, DistributedSampler, ddp.join()"
    own = [(rank["data_seconds"] + rank["forward_seconds"]) / max(1, rank["steps"] - 1) for rank in run.ranks]
    seen = f"{counts}; data and forward {', '.join(f'{s:.3f}' for s in own)} s per step"
    if max(own) > LAG * min(own):
        return name, "warn", seen, "the slowest rank sets the pace: look at its data, its neighbours, its clocks"
    return name, "ok", seen, ""


def batches(run: Watched) -> Check:
    name, by_step = "ranks' batches", [*zip(*(rank["batches"] for rank in run.ranks), strict=False)]
    same = sum(len(set(batch)) == 1 for batch in by_step)
    seen = f"the same on all ranks in {same} of {len(by_step)} steps"
    if not by_step or same < len(by_step):
        return name, "ok", seen, ""
    fix = "DistributedSampler, or order[rank::world_size]; right only where ranks share out one model"
    return name, "warn" if first(run, "sharded") else "fail", seen, fix


def weights(run: Watched) -> Check:
    name, held = "ranks' weights", [rank["weights"] for rank in run.ranks]
    if not all(held):
        return name, "skip", "sharded" if first(run, "sharded") else "not every rank came to the last step", ""
    differ = [key for key in held[0] if len({other.get(key) for other in held}) > 1]
    if differ:
        fix = "gradients are not averaged: wrap the model in DistributedDataParallel, and call it, not what it wraps"
        return name, "fail", f"{len(differ)} of {len(held[0])} parameters differ between ranks: {differ[0]}, ...", fix
    return name, "ok", f"{len(held[0])} parameters equal to the bit on {len(held)} ranks", ""


def checks(run: Watched) -> list[Check]:
    if not run.ranks:
        return [ended(run)]
    several = (in_step, batches, weights) if len(run.ranks) > 1 else ()
    found = [check(run) for check in (devices, dtypes, float64, finite, memory, busy_gpus, data_wait, *several)]
    if not first(run, "devices"):  # no module was called: what was not seen is not ok
        found = [check for check in found if check[1] == "fail"]
    return [ended(run), *found]
