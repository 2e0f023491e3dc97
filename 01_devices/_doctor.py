"""A training script under watch, for doctor.py --script: what each rank does, and what that says of the script.

The script runs unchanged, as the main program of each rank, with every module's call, Tensor.backward and the
optimizer's step wrapped. The facts go to rank-N.json after each step: a script may leave through os._exit.
"""

import contextlib
import faulthandler
import hashlib
import json
import os
import re
import resource
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

# nothing of this repository is imported: a script under watch may have a common/ or a _shared.py of its own
RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
RANK_PROGRAM = f"""
import sys
sys.path[0] = {str(Path(__file__).resolve().parent)!r}
from _doctor import watch
watch(*sys.argv[1:], run_name=__name__)
"""
RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
plain_call, plain_backward = nn.Module.__call__, Tensor.backward

Check = tuple[str, str, str, str]  # name, result, what was seen, the fix
task: dict = {"folder": None, "steps": 0, "deadline": 0.0}  # where the facts go, and when to end: watch() says
facts: dict = {"steps": 0, "ended": False, "sharded": False, "weights": {}, "batches": []}
facts |= {"devices": [], "gpus": [], "gpus_visible": 0, "peak_memory_bytes": 0}  # and not_finite, raised
facts |= {"seconds": 0.0, "data_seconds": 0.0}  # of the steps after the first, which warms up
clock = {"start": 0.0, "gap": None}  # of the step under way; gap: until its first call, so the wait for its data
names: dict[nn.Module | nn.Parameter, str] = {}  # from the outermost module on; what DDP wraps, it calls `module`
steps_of: dict[Optimizer, int] = {}  # a GAN has two
calls = threading.local()  # .running: the modules in their forward, outermost first (DataParallel has threads)


def tensors(value: object) -> list[Tensor]:
    """Every tensor in nested tuples, lists and dicts; of a sharded one, this rank's part."""
    found = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    parts = [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in found]
    return [part for part in parts if part.layout == torch.strided]


