"""Run a command in a terminal, as people do, and read what they see."""

import os
import pty
import select
import subprocess
import termios
import time
from pathlib import Path

from support.harness import LIMIT, clean_env

ROWS_AND_COLUMNS = (40, 120)


def run_in_terminal(argv: list[str], folder: Path, **env: str) -> tuple[int, str]:
    """Run a command whose stdin, stdout and stderr are a terminal.

    Return its exit code and all characters that it wrote to the terminal.
    """
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, ROWS_AND_COLUMNS)
    process = subprocess.Popen(
        argv,
        cwd=folder,
        env=clean_env(**env),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    written = b""
    deadline = time.monotonic() + LIMIT
    try:
        while True:
            readable, _, _ = select.select([ours], [], [], deadline - time.monotonic())
            assert readable, f"still running after {LIMIT} s: {written[-2000:]}"
            try:
                block = os.read(ours, 2**16)
            except OSError:  # EIO: no process has the terminal open any more
                break
            if not block:
                break
            written += block
        code = process.wait(timeout=LIMIT)
    finally:
        process.kill()
        process.wait(timeout=LIMIT)
        os.close(ours)
    return code, written.decode(errors="replace")


def lines_on_screen(written: str) -> list[str]:
    """Return the lines that are left on the terminal, where \\r lets a text overwrite its line."""
    lines = []
    for line in written.split("\n"):
        shown = ""
        for text in line.split("\r"):
            shown = text + shown[len(text) :]
        lines.append(shown.rstrip())
    return lines
