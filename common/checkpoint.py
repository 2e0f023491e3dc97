"""A run's folder: who may use it, and checkpoints that survive a kill at any moment.

A checkpoint is written to `step-N.tmp` and renamed to `step-N` when every rank's part is on disk with
its hash, so a folder named `step-N` is whole, or was damaged later, and then a hash says so.
"""

import copy
import hashlib
import json
import os
import random
import shutil
import sys
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import filelock
import numpy as np
import torch
import torch.distributed as dist

from common.cli import IDENTITY
from common.runtime import UserError, gather, is_rank0, on_rank0, say


class Checkpoints:
    """The checkpoints of one run, the same object on every rank; all its methods are collective.

    Takes the parsed flags run_dir, keep, async_save, resume and those of cli.IDENTITY. UserError when
    the folder belongs to a run with other settings, is in use, or holds a run that was not to be resumed.
    """

    def __init__(self, args) -> None:
        self.settings = {name: getattr(args, name) for name in IDENTITY}
        self.run_dir = Path(on_rank0(lambda: str(self._claim(args))))
        self.keep, self.rank = args.keep, dist.get_rank() if dist.is_initialized() else 0
        # a group of its own: a save in the background must not mix its messages with the training's
        self.group = dist.new_group(backend="gloo") if dist.is_initialized() else None
        self.writer = ThreadPoolExecutor(1) if args.async_save else None
        self.pending: Future | None = None

    def _claim(self, args) -> Path:
        stamp = f"runs/{Path(sys.argv[0]).resolve().parent.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        run_dir = args.run_dir or Path(stamp)
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            self.lock = filelock.FileLock(run_dir / ".lock")
            self.lock.acquire(timeout=0)  # held until the process ends, however it ends
            known = run_dir / "settings.json"
            if known.exists():
                self._compare(run_dir, json.loads(known.read_text()), args.resume)
            else:
                _write_json(known, self.settings)
            for leftover in run_dir.glob("step-*.tmp"):
                shutil.rmtree(leftover)
        except filelock.Timeout:
            raise UserError(f"--run-dir {run_dir} is in use by a live run: choose another") from None
        except (OSError, json.JSONDecodeError) as error:
            raise UserError(f"--run-dir {run_dir} cannot be used: {error}") from None
        return run_dir

    def _compare(self, run_dir: Path, theirs: dict, resume: bool) -> None:
        differ = [
            f"--{name.replace('_', '-')} {mine} (there {theirs.get(name)})"
            for name, mine in self.settings.items()
            if theirs.get(name) != mine
        ]
        if differ:
            raise UserError(f"--run-dir {run_dir} holds a run with other settings: {', '.join(differ)}; choose another")
        if not resume and any(run_dir.glob("step-*[0-9]")):
            raise UserError(f"--run-dir {run_dir} holds a run with checkpoints: add --resume to go on, or choose another")

    def save(self, progress: dict, **parts) -> None:
        """Save `parts` (see _state) and `progress`, whose "step" names the checkpoint.

        With async_save the tensors are copied to the CPU and written while training goes on; the next
        save or wait() reports how that went. UserError if it cannot be written; older ones stay.
        """
        self.wait()
        state = self._state(progress, **parts)
        if self.writer is None:
            self._write(state, progress["step"])
        else:
            self.pending = self.writer.submit(self._write, _cpu_copy(state), progress["step"])

    def wait(self) -> None:
        """Return when the save in the background, if any, is complete; UserError if it failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _state(self, progress: dict, net, optimizer, scheduler, scaler) -> dict:
        # get_state_dict names optimizer state by parameter, not by position, whatever wraps the model
        from torch.distributed.checkpoint.state_dict import get_state_dict  # 0.6 s, not before the first step

        model_state, optimizer_state = get_state_dict(net, optimizer)
        return {
            "model": model_state,
            "optimizer": optimizer_state,
            "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict(),
            "progress": dict(progress),
            "settings": self.settings,
            f"rng-{self.rank}": _rng_state(),
        }

    def _write(self, state: dict, step: int) -> None:
        final = self.run_dir / f"step-{step:08d}"
        temporary = final.with_suffix(".tmp")
        problem, hashes = _attempt(_write_shards, state, temporary, self.group, self.rank)
        outcomes = gather((problem, hashes), self.group)
        problem = next((p for p, _ in outcomes if p), None)
        if problem is None and self.rank == 0:
            problem, _ = _attempt(self._publish, temporary, final, {k: v for _, h in outcomes for k, v in h.items()})
        problem = gather(problem, self.group)[0] or problem
        if problem is not None:
            raise UserError(f"checkpoint at step {step} cannot be saved in {self.run_dir}: {problem}; older ones are kept")

    def _publish(self, temporary: Path, final: Path, hashes: dict[str, str]) -> None:
        _write_json(temporary / "hashes.json", hashes)
        os.rename(temporary, final)
        _sync_folder(self.run_dir)
        for old in self._found()[: -self.keep]:
            shutil.rmtree(old)

    def _found(self) -> list[Path]:
        return sorted(self.run_dir.glob("step-*[0-9]"))

    def resume(self, net, optimizer, scheduler, scaler) -> dict | None:
        """Load the newest whole checkpoint into the objects, on any number of ranks.

        Returns the `progress` it was saved with, or None where there is no checkpoint. Broken ones are
        named, passed over and moved aside; UserError if there is nothing else.
        """
        found = [Path(p) for p in on_rank0(lambda: [str(p) for p in reversed(self._found())])]
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        broken = []
        for path in found:
            problem = next((p for p in gather(_problem(path, self.rank, world_size), self.group) if p), None)
            if problem is None:
                break
            say(f"checkpoint {path} is broken ({problem}): passed over")
            broken.append(path)
        else:
            if broken:
                raise UserError(f"--resume: every checkpoint in {self.run_dir} is broken; nothing was overwritten")
            return None
        if is_rank0():
            for bad in broken:
                os.rename(bad, bad.with_name(f"broken-{bad.name}-{time.time_ns()}"))
        return self._load(path, net, optimizer, scheduler, scaler)

    def _load(self, path: Path, net, optimizer, scheduler, scaler) -> dict:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state({"step": 0, "skipped_steps": 0}, net, optimizer, scheduler, scaler)
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        own = f"rng-{self.rank}"
        # a rank that the saving job did not have, or a device it did not use, keeps its own random state
        state[own] = {key: value for key, value in state[own].items() if f"{own}.{key}" in saved}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(state, checkpoint_id=path, process_group=self.group)
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        scaler.load_state_dict(state["scaler"])
        _set_rng_state(state[own])
        say(f"resumed from {path}")
        return state["progress"]


def _attempt(work, *args) -> tuple[str | None, object]:
    """(None, result), or (what went wrong, None) for what a disk can do to us."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        return None, work(*args)
    except CheckpointException as error:
        return str(next(iter(error.failures.values()))[0]), None
    except (OSError, RuntimeError) as error:
        return str(error), None


