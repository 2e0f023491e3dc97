"""End a script: one line for an error that the user can fix, a traceback for any other error.

Every script ends with `exits.run(main)`.
"""

import contextlib
import errno
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from common import output

FAILURE_EXIT_CODE = 1
USER_ERROR_EXIT_CODE = 2
REQUEUE_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: saved and stopped on a signal, start me again
# The file `stop` in the folder of the run. In stop_signals, numbers below 65 are those of signals.
STOP_FILE = 128
KEYBOARD_INTERRUPT_EXIT_CODE = 130  # as a shell reports a program that Ctrl-C ended

# A disk that is full, read-only, broken or gone, a file that may not be written or is too large.
DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EIO,
    errno.ESTALE,
)
# Libraries have exceptions of their own, without errno. Their messages have the words of the system
# or these: of torch.save, of numpy's tofile and of sqlite.
CUT_SHORT = r"unexpected pos \d|PytorchStreamWriter failed|\d requested and \d+ written"
DISK_MESSAGES = "|".join(
    [CUT_SHORT, "disk is full", *(re.escape(os.strerror(number)) for number in DISK_ERRORS)]
)
# parts of the messages with which torch reports too little memory
OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "bad_alloc",
    "Storage size calculation overflowed",
)

# The `with` block around main, for what must be closed or must know how main ended. `run` ends with
# os._exit, which skips atexit. A callback gets the error of main, and may raise UserError instead.
at_exit = contextlib.ExitStack()
# The numbers of the signals that runtime.catch_stop_signals has noted, and STOP_FILE. The handler
# of a signal has no caller, so this is a variable of the module.
stop_signals: list[int] = []
# Errors that it has raised: a signal before training had begun, and a second Ctrl-C.
early_stops: list[BaseException] = []
_main_is_running = False


class UserError(Exception):
    """An error that the user can fix, such as a wrong flag: shown as one line, exit code 2."""

    exit_code = USER_ERROR_EXIT_CODE


class StopSignalError(UserError):
    """A stop signal that came before training has begun: one line, and the exit code to requeue."""

    exit_code = REQUEUE_EXIT_CODE


def run(main: Callable[[], int]) -> None:
    """Run main and end the process with the exit code that it returns.

    UserError, a full disk and too little memory print one line and end with 2. StopSignalError ends
    with 75. Ctrl-C ends with 130. Any other exception prints its traceback and ends with 1. A run
    that the file `stop` has ended is done: 0.
    """
    global _main_is_running
    output.use_utf8()
    output.protect()
    try:
        try:
            _require_assertions()
            _main_is_running = True
            code = main()
            at_exit.close()
        finally:
            _main_is_running = False
    except SystemExit:  # argparse's --help
        raise
    except BaseException as error:  # torch's CheckpointException is not a subclass of Exception
        code = _report_error(error)
    # What starts a job again must not do it after Ctrl-C, or after the file `stop`.
    if code == REQUEUE_EXIT_CODE and STOP_FILE in stop_signals:
        code = 0
    elif code == REQUEUE_EXIT_CODE and set(stop_signals) == {signal.SIGINT}:
        code = KEYBOARD_INTERRUPT_EXIT_CODE

    for child in multiprocessing.active_children():  # data loading workers
        child.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    failure = output.lost.get("stdout")
    if failure is not None and not isinstance(failure, BrokenPipeError):
        print(f"the output could not be written: {failure.strerror}", file=sys.stderr, flush=True)
    # Skip the interpreter's shutdown, which can wait forever for gloo's threads.
    os._exit(code)


def raise_if_main_runs(error: BaseException) -> None:
    """Raise an error from the handler of a signal, unless main has ended: then the script ends."""
    if _main_is_running:
        early_stops.append(error)
        raise error


def _require_assertions() -> None:
    """Raise UserError if Python leaves out assertions, with which scripts check their results."""
    if not __debug__:
        raise UserError(
            "python -O and PYTHONOPTIMIZE leave out the assertions that check the results: "
            "start without -O, and unset PYTHONOPTIMIZE"
        )


