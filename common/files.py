"""Write, replace and delete files and folders, and lose nothing that belongs to the user.

Two rules hold for every script. No other module deletes or replaces anything.

1. A folder is deleted or replaced only if it holds MARK, a file that a script has written into it.
   Then all in it goes. Old checkpoints are the exception: hashes.json in them is the mark.
2. An output is never an input, neither by the same path nor by a link: check_not_input in
   common/cli.py. The parser of the flags checks this before anything else starts.

An output appears when it is complete. Until then it has another name, TARGET-xxxxxxxx.tmp. A folder
that is on its way out is TARGET-xxxxxxxx.old.
"""

import contextlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from common.exits import UserError

MARK = ".made-by-script"
UNFINISHED = "unfinished"


@contextlib.contextmanager
def complete_file(file: Path, mode: str = "w", scratch: Path | None = None) -> Iterator[IO]:
    """Open a file that appears under its name when it is complete.

    Until then, and after a failure, `file` is as it was before. An older file is replaced: the
    caller knows that it is its own. `scratch` is a folder on the same disk for what is not complete
    (default: the folder of `file`).
    """
    folder = file.parent if scratch is None else scratch
    unfinished = folder / f".{file.name}-{uuid.uuid4().hex[:8]}.tmp"
    encoding = None if "b" in mode else "utf-8"
    try:
        with open(unfinished, mode, encoding=encoding) as stream:
            yield stream
            stream.flush()
            os.fsync(stream.fileno())  # before the name: a power cut must not leave an empty file
        os.replace(unfinished, file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_json(file: Path, value: object, **options) -> None:
    """Write a value as JSON: see complete_file. `options` go to json.dumps.

    A device, such as /dev/null, is written to and not replaced.
    """
    text = json.dumps(value, indent=1, **options) + "\n"
    if file.exists() and not file.is_file():
        file.write_text(text, encoding="utf-8")
        return
    with complete_file(file) as stream:
        stream.write(text)


def start_folder(target: Path) -> Path:
    """Create a folder with a new name, TARGET-xxxxxxxx.tmp, and return it: see finish_folder.

    Delete what killed processes have left of `target`. The caller makes sure that no other process
    writes `target` now.
    """
    delete_leftovers(target.parent, re.escape(target.name))
    unfinished = _new_name(target, ".tmp")
    unfinished.mkdir(parents=True)
    set_mark(unfinished, UNFINISHED)
    return unfinished


def finish_folder(unfinished: Path, target: Path, mark: str | None = None) -> None:
    """Rename a folder that start_folder has made to `target`.

    Raise UserError if something is there, but for an empty folder. With `mark`, a folder that has
    this mark is replaced, and the new folder has it, too.
    """
    check_replaceable(target, mark)
    if mark is not None:
        set_mark(unfinished, mark)
    old = None
    if target.exists() and any(target.iterdir()):
        old = _new_name(target, ".old")
        target.rename(old)
    try:
        unfinished.rename(target)  # over an empty folder, if there is one
    except OSError:
        if old is not None:
            old.rename(target)
        raise
    if old is not None:
        delete(old)
    if mark is None:
        (target / MARK).unlink()


def open_folder(folder: Path, mark: str) -> None:
    """Create a folder whose files the script may overwrite.

    Raise UserError if it holds files that the script has not written.
    """
    if read_mark(folder) != mark:
        check_replaceable(folder, mark)
        folder.mkdir(parents=True, exist_ok=True)
        set_mark(folder, mark)


def move(path: Path, target: Path) -> None:
    """Rename a file or a folder to `target`. Raise UserError if something is there."""
    if os.path.lexists(target):
        raise UserError(f"{target} exists: nothing is overwritten; move or rename it")
    path.rename(target)


def check_replaceable(target: Path, mark: str | None) -> None:
    """Raise UserError if something is at `target` that does not have this mark.

    An empty folder may be replaced. A link may not.
    """
    if target.is_symlink():
        raise UserError(f"{target} is a link, which would be replaced: remove it")
    if not target.exists():
        return
    if target.is_dir() and not any(target.iterdir()):
        return
    if mark is None or read_mark(target) != mark:
        raise UserError(
            f"{target} exists, and this script has not written it: nothing is overwritten; "
            "move or rename it"
        )


def set_mark(folder: Path, mark: str) -> None:
    """Write MARK into a folder: the scripts may delete the folder, and all that is in it."""
    (folder / MARK).write_text(mark + "\n", encoding="utf-8")


def read_mark(folder: Path) -> str | None:
    """Return the mark of a folder, or None if it has none."""
    try:
        return (folder / MARK).read_text(encoding="utf-8").strip()
    except OSError:
        return None


def delete(folder: Path) -> None:
    """Delete a folder that has a mark. Raise UserError if it has none or is a link.

    The mark is deleted last: what a killed process leaves can still be deleted.
    """
    if folder.is_symlink() or read_mark(folder) is None:
        raise UserError(f"{folder} is not deleted: no script has marked it as its own")
    for entry in folder.iterdir():
        if entry.name == MARK:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry)
        else:
            entry.unlink()
    (folder / MARK).unlink()
    folder.rmdir()


def delete_replaced(folder: Path) -> None:
    """Delete a folder that the caller knows to be its own: an old checkpoint.

    It is renamed first, because a folder that is half deleted must not look like a whole one. Raise
    UserError for a link, whose folder may be the user's.
    """
    if folder.is_symlink():
        raise UserError(f"{folder} is a link: its folder is not deleted")
    old = _new_name(folder, ".old")
    folder.rename(old)
    set_mark(old, UNFINISHED)
    delete(old)


def delete_files(folder: Path, pattern: str) -> None:
    """Delete the files that match `pattern` in a folder that has a mark, and in its subfolders."""
    if read_mark(folder) is not None:
        for file in folder.rglob(pattern):
            file.unlink()


def take_request(file: Path) -> bool:
    """Delete an empty file, by which a user asks for something. Return whether it was there.

    A file with content stays: it is not a request.
    """
    try:
        if not file.is_file() or file.stat().st_size > 0:
            return False
        file.unlink()
    except OSError:
        return False
    return True


def delete_leftovers(folder: Path, name: str) -> None:
    """Delete the folders with a mark that killed processes have left in `folder`.

    They are called NAME-xxxxxxxx.tmp or .old. `name` is a regular expression for NAME.
    """
    for leftover in folder.iterdir():
        is_leftover = re.fullmatch(rf"(?:{name})-[0-9a-f]{{8}}\.(?:tmp|old)", leftover.name)
        if is_leftover and not leftover.is_symlink() and read_mark(leftover) is not None:
            # another process may be deleting it, too
            with contextlib.suppress(OSError, UserError):
                delete(leftover)


def _new_name(path: Path, suffix: str) -> Path:
    return path.with_name(f"{path.name}-{uuid.uuid4().hex[:8]}{suffix}")