def _write_shards(state: dict, folder: Path, group, rank: int) -> dict[str, str]:
    """Write this rank's part into `folder`; returns the SHA-256 of each file that is this rank's."""
    import torch.distributed.checkpoint as dcp

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.save(state, checkpoint_id=folder, process_group=group)
    own = [*folder.glob(f"__{rank}_*"), *(folder.glob(".metadata") if rank == 0 else ())]
    return {file.name: _sha256(file) for file in own}


def _problem(path: Path, rank: int, world_size: int) -> str | None:
    """What is wrong with checkpoint `path`, None if nothing; the ranks share the files between them."""
    try:
        hashes = json.loads((path / "hashes.json").read_text())
        for name in sorted(hashes)[rank::world_size]:
            if _sha256(path / name) != hashes[name]:
                return f"{name} does not match its hash"
    except (OSError, ValueError, AttributeError) as error:
        return str(error)
    return None


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _write_json(file: Path, value: dict) -> None:
    temporary = file.with_name(file.name + ".tmp")
    with open(temporary, "w") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(temporary, file)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)  # a rename lives in the folder, not in the file
    os.close(descriptor)


def _cpu_copy(value):
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _cpu_copy(item) for key, item in value.items()}
    return copy.deepcopy(value)


def _rng_state() -> dict:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_rng_state(state: dict) -> None:
    setters = {
        "python": random.setstate,
        "numpy": np.random.set_state,
        "torch": torch.set_rng_state,
        "cuda": torch.cuda.set_rng_state,
    }
    for key, value in state.items():
        setters[key](value)
