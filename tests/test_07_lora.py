"""07_memory_tricks/lora.py: adapters against the merged matrix, int4 against numpy, the files against peft."""

import json
import weakref
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.chapter import load
from support.harness import TINY, run
from torch import nn

from old import model, shapes
from old.step_cost import saved_for_backward

checks = load("07_memory_tricks/_lora_checks.py")
flags = load("07_memory_tricks/_lora_flags.py")
peft_files = load("07_memory_tricks/_lora_peft.py")
reporting = load("07_memory_tricks/_lora_report.py")
tasks = load("07_memory_tricks/_lora_tasks.py")
lora = load("07_memory_tricks/lora.py")

SCRIPT = "07_memory_tricks/lora.py"
ODD = {"vocab_size": 97, "hidden_size": 36, "intermediate_size": 50, "num_attention_heads": 3, "num_key_value_heads": 1}
SHAPES = [{}, {**ODD, "tie_word_embeddings": True}]  # groups of 64 end inside a row, and the last one is not full


def config(**other_sizes) -> shapes.Config:
    shape = {name: size for name, size in TINY.items() if name != "model_type"} | other_sizes
    return shapes.Config(**{"head_dim": 8, **shape})


def tiny(**other_sizes) -> model.Transformer:
    net = model.Transformer(config(**other_sizes))
    net.init_weights(0)
    return net


def adapted(int4: bool, seed: int = 0, dtype: torch.dtype = torch.float32, **other_sizes) -> model.Transformer:
    """With adapters as training leaves them: B is not zero."""
    torch.manual_seed(seed)
    net = tiny(**other_sizes)
    lora.adapt(net, rank=3, alpha=8.0, int4=int4, dtype=dtype)
    for layer in checks.adapted_layers(net).values():
        nn.init.normal_(layer.lora_B.weight, std=0.1)
    return net


def tokens(vocabulary: int = 97, length: int = 33) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(0, vocabulary, (4, length), generator=torch.Generator().manual_seed(1))
    return text[:, :-1], text[:, 1:]


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


# --- LoRA


def test_training_starts_from_the_model_as_it_is():
    net = tiny()
    before = net(tokens()[0])
    lora.adapt(net, rank=3, alpha=8.0, int4=False, dtype=torch.float32)
    assert torch.equal(net(tokens()[0]), before)
    for layer in checks.adapted_layers(net).values():
        assert layer.lora_A.weight.abs().min() > 0  # were both zero, neither would ever move


def test_adapters_alone_are_trained():
    net = adapted(int4=False, **ODD)
    assert len(checks.adapted_layers(net)) == 7 * 2  # q, k, v, o, gate, up, down of two blocks
    trained = {name: p.numel() for name, p in net.named_parameters() if p.requires_grad}
    assert all(".lora_A." in name or ".lora_B." in name for name in trained)
    hidden, ffn, queries, keys = 36, 50, 24, 8
    by_hand = 2 * hidden + 2 * queries + 2 * (hidden + keys) + 3 * (hidden + ffn)
    assert sum(trained.values()) == 2 * 3 * by_hand


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("sizes", SHAPES)
def test_merged_equals_unmerged(int4, sizes):
    net = adapted(int4, **sizes)
    plain_names = {name for name, _ in tiny(**sizes).named_parameters()}
    before = net(tokens()[0])
    lora.merge(net)
    assert {name for name, _ in net.named_parameters()} == plain_names
    assert relative_error(net(tokens()[0]), before) <= 1e-6
    assert (net.lm_head.weight is net.model.embed_tokens.weight) == net.config.tie_word_embeddings


