"""Where a script runs: its device, its process group, its seeds and its signals."""

import ctypes
import os
import random
import shlex
import signal
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common.exits import UserError, stop_signals

_left_groups: list[dist.ProcessGroup] = []  # kept until the process ends


def ranks() -> tuple[int, int, int]:
    """(rank, world size, local rank) as torchrun sets them; (0, 1, 0) for a plain `python script.py`."""
    values = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    if not any(values) or values == ["", "", "0"]:  # DeepSpeed sets that one in a single process
        return 0, 1, 0
    # a guess, as rank % GPUs, may put two ranks on one GPU
    if not all(value.isdecimal() for value in values):
        raise UserError(
            f"RANK, WORLD_SIZE, LOCAL_RANK are {values}: set all or none, or start with torchrun"
        )
    return tuple(map(int, values))


def pick_device(name: str = "auto") -> torch.device:
    """This process's device: `auto` takes cuda, then mps, then cpu; of GPUs the one with the number LOCAL_RANK.
    UserError if it is not there, or if there are more processes than GPUs."""
    _, world_size, local_rank = ranks()
    mps = torch.backends.mps.is_available() and world_size == 1
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if mps else "cpu"
    if name == "mps" and not mps:
        raise UserError("--device mps: one process on a Mac with Metal; use --device cpu")
    if name != "cuda":
        return torch.device(name)
    processes, gpus = (
        max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1))),
        torch.cuda.device_count(),
    )
    if processes > gpus:
        raise UserError(
            f"--device cuda: {processes} processes, {gpus} GPUs visible: start fewer, or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def single_device(name: str) -> torch.device:
    """The device of a script that runs in one process; UserError under torchrun with more."""
    if ranks()[1] > 1:
        raise UserError(
            "this script runs in one process, more would only repeat it: 05_ddp/train.py uses many"
        )
    return pick_device(name)


def timeout() -> timedelta:
    """How long a collective waits for its last rank: it must outlast the slowest save, compilation, tokenization."""
    return timedelta(seconds=int(os.environ.get("COLLECTIVE_TIMEOUT_SECONDS", "600")))


def store() -> dist.Store | None:
    """Where the ranks meet: None for torchrun's own store; one of its own for a plain `python script.py`."""
    return None if ranks()[1] > 1 or dist.is_torchelastic_launched() else dist.HashStore()


def init_process_group(name: str) -> torch.device:
    """Join the job and return this rank's device. 05_ddp/train.py does the same in the open, with reasons."""
    rank, world_size, _ = ranks()
    device = pick_device("cpu" if name == "auto" and not torch.cuda.is_available() else name)
    end_with_torchrun()
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,
        timeout=timeout(),
        rank=rank,
        world_size=world_size,
        store=store(),
    )
    return device


def relaunch(device: str, on_cpu: int = 2) -> None:
    """Return under torchrun. Else become torchrun of the same script: a process per GPU, or `on_cpu` on the CPU."""
    if "RANK" in os.environ:
        return
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus < 2:
        raise UserError(f"--device cuda: two ranks need two GPUs, {gpus} visible: use --device cpu")
    place, count = ("cuda", gpus) if gpus > 1 else ("cpu", on_cpu)
    # the last --device wins
    command = [f"--nproc_per_node={count}", "--standalone", *sys.argv, "--device", place]
    print(
        f"This script needs several ranks; restarting as: torchrun {shlex.join(command)}",
        flush=True,
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own choice, without its warning
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *command])


def join_fake_ranks(rank: int, world_size: int) -> torch.device:
    """Take this process for one rank of many that are not there: collectives return at once. It cannot be another one later: DTensor remembers process groups."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.filterwarnings("ignore", "Set timeout is now only supported for either nccl or gloo")
    # or to_empty() would put a fake tensor's shape into a real parameter, and each use would look like new memory
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    return torch.device("cpu")


def end_with_torchrun() -> None:
    """Have Linux send this process SIGTERM when torchrun dies, even by kill -9. Otherwise the ranks would train on."""
    if "RANK" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def full_tensor(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of a DTensor, gathered from the ranks that hold its parts: all must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shutdown() -> None:
    """Leave together: a rank that goes while another still talks to it aborts that one."""
    dist.barrier()
    # were DDP the last to hold it, gloo's destructor would join threads that wait for Python's lock (PyTorch #56297)
    _left_groups.append(dist.group.WORLD)
    dist.destroy_process_group()


def is_rank0() -> bool:
    return (dist.get_rank() if dist.is_initialized() else ranks()[0]) == 0


def print0(text: str) -> None:
    """Print a line, once per job."""
    if is_rank0():
        print(text, flush=True)


def gather(value: object, group: dist.ProcessGroup | None = None) -> list:
    """Every rank's value, in rank order, on every rank."""
    values = [value]
    if dist.is_initialized():
        values *= dist.get_world_size()
        dist.all_gather_object(values, value, group=group)
    return values


def together(work: Callable[[], object], group: dist.ProcessGroup | None = None) -> list:
    """Every rank's result of `work`, in rank order, on every rank; or the first rank's UserError or OSError on all."""
    result = error = None
    try:
        result = work()
    except (UserError, OSError) as caught:
        error = caught
    results, errors = zip(*gather((result, error), group), strict=True)
    for found in filter(None, errors):
        raise found
    return list(results)


def on_rank0(work: Callable[[], object]) -> object:
    """Run `work` on rank 0 and give every rank its result, or what the person or the disk did wrong there."""
    return together(lambda: work() if is_rank0() else None)[0]


def seed_all(value: int, deterministic: bool = False) -> None:
    """Seed every generator; `deterministic`: slower, bit-identical kernels. To be called before NCCL starts."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
    torch.set_float32_matmul_precision("highest")  # NVIDIA's containers turn TF32 on
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # sums inside the switch differ from call to call (NVIDIA/nccl#1497)
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        torch.use_deterministic_algorithms(True)


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was asked to."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def catch_stop_signals() -> None:
    """From now on SIGTERM, SIGUSR1 and SIGHUP ask for a checkpoint and an end after the current step."""

    def note(number: int, _frame) -> None:
        # may come again: a dying torchrun sends one SIGTERM per thread of its own
        stop_signals.append(number)

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        # nohup has SIGHUP ignored. But torchrun ends also then when its terminal closes, and hands it to its ranks
        if dist.is_torchelastic_launched() or signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, note)


def stop_requested() -> int:
    """The signal that any rank has received (0: none): a scheduler may signal one process only, and a save takes all of
    them. The flag goes from CPU to CPU over gloo: the GPU's queue is not drained for it, and a dead rank shows."""
    flag = torch.tensor(stop_signals[-1] if stop_signals else 0)
    if dist.is_initialized():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return int(flag)
