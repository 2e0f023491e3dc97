"""04_amp/train.py: precision, loss scaling, schedule, and what it tells."""

import itertools

import pytest
import torch
import transformers
from support.checkpoints import saved
from support.harness import train

from lm import weights
from training import optim

SCRIPT = "04_amp/train.py"


def test_small_updates_are_kept_in_bf16(tmp_path):
    """At this rate a bf16 weight of 0.02 would not move: its neighbours are 6e-5 away."""
    train(SCRIPT, tmp_path, "--dtype", "bf16", "--lr", 1e-5, "--weight-decay", 0, "--steps", 5)
    config = weights.load_config(str(tmp_path / "tiny.json"), 256, 32)
    initial = weights.build(str(tmp_path / "tiny.json"), config, seed=0).state_dict()
    trained = saved(tmp_path, 5)["model"]
    assert {t.dtype for t in trained.values()} == {torch.float32}
    moved = {name: (trained[name] != initial[name]).float().mean().item() for name in initial}
    seldom = {"model.embed_tokens.weight"}  # bytes that do not occur have no gradient
    assert min(share for name, share in moved.items() if name not in seldom) > 0.9


def test_warmup_then_cosine(tmp_path):
    result = train(SCRIPT, tmp_path, "--lr", 0.01)
    lr = result.column("lr")
    assert lr[:4] == pytest.approx([0.0025, 0.005, 0.0075, 0.01])
    assert lr[4] == pytest.approx(0.01)
    assert all(a > b for a, b in itertools.pairwise(lr[4:]))
    assert 0.001 < lr[-1] < 0.0012


def test_constant_and_linear_are_those_of_transformers_behind_the_warm_up(tmp_path):
    steps = 10
    linear = train(
        SCRIPT, tmp_path / "1", "--lr", 0.01, "--steps", steps, "--lr-schedule", "linear"
    )
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], 0.01)
    theirs = transformers.get_linear_schedule_with_warmup(optimizer, 4, steps)
    expected = [0.01 * theirs.lr_lambdas[0](step) for step in range(steps)]
    assert linear.column("lr")[4:] == pytest.approx(expected[4:])
    assert optim.lr_factor(steps, "linear", warmup_steps=4, steps=steps) == 0
    assert optim.lr_factor(steps - 1, "constant", warmup_steps=4, steps=steps) == 1
