"""Tell a user in one line that the disk of temporary files is full."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from common.exits import UserError

# Parts of the messages with which the system, safetensors, torch.save and NumPy report a full disk.
DISK_FULL = (
    "No space left on device",
    "Disk quota exceeded",
    "File too large",
    "file write failed",
    "requested and",  # "100 requested and 20 written"
    "problem writing element",
)
LEAST_FREE = 2**14  # bytes; a disk with less is full, whatever an error says


@contextlib.contextmanager
def room_for(needed_bytes: int, folder: Path) -> Iterator[None]:
    """Raise UserError if `folder` has less room than the `with` block needs there.

    That is asked before the block starts. A disk can also become full while the block writes, or
    have a quota.
    """
    free_bytes = shutil.disk_usage(folder).free
    message = (
        f"temporary files in {folder} need at least {needed_bytes:,} bytes, and {free_bytes:,} are "
        "free there: delete something, or name a folder on a larger disk, TMPDIR=FOLDER"
    )
    if free_bytes < needed_bytes:
        raise UserError(message)
    try:
        yield
    except Exception as error:
        if isinstance(error, UserError) or not is_disk_full(error, folder):
            raise
        raise UserError(f"{message} ({error})") from None


def is_disk_full(error: BaseException, folder: Path) -> bool:
    """Return whether an exception, or one that led to it, tells that the disk is full."""
    if shutil.disk_usage(folder).free < LEAST_FREE:
        return True
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    messages = " ".join(str(cause) for cause in causes)
    return any(words in messages for words in DISK_FULL)
