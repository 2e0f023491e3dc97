"""07_memory_tricks/optimizer_memory.py: what each recipe keeps of a parameter, and that all of them train."""

import json
from functools import partial

import pytest
import torch
from support.chapter import load
from support.harness import TINY, assert_refused, run
from support.optimizers import assert_resumes, assert_steps

SCRIPT = "07_memory_tricks/optimizer_memory.py"
UNEVEN = {
    **TINY,
    "hidden_size": 33,
    "intermediate_size": 65,
    "head_dim": 8,
    "tie_word_embeddings": True,
}


def test_bytes_and_losses(tmp_path):
    (tmp_path / "uneven.json").write_text(json.dumps(UNEVEN), encoding="utf-8")
    flags = (
        "--model",
        "uneven.json",
        "--device",
        "cpu",
        "--steps",
        4,
        "--seq-len",
        16,
        "--seeds",
        2,
    )
    result = run(
        SCRIPT, tmp_path, *flags, "--batch-size", 4, "--lr", 1e-3, "--json", "summary.json"
    )
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    rows = {row["recipe"]: row for row in result.summary["rows"]}
    per_parameter = {name: row["bytes_per_parameter"] for name, row in rows.items()}
    assert per_parameter["AdamW"] == 16
    assert per_parameter["moments in bf16"] == per_parameter["step inside backward"] == 12
    assert per_parameter["bf16 weights"] == per_parameter["bf16 weights, stochastic rounding"] == 8
    assert 10.03 < per_parameter["moments in 8 bits"] < 10.5
    assert 8 < per_parameter["Adafactor"] < 8.5
    for row in rows.values():
        first_seed, second_seed = row["losses"]
        assert len(first_seed) == len(second_seed) == 4
        assert first_seed != second_seed
        assert row["last_loss"] < row["first_loss"]
    assert rows["step inside backward"]["losses"] == rows["AdamW"]["losses"]
    assert rows["bf16 weights"]["largest_distance"] > 0


def test_bad_input_is_refused_in_one_line(tmp_path):
    for flags in (
        "--steps 0",
        "--lr -1",
        "--model nope",
        "--device x",
    ):
        assert_refused(run(SCRIPT, tmp_path, *flags.split()), *flags.split())


def test_stochastic_rounding_keeps_nan_and_never_overflows():
    """0x7FFFFFFF is the NaN of NVIDIA's arithmetic. A carry would make -0.0 of it."""
    stochastic_round = load(SCRIPT).stochastic_round
    generator = torch.Generator().manual_seed(0)
    patterns = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000, 0x7F800001], dtype=torch.int32)
    for value in patterns.view(torch.float32):
        assert stochastic_round(value.repeat(1000), generator).isnan().all()
    for sign in (1, -1):
        infinity = torch.full((1000,), sign * torch.inf)
        assert torch.equal(stochastic_round(infinity, generator).float(), infinity)
        largest = torch.full((1000,), sign * torch.finfo(torch.float32).max)
        expected = torch.full((1000,), sign * torch.finfo(torch.bfloat16).max)
        assert torch.equal(stochastic_round(largest, generator).float(), expected)


@pytest.mark.parametrize(
    ("bits", "dtype"), [(16, torch.float32), (8, torch.float32), (16, torch.bfloat16)]
)
def test_a_run_with_compact_moments_resumes(tmp_path, bits, dtype):
    compact_adamw = load(SCRIPT).CompactAdamW
    assert_resumes(partial(compact_adamw, lr=0.01, bits=bits), tmp_path, dtype)


@pytest.mark.parametrize("bits", [16, 8])
def test_a_weight_without_a_gradient_stays(bits):
    assert_steps(partial(load(SCRIPT).CompactAdamW, lr=0.1, bits=bits))


def test_a_nan_in_a_gradient_reaches_the_weights():
    """Otherwise training goes on, and nothing tells."""
    weight = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = load(SCRIPT).CompactAdamW([weight], lr=0.1, bits=16)
    nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    weight.grad = nan.repeat(4).bfloat16()
    optimizer.step()
    assert weight.isnan().all()
