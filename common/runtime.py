"""Ranks, devices, process groups, seeds and signals: how a script fits into the job it is part of.

Everything here works the same in a plain `python script.py`, which is a job of one rank, and under
torchrun, which starts one process per GPU.
"""

import ctypes
import hashlib
import os
import random
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from common import cli, exits, files, torch_versions
from common.exits import (
    STOP_FILE,
    USER_ERROR_EXIT_CODE,
    StopSignalError,
    UserError,
    stop_signals,
)
from common.progress import print_line

T = TypeVar("T")

# The values of --dtype.
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
PR_SET_PDEATHSIG = 1  # of Linux's prctl: the signal to send to this process when its parent dies
# Launchers that start processes without RANK: the command, then the environment variables with the
# number of processes that it has started and with the number of this process.
LAUNCHERS_WITHOUT_RANK = (
    ("srun", "SLURM_STEP_NUM_TASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
)
LONGEST_TIMEOUT = 10**9  # seconds. The clocks of gloo and NCCL count nanoseconds in 64 bits
_left_groups: list[dist.ProcessGroup] = []  # filled by shutdown, which says why
_training_has_begun = False  # set by stop_requested
SECONDS_BETWEEN_LOOKS = 1.0
_watched_folder: Path | None = None  # on rank 0
_next_look = 0.0
_save_requested = False  # set by stop_requested


# --- the place of this process in the job


class Ranks(NamedTuple):
    """The place of this process in the job, in the order RANK, WORLD_SIZE, LOCAL_RANK."""

    rank: int  # the number of this process, from 0
    world_size: int  # how many processes the job has
    local_rank: int  # the number of this process on its own node, from 0


def ranks() -> Ranks:
    """Read RANK, WORLD_SIZE and LOCAL_RANK, which torchrun sets for each process.

    A plain `python script.py` has none of them and gets (0, 1, 0). Raise UserError if only some are
    set: guessing the others, for example LOCAL_RANK as rank % GPUs, could put two ranks on one GPU.
    Raise it also if they contradict each other.
    """
    values = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")]
    no_launcher = values == ["", "", ""]
    deepspeed_in_one_process = values == ["", "", "0"]  # DeepSpeed sets LOCAL_RANK alone
    if no_launcher or deepspeed_in_one_process:
        return Ranks(rank=0, world_size=1, local_rank=0)
    if not all(value.isdecimal() for value in values):
        raise UserError(
            f"RANK, WORLD_SIZE, LOCAL_RANK are {values}: set all or none, or start with torchrun"
        )
    rank, world_size, local_rank = map(int, values)
    if not local_rank <= rank < world_size:
        raise UserError(
            f"RANK, WORLD_SIZE, LOCAL_RANK are {values}: RANK must be below WORLD_SIZE, and "
            "LOCAL_RANK at most RANK; start with torchrun"
        )
    return Ranks(rank, world_size, local_rank)


def refuse_tasks_without_rank() -> None:
    """Raise UserError if srun or mpirun has started several processes that have no RANK.

    Each of them would train alone, and all of them the same. Only the first process reports it; the
    others end with the same exit code. A plain `python script.py` in a batch script or in an
    allocation passes: it is one process, however many tasks the allocation has.
    """
    if "RANK" in os.environ:
        return
    for command, count_name, number_name in LAUNCHERS_WITHOUT_RANK:
        count = os.environ.get(count_name, "")
        if command == "srun" and not count and "SLURM_STEP_ID" in os.environ:
            count = os.environ.get("SLURM_NTASKS", "")
        if not count.isdecimal() or int(count) < 2:
            continue
        if os.environ.get(number_name, "0") != "0":
            sys.exit(USER_ERROR_EXIT_CODE)
        raise UserError(
            f"{command} started {count} processes without RANK, which would all train alone: "
            f"start one torchrun per node, torchrun --nproc_per_node=GPUS {sys.argv[0]} "
            "(launch/ has the commands for several nodes)"
        )


def is_rank0() -> bool:
    """Return whether this process is rank 0. Before init_process_group, RANK says so."""
    if dist.is_initialized():
        return dist.get_rank() == 0
    return ranks().rank == 0


def print0(text: str) -> None:
    """Print a line on rank 0 only, so that it appears once per job."""
    if is_rank0():
        print_line(text)


# --- devices


def pick_device(name: str = "auto") -> torch.device:
    """Return the device of this process for `--device name`: auto, cuda, mps or cpu.

    auto takes cuda if there is a GPU, else mps, else cpu. On cuda each process takes the GPU with
    the index LOCAL_RANK and makes it torch's current device. Raise UserError if the device is
    missing, or if this node runs more processes than it has GPUs.
    """
    _, world_size, local_rank = ranks()
    mps_usable = torch.backends.mps.is_available() and world_size == 1
    if name == "auto":
        if torch.cuda.is_available():
            name = "cuda"
        elif mps_usable:
            name = "mps"
        else:
            name = "cpu"
    if name == "mps" and not mps_usable:
        raise UserError("--device mps: one process on a Mac with Metal; use --device cpu")
    if name != "cuda":
        return torch.device(name)

    # torchrun sets LOCAL_WORLD_SIZE; a launcher that does not still has this many processes
    local_world_size = cli.environment_number("LOCAL_WORLD_SIZE", cli.positive_int, "1")
    processes = max(local_rank + 1, local_world_size)
    gpus = torch.cuda.device_count()
    if processes > gpus:
        if gpus == 0:
            raise UserError(
                "--device cuda: no GPU is visible: 01_devices/doctor.py looks for the cause, "
                "--device cpu runs without"
            )
        raise UserError(
            f"--device cuda: {processes} processes, {gpus} GPUs visible: "
            "start fewer, or use --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def device_type(name: str, relaunches: bool = False) -> str:
    """Return cuda, mps or cpu: what `--device name` will mean for this script.

    A script calls it for defaults that depend on the device, before it has one. `relaunches` is for
    a script that calls `lesson.relaunch`: on a machine with one GPU its ranks are on the CPU.
    """
    if name != "auto":
        return name
    if relaunches and "RANK" not in os.environ:
        return "cuda" if torch.cuda.device_count() > 1 else "cpu"
    if torch.cuda.is_available():
        return "cuda"
    if torch.backends.mps.is_available() and not relaunches:
        return "mps"
    return "cpu"


def single_device(name: str) -> torch.device:
    """Return the device of a script that runs in one process. Raise UserError if there are more."""
    world_size = ranks().world_size
    if world_size > 1:
        raise UserError(
            f"this script runs in one process, and {world_size} were started: "
            "start it with plain python; 05_ddp/train.py uses several"
        )
    return pick_device(name)


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all work that was queued on it. The CPU has no queue."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize()


# --- process groups


def timeout() -> timedelta:
    """Return how long a collective waits for its last rank.

    The environment variable COLLECTIVE_TIMEOUT_SECONDS sets it. The default is 600. It must be
    longer than the slowest thing that one rank does while the others wait, such as a save, a
    compilation or a tokenization. Raise UserError if it is not a whole number of at least 1.
    """
    seconds = cli.environment_number("COLLECTIVE_TIMEOUT_SECONDS", cli.positive_int, "600")
    return timedelta(seconds=min(seconds, LONGEST_TIMEOUT))


def set_timeout(group: dist.ProcessGroup) -> None:
    """Give a process group the timeout of the job.

    Groups that a device mesh or a library creates start with torch's own: 10 minutes on a GPU and
    30 on a CPU.
    """
    torch_versions.set_timeout(timeout(), group)


def store() -> dist.Store | None:
    """Return the key-value store through which the ranks find each other, for init_process_group.

    None makes init_process_group connect to the store that torchrun runs, also if torchrun started
    only one process. A plain `python script.py` has no torchrun and gets a store in its own memory.
    Raise UserError if MASTER_ADDR and MASTER_PORT do not say where the store is.
    """
    if ranks().world_size > 1 or dist.is_torchelastic_launched():
        _check_address_of_store()
        return None
    return dist.HashStore()


def _check_address_of_store() -> None:
    """Raise UserError unless MASTER_ADDR and MASTER_PORT are the address of a store."""
    address = os.environ.get("MASTER_ADDR", "")
    port = os.environ.get("MASTER_PORT", "")
    if not address or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UserError(
            f"MASTER_ADDR is {address!r} and MASTER_PORT is {port!r}: set them, too, "
            "to the host of rank 0 and a free port there, or start with torchrun"
        )


def init_process_group(name: str) -> torch.device:
    """Join the process group of the job and return this rank's device for `--device name`.

    05_ddp/train.py writes these calls out and explains them.
    """
    refuse_tasks_without_rank()
    rank, world_size, _ = ranks()
    if name == "auto" and not torch.cuda.is_available():
        name = "cpu"  # not mps, which has no collectives
    device = pick_device(name)
    end_with_torchrun()

    backend = "gloo"
    device_id = None
    if device.type == "cuda":
        backend = "cpu:gloo,cuda:nccl"  # NCCL for tensors on GPUs, gloo for tensors on the CPU
        device_id = device
    dist.init_process_group(
        backend=backend,
        device_id=device_id,
        timeout=timeout(),
        rank=rank,
        world_size=world_size,
        store=store(),
    )
    return device


def end_with_torchrun() -> None:
    """Make Linux send this process SIGTERM when torchrun dies, even by kill -9.

    Without this, the ranks of a killed torchrun would train on.
    """
    if "RANK" in os.environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def shutdown() -> None:
    """Wait for all ranks, then leave the process group.

    A rank that left earlier would abort the ranks that still communicate with it.
    """
    dist.barrier()
    # Keep a reference until the process ends. If DDP held the last one, gloo's destructor would
    # hold the GIL and wait for threads that need the GIL (PyTorch #56297).
    _left_groups.append(dist.group.WORLD)
    dist.destroy_process_group()


def join_fake_ranks(rank: int, world_size: int) -> torch.device:
    """Make this process one rank of `world_size` ranks that do not exist, and return the CPU.

    A dry run counts the bytes and collectives of one rank this way. Collectives return at once and
    exchange nothing. Call it once per process: DTensor remembers process groups, so the process
    cannot become another rank.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.filterwarnings("ignore", "Set timeout is now only supported for either nccl or gloo")
    # Make to_empty() create new parameters. By default it changes the data of a parameter in place.
    # With fake tensors that would change only the shape, and then each use of the parameter would
    # look like new memory.
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    return torch.device("cpu")


# --- values that all ranks exchange


def full_tensor(tensor: Tensor) -> Tensor:
    """Return the full tensor of a DTensor, gathered from its shards; any other tensor as it is.

    This is a collective for a DTensor: every rank that holds a shard must call it.
    """
    if hasattr(tensor, "full_tensor"):
        return tensor.full_tensor()
    return tensor


def local_shard(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a DTensor, and any other tensor as it is."""
    return tensor.to_local() if hasattr(tensor, "placements") else tensor


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of memory behind these tensors on this rank.

    Tensors that share memory count once. Of a DTensor, the local shard counts.
    """
    bytes_by_storage = {}
    for tensor in tensors:
        storage = local_shard(tensor).untyped_storage()
        bytes_by_storage[storage._cdata] = storage.nbytes()  # _cdata is the storage's address
    return sum(bytes_by_storage.values())


def all_gather(value: object, group: dist.ProcessGroup | None = None) -> list:
    """Return the values of all ranks, in rank order, on every rank.

    `value` is any object that can be pickled. This is a collective: every rank must call it. If a
    rank raises before its call, the others wait here until torchrun ends them. Use `together` for
    work that can fail on one rank.

    `group` is another process group of all ranks. A background thread passes its own group, so that
    its messages do not mix with those of the training.
    """
    if not dist.is_initialized():
        return [value]
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=group)
    return values


def together(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """Run `work` on every rank and return the results of all ranks, in rank order, on every rank.

    Every rank must call it. training/checkpoint.py writes files this way: a disk can be full on one
    node only.

    If `work` raises UserError or OSError on some ranks, every rank raises the error of the first of
    these ranks. So no rank waits for a rank that has failed. If the disk fails, libraries such as
    safetensors raise errors of their own: these become OSError. Any other exception is a bug. It
    ends its rank with a traceback, and then torchrun ends the other ranks, which wait here.
    """
    result = None
    error = None
    try:
        result = work()
    except (UserError, OSError) as caught:
        error = caught
    except Exception as caught:
        message = exits.disk_message(caught)
        if message is None:
            raise
        error = OSError(message)
    outcomes = all_gather((result, error), group)
    for _, error_of_rank in outcomes:
        if error_of_rank is not None:
            raise error_of_rank
    return [result_of_rank for result_of_rank, _ in outcomes]


def on_rank0(work: Callable[[], T]) -> T:
    """Run `work` on rank 0 and return its result on every rank.

    Every rank must call it, and the others wait for rank 0. Scripts use it for work that one rank
    does for all, such as writing an exported model. If `work` raises UserError or OSError, every
    rank raises the same error, as in `together`.
    """

    def work_of_rank0():
        if is_rank0():
            return work()
        return None

    return together(work_of_rank0)[0]


# --- seeds


def seed_all(value: int, deterministic: bool = False) -> None:
    """Seed the random generators of Python, NumPy and torch, and turn TF32 off.

    `deterministic` also chooses slower kernels, whose results are bit-identical from run to run.
    Call it before init_process_group, because NCCL reads its environment variables when it starts.
    """
    random.seed(value)
    np.random.seed(value % 2**32)
    torch.manual_seed(value)
    torch.set_float32_matmul_precision("highest")  # NVIDIA's containers turn TF32 on
    if deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        # sums inside the NVLink switch differ from call to call (NVIDIA/nccl#1497)
        os.environ["NCCL_NVLS_ENABLE"] = "0"
        torch.use_deterministic_algorithms(True)


def seed_step(seed: int, step: int, rank: int = 0) -> None:
    """Seed torch's generators for what one training step draws, such as the masks of dropout.

    Each combination of seed, step and rank has its own random numbers, and a resumed run draws
    those of its step again. Ranks that hold the same activations pass the same `rank`.

    The generators get a hash, not a sum such as seed + step. With a sum, step 2 of seed 0 would
    draw the numbers of step 1 of seed 1: runs with neighbouring seeds would not be independent.
    """
    key = hashlib.sha256(f"{seed} {step} {rank}".encode()).digest()
    torch.manual_seed(int.from_bytes(key[:8]) >> 1)


# --- signals and files by which a user stops a run, or saves


def catch_stop_signals() -> None:
    """Let Ctrl-C, SIGTERM, SIGUSR1 and SIGHUP stop the run after a step, instead of ending it.

    The training loop calls stop_requested after each step, and then saves and ends. Before its
    first call there is nothing to save: a signal then raises StopSignalError, or KeyboardInterrupt
    for Ctrl-C. A second Ctrl-C ends the process at once.
    """
    process = os.getpid()

    def note(number: int, _frame) -> None:
        if os.getpid() != process:  # a data loading worker: it is ended by this process
            return
        is_second_interrupt = number == signal.SIGINT and number in stop_signals
        # one stop may send several signals: a dying torchrun sends SIGTERM once per thread
        stop_signals.append(number)
        if number == signal.SIGINT and (is_second_interrupt or not _training_has_begun):
            exits.raise_if_main_runs(KeyboardInterrupt())
        elif not _training_has_begun:
            name = signal.Signals(number).name
            exits.raise_if_main_runs(
                StopSignalError(f"{name} came before the first step, so there is nothing to save")
            )
        elif number == signal.SIGINT and ranks().rank == 0:
            # not print: the signal may have come while another line is printed
            line = "\nCtrl-C: saving after this step. Press it again to end without saving\n"
            os.write(2, line.encode())

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
        # A plain script under nohup starts with SIGHUP ignored and keeps ignoring it. torchrun ends
        # when its terminal closes, even under nohup, and sends SIGHUP to its ranks: they must save.
        # The shell starts a script with SIGINT ignored in the background, without job control.
        ignored = signal.getsignal(number) == signal.SIG_IGN
        if dist.is_torchelastic_launched() or not ignored:
            signal.signal(number, note)


def watch_folder(folder: Path) -> None:
    """Let the user stop the run, or save a checkpoint, by a file in the folder of the run.

    `touch FOLDER/stop` stops the run as a signal does. `touch FOLDER/save` asks for a checkpoint.
    stop_requested looks for these files and deletes them. Only rank 0 calls this function. It
    deletes files that an earlier run has left.
    """
    global _watched_folder
    _watched_folder = folder
    for name in ("stop", "save"):
        files.take_request(folder / name)


def stop_requested() -> int:
    """Return the number of a signal that any rank has received, or 0. Every rank must call it.

    Return STOP_FILE if the user asks for a stop by a file: see watch_folder. Rank 0 looks for the
    files once a second at most.

    A scheduler may signal only one process, but a save needs all of them, so the ranks take the
    maximum. The flags are a CPU tensor that goes over gloo. So the call does not wait for the GPU's
    queue, and it fails if a rank has died.
    """
    global _training_has_begun, _next_look, _save_requested
    stop = stop_signals[-1] if stop_signals else 0
    save = False
    if _watched_folder is not None and time.monotonic() >= _next_look:
        _next_look = time.monotonic() + SECONDS_BETWEEN_LOOKS
        save = files.take_request(_watched_folder / "save")
        if files.take_request(_watched_folder / "stop"):
            stop = STOP_FILE
    flags = torch.tensor([stop, save])
    if dist.is_initialized():
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
    _training_has_begun = True
    stop, save = flags.tolist()
    _save_requested = bool(save)
    if stop and stop not in stop_signals:  # another rank has received it
        stop_signals.append(stop)
    return stop


def save_requested() -> bool:
    """Return whether the last call of stop_requested has found the file `save`.

    All ranks get the same answer. This is no collective.
    """
    return _save_requested
