"""Run a training script under watch and write down what happens; doctor.py --script does this once per rank.

The script runs unchanged, as the main program, with every module's call, Tensor.backward, the DataLoader's next and
the optimizer's step wrapped. The facts go to rank-N.json after each step, because a script may leave through os._exit,
and the process ends itself after the last one. _doctor_script.py starts this and judges the facts.
"""

import faulthandler
import hashlib
import json
import multiprocessing
import os
import resource
import runpy
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.data.dataloader import _BaseDataLoaderIter

RANK, WORLD_SIZE = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
plain_call, plain_backward, plain_next = nn.Module.__call__, Tensor.backward, _BaseDataLoaderIter.__next__

task: dict = {"folder": None, "steps": 0, "deadline": 0.0}  # where the facts go, and when to end: watch() says
facts: dict = {"steps": 0, "ended": False, "scaler_skipped_steps": 0, "sharded": False, "weights": {}, "batches": []}
facts |= dict.fromkeys(("not_finite", "float64", "meta", "raised"))  # in words, where it was first seen
facts |= {"devices": [], "gpus": [], "gpus_visible": 0, "peak_memory_bytes": 0}
facts |= {"seconds": 0.0, "data_seconds": 0.0, "forward_seconds": 0.0}  # of the steps after the first, which warms up
clock = {"start": 0.0, "loader": 0.0, "gap": None, "forward": 0.0}  # of the step under way; gap: until its first call
module_names: dict[nn.Module, str] = {}
parameter_names: dict[nn.Parameter, str] = {}
steps_of: dict[Optimizer, int] = {}  # a GAN has two
calls = threading.local()  # .running: the modules in their forward, outermost first (DataParallel has threads)


def tensors(value: object) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and dicts; of a sharded one, this rank's part."""
    if isinstance(value, Tensor):
        value = value.to_local() if hasattr(value, "to_local") else value
        yield from [value] if value.layout == torch.strided else []
    elif isinstance(value, Mapping | list | tuple):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from tensors(item)


