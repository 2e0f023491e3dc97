"""How a script ends: errors for people in one line, failures with their traceback, nothing left running."""

import contextlib
import errno
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: saved and stopped on a signal, start me again
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
# what os._exit would not flush: wandb.finish, a profiler
before_exit: list[Callable[[], None]] = []
# what to finish first, such as a save in the background
before_user_error_exit: list[Callable[[], None]] = []
stop_signals: list[int] = []  # those that runtime.catch_stop_signals has noted
# torch's own words
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc")


class UserError(Exception):
    """An error that the user can fix, such as a wrong flag: shown as one line, exit code 2."""


def run(main: Callable[[], int]) -> None:
    """Leave with main's exit code. UserError, full disk, too little memory: one line, code 2; else a traceback, 1."""
    code = 1
    try:
        code = main()
    except SystemExit:  # --help
        raise
    except KeyboardInterrupt:
        code = 130
    except BaseException as error:  # torch's CheckpointException is no Exception
        if message := _for_people(error):
            code = 2
            for finish in before_user_error_exit:
                # it must not hide the error that is printed here
                with contextlib.suppress(Exception):
                    finish()
            _tell(message)
        else:
            traceback.print_exc()
    for child in multiprocessing.active_children():  # data loading workers
        child.kill()
    for flush in before_exit:
        try:
            flush()
        except Exception:
            traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)  # the interpreter's teardown can wait for ever for gloo's threads


def _for_people(error: BaseException) -> str | None:
    """The line for an error that a person can do something about; None for all others."""
    if isinstance(error, UserError) or getattr(error, "errno", None) in DISK_ERRORS:
        return str(error)
    if isinstance(error, MemoryError | RuntimeError) and any(
        words in str(error) for words in OUT_OF_MEMORY
    ):
        return (
            "out of memory: see 07_memory_tricks/memory_profile.py and 07_memory_tricks/estimate.py"
        )
    return None


def _tell(message: str) -> None:
    """Print the error once per job: rank 0's exit makes torchrun end the others. Who is left has its own error."""
    line = f"{os.path.relpath(sys.argv[0])}: error: {' '.join(message.split())}"
    rank = os.environ.get("RANK", "0")
    if rank != "0" and os.environ.get("WORLD_SIZE", "1") != "1":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if signal.SIGTERM in stop_signals:  # torchrun's: another rank has ended already
            return
        time.sleep(5)
        line = f"rank {rank}: {line}"
    print(line, file=sys.stderr, flush=True)
