"""08_model_parallel/expert_parallel.py: experts on several ranks train as they do on one process."""

import copy
import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.chapter import load
from support.harness import ROOT, TINY, config_of, run, with_fault

SCRIPT = "08_model_parallel/expert_parallel.py"
script = load(SCRIPT)
proof = load("08_model_parallel/_expert_parallel_proof.py")
report = load("08_model_parallel/_expert_parallel_report.py")
CPU = torch.device("cpu")
SHAPE = {  # sizes without a common factor, an odd number of layers, and an MLP that two experts do not divide
    **TINY,
    "hidden_size": 36,
    "intermediate_size": 53,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
EXPERTS, K = 6, 2
TOKENS = 24 * 16  # of a step
CHOICES = TOKENS * K * 3
FLAGS = ("--model", "tiny.json", "--device", "cpu", "--global-batch-size", 24, "--steps", 2, "--json", "s.json")
SIZES = ("--experts", EXPERTS, "--capacity-factor", 0.8, "--clip-norm", 0.5)


def start(folder: Path, nproc: int | None, *flags, script: str = SCRIPT):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(SHAPE))
    return run(script, folder, *FLAGS, *SIZES, *flags, nproc=nproc)


def finish(folder: Path, nproc: int, *flags) -> dict:
    result = start(folder, nproc, "--micro-batch-size", 12 // nproc, *flags)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    assert result.out.count("checked: ") == 3
    return json.loads((folder / "s.json").read_text())


def finished(once, nproc: int, *flags) -> dict:
    return once("08 experts", finish, nproc, *flags)


def chosen_by_expert(proof_of_run: dict) -> list:
    """Over all ranks: how many choices each expert takes, in each forward of each step."""
    return [[torch.tensor(kept).sum(0).tolist() for kept in step] for step in proof_of_run["kept"]]


RANKS = [1, 2, *(pytest.param(n, marks=pytest.mark.long) for n in (3, 4))]  # 4 ranks do not divide 6 experts


@pytest.mark.parametrize("nproc", RANKS)
def test_the_number_of_ranks_changes_nothing(once, nproc):
    """Losses, norms, what each expert takes and what is dropped: those of one rank, and of one process."""
    summary = finished(once, nproc)
    baseline = finished(once, 1)
    assert summary["world_size"] == nproc
    for found, of_one_rank in zip(summary["proofs"], baseline["proofs"], strict=True):
        assert len(found["losses"]) == 10
        expected = torch.tensor(of_one_rank["expected_losses"])
        torch.testing.assert_close(torch.tensor(found["losses"]), expected, rtol=1e-5, atol=0)
        torch.testing.assert_close(
            torch.tensor(found["norms"]), torch.tensor(of_one_rank["expected_norms"]), rtol=1e-5, atol=0
        )
        assert found["gradient_relative_difference"] <= 1e-5
        assert min(found["norms"]) > 0.5  # every step is clipped
        assert chosen_by_expert(found) == chosen_by_expert(of_one_rank)
        assert sum(found["dropped_by_rank"]) == sum(of_one_rank["dropped_by_rank"])
        assert found["losses"][-1][0] < found["losses"][0][0]
    dropless, limited = summary["proofs"]
    assert sum(dropless["dropped_by_rank"]) == 0
    capacity = 52  # 0.8 · 12 sequences · 16 tokens · 2 / 6 experts, rounded up
    assert max(max(kept) for step in chosen_by_expert(limited) for kept in step) == capacity
    kept = sum(sum(map(sum, step)) for step in chosen_by_expert(limited))
    assert sum(limited["dropped_by_rank"]) == 10 * CHOICES - kept > 0
    for one, other in zip(summary["trainings"], baseline["trainings"], strict=True):
        assert one["cross_entropies"][0] == pytest.approx(other["cross_entropies"][0], rel=1e-5)
        assert one["first_shares"] == other["first_shares"]


@pytest.mark.parametrize("nproc", RANKS)
def test_calls_and_bytes(once, nproc):
    """Four all-to-alls for each layer and micro-batch, and the rows that leave or arrive twice each."""
    held = {1: [6], 2: [3, 3], 3: [2, 2, 2], 4: [2, 2, 1, 1]}[nproc]
    shared_parameters = 2 + 3 * 7  # embedding and norm; a block has 4 matrices, 2 norms and a router
    block = 2 * 36 * 36 + 2 * 18 * 36 + 2 * 36 + 6 * 36  # numbers of q and o, of k and v, of the norms and the router
    shared_numbers = TINY["vocab_size"] * 36 + 36 + 3 * block
    for found in finished(once, nproc)["proofs"]:
        assert found["held"] == held
        calls = {
            "all_to_alls": 10 * 2 * 3 * 4,
            "all_gathers": 10 * 2 * 3,
            "all_gather_bytes": 10 * 2 * 3 * 6 * 8,
            "all_reduces": 10 * (shared_parameters + 2),
            "all_reduce_bytes": 10 * (shared_numbers + 2 + 1) * 4,
        }
        assert found["calls_per_rank"] == [calls] * nproc
        rows = torch.zeros(nproc, nproc, dtype=torch.int64)  # [rank of the token, rank of the expert]
        for step in found["kept"]:
            for kept in step:
                for column, experts in enumerate(torch.tensor(kept).split(held, dim=1)):
                    rows[:, column] += experts.sum(1)
        rows.fill_diagonal_(0)
        expected = [2 * (rows[r].sum() + rows[:, r].sum()).item() * 36 * 4 for r in range(nproc)]
        assert found["all_to_all_bytes_per_rank"] == expected
        assert (sum(expected) > 0) == (nproc > 1)


def test_forced_routers_fill_the_ranks_as_they_must(once):
    rows = {row["routing"]: row for row in finished(once, 3)["routings"]}
    assert rows["even"]["rows_by_rank"] == [CHOICES // 3] * 3
    assert rows["skewed"]["rows_by_rank"] == [CHOICES, 0, 0]
    assert rows["skewed"]["all_to_all_bytes_per_rank"] == [
        2 * CHOICES * 2 // 3 * 36 * 4,
        *[2 * CHOICES // 3 * 36 * 4] * 2,
    ]
    limited = rows["skewed, capacity factor 1"]
    assert limited["rows_by_rank"] == [CHOICES // 3, 0, 0]  # two of six experts are full
    assert limited["dropped"] == CHOICES * 2 // 3
    assert sum(rows["the router's own"]["rows_by_rank"]) == CHOICES
    assert all(row["step_seconds"]["n"] == 5 for row in rows.values())
    alone = {row["routing"]: row for row in finished(once, 4)["routings"]}
    assert alone["even"]["rows_by_rank"] == [CHOICES // 3, CHOICES // 3, CHOICES // 6, CHOICES // 6]


def test_the_balance_loss_of_parts_is_larger(once):
    rows = finished(once, 2)["balance"]
    assert [row["parts"] for row in rows] == [1, 2, 4, 8, 16]
    losses = [row["balance_loss"] for row in rows]
    assert losses == sorted(losses)
    assert rows[0]["gradient_relative_difference"] == 0
    assert rows[1]["gradient_relative_difference"] > 0.01
    assert rows == finished(once, 1)["balance"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("nproc", "flags"),
    [
        (2, ("--top-k", 1)),
        (3, ("--top-k", 3, "--micro-batch-size", 8)),
        (3, ("--seed", 1, "--capacity-factor", 0.01)),
        (2, ("--experts", 2, "--micro-batch-size", 2, "--clip-norm", "inf")),
        (2, ("--experts", 7)),
        (3, ("--experts", 5, "--micro-batch-size", 4)),
        (8, ("--experts", 9, "--micro-batch-size", 3)),
        (4, ("--experts", 5, "--top-k", 5, "--seq-len", 3, "--seed", 6, "--capacity-factor", 0.01)),
    ],
)
def test_other_sizes(tmp_path, nproc, flags):
    """The script's own checks are the test: one expert per token, one micro-batch, hardly any room, no clipping, odd
    numbers of experts, texts so short that some gradients are nearly zero."""
    result = start(tmp_path, nproc, *flags)
    assert result.code == 0, f"{result.out[-2000:]}\n{result.err[-4000:]}"
    assert result.out.count("checked: ") == 3


PLANTED = {  # a fault, and the first proof that it breaks
    "a rank's own share in the balance loss": (
        "share_of_choices = chosen.sum(0) / chosen.sum()",
        "share_of_choices = chosen[dist.get_rank()] / chosen[dist.get_rank()].sum()",
        "dropless",
    ),
    "the first tokens are dropped, not the last": (
        "rows = torch.cat([group[:kept] for",
        "rows = torch.cat([group[len(group) - kept :] for",
        "capacity factor 0.8",
    ),
    "a capacity for each rank": (
        "        of_ranks_before = chosen.cumsum(0) - chosen",
        "        of_ranks_before = torch.zeros_like(chosen) + capacity // 2",
        "capacity factor 0.8",
    ),
    "the norm lacks the experts of the other ranks": (
        "    all_reduce(squares_of_experts)\n",
        "    all_reduce(squares_of_experts.clone())\n",
        "dropless",
    ),
    "gradients of experts are averaged too": (
        "        all_reduce(parameter.grad)\n",
        "        all_reduce(parameter.grad)\n    for parameter in experts:\n        parameter.grad /= 2\n",
        "dropless",
    ),
    "outputs go back in the wrong order": (
        "output.split([len(part) for part in of_all_ranks])",
        "output.flip(0).split([len(part) for part in of_all_ranks])",
        "dropless",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("fault", PLANTED)
def test_a_wrong_version_fails_its_own_check(tmp_path, fault):
    line, wrong, broken_proof = PLANTED[fault]
    result = start(tmp_path, 2, script=str(with_fault(SCRIPT, tmp_path, line, wrong)))
    assert result.code == 1
    told = next(line for line in result.err.splitlines() if "AssertionError: " in line)
    assert f"AssertionError: {broken_proof}" in told
    assert "one process" in told


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda found: found["kept"][3][0][0].reverse(), "dropless, step 4: the experts took other tokens"),
        (lambda found: found["calls_per_rank"][1].update(all_to_alls=239), "'all_to_alls': 239"),
        (lambda found: found["calls_per_rank"][2].update(all_reduce_bytes=4), "'all_reduce_bytes': 4}"),
        (lambda found: found["all_to_all_bytes_per_rank"].reverse(), "the ranks sent"),
        (lambda found: found["losses"][5].reverse(), "losses differ from one process"),
        (lambda found: found["norms"].reverse(), "gradient norms differ"),
        (lambda found: found.update(gradient_relative_difference=float("nan")), "gradients differ .* by nan"),
        (lambda found: found.update(gradient_relative_difference=2e-5), "gradients differ .* by 2e-05"),
    ],
)
def test_a_claim_that_does_not_hold_fails(once, spoil, message):
    found = copy.deepcopy(finished(once, 3)["proofs"][0])
    report.check_proof(found)
    spoil(found)
    with pytest.raises(AssertionError, match=message):
        report.check_proof(found)


def test_a_choice_that_is_lost_fails(once):
    routings = copy.deepcopy(finished(once, 4)["routings"])
    report.check_routings(routings, CHOICES, [2, 2, 1, 1], K)
    routings[0]["rows_by_rank"][0] -= 1
    with pytest.raises(AssertionError, match=r"the router's own: .* and must be"):
        report.check_routings(routings, CHOICES, [2, 2, 1, 1], K)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def mixture(kind: type, k: int = K, capacity_factor: float | None = None, experts: int = EXPERTS):
    net = kind(config_of(SHAPE), experts, k, capacity_factor)
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(net.named_parameters()):
        torch.nn.init.normal_(parameter, std=0.3, generator=generator)
    return net


def text(sequences: int = 3, length: int = 7) -> torch.Tensor:
    return torch.randn(sequences, length, 36, generator=torch.Generator().manual_seed(1))


@pytest.mark.long  # transformers takes its time to import
@pytest.mark.parametrize("kind", [script.Mixture, proof.LocalMixture])
def test_it_is_the_mixture_of_transformers(group, kind):
    """Outputs, gradients and balance loss of Mixtral, whose balance loss is k times ours."""
    from transformers import MixtralConfig
    from transformers.models.mixtral import modeling_mixtral as mixtral

    net = mixture(kind)
    config = MixtralConfig(hidden_size=36, intermediate_size=53, num_local_experts=EXPERTS, num_experts_per_tok=K)
    config._experts_implementation = "eager"
    theirs = mixtral.MixtralSparseMoeBlock(config)
    with torch.no_grad():
        theirs.gate.weight.copy_(net.router.weight)
        for i, expert in enumerate(net.experts.values()):
            theirs.experts.gate_up_proj[i] = torch.cat([expert.gate_proj.weight, expert.up_proj.weight])
            theirs.experts.down_proj[i] = expert.down_proj.weight
    x, y = text().requires_grad_(), text().requires_grad_()
    ours, expected = net(x), theirs(y)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)
    logits = theirs.gate(y)[0]
    balance = mixtral.load_balancing_loss_func((logits,), EXPERTS, K)
    torch.testing.assert_close(net.balance_loss, balance / K)
    (ours.square().sum() + net.balance_loss).backward()
    (expected.square().sum() + balance / K).backward()
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(net.router.weight.grad, theirs.gate.weight.grad, rtol=1e-4, atol=1e-4)
    for i, expert in enumerate(net.experts.values()):
        torch.testing.assert_close(expert.down_proj.weight.grad, theirs.experts.down_proj.grad[i], rtol=1e-4, atol=1e-4)


def test_over_capacity_the_last_tokens_are_dropped(group):
    """All tokens choose expert 0, which takes the first; the others get nothing but the residual connection."""
    net = mixture(script.Mixture, k=1, capacity_factor=1.0, experts=3)
    net.choose = lambda probabilities, k: torch.zeros(len(probabilities), k, dtype=torch.int64)
    output = net(text()).flatten(0, 1)
    assert net.chosen.tolist() == [[21, 0, 0]]
    assert net.kept.tolist() == [[7, 0, 0]]
    assert output[:7].abs().sum(1).min() > 0
    assert not output[7:].any()
    output.sum().backward()
    assert not net.experts["1"].down_proj.weight.grad.any()  # zero, and there


def test_capacity_is_shared_out_in_the_order_of_the_ranks(group):
    net = mixture(script.Mixture, capacity_factor=1.0, experts=3)
    chosen = torch.tensor([[4, 1, 1], [3, 2, 1], [4, 1, 1]])
    assert net.up_to_capacity(chosen).tolist() == [[4, 1, 1], [2, 2, 1], [0, 1, 1]]


def test_a_single_choice_keeps_its_probability(group):
    """Normalised it would be 1 whatever the router says, and the router would have no gradient."""
    net = mixture(script.Mixture, k=1)
    net(text()).square().sum().backward()
    assert net.router.weight.grad.abs().max() > 1e-3


def test_parts_that_each_use_experts_of_their_own_look_uneven_alone(group):
    """The whole batch is even: 1. In each half only two of four experts are used: 2."""
    choices = torch.tensor([[0, 1]] * 4 + [[2, 3]] * 4)
    probabilities = torch.zeros(8, 4).scatter_(1, choices, 0.5)
    assert proof.balance_of_parts(probabilities, choices, 1).item() == 1
    assert proof.balance_of_parts(probabilities, choices, 2).item() == 2
    chosen = torch.tensor([[4, 4, 0, 0], [0, 0, 4, 4]])  # of two ranks
    halves = [script.balance_loss(part, chosen, 2).item() for part in probabilities.chunk(2)]
    assert halves == [0.5, 0.5]


def test_experts_are_spread_and_drawn_by_their_number(group):
    assert [script.experts_per_rank(8, ranks) for ranks in (1, 3, 5, 8)] == [[8], [3, 3, 2], [2, 2, 2, 1, 1], [1] * 8]
    make = {
        kind: script.partial(kind, experts=4, k=2, capacity_factor=None)
        for kind in (script.Mixture, proof.LocalMixture)
    }
    nets = [script.build(config_of(SHAPE), one, 2, seed=3, device=CPU) for one in make.values()]
    ours, theirs = (dict(net.named_parameters()) for net in nets)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(parameter, theirs[name]) for name, parameter in ours.items())
    experts = [ours[f"model.layers.1.mlp.experts.{i}.up_proj.weight"] for i in range(4)]
    assert experts[0].shape == (26, 36)  # half of 53, rounded down
    assert not torch.equal(experts[0], experts[1])
    assert nets[0].lm_head.weight is nets[0].model.embed_tokens.weight


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--experts", 1), "--experts 1 leaves some of 2 ranks without one: use at least 2"),
        (("--top-k", 7), "--top-k 7 is more than --experts 6: use at most 6"),
        (("--experts", 60, "--top-k", 54), "--top-k 54 is more than the MLP is wide, 53: use at most 53"),
        (("--capacity-factor", 7), "--capacity-factor 7 is more than --experts 6"),
        (("--capacity-factor", "inf"), "--capacity-factor: 'inf' is not a number above 0"),
        (("--capacity-factor", 0), "--capacity-factor: '0' is not a number above 0"),
        (("--global-batch-size", 25), "--global-batch-size 25 does not divide over 2 process(es): use 24 or 26"),
        (
            ("--micro-batch-size", 5),
            "--global-batch-size 24 does not divide over 2 process(es) with --micro-batch-size 5",
        ),
        (("--seq-len", 129), "--seq-len 129 is over the limit"),
        (("--model", "giant"), "--model giant: no such size"),
    ],
)
def test_what_does_not_fit_is_one_line(tmp_path, flags, told):
    result = start(tmp_path, None, *flags)
    assert result.code == 2
    assert told in result.err
    assert len(result.err.splitlines()) == 1
    assert result.out == ""


