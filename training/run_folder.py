"""The folders that training/checkpoint.py writes: find checkpoints, and make models of them.

A checkpoint of a run is no folder of Hugging Face: --model does not read it, and a program of its
own converts it. This file does not import torch, so that the planner can use it on any machine.
"""

import hashlib
import json
import os
import shlex
from pathlib import Path

from common.exits import UserError

CONVERT = Path(__file__).parents[1] / "06_fsdp_zero/convert_checkpoint.py"
ASK = Path(__file__).parents[1] / "09_inference/infer_70b.py"
RUN_FILE = "run.json"  # the settings and flags of the run
# The files of a run that are replaced while it goes on, by checkpoint.py and meter.py.
RUN_FILES = (RUN_FILE, "metrics.jsonl", "loss.png")
# Bytes of a checkpoint that are hashed for an error message. More would take minutes.
MOST_HASHED_BYTES = 20e9


def is_run_folder(folder: str | Path) -> bool:
    """Return whether a folder is the folder of a run."""
    folder = Path(folder)
    if not read_settings(folder):
        return False
    return (folder / "metrics.jsonl").exists() or any(map(is_checkpoint, folder.glob("step-*")))


def read_settings(folder: Path) -> dict:
    """Return the settings of a run by flag, or {} if the folder has none."""
    return read_run(folder)["settings"]


def read_run(folder: Path) -> dict[str, dict]:
    """Return what run.json says: "settings" and "flags", which are {} in a folder of no run.

    The settings must not change on a resume, and are by flag, such as "--data". The flags are by
    name, such as "save_every". Version 0.3.0 wrote two files, settings.json and flags.json.
    """
    run = _read_json(folder / RUN_FILE)
    if not run and not (folder / RUN_FILE).exists():
        run = {name: _read_json(folder / f"{name}.json") for name in ("settings", "flags")}
        run["settings"].pop("format of these settings", None)
    found = {}
    for name in ("settings", "flags"):
        value = run.get(name)
        found[name] = value if isinstance(value, dict) else {}
    if not {"--model", "--data", "--seed"} <= found["settings"].keys():
        return {"settings": {}, "flags": {}}
    return found


def _read_json(file: Path) -> dict:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def is_checkpoint(folder: str | Path) -> bool:
    """Return whether a folder is a checkpoint of a run."""
    folder = Path(folder)
    return folder.name.startswith("step-") and (folder / "hashes.json").exists()


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in the folder of a run, oldest first."""
    digit = "[0-9]"
    return sorted(path for path in folder.glob(f"step-{digit * 8}") if path.is_dir())


def find_damage(path: Path, rank: int = 0, world_size: int = 1) -> str | None:
    """Return what is wrong with the files of a checkpoint, or None if they match their hashes.

    Each rank checks every `world_size`-th file, so that the ranks share the work.
    """
    try:
        hashes = json.loads((path / "hashes.json").read_text(encoding="utf-8"))
        for name in sorted(hashes)[rank::world_size]:
            if file_sha256(path / name) != hashes[name]:
                return f"{name} does not match its hash"
    except (OSError, ValueError, TypeError) as error:
        return str(error)
    return None


def file_sha256(file: Path) -> str:
    """Return the SHA-256 of a file's content, in hexadecimal."""
    with open(file, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def refuse_run(name: str, flag: str) -> None:
    """Raise UserError for the folder of a run, or a checkpoint: the line says how to convert it.

    `flag` is the flag with the value `name`. Do nothing if `name` is anything else.
    """
    path = Path(name)
    if is_checkpoint(path):
        folder = path.parent
        where = f"{flag} {name} is a checkpoint of a run, and not the folder of a model"
    elif read_settings(path) and not _is_model(path):
        folder = path
        where = f"{flag} {name} is the folder of a run, and not of a model"
    else:
        return

    checkpoints = list_checkpoints(folder)
    is_newest = path == folder or path in checkpoints[-1:]
    if is_newest and _is_model(folder / "model"):
        raise UserError(f"{where}: the run has written its model, use {flag} {folder / 'model'}")
    if path == folder and not checkpoints:
        raise UserError(f"{where}, and has no checkpoint: train with --keep 1 or more")
    check_has_all_weights(folder, where)

    what = "it"
    intact = path
    if path == folder or find_damage_unless_large(path):
        what = "the newest intact checkpoint"
        intact = newest_intact(checkpoints)
    if intact is None:
        raise UserError(f"{where}, and all checkpoints in {folder} are broken")
    converted = folder / f"model-{intact.name}"
    if _is_model(converted):
        raise UserError(f"{where}: {what} has been converted, use {flag} {converted}")
    raise UserError(
        f"{where}: convert {what} with `{_command_to_convert(intact, converted)}`, "
        f"and then use {flag} {shlex.quote(str(converted))}"
    )


def command_to_ask(folder: Path, step: int) -> str | None:
    """Return the shell command that asks the model that a run has after `step`.

    Return None if there is no such command: the run has not saved its model, or only adapters, or
    its model is not one of lm/model.py, or the programs are not here.
    """
    commands = []
    model = folder / "model"  # of finetune.py
    if not _is_model(model):
        checkpoint = folder / f"step-{step:08}"
        if not _is_model(checkpoint) or read_settings(folder).get("--adapters"):
            return None
        model = folder / f"model-{checkpoint.name}"
        if not _is_model(model):
            commands.append(_command_to_convert(checkpoint, model))
    commands.append(shlex.join(["python", os.path.relpath(ASK), "--model", str(model)]))
    if not CONVERT.is_file() or not ASK.is_file():  # as in a copy of take.py
        return None
    return " && ".join(commands)


def _command_to_convert(checkpoint: Path, model: Path) -> str:
    arguments = ["python", os.path.relpath(CONVERT), str(checkpoint), str(model), "--to", "hf"]
    return shlex.join(arguments)


def check_has_all_weights(folder: Path, where: str) -> None:
    """Raise UserError if the checkpoints of a run hold adapters alone."""
    if not read_settings(folder).get("--adapters"):
        return
    if _is_model(folder / "model"):
        fix = f"the model of the last step is in {folder / 'model'}"
    else:
        fix = "finetune.py writes a model at the end of its run: --resume it"
    raise UserError(f"{where}, and its checkpoints hold adapters alone: {fix}")


def _is_model(folder: Path) -> bool:
    return (folder / "config.json").is_file()


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
