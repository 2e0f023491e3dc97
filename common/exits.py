"""End a script: one line for an error that the user can fix, a traceback for any other error.

Every script ends with `exits.run(main)`.
"""

import contextlib
import errno
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable

FAILURE_EXIT_CODE = 1
USER_ERROR_EXIT_CODE = 2
REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: saved and stopped on a signal, start me again
KEYBOARD_INTERRUPT_EXIT_CODE = 130  # as a shell reports a program that Ctrl-C ended

DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES)
# parts of the messages with which torch reports too little memory
OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc")

# Called before every exit. os._exit skips atexit, so what must be flushed goes here: wandb.finish.
before_exit: list[Callable[[], None]] = []
# Called before the line of a user error, to finish such things as a save in the background.
before_user_error_exit: list[Callable[[], None]] = []
# What the message about too little memory says: the last of these functions returns it.
out_of_memory_help: list[Callable[[], str]] = []
# The numbers of the signals that runtime.catch_stop_signals has noted.
stop_signals: list[int] = []


class UserError(Exception):
    """An error that the user can fix, such as a wrong flag: shown as one line, exit code 2."""

    exit_code = USER_ERROR_EXIT_CODE


class StopSignalError(UserError):
    """A stop signal that came before training has begun: one line, and the exit code to requeue."""

    exit_code = REQUEUE_EXIT_CODE


def run(main: Callable[[], int]) -> None:
    """Run main and end the process with the exit code that it returns.

    UserError, a full disk and too little memory print one line and end with 2. StopSignalError ends
    with 75. Ctrl-C ends with 130. Any other exception prints its traceback and ends with 1.
    """
    try:
        _require_assertions()
        code = main()
    except SystemExit:  # argparse's --help
        raise
    except KeyboardInterrupt:
        code = KEYBOARD_INTERRUPT_EXIT_CODE
    except BaseException as error:  # torch's CheckpointException is not a subclass of Exception
        code = _report_error(error)

    for child in multiprocessing.active_children():  # data loading workers
        child.kill()
    for flush in before_exit:
        try:
            flush()
        except Exception:
            traceback.print_exc()
    sys.stdout.flush()
    # Skip the interpreter's shutdown, which can wait forever for gloo's threads.
    os._exit(code)


def _require_assertions() -> None:
    """Raise UserError if Python leaves out assertions, with which scripts check their results."""
    if not __debug__:
        raise UserError(
            "python -O and PYTHONOPTIMIZE leave out the assertions that check the results: "
            "start without -O, and unset PYTHONOPTIMIZE"
        )


def _report_error(error: BaseException) -> int:
    """Print the line of a user error, or the traceback of any other, and return the exit code."""
    message = _user_message(error)
    if message is None:
        traceback.print_exception(error)
        return FAILURE_EXIT_CODE
    for finish in before_user_error_exit:
        # an exception here must not hide the error that is printed below
        with contextlib.suppress(Exception):
            finish()
    _print_once_per_job(message)
    return getattr(error, "exit_code", USER_ERROR_EXIT_CODE)


def _user_message(error: BaseException) -> str | None:
    """Return the message for an error that the user can fix, or None for any other error."""
    if isinstance(error, UserError) or getattr(error, "errno", None) in DISK_ERRORS:
        return str(error)
    if isinstance(error, MemoryError | RuntimeError):
        text = str(error)
        if any(words in text for words in OUT_OF_MEMORY):
            if out_of_memory_help:
                return f"out of memory: {out_of_memory_help[-1]()}"
            return (
                "out of memory: see 07_memory_tricks/memory_profile.py "
                "and 07_memory_tricks/estimate.py"
            )
    return None


def _print_once_per_job(message: str) -> None:
    """Print an error on rank 0, and on another rank only if rank 0 does not have the same error.

    Most user errors happen on all ranks. When rank 0 exits with its error, torchrun ends the others
    with SIGTERM. A rank that is still alive after 5 seconds has an error that rank 0 does not have.
    """
    script = os.path.relpath(sys.argv[0])
    message_in_one_line = " ".join(message.split())
    line = f"{script}: error: {message_in_one_line}"
    rank = os.environ.get("RANK", "0")
    if rank != "0" and os.environ.get("WORLD_SIZE", "1") != "1":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # let torchrun's SIGTERM end this rank
        if signal.SIGTERM in stop_signals:  # it has come already: another rank has failed
            return
        time.sleep(5)
        line = f"rank {rank}: {line}"
    print(line, file=sys.stderr, flush=True)