@pytest.mark.parametrize("int4", [False, True])
@pytest.mark.parametrize("sizes", SHAPES)
def test_gradients_are_those_of_the_merged_model(int4, sizes):
    """If G is the gradient of W + s B A, then s B^T G and s G A^T are those of A and B, through the whole model."""
    net, merged = adapted(int4, **sizes), adapted(int4, **sizes)
    lora.merge(merged)
    merged.requires_grad_(True)
    net(*tokens()).backward()
    merged(*tokens()).backward()
    merged_layers = dict(merged.named_modules())
    found, expected = [], []
    for name, layer in checks.adapted_layers(net).items():
        gradient = merged_layers[name].weight.grad
        a, b = layer.lora_A.weight, layer.lora_B.weight
        found += [a.grad.flatten(), b.grad.flatten()]
        expected += [(8 / 3 * b.T @ gradient).flatten(), (8 / 3 * gradient @ a.T).flatten()]
        assert relative_error(torch.cat(found[-2:]), torch.cat(expected[-2:])) <= 1e-5, name
    assert relative_error(torch.cat(found), torch.cat(expected)) <= 1e-6
    assert all(p.grad is None for p in net.parameters() if not p.requires_grad)


@pytest.mark.parametrize("int4", [False, True])
def test_the_check_of_a_run_sees_a_layer_that_is_not_the_merged_one(int4):
    net = adapted(int4)
    assert 0 < checks.check_layers(net) <= 1e-6
    layer = net.model.layers["1"].mlp.up_proj
    layer.merged_weight = lambda: layer.base.weight.float()
    with pytest.raises(AssertionError, match="up_proj"):
        checks.check_layers(net)


# --- int4


def int4_by_numpy(weight: np.ndarray) -> np.ndarray:
    """Group by group, in doubles: the dequantized weights."""
    flat = weight.astype(np.float64).ravel()
    result = []
    for start in range(0, len(flat), 64):
        group = flat[start : start + 64]
        padded = np.append(group, [0.0] * (64 - len(group)))
        zero = torch.tensor(padded.min()).bfloat16().double().item()
        scale = torch.tensor((padded.max() - zero) / 15, dtype=torch.float32).bfloat16().double().item() or 1.0
        result.append(np.clip(np.round((group - zero) / scale), 0, 15) * scale + zero)
    return np.concatenate(result).reshape(weight.shape)


@pytest.mark.parametrize("shape", [(64, 64), (7, 10), (1, 1), (50, 37)])
def test_int4_is_what_numpy_rounds_to(shape):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(2)) * 0.05 + 0.01
    quantized = lora.quantize_int4(weight)
    found = lora.dequantize_int4(quantized, shape, torch.float32)
    by_numpy = torch.from_numpy(int4_by_numpy(weight.numpy())).float()
    step = quantized.scale.float().repeat_interleave(64, 0).flatten()[: weight.numel()].view(shape)
    same = (found - by_numpy).abs() <= 1e-6
    on_an_edge = (found - by_numpy).abs() <= step * 1.001  # a value half-way between two codes may fall either way
    assert on_an_edge.all()
    assert same.float().mean() > 0.99
    # half a step, and what bf16 does to the smallest and the largest weight of a group
    assert ((found - weight).abs() <= step / 2 + 2**-8 * (step * 15 + weight.abs())).all()


def test_int4_takes_four_bits_and_a_half():
    quantized = lora.quantize_int4(torch.randn(128, 256))
    assert quantized.codes.dtype == torch.uint8
    assert sum(t.nbytes for t in quantized) * 8 == 128 * 256 * 4.5
    assert len(quantized.codes.unique()) > 200  # both halves of the bytes are used


@pytest.mark.parametrize("value", [0.0, 0.3, -2.0])
def test_a_group_of_equal_weights_stays_finite(value):
    weight = torch.full((2, 64), value)
    found = lora.dequantize_int4(lora.quantize_int4(weight), (2, 64), torch.float32)
    assert (found - weight).abs().max() <= 2**-8 * abs(value)


def test_a_block_that_is_rounded_leaves_no_weight_behind():
    """Else a model that is rounded block by block would not fit where it fits rounded."""
    block = tiny().model.layers["0"]
    weights = [weakref.ref(module.weight) for module in block.modules() if isinstance(module, nn.Linear)]
    lora.adapt_block(block, rank=3, alpha=8.0, int4=True)
    assert len(weights) == 7
    assert all(weight() is None for weight in weights)


