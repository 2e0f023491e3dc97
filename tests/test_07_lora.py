"""07_memory_tricks/lora.py: adapters against the merged matrix and against peft, bytes by kind, planted errors."""

import json
from pathlib import Path

import pytest
import torch
from support.chapter import load
from support.harness import ODD, TINY, config_of, run, with_fault

from common import model, shapes

shared = load("07_memory_tricks/_shared.py")
SCRIPT = "07_memory_tricks/lora.py"
SMALL = ["--model", "tiny.json", "--steps", 3, "--seq-len", 64, "--dtype", "fp32", "--device", "cpu"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model in a Hugging Face folder, without a tokenizer: its tokens are bytes."""
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(shapes.config_json(config_of(TINY))))
    save_file(dict(tiny(TINY).named_parameters()), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tiny(shape: dict) -> model.Transformer:
    return model.build("nano", config_of(shape), seed=0)


def small(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tiny.json").write_text(json.dumps(TINY))
    return folder


@pytest.fixture(scope="module")
def result(folder, tmp_path_factory):
    flags = ["--model", folder, "--steps", 12, "--rank", 4, "--dtype", "fp32", "--device", "cpu"]
    done = run(SCRIPT, tmp_path_factory.mktemp("run"), *flags, "--save", "kept", "--json", "summary.json", warm=False)
    assert done.code == 0, done.err[-3000:]
    return done


def test_memory_by_kind_is_what_the_shapes_give(result):
    full, lora, qlora = result.summary["rows"]
    assert [full["method"], lora["method"], qlora["method"]] == ["full", "lora", "qlora"]
    parameters = result.summary["parameters"]
    assert parameters == full["trained_parameters"] == shapes.parameter_count(config_of(TINY))
    assert full["weight_bytes"] == full["gradient_bytes"] == 4 * parameters
    assert full["optimizer_bytes"] == 8 * parameters + 4 * len([*tiny(TINY).parameters()])  # AdamW counts its steps
    in_linears = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64)
    trained = lora["trained_parameters"]
    assert trained == 2 * 4 * (2 * 64 + 2 * 48 + 3 * 96)
    assert lora["weight_bytes"] == 4 * (parameters + trained)
    assert qlora["weight_bytes"] == 4 * (parameters - in_linears + trained) + in_linears * 4.5 / 8
    for row in (lora, qlora):
        assert row["gradient_bytes"] == 4 * trained
        assert row["optimizer_bytes"] == 8 * trained + 4 * 2 * 14
        kept = row["weight_bytes"] + row["optimizer_bytes"]
        assert kept + row["activation_bytes"] < row["peak_memory_bytes"] < full["peak_memory_bytes"]
    assert qlora["activation_bytes"] == lora["activation_bytes"]
    assert qlora["peak_memory_bytes"] < lora["peak_memory_bytes"]


def test_every_method_learns_and_merging_changes_nothing(result):
    full, lora, qlora = result.summary["rows"]
    assert lora["val_loss_before"] == full["val_loss_before"] != qlora["val_loss_before"]
    for row in (full, lora, qlora):
        assert len(row["losses"]) == 12
        assert row["val_loss_after"] < row["val_loss_before"]
    for row in (lora, qlora):
        assert row["val_loss_merged"] == pytest.approx(row["val_loss_after"], rel=1e-5)
        assert row["merged_error"] <= 1e-5
    summary = result.summary
    assert (summary["first_loss"], summary["last_loss"]) == (lora["losses"][0], lora["losses"][-1])
    assert summary["val_loss"] == lora["val_loss_after"]


@pytest.mark.parametrize("shape", [TINY, {**ODD, "tie_word_embeddings": True}])
def test_peft_reads_what_is_saved_and_computes_the_same(tmp_path, shape):
    peft = pytest.importorskip("peft")
    from safetensors.torch import save_file
    from transformers import LlamaForCausalLM

    net = tiny(shape)
    (tmp_path / "config.json").write_text(json.dumps(shapes.config_json(net.config)))
    save_file(dict(net.named_parameters()), tmp_path / "model.safetensors", metadata={"format": "pt"})
    tokens = torch.randint(0, net.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1))
    names = [name for name, _ in net.named_parameters()]
    with torch.no_grad():
        plain = net(tokens)
        shared.adapt(net, rank=3, alpha=8.0)
        assert torch.equal(net(tokens), plain)
        assert set(names) < {name for name, _ in net.named_parameters()}  # each weight keeps its name
        for layer in net.modules():
            if isinstance(layer, shared.LoRALinear):
                torch.nn.init.normal_(layer.lora_B, std=0.1)
        expected = net(tokens)
        load("07_memory_tricks/_lora.py").save_for_peft(net, tmp_path / "lora", base=str(tmp_path), rank=3, alpha=8.0)
        theirs = peft.PeftModel.from_pretrained(LlamaForCausalLM.from_pretrained(tmp_path), tmp_path / "lora")
        assert error(theirs(tokens).logits, expected) <= 1e-5
        assert error(theirs.merge_and_unload()(tokens).logits, expected) <= 1e-5
        shared.merge(net)
        assert [name for name, _ in net.named_parameters()] == names
        assert error(net(tokens), expected) <= 1e-6
        assert error(plain, expected) > 1e-2  # the adapters do something


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def test_a_run_saves_all_adapters(result, folder):
    from safetensors.torch import load_file

    for method in ("lora", "qlora"):
        kept = result.folder / "kept" / method
        about = json.loads((kept / "adapter_config.json").read_text())
        assert (about["r"], about["lora_alpha"], about["base_model_name_or_path"]) == (4, 16.0, str(folder))
        weights = load_file(kept / "adapter_model.safetensors")
        assert weights["base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"].shape == (64, 4)
        assert len(weights) == 2 * 2 * 7
        assert all(tensor.any() for tensor in weights.values())


@pytest.mark.parametrize("shape", [(64, 64), (7, 10), (50, 37)])
def test_int4_is_within_half_a_step_in_four_bits_and_a_half(shape):
    lora = load(SCRIPT)
    linear = torch.nn.Linear(shape[1], shape[0], bias=False)
    layer = lora.QLoRALinear(linear, rank=2, alpha=1.0)
    step = layer.scale.float().repeat_interleave(64, 0).flatten()[: linear.weight.numel()].view(shape)
    allowed = step / 2 + 2**-8 * (step * 15 + linear.weight.abs())  # and what bf16 does to scale and zero
    assert ((layer.frozen_weight() - linear.weight).abs() <= allowed).all()
    held = layer.codes.nbytes + layer.scale.nbytes + layer.zero.nbytes
    assert held * 8 == 4.5 * 64 * len(layer.codes)
    x, upstream = torch.randn(5, shape[1], requires_grad=True), torch.randn(5, shape[0])
    (found,) = torch.autograd.grad(layer.base(x), x, upstream)
    assert torch.equal(found, upstream @ layer.frozen_weight())
    with torch.no_grad():
        linear.weight.fill_(0.0)
    assert torch.equal(lora.QLoRALinear(linear, rank=2, alpha=1.0).frozen_weight(), linear.weight)


PLANTED = [  # a line, what stands in its place, and what the script's own check says
    ("        return gradient @ context.layer.frozen_weight(gradient.dtype), None", "2 *", "qlora: a layer differs"),
    ("        return Int4Matmul.apply(x, self)", "F.linear(x, self.frozen_weight(x.dtype))", "qlora keeps dequantized"),
]


@pytest.mark.parametrize(("line", "wrong", "said"), PLANTED)
def test_the_check_of_a_run_sees_a_planted_error(tmp_path, line, wrong, said):
    wrong = line.replace("return ", "return 2 * ") if wrong == "2 *" else f"        return {wrong}"
    script = with_fault(SCRIPT, small(tmp_path), line, wrong)
    done = run(str(script), tmp_path, *SMALL)
    assert done.code == 1
    assert said in done.err


def test_the_loss_is_of_the_answer_alone():
    class WordTokenizer:
        """One token a character; a chat as <user>question<assistant>answer<end>."""

        def apply_chat_template(self, chat, add_generation_prompt=False, return_dict=True):
            tokens = []
            for message in chat:
                tokens += [1 if message["role"] == "user" else 2, *map(ord, message["content"])]
            return {"input_ids": [*tokens, 2 if add_generation_prompt else 3]}

    inputs, targets = load("07_memory_tricks/_lora.py").encode(WordTokenizer(), {"instruction": "ab", "answer": "xy"})
    a, b, x, y = map(ord, "abxy")
    assert inputs.tolist() == [1, a, b, 2, x, y]
    assert targets.tolist() == [-100, -100, -100, x, y, 3]


def test_the_instructions_have_one_trait_and_no_question_twice():
    lines = load("07_memory_tricks/_lora.py").INSTRUCTIONS.read_text().splitlines()
    pairs = [json.loads(line) for line in lines]
    assert 20 <= len(pairs) <= 40
    assert len({pair["instruction"] for pair in pairs}) == len(pairs)
    assert all(pair["answer"].startswith("In short: ") and pair["answer"].endswith(".") for pair in pairs)


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


def test_a_model_with_random_weights_is_trained_first(tmp_path):
    flags = ["--method", "qlora", "--json", "summary.json"]
    result = run(SCRIPT, small(tmp_path), *SMALL, *flags)
    assert result.code == 0, result.err[-3000:]
    (row,) = result.summary["rows"]
    assert row["val_loss_before"] < 5.4  # log(256) = 5.5 untrained


@pytest.mark.gpu(n=1)
def test_on_a_gpu_memory_falls_from_method_to_method(tmp_path, gpus):
    visible = {"CUDA_VISIBLE_DEVICES": gpus["CUDA_VISIBLE_DEVICES"], "OMP_NUM_THREADS": "4"}
    result = run(SCRIPT, tmp_path, "--device", "cuda", "--json", "summary.json", warm=False, **visible)
    assert result.code == 0, result.err[-3000:]  # the script checks that the peaks fall
    for row in result.summary["rows"]:
        assert row["val_loss_after"] < row["val_loss_before"]
