"""Show how far long work is, on a terminal: tqdm, on rank 0 only.

Scripts call `report.progress_bar`. This is a module of its own because common/runtime.py prints
lines above the bar, and common/report.py shows bars without torch. It does not import torch, and
tqdm only for a bar or a line: 07_memory_tricks/estimate.py needs no package.
"""

import functools
import os
import stat
import sys
import threading
from collections.abc import Iterable, Sized
from typing import Any


def progress_bar(
    iterable: Iterable | None = None,
    description: str = "",
    *,
    total: int | None = None,
    initial: int = 0,
    unit: str = "it",
    delay: float = 0.0,
):
    """Return an iterable that shows on the terminal how far the loop over it is.

        for step in progress_bar(range(start_step + 1, steps + 1), "training", initial=start_step):

    Without an iterable, the bar is advanced by hand:

        with progress_bar(description="tokenizing", total=1000, unit="B") as bar:
            bar.update(10)

    The bar is erased at the end of the loop, also after a break or an exception. Other ranks than
    rank 0 show no bar, and rank 0 shows none where nobody watches: see `_terminal_has_bars`. Print
    with `print_line` or runtime.print0 while a bar may be shown.

    Arguments:
        total: the count at the end (default: `initial` and the length of the iterable)
        initial: the count at the start, such as the step from which a run is resumed
        unit: what is counted. "B" is shown as kB, MB and so on
        delay: the bar appears only if the loop takes longer than so many seconds
    """
    if not _terminal_has_bars():
        return _tqdm()(iterable, disable=True)
    if total is None and isinstance(iterable, Sized):
        total = initial + len(iterable)
    size: dict[str, int] = {"dynamic_ncols": True}  # people resize terminals
    if 0 in os.get_terminal_size(sys.stderr.fileno()):  # not known, as in some containers
        size = {"ncols": 80, "nrows": 24}
    return _tqdm()(
        iterable,
        description,
        total=total,
        initial=initial,
        unit=unit if unit == "B" else f" {unit}",
        unit_scale=unit == "B",
        delay=delay,
        leave=False,
        **size,
        mininterval=0.2,  # seconds between two drawings
        miniters=1,  # look at the clock in each iteration: iterations take unequal times
    )


def print_line(text: str) -> None:
    """Print a line to stdout at once. If there is a progress bar, the line appears above it."""
    with _tqdm().external_write_mode(file=sys.stdout):
        print(text, flush=True)


def _terminal_has_bars() -> bool:
    """Return whether this process shows progress bars: rank 0, if its stderr is a terminal.

    If stdout is a pipe, as in `python train.py | tee log`, there are none: the program behind the
    pipe may write to the same terminal, and its lines and the bar would be mixed.
    """
    if os.environ.get("RANK", "0") != "0" or not sys.stderr.isatty():
        return False
    if sys.__stdout__ is None:
        return False
    stdout = os.fstat(sys.__stdout__.fileno())
    return not stat.S_ISFIFO(stdout.st_mode)


@functools.cache
def _tqdm() -> Any:
    """Return the class of the bars, tqdm's, with two settings."""
    from tqdm import tqdm

    # tqdm would start a thread that redraws bars without updates. Data loading workers are forked,
    # and the fork of a process with threads can hang.
    tqdm.monitor_interval = 0
    # tqdm's own lock includes one of multiprocessing, which forked workers would share.
    tqdm.set_lock(threading.RLock())
    return tqdm
