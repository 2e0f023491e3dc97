"""DeepSpeed's checkpoints, for convert_checkpoint.py: the flat fp32 weights of stages 1 to 3, the module of stage 0."""

import logging
import os
import re
from pathlib import Path

import torch
from _convert_checkpoint_files import Read, Source, readable
from _convert_checkpoint_pt import write_torch_file
from torch import Tensor

from old.exits import UserError
from old.run_dir import write_json

TAG, MODEL_STATES = "weights", "mp_rank_00_model_states.pt"


def read_deepspeed(folder: Path) -> Source:
    """From stage 1 on, the weights in fp32 are in the ranks' optimizer files. Stages 1 and 2 put the parameters of a
    group one after the other and cut that row into a part per rank. Stage 3 cuts each parameter into a part per rank,
    and a rank puts its parts one after the other."""
    if (folder / "latest").is_file():
        folder = folder / (folder / "latest").read_text().strip()
    if (folder / "zero").is_dir():
        raise UserError(f"{folder} is a universal checkpoint: convert the one that it was made of")
    model_files = sorted(folder.glob("*_model_states.pt"), key=rank_of)
    optimizer_files = sorted(folder.glob("*_optim_states.pt"), key=rank_of)
    states = load(model_files[0])
    if not optimizer_files:
        tensors = {name: weight.to("meta") for name, weight in states["module"].items()}
        return Source(tensors, lambda name: load(model_files[0])["module"][name])
    with readable(optimizer_files[0]):
        optimizer = load(optimizer_files[0])["optimizer_state_dict"]
        stage, ranks = optimizer["zero_stage"], optimizer["partition_count"]
        ranks = max(ranks) if isinstance(ranks, list) else ranks
        paddings = optimizer.get("param_alignment_paddings")  # in the row of stages 1 and 2, behind each parameter
    if len(optimizer_files) != ranks:
        raise UserError(f"{folder} was saved by {ranks} ranks, and has the _optim_states.pt of {len(optimizer_files)}")
    key = "fp32_flat_groups" if stage == 3 else "single_partition_of_fp32_groups"

    places, offset = {}, 0  # of each parameter: its group, where it begins there, and its shape
    for group, shapes in enumerate(states["param_shapes"]):
        offset = offset if stage == 3 else 0
        for number, (name, shape) in enumerate(shapes.items()):
            places[name] = (group, offset, shape)
            offset += -(-shape.numel() // ranks) if stage == 3 else shape.numel()
            offset += paddings[group][number] if paddings is not None and stage < 3 else 0
    for name, same in states["shared_params"].items():
        places[name] = places[same]

    def read(name: str) -> Tensor:
        # opened anew each time: what a map has read stays in memory as long as the map
        flat = [load(file)["optimizer_state_dict"][key] for file in optimizer_files]
        group, offset, shape = places[name]
        if stage < 3:
            return cut([groups[group] for groups in flat], offset, shape.numel()).view(shape)
        parts = [cut(groups, offset, -(-shape.numel() // ranks)) for groups in flat]
        return torch.cat(parts)[: shape.numel()].view(shape)  # the last part is padded

    return Source({name: torch.empty(shape, device="meta") for name, (_, _, shape) in places.items()}, read)


def rank_of(file: Path) -> int:
    """The rank in zero_pp_rank_11_mp_rank_00_model_states.pt; in the order of their names, 11 would stand before 2."""
    found = re.search(r"zero_pp_rank_(\d+)_", file.name)
    return int(found[1]) if found else 0


def load(file: Path) -> dict:
    """Mapped, so that only what is used is read. DeepSpeed's files hold objects of its own, so loading one runs code:
    open only what you trust."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when loading imports the package, which else looks for GPUs
    logging.disable(logging.INFO)  # that it has found a CPU
    try:
        with readable(file):
            return torch.load(file, map_location="cpu", mmap=True, weights_only=False)
    except ModuleNotFoundError as error:
        raise UserError(f"{file} needs a package that is not there ({error}): pip install deepspeed") from None
    finally:
        logging.disable(logging.NOTSET)


def cut(parts: list[Tensor], start: int, length: int) -> Tensor:
    """What torch.cat(parts)[start : start + length] would be."""
    pieces = []
    for part in parts:
        pieces.append(part[max(0, start) : max(0, start + length)])
        start -= len(part)
    return torch.cat(pieces)


def write_deepspeed(folder: Path, tensors: dict[str, Tensor], read: Read, tied: bool, config: dict) -> None:
    """What engine.load_checkpoint(TO, load_module_only=True) takes at stages 0, 1 and 2."""
    (folder / TAG).mkdir(parents=True)
    counters = {"dp_world_size": 1, "mp_world_size": 1, "global_steps": 0, "global_samples": 0, "skipped_steps": 0}
    write_torch_file(folder / TAG / MODEL_STATES, "module", tensors, read, tied, more=counters)
    write_json(folder / TAG / "config.json", config)
    (folder / "latest").write_text(TAG)
