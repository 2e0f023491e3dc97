"""A run's folder: one live run at a time, one set of settings for life, and the same folder on every rank."""

import errno
import fcntl
import hashlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import filelock

from old.exits import UserError
from old.runtime import gather, on_rank0, say

NO_FLOCK = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
CHECKPOINTS = "step-" + 8 * "[0-9]"  # as checkpoint.py names them
LEASE_SECONDS = 60
_locks = []  # held until the process ends, however it ends


def create(run_dir: Path | None) -> Path:
    """Create or enter the folder (None: a new one in runs/) and lock it. UserError if it is in use or unwritable."""
    script = Path(sys.argv[0]).resolve().parent.name
    run_dir = run_dir or Path("runs", f"{script}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    seconds = os.environ.get("RUN_DIR_LOCK_SECONDS", "10")
    if not seconds.isdecimal():
        raise UserError(f"RUN_DIR_LOCK_SECONDS={seconds} is not a whole number of seconds")
    holder = run_dir / ".lock"
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _locks.append(_lock(holder))
        # data loading workers outlive a kill -9 of their parent by seconds; NFS and Lustre give a dead machine's lock
        # back after about 90
        _locks[-1].acquire(timeout=int(seconds))
        job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID") or "none"
        since = time.strftime("%Y-%m-%d %H:%M:%S %Z")
        holder.write_text(f"host {socket.gethostname()}, process {os.getpid()}, job {job}, since {since}")
    except filelock.Timeout:
        told = holder.read_text() or "its holder has not said who it is"
        raise UserError(
            f"--run-dir {run_dir} is in use by a live run ({told}): use another, or wait longer than "
            f"RUN_DIR_LOCK_SECONDS={seconds}"
        ) from None
    except OSError as error:
        raise UserError(f"--run-dir {run_dir} cannot be used: {error}") from None
    return run_dir


def _lock(file: Path) -> filelock.BaseFileLock:
    """A lock that the system gives back when its holder dies or, where the file system has none, a lease: a file that
    its holder touches again and again, and that anybody may take over once that has stopped."""
    try:
        with open(file, "a+") as stream:  # NFS wants reading for a shared lock
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        pass  # somebody holds it, so it works
    except OSError as error:
        if error.errno not in NO_FLOCK:
            raise
        return filelock.SoftFileLease(file.with_name(".lease"), lease_duration=LEASE_SECONDS)
    return filelock.FileLock(file)


def claim(run_dir: Path | None, *, settings: dict, contents: dict[str, str], resume: bool) -> Path:
    """Enter --run-dir for a run with these settings (by flag), on all ranks together.

    `contents` is what stands behind a setting, such as the text that --data names: a file may change under its name.
    UserError as for create, or if the folder belongs to a run with other settings (names the flags), holds checkpoints
    and `resume` is not given, or is not one folder on all ranks; or if ranks differ in their settings or contents.
    """
    _require_agreement({**settings, **contents})
    for name, content in contents.items():
        sha = hashlib.sha256(content.encode()).hexdigest()
        settings = {**settings, name: f"{settings[name]} (SHA-256 {sha[:12]})"}
    folder = Path(on_rank0(lambda: str(_examine(create(run_dir), settings, resume))))
    _require_shared(folder)
    on_rank0(lambda: _enter(folder, settings))
    return folder


def _examine(run_dir: Path, settings: dict, resume: bool) -> Path:
    known = _known(run_dir) or settings
    differ = [
        f"--{name.replace('_', '-')} {settings.get(name)} (was {known.get(name)})"
        for name in {**settings, **known}  # another script may have flags of its own
        if name != "commit" and settings.get(name) != known.get(name)
    ]
    if differ:
        raise UserError(f"--run-dir {run_dir} holds a run with other settings: {', '.join(differ)}; use another")
    if not resume and any(run_dir.glob(CHECKPOINTS)):
        raise UserError(f"--run-dir {run_dir} holds a run with checkpoints: --resume it, or use another")
    return run_dir


def _known(run_dir: Path) -> dict:
    try:
        file = run_dir / "settings.json"
        known = json.loads(file.read_text()) if file.exists() else {}
    except (OSError, ValueError) as error:
        raise UserError(f"--run-dir {run_dir} cannot be used: {error}") from None
    if not isinstance(known, dict):
        raise UserError(f"--run-dir {run_dir} cannot be used: its settings.json is no object")
    return known


def _require_agreement(mine: dict) -> None:
    """Nodes may have other texts under one name, or another --dtype auto: their ranks would train different models."""
    ranks = gather((mine, socket.gethostname()))
    for rank, (theirs, host) in enumerate(ranks):
        flags = [f"--{name.replace('_', '-')}" for name in mine if theirs[name] != ranks[0][0][name]]
        if flags:
            raise UserError(
                f"{', '.join(flags)} stands for something else on rank {rank} on {host} than on rank 0 on "
                f"{ranks[0][1]}: give a --data and a --dtype that mean the same on every node"
            )


def _require_shared(run_dir: Path) -> None:
    """Two nodes with a disk each would write halves of a checkpoint that nobody could put together again."""
    # a name that nobody has looked for yet: NFS remembers what was not there
    token = run_dir / on_rank0(lambda: f".seen-by-all-{uuid.uuid4().hex}")
    on_rank0(token.touch)
    ranks = gather((token.exists(), socket.gethostname()))
    on_rank0(token.unlink)
    blind = [f"{rank} on {host}" for rank, (seen, host) in enumerate(ranks) if not seen]
    if blind:
        raise UserError(
            f"--run-dir {run_dir}: a file that rank 0 on {ranks[0][1]} has just written there is not "
            f"seen by rank {', '.join(blind)}: use a folder on a file system that all nodes share"
        )


def _enter(run_dir: Path, settings: dict) -> None:
    try:
        known = _known(run_dir)
        if not known and any(run_dir.glob(CHECKPOINTS)):
            raise UserError(f"--run-dir {run_dir} holds checkpoints without the settings.json of their run: copy it")
        commit = _commit()
        if known and known.get("commit") != commit:
            say(f"warning: this run began at commit {known.get('commit')}, and this is {commit}")
        write_json(run_dir / "settings.json", {**settings, "commit": known["commit"] if known else commit})
    except OSError as error:
        raise UserError(f"--run-dir {run_dir} cannot be used: {error}") from None
    for leftover in (*run_dir.glob("step-*.tmp"), *run_dir.glob("step-*.old")):  # of a save that was killed
        try:
            shutil.rmtree(leftover)
        except OSError as error:
            say(f"warning: {leftover} is no longer needed and cannot be deleted: {error}")


def _commit() -> str | None:
    """The commit of this code, with "-dirty" if its files have changed since; None outside a git repository."""
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(git, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def write_json(file: Path, value: dict) -> None:
    """Write all of it or, if the disk fails or the process dies, nothing."""
    temporary = file.with_name(file.name + ".tmp")
    with open(temporary, "w") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(temporary, file)
