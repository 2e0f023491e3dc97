"""How a script ends: errors for people in one line, failures with their traceback, nothing left behind."""

import contextlib
import errno
import multiprocessing
import os
import re
import select
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: saved and stopped on a signal, start me again
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG)
before_user_error_exit: list[Callable[[], None]] = []  # what to finish first, such as a save in the background
# Scripts leave by os._exit, which runs no atexit handlers: put here what must be flushed (wandb.finish, a profiler).
before_exit: list[Callable[[], None]] = []


# how torch's allocators, CUDA and the C++ library say it where they raise a plain RuntimeError
NO_MEMORY = re.compile(
    r"DefaultCPUAllocator: .*memory|out of memory|bad_alloc|STATUS_ALLOC_FAILED|Storage size calculation overflowed"
)


class UserError(Exception):
    """An error that the user can fix, such as a wrong flag: shown as one line, exit code 2."""


def world_from_env() -> tuple[int, int, int]:
    """(rank, world size, local rank) as torchrun sets them; (0, 1, 0) for a plain `python script.py`.

    UserError if only some are set, or are no ranks: guessing, as with `rank % device_count`, puts two ranks on one GPU
    as soon as the nodes are not filled in order.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not any(name in os.environ for name in names):
        return 0, 1, 0
    try:
        rank, world_size, local_rank = (int(os.environ[name]) for name in names)
        _, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        missing = f"{', '.join(names)}, MASTER_ADDR and MASTER_PORT must all be set, or none"
        raise UserError(f"{missing} ({error!r}): start with torchrun") from None
    if not (0 <= local_rank <= rank < world_size and 0 < port < 2**16):
        raise UserError(
            f"RANK={rank}, WORLD_SIZE={world_size}, LOCAL_RANK={local_rank} and MASTER_PORT={port} cannot be: "
            "0 <= LOCAL_RANK <= RANK < WORLD_SIZE, and a port is below 65536; start with torchrun"
        )
    return rank, world_size, local_rank


def run(main: Callable[[], int]) -> None:
    """Call main and leave with the exit code it returns; a UserError or too little memory become one line and code 2.

    If the reader of the output ends early (`| head`), the script ends without a word, with code 141. Nothing registered
    with atexit runs: see before_exit.
    """
    try:
        code = main()
    except SystemExit:  # --help
        raise
    except KeyboardInterrupt:
        leave(130)
    except BaseException as error:  # torch's CheckpointException is no Exception
        if isinstance(error, BrokenPipeError) and nobody_reads():
            leave(128 + signal.SIGPIPE)
        message = None
        if isinstance(error, UserError) or getattr(error, "errno", None) in DISK_ERRORS:
            message = str(error)
        elif is_out_of_memory(error):
            message = describe_out_of_memory(error)
            traceback.clear_frames(error.__traceback__)  # frees what its functions held: an exit needs memory, too
        if message is not None:
            for finish in before_user_error_exit:
                with contextlib.suppress(Exception):  # it must not hide the error that is told here
                    finish()
            _report(message)
            leave(2)
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        traceback.print_exc()
        if isinstance(error, Exception):
            get_error_handler().record_exception(error)  # torchrun's closing report names the first rank to fail
        leave(1)
    leave(code)


def nobody_reads() -> bool:
    """Whether the reader of our output has ended, as in `script | head`."""
    output = select.poll()
    try:
        output.register(sys.stdout, 0)
    except (TypeError, ValueError, OSError):  # it is closed, or no file
        return False
    return any(event & select.POLLERR for _, event in output.poll(0))


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a device, or this computer, had no memory for what was asked."""
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError) and NO_MEMORY.search(str(error)) is not None


def describe_out_of_memory(error: BaseException) -> str:
    """In one line: what was asked for and where, what was held, and which scripts tell more."""
    told = str(error)
    asked = re.search(r"(?:[Tt]ried|Unable) to allocate ([\d.]+) (\w+)", told)
    size = f"{asked[1]} {asked[2]}" if asked else "an unknown number of bytes"
    if size.endswith(" bytes") and asked:
        size = _for_people(int(asked[1]))
    script = os.path.abspath(sys.argv[0])
    lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if os.path.abspath(f.filename) == script]
    where = f" at line {lines[-1]}" if lines else ""
    on_gpu = type(error).__name__ == "OutOfMemoryError" or "CUDA" in told or "CUDNN" in told
    return (
        f"out of memory{where}: {size} asked for, {_held_on_gpu() if on_gpu else _held_in_ram()}; "
        "07_memory_tricks/memory_profile.py shows what takes memory, 07_memory_tricks/estimate.py what would fit"
    )


def _held_on_gpu() -> str:
    import torch  # the error is torch's, so it is there

    allocated, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    try:
        index = torch.cuda.current_device()
        there = torch.cuda.get_device_properties(index).total_memory
    except RuntimeError:  # not even a context could be made
        return "and the GPU has no room for this process"
    held = f"{_for_people(allocated)} allocated and {_for_people(reserved)} reserved"
    return f"{held} of the {_for_people(there)} of cuda:{index}"


def _held_in_ram() -> str:
    """What this process holds of what limits it: its address space, or the computer's memory."""
    import resource

    try:
        with open("/proc/self/status") as status, open("/proc/meminfo") as meminfo:
            of_process = dict(line.split(":", 1) for line in status)
            of_computer = dict(line.split(":", 1) for line in meminfo)
    except OSError:
        return "and this system does not tell what was held"
    resident, mapped, there = (
        int(kib.split()[0]) * 1024 for kib in (of_process["VmRSS"], of_process["VmSize"], of_computer["MemTotal"])
    )
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY:
        return f"{_for_people(mapped)} of address space held, where ulimit -v allows {_for_people(limit)}"
    return f"{_for_people(resident)} held of this computer's {_for_people(there)}"


def _for_people(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB" if size >= 2**30 else f"{size / 2**20:,.1f} MiB"


def leave(code: int) -> None:
    """End this process at once: its children, what before_exit holds, and no teardown."""
    for child in multiprocessing.active_children():  # data loading workers
        child.kill()
    for flush in before_exit:
        try:
            flush()
        except Exception:
            traceback.print_exc()
    with contextlib.suppress(BrokenPipeError):
        sys.stdout.flush()
    # not sys.exit: its teardown waits for threads that talk to ranks that are gone, or aborts if gloo's still run
    os._exit(code)


def _report(message: str) -> None:
    """Print the error from rank 0. The others wait for that, because the first exit makes torchrun end
    the rest; a rank whose error rank 0 does not share speaks up itself."""
    line = f"{os.path.relpath(sys.argv[0])}: error: {' '.join(message.split())}"
    try:
        rank, world_size, _ = world_from_env()
    except UserError:
        rank, world_size = 0, 1
    if rank == 0:
        print(line, file=sys.stderr, flush=True)
    if world_size > 1:
        import torch.distributed as dist  # not above: a script that needs no torch starts in a tenth of a second

        try:
            store = next(dist.rendezvous("env://", timeout=timedelta(seconds=15)))[0]
            if rank == 0:
                store.set("error_told", "")
            store.wait(["error_told"], timedelta(seconds=15))
        except dist.DistNetworkError:
            pass  # rank 0 held the store and is gone: it has told
        except dist.DistStoreError:
            print(f"rank {rank}: {line}", file=sys.stderr, flush=True)
