"""What planner/ predicts beside what torch's own allocator counts, on a GPU that computes nothing. The whole table:
benchmarks/allocator.py."""

import json
from dataclasses import replace

import pytest
from support import nogpu

from lm import shapes
from planner.memory import peak
from planner.plan import Plan
from planner.shape import from_config

pytestmark = [pytest.mark.nogpu, pytest.mark.timeout(600), pytest.mark.usefixtures("nogpu_tool")]

GROUPED = replace(shapes.SIZES["llama-1b"], num_hidden_layers=2, vocab_size=8192)  # tied
UNTIED = replace(
    shapes.SIZES["llama-124m"],
    num_hidden_layers=4,
    tie_word_embeddings=False,
    max_position_embeddings=2048,
)
CASES = {  # script: shape, what it does, ranks
    "04_amp/train.py": (GROUPED, {"micro_batch_size": 8, "checkpointing": "none"}, 0),
    "04_amp/train.py untied": (UNTIED, {"micro_batch_size": 8, "checkpointing": "full"}, 0),
    "04_amp/train.py at the last gradient": (
        GROUPED,
        {"micro_batch_size": 1, "checkpointing": "full"},
        0,
    ),
    "06_fsdp_zero/train_fsdp.py": (
        UNTIED,
        {"micro_batch_size": 8, "checkpointing": "selective", "zero": 3},
        1,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_allocates_what_is_predicted(name, tmp_path):
    config, how, ranks = CASES[name]
    batch, checkpointing = how["micro_batch_size"], how["checkpointing"]
    (tmp_path / "model.json").write_text(json.dumps(shapes.config_json(config)))
    flags = f"--model model.json --dtype bf16 --seq-len 2048 --global-batch-size {batch} --steps 2 --log-every 1"
    flags += f" --checkpointing {checkpointing} --keep 0 --run-dir run --device cuda"
    result = nogpu.run("noop", tmp_path, name.split()[0], flags, ranks)
    assert result.code == 0, result
    steps = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    allocated = max(step.get("memory_active_bytes", 0) for step in steps)
    predicted = peak(from_config("own", config), Plan(seq_len=2048, **how)).step_bytes()
    assert predicted == pytest.approx(allocated, rel=0.01)