def test_more_ranks_than_experts_is_one_line_of_rank_0(tmp_path):
    result = start(tmp_path, 3, "--experts", 2)
    assert result.code == 1  # torchrun's own
    assert "exitcode  : 2" in result.err
    assert result.err.count("--experts 2 leaves some of 3 ranks without one: use at least 3") == 1
    assert result.out == ""


def test_the_mixture_is_the_first_thing_after_the_imports():
    source = (ROOT / SCRIPT).read_text()
    after_imports = source.split("from old import", 1)[1].splitlines()[1:81]
    defined = [line.split("(")[0] for line in after_imports if line.startswith(("def ", "class "))]
    assert defined == ["def top_k_experts", "class Exchange", "class Mixture"]
    assert any("def run_experts" in line for line in after_imports)
    assert len(source.splitlines()) <= 250


@pytest.mark.long
def test_bare(tmp_path):
    """It starts two ranks itself. With the balance loss the routers stay more even."""
    result = run(SCRIPT, tmp_path, "--json", "s.json", warm=False)
    assert result.code == 0, result.err
    summary = json.loads((tmp_path / "s.json").read_text())
    assert summary["world_size"] == 2
    assert summary["experts"] == 8
    largest = [max(max(shares) for shares in training["last_shares"]) for training in summary["trainings"]]
    assert largest[1] < largest[0]
    assert summary["last_loss"] < summary["first_loss"]


@pytest.mark.gpu
def test_on_one_gpu(gpus, tmp_path):
    """The script's own checks are the test."""
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    flags = ("--device", "cuda", "--json", "s.json")
    result = run(SCRIPT, tmp_path, *flags, nproc=1, warm=False, **visible)
    assert result.code == 0, result.err


@pytest.mark.gpu(n=2)
def test_over_nccl(gpus, tmp_path):
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    flags = ("--device", "cuda", "--json", "s.json")
    result = run(SCRIPT, tmp_path, *flags, nproc=2, warm=False, **visible)
    assert result.code == 0, result.err
    assert json.loads((tmp_path / "s.json").read_text())["world_size"] == 2
