"""planner/ beside torch's own allocator, on a GPU that computes nothing.

benchmarks/allocator.py has more cases.
"""

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
EXPERTS = replace(
    shapes.SIZES["moe-30b-a3b"],
    num_hidden_layers=2,
    vocab_size=8192,
    max_position_embeddings=2048,
    experts=replace(shapes.SIZES["moe-30b-a3b"].experts, num_experts=16, num_experts_per_tok=4),
)
# Each token passes all experts: as many rows come to a rank as it sends.
EVEN = replace(
    EXPERTS,
    hidden_size=512,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    vocab_size=512,
    max_position_embeddings=256,
    experts=replace(
        EXPERTS.experts, num_experts=4, num_experts_per_tok=4, moe_intermediate_size=256
    ),
)
TRAIN = "04_amp/train.py"
FSDP = "06_fsdp_zero/train_fsdp.py"
SHARED = {"gpus": 2, "zero": 3, "ep": 2, "seq_len": 256, "micro_batch_size": 4}
SEVERAL = {"micro_batch_size": 4, "micro_batches": 2}
TRAIN_3D = "08_model_parallel/train_3d.py"
CASES = {  # script, shape, plan
    "tied": (TRAIN, GROUPED, {"micro_batch_size": 8}),
    "untied": (TRAIN, UNTIED, {"micro_batch_size": 8, "checkpointing": "full"}),
    "at the last gradient": (TRAIN, GROUPED, {"checkpointing": "full"}),
    "compiled, accumulated": (TRAIN, UNTIED, SEVERAL | {"compile": True}),
    "experts": (TRAIN, EXPERTS, {"micro_batch_size": 4}),
    "experts, checkpointing": (TRAIN, EXPERTS, {"micro_batch_size": 4, "checkpointing": "full"}),
    "experts, FSDP": (FSDP, EXPERTS, {"micro_batch_size": 4, "zero": 3}),
    "experts on two ranks": (TRAIN_3D, EVEN, SHARED | {"checkpointing": "full"}),
    "FSDP": (FSDP, UNTIED, {"micro_batch_size": 8, "checkpointing": "selective", "zero": 3}),
}


@pytest.mark.parametrize("name", CASES)
def test_a_step_allocates_what_is_predicted(name, tmp_path):
    script, config, settings = CASES[name]
    plan = Plan(**{"seq_len": 2048} | settings)
    (tmp_path / "model.json").write_text(json.dumps(shapes.config_json(config)), encoding="utf-8")
    flags = "--model model.json --dtype bf16 --steps 2 --log-every 1"
    flags += f" --seq-len {plan.seq_len} --micro-batch-size {plan.micro_batch_size}"
    flags += f" --global-batch-size {plan.dp * plan.micro_batch_size * plan.micro_batches}"
    flags += f" --checkpointing {plan.checkpointing} --keep 0 --run-dir run --device cuda"
    if plan.compile:
        flags += " --compile"
    if plan.ep > 1:
        flags += f" --ep {plan.ep}"
    ranks = plan.gpus if script != TRAIN else 0
    # Without values, a rank would not know how many rows come.
    how = "values" if plan.ep > 1 else "noop"
    result = nogpu.run(how, tmp_path, script, flags, ranks)
    assert result.code == 0, result
    steps = [
        json.loads(line)
        for line in (tmp_path / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    allocated = max(step.get("memory_active_bytes", 0) for step in steps)
    predicted = peak(from_config("own", config), plan).step_bytes()
    rough = plan.compile or config.experts is not None
    assert predicted == pytest.approx(allocated, rel=0.03 if rough else 0.01)
