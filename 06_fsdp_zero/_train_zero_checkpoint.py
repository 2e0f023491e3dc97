"""DeepSpeed's checkpoints, written by our protocol: under a temporary name, with hashes, renamed when they are whole.

By itself DeepSpeed writes each file to its final place and loads what it finds, damaged or not. Here it only says what
belongs into which file. A step's folder is one of its own: zero_to_fp32 and ds_to_universal read it.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch
import torch.distributed as dist
from _train_zero_nvme import save_weights

from old import checkpoint, exits, runtime


def save(checkpoints: checkpoint.Checkpoints, progress: dict, engine) -> None:
    """Save everything that the rest of the run depends on, as step-{progress["step"]}; the weights alone under --nvme.

    UserError if it cannot be written: the older checkpoints are still there.
    """
    if engine.zero_nvme_offload_optimizer():
        return save_weights(checkpoints, progress, engine)
    files = _collect_files(engine, {"progress": dict(progress)})
    files[f"rng-{dist.get_rank()}.pt"] = checkpoint.random_states()

    def write(files: dict[str, dict], folder: Path, _group: dist.ProcessGroup | None) -> Iterable[Path]:
        return [*_write_files(files, folder), *checkpoint.write_config(engine.module, folder)]

    checkpoints.save(progress["step"], files, write)


def _collect_files(engine, client_state: dict) -> dict[str, dict]:
    """What DeepSpeed would write into each file of this rank, by the file's name."""
    from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointEngine

    files = {}

    class Collector(CheckpointEngine):
        """Takes what is to be written and writes nothing."""

        def create(self, info) -> None:
            pass

        def makedirs(self, path, exist_ok=False) -> None:
            pass

        def save(self, state_dict, path: str) -> None:
            files[Path(path).name] = state_dict

        def load(self, path: str, map_location=None):
            raise NotImplementedError

        def commit(self, info) -> bool:
            return True

    writer, engine.checkpoint_engine = engine.checkpoint_engine, Collector()
    copy_script, engine._copy_recovery_script = engine._copy_recovery_script, lambda _: None
    try:
        engine.save_checkpoint("nowhere", tag="step", client_state=client_state, save_latest=False)
    finally:
        engine.checkpoint_engine, engine._copy_recovery_script = writer, copy_script
    return files


def _write_files(files: dict[str, dict], folder: Path) -> Iterable[Path]:
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        try:
            with open(folder / name, "wb") as stream:
                torch.save(content, stream)
                stream.flush()
                os.fsync(stream.fileno())
        except RuntimeError as error:  # what torch.save makes of a full disk
            raise OSError(str(error)) from error
        yield folder / name


def saved_ranks(path: Path) -> int:
    """The number of ranks that have written a checkpoint."""
    return len(list(path.glob("rng-*.pt")))


def make_universal(path: Path) -> None:
    """Turn a checkpoint into one for any number of ranks, by DeepSpeed's own program: each tensor whole, in a file."""
    folder = _universal(path)
    words = ["--input_folder", path, "--output_folder", folder, "--inject_missing_state"]
    command = [sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        shutil.rmtree(folder.parent, ignore_errors=True)
        last_line = (done.stderr.strip() or done.stdout.strip() or "no message").splitlines()[-1]
        raise exits.UserError(f"{path} cannot be turned into a universal checkpoint: {last_line}")


def _universal(path: Path) -> Path:
    # run_dir.claim clears away what ends in .tmp
    return path.with_name(f"{path.name}-universal.tmp") / "step"


def load(path: Path, engine, universal: bool) -> dict:
    """Load a checkpoint, or what make_universal has made of it; returns its `progress`."""
    source = _universal(path) if universal else path
    groups, scheduler = engine.optimizer.param_groups, engine.lr_scheduler
    weight_decays = [group["weight_decay"] for group in groups]
    loaded, client_state = engine.load_checkpoint(str(source.parent), tag=source.name)
    assert loaded is not None, f"DeepSpeed found no checkpoint in {source}"  # it would train on from random weights
    for group, weight_decay in zip(groups, weight_decays, strict=True):
        group["weight_decay"] = weight_decay  # a universal load at stage 3 gives every group those of the first
    for state in engine.basic_optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"].clone()  # and every group one counter, which each then counts up
    checkpoint.follow_schedule(groups, scheduler)
    own = path / f"rng-{dist.get_rank()}.pt"
    if own.exists():  # a rank that the saving job did not have keeps its own
        checkpoint.restore_random_states(torch.load(own, weights_only=False))
    runtime.gather(None)  # all have read it
    if universal and runtime.is_rank0():
        shutil.rmtree(source.parent)
    return client_state["progress"]
