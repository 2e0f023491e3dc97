"""08_model_parallel/expert_parallel.py: experts on several ranks train as they do on one process."""

import itertools
import json
from pathlib import Path

import pytest
import torch
from support.chapter import load
from support.harness import TINY, config_of, run, with_fault

SCRIPT = "08_model_parallel/expert_parallel.py"
SHAPE = TINY | {"hidden_size": 36, "intermediate_size": 53, "num_hidden_layers": 3, "tie_word_embeddings": True}
SHAPE |= {"num_attention_heads": 6, "num_key_value_heads": 3}
STEPS, LAYERS, EXPERTS, K = 8, 3, 6, 2
FLAGS = ("--model", "tiny.json", "--device", "cpu", "--steps", STEPS, "--json", "s.json", "--experts", EXPERTS)
OWNERS = {2: [0, 0, 0, 1, 1, 1], 3: [0, 0, 1, 1, 2, 2], 4: [0, 0, 1, 1, 2, 3]}  # the rank of each expert


def start(folder: Path, nproc: int | None, *flags, script: str = SCRIPT):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(SHAPE))
    return run(script, folder, *FLAGS, *flags, nproc=nproc)


def finish(folder: Path, nproc: int | None, *flags) -> dict:
    result = start(folder, nproc, *flags)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    return json.loads((folder / "s.json").read_text())


@pytest.mark.parametrize("nproc", [2, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 4))])
def test_the_number_of_ranks_changes_nothing(once, nproc):
    """Rows that leave or arrive travel twice each. What every rank holds, two losses and a norm are all-reduced."""
    found, baseline = (once("08 experts", finish, ranks, "--capacity-factor", 0.8) for ranks in (nproc, 1))
    all_reduced = 257 * 36 + 3 + LAYERS * (2 * 36 * 36 + 2 * 18 * 36 + 2 * 36 + 6 * 36)  # q, o; k, v; norms; router
    for row, expected in zip(found["rows"], baseline["rows"], strict=True):
        for key in ("losses", "balance_losses", "gradient_norms"):
            assert row[key] == pytest.approx(expected[key], rel=1e-5)
        assert max(row["gradient_norms"]) > 1  # or clipping was not tried
        assert row["chosen"] == expected["chosen"]
        assert torch.tensor(row["kept"]).sum(0).tolist() == expected["kept"][0]
        kept = [sum(of_rank) for of_rank in row["kept"]]
        assert row["dropped_share"] == pytest.approx(1 - sum(kept) / (STEPS * LAYERS * 24 * 16 * K))
        assert (row["dropped_share"] > 0) == (row["way"] == "balance loss, capacity")
        assert row["calls"] == {"all_gathers": 3 * STEPS, "all_to_alls": 12 * STEPS, "all_reduces": STEPS}
        assert row["all_reduce_bytes"] == pytest.approx(STEPS * 4 * all_reduced * 2 * (nproc - 1) / nproc)
        sent = [0] * nproc
        for rank, (expert, owner) in itertools.product(range(nproc), enumerate(OWNERS[nproc])):
            for end in {rank, owner} if rank != owner else ():
                sent[end] += 2 * row["kept"][rank][expert] * 36 * 4
        assert row["all_to_all_bytes_of_ranks"] == sent
    assert kept[0] > kept[-1]  # of the last row: what is dropped are the last tokens of the batch


@pytest.mark.long
@pytest.mark.parametrize(("nproc", "flags"), [(2, "--top-k 1"), (3, "--experts 5 --top-k 4 --global-batch-size 3")])
def test_other_sizes(tmp_path, nproc, flags):
    finish(tmp_path, nproc, "--capacity-factor", 0.01, *flags.split())  # the script's own checks are the test


PLANTED = [  # what stands in the script, and what stands there instead
    ('if ".experts." not in name]', "]"),  # the gradients of experts are all-reduced, too
    pytest.param("counts.sum(0), self.k)", "counts[rank] * world_size, self.k)", marks=pytest.mark.long),  # a rank's f
    pytest.param("[losses, squares_of_experts, *", "[losses, *", marks=pytest.mark.long),  # a rank's norm
]


@pytest.mark.parametrize(("line", "wrong"), PLANTED)
def test_a_wrong_version_fails_its_own_check(tmp_path, line, wrong):
    result = start(tmp_path, 2, "--steps", 2, script=str(with_fault(SCRIPT, tmp_path, line, wrong)))
    assert (result.code, "from one process by" in result.err) == (1, True), result.err


@pytest.mark.long  # transformers takes its time to import
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
            theirs.experts.gate_up_proj[i] = torch.cat([expert.gate_proj.weight, expert.up_proj.weight])
            theirs.experts.down_proj[i] = expert.down_proj.weight
    torch.testing.assert_close(ours(x), theirs(x), rtol=1e-5, atol=1e-5)
    balance = mixtral.load_balancing_loss_func((theirs.gate(x)[0],), EXPERTS, K)
    torch.testing.assert_close(ours.balance_loss, balance / K)


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--experts", 1, "--experts 1 leaves some of 2 ranks without one: use at least 2"),
        ("--top-k", 7, "--top-k 7 is more than --experts 6: use at most 6"),
        ("--global-batch-size", 25, "--global-batch-size 25 does not divide over 2 ranks: use 24"),
    ],
)
def test_a_wrong_flag_is_one_line(tmp_path, flag, value, message):
    result = start(tmp_path, None, flag, value)
    assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
    assert message in result.err


def test_bare(tmp_path):
    result = run(SCRIPT, tmp_path, "--device", "cpu", "--json", "s.json", warm=False)  # it starts two ranks itself
    assert result.code == 0, result.err
    without, balanced, _ = json.loads((tmp_path / "s.json").read_text())["rows"]
    assert balanced["busiest_expert_ratio"] < without["busiest_expert_ratio"]


@pytest.mark.parametrize("n", [pytest.param(n, marks=pytest.mark.gpu(n=n)) for n in (1, 2)])
def test_on_gpus(gpus, tmp_path, n):
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(SCRIPT, tmp_path, "--device", "cuda", nproc=n, warm=False, **visible)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
