"""Where a script runs: its device, its process group and meshes, its seeds and its signals."""

import ctypes
import math
import os
import random
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from old.exits import UserError, world_from_env

# torch 2.13 has new names for these two, and warns of the old ones. Parts stand one after the other in dimension 0
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_stop_signal = 0
_left_groups: list[dist.ProcessGroup] = []  # kept until the process ends


def pick_device(name: str = "auto", local_rank: int = 0) -> torch.device:
    """The device to train on: `auto` takes cuda, then mps, then cpu. UserError if it is not there."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    if name == "cuda":
        processes, gpus = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1))), torch.cuda.device_count()
        if processes > gpus:
            raise UserError(
                f"--device cuda: {processes} processes on this node, {gpus} GPUs visible: start fewer, look at the "
                "driver and CUDA_VISIBLE_DEVICES, or use --device cpu"
            )
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank)
    if name == "mps" and not torch.backends.mps.is_available():
        raise UserError("--device mps: no Metal device here; use --device cpu")
    if name == "cpu":
        keep_freed_memory()
    return torch.device(name)


def keep_freed_memory() -> None:
    """On a CPU, keep freed memory for the next step, as torch's allocator does on a GPU.

    glibc would give it back to Linux in the backward pass and fault it in again, page by page, in the next forward.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc's
        libc.mallopt(-3, 32 * 2**20)  # M_MMAP_THRESHOLD: from here on memory is mapped, and unmapped, at once
        libc.mallopt(-1, -1)  # M_TRIM_THRESHOLD: never give back


def rank_device(name: str, local_rank: int) -> torch.device:
    """The device of one rank of many: as pick_device, but a GPU or the CPU, since mps has no collectives."""
    if name == "auto" and not torch.cuda.is_available():
        name = "cpu"
    if name == "mps":
        raise UserError("--device mps: torch.distributed has no backend for it; use --device cpu")
    return pick_device(name, local_rank)


def single_device(name: str) -> torch.device:
    """The device of a script that runs in one process; UserError under torchrun with more."""
    if world_from_env()[1] > 1:
        raise UserError("this script runs in one process, more would only repeat it: 05_ddp/train.py uses many")
    return pick_device(name)


def processes(device: str, on_cpu: int = 2) -> int:
    """How many ranks a script has that needs several: torchrun's, else what relaunch() will start."""
    if "RANK" in os.environ:
        return world_from_env()[1]
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus < 2:
        raise UserError(f"--device cuda: two ranks need two GPUs, {gpus} visible: use --device cpu")
    return gpus if gpus > 1 else on_cpu


def relaunch(device: str, on_cpu: int = 2) -> None:
    """Return under torchrun. Else become torchrun of the same script: a process per GPU, or `on_cpu` on the CPU."""
    if "RANK" in os.environ:
        return
    count = processes(device, on_cpu)
    place = "cuda" if device != "cpu" and torch.cuda.device_count() > 1 else "cpu"
    command = [f"--nproc_per_node={count}", "--standalone", *sys.argv, "--device", place]  # the last --device wins
    print(f"one process has nobody to talk to: torchrun {shlex.join(command)}", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own choice, without its warning
    # nothing is left running in between
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *command])


def collective_timeout() -> timedelta:
    """How long a collective waits for its last rank before the job ends; UserError for a value that cannot be.

    Longer than the slowest save, compilation or first tokenization of a text that one rank does while the others wait,
    and no longer than a hang may cost.
    """
    seconds = os.environ.get("COLLECTIVE_TIMEOUT_SECONDS", "600")
    if not seconds.isdecimal() or not 0 < int(seconds) < 10**7:
        raise UserError(f"COLLECTIVE_TIMEOUT_SECONDS={seconds} is not a whole number of seconds from 1 to 9999999")
    return timedelta(seconds=int(seconds))


def init_process_group(name: str) -> torch.device:
    """Join the job and return this rank's device: NCCL between GPUs, gloo between CPUs. 05_ddp/train.py spells it out.

    GPU ranks get gloo too, to agree on a flag or a file name without stopping the GPU. A plain
    `python script.py` becomes a world of one.
    """
    rank, world_size, local_rank = world_from_env()
    device = rank_device(name, local_rank)
    end_with_torchrun()
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        device_id=device if device.type == "cuda" else None,
        store=None if world_size > 1 or dist.is_torchelastic_launched() else dist.HashStore(),  # None: torchrun's
        rank=rank,
        world_size=world_size,
        timeout=collective_timeout(),
    )
    return device


def end_with_torchrun() -> None:
    """Have Linux send this process SIGTERM when torchrun dies, even by kill -9. Otherwise the ranks would train on."""
    if "RANK" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG


def device_mesh(device: torch.device, sizes: dict[str, int]) -> DeviceMesh:
    """A mesh of all ranks with these sizes by name, such as {"replicate": 2, "shard": 4}; every rank must call it.

    Its groups wait as long as the whole job's. Left alone they would take torch's own timeout, and those that
    mesh[...]._flatten() makes later do. UserError if the sizes do not multiply to the number of ranks.
    """
    if math.prod(sizes.values()) != dist.get_world_size():
        told = " x ".join(f"{name} {size}" for name, size in sizes.items())
        raise UserError(f"{told} is {math.prod(sizes.values())} processes, and {dist.get_world_size()} were started")
    mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    for name in sizes:
        dist.distributed_c10d._set_pg_timeout(collective_timeout(), mesh.get_group(name))
    return mesh


