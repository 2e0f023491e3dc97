"""A run's folder and its checkpoints: whole or absent after a kill at any moment, loadable on any number of ranks. Each
is written to `step-N.tmp` and renamed to `step-N` when every rank's part is on disk; a hash shows later damage."""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import filelock
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

from common.exits import UserError, before_user_error_exit
from common.runtime import gather, is_rank0, on_rank0, print0, ranks, timeout, together

# torch.distributed.checkpoint is imported where it is used: 0.6 s that the first step need not wait for
# saving without a process group is meant
warnings.filterwarnings("ignore", message="torch.distributed is disabled")

# not strict: frozen weights stay as they were. That all others are there is for dcp.load to check
BY_NAME = {"flatten_optimizer_state_dict": True, "ignore_frozen_params": True, "strict": False}


def training_state(step: int, net, optimizer, scheduler, scaler=None) -> dict:
    """Everything that the rest of the run depends on. Optimizer state goes by parameter name, such as
    state.model.norm.weight.exp_avg, whatever wraps or cuts the model. Without frozen weights: they are the base's."""
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    model_state, optimizer_state = get_state_dict(
        net, optimizer, options=StateDictOptions(**BY_NAME)
    )
    for name, parameter in net.named_parameters(remove_duplicate=False):
        if not parameter.requires_grad:
            model_state.pop(name, None)  # of a tied matrix torch leaves its second name
    return {
        "progress": {"step": step},
        "model": model_state,
        "optimizer": optimizer_state,
        "scheduler": scheduler.state_dict(),
        "scaler": scaler.state_dict() if scaler else {},
    }