def not_finite(values: list[Tensor]) -> str | None:
    """NaN or inf, if one of the tensors holds it."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # a CUDA graph: nothing can be read
        return None
    for t in (t.detach() for t in values if t.is_floating_point() and t.itemsize > 1 and not t.is_meta):  # fp8: no test
        if not torch.isfinite(t).all():
            return "NaN" if torch.isnan(t).any() else "inf"
    return None


def digest(values: list[Tensor]) -> str:
    total = hashlib.sha256()
    for t in (t for t in values if not t.is_meta):
        total.update(t.detach().cpu().flatten().view(torch.uint8).numpy())
    return total.hexdigest()[:16]


def watched_call(module: nn.Module, *args, **kwargs):
    """In place of Module.__call__: a global forward hook is given no keyword arguments and no exception."""
    running = calls.__dict__.setdefault("running", [])
    inputs, own = tensors((args, kwargs)), tensors(dict(module._parameters))
    if not running:
        calls.not_finite = None
        if module not in names:
            for name, part in (*module.named_modules(), *module.named_parameters()):
                names[part] = name.removeprefix("module.")
        if module.training and clock["gap"] is None:
            clock["gap"] = time.perf_counter() - clock["start"]
            facts["batches"].append(digest(inputs))
            write()  # a step that has begun: if it hangs, this rank has come further than others
    where = f"{type(module).__name__} '{names.get(module, '')}'"
    facts["devices"] = sorted({*facts["devices"], *(str(t.device) for t in (*own, *inputs))})
    try:
        running.append(module)
        output = plain_call(module, *args, **kwargs)
    except Exception as error:
        if getattr(calls, "error", None) is not error:  # the innermost module is the first to see it
            calls.error = error
            kinds = ["/".join({f"{t.dtype} on {t.device}" for t in values}) or "none" for values in (own, inputs)]
            facts["raised"] = f"{where}: parameters {kinds[0]}, input {kinds[1]}"
            facts["not_finite"] = facts.get("not_finite") or calls.not_finite
            write()
        raise
    finally:
        running.pop()
    if (bad := not_finite(tensors(output))) and not calls.not_finite:
        before = [what for what, values in (("parameters", own), ("input", inputs)) if not_finite(values)]
        before = f"already in its {' and '.join(before)}" if before else "its input and parameters were finite"
        calls.not_finite = f"{bad} in the output of {where} at step {facts['steps'] + 1}; {before}"
    if bad and not running:  # a mask's -inf is gone by now
        facts.setdefault("not_finite", calls.not_finite)
    return output


def watched_backward(loss: Tensor, *args, **kwargs) -> None:
    if bad := not_finite(tensors(loss)):
        facts.setdefault(
            "not_finite", f"{bad} in the loss at step {facts['steps'] + 1}, from finite outputs of modules"
        )
    plain_backward(loss, *args, **kwargs)


def after_step(optimizer: Optimizer, _args, _kwargs) -> None:
    steps_of[optimizer] = steps_of.get(optimizer, 0) + 1
    if steps_of[optimizer] <= facts["steps"]:
        return
    now, facts["steps"] = time.perf_counter(), steps_of[optimizer]
    if facts["steps"] > 1:
        facts["seconds"] += now - clock["start"]
        facts["data_seconds"] += clock["gap"] or 0.0
    clock.update(start=now, gap=None)
    if facts["steps"] == task["steps"]:
        finish()
    write()


def write() -> None:
    cuda = [device for device in facts["devices"] if device.startswith("cuda")]
    facts["gpus"] = [str(getattr(torch.cuda.get_device_properties(d), "uuid", d)) for d in cuda]
    facts["gpus_visible"] = torch.cuda.device_count()
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    facts["peak_memory_bytes"] = max((torch.cuda.max_memory_allocated(device) for device in cuda), default=resident)
    temporary = task["folder"] / f"rank-{RANK}.tmp"
    temporary.write_text(json.dumps(facts))
    temporary.rename(task["folder"] / f"rank-{RANK}.json")


def finish() -> None:
    """The last step is done: say what the weights are, let the other ranks get here too, and leave."""
    parameters = {name: part for part, name in names.items() if isinstance(part, nn.Parameter)}
    facts["weights"] = {name: digest([p]) for name, p in parameters.items() if not hasattr(p, "to_local")}
    facts["sharded"] = len(facts["weights"]) < len(parameters)
    facts["ended"] = True
    write()
    faulthandler.cancel_dump_traceback_later()
    for file in (task["folder"] / f"rank-{rank}.json" for rank in range(WORLD_SIZE)):
        while time.monotonic() < task["deadline"] and not (file.exists() and json.loads(file.read_text())["ended"]):
            time.sleep(0.05)  # a rank that leaves takes down the collective that another is still in
    os._exit(0)  # run_all ends what it leaves, such as the workers of a data loader


def watch(folder: str, steps: str, seconds: str, *script: str, run_name: str) -> None:
    """Run `script`, its path and flags, as the module `run_name`, for so many optimizer steps and seconds at most."""
    task.update(folder=Path(folder), steps=int(steps), deadline=time.monotonic() + float(seconds))
    sys.argv = list(script)
    sys.path[0] = str(Path(script[0]).resolve().parent)
    stack = open(task["folder"] / f"stack-{RANK}", "w")  # noqa: SIM115 (written when the time is up)
    faulthandler.dump_traceback_later(float(seconds), file=stack)
    nn.Module.__call__ = watched_call
    Tensor.backward = watched_backward
    register_optimizer_step_post_hook(after_step)
    write()
    clock["start"] = time.perf_counter()
    try:
        runpy.run_path(script[0], run_name=run_name)
    finally:
        facts["ended"] = True
        write()


def run_all(commands: list[list], seconds: float, look: Callable[[], bool] = bool, **extra: str):
    """Run these side by side: (exit code, None if it had to be killed; output) of each, and nothing left running.
    `look` is called meanwhile. When it says True, or when one has failed, the others have 5 seconds more."""
    environ = {name: value for name, value in os.environ.items() if name not in RENDEZVOUS} | extra
    processes: list[subprocess.Popen] = []
    family: set[psutil.Process] = set()
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder, str(i)) for i in range(len(commands))]
        try:
            for argv, output in zip(commands, outputs, strict=True):
                with output.open("w") as file:
                    processes.append(subprocess.Popen([*map(str, argv)], env=environ, stdout=file, stderr=file))
            deadline = time.monotonic() + seconds
            while any(process.poll() is None for process in processes) and time.monotonic() < deadline:
                for process in processes:
                    with contextlib.suppress(psutil.Error):
                        family |= {*psutil.Process(process.pid).children(recursive=True)}
                if look() or any(process.returncode for process in processes):
                    deadline = min(deadline, time.monotonic() + 5)
                time.sleep(0.1)
        finally:
            codes = [process.poll() for process in processes]
            for left in (*processes, *family):
                with contextlib.suppress(psutil.Error):
                    left.kill()
            for process in processes:
                process.wait()
        return [(code, file.read_text(errors="replace")) for code, file in zip(codes, outputs, strict=True)]


def first_error(output: str) -> str:
    found = re.search(r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception)\b.*|.*: error: .*)", output, re.MULTILINE)
    return found[1] if found else ""  # without the rank, which torch puts before each line


def places(trace: str) -> list[str]:
    """file:line of the frames that are neither torch's nor Python's nor this file's."""
    frames = re.findall(r'File "([^<"]+)", line (\d+)', trace)
    return [f"{Path(file).name}:{line}" for file, line in frames if not re.search(r"/lib/python|_doctor\.py", file)]