def test_int4_product_has_the_gradient_of_the_dequantized_weight():
    layer = lora.Int4Linear(nn.Linear(50, 37, bias=False))
    x = torch.randn(2, 5, 50, requires_grad=True)
    upstream = torch.randn(2, 5, 37)
    (found,) = torch.autograd.grad(layer(x), x, upstream)
    (expected,) = torch.autograd.grad(F.linear(x, layer.weight), x, upstream)
    assert torch.equal(layer(x), F.linear(x, layer.weight))
    assert torch.equal(found, expected)
    assert not [*layer.parameters()]


def saved_activations(net: nn.Module, *inputs: torch.Tensor) -> int:
    with saved_for_backward(net) as saved:
        net(*inputs)
    return sum(saved.activations.values())


def test_no_dequantized_weight_waits_for_backward():
    """QLoRA saves what LoRA does. Without a backward of its own it would save every weight in full as well."""
    batch = tokens()
    nets = {int4: adapted(int4) for int4 in (False, True)}
    assert saved_activations(nets[True], *batch) == saved_activations(nets[False], *batch)

    layer = lora.Int4Linear(nn.Linear(50, 37, bias=False))
    x = torch.randn(5, 50, requires_grad=True)
    assert saved_activations(layer, x) == 0
    with saved_for_backward(layer) as saved:
        F.linear(x, layer.weight)
    assert sum(saved.activations.values()) >= 4 * 50 * 37


def test_a_frozen_weight_is_no_activation():
    net, x = nn.Linear(50, 37, bias=False).requires_grad_(False), torch.randn(5, 50, requires_grad=True)
    assert saved_activations(net, x) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_leaves_the_base_as_it_is(dtype):
    for int4 in (False, True):
        net = adapted(int4, dtype=dtype)
        before = checks.frozen_digest(net)
        trained = [p for p in net.parameters() if p.requires_grad]
        assert {p.dtype for p in trained} == {torch.float32}
        optimizer = torch.optim.AdamW(trained, lr=0.1)
        old = [p.detach().clone() for p in trained]
        entry = reporting.Run("qlora" if int4 else "lora", net, trained, optimizer, 0.1)
        autocast = nullcontext if dtype == torch.float32 else lambda: torch.autocast("cpu", torch.bfloat16)
        lora.training_step(entry, tokens(), autocast)
        assert checks.frozen_digest(net) == before
        assert all(not torch.equal(p, q) for p, q in zip(trained, old, strict=True))
        layer = net.model.layers["0"].mlp.up_proj.base
        (layer.codes if int4 else layer.weight).data.flatten()[0] += 1
        assert checks.frozen_digest(net) != before


# --- peft


@pytest.mark.parametrize("sizes", SHAPES)
def test_peft_loads_the_adapters(tmp_path, sizes):
    peft = pytest.importorskip("peft")
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    (tmp_path / "config.json").write_text(json.dumps(shapes.config_json(config(**sizes))))
    save_file(dict(tiny(**sizes).named_parameters()), tmp_path / "model.safetensors", metadata={"format": "pt"})
    net = adapted(int4=False, **sizes)
    peft_files.save_for_peft(net, tmp_path / "adapters", base=str(tmp_path), rank=3, alpha=8.0)

    theirs = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tmp_path), tmp_path / "adapters")
    inputs = tokens()[0]
    with torch.no_grad():
        expected, plain = net(inputs), tiny(**sizes)(inputs)
        assert relative_error(theirs(inputs).logits, expected) <= 1e-5
        assert relative_error(theirs.merge_and_unload()(inputs).logits, expected) <= 1e-5
        assert relative_error(plain, expected) > 1e-2  # the adapters do something


# --- what it is adapted to


class WordTokenizer:
    """One token a character; a chat as <user>question<assistant>answer<end>."""

    chat_template = "<...>"
    eos_token_id = 3

    def apply_chat_template(self, chat, add_generation_prompt=False, return_dict=True):
        tokens = []
        for message in chat:
            tokens += [1 if message["role"] == "user" else 2, *map(ord, message["content"])]
        tokens += [2] if add_generation_prompt else [3]
        return {"input_ids": tokens}

    def decode(self, tokens):
        return "".join(map(chr, tokens))


