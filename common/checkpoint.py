"""Checkpoints that survive a kill at any moment, resume exactly, and load on any number of ranks.

A checkpoint is written to `step-N.tmp` and renamed to `step-N` when every rank's part is on disk with
its hash: what is named `step-N` is whole, or was damaged later, and then a hash tells.
"""

import copy
import hashlib
import json
import os
import random
import shutil
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from common.exits import UserError, before_user_error_exit
from common.run_dir import write_json
from common.runtime import collective_timeout, gather, is_rank0, on_rank0, say

# torch.distributed.checkpoint is imported where it is used: 0.6 s that the first step need not wait for
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # saving without a process group is meant


class Checkpoints:
    """The checkpoints of one run. All ranks call every method together."""

    def __init__(self, run_dir: Path, keep: int, in_background: bool) -> None:
        self.run_dir, self.keep = run_dir, keep
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # a group of its own: what a save in the background sends must not mix with the training's
        self.group = dist.new_group(timeout=collective_timeout(), backend="gloo") if dist.is_initialized() else None
        self.writer = ThreadPoolExecutor(1) if in_background else None
        self.pending: Future | None = None
        before_user_error_exit.append(self.wait)

    def save(self, progress: dict, net, optimizer, scheduler, scaler) -> None:
        """Save everything that the rest of the run depends on, as step-{progress["step"]}.

        In the background, only the copy to the CPU is waited for; the next save or wait() tells how the
        rest went. UserError if it cannot be written: the older checkpoints are still there.
        """
        self.wait()
        state = self._state(progress, net, optimizer, scheduler, scaler)
        if self.writer is None:
            self._write(state, progress["step"])
        else:
            self.pending = self.writer.submit(self._write, _cpu_copy(state), progress["step"])

    def wait(self) -> None:
        """Return when a save in the background is complete; UserError if it failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _state(self, progress: dict, net, optimizer, scheduler, scaler) -> dict:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        # optimizer state named by parameter, not by position, whatever wraps the model
        model_state, optimizer_state = get_state_dict(net, optimizer)
        rng = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
        if torch.cuda.is_available():
            rng["cuda"] = torch.cuda.get_rng_state()
        return {
            "model": model_state,
            "optimizer": optimizer_state,
            "scheduler": scheduler.state_dict(),
            "scaler": scaler.state_dict(),
            "progress": dict(progress),
            f"rng-{self.rank}": rng,
        }

    def _write(self, state: dict, step: int) -> None:
        final = self.run_dir / f"step-{step:08d}"
        temporary = final.with_suffix(".tmp")
        problem, hashes = _try(lambda: self._write_part(state, temporary))
        outcomes = gather((problem, hashes), self.group)
        problem = next((p for p, _ in outcomes if p), None)
        if problem is None and self.rank == 0:
            problem, _ = _try(
                lambda: self._publish(temporary, final, {k: v for _, h in outcomes for k, v in h.items()})
            )
        problem = gather(problem, self.group)[0]
        if problem is not None:
            free = shutil.disk_usage(self.run_dir).free / 2**20  # what is behind torch.save's "unexpected pos"
            raise UserError(
                f"cannot save step {step} in {self.run_dir} ({free:.0f} MiB free there): {problem}; "
                "older checkpoints are untouched"
            )

    def _write_part(self, state: dict, folder: Path) -> dict[str, str]:
        """Write this rank's part; returns the hashes of its files by name."""
        import torch.distributed.checkpoint as dcp

        dcp.save(state, checkpoint_id=folder, process_group=self.group)
        own = [*folder.glob(f"__{self.rank}_*"), *(folder.glob(".metadata") if self.rank == 0 else ())]
        return {file.name: _sha256(file) for file in own}

    def _publish(self, temporary: Path, final: Path, hashes: dict[str, str]) -> None:
        write_json(temporary / "hashes.json", hashes)
        os.rename(temporary, final)
        folder = os.open(self.run_dir, os.O_RDONLY)
        os.fsync(folder)  # the new name lives in the folder, not in the files
        os.close(folder)
        for old in self._found()[: -self.keep]:
            shutil.rmtree(old)

    def _found(self) -> list[Path]:
        return sorted(self.run_dir.glob("step-*[0-9]"))

    def resume(self, net, optimizer, scheduler, scaler) -> dict | None:
        """Load the newest whole checkpoint; returns its `progress`, or None where there is no checkpoint.

        Broken ones are named and moved aside; UserError if there is nothing else.
        """
        broken = []
        for name in on_rank0(lambda: [path.name for path in reversed(self._found())]):
            problem = next((p for p in gather(self._problem(self.run_dir / name)) if p), None)
            if problem is None:
                if is_rank0():
                    for bad in broken:
                        os.rename(self.run_dir / bad, self.run_dir / f"broken-{bad}-{os.getpid()}")
                say(f"resuming from {self.run_dir / name}")
                return self._load(self.run_dir / name, net, optimizer, scheduler, scaler)
            say(f"checkpoint {self.run_dir / name} is broken ({problem}): trying the one before")
            broken.append(name)
        if broken:
            raise UserError(f"--resume: every checkpoint in {self.run_dir} is broken; nothing was overwritten")
        return None

    def _problem(self, path: Path) -> str | None:
        """What is wrong with the checkpoint, None if nothing; the ranks share the reading."""
        try:
            hashes = json.loads((path / "hashes.json").read_text())
            for name in sorted(hashes)[self.rank :: self.world_size]:
                if _sha256(path / name) != hashes[name]:
                    return f"{name} does not match its hash"
        except (OSError, ValueError, TypeError) as error:
            return str(error)
        return None

    def _load(self, path: Path, net, optimizer, scheduler, scaler) -> dict:
        import torch.distributed.checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        state = self._state({"step": 0, "skipped_steps": 0}, net, optimizer, scheduler, scaler)
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        # a rank that the saving job did not have, or a device it did not use, keeps its own random state
        own = f"rng-{self.rank}"
        state[own] = rng = {key: value for key, value in state[own].items() if f"{own}.{key}" in saved}
        dcp.load(state, checkpoint_id=path, process_group=self.group)
        set_state_dict(net, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        scheduler.load_state_dict(state["scheduler"])
        for group, lr, factor in zip(optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
            group["lr"] = lr * factor(scheduler.last_epoch)  # the saved one, unless --steps has changed
        scaler.load_state_dict(state["scaler"])
        restore = {"python": random.setstate, "numpy": np.random.set_state, "torch": torch.set_rng_state}
        for key, value in rng.items():
            restore.get(key, torch.cuda.set_rng_state)(value)
        return state["progress"]


def _try(work) -> tuple[str | None, dict | None]:
    """(None, result), or (what the disk did to us, None)."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        return None, work()
    except CheckpointException as error:
        return str(next(iter(error.failures.values()))[0]), None
    except OSError as error:
        return str(error), None


def _sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _cpu_copy(value):
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _cpu_copy(item) for key, item in value.items()}
    return copy.deepcopy(value)


def digest(net: torch.nn.Module) -> str:
    """SHA-256 over every parameter's bytes: equal digests are equal weights, to the bit."""
    sha = hashlib.sha256()
    for parameter in net.parameters():
        sha.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy())
    return sha.hexdigest()
