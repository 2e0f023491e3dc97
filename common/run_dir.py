"""A run's folder: one live run at a time, one set of settings for life."""

import hashlib
import json
import os
import shutil
import sys
import time
from pathlib import Path

import filelock
import numpy as np

from common.cli import IDENTITY
from common.exits import UserError
from common.runtime import on_rank0

_locks = []  # held until the process ends, however it ends


def create(run_dir: Path | None) -> Path:
    """Create or enter the folder (None: a new one in runs/) and lock it. UserError if it is in use or unwritable."""
    script = Path(sys.argv[0]).resolve().parent.name
    run_dir = run_dir or Path("runs", f"{script}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        _locks.append(filelock.FileLock(run_dir / ".lock"))
        _locks[-1].acquire(timeout=10)  # data loading workers outlive a kill -9 of their parent by seconds
    except filelock.Timeout:
        raise UserError(f"--run-dir {run_dir} is in use by a live run: use another") from None
    except OSError as error:
        raise UserError(f"--run-dir {run_dir} cannot be used: {error}") from None
    return run_dir


def claim(args, tokens: np.ndarray, config: object) -> Path:
    """Enter --run-dir for a run with the settings in args, this text and model, on all ranks together.

    UserError as for create, or if the folder belongs to a run with other settings (names the flags), or
    holds checkpoints and --resume is not given.
    """
    return Path(on_rank0(lambda: str(_claim(args, tokens, config))))


def _claim(args, tokens: np.ndarray, config: object) -> Path:
    run_dir = create(args.run_dir)
    settings_file = run_dir / "settings.json"
    settings = {name: getattr(args, name) for name in IDENTITY}
    for name, content in (("data", tokens), ("model", repr(config).encode())):  # a file may change under its name
        settings[name] += f" (SHA-256 {hashlib.sha256(content).hexdigest()[:12]})"
    try:
        known = json.loads(settings_file.read_text()) if settings_file.exists() else settings
        differ = [f"--{k.replace('_', '-')} {v} (was {known.get(k)})" for k, v in settings.items() if known.get(k) != v]
        if differ:
            raise UserError(f"--run-dir {run_dir} holds a run with other settings: {', '.join(differ)}; use another")
        if not args.resume and any(run_dir.glob("step-*[0-9]")):
            raise UserError(f"--run-dir {run_dir} holds a run with checkpoints: --resume it, or use another")
        write_json(settings_file, settings)
        for leftover in run_dir.glob("step-*.tmp"):  # of a save that was killed
            shutil.rmtree(leftover)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"--run-dir {run_dir} cannot be used: {error}") from None
    return run_dir


def write_json(file: Path, value: dict) -> None:
    """Write all of it or, if the disk fails or the process dies, nothing."""
    temporary = file.with_name(file.name + ".tmp")
    with open(temporary, "w") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(temporary, file)
