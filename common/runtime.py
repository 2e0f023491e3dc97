"""Where a script runs: its device, its process group, its seeds and its signals."""

import ctypes
import os
import random
import shlex
import signal
import sys
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from common.exits import UserError

_stop_signal = 0
_left_groups: list[dist.ProcessGroup] = []  # kept until the process ends


def ranks() -> tuple[int, int, int]:
    """(rank, world size, local rank) as torchrun sets them; (0, 1, 0) for a plain `python script.py`."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    values = [os.environ.get(name, "") for name in names]
    if not any(values):
        return 0, 1, 0
    if not all(value.isdecimal() for value in values):  # a guess, as rank % GPUs, may put two ranks on one GPU
        raise UserError(f"{', '.join(names)} are {values}: all must be set, or none; start with torchrun")
    return tuple(map(int, values))


def pick_device(name: str = "auto") -> torch.device:
    """This process's device: `auto` takes cuda, then mps, then cpu; of GPUs the one with the number LOCAL_RANK.

    UserError if it is not there, or if there are more processes than GPUs.
    """
    _, world_size, local_rank = ranks()
    if name == "auto":
        use_mps = torch.backends.mps.is_available() and world_size == 1
        name = "cuda" if torch.cuda.is_available() else "mps" if use_mps else "cpu"
    if name == "cuda":
        processes = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        if processes > (gpus := torch.cuda.device_count()):
            raise UserError(
                f"--device cuda: {processes} processes on this node, {gpus} GPUs visible: start fewer, look at the "
                "driver and CUDA_VISIBLE_DEVICES, or use --device cpu"
            )
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if name == "mps" and (world_size > 1 or not torch.backends.mps.is_available()):
        raise UserError("--device mps: one process on a Mac with Metal; use --device cpu")
    return torch.device(name)


def single_device(name: str) -> torch.device:
    """The device of a script that runs in one process; UserError under torchrun with more."""
    if ranks()[1] > 1:
        raise UserError("this script runs in one process, more would only repeat it: 05_ddp/train.py uses many")
    return pick_device(name)


def start(name: str, seed: int = 0) -> torch.device:
    """Begin a lesson of one process: every generator seeded, the device chosen."""
    seed_all(seed)
    return single_device(name)


def relaunch(device: str, on_cpu: int = 2) -> None:
    """Return under torchrun. Else become torchrun of the same script: a process per GPU, or `on_cpu` on the CPU."""
    if "RANK" in os.environ:
        return
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus < 2:
        raise UserError(f"--device cuda: two ranks need two GPUs, {gpus} visible: use --device cpu")
    place, count = ("cuda", gpus) if gpus > 1 else ("cpu", on_cpu)
    command = [f"--nproc_per_node={count}", "--standalone", *sys.argv, "--device", place]  # the last --device wins
    print(f"This script needs several ranks; restarting as: torchrun {shlex.join(command)}", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own choice, without its warning
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *command])


def timeout() -> timedelta:
    """How long a collective waits for its last rank before the job ends: COLLECTIVE_TIMEOUT_SECONDS, 600 if not set. It
    must outlast the slowest save and compilation, and the first tokenization of a text by one rank."""
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


def end_with_torchrun() -> None:
    """Have Linux send this process SIGTERM when torchrun dies, even by kill -9. Otherwise the ranks would train on."""
    if "RANK" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def sharding_mesh(device: torch.device, replicas: int) -> DeviceMesh:
    """The mesh of fully_shard for so many copies of the model: the ranks of one copy are neighbours, and share it.

    UserError if the copies do not divide the ranks.
    """
    world_size = dist.get_world_size()
    if world_size % replicas:
        fit = [str(count) for count in range(1, world_size + 1) if world_size % count == 0]
        raise UserError(f"--replicate {replicas} does not divide {world_size} processes: use {' or '.join(fit)}")
    sizes = {"shard": world_size} if replicas == 1 else {"replicate": replicas, "shard": world_size // replicas}
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes:  # its groups would take torch's own timeout
        dist.distributed_c10d._set_pg_timeout(timeout(), mesh.get_group(name))
    return mesh


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of a DTensor, gathered from the ranks that hold its parts: all must call this."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shutdown() -> None:
    """Leave together: a rank that goes while another still talks to it aborts that one."""
    dist.barrier()
    # DDP holds the group too. Were it the last to do so, gloo's destructor would join its threads with the GIL held,
    # while one of them may wait for the GIL to drop a tensor: the rank hangs after its last line (PyTorch #56297).
    _left_groups.append(dist.group.WORLD)
    dist.destroy_process_group()


def is_rank0() -> bool:
    return (dist.get_rank() if dist.is_initialized() else ranks()[0]) == 0


def say(text: str) -> None:
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


def on_rank0(work: Callable[[], object]) -> object:
    """Run `work` on rank 0 and give every rank its result, or what the person or the disk did wrong there."""
    result, error = None, None
    if is_rank0():
        try:
            result = work()
        except (UserError, OSError) as caught:
            error = caught
    result, error = gather((result, error))[0]
    if error is not None:
        raise error
    return result


def seed_all(value: int, deterministic: bool = False) -> None:
    """Seed every generator; `deterministic` also trades speed for bit-identical kernels. Before init_process_group:
    NCCL reads its environment variables only once."""
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
    torch.set_float32_matmul_precision("highest")  # NVIDIA's containers turn TF32 on
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # sums inside the switch differ from call to call (NVIDIA/nccl#1497)
        torch.use_deterministic_algorithms(True)


def wait_for(device: torch.device) -> None:
    """Until the device has done what it was asked to."""
    if device.type != "cpu":
        getattr(torch, device.type).synchronize()


def catch_stop_signals() -> None:
    """From now on SIGTERM, SIGUSR1 and SIGHUP ask for a checkpoint and an end after the current step."""

    def note(number: int, _frame) -> None:
        global _stop_signal
        _stop_signal = number  # may come again: a dying torchrun sends one SIGTERM per thread of its own

    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGUSR1, note)
    # nohup has it ignored. But torchrun ends also then when its terminal closes, and hands it to its ranks
    if dist.is_torchelastic_launched() or signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:
        signal.signal(signal.SIGHUP, note)


def stop_requested() -> int:
    """The signal that any rank has received (0: none), the same answer on all ranks.

    A scheduler may signal one process only, and a save takes all of them. The flag goes from CPU to CPU over gloo: the
    GPU's queue is not drained for it, and a dead rank shows at once.
    """
    flag = torch.tensor(_stop_signal)
    if dist.is_initialized():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return int(flag)
