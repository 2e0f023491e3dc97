"""Say how to make a model of a run, where a run is given in place of a model.

A checkpoint of a run is no folder of Hugging Face: --model does not read it, and a program of its
own converts it. This file does not import torch, so that the planner can use it on any machine.
"""

import shlex
from pathlib import Path

from common.exits import UserError
from training.run_folder import (
    command_to_convert,
    find_damage,
    is_checkpoint,
    is_model,
    list_checkpoints,
    read_settings,
)

# Bytes of a checkpoint that are hashed for an error message. More would take minutes.
MOST_HASHED_BYTES = 20e9


def refuse_run(name: str, flag: str) -> None:
    """Raise UserError for the folder of a run, or a checkpoint: the line says how to convert it.

    `flag` is the flag with the value `name`. Do nothing if `name` is anything else.
    """
    path = Path(name)
    if is_checkpoint(path):
        folder = path.parent
        where = f"{flag} {name} is a checkpoint of a run, and not the folder of a model"
    elif read_settings(path) and not is_model(path):
        folder = path
        where = f"{flag} {name} is the folder of a run, and not of a model"
    else:
        return

    checkpoints = list_checkpoints(folder)
    is_newest = path == folder or path in checkpoints[-1:]
    if is_newest and is_model(folder / "model"):
        raise UserError(f"{where}: the run has written its model, use {flag} {folder / 'model'}")
    if path == folder and not checkpoints:
        raise UserError(f"{where}, and has no checkpoint: train with --keep 1 or more")
    check_has_all_weights(folder, where)

    what = "it"
    intact: Path | None = path
    if path == folder or find_damage_unless_large(path):
        what = "the newest intact checkpoint"
        intact = newest_intact(checkpoints)
    if intact is None:
        raise UserError(f"{where}, and all checkpoints in {folder} are broken")
    converted = folder / f"model-{intact.name}"
    if is_model(converted):
        raise UserError(f"{where}: {what} has been converted, use {flag} {converted}")
    raise UserError(
        f"{where}: convert {what} with `{command_to_convert(intact, converted)}`, "
        f"and then use {flag} {shlex.quote(str(converted))}"
    )


def check_has_all_weights(folder: Path, where: str) -> None:
    """Raise UserError if the checkpoints of a run hold adapters alone."""
    if not read_settings(folder).get("--adapters"):
        return
    if is_model(folder / "model"):
        fix = f"the model of the last step is in {folder / 'model'}"
    else:
        fix = "finetune.py writes a model at the end of its run: --resume it"
    raise UserError(f"{where}, and its checkpoints hold adapters alone: {fix}")


def newest_intact(checkpoints: list[Path]) -> Path | None:
    """Return the newest of the checkpoints that find_damage_unless_large passes, or None."""
    for path in reversed(checkpoints):
        if find_damage_unless_large(path) is None:
            return path
    return None


def find_damage_unless_large(path: Path) -> str | None:
    """Return what find_damage does, but do not hash the files of a large checkpoint.

    convert_checkpoint.py hashes them anyway.
    """
    size = sum(file.stat().st_size for file in path.iterdir())
    if size > MOST_HASHED_BYTES:
        return None
    return find_damage(path)
