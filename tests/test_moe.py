"""Mixtures of experts: the model and its folders against transformers, and training on N ranks."""

import json
import math
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from support.checkpoints import assert_near, assert_same_first_gradients, moments, saved
from support.harness import (
    BASELINE,
    Result,
    assert_refused,
    drop_after,
    in_full,
    in_long,
    run,
    train,
    with_prelude,
)

from common.exits import UserError
from lm import moe, shapes, weights
from lm.balance import Balance
from training.batches import PADDING, Batches

SMALL = {
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "num_experts_per_tok": 2,
}
QWEN = {"model_type": "qwen3_moe", **SMALL, "head_dim": 16, "moe_intermediate_size": 24}
FOLDERS = {
    "qwen": {**QWEN, "num_experts": 8, "norm_topk_prob": True, "mlp_only_layers": [1]},
    "qwen, tied": {
        **QWEN,
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "decoder_sparse_step": 2,
        "tie_word_embeddings": True,
    },
    "mixtral": {"model_type": "mixtral", **SMALL, "num_local_experts": 8},
}


def hugging_face(content: dict):
    """A model of transformers with random weights, also in its norms."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**content))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0 if parameter.ndim > 1 else 1, 0.2)
    return model


def error(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return ((ours - theirs).norm() / theirs.norm()).item()


@pytest.mark.parametrize("name", FOLDERS)
def test_logits_gradients_and_balance_loss_are_those_of_transformers(tmp_path, name):
    """From the names of the hub, which transformers writes by default, and from its own stacks.

    The second row of a batch ends with padding.
    """
    model = hugging_face(FOLDERS[name])
    for padding, layout in ((0, {}), (5, {"save_original_format": False})):
        ids = torch.randint(0, 256, (2, 17), generator=torch.Generator().manual_seed(1))
        mask = torch.zeros(2, 16, dtype=torch.bool)
        mask[1, 16 - padding :] = True
        inputs = ids[:, :-1]
        targets = ids[:, 1:].masked_fill(mask, PADDING)
        model.zero_grad()
        expected = model(inputs, attention_mask=(~mask).long(), output_router_logits=True)
        ce = F.cross_entropy(expected.logits.flatten(0, 1), targets.flatten())
        (ce + 0.1 * expected.aux_loss).backward()

        folder = tmp_path / f"{padding}"
        model.save_pretrained(folder, **layout)
        config = weights.read_config(str(folder), experts=True)
        net = weights.build(str(folder), config, seed=0)
        logits = net(inputs, padding_mask=mask)
        assert error(logits[~mask], expected.logits[~mask]) < 1e-5
        assert shapes.parameter_count(config) == sum(p.numel() for p in model.parameters())
        assert shapes.parse_config(shapes.config_json(config), "written") == config

        batches = Batches.__new__(Batches)
        Balance(net, batches, torch.device("cpu"), weight=0.1, bias_rate=0)
        loss = net(inputs, targets, padding_mask=mask)
        assert loss.item() == pytest.approx((ce + 0.1 * expected.aux_loss).item(), rel=1e-5)
        loss.backward()
        gradients = {name: p.grad for name, p in net.named_parameters()}
        for layer, block in enumerate(model.model.layers):
            if not hasattr(block.mlp, "experts"):
                continue
            prefix = f"model.layers.{layer}.mlp"
            gate, up = block.mlp.experts.gate_up_proj.grad.chunk(2, dim=1)
            stacks = {"gate_proj": gate, "up_proj": up}
            stacks["down_proj"] = block.mlp.experts.down_proj.grad
            for stack, gradient in stacks.items():
                assert error(gradients[f"{prefix}.experts.{stack}"], gradient) < 1e-5
            router = gradients[f"{prefix}.gate.weight"]
            assert error(router, block.mlp.gate.weight.grad) < 1e-5


def test_grouped_matmuls_equal_the_loop():
    """Also for an expert without rows, which gets a gradient of 0 and not None."""
    torch.manual_seed(0)
    counts = torch.tensor([5, 0, 11, 1])
    found = []
    for dtype in (torch.bfloat16, torch.float32):
        rows = torch.randn(17, 16, generator=torch.Generator().manual_seed(1)).bfloat16()
        stack = torch.randn(4, 24, 16, generator=torch.Generator().manual_seed(2)).bfloat16()
        stack = stack.to(dtype).requires_grad_()
        result = moe.multiply(rows.to(dtype), stack, counts)
        (result.float() ** 2).sum().backward()
        assert stack.grad[1].eq(0).all()
        found.append((result.float(), stack.grad.float()))
    for grouped, loop in zip(*found, strict=True):
        assert error(grouped, loop) < 0.01  # bf16 has 8 bits


def test_padding_leaves_bf16_training_as_it_is():
    """Its rows of a grouped matmul are uninitialized memory, often NaN."""
    torch.manual_seed(0)
    c = shapes.parse_config({**FOLDERS["qwen"], "moe_intermediate_size": 32}, "model")
    mixture = moe.Mixture(32, c.experts).bfloat16()
    for weight in mixture.parameters():
        torch.nn.init.normal_(weight, 0, 0.2)
    x = torch.randn(1, 40, 32).bfloat16()
    padding = torch.arange(40).unsqueeze(0) >= 25
    found = []
    for tokens, mask in ((x[:, :25], None), (x, padding)):
        nan = torch.full((80, 32), torch.nan).bfloat16()
        del nan  # the next tensors take this memory
        tokens = tokens.clone().requires_grad_()
        y, load = mixture(tokens, mask)
        grads = torch.autograd.grad((y.float() ** 2).sum(), (tokens, *mixture.parameters()))
        found.append((y[:, :25], *load, grads[0][:, :25], *grads[1:]))
    for without, padded in zip(*found, strict=True):
        torch.testing.assert_close(padded, without)
    assert y[:, 25:].eq(0).all()
    assert grads[0][:, 25:].eq(0).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9"),
        ({"router_jitter_noise": 0.1}, "router_jitter_noise"),
        ({"mlp_only_layers": 1}, "mlp_only_layers"),
        ({"num_experts": "8"}, "num_experts"),
    ],
)
def test_what_is_not_computed_is_refused(change, words):
    with pytest.raises(UserError, match=words):
        shapes.parse_config({**FOLDERS["qwen"], **change}, "model")


# --- training


def write_skewed(folder: Path) -> str:
    """A model whose tokens nearly all choose experts 0 and 1 of layer 0, and none 6 or 7."""
    hugging_face(FOLDERS["qwen"]).save_pretrained(folder / "skewed")
    file = folder / "skewed/model.safetensors"
    tensors = load_file(file)
    tensors["model.embed_tokens.weight"][:, 0] = 4.0  # a number that all tokens share
    router = tensors["model.layers.0.mlp.gate.weight"]
    tensors["model.layers.0.post_attention_layernorm.weight"][0] = 1.0
    router[:, 0] = 0.0
    router[:2, 0] = 1.5
    router[6:, 0] = -3.0
    save_file(tensors, file, metadata={"format": "pt"})
    return str(folder / "skewed")


MESH = "08_model_parallel/train_3d.py"
BALANCED = ("--balance-loss", 0.1, "--balance-bias", 0.001)
STEPS = ("--steps", 4, "--warmup-steps", 1, "--save-every", 1, "--keep", 10, "--lr", 1e-3)


@pytest.fixture(scope="module")
def runs(once):
    """runs(script, n, micro): its run on n processes with micro-batches of that size."""

    def start(folder: Path, script: str, n: int | None, micro: int, *flags) -> Result:
        skewed = once("skewed", write_skewed)
        flags = ("--model", skewed, *STEPS, *BALANCED, "--micro-batch-size", micro, *flags)
        return train(script, folder, *flags, nproc=n)

    return partial(once, "moe", start)


@pytest.mark.parametrize(
    ("script", "n", "micro", "flags"),
    [
        ("05_ddp/train.py", 3, 2, ()),
        ("06_fsdp_zero/train_fsdp.py", 2, 3, ("--checkpointing", "selective")),
        in_full("06_fsdp_zero/train_fsdp.py", 4, 1, ()),
        in_full("06_fsdp_zero/train_fsdp.py", 2, 6, ("--checkpointing", "full")),
        in_full("05_ddp/train.py", 2, 6, ()),
    ],
)
def test_training_equals_one_process(runs, script, n, micro, flags):
    """Losses, norms, gradients and the tokens of each expert, with balance loss and bias."""
    assert_trained_as_one_process(runs(script, n, micro, *flags), runs)


def assert_trained_as_one_process(result: Result, runs) -> None:
    baseline = runs("04_amp/train.py", None, 12)
    for column in ("loss", "grad_norm", "balance_loss", "val_loss"):
        assert result.column(column) == pytest.approx(baseline.column(column), rel=1e-5), column
    assert result.column("expert_tokens") == baseline.column("expert_tokens")
    assert_same_first_gradients(result.folder, baseline.folder)
    first, _ = baseline.column("expert_tokens")[0]  # the layers with experts
    tokens = 12 * 32
    assert sum(first) == 2 * tokens
    assert first[0] + first[1] > 0.9 * sum(first)
    assert first[6:] == [0, 0]
    assert moments(result.folder, 1)["model.layers.0.mlp.experts.up_proj"][7].eq(0).all()


def test_a_run_resumes_with_its_biases_on_other_ranks(runs, tmp_path):
    """And the flags that balance the experts are those of the run."""
    baseline = runs("04_amp/train.py", None, 12)
    skewed = str(Path(baseline.argv[baseline.argv.index("--model", 4) + 1]))
    first = train(
        "06_fsdp_zero/train_fsdp.py", tmp_path, "--model", skewed, *STEPS, *BALANCED, nproc=2
    )
    drop_after(tmp_path, 2)
    flags = ("--model", skewed, *STEPS, "--resume")
    resumed = train("06_fsdp_zero/train_fsdp.py", tmp_path, *flags, nproc=3)
    assert resumed.column("loss")[-2:] == pytest.approx(first.column("loss")[-2:], rel=1e-5)
    assert resumed.column("expert_tokens")[-2:] == baseline.column("expert_tokens")[-2:]
    other = ("--balance-loss", 0.2)
    refused = train("06_fsdp_zero/train_fsdp.py", tmp_path, *flags, *other, nproc=2, code=1)
    assert_refused(refused, "balance")


def test_a_bias_moves_tokens_away_from_busy_experts(runs):
    """Its rate is large here; the weights of outputs do not have it."""
    baseline = runs("04_amp/train.py", None, 12)
    biased = runs("04_amp/train.py", None, 12, "--balance-bias", 0.3, "--balance-loss", 0)
    first, last = (biased.column("expert_tokens")[step][0] for step in (0, -1))
    assert last[0] < first[0] / 2
    assert biased.column("loss")[0] < baseline.column("loss")[0]  # which has the balance loss


def test_a_step_that_fp16_skips_moves_no_bias(runs):
    """Expert 0 is always the busiest, so each other step lowers its bias."""
    result = runs("04_amp/train.py", None, 12, "--dtype", "fp16", "--balance-loss", 1)
    skipped = int(result.column("skipped_steps")[-1])
    assert 0 < skipped < 4
    bias = saved(result.folder, 4)["model"]["model.layers.0.mlp.bias"]
    assert bias[0].item() == pytest.approx(-0.001 * (4 - skipped))


def test_a_trained_model_answers_as_in_transformers(runs, tmp_path):
    """Through a folder with the names of the hub, on two ranks."""
    trained = runs("04_amp/train.py", None, 12, "--balance-bias", 0)
    step = trained.folder / "run/step-00000004"
    converted = run("06_fsdp_zero/convert_checkpoint.py", tmp_path, step, "hf", "--to", "hf")
    assert converted.code == 0, converted
    names = json.loads((tmp_path / "hf/model.safetensors.index.json").read_text(encoding="utf-8"))
    assert "model.layers.0.mlp.experts.7.up_proj.weight" in names["weight_map"]
    flags = ("--prompt", "def f", "--max-new-tokens", 16, "--dtype", "fp32", "--device", "cpu")
    answer = run(
        "09_inference/infer_70b.py", tmp_path, "--model", "hf", *flags, "--json", "s.json", nproc=2
    )
    assert answer.code == 0, answer
    checked = json.loads((tmp_path / "s.json").read_text(encoding="utf-8"))["checked"]
    assert any("transformers' generate" in line for line in checked)

    biased = runs("04_amp/train.py", None, 12).folder / "run/step-00000004"
    assert_refused(
        run("06_fsdp_zero/convert_checkpoint.py", tmp_path, biased, "other", "--to", "hf"), "bias"
    )


EXPERT_RANKS = {  # ranks, micro-batch, flags
    "all": (2, 3, ("--ep", 2)),
    "tensor": (4, 3, ("--tp", 2, "--ep", 2)),
    "a rank without tokens": (4, 3, ("--ep", 4, "--checkpointing", "full")),
    "context": (4, 6, ("--cp", 2, "--ep", 4)),
    "copies, recomputed": (4, 1, ("--ep", 2, "--replicate", 2, "--checkpointing", "selective")),
    "one process": (1, 12, ()),
    "no expert ranks": (2, 3, ()),
    "tensor, no expert ranks": (2, 6, ("--tp", 2)),
    "tensor ranks": (2, 6, ("--tp", 2, "--ep", 2)),
    "some": (4, 1, ("--ep", 2)),
    "tensor, all": (4, 2, ("--tp", 2, "--ep", 4, "--checkpointing", "full")),
    "context ranks": (2, 6, ("--cp", 2, "--ep", 2)),
    "tensor, context": (4, 12, ("--tp", 2, "--cp", 2, "--ep", 2, "--checkpointing", "selective")),
    "tensor, copies": (4, 6, ("--tp", 2, "--ep", 2, "--replicate", 2)),
}
OFTEN = ("all", "tensor")
IN_FULL = ("a rank without tokens", "context", "copies, recomputed")
IN_LONG = [ranks for ranks in EXPERT_RANKS if ranks not in (*OFTEN, *IN_FULL)]


@pytest.mark.parametrize("ranks", [*OFTEN, *map(in_full, IN_FULL), *map(in_long, IN_LONG)])
def test_experts_on_several_ranks_train_as_one_process(runs, ranks):
    """The tokens of each expert say that in layer 0 most go to two of them, and none to two."""
    n, micro, flags = EXPERT_RANKS[ranks]
    assert_trained_as_one_process(runs(MESH, n, micro, *flags), runs)


# Each rank writes the norm by which it clips, and the tensors that it reads. SGD takes a step in
# place of AdamW, whose step hardly depends on the size of a gradient.
SGD = """
import torch
from lm.weight_files import StoredWeights

