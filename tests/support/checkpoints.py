"""Read what a run of the harness has saved, and write what one may start from."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from lm import shapes
from lm.weights import build


def write_folder(
    folder: Path, config: shapes.Config, seed: int = 1, scale: float = 1
) -> dict[str, torch.Tensor]:
    """A Hugging Face folder with the random weights of this seed, written by none of the scripts; returns them. With a
    scale of 4, what attention finds decides the next token as well, and the likeliest one is no matter of rounding."""
    folder.mkdir()
    net = build("nano", config, seed=seed)
    weights = {name: weight.detach() * scale for name, weight in net.named_parameters()}
    for i, name in enumerate(weights):
        if name.endswith(".bias"):  # they start as zeros
            weights[name] = 0.3 * torch.randn(
                weights[name].shape, generator=torch.Generator().manual_seed(i)
            )
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shapes.config_json(config)), encoding="utf-8")
    return weights


def saved(folder: Path, step: int) -> dict:
    """The whole content of a checkpoint, as one dictionary. Several tests may read the same one at a time."""
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        dcp_to_torch_save(folder / f"run/step-{step:08d}", file.name)
        return torch.load(file.name, weights_only=False)


def moments(folder: Path, step: int) -> dict[str, torch.Tensor]:
    optimizer = saved(folder, step)["optimizer"]
    parts = {
        key.removeprefix("state.").removesuffix(".exp_avg"): key
        for key in optimizer
        if key.endswith(".exp_avg")
    }
    assert parts, f"no first moments among {list(optimizer)[:5]}"
    return {name: optimizer[key] for name, key in parts.items()}


def assert_near(ours: dict, theirs: dict, tolerance: float = 1e-4) -> None:
    """Each tensor within `tolerance` of the other's norm. After an update of Adam's 1e-5 is a matter of luck: where a
    gradient is as small as its epsilon, 1e-8, rounding decides how far that weight moves."""
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.linalg.vector_norm(
            tensor - theirs[name]
        ) <= tolerance * torch.linalg.vector_norm(theirs[name]), name


def gradients_by_step(folder: Path, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """The clipped gradients of each step: what it added to Adam's first moment, which decays by beta1 = 0.9."""
    before = {}
    for step in range(1, steps + 1):
        after = moments(folder, step)
        yield {name: (moment - 0.9 * before.get(name, 0)) / 0.1 for name, moment in after.items()}
        before = after


def gradients(folder: Path) -> dict[str, torch.Tensor]:
    """The clipped gradients of step 1."""
    return next(gradients_by_step(folder, 1))


def assert_same_gradients(ours: Path, theirs: Path, steps: int = 1) -> None:
    """Of the first steps, each number of each."""
    for our, their in zip(
        gradients_by_step(ours, steps), gradients_by_step(theirs, steps), strict=True
    ):
        torch.testing.assert_close(our, their, rtol=1e-5, atol=1e-7)


def assert_same_first_gradients(ours: Path, theirs: Path) -> None:
    """Assert that those of step 1 are equal within 1e-5 of the largest number of a tensor."""
    found = gradients(ours)
    expected = gradients(theirs)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        error = (gradient - expected[name]).abs().max()
        assert error <= 1e-5 * expected[name].abs().max(), name