def test_the_loss_is_of_the_answer_alone():
    pair = {"instruction": "ab", "answer": "xyz"}
    inputs, targets = tasks.pad([tasks.encode(WordTokenizer(), pair)], 9)
    a, b, x, y, z = map(ord, "abxyz")
    assert inputs.tolist() == [[1, a, b, 2, x, y, z, 0, 0]]
    assert targets.tolist() == [[-100, -100, -100, x, y, z, 3, -100, -100]]


def test_an_answer_ends_where_the_model_ends_it():
    class Says(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(1))
            self.read = []

        def forward(self, inputs):
            self.read.append(inputs.tolist()[0])
            following = {2: ord("o"), ord("o"): ord("k"), ord("k"): 3}
            return F.one_hot(torch.tensor([[following.get(token, 0) for token in inputs[0].tolist()]]), 200).float()

    net = Says()
    assert tasks.greedy_answer(WordTokenizer(), "a?", net, nullcontext) == "ok"
    assert net.read[0] == [1, ord("a"), ord("?"), 2]
    assert len(net.read) == 3


def test_the_instructions_have_one_trait_and_no_question_twice():
    pairs = [json.loads(line) for line in tasks.INSTRUCTIONS.read_text().splitlines()]
    assert 20 <= len(pairs) <= 40
    assert len({pair["instruction"] for pair in pairs}) == len(pairs)
    assert all(pair["answer"].startswith("In short: ") and pair["answer"].endswith(".") for pair in pairs)


def test_evaluation_is_the_mean_over_targets():
    net, (inputs, targets) = tiny(), tokens()
    targets = targets.clone()
    targets[0, 5:] = -100
    targets[3] = -100
    with torch.no_grad():
        expected = F.cross_entropy(net(inputs).flatten(0, 1), targets.flatten()).item()
    batches = [(inputs[i : i + 1], targets[i : i + 1]) for i in range(4)]
    assert tasks.evaluate(net, batches, nullcontext) == pytest.approx(expected, rel=1e-6)


# --- the script


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model in a Hugging Face folder, without a tokenizer: its tokens are bytes."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(shapes.config_json(config())))
    save_file(dict(tiny().named_parameters()), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def result(folder, tmp_path_factory):
    flags = ["--model", folder, "--steps", 6, "--lr", 0.02, "--rank", 4, "--dtype", "fp32", "--device", "cpu"]
    where = tmp_path_factory.mktemp("run")
    done = run(SCRIPT, where, *flags, "--save", "kept", "--plot", "m.png", "--json", "summary.json", warm=False)
    assert done.code == 0, done.err[-3000:]
    return done


def test_memory_by_kind_is_what_the_shapes_give(result):
    full, adapter, quantized = result.summary["methods"]
    assert [full["method"], adapter["method"], quantized["method"]] == ["full", "lora", "qlora"]
    parameters = result.summary["parameters"]
    assert parameters == full["trained_parameters"] == shapes.parameter_count(config())
    assert full["weight_bytes"] == full["gradient_bytes"] == 4 * parameters
    assert full["optimizer_bytes"] == 8 * parameters + 4 * len([*tiny().parameters()])  # AdamW counts its steps
    in_linears = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64)
    trained = adapter["trained_parameters"]
    assert trained == 2 * 4 * (2 * 64 + 2 * 48 + 3 * 96)
    assert adapter["weight_bytes"] == 4 * (parameters + trained)
    assert quantized["weight_bytes"] == 4 * (parameters - in_linears + trained) + in_linears * 4.5 / 8
    for row in (adapter, quantized):
        assert row["gradient_bytes"] == 4 * trained
        assert row["optimizer_bytes"] == 8 * trained + 4 * 2 * 14
        kept = row["weight_bytes"] + row["optimizer_bytes"]
        assert kept + row["activation_bytes"] < row["peak_memory_bytes"] < full["peak_memory_bytes"]
    assert quantized["activation_bytes"] == adapter["activation_bytes"]
    assert quantized["peak_memory_bytes"] < adapter["peak_memory_bytes"]
    assert (result.folder / "m.png").read_bytes().startswith(b"\x89PNG")


def losses(summary: dict) -> tuple[float, float, float]:
    return summary["first_loss"], summary["last_loss"], summary["val_loss"]


