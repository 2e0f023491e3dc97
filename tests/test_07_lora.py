"""07_memory_tricks/lora.py: adapters against the merged matrix and against peft, bytes by kind, planted errors."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.chapter import load
from support.checkpoints import write_folder
from support.harness import ODD, TINY, assert_refused, config_of, in_long, run, with_fault

from lm import shapes, weights
from lm.hf_folder import write_adapter
from lm.lora import LoRALinear, adapt

SCRIPT = "07_memory_tricks/lora.py"
SMALL = (
    "--steps",
    3,
    "--seq-len",
    64,
    "--dtype",
    "fp32",
    "--device",
    "cpu",
    "--json",
    "summary.json",
)
BIASED = {**TINY, "model_type": "qwen2"}
RANK, TENSORS = 4, 14  # a block has 7 matrices, the model 2 blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A model in a Hugging Face folder, without a tokenizer: its tokens are bytes."""
    folder = tmp_path_factory.mktemp("models") / "model"
    write_folder(folder, config_of(BIASED))
    return folder


@pytest.fixture(scope="module")
def result(folder, tmp_path_factory):
    flags = ("--model", folder, *SMALL, "--steps", 8, "--rank", RANK)
    done = run(SCRIPT, tmp_path_factory.mktemp("run"), *flags)
    assert done.code == 0, done.err[-3000:]
    return done


def rows_of(result) -> dict[str, dict]:
    return {row["method"]: row for row in result.summary["rows"]}


def test_memory_by_kind_is_what_the_shapes_give(result):
    rows = rows_of(result)
    full, lora, qlora = rows["full"], rows["lora"], rows["qlora"]
    parameters = result.summary["parameters"]
    assert parameters == full["trained_parameters"] == shapes.parameter_count(config_of(BIASED))
    assert full["weight_bytes"] == full["gradient_bytes"] == 4 * parameters
    in_linears = 2 * (32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 64)
    trained = lora["trained_parameters"]
    assert trained == 2 * RANK * (2 * 64 + 2 * 48 + 3 * 96)
    assert lora["weight_bytes"] == 4 * (parameters + trained)
    assert qlora["weight_bytes"] == 4 * (parameters - in_linears + trained) + in_linears * 4.5 / 8
    for row in (lora, qlora):
        assert row["gradient_bytes"] == 4 * trained
        assert row["optimizer_bytes"] == 8 * trained + 4 * 2 * TENSORS  # AdamW counts its steps
        kept = row["weight_bytes"] + row["optimizer_bytes"]
        assert kept + row["activation_bytes"] < row["peak_memory_bytes"] < full["peak_memory_bytes"]


def test_every_method_learns_and_merging_changes_nothing(result):
    rows = rows_of(result)
    assert (
        rows["lora"]["val_loss_before"]
        == rows["full"]["val_loss_before"]
        != rows["qlora"]["val_loss_before"]
    )
    for row in rows.values():
        assert row["val_loss_after"] < row["val_loss_before"]
        if row["method"] != "full":
            assert row["val_loss_merged"] == pytest.approx(row["val_loss_after"], rel=1e-5)
            assert row["merged_error"] <= 1e-5


@pytest.mark.parametrize(
    "shape",
    [BIASED, pytest.param({**ODD, "tie_word_embeddings": True}, marks=pytest.mark.full)],
)
def test_peft_reads_what_is_saved_and_computes_the_same(tmp_path, shape):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    net = weights.build("nano", config_of(shape), seed=0)
    (tmp_path / "config.json").write_text(
        json.dumps(shapes.config_json(net.config)), encoding="utf-8"
    )
    for name, parameter in net.named_parameters():
        if name.endswith(".bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    save_file(
        dict(net.named_parameters()), tmp_path / "model.safetensors", metadata={"format": "pt"}
    )
    tokens = torch.randint(
        0, net.config.vocab_size, (2, 24), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        plain = net(tokens)
        adapt(net, rank=3, alpha=8.0)
        assert torch.equal(net(tokens), plain)
        for layer in net.modules():
            if isinstance(layer, LoRALinear):
                torch.nn.init.normal_(layer.lora_B, std=0.1)
        expected = net(tokens)
        trained = {name: each for name, each in net.named_parameters() if "lora_" in name}
        write_adapter(trained, tmp_path / "lora", str(tmp_path), rank=3, alpha=8.0)
        theirs = peft.PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(tmp_path), tmp_path / "lora"
        )
        assert error(theirs(tokens).logits, expected) <= 1e-5
        merged = weights.build("nano", net.config, seed=0)
        merged.load_state_dict(net.state_dict(), strict=False)
        for name, layer in net.named_modules():
            if isinstance(layer, LoRALinear):
                merged.get_submodule(name).weight = torch.nn.Parameter(layer.merged_weight())
        assert error(merged(tokens), expected) <= 1e-6
        assert error(plain, expected) > 1e-2  # the adapters do something