def _report_error(error: BaseException) -> int:
    """Print the line of a user error, or the traceback of any other, and return the exit code."""
    if early_stops:
        # A library may have put it into another exception, and another rank may have left first.
        error = early_stops[0]
    is_interrupt = isinstance(error, KeyboardInterrupt)
    is_bug = user_message(error) is None and not is_interrupt
    if is_bug:
        traceback.print_exception(error)
        last_line = traceback.format_exception_only(error)[-1].strip()
        _tell_torchrun(last_line)
    try:
        with at_exit:
            raise error
    except UserError as told:
        error = told
    except BaseException:  # of a callback: it must not hide the error of main
        pass
    if is_bug:
        return FAILURE_EXIT_CODE
    if is_interrupt:
        return KEYBOARD_INTERRUPT_EXIT_CODE
    _print_once_per_job(user_message(error) or str(error))
    return getattr(error, "exit_code", USER_ERROR_EXIT_CODE)


def user_message(error: BaseException) -> str | None:
    """Return the message for an error that the user can fix, or None for any other error."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return _message_about_module(error.name or "")
    if is_out_of_memory(error):
        return (
            "out of memory: see 07_memory_tricks/memory_profile.py and 07_memory_tricks/estimate.py"
        )
    message = disk_message(error)
    filename = getattr(error, "filename", None)
    if message is not None and filename:
        message += f" ({free_space(Path(os.fsdecode(filename)))})"
    return message


def is_out_of_memory(error: BaseException | None) -> bool:
    """Return whether an error says that the memory of a GPU or of the machine is full."""
    if isinstance(error, RuntimeError):
        return any(words in str(error) for words in OUT_OF_MEMORY)
    return isinstance(error, MemoryError)


# --- packages


def _message_about_module(name: str) -> str | None:
    """Return what to do about a package that is not installed, or None for a part of one."""
    is_here = Path(__file__).parents[1].joinpath(name).exists()
    if not name or "." in name or is_here:
        return None
    return (
        f"{sys.executable} has no package {name}: `make venv` installs all in .venv, "
        "then `. .venv/bin/activate`"
    )


def _report_missing_package(kind, error, trace) -> None:
    """Print one line for a package that is missing before main runs, as sys.excepthook.

    Ctrl-C while modules are imported ends without a traceback, as it does in main.
    """
    if issubclass(kind, KeyboardInterrupt):
        os._exit(KEYBOARD_INTERRUPT_EXIT_CODE)
    message = user_message(error) if isinstance(error, ModuleNotFoundError) else None
    if message is None:
        sys.__excepthook__(kind, error, trace)
        return
    _print_once_per_job(message)
    os._exit(USER_ERROR_EXIT_CODE)


sys.excepthook = _report_missing_package


# --- disks


def disk_message(error: BaseException) -> str | None:
    """Return what an error of a disk says, or None for any other error.

    The error is an OSError, or that of a library, or has one as its cause.
    """
    is_of_network = type(error).__name__.startswith("Dist")  # DistNetworkError and others of torch
    if isinstance(error, UserError | AssertionError) or is_of_network:
        return None
    if getattr(error, "errno", None) in DISK_ERRORS:
        return str(error)
    text = str(error)
    if re.search(CUT_SHORT, text):
        return "only a part of the file could be written"
    if re.search(DISK_MESSAGES, text):
        return text
    return None if error.__cause__ is None else disk_message(error.__cause__)


def free_space(path: Path) -> str:
    """Return how much space is free on the disk of a file or folder: "12 MiB free in runs"."""
    folder = path
    try:
        while not folder.is_dir():
            if folder == folder.parent:
                return "its folder is gone"
            folder = folder.parent
        free_bytes = shutil.disk_usage(folder).free
    except OSError as error:
        return f"its folder cannot be read: {error.strerror}"
    return f"{free_bytes / 2**20:,.0f} MiB free in {folder}"


@contextlib.contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """Raise UserError, with the free space, if the disk of a file or folder fails in this block.

    `what` is what is written there, such as "the model".
    """
    try:
        yield
    except Exception as error:
        message = disk_message(error)
        if message is None and isinstance(error, FileNotFoundError):  # a folder has been deleted
            message = str(error)
        if message is None:
            raise
        raise UserError(f"cannot write {what} to {path} ({free_space(path)}): {message}") from None


# --- the line of an error


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
    sys.stdout.flush()  # so that the error is the last line
    print(line, file=sys.stderr, flush=True)
    _tell_torchrun(line)


def _tell_torchrun(line: str) -> None:
    """Write the line of an error to the file from which torchrun prints it as its last line.

    The form is that of torch.distributed.elastic.multiprocessing.errors.ErrorHandler.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not file:
        return
    message = {"message": line, "extraInfo": {"timestamp": str(int(time.time()))}}
    with contextlib.suppress(OSError):
        Path(file).write_text(json.dumps({"message": message}), encoding="utf-8")
