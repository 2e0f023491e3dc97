"""08_model_parallel/expert_parallel.py: experts on several ranks train as on one process."""

import json
from pathlib import Path

import pytest
import torch
from support.chapter import load
from support.harness import TINY, assert_refused, config_of, in_long, run

SCRIPT = "08_model_parallel/expert_parallel.py"
SHAPE = {
    **TINY,
    "hidden_size": 36,
    "intermediate_size": 53,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
EXPERTS = 6
K = 2
FLAGS = (
    *("--model", "tiny.json"),
    *("--device", "cpu"),
    *("--steps", 8),
    *("--json", "s.json"),
    *("--experts", EXPERTS),
)


def start(folder: Path, nproc: int | None, *flags, script: str = SCRIPT):
    """Run the script on a tiny model."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    return run(script, folder, *FLAGS, *flags, nproc=nproc)


@pytest.mark.full  # transformers takes its time to import
def test_it_is_the_mixture_of_mixtral():
    from transformers.models.mixtral import modeling_mixtral as mixtral

    x = torch.randn(3, 7, 36)
    ours = load(SCRIPT).Mixture(config_of(SHAPE), EXPERTS, K, None)
    config = mixtral.MixtralConfig(
        hidden_size=36, intermediate_size=53, num_local_experts=EXPERTS, num_experts_per_tok=K
    )
    theirs = mixtral.MixtralSparseMoeBlock(config)
    with torch.no_grad():
        for weight in ours.parameters():
            weight.normal_(0, 0.2)
        theirs.gate.weight.copy_(ours.router.weight)
        gate_up = torch.cat([ours.experts.gate_proj, ours.experts.up_proj], dim=1)
        theirs.experts.gate_up_proj.copy_(gate_up)
        theirs.experts.down_proj.copy_(ours.experts.down_proj)
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    balance = mixtral.load_balancing_loss_func((theirs.gate(x)[0],), EXPERTS, K)
    torch.testing.assert_close(ours.balance_loss, balance / K)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_router_of_a_bf16_model_computes_in_fp32(autocast):
    torch.manual_seed(0)
    mixture = load(SCRIPT).Mixture(config_of(SHAPE), 64, 4, None)
    x = torch.randn(2, 500, 36)
    with torch.no_grad():
        for weight in mixture.parameters():
            weight.normal_(0, 0.2)
    if not autocast:
        mixture.to(torch.bfloat16)
        x = x.bfloat16()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        output = mixture(x)
    exact = x.flatten(0, 1).double() @ mixture.router.weight.double().T
    probabilities = mixture.routing.probabilities
    assert probabilities.dtype == torch.float32
    torch.testing.assert_close(probabilities.double(), exact.softmax(-1), rtol=1e-5, atol=1e-7)
    assert torch.equal(mixture.routing.choices.sort().values, exact.topk(4).indices.sort().values)
    assert output.dtype == x.dtype


REFUSED = {  # flags: words of the line
    "--experts 1": "",
    "--top-k 7": "--top-k 7 --experts 6",
    "--global-batch-size 25": "",
}


def test_bad_input_is_refused_in_one_line(tmp_path):
    for flags, words in REFUSED.items():
        assert_refused(start(tmp_path, None, *flags.split()), *(words or flags).split())


@pytest.mark.parametrize(
    "nproc",
    [
        pytest.param(None, id="2-ranks"),  # it starts two ranks itself
        in_long(4, id="7-experts-on-4-ranks"),
    ],
)
def test_experts_of_several_ranks_train_as_on_one_process(tmp_path, nproc):
    flags = () if nproc is None else ("--experts", 7)  # 2, 2, 2 and 1
    result = start(tmp_path, nproc, *flags)
    assert result.code == 0, result.err[-3000:]
    summary = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))
    assert summary["world_size"] == (nproc or 2)
    for row in summary["rows"]:
        assert max(row["errors"].values()) < 1e-5, row["variant"]
        assert max(row["torch_errors"].values()) < 1e-5, row["variant"]
        assert row["last_loss"] < row["losses"][0]
    few, many = summary["bf16_rows"]
    assert few["fp32_share"] == many["fp32_share"] == 0
    assert 0 < few["bf16_share"] < many["bf16_share"]