def test_the_lesson_computes_what_finetune_does():
    """The lesson shows LoRA; 06_fsdp_zero/finetune.py takes it from lm/lora.py."""
    lesson = load(SCRIPT)
    config = config_of(BIASED)
    shown = weights.build("nano", config, seed=0)
    used = weights.build("nano", config, seed=0)
    lesson.adapt(shown, rank=3, alpha=8.0, kind=lesson.LoRALinear)
    adapt(used, rank=3, alpha=8.0)
    for name, parameter in shown.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    used.load_state_dict(shown.state_dict())

    tokens = torch.randint(0, config.vocab_size, (2, 24))
    losses = [net(tokens, tokens) for net in (shown, used)]
    assert torch.equal(*losses)
    for loss in losses:
        loss.backward()
    expected = {name: each.grad for name, each in shown.named_parameters() if each.requires_grad}
    found = {name: each.grad for name, each in used.named_parameters() if each.requires_grad}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(found[name], gradient), name


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


FAULTS = {  # a line, and what stands in its place
    "a gradient twice as large": (
        "        return gradient @ ctx.layer.frozen_weight(gradient.dtype), None",
        "        return 2 * gradient @ ctx.layer.frozen_weight(gradient.dtype), None",
    ),
    "dequantized weights are kept for backward": (
        "        output = Int4Matmul.apply(x, self)",
        "        output = F.linear(x, self.frozen_weight(x.dtype))",
    ),
}


@pytest.mark.parametrize(
    "fault", ["a gradient twice as large", in_long("dequantized weights are kept for backward")]
)
def test_a_wrong_version_fails_its_own_check(folder, tmp_path, fault):
    script = with_fault(SCRIPT, tmp_path, *FAULTS[fault])
    done = run(str(script), tmp_path, "--model", folder, *SMALL)
    assert (done.code, "AssertionError" in done.err) == (1, True), done.err[-3000:]


def test_the_loss_is_of_the_answer_alone():
    class WordTokenizer:
        """One token a character; a chat as <user>question<assistant>answer<end>."""

        def apply_chat_template(self, chat, add_generation_prompt=False, return_dict=True):
            tokens = []
            for message in chat:
                tokens += [1 if message["role"] == "user" else 2, *map(ord, message["content"])]
            return {"input_ids": [*tokens, 2 if add_generation_prompt else 3]}

    inputs, targets = load("07_memory_tricks/_lora.py").encode(
        WordTokenizer(), {"prompt": "ab", "completion": "xy"}
    )
    a, b, x, y = map(ord, "abxy")
    assert inputs.tolist() == [1, a, b, 2, x, y]
    assert targets.tolist() == [-100, -100, -100, x, y, 3]


def test_bad_input_is_refused_in_one_line(tmp_path):
    for flags in (
        "--seq-len 100000",
        "--rank 0",
        "--method dora",
        "--model nowhere",
    ):
        assert_refused(run(SCRIPT, tmp_path, *flags.split()), *flags.split())


@pytest.mark.full
def test_a_model_with_random_weights_is_trained_first(tmp_path):
    (tmp_path / "tiny.json").write_text(json.dumps(TINY), encoding="utf-8")
    result = run(SCRIPT, tmp_path, "--model", "tiny.json", *SMALL, "--method", "qlora")
    assert result.code == 0, result.err[-3000:]
    assert rows_of(result)["qlora"]["val_loss_before"] < 5.4  # log(256) = 5.5 untrained


@pytest.mark.gpu(n=1)
def test_on_a_gpu_memory_falls_from_method_to_method(tmp_path, gpu_run):
    result = gpu_run(SCRIPT, tmp_path, "--device", "cuda", "--json", "summary.json")
    assert result.code == 0, result.err[-3000:]  # the script checks that the peaks fall
    for row in result.summary["rows"]:
        assert row["val_loss_after"] < row["val_loss_before"]
