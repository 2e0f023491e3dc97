"""Test 06_fsdp_zero/muon.py: the update is that of torch's Muon, and the same on N ranks."""

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from support.chapter import load
from support.harness import ROOT, TINY, assert_refused, in_long, run
from support.optimizers import assert_resumes, assert_steps, inverse

SCRIPT = "06_fsdp_zero/muon.py"
muon = load(SCRIPT)
UNEVEN = {**TINY, "hidden_size": 33, "intermediate_size": 65, "head_dim": 8}  # N ranks divide none
BLOCKS = 2
MATRICES = 7 * BLOCKS  # Muon updates these, and AdamW the rest
ELEMENTS_OF_MATRICES = BLOCKS * 9_603
OTHER_ELEMENTS = BLOCKS * 2 * 33 + 2 * 256 * 33 + 33  # norms, embedding and head, final norm


def finish(folder: Path, ranks: int) -> dict:
    (folder / "uneven.json").write_text(json.dumps(UNEVEN), encoding="utf-8")
    flags = ("--model", "uneven.json", "--device", "cpu", "--steps", 6, "--json", "s.json")
    result = run(SCRIPT, folder, *flags, nproc=None if ranks == 2 else ranks)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    return json.loads((folder / "s.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("ranks", [3, in_long(1), in_long(2)])
def test_sharded_is_one_process(once, ranks):
    summary = once("06 muon", finish, ranks)
    rows = {(row["optimizer"], row["weights"]): row for row in summary["rows"]}
    one_process = rows["muon", "full"]
    sharded = rows["muon", "sharded"]
    adamw = rows["adamw", "sharded"]
    assert sharded["losses"] == pytest.approx(one_process["losses"], rel=1e-5)
    assert sharded["losses"][-1] < sharded["losses"][0]
    assert sharded["losses"][1:] != adamw["losses"][1:]

    # Muon has one moment in fp32, and AdamW two.
    muon_bytes = 4 * ELEMENTS_OF_MATRICES + 8 * OTHER_ELEMENTS
    adamw_bytes = 8 * (ELEMENTS_OF_MATRICES + OTHER_ELEMENTS)
    assert sum(sharded["optimizer_bytes_per_rank"]) == muon_bytes
    assert sum(adamw["optimizer_bytes_per_rank"]) == adamw_bytes
    assert len(sharded["optimizer_bytes_per_rank"]) == ranks

    gathers = MATRICES if ranks > 1 else 0
    assert sharded["all_gathers_per_optimizer_step"] == gathers
    assert adamw["all_gathers_per_optimizer_step"] == 0
    assert one_process["all_gathers_per_optimizer_step"] == 0


def test_what_is_refused(tmp_path):
    assert_refused(run(SCRIPT, tmp_path, "--model", "giant", "--device", "cpu"), "--model", "giant")


def test_the_optimizer_is_that_of_torch():
    """torch's orthogonalizes in bf16, so the updates agree to about three digits."""
    start = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    settings = {"lr": 0.01, "momentum": 0.95, "weight_decay": 0.1}

    def train(make_optimizer, **options) -> torch.Tensor:
        matrix = torch.nn.Parameter(start.clone())
        optimizer = make_optimizer([matrix], **settings, **options)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            matrix.grad = torch.randn(24, 40, generator=generator)
            optimizer.step()
        return matrix.detach()

    found = train(muon.Muon)
    expected = train(torch.optim.Muon, adjust_lr_fn="match_rms_adamw")
    moved = (expected - start).norm()
    assert moved > 0.1
    assert (found - expected).norm() < 0.02 * moved


def test_a_run_with_muon_resumes(tmp_path):
    assert_resumes(partial(muon.Muon, lr=0.01), tmp_path, torch.float32)


# Trains three steps, saves, and resumes in the next job: three steps more.
RESUMING = f"""
import sys
from pathlib import Path
sys.path[:1] = [{str(ROOT)!r}, {str(ROOT / "tests")!r}]
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.fsdp import fully_shard
from support.chapter import load
from support.optimizers import SavedRun, inverse
from training import checkpoint
dist.init_process_group("gloo")
net = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Linear(65, 33))
net[0].requires_grad_(False)  # frozen
net.load_state_dict(torch.load("start.pt"))
fully_shard(net)
optimizer = load({SCRIPT!r}).Muon([net[0].weight, net[1].weight], lr=0.01)
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, inverse)
training = {{"net": net, "optimizer": optimizer, "scheduler": scheduler}}
folder = Path("saved")
start = checkpoint.resume(SavedRun(folder), **training) if folder.exists() else 0
for step in range(start, start + 3):
    torch.manual_seed(step)
    net(torch.randn(8, 33)).square().mean().backward()
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
dcp.save(checkpoint.training_state(start + 3, **training), checkpoint_id=folder)
weight = net[1].weight.full_tensor()
if dist.get_rank() == 0:
    torch.save(weight, f"{{start + 3}}.pt")
dist.destroy_process_group()
"""


def test_sharded_matrices_resume_on_another_number_of_ranks(tmp_path):
    script = tmp_path / "resuming.py"
    script.write_text(RESUMING, encoding="utf-8")
    net = torch.nn.Sequential(torch.nn.Linear(33, 65), torch.nn.Linear(65, 33))
    torch.save(net.state_dict(), tmp_path / "start.pt")
    for ranks in (2, 3):
        result = run(str(script), tmp_path, nproc=ranks)
        assert result.code == 0, result

    optimizer = muon.Muon([net[1].weight], lr=0.01)
    for step in range(6):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 * inverse(step)
        torch.manual_seed(step)
        loss = net(torch.randn(8, 33)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(torch.load(tmp_path / "6.pt"), net[1].weight.detach())


def test_step_takes_a_closure_and_a_weight_without_a_gradient():
    assert_steps(partial(muon.Muon, lr=0.01))
