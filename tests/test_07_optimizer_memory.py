"""07_memory_tricks/optimizer_memory.py: what is rounded, by how much, and that training goes on from what is kept."""

import json
from pathlib import Path

import pytest
import torch
from support.chapter import load
from support.harness import TINY, run

SCRIPT = "07_memory_tricks/optimizer_memory.py"
optimizers = load(SCRIPT)
UNEVEN = {**TINY, "hidden_size": 33, "intermediate_size": 65, "head_dim": 8, "tie_word_embeddings": True}


def weights(net: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().float().flatten() for parameter in net.parameters()])


# --- the two roundings


# --- the optimizers


# --- the script


def finish(folder: Path) -> dict:
    (folder / "uneven.json").write_text(json.dumps(UNEVEN))
    flags = ("--model", "uneven.json", "--device", "cpu", "--steps", 4, "--seq-len", 16, "--seeds", 2)
    result = run(SCRIPT, folder, *flags, "--batch-size", 4, "--lr", 1e-3, "--json", "o.json")
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    assert result.out.count("checked: ") == 3
    return json.loads((folder / "o.json").read_text())


def test_bytes_and_losses(once):
    summary = once("07 optimizer memory", finish)
    rows = {row["recipe"]: row for row in summary["rows"]}
    per_parameter = {name: row["bytes_per_parameter"] for name, row in rows.items()}
    assert per_parameter["AdamW"] == per_parameter["bf16 weights, fp32 master"] == 16
    assert per_parameter["moments in bf16"] == per_parameter["step inside backward"] == 12
    assert per_parameter["bf16 weights"] == per_parameter["bf16 weights, stochastic rounding"] == 8
    assert 10.03 < per_parameter["moments in 8 bits"] < 10.5
    assert 8 < per_parameter["Adafactor"] < 8.5
    for row in rows.values():
        assert [len(losses) for losses in row["losses"]] == [4, 4]
        assert row["last_loss"] < row["first_loss"]
    assert all(first != second for first, second in (row["losses"] for row in rows.values()))
    adamw = rows["AdamW"]["losses"]
    spread = abs(adamw[0][2] - adamw[1][2])
    bf16 = rows["bf16 weights"]
    assert bf16["largest_distance"] > 0
    if bf16["largest_distance_step"] == 3:
        assert bf16["spread_over_seeds_there"] == pytest.approx(spread)


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--batch-size", "999999999"), ("--steps", "0"), ("--lr", "-1"), ("--model", "nope"), ("--device", "x")],
)
def test_a_wrong_flag_is_one_line(tmp_path, flag, value):
    result = run(SCRIPT, tmp_path, flag, value)
    assert result.code == 2
    assert flag in result.err
    assert result.err.count("\n") == 1