def sharding_mesh(device: torch.device, replicas: int) -> DeviceMesh:
    """The mesh of fully_shard for so many copies of the model: the ranks of one copy are neighbours, and share it.

    One copy takes one dimension: over a group of one each collective would still be made.
    UserError if the copies do not divide the ranks.
    """
    world_size = dist.get_world_size()
    if world_size % replicas:
        fit = [str(count) for count in range(1, world_size + 1) if world_size % count == 0]
        raise UserError(
            f"--replicate {replicas} does not divide {world_size} processes into equal parts: use {' or '.join(fit)}"
        )
    sizes = {"shard": world_size // replicas}
    return device_mesh(device, sizes if replicas == 1 else {"replicate": replicas, **sizes})


def reshard(net: torch.nn.Module) -> None:
    """Let every rank of a fully_shard model forget what is not its own.

    Backward does that. After a forward without one, parameters() are the gathered weights, in the type of arithmetic.
    """
    for module in net.modules():
        if hasattr(module, "reshard"):
            module.reshard()


def whole(tensor: Tensor) -> Tensor:
    """The tensor itself, or all of a DTensor or of a parameter under DeepSpeed's ZeRO-3, gathered from the ranks that
    hold its parts, which must all call this."""
    if hasattr(tensor, "ds_id"):
        with gathered(tensor):
            return tensor.detach().clone()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@contextmanager
def gathered(parameter: Tensor, *, to_set: bool = False) -> Iterator[None]:
    """While entered, a parameter that DeepSpeed's ZeRO-3 has cut is whole on every rank. With to_set, each rank keeps
    its part of what rank 0 has written into it. Nothing happens to other tensors."""
    if not hasattr(parameter, "ds_id"):
        yield
        return
    from deepspeed.runtime.zero import GatheredParameters

    with GatheredParameters([parameter], modifier_rank=0 if to_set else None):
        yield


def shard_like(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor itself or, if `like` is a DTensor, its parts in the same places; every rank has all of `tensor`."""
    if not hasattr(like, "placements"):
        return tensor
    from torch.distributed.tensor import distribute_tensor  # 1 s that unsharded training need not wait for

    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def own_rows(tensor: Tensor) -> slice:
    """The rows that this rank holds: all, or of a DTensor those of its part."""
    if not hasattr(tensor, "placements"):
        return slice(None)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    (count, *_), (start, *_) = compute_local_shape_and_global_offset(
        tensor.shape, tensor.device_mesh, tensor.placements
    )
    return slice(start, start + count)


def shutdown() -> None:
    """Leave together: a rank that goes while another still talks to it aborts that one."""
    dist.barrier()
    # DDP holds the group too. Were it the last to do so, gloo's destructor would join its threads with the GIL held,
    # while one of them may wait for the GIL to drop a tensor: the rank hangs after its last line (PyTorch #56297).
    _left_groups.append(dist.group.WORLD)
    dist.destroy_process_group()


def is_rank0() -> bool:
    return (dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))) == 0


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


def seed(value: int, deterministic: bool) -> None:
    """Seed every generator; `deterministic` also trades speed for bit-identical kernels.

    To be called before init_process_group, because NCCL reads its environment variables only once.
    """
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ["NCCL_NVLS_ENABLE"] = "0"  # sums inside the switch differ from call to call (NVIDIA/nccl#1497)
        torch.use_deterministic_algorithms(True)


def exact_fp32(device: torch.device) -> None:
    """From now on fp32 matrices are multiplied in fp32; UserError where the environment does not let them.

    TORCH_ALLOW_TF32_CUBLAS_OVERRIDE only changes torch's default. NVIDIA_TF32_OVERRIDE acts inside cuBLAS, where torch
    cannot see it, so the product of two matrices is measured.
    """
    torch.set_float32_matmul_precision("highest")
    x = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    exact = x.double() @ x.double()
    product = (x.to(device) @ x.to(device)).cpu()
    relative_error = ((product - exact).norm() / exact.norm()).item()
    if relative_error > 1e-5:  # fp32: 2e-7, tf32: 3e-4
        raise UserError(
            f"fp32 products are wrong by {relative_error:.0e} on {device}, as if in tf32 (NVIDIA_TF32_OVERRIDE="
            f"{os.environ.get('NVIDIA_TF32_OVERRIDE', 'not set')}): unset that variable"
        )


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
    """The signal that any rank has received (0: none), the same answer on all ranks, whatever part of the model or
    of the batch they hold.

    A scheduler may signal one process only, and a save takes all of them. The flag goes from CPU to
    CPU over gloo: the GPU's queue is not drained for it, and a dead rank shows at once.
    """
    flag = torch.tensor(_stop_signal)
    if dist.is_initialized():
        dist.all_reduce(flag, op=dist.ReduceOp.MAX)
    return int(flag)
