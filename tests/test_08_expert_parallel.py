"""08_model_parallel/expert_parallel.py: experts on several ranks train as they do on one process."""

import json
from pathlib import Path

import pytest
import torch
from support.chapter import load
from support.harness import TINY, assert_refused, config_of, run

SCRIPT = "08_model_parallel/expert_parallel.py"
SHAPE = TINY | {
    "hidden_size": 36,
    "intermediate_size": 53,
    "num_hidden_layers": 3,
    "tie_word_embeddings": True,
}
SHAPE |= {"num_attention_heads": 6, "num_key_value_heads": 3}
STEPS, LAYERS, EXPERTS, K = 8, 3, 6, 2
FLAGS = (
    "--model",
    "tiny.json",
    "--device",
    "cpu",
    "--steps",
    STEPS,
    "--json",
    "s.json",
    "--experts",
    EXPERTS,
)


def start(folder: Path, nproc: int | None, *flags, script: str = SCRIPT):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(SHAPE))
    return run(script, folder, *FLAGS, *flags, nproc=nproc)


@pytest.mark.full  # transformers takes its time to import
def test_it_is_the_mixture_of_mixtral():
    from transformers.models.mixtral import modeling_mixtral as mixtral

    x = torch.randn(3, 7, 36)
    ours = load(SCRIPT).Mixture(config_of(SHAPE), list(range(EXPERTS)), K, None)
    config = mixtral.MixtralConfig(
        hidden_size=36, intermediate_size=53, num_local_experts=EXPERTS, num_experts_per_tok=K
    )
    theirs = mixtral.MixtralSparseMoeBlock(config)
    with torch.no_grad():
        theirs.gate.weight.copy_(ours.router.weight)
        for i, expert in enumerate(ours.experts.values()):
            theirs.experts.gate_up_proj[i] = torch.cat(
                [expert.gate_proj.weight, expert.up_proj.weight]
            )
            theirs.experts.down_proj[i] = expert.down_proj.weight
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    balance = mixtral.load_balancing_loss_func((theirs.gate(x)[0],), EXPERTS, K)
    torch.testing.assert_close(ours.balance_loss, balance / K)


REFUSED = {  # flags: words of the line
    "--experts 1": "",
    "--top-k 7": "--top-k 7 --experts 6",
    "--global-batch-size 25": "",
}


@pytest.mark.parametrize("flags", REFUSED)
def test_bad_input_is_refused_in_one_line(tmp_path, flags):
    assert_refused(start(tmp_path, None, *flags.split()), *(REFUSED[flags] or flags).split())


def test_experts_of_two_ranks_train_as_on_one_process(tmp_path):
    result = start(tmp_path, None)  # it starts two ranks itself
    assert result.code == 0, result.err[-3000:]
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["world_size"] == 2
    for row in summary["rows"]:
        assert max(row["errors"].values()) < 1e-5, row["way"]
        assert row["last_loss"] < row["losses"][0]
