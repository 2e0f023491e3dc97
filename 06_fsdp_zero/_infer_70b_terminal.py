"""Prompts for infer_70b.py from a terminal: rank 0 reads a line, all ranks answer it."""

import select
import signal
import sys
from collections.abc import Iterator
from datetime import timedelta

import torch.distributed as dist

from old import exits, runtime

LOOK_UP_SECONDS = 0.5  # Python acts on a signal in the main thread; if another one took it, only when a wait is over


def is_a_terminal() -> bool:
    """Whether rank 0 can be typed to, the same answer on every rank."""
    return runtime.gather(sys.stdin is not None and sys.stdin.isatty())[0]


def end_at_once() -> None:
    """SIGTERM ends a rank, and Ctrl-C each of several, without the teardown that Python's own handler begins; files
    that hold weights are removed. A rank inside a collective gets here when that fails: its other side has ended."""

    def leave(number: int, _frame) -> None:
        exits.leave(128 + number)

    signal.signal(signal.SIGTERM, leave)
    if exits.world_from_env()[1] > 1:
        signal.signal(signal.SIGINT, leave)


def lines() -> Iterator[str]:
    """What is typed, line by line, on every rank; ends with Ctrl-D."""
    runtime.say("one prompt a line; Ctrl-D or Ctrl-C ends")
    typing = dist.new_group(backend="gloo", timeout=timedelta(days=7))  # a person may think longer than a collective
    while True:
        told = [read_line() if runtime.is_rank0() else None]
        dist.broadcast_object_list(told, src=0, group=typing)
        if told[0] is None:
            return
        if told[0].strip():
            yield told[0]


def read_line() -> str | None:
    """While rank 0 waits for a person, Ctrl-C is Python's, which leaves the terminal as it was."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    print("> ", end="", flush=True)
    try:
        while not select.select([sys.stdin], [], [], LOOK_UP_SECONDS)[0]:
            continue
        return input()
    except EOFError:
        print()
        return None
    finally:
        signal.signal(signal.SIGINT, before)
