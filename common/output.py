"""Make stdout and stderr safe: what a script computes is worth more than what it prints.

`exits.run` calls `use_utf8` and `protect`. This module imports no other module of this repository.
"""

import io
import os
import sys

# The names of the streams that could not be written, and what the system said.
lost: dict[str, OSError] = {}


class _Output(io.FileIO):
    """The file of stdout or stderr, in which a write that fails raises nothing.

    The reader of a pipe may end first, as `head` does. A terminal may be closed, and the disk of a
    log may be full. From then on, the output goes to /dev/null.
    """

    def __init__(self, name: str, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.stream = name

    def write(self, data) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            lost[self.stream] = error
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self.fileno())
            os.close(null)
            return memoryview(data).nbytes


def use_utf8() -> None:
    """Start this script again with UTF-8 for the names of files, if Python has another encoding.

    That is so with LC_ALL=en_US.ISO-8859-1, and with LC_ALL=C and PYTHONUTF8=0. Libraries such as
    pyarrow and safetensors take names in UTF-8 only. The output keeps the encoding of the terminal.
    """
    if sys.getfilesystemencoding() == "utf-8":
        return
    if sys.stdout is not None:
        os.environ.setdefault("PYTHONIOENCODING", f"{sys.stdout.encoding}:backslashreplace")
    arguments = [sys.executable, "-X", "utf8", *sys.orig_argv[1:]]
    os.execv(sys.executable, [os.fsencode(argument) for argument in arguments])


def protect() -> None:
    """Replace sys.stdout and sys.stderr by streams that raise nothing when they are written.

    A character that the encoding of the terminal does not have is written as an escape, such as
    \\xe9. A stream that was closed when the script started is /dev/null.
    """
    # A file that is opened later must not become stdout or stderr.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    sys.stdout = _protected("stdout", 1, sys.stdout)
    sys.stderr = _protected("stderr", 2, sys.stderr)


def _protected(name: str, descriptor: int, stream) -> io.TextIOWrapper:
    if stream is None:  # it was closed when Python started
        return open(os.devnull, "w", encoding="utf-8")
    stream.flush()
    file = _Output(name, descriptor)
    return io.TextIOWrapper(
        # as Python opens them: stderr has no buffer, nor has stdout after python -u
        file if stream.write_through else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors="backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
