"""The folders that training/checkpoint.py writes: read what is in them.

This file does not import torch, so that the planner can use it on any machine.
"""

import contextlib
import hashlib
import json
import os
import re
import shlex
from pathlib import Path
from typing import NamedTuple

CONVERT = Path(__file__).parents[1] / "06_fsdp_zero/convert_checkpoint.py"
ASK = Path(__file__).parents[1] / "09_inference/infer_70b.py"
RUN_FILE = "run.json"  # the settings and flags of the run
# The files of a run that are replaced while it goes on, by checkpoint.py and meter.py.
RUN_FILES = (RUN_FILE, "metrics.jsonl", "loss.png")


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
    # What version 0.3.0 had, without a flag.
    settings = found["settings"]
    settings.setdefault("--lr-schedule", "cosine")
    if settings.get("--adapters"):
        settings.setdefault("--alpha", 2 * settings["--adapters"])
        settings.setdefault("--dropout", 0.0)
        settings.setdefault("--weights", "auto")
        settings.setdefault(
            "--target-modules", "q_proj,k_proj,v_proj,o_proj,gate_proj,up_proj,down_proj"
        )
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
    found = []
    for path in folder.glob("step-*"):
        if re.fullmatch(r"step-\d{8,}", path.name) and path.is_dir():
            found.append(path)
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")))


class Evaluated(NamedTuple):
    """A checkpoint and its loss on held-out data."""

    step: int
    folder: Path
    val_loss: float


def find_best(folder: Path) -> Evaluated | None:
    """Return the checkpoint with the lowest held-out loss, or None if none was evaluated."""
    return next(iter(best_first(folder)), None)


def best_first(folder: Path) -> list[Evaluated]:
    """Return the checkpoints that were evaluated on the newest held-out data, the best first.

    Where records say what data was held out, those of other data cannot be compared: --eval-data
    may change on a resume.
    """
    records = [record for record in read_records(folder / "metrics.jsonl") if "val_loss" in record]
    losses = {}
    for record in records:
        if record.get("held_out") == records[-1].get("held_out"):
            losses[record["step"]] = record["val_loss"]
    evaluated = []
    for path in list_checkpoints(folder):
        step = int(path.name.removeprefix("step-"))
        if step in losses:
            evaluated.append(Evaluated(step, path, losses[step]))
    return sorted(evaluated, key=lambda checkpoint: checkpoint.val_loss)


def read_records(file: Path) -> list[dict]:
    """Return the records of a metrics.jsonl; an empty list if there is no such file.

    Leave out lines that are damaged or incomplete, for example after a power cut.
    """
    if not file.exists():
        return []
    records = []
    # What follows the last newline is incomplete.
    for line in file.read_bytes().split(b"\n")[:-1]:
        with contextlib.suppress(ValueError):
            records.append(json.loads(line))
    return [record for record in records if isinstance(record, dict) and "step" in record]


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


def command_to_ask(folder: Path, step: int) -> str | None:
    """Return the shell command that asks the model that a run has after `step`.

    Return None if there is no such command: the run has not saved its model, or only adapters, or
    its model is not one of lm/model.py, or has a bias of its router, or the programs are not here.
    """
    if read_run(folder)["flags"].get("balance_bias"):
        return None
    commands = []
    model = folder / "model"  # of finetune.py
    if not is_model(model):
        checkpoint = folder / f"step-{step:08}"
        if not is_model(checkpoint) or read_settings(folder).get("--adapters"):
            return None
        model = folder / f"model-{checkpoint.name}"
        if not is_model(model):
            commands.append(command_to_convert(checkpoint, model))
    commands.append(shlex.join(["python", os.path.relpath(ASK), "--model", str(model)]))
    if not CONVERT.is_file() or not ASK.is_file():  # as in a copy of take.py
        return None
    return " && ".join(commands)


def command_to_convert(checkpoint: Path, model: Path) -> str:
    """Return the shell command that writes the model of a checkpoint to the folder `model`."""
    arguments = ["python", os.path.relpath(CONVERT), str(checkpoint), str(model), "--to", "hf"]
    return shlex.join(arguments)


def is_model(folder: Path) -> bool:
    """Return whether a folder is that of a model, as Hugging Face writes it."""
    return (folder / "config.json").is_file()
