"""Checkpoints that survive a kill at any moment, resume exactly, and load on any number of ranks.

Three things, apart from each other: the protocol (class Checkpoints), what is saved (_training_state) and how it is
written (_write_dcp). A checkpoint is written to `step-N.tmp` and renamed to `step-N` when every rank's part is on disk
with its hash: what is named `step-N` is whole, or was damaged later, and then a hash tells.
"""

import copy
import hashlib
import json
import os
import random
import shutil
import uuid
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from old.exits import UserError, before_user_error_exit
from old.run_dir import CHECKPOINTS, write_json
from old.runtime import collective_timeout, gather, is_rank0, on_rank0, say, whole
from old.shapes import config_json

# torch.distributed.checkpoint is imported where it is used: 0.6 s that the first step need not wait for
warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # saving without a process group is meant


def save(checkpoints: "Checkpoints", progress: dict, net, optimizer, scheduler, scaler) -> None:
    """Save everything that the rest of the run depends on, as step-{progress["step"]}.

    UserError if it cannot be written: the older checkpoints are still there.
    """
    state = _training_state(progress, net, optimizer, scheduler, scaler)

    def write(state: dict, folder: Path, group: dist.ProcessGroup | None) -> Iterable[Path]:
        return [*_write_dcp(state, folder, group), *write_config(net, folder)]

    checkpoints.save(progress["step"], state, write)


def resume(checkpoints: "Checkpoints", net, optimizer, scheduler, scaler) -> dict | None:
    """Load the newest whole checkpoint; returns its `progress`, or None where there is no checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    path = checkpoints.newest()
    if path is None:
        return None
    state = _training_state({"step": 0, "skipped_steps": 0}, net, optimizer, scheduler, scaler)
    saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    # a rank that the saving job did not have, or a device it did not use, keeps its own random state
    own = f"rng-{checkpoints.rank}"
    state[own] = rng = {key: value for key, value in state[own].items() if f"{own}.{key}" in saved}
    dcp.load(state, checkpoint_id=path, process_group=checkpoints.group)
    set_state_dict(
        net,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=_flat(),
    )
    scheduler.load_state_dict(state["scheduler"])
    follow_schedule(optimizer.param_groups, scheduler)
    scaler.load_state_dict(state["scaler"])
    restore_random_states(rng)
    return state["progress"]


def follow_schedule(groups: list[dict], scheduler) -> None:
    """Set the learning rates that the scheduler's step asks for: the saved ones, unless --steps has changed."""
    for group, lr, factor in zip(groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True):
        group["lr"] = lr * factor(scheduler.last_epoch)


def random_states() -> dict:
    """By generator, what its next numbers depend on."""
    states = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    if torch.cuda.is_initialized():  # not is_available: a run on the CPU opens no context on somebody's GPU
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_random_states(states: dict) -> None:
    """Undo what has been drawn since random_states(); generators that are not in it stay as they are."""
    restore = {"python": random.setstate, "numpy": np.random.set_state, "torch": torch.set_rng_state}
    for name, state in states.items():
        restore.get(name, torch.cuda.set_rng_state)(state)


def _training_state(progress: dict, net, optimizer, scheduler, scaler) -> dict:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(net, optimizer, options=_flat())
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict(),
        "progress": dict(progress),
        f"rng-{dist.get_rank() if dist.is_initialized() else 0}": random_states(),
    }