def not_finite(values: Iterable[Tensor]) -> str | None:
    """NaN or inf, if one of the tensors holds it."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():  # a CUDA graph: nothing can be read
        return None
    for t in (t.detach() for t in values if t.is_floating_point() and t.itemsize > 1 and not t.is_meta):  # fp8: no test
        if not torch.isfinite(t).all():
            return "NaN" if torch.isnan(t).any() else "inf"
    return None


def digest(values: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for t in (t for t in values if not t.is_meta):
        total.update(t.detach().cpu().flatten().view(torch.uint8).numpy())
    return total.hexdigest()[:16]


def kinds(values: list[Tensor]) -> str:
    return ", ".join(sorted({f"{str(t.dtype).removeprefix('torch.')} on {t.device}" for t in values})) or "none"


def learn_names(root: nn.Module) -> None:
    """Names are relative to the outermost module; what DDP wraps, it calls `module`."""
    for name, module in root.named_modules():
        module_names[module] = name.removeprefix("module.")
    for name, parameter in root.named_parameters():
        parameter_names[parameter] = name.removeprefix("module.")
        facts["meta"] = facts["meta"] or (name if parameter.is_meta else None)


def watched_call(module: nn.Module, *args, **kwargs):
    """In place of Module.__call__: a global forward hook is given no keyword arguments and no exception."""
    running = calls.__dict__.setdefault("running", [])
    inputs, start = list(tensors((args, kwargs))), time.perf_counter()
    own = list(tensors([p for p in module._parameters.values() if p is not None]))
    if not running:
        calls.not_finite = None
        if module not in module_names:
            learn_names(module)
        if module.training and clock["gap"] is None:
            clock["gap"] = start - clock["start"]
            facts["batches"].append(digest(inputs))
            write()  # a step that has begun: if it hangs, this rank has come further than others
    where = f"{type(module).__name__} '{module_names.get(module, '')}'"
    for what, values in (("parameters", own), ("input", inputs if own or not running else [])):
        if any(t.dtype == torch.float64 for t in values):
            facts["float64"] = facts["float64"] or f"{what} of {where}"
    facts["devices"] = sorted({*facts["devices"], *(str(t.device) for t in (*own, *inputs))})
    try:
        running.append(module)
        output = plain_call(module, *args, **kwargs)
    except Exception as error:
        if getattr(calls, "error", None) is not error:  # the innermost module is the first to see it
            calls.error, facts["raised"] = error, f"{where}: parameters {kinds(own)}, input {kinds(inputs)}"
            facts["not_finite"] = facts["not_finite"] or calls.not_finite
            write()
        raise
    finally:
        running.pop()
    if (bad := not_finite(tensors(output))) and not calls.not_finite:
        before = [what for what, values in (("parameters", own), ("input", inputs)) if not_finite(values)]
        before = f"already in its {' and '.join(before)}" if before else "its input and parameters were finite"
        calls.not_finite = f"{bad} in the output of {where} at step {facts['steps'] + 1}; {before}"
    if not running:
        facts["not_finite"] = facts["not_finite"] or (calls.not_finite if bad else None)  # a mask's -inf is gone by now
        clock["forward"] += time.perf_counter() - start
    return output


def watched_backward(loss: Tensor, *args, **kwargs) -> None:
    if loss.dtype == torch.float64:
        facts["float64"] = facts["float64"] or "the loss"
    if (bad := not_finite(tensors(loss))) and not facts["not_finite"]:
        facts["not_finite"] = f"{bad} in the loss at step {facts['steps'] + 1}, from finite outputs of the modules"
    plain_backward(loss, *args, **kwargs)


def watched_next(loader: _BaseDataLoaderIter):
    start = time.perf_counter()
    batch = plain_next(loader)
    clock["loader"] += time.perf_counter() - start
    return batch


def before_step(optimizer: Optimizer, _args, _kwargs) -> None:
    parameters = (p for group in optimizer.param_groups for p in group["params"])
    kind, parameter = next(((k, p) for p in parameters if (k := not_finite(tensors(p.grad)))), (None, None))
    if kind and getattr(optimizer, "found_inf", None) is not None:  # GradScaler knows, and this step will do nothing
        facts["scaler_skipped_steps"] += 1
    elif kind and not facts["not_finite"]:
        name = parameter_names.get(parameter, "a parameter")
        facts["not_finite"] = f"{kind} in the gradient of {name} at step {facts['steps'] + 1}, from a finite loss"


def after_step(optimizer: Optimizer, _args, _kwargs) -> None:
    steps_of[optimizer] = steps_of.get(optimizer, 0) + 1
    if steps_of[optimizer] <= facts["steps"]:
        return
    now, facts["steps"] = time.perf_counter(), steps_of[optimizer]
    if facts["steps"] > 1:
        facts["seconds"] += now - clock["start"]
        facts["data_seconds"] += clock["loader"] or clock["gap"] or 0.0
        facts["forward_seconds"] += clock["forward"]
    clock.update(start=now, loader=0.0, gap=None, forward=0.0)
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
    whole = {name: p for p, name in parameter_names.items() if not hasattr(p, "to_local")}
    digests = {name: digest([parameter]) for name, parameter in whole.items()}
    facts.update(weights=digests, sharded=len(whole) < len(parameter_names), ended=True)
    write()
    faulthandler.cancel_dump_traceback_later()
    files = [task["folder"] / f"rank-{rank}.json" for rank in range(WORLD_SIZE)]

    def all_ended() -> bool:
        return all(file.exists() and json.loads(file.read_text())["ended"] for file in files)

    while time.monotonic() < task["deadline"] and not all_ended():
        time.sleep(0.05)  # a rank that leaves takes down the collective that another is still in
    for child in multiprocessing.active_children():  # data loading workers
        child.kill()
    os._exit(0)


def watch(folder: str, steps: str, seconds: str, *script: str, run_name: str) -> None:
    """Run `script`, its path and flags, as the module `run_name`, for so many optimizer steps and seconds at most."""
    task.update(folder=Path(folder), steps=int(steps), deadline=time.monotonic() + float(seconds))
    sys.argv = list(script)
    sys.path[0] = str(Path(script[0]).resolve().parent)
    stack = open(task["folder"] / f"stack-{RANK}", "w")  # noqa: SIM115 (written when the time is up)
    faulthandler.dump_traceback_later(float(seconds), file=stack)
    nn.Module.__call__ = watched_call
    Tensor.backward = watched_backward
    _BaseDataLoaderIter.__next__ = watched_next
    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    write()
    clock["start"] = time.perf_counter()
    try:
        runpy.run_path(script[0], run_name=run_name)
    finally:
        facts["ended"] = True
        write()
