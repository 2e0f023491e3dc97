"""train_big.py: the predicted peak is that of the step, rung by rung, and the ladder takes the first that fits."""

from functools import partial

import pytest
import torch
from support.chapter import load
from support.harness import run
from torch.utils.flop_counter import FlopCounterMode

from old import shapes, step_cost

SCRIPT = "07_memory_tricks/train_big.py"
big = load(SCRIPT)
predict = load("07_memory_tricks/_train_big_predict.py")
CPU = torch.device("cpu")
SHAPES = {
    "large vocabulary, tied": shapes.Config(5000, 64, 128, 2, 4, 2, 16, 128, tie_word_embeddings=True),
    "large blocks, untied": shapes.Config(211, 96, 260, 5, 6, 3, 16, 128),
}
SEQ_LEN = 96


@pytest.fixture
def named(monkeypatch):
    """A function that gives a shape a name, as if it were one of ours."""

    def add(config: shapes.Config) -> str:
        monkeypatch.setitem(shapes.SIZES, "tiny", config)
        monkeypatch.setitem(shapes.RECIPES, "tiny", shapes.RECIPES["nano"])
        return "tiny"

    return add


def measured_and_predicted(name: str, recipe, dtype: str) -> tuple[int, float]:
    config = shapes.SIZES[name]
    shape = big.from_config(name, config)
    plan = {"seq_len": SEQ_LEN, "dtype": dtype, "on_cpu": True}
    if recipe is big.QLORA:
        net, optimizers = big.build_qlora(name, config, big.DTYPES[dtype], CPU)
        predicted = big.predict_qlora(shape, recipe, rank=big.RANK, **plan)
    else:
        net, optimizers = big.build_full(name, config, recipe, CPU)
        predicted = big.predict(shape, recipe, **plan)
    tokens = torch.randint(config.vocab_size, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    step = partial(
        big.training_step,
        net,
        optimizers,
        tokens[:, :-1].contiguous(),
        tokens[:, 1:].contiguous(),
        partial(torch.autocast, "cpu", big.DTYPES[dtype], enabled=dtype != "fp32", cache_enabled=False),
        SEQ_LEN // 8 if recipe.chunked_loss else None,
    )
    step()  # makes the optimizers' state
    return step_cost.record_memory(step, CPU, step_cost.held_tensors(net, optimizers)).peak_bytes, predicted


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("recipe", [*big.LADDER, big.QLORA], ids=lambda recipe: recipe.name)
@pytest.mark.parametrize("kind", SHAPES)
def test_the_predicted_peak_is_that_of_a_step(named, kind, recipe, dtype):
    measured, predicted = measured_and_predicted(named(SHAPES[kind]), recipe, dtype)
    if recipe is big.QLORA:  # tiny blocks: the formula adds up what is not all there at once
        assert measured <= predicted <= 1.25 * measured
    else:
        assert predicted == pytest.approx(measured, rel=0.04)


def test_every_rung_trains_the_same_model(named):
    """The tricks of the ladder are exact, but for 8-bit moments: the same losses, step by step."""
    name = named(SHAPES["large blocks, untied"])
    config = shapes.SIZES[name]
    tokens = torch.randint(config.vocab_size, (6, SEQ_LEN + 1), generator=torch.Generator().manual_seed(1))
    autocast = partial(torch.autocast, "cpu", enabled=False)
    curves = []
    for recipe in big.LADDER:
        net, optimizers = big.build_full(name, config, recipe, CPU)
        chunk = 12 if recipe.chunked_loss else None
        losses = [
            big.training_step(net, optimizers, row[None, :-1], row[None, 1:], autocast, chunk).item() for row in tokens
        ]
        curves.append(losses)
    for recipe, losses in zip(big.LADDER[1:-1], curves[1:-1], strict=True):
        assert losses == pytest.approx(curves[0], rel=1e-5), recipe.name
    assert curves[-1] == pytest.approx(curves[0], rel=1e-2)
    assert len({round(loss, 3) for loss in curves[0]}) > 1


def test_qlora_trains_adapters_alone_and_draws_every_weight(named):
    config = SHAPES["large vocabulary, tied"]
    net, [optimizer] = big.build_qlora(named(config), config, torch.float32, CPU)
    trained = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora_" in name for name in trained)
    assert len(optimizer.param_groups[0]["params"]) == len(trained) == 2 * 7 * config.num_hidden_layers
    assert net.lm_head.weight is net.model.embed_tokens.weight
    for name, tensor in [*net.named_parameters(), *net.named_buffers()]:
        assert tensor.device == CPU, name
        assert tensor.isfinite().all() or not tensor.is_floating_point(), name
    assert net.model.embed_tokens.weight.std().item() == pytest.approx(0.02, rel=0.05)
    torch.testing.assert_close(net.model.rope_cos[0], torch.ones(config.head_dim))


def train_big(folder, *flags, code: int = 0):
    own = ("--device", "cpu", "--plot", folder / "picture.png", "--json", folder / "summary.json")
    result = run(SCRIPT, folder, *own, *flags)
    assert result.code == code, result.err
    return result


def test_the_first_rung_that_fits_is_trained(tmp_path):
    result = train_big(tmp_path, "--model", "nano", "--memory", 0.07, "--seq-len", 128, "--dtype", "fp32")
    summary = result.summary
    assert [row["recipe"] for row in summary["ladder"]] == [recipe.name for recipe in big.LADDER[:4]]
    assert summary["recipe"] == "+ step inside backward"
    assert summary["peak_memory_bytes"] <= 0.07 * 2**30
    assert summary["last_loss"] < summary["first_loss"]
    assert "checked: the loss of the first batch has fallen in 10 steps" in result.out
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_the_largest_size_that_fits_is_taken(tmp_path):
    result = train_big(tmp_path, "--memory", 0.5, "--seq-len", 32, "--steps", 2)
    assert result.summary["model"] == "nano"
    assert result.summary["ladder"][0]["model"] == "llama-405b"


def test_adapters_on_an_int4_base(tmp_path):
    summary = train_big(tmp_path, "--tune", "qlora", "--model", "nano", "--memory", 0.05, "--seq-len", 64).summary
    assert summary["recipe"] == "QLoRA"
    assert summary["last_loss"] < summary["first_loss"]


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--memory", "0.001"), "of 1.0 MiB with --tune full and every trick"),
        (("--model", "nano", "--seq-len", "2000"), "--seq-len 2000 is over the limit of --model nano: 1024"),
        (("--memory", "inf"), "'inf' is not a number above 0"),
        (("--model", "none"), "--model none: no such size"),
        (("--memory", "0"), "'0' is not a number above 0"),
        (("--tune", "half"), "invalid choice: 'half'"),
    ],
)
def test_what_cannot_be_is_one_line(tmp_path, flags, told):
    result = train_big(tmp_path, *flags, code=2)
    [line] = result.err.splitlines()
    assert told in line


