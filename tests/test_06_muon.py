"""06_fsdp_zero/muon.py: the update is orthogonal, that of torch's own Muon, and the same on any number of ranks."""

import json
from pathlib import Path

import pytest
import torch
from support.chapter import load
from support.harness import TINY, assert_refused, run

SCRIPT = "06_fsdp_zero/muon.py"
muon = load(SCRIPT)
# 2 and 4 ranks hold unequal parts
UNEVEN = {**TINY, "hidden_size": 33, "intermediate_size": 65, "head_dim": 8}


def finish(folder: Path, ranks: int) -> dict:
    (folder / "uneven.json").write_text(json.dumps(UNEVEN))
    flags = ("--model", "uneven.json", "--device", "cpu", "--steps", 6, "--json", "s.json")
    result = run(SCRIPT, folder, *flags, nproc=None if ranks == 2 else ranks)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    return json.loads((folder / "s.json").read_text())


@pytest.mark.parametrize(
    "ranks", [3, pytest.param(1, marks=pytest.mark.full), pytest.param(2, marks=pytest.mark.full)]
)
def test_sharded_is_one_process(once, ranks):
    summary = once("06 muon", finish, ranks)
    rows = {(row["optimizer"], row["weights"]): row for row in summary["rows"]}
    one_process, sharded, adamw = (
        rows["muon", "whole"],
        rows["muon", "sharded"],
        rows["adamw", "sharded"],
    )
    assert sharded["losses"] == pytest.approx(one_process["losses"], rel=1e-5)
    assert sharded["losses"][-1] < sharded["losses"][0]
    assert sharded["losses"][1:] != adamw["losses"][1:]
    # A block has 7 matrices with 9,603 elements. AdamW has two moments of its 2 norms and of all that is around it.
    matrices, vectors, around = 2 * 9_603, 2 * 2 * 33, 2 * 256 * 33 + 33
    assert sum(sharded["optimizer_bytes_per_rank"]) == 4 * matrices + 8 * (vectors + around)
    assert sum(adamw["optimizer_bytes_per_rank"]) == 8 * (matrices + vectors + around)
    assert len(sharded["optimizer_bytes_per_rank"]) == ranks
    assert sharded["all_gathers_per_optimizer_step"] == (14 if ranks > 1 else 0)
    assert (
        adamw["all_gathers_per_optimizer_step"]
        == one_process["all_gathers_per_optimizer_step"]
        == 0
    )


def test_what_is_refused(tmp_path):
    assert_refused(run(SCRIPT, tmp_path, "--model", "giant", "--device", "cpu"), "--model", "giant")


def test_the_optimizer_is_that_of_torch():
    """Which orthogonalises in bf16: its update agrees to about three digits."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(24, 40, generator=generator)
    settings = {"lr": 0.01, "momentum": 0.95, "weight_decay": 0.1}
    weights = []
    for optimizer in (muon.Muon, torch.optim.Muon):
        matrix = torch.nn.Parameter(start.clone())
        more = {"adjust_lr_fn": "match_rms_adamw"} if optimizer is torch.optim.Muon else {}
        stepper = optimizer([matrix], **settings, **more)
        gradients = torch.Generator().manual_seed(1)
        for _ in range(3):
            matrix.grad = torch.randn(24, 40, generator=gradients)
            stepper.step()
        weights.append(matrix.detach())
    moved = (weights[0] - start).norm()
    assert (weights[0] - weights[1]).norm() < 0.02 * moved
    assert moved > 0.1
