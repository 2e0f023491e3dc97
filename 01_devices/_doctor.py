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
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_leaves

# nothing of this repository is imported: a script under watch may have a common/ or a _shared.py of its own
RENDEZVOUS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
RANK_PROGRAM = (
    f"import sys; sys.path[0] = {str(Path(__file__).resolve().parent)!r}; import _doctor as d"
)
RANK_PROGRAM += "; d.watch(*sys.argv[1:], run_name=__name__)"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
# with the number of tasks that srun or mpirun has started: what is started here is one of them
TASK_COUNTS = ("SLURM_STEP_NUM_TASKS", "SLURM_STEP_ID", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


def number_in(name: str, default: int) -> int:
    """Return an environment variable as a number; `default` if it is none, which doctor reports."""
    text = os.environ.get(name, "")
    return int(text) if text.isdecimal() else default


RANK = number_in("RANK", 0)
WORLD_SIZE = number_in("WORLD_SIZE", 1)
plain_call = nn.Module.__call__

Check = tuple[str, str, str, str]  # name, result, what was seen, the fix
task: dict = {"cuda": set()}  # where the facts go, and when to end: watch() sets it
facts: dict = {
    "steps": 0,
    "ended": False,
    "sharded": False,
    "weights": "",
    "batches": [],
    "gpus": [],
}
# of the steps after the first, which warms up
facts |= {"gpus_visible": 0, "seconds": 0.0, "data_seconds": 0.0}
# of the step under way; gap: until its first call, so the wait for its data
clock = {"start": 0.0, "gap": None}
# from the outermost module on; what DDP wraps, it calls `module`
names: dict[nn.Module | nn.Parameter, str] = {}
running: list[nn.Module] = []  # those in their forward, outermost first


def tensors(value: object) -> list[Tensor]:
    """Every tensor with values in nested tuples, lists and dicts; of a sharded one, this rank's part."""
    found = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor) and not leaf.is_meta]
    return [tensor.to_local() if hasattr(tensor, "to_local") else tensor for tensor in found]


def not_finite(values: list[Tensor]) -> bool:
    # fp8 has no test
    floats = [t.detach() for t in values if t.is_floating_point() and t.itemsize > 1]
    return not all(torch.isfinite(t).all() for t in floats)