def test_every_method_learns(result):
    full, adapter, quantized = result.summary["methods"]
    assert adapter["val_loss_before"] == full["val_loss_before"] != quantized["val_loss_before"]
    for row in (full, adapter, quantized):
        assert len(row["losses"]) == 6
        assert row["val_loss_after"] < row["val_loss_before"] - 0.01
    for row in (adapter, quantized):
        assert row["val_loss_merged"] == pytest.approx(row["val_loss_after"], rel=1e-5)
    assert losses(result.summary) == (adapter["losses"][0], adapter["losses"][-1], adapter["val_loss_after"])
    assert full["lr"] == pytest.approx(0.002)
    for name in ("lora", "qlora"):
        assert f"checked: {name}'s frozen weights have the same SHA-256" in result.out


def test_what_it_saves_is_in_the_format_of_peft(result, folder):
    from safetensors.torch import load_file

    for method in ("lora", "qlora"):
        kept = result.folder / "kept" / method
        about = json.loads((kept / "adapter_config.json").read_text())
        assert (about["r"], about["lora_alpha"], about["base_model_name_or_path"]) == (4, 16.0, str(folder))
        assert about["target_modules"] == sorted(["q_proj", "k_proj", "v_proj", "o_proj", *MLP])
        weights = load_file(kept / "adapter_model.safetensors")
        assert weights["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"].shape == (64, 4)
        assert len(weights) == 2 * 2 * 7
        assert all(tensor.any() for tensor in weights.values())


MLP = ("gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize(
    ("bad", "named"),
    [
        (["--save", "kept"], "--save kept"),  # the base, trained from random weights, is gone after the run
        (["--seq-len", "100000"], "--seq-len"),
        (["--rank", "0"], "--rank"),
        (["--method", "dora"], "--method"),
        (["--model", "nowhere"], "--model nowhere"),
    ],
)
def test_bad_flags_take_one_line(tmp_path, bad, named):
    result = run(SCRIPT, tmp_path, *bad)
    assert result.code == 2
    assert named in result.err
    assert len(result.err.splitlines()) == 1


def test_a_broken_tokenizer_is_one_line(tmp_path, folder):
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text((folder / "config.json").read_text())
    (tmp_path / "model/tokenizer.json").write_text("{")
    result = run(SCRIPT, tmp_path, "--model", "model", "--device", "cpu")
    assert result.code == 2, result.err[-2000:]
    assert "--model model: its tokenizer cannot be read" in result.err.splitlines()[-1]


def test_nothing_equals_nothing():
    assert checks.relative_error(torch.full((3,), 1e-30), torch.full((3,), 1e-30)) == 0
    assert checks.relative_error(torch.ones(1), torch.zeros(1)) == 1


def test_a_folder_that_cannot_be_made_is_told_before_training(tmp_path, folder):
    (tmp_path / "file").write_text("")
    result = run(SCRIPT, tmp_path, "--model", folder, "--save", "file/kept")
    assert (result.code, result.out) == (2, "")
    assert "--save file/kept" in result.err


def test_a_model_with_random_weights_is_trained_first(tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(TINY))
    flags = ["--model", "tiny.json", "--method", "qlora", "--steps", 2, "--device", "cpu"]
    result = run(SCRIPT, tmp_path, *flags, "--json", "summary.json", "--plot", "m.png")
    assert result.code == 0, result.err[-3000:]
    assert result.out.count("base:") == 1
    (row,) = result.summary["methods"]
    assert row["val_loss_before"] < 5.3  # log(256) = 5.5 untrained
    assert losses(result.summary) == (row["losses"][0], row["losses"][1], row["val_loss_after"])


@pytest.mark.gpu(n=1)
def test_on_a_gpu_memory_falls_from_method_to_method(tmp_path, gpus):
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"], "OMP_NUM_THREADS": "4"}
    flags = ["--device", "cuda", "--json", "summary.json", "--plot", "m.png"]
    result = run(SCRIPT, tmp_path, *flags, warm=False, **visible)
    assert result.code == 0, result.err[-3000:]
    full, adapter, quantized = [row["peak_memory_bytes"] for row in result.summary["methods"]]
    assert full > adapter > quantized
    for row in result.summary["methods"]:
        assert row["val_loss_after"] < row["val_loss_before"]
