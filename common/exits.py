"""How a script ends: errors for people in one line, failures with their traceback, nothing left behind."""

import contextlib
import errno
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: saved and stopped on a signal, start me again
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.ENAMETOOLONG)
before_user_error_exit: list[Callable[[], None]] = []  # what to finish first, such as a save in the background
# Scripts leave by os._exit, which runs no atexit handlers: put here what must be flushed (wandb.finish, a profiler).
before_exit: list[Callable[[], None]] = []


class UserError(Exception):
    """An error that the user can fix, such as a wrong flag: shown as one line, exit code 2."""


def world_from_env() -> tuple[int, int, int]:
    """(rank, world size, local rank) as torchrun sets them; (0, 1, 0) for a plain `python script.py`.

    UserError if only some are set: guessing, as with `rank % device_count`, puts two ranks on one GPU
    as soon as the nodes are not filled in order.
    """
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not any(name in os.environ for name in names):
        return 0, 1, 0
    try:
        rank, world_size, local_rank = (int(os.environ[name]) for name in names)
        _ = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    except (KeyError, ValueError) as error:
        missing = f"{', '.join(names)}, MASTER_ADDR and MASTER_PORT must all be set, or none"
        raise UserError(f"{missing} ({error!r}): start with torchrun") from None
    return rank, world_size, local_rank


def run(main: Callable[[], int]) -> None:
    """Call main and leave with the exit code it returns; a UserError becomes one line and code 2.

    Nothing registered with atexit runs: see before_exit.
    """
    try:
        code = main()
    except SystemExit:  # --help
        raise
    except KeyboardInterrupt:
        _exit(130)
    except BaseException as error:  # torch's CheckpointException is no Exception
        if isinstance(error, UserError) or getattr(error, "errno", None) in DISK_ERRORS:
            for finish in before_user_error_exit:
                with contextlib.suppress(Exception):  # it must not hide the error that is told here
                    finish()
            _report(str(error))
            _exit(2)
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        traceback.print_exc()
        if isinstance(error, Exception):
            get_error_handler().record_exception(error)  # torchrun's closing report names the first rank to fail
        _exit(1)
    _exit(code)


def _exit(code: int) -> None:
    for child in multiprocessing.active_children():  # data loading workers
        child.kill()
    for flush in before_exit:
        try:
            flush()
        except Exception:
            traceback.print_exc()
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
        try:
            store = next(dist.rendezvous("env://", timeout=timedelta(seconds=15)))[0]
            if rank == 0:
                store.set("error_told", "")
            store.wait(["error_told"], timedelta(seconds=15))
        except dist.DistNetworkError:
            pass  # rank 0 held the store and is gone: it has told
        except dist.DistStoreError:
            print(f"rank {rank}: {line}", file=sys.stderr, flush=True)