def digest(values: list[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in values:
        total.update(tensor.detach().cpu().flatten().view(torch.uint8).numpy())
    return total.hexdigest()


def watched_call(module: nn.Module, *args, **kwargs):
    """In place of Module.__call__: a global forward hook is given no keyword arguments and no exception."""
    inputs, own = tensors((args, kwargs)), tensors(dict(module._parameters))
    if not running:
        task["not_finite"] = None
        if module not in names:
            for name, part in (*module.named_modules(), *module.named_parameters()):
                names[part] = name.removeprefix("module.")
        if module.training and clock["gap"] is None:
            clock["gap"] = time.perf_counter() - clock["start"]
            facts["batches"].append(digest(inputs))
            write()  # a step that has begun: if it hangs, this rank has come further than others
    where = f"{type(module).__name__} '{names.get(module, '')}'"
    task["cuda"] |= {str(t.device) for t in (*own, *inputs) if t.is_cuda}
    running.append(module)
    try:
        output = plain_call(module, *args, **kwargs)
    except Exception:
        if "raised" not in facts:  # the innermost module is the first to see it
            kinds = [
                "/".join({f"{t.dtype} on {t.device}" for t in values}) or "none"
                for values in (own, inputs)
            ]
            facts["raised"] = f"{where}: parameters {kinds[0]}, input {kinds[1]}"
            write()
        raise
    finally:
        running.pop()
    if not_finite(tensors(output)):
        task["not_finite"] = (
            task["not_finite"]
            or f"NaN or inf in the output of {where} at step {facts['steps'] + 1}"
        )
        if not running:  # a mask's -inf is gone by now
            facts.setdefault("not_finite", task["not_finite"])
    return output


def after_step(optimizer: Optimizer, _args, _kwargs) -> None:
    if task.setdefault("optimizer", optimizer) is not optimizer:  # a GAN has two: the first counts
        return
    now = time.perf_counter()
    facts["steps"] += 1
    if facts["steps"] > 1:
        facts["seconds"] += now - clock["start"]
        facts["data_seconds"] += clock["gap"] or 0.0
    clock.update(start=now, gap=None)
    if facts["steps"] == task["steps"]:
        finish()
    write()


def write() -> None:
    facts["gpus"] = [
        str(getattr(torch.cuda.get_device_properties(d), "uuid", d)) for d in task["cuda"]
    ]
    facts["gpus_visible"] = torch.cuda.device_count()
    temporary = task["folder"] / f"rank-{RANK}.tmp"
    temporary.write_text(json.dumps(facts))
    temporary.rename(task["folder"] / f"rank-{RANK}.json")


def finish() -> None:
    """The last step is done: say what the weights are, let the other ranks get here too, and leave."""
    parameters = [part for part in names if isinstance(part, nn.Parameter)]
    facts["sharded"] = any(hasattr(parameter, "to_local") for parameter in parameters)
    facts["weights"] = digest(tensors(parameters))
    facts["ended"] = True
    write()
    faulthandler.cancel_dump_traceback_later()
    for file in (task["folder"] / f"rank-{rank}.json" for rank in range(WORLD_SIZE)):
        while time.monotonic() < task["deadline"] and not (
            file.exists() and json.loads(file.read_text())["ended"]
        ):
            # a rank that leaves takes down the collective that another is still in
            time.sleep(0.05)
    os._exit(0)  # its data loader's workers end by themselves


def watch(folder: str, steps: str, seconds: str, *script: str, run_name: str) -> None:
    """Run `script`, its path and flags, as the module `run_name`, for so many optimizer steps and seconds at most."""
    task.update(folder=Path(folder), steps=int(steps), deadline=time.monotonic() + float(seconds))
    sys.argv = list(script)
    sys.path[0] = str(Path(script[0]).resolve().parent)
    stack = open(task["folder"] / f"stack-{RANK}", "w")  # noqa: SIM115 (written when the time is up)
    faulthandler.dump_traceback_later(float(seconds), file=stack)
    # when all ranks have noted where they are
    end = threading.Timer(float(seconds) + 5, os._exit, (1,))
    end.daemon = True
    end.start()
    nn.Module.__call__ = watched_call
    register_optimizer_step_post_hook(after_step)
    write()
    clock["start"] = time.perf_counter()
    try:
        runpy.run_path(script[0], run_name=run_name)
    finally:
        facts["ended"] = True
        write()


def run_command(argv: list, seconds: float, **extra: str) -> tuple[int | None, str]:
    """The exit code, None if it had to be killed, and the output."""
    environ = dict(os.environ, **extra)
    for name in (*RENDEZVOUS, *TASK_COUNTS):
        if name not in extra:
            environ.pop(name, None)
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        code = None
        with contextlib.suppress(subprocess.TimeoutExpired):
            code = subprocess.call(
                [*map(str, argv)], env=environ, stdout=output, stderr=output, timeout=seconds
            )
        output.seek(0)
        return code, output.read()


def first_error(output: str) -> str:
    found = re.search(
        r"^(?:\[rank\d+\]: ?)?([\w.]*(?:Error|Exception)\b.*|.*: error: .*)", output, re.MULTILINE
    )
    return found[1] if found else ""  # without the rank, which torch puts before each line


def places(trace: str) -> list[str]:
    """file:line of the frames that are neither torch's nor Python's nor this file's."""
    frames = re.findall(r'File "([^<"]+)", line (\d+)', trace)
    return [
        f"{Path(file).name}:{line}"
        for file, line in frames
        if not re.search(r"/lib/python|_doctor\.py", file)
    ]


def examine(script: Path, flags: list[str], nproc: int, steps: int, seconds: float) -> list[Check]:
    """Run a script under watch and judge it."""
    launcher = [*TORCHRUN, f"--nproc_per_node={nproc}", "--no-python"] if nproc > 1 else []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        command = [
            *launcher,
            sys.executable,
            "-c",
            RANK_PROGRAM,
            folder,
            steps,
            seconds,
            script,
            *flags,
        ]
        # to see every module
        code, output = run_command(command, seconds + 120, TORCHDYNAMO_DISABLE="1")
        ranks = [json.loads(file.read_text()) for file in sorted(folder.glob("rank-*.json"))]
        mains = [
            stack.read_text().split("Thread 0x")[-1] for stack in sorted(folder.glob("stack-*"))
        ]
    if any(mains):
        code = None  # it hung: ranks have noted where, and ended themselves
    done = min((rank["steps"] for rank in ranks), default=0)
    error = where = ""
    seen, fix = f"{done} steps", "nothing was trained: no optimizer.step()"
    if code is None:  # faulthandler prints the main thread last, its innermost frame first
        stuck = [
            f"rank {rank} at {[*places(main), '?'][0]}" for rank, main in enumerate(mains) if main
        ]
        seen = f"hangs in step {done + 1}: {'; '.join(stuck) or 'killed'}"
        fix = "in a collective: another rank is not there; in a data loader: its dataset; only slow: --timeout"
    elif code:
        error = first_error(output)
        where = ["", *places(output.partition(error)[0])][-1] if error else ""
        seen = f"exit code {code} in step {done + 1}: {error or 'no error was printed'} {where}"
        fix = "the checks below say more where they know the error"
    found = list(judge(ranks, code, error, where)) if ranks else []
    # nothing was trained: what was not seen is not ok
    if not any(rank["batches"] for rank in ranks):
        found = [check for check in found if check[1] == "fail"]
    return [("script", "ok" if code == 0 and done else "fail", seen, fix), *found]


KNOWN_ERRORS = {  # by check: words of torch's errors, and the fix
    "devices": (
        "same device|expected device|meta tensor|device type",
        "net.to(device) once, batch = batch.to(device)",
    ),
    "dtypes": (
        "dtype|scalar type",
        "cast the batch to the model's dtype, or run the forward under torch.autocast",
    ),
    "memory": (
        "out of memory|(allocate|enough) memory|MemoryError",
        "smaller micro-batches, checkpointing, sharding",
    ),
}


def judge(ranks: list[dict], code: int | None, error: str, where: str) -> Iterator[Check]:
    raised = (
        next((rank["raised"] for rank in ranks if "raised" in rank), "outside of modules")
        + f" {where}"
    )
    for name, (words, fix) in KNOWN_ERRORS.items():
        wrong = re.search(words, error)
        yield name, "fail" if wrong else "ok", raised if wrong else "no such error", fix
    infinite = next((rank["not_finite"] for rank in ranks if "not_finite" in rank), None)
    fix = "log of 0, 0/0, lr too high, fp16 without GradScaler (bf16 has the range of fp32)"
    yield (
        "NaN, overflow",
        "fail" if infinite else "ok",
        infinite or "outputs of modules are finite",
        fix,
    )
    busy, visible = (
        len({gpu for rank in ranks for gpu in rank["gpus"]}),
        max(rank["gpus_visible"] for rank in ranks),
    )
    fix = f"torchrun --nproc_per_node={visible}, and torch.cuda.set_device(LOCAL_RANK) in each rank"
    result = "skip" if not visible else "warn" if busy < visible else "ok"
    yield "GPUs in use", result, f"{busy} of {visible} visible to torch", fix
    waits = [rank["data_seconds"] / rank["seconds"] for rank in ranks if rank["seconds"]]
    share = max(waits, default=0.0)
    # less is Python's own
    slow = share > 0.2 and any(rank["data_seconds"] > 0.005 * rank["steps"] for rank in ranks)
    fix = "num_workers, persistent_workers, pin_memory; or do the work on the data once, beforehand"
    yield (
        "data wait",
        "warn" if slow else "ok" if waits else "skip",
        f"{share:.0%} of a step's time",
        fix,
    )
    if len(ranks) == 1:
        return
    # a hung one has begun more
    steps = [len(rank["batches"]) if code is None else rank["steps"] for rank in ranks]
    # when one rank fails, torchrun ends the others in any step
    apart = max(steps) - min(steps) > (1 if code else 0)
    fix = "equal numbers of batches for all: drop_last, DistributedSampler, ddp.join()"
    yield (
        "ranks in step",
        "fail" if apart else "ok",
        f"{', '.join(map(str, steps))} steps begun",
        fix,
    )
    by_step = [*zip(*(rank["batches"] for rank in ranks), strict=False)]
    same = sum(len(set(batch)) == 1 for batch in by_step)
    seen = f"the same on all ranks in {same} of {len(by_step)} steps"
    fix = (
        "DistributedSampler, or order[rank::world_size]; right only where ranks share out one model"
    )
    yield "ranks' batches", "warn" if by_step and same == len(by_step) else "ok", seen, fix
    held = {rank["weights"] for rank in ranks}
    fix = "gradients are not averaged: wrap the model in DistributedDataParallel, and call it, not what it wraps"
    # not every rank came to the last step
    unknown = any(rank["sharded"] for rank in ranks) or "" in held
    result = "skip" if unknown else "fail" if len(held) > 1 else "ok"
    yield "ranks' weights", result, f"{len(held)} different ones on {len(ranks)} ranks", fix


def wrong_variables(given: dict[str, str], gpus: int) -> str:
    """What is wrong with those that torchrun sets: by hand, a job where one is wrong waits until its timeout."""
    missing = [name for name in RENDEZVOUS if name not in given]
    if missing:  # address and port alone are what a batch script prepares
        return (
            f"half set: without {', '.join(missing)}"
            if given.keys() - {"MASTER_ADDR", "MASTER_PORT"}
            else ""
        )
    try:
        rank, world_size, local_rank, port = (
            int(given[name]) for name in RENDEZVOUS if name != "MASTER_ADDR"
        )
        socket.getaddrinfo(given["MASTER_ADDR"], port)
    except (OSError, ValueError) as error:  # no number; no such host
        return f"{given}: {error}"
    right = 0 <= local_rank <= rank < world_size and 0 < port < 65536 and not 0 < gpus <= local_rank
    return "" if right else f"{given} with {gpus} GPUs"
