"""07_memory_tricks/optimizer_memory.py: what each recipe keeps of a parameter, and that all of them train."""

import json

import pytest
from support.harness import TINY, assert_refused, run

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


@pytest.mark.parametrize("flags", ["--steps 0", "--lr -1", "--model nope", "--device x"])
def test_bad_input_is_refused_in_one_line(tmp_path, flags):
    assert_refused(run(SCRIPT, tmp_path, *flags.split()), *flags.split())
