"""Read what a run of the harness has saved."""

from pathlib import Path

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save


def saved(folder: Path, step: int) -> dict:
    """The whole content of a checkpoint, as one dictionary."""
    file = folder / "whole.pt"
    dcp_to_torch_save(folder / f"run/step-{step:08d}", file)
    return torch.load(file, weights_only=False)


def moments(folder: Path, step: int) -> dict[str, torch.Tensor]:
    optimizer = saved(folder, step)["optimizer"]
    parts = {key.removeprefix("state.").removesuffix(".exp_avg"): key for key in optimizer if key.endswith(".exp_avg")}
    assert parts, f"no first moments among {list(optimizer)[:5]}"
    return {name: optimizer[key] for name, key in parts.items()}


def assert_near(ours: dict, theirs: dict, tolerance: float = 1e-5) -> None:
    """Each tensor within `tolerance` of the other's norm."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.linalg.vector_norm(tensor - theirs[name]) <= tolerance * torch.linalg.vector_norm(theirs[name]), (
            name
        )


def gradients(folder: Path) -> dict[str, torch.Tensor]:
    """The clipped gradients of step 1: Adam's first moment starts from zero with weight 1 - beta1 = 0.1."""
    return {name: moment / 0.1 for name, moment in moments(folder, 1).items()}