def test_short_sequences_end_without_an_error(tmp_path):
    summary = train_big(tmp_path, "--model", "nano", "--seq-len", 4, "--steps", 10, "--dtype", "fp32").summary
    assert (summary["seq_len"], summary["steps"]) == (4, 10)


@pytest.mark.parametrize("kind", SHAPES)
def test_qlora_counts_the_products_that_are_computed(named, kind):
    config = SHAPES[kind]
    net, _ = big.build_qlora(named(config), config, torch.float32, CPU)
    tokens = torch.randint(config.vocab_size, (1, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))
    autocast = partial(torch.autocast, "cpu", enabled=False)
    blocks = {name: getattr(block, "_checkpoint_wrapped_module", block) for name, block in net.model.layers.items()}
    for name, block in blocks.items():  # recomputation is not counted
        net.model.layers[name] = block
    with FlopCounterMode(display=False) as counter:
        big.loss_of(net, tokens[:, :-1], tokens[:, 1:], autocast, 12).backward()
    counted = counter.get_flop_counts()["Global"][torch.ops.aten.mm] / SEQ_LEN
    attention = 12 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * SEQ_LEN
    norms = 4 * (2 * config.num_hidden_layers + 1) * config.hidden_size
    assert counted == predict.qlora_flops_per_token(config, big.RANK, SEQ_LEN) - attention - norms


@pytest.mark.gpu(n=1)
def test_the_peak_on_a_gpu_is_within_a_tenth_of_the_predicted(gpus, tmp_path):
    own = ("--model", "llama-124m", "--plot", tmp_path / "picture.png", "--json", tmp_path / "summary.json")
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"]}
    result = run(SCRIPT, tmp_path, *own, warm=False, **visible)
    assert result.code == 0, result.err
    assert abs(result.summary["predicted_relative_error"]) < 0.1