def _flat():
    """Optimizer state under names such as state.model.norm.weight.exp_avg: by parameter, not by position in a group,
    whatever wraps or cuts the model."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    return StateDictOptions(flatten_optimizer_state_dict=True)


def _write_dcp(state: dict, folder: Path, group: dist.ProcessGroup | None) -> Iterable[Path]:
    import torch.distributed.checkpoint as dcp

    rank = dist.get_rank() if dist.is_initialized() else 0
    # copying ahead would open a CUDA context wherever there is a GPU, also for a run on the CPU
    writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
    dcp.save(state, storage_writer=writer, process_group=group)
    return [*folder.glob(f"__{rank}_*"), *(folder.glob(".metadata") if rank == 0 else ())]


def write_config(net: torch.nn.Module, folder: Path) -> Iterable[Path]:
    """The model's shape as Hugging Face's config.json: with it a checkpoint can be converted by whoever has only it."""
    if not (is_rank0() and hasattr(net, "config")):
        return []
    write_json(folder / "config.json", config_json(net.config))
    return [folder / "config.json"]


def find_damage(path: Path, rank: int = 0, world_size: int = 1) -> str | None:
    """What is wrong with the files of a checkpoint, None if nothing; each rank looks at its part of them."""
    try:
        hashes = dict(json.loads((path / "hashes.json").read_text()))
        if not hashes:
            return "hashes.json names no file"
        for name in sorted(hashes)[rank::world_size]:
            if _sha256(path / name) != hashes[name]:
                return f"{name} does not match its hash"
    except (OSError, ValueError, TypeError) as error:
        return str(error)
    return None


class Checkpoints:
    """The checkpoints of one run, whoever writes them. All ranks call every method together."""

    def __init__(self, run_dir: Path, *, keep: int, in_background: bool) -> None:
        self.run_dir, self.keep = run_dir, keep
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        # a group of its own: what a save in the background sends must not mix with the training's
        self.group = dist.new_group(timeout=collective_timeout(), backend="gloo") if dist.is_initialized() else None
        self.writer = ThreadPoolExecutor(1, initializer=_use_device, initargs=_device()) if in_background else None
        self.pending: Future | None = None
        before_user_error_exit.append(self.wait)

    def save(self, step: int, state: dict, write: Callable[[dict, Path, dist.ProcessGroup | None], Iterable[Path]]):
        """Save as step-{step}. `write(state, folder, group)` writes this rank's part and returns the files to hash.

        In the background, only the copy to the CPU is waited for; the next save or wait() tells how the
        rest went. UserError if it cannot be written: the older checkpoints are still there.
        """
        self.wait()
        if self.writer is None:
            self._write(step, state, write)
        else:
            self.pending = self.writer.submit(self._write, step, _cpu_copy(state), write)

    def wait(self) -> None:
        """Return when a save in the background is complete; UserError if it failed."""
        pending, self.pending = self.pending, None
        if pending is not None:
            pending.result()

    def _write(self, step: int, state: dict, write) -> None:
        final = self.run_dir / f"step-{step:08d}"
        temporary = final.with_suffix(".tmp")
        problem, hashes = _try(lambda: {file.name: _sha256(file) for file in write(state, temporary, self.group)})
        outcomes = gather((problem, hashes), self.group)
        problem = next((p for p, _ in outcomes if p), None)
        if problem is None and self.rank == 0:
            of_all_ranks = {name: sha for _, hashes in outcomes for name, sha in hashes.items()}
            problem, _ = _try(lambda: self._publish(temporary, final, of_all_ranks))
        problem = gather(problem, self.group)[0]
        if problem is not None:
            free = shutil.disk_usage(self.run_dir).free / 2**20  # what is behind torch.save's "unexpected pos"
            raise UserError(
                f"cannot save step {step} in {self.run_dir} ({free:.0f} MiB free there): {problem}; "
                "older checkpoints are untouched"
            )

    def _publish(self, temporary: Path, final: Path, hashes: dict[str, str]) -> None:
        if missing := [name for name in hashes if not (temporary / name).is_file()]:
            raise OSError(f"written by a rank and not seen by rank 0: {', '.join(missing)}")
        write_json(temporary / "hashes.json", hashes)
        os.rename(temporary, final)
        # from here on the checkpoint is whole: what fails now must not end the run
        try:
            folder = os.open(self.run_dir, os.O_RDONLY)
            try:
                os.fsync(folder)  # the new name lives in the folder, not in the files
            finally:
                os.close(folder)
        except OSError as error:
            say(f"warning: {self.run_dir} cannot be synced, a power cut may lose {final.name}: {error}")
        for old in self._found()[: -self.keep]:
            try:
                old.rename(old.with_suffix(".old"))  # first: what is half deleted must not look like a checkpoint
                shutil.rmtree(old.with_suffix(".old"))
            except OSError as error:
                say(f"warning: {old} is no longer needed and cannot be deleted: {error}")

    def _found(self) -> list[Path]:
        return sorted(path for path in self.run_dir.glob(CHECKPOINTS) if path.is_dir())

    def newest(self) -> Path | None:
        """The newest whole checkpoint, None where there is no checkpoint.

        Broken ones are named and moved aside; UserError if there is nothing else.
        """
        broken = []
        for name in on_rank0(lambda: [path.name for path in reversed(self._found())]):
            problem = next((p for p in gather(find_damage(self.run_dir / name, self.rank, self.world_size)) if p), None)
            if problem is None:
                if is_rank0():
                    for bad in broken:
                        os.rename(self.run_dir / bad, self.run_dir / f"broken-{bad}-{uuid.uuid4().hex[:8]}")
                say(f"resuming from {self.run_dir / name}")
                return self.run_dir / name
            say(f"checkpoint {self.run_dir / name} is broken ({problem}): trying the one before")
            broken.append(name)
        if broken:
            raise UserError(f"--resume: every checkpoint in {self.run_dir} is broken; nothing was overwritten")
        return None


def _device() -> tuple:
    return (torch.cuda.current_device(),) if torch.cuda.is_initialized() else (None,)


def _use_device(index: int | None) -> None:
    if index is not None:
        torch.cuda.set_device(index)  # a thread starts on GPU 0, whatever the rank's own is


def _try(work: Callable[[], dict | None]) -> tuple[str | None, dict | None]:
    """(None, result), or (the error's message, None) if the disk refused something."""
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
    if isinstance(value, list):
        return [_cpu_copy(item) for item in value]
    return copy.deepcopy(value)


@torch.no_grad()
def digest(net: torch.nn.Module) -> str:
    """SHA-256 over every parameter's bytes: equal digests are equal weights, to the bit.

    A sharded model has the digest of the whole one: each parameter is gathered in turn, so every rank must call this.
    """
    sha = hashlib.sha256()
    for parameter in net.parameters():
        sha.update(whole(parameter).detach().cpu().contiguous().view(torch.uint8).numpy())
    return sha.hexdigest()