def examine(script: Path, flags: list[str], nproc: int, steps: int, seconds: float) -> list[Check]:
    """Run a script under watch and judge it."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={nproc}", "--no-python"]
    launcher = [sys.executable, *torchrun] if nproc > 1 else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [*launcher, sys.executable, "-c", RANK_PROGRAM, folder, steps, seconds, script, *flags]
        hung = lambda: any(stack.stat().st_size for stack in folder.glob("stack-*"))  # noqa: E731
        [(code, output)] = run_all([command], seconds + 120, hung, TORCHDYNAMO_DISABLE="1")  # to see every module
        ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]
        mains = [stack.read_text().split("Thread 0x")[-1] for stack in sorted(folder.glob("stack-*"))]
    done = min((rank["steps"] for rank in ranks), default=0)
    error = where = ""
    seen, fix = f"{done} steps", "nothing was trained: no optimizer.step()"
    if code is None:  # faulthandler prints the main thread last, its innermost frame first
        inner = [(re.findall(r"line \d+ in (\S+)", main), [*places(main), "?"][0]) for main in mains]
        stuck = [f"rank {rank} in {name[0]}, from {file}" for rank, (name, file) in enumerate(inner) if name]
        seen = f"hangs in step {done + 1}: {'; '.join(stuck) or 'killed'}"
        fix = "in a collective: another rank is not there; in a data loader: its dataset; only slow: --timeout"
    elif code:
        error = first_error(output)
        where = ["", *places(output.partition(error)[0])][-1] if error else ""
        seen = f"exit code {code} in step {done + 1}: {error or 'no error was printed'} {where}"
        fix = "the checks below say more where they know the error"
    found = list(judge(ranks, code, error, where)) if ranks else []
    if not any(rank["devices"] for rank in ranks):  # no module was called: what was not seen is not ok
        found = [check for check in found if check[1] == "fail"]
    return [("script", "ok" if code == 0 and done else "fail", seen, fix), *found]


def judge(ranks: list[dict], code: int | None, error: str, where: str) -> Iterator[Check]:
    raised = next((rank["raised"] for rank in ranks if "raised" in rank), "outside of modules") + f" {where}"
    infinite = next((rank["not_finite"] for rank in ranks if rank.get("not_finite")), None)
    used = sorted({device for rank in ranks for device in rank["devices"]})
    wrong = "meta" in used or re.search(r"same device|expected device|meta tensor|device type", error)
    fix = "net.to(device) once, and batch = batch.to(device) each time: not in place for a tensor; meta: to_empty()"
    yield "devices", "fail" if wrong else "ok", raised if wrong else ", ".join(used), fix
    wrong = re.search(r"dtype|scalar type", error)
    fix = "cast the batch to the model's dtype, or run the forward under torch.autocast"
    yield "dtypes", "fail" if wrong else "ok", raised if wrong else "no mismatch", fix
    fix = "log of 0, 0/0, lr too high, fp16 without GradScaler (bf16 has the range of fp32)"
    yield "NaN, overflow", "fail" if infinite else "ok", infinite or "outputs and losses are finite", fix
    seen = f"peak {max(rank['peak_memory_bytes'] for rank in ranks) / 2**30:.2f} GiB per rank"
    wrong = re.search(r"out of memory|allocate memory|not enough memory|MemoryError", error)
    fix = "smaller micro-batches with accumulation, bf16, gradient checkpointing, sharding"
    yield "memory", "fail" if wrong else "ok", seen + f"; {where} {error[:80]}" * bool(wrong), fix
    busy = len({gpu for rank in ranks for gpu in rank["gpus"]})
    visible = max([busy, *(rank["gpus_visible"] for rank in ranks)])
    fix = f"torchrun --nproc_per_node={visible}, and torch.cuda.set_device(LOCAL_RANK) in each rank"
    result = "skip" if not visible else "warn" if busy < visible else "ok"
    yield "GPUs in use", result, f"{busy} of {visible} visible to torch", fix
    later = [rank for rank in ranks if rank["steps"] > 1]  # the first step warms up
    waits = [(rank["data_seconds"] / rank["seconds"], rank["data_seconds"] / (rank["steps"] - 1)) for rank in later]
    share, seconds = max(waits, default=(0.0, 0.0))
    slow = share > 0.2 and seconds > 0.005  # less is the script's own Python
    fix = "num_workers, persistent_workers, pin_memory; or do the work on the data once, beforehand"
    seen = f"{seconds:.3f} s per step, {share:.0%} of its time"
    yield "data wait", "warn" if slow else "ok" if waits else "skip", seen, fix

    if len(ranks) == 1:
        return
    hung, sharded = code is None, any(rank["sharded"] for rank in ranks)
    steps = [len(rank["batches"]) if hung else rank["steps"] for rank in ranks]
    apart = max(steps) - min(steps) > (1 if code else 0)  # when one rank fails, torchrun ends the others in any step
    seen = f"{', '.join(map(str, steps))} steps{' begun' if hung else ''}"
    fix = "equal numbers of batches for all: drop_last, DistributedSampler, ddp.join()"
    yield "ranks in step", "fail" if apart else "ok", seen, fix
    by_step = [*zip(*(rank["batches"] for rank in ranks), strict=False)]
    same = sum(len(set(batch)) == 1 for batch in by_step)
    seen = f"the same on all ranks in {same} of {len(by_step)} steps"
    fix = "DistributedSampler, or order[rank::world_size]; right only where ranks share out one model"
    always = by_step and same == len(by_step)
    yield "ranks' batches", ("warn" if sharded else "fail") if always else "ok", seen, fix
    held = [rank["weights"] for rank in ranks]
    differ = [key for key in held[0] if len({other.get(key) for other in held}) > 1]
    seen = f"{len(differ)} of {len(held[0])} parameters differ between ranks: {', '.join(differ[:1]) or 'none'}"
    if not all(held):
        seen = "sharded" if sharded else "not every rank came to the last step"
    fix = "gradients are not averaged: wrap the model in DistributedDataParallel, and call it, not what it wraps"
    yield "ranks' weights", "skip" if not all(held) else "fail" if differ else "ok", seen, fix


def wrong_variables(given: dict[str, str], gpus: int) -> str:
    """What is wrong with those that torchrun sets: by hand, a job where one is wrong waits until its timeout."""
    missing = [name for name in RENDEZVOUS if name not in given]
    if missing:  # address and port alone are what a batch script prepares
        return f"half set: without {', '.join(missing)}" if given.keys() - {"MASTER_ADDR", "MASTER_PORT"} else ""
    try:
        rank, world_size, local_rank, port = (int(given[name]) for name in RENDEZVOUS if name != "MASTER_ADDR")
        socket.getaddrinfo(given["MASTER_ADDR"], port)
    except (OSError, ValueError) as error:  # no number; no such host
        return f"{given}: {error}"
    right = 0 <= local_rank <= rank < world_size and 0 < port < 65536 and not 0 < gpus <= local_rank
    return "" if right else f"{given} with {gpus} GPUs"