def resume(run: "Run", net, optimizer, scheduler, scaler=None) -> int:
    """Load the newest whole checkpoint; returns its step, or 0 where there is no checkpoint."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, set_state_dict

    if (path := run.newest()) is None:
        return 0
    state = training_state(0, net, optimizer, scheduler, scaler)
    dcp.load(state, checkpoint_id=path, process_group=run.group)
    parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(net, optimizer, **parts, options=StateDictOptions(**BY_NAME))
    scheduler.load_state_dict(state["scheduler"])
    for group, lr, factor in zip(
        optimizer.param_groups, scheduler.base_lrs, scheduler.lr_lambdas, strict=True
    ):
        group["lr"] = lr * factor(scheduler.last_epoch)  # the saved one, unless --steps has changed
    if scaler:
        scaler.load_state_dict(state["scaler"])
    return state["progress"]["step"]


class Run:
    """The folder of one run, which has one set of `settings` for life (flags.settings). All ranks call every method
    together. UserError if the folder is in use, unwritable, not shared, another run's, or has one that is to resume."""

    def __init__(self, args: argparse.Namespace, *, settings: dict) -> None:
        first, *others = gather(settings)
        # other texts under one name on its node, or another --dtype auto
        for rank, theirs in enumerate(others, 1):
            if differ := [name for name in settings if theirs[name] != first[name]]:
                raise UserError(
                    f"{', '.join(differ)} of rank {rank} is not that of rank 0: give what all nodes have"
                )
        self.keep = args.keep
        new = f"{Path(sys.argv[0]).resolve().parent.name}-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        self.folder = args.run_dir or on_rank0(lambda: Path("runs", new))
        on_rank0(lambda: self._enter(settings, args.resume))
        seen = gather((self.folder / "settings.json").exists())
        if not all(seen):  # each node would save its half of a checkpoint
            raise UserError(
                f"--run-dir {self.folder}: rank {seen.index(False)} does not see it: use one that all see"
            )
        # a group of its own: what a save in the background sends must not mix with the training's
        self.group = (
            dist.new_group(timeout=timeout(), backend="gloo") if dist.is_initialized() else None
        )
        self.writer = ThreadPoolExecutor(1) if args.async_save else None
        self.pending: Future | None = None
        before_user_error_exit.append(self.wait)

    def _enter(self, settings: dict, resume: bool) -> None:
        file, flag = self.folder / "settings.json", f"--run-dir {self.folder}"
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            # held until the process ends, however it ends
            self.lock = filelock.FileLock(self.folder / ".lock")
            # data loading workers outlive a kill -9 of their parent by seconds; NFS keeps a dead machine's lock for 90
            self.lock.acquire(timeout=float(os.environ.get("RUN_DIR_LOCK_SECONDS", "10")))
            checkpoints = _checkpoints(self.folder)
            if checkpoints and not file.exists():
                raise UserError(
                    f"{flag} holds checkpoints without the settings.json of their run: copy it"
                )
            known = json.loads(file.read_text()) if file.exists() else settings
            names = [
                name for name in {**settings, **known} if settings.get(name) != known.get(name)
            ]
            if differ := [f"{name} {settings.get(name)} (was {known.get(name)})" for name in names]:
                raise UserError(
                    f"{flag} holds a run with other settings: {', '.join(differ)}; use another"
                )
            if checkpoints and not resume:
                raise UserError(f"{flag} holds a run with checkpoints: --resume it, or use another")
            write_json(file, settings)
        except filelock.Timeout:
            raise UserError(
                f"{flag} is in use by a live run: use another, or end that one"
            ) from None
        except (OSError, ValueError) as error:
            raise UserError(f"{flag} cannot be used: {error}") from None
        for leftover in (*self.folder.glob("step-*.tmp"), *self.folder.glob("step-*.old")):
            shutil.rmtree(leftover, ignore_errors=True)  # of a save that was killed

    def save(self, step: int, state: dict, config: dict) -> None:
        """Save `state` as step-{step}, with `config` (a Hugging Face config.json) beside it. In the background only the
        copy to the CPU is waited for; the next save or wait() raises what went wrong. UserError if the disk refuses."""
        self.wait()
        if self.keep == 0:
            return
        if self.writer is None:
            return self._write(step, state, config)
        device = torch.cuda.current_device() if torch.cuda.is_initialized() else None
        copied = tree_map_only(
            torch.Tensor, lambda tensor: tensor.detach().to("cpu", copy=True), state
        )
        self.pending = self.writer.submit(self._write, step, copied, config, device)

    def wait(self) -> None:
        """Return when a save in the background is complete; UserError if it failed."""
        if self.pending is not None:
            self.pending.result()

    def _write(self, step: int, state: dict, config: dict, device: int | None = None) -> None:
        if device is not None:
            torch.cuda.set_device(device)  # a thread starts on GPU 0, whatever the rank's own is
        final = self.folder / f"step-{step:08d}"
        try:
            of_ranks = together(
                lambda: self._write_part(final.with_suffix(".tmp"), state, config), self.group
            )
            hashes = {name: sha256 for of_rank in of_ranks for name, sha256 in of_rank.items()}
            together(lambda: self._publish(final, hashes) if is_rank0() else None, self.group)
        except OSError as error:
            # what torch.save's "unexpected pos" means
            free = shutil.disk_usage(self.folder).free / 2**20
            where = f"step {step} in {self.folder} ({free:.0f} MiB free there)"
            raise UserError(
                f"cannot save {where}: {error}; older checkpoints are untouched"
            ) from None

    def _write_part(self, folder: Path, state: dict, config: dict) -> dict[str, str]:
        """Write this rank's files; returns the SHA-256 of each."""
        import torch.distributed.checkpoint as dcp

        # copying ahead would open a CUDA context wherever there is a GPU, also for a run on the CPU
        writer = dcp.FileSystemWriter(folder, per_thread_copy_ahead=0)
        try:
            dcp.save(state, storage_writer=writer, process_group=self.group)
        except dcp.api.CheckpointException as error:
            raise OSError(str(next(iter(error.failures.values()))[0])) from None
        files = [*folder.glob(f"__{ranks()[0]}_*")]
        if is_rank0():
            write_json(folder / "config.json", config)
            files += [folder / ".metadata", folder / "config.json"]
        return {file.name: file_sha256(file) for file in files}

    def _publish(self, final: Path, hashes: dict[str, str]) -> None:
        temporary = final.with_suffix(".tmp")
        write_json(temporary / "hashes.json", hashes)
        os.rename(temporary, final)
        # from here on the checkpoint is whole: what fails now must not end the run
        with contextlib.suppress(OSError):
            for old in _checkpoints(self.folder)[: -self.keep]:
                # first: what is half deleted must not look like a checkpoint
                old.rename(old.with_suffix(".old"))
                shutil.rmtree(old.with_suffix(".old"))

    def newest(self) -> Path | None:
        """The newest whole checkpoint, None where there is none. Broken ones are moved aside; UserError if all are."""
        broken = []
        for path in reversed(on_rank0(lambda: _checkpoints(self.folder))):
            problem = next(filter(None, gather(find_damage(path, *ranks()[:2]))), None)
            if problem is None:
                for bad in broken if is_rank0() else []:
                    bad.rename(bad.with_name(f"broken-{bad.name}-{time.time_ns()}"))
                print0(f"resuming from {path}")
                return path
            print0(f"checkpoint {path} is broken ({problem}): trying the one before")
            broken.append(path)
        if broken:
            raise UserError(
                f"--resume: every checkpoint in {self.folder} is broken; nothing was overwritten"
            )


def find_damage(path: Path, rank: int = 0, world_size: int = 1) -> str | None:
    """What is wrong with the files of a checkpoint, None if nothing; each rank looks at its part of them."""
    try:
        hashes = json.loads((path / "hashes.json").read_text())
        wrong = [
            name
            for name in sorted(hashes)[rank::world_size]
            if file_sha256(path / name) != hashes[name]
        ]
    except (OSError, ValueError, TypeError) as error:
        return str(error)
    return f"{wrong[0]} does not match its hash" if wrong else None


def write_json(file: Path, value: dict) -> None:
    """Write all of it or, if the disk fails or the process dies, nothing."""
    temporary = file.with_name(file.name + ".tmp")
    with open(temporary, "w") as stream:
        json.dump(value, stream, indent=1)
        stream.flush()
        os.fsync(stream.fileno())
    os.rename(temporary, file)


def _checkpoints(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("step-" + 8 * "[0-9]") if path.is_dir())


def file_sha256(file: Path) -> str:
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