clip = torch.nn.utils.clip_grads_with_norm_


def clip_and_write(parameters, max_norm, total_norm, *more, **flags):
    with open(f"norms.{os.environ.get('RANK', 0)}", "a", encoding="utf-8") as file:
        file.write(f"{total_norm.item()}\\n")
    return clip(parameters, max_norm, total_norm, *more, **flags)


class Sgd(torch.optim.AdamW):
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                moments = ("exp_avg", "exp_avg_sq")
                self.state[parameter] = {name: torch.zeros_like(parameter) for name in moments}
                self.state[parameter]["step"] = torch.zeros(())
                parameter.data.add_(parameter.grad, alpha=-100 * group["lr"])


def read_and_write(weights, name, slices):
    with open(f"read.{os.environ.get('RANK', 0)}", "a", encoding="utf-8") as file:
        file.write(f"{name}\\n")
    return read(weights, name, slices)


read = StoredWeights.read
StoredWeights.read = read_and_write
torch.nn.utils.clip_grads_with_norm_ = clip_and_write
torch.optim.AdamW = Sgd
"""


def test_ranks_clip_by_one_norm_and_a_step_of_sgd_is_that_of_one_process(once, tmp_path):
    """AdamW's step hides a gradient that is too large, and a digest hides norms that differ.

    Each rank reads its own experts only.
    """
    flags = ("--model", once("skewed", write_skewed), *STEPS, "--save-every", 0)
    results = []
    for script, ranks, mesh in ((BASELINE, None, ()), (MESH, 4, ("--ep", 2))):
        folder = tmp_path / str(ranks)
        prelude = with_prelude(script, folder, SGD)
        results.append(train(prelude, folder, *flags, *mesh, nproc=ranks))
    one, mesh = results
    norms = {file.read_text(encoding="utf-8") for file in mesh.folder.glob("norms.*")}
    assert len(list(mesh.folder.glob("norms.*"))) == 4
    assert len(norms) == 1
    read = []
    for file in mesh.folder.glob("read.*"):
        read += [name for name in file.read_text(encoding="utf-8").split() if ".experts." in name]
    assert len(read) == len(set(read)) == 2 * 8 * 3  # layers, experts, matrices
    assert mesh.column("grad_norm") == pytest.approx(one.column("grad_norm"), rel=1e-5)
    assert mesh.column("loss") == pytest.approx(one.column("loss"), rel=1e-5)
    assert_near(saved(mesh.folder, 4)["model"], saved(one.folder, 4)["model"], 1e-5)


@pytest.mark.full
def test_experts_move_to_other_ranks_and_to_a_folder(once, runs, tmp_path):
    """Train to step 2 with --ep 2, to step 4 with --tp 2 --ep 4, and convert the checkpoint."""
    baseline = runs(BASELINE, None, 12, "--balance-bias", 0)
    first = runs(MESH, 2, 3, "--balance-bias", 0, "--ep", 2)
    shutil.copytree(first.folder / "run", tmp_path / "run")
    drop_after(tmp_path, 2)
    flags = ("--model", once("skewed", write_skewed), *STEPS, "--resume", "--micro-batch-size", 6)
    resumed = train(MESH, tmp_path, *flags, "--tp", 2, "--ep", 4, nproc=4)
    assert resumed.column("loss") == pytest.approx(baseline.column("loss"), rel=1e-5)
    assert_near(moments(tmp_path, 4), moments(baseline.folder, 4))

    step = tmp_path / "run/step-00000004"
    converted = run("06_fsdp_zero/convert_checkpoint.py", tmp_path, step, "hf", "--to", "hf")
    assert converted.code == 0, converted
    experts = saved(tmp_path, 4)["model"]["model.layers.2.mlp.experts.up_proj"]
    tensors = {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        tensors |= load_file(file)
    for number, expert in enumerate(experts):
        name = f"model.layers.2.mlp.experts.{number}.up_proj.weight"
        assert torch.equal(tensors[name], expert)


@pytest.mark.full
def test_a_dry_run_has_the_bytes_of_real_ranks(once, runs, tmp_path):
    n, micro, mesh = EXPERT_RANKS["tensor"]
    real = runs(MESH, n, micro, *mesh)
    flags = ("--model", once("skewed", write_skewed), "--tp", 2, "--ep", 2)
    dry_run = train(MESH, tmp_path, *flags, "--dry-run", "--world-size", 4)
    (stage,) = dry_run.summary["stages"]
    assert stage["weight_bytes"] == real.summary["parameter_bytes_per_rank"][0]
    assert stage["optimizer_bytes"] == real.summary["optimizer_bytes_per_rank"][0]


@pytest.mark.parametrize(
    ("script", "flags"),
    [
        ("06_fsdp_zero/train_zero.py", ("--model", "nano-moe")),
        ("05_ddp/train.py", ("--balance-loss", 0.1)),
    ],
)
def test_mistakes_are_one_line(tmp_path, script, flags):
    assert_refused(run(script, tmp_path, "--device", "cpu", *flags), "experts")


def test_active_parameters_are_those_of_a_token():
    """The model card of Qwen3-30B-A3B has 30.5 billion, 3.3 billion of them active."""
    config = shapes.SIZES["moe-30b-a3b"]
    assert round(shapes.parameter_count(config) / 1e9, 1) == 30.5
    active = shapes.parameter_count(config, active=True)
    assert math.floor(active / 1e8) / 10 == 3.3
