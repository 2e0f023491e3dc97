"""config.json: keys that are missing, null or wrong, and windows that layers have or have not."""

import json
import math
from itertools import product
from pathlib import Path

import pytest
import torch
from support.harness import BASELINE, TEXT, assert_refused, in_full, run

from common.exits import UserError
from lm import shapes
from lm.weights import build

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral")
ROPE = {
    "rope_type": "llama3",
    "factor": 2.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
# Every key that decides the model, none of them the default of a family.
COMPLETE = {
    "vocab_size": 300,
    "hidden_size": 256,
    "intermediate_size": 112,
    "num_hidden_layers": 2,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 10,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-3,
    "rope_theta": 500.0,
    "rope_scaling": ROPE,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "sliding_window": 8192,
    "use_sliding_window": False,
    "max_window_layers": 1,
    "layer_types": ["full_attention", "full_attention"],
}
EXPERTS = {
    "qwen3_moe": {
        "num_experts": 12,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 40,
        "norm_topk_prob": True,
        "decoder_sparse_step": 2,
        "mlp_only_layers": [0],
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
    "mixtral": {
        "num_local_experts": 12,
        "num_experts_per_tok": 3,
        "output_router_logits": True,
        "router_aux_loss_coef": 0.5,
    },
}
# A file without one of these is no model's: transformers would make a model of 7B of it.
SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
SIZES += ("num_attention_heads",)
TRAINING = ["--device", "cpu", "--dtype", "fp32", "--data", TEXT, "--global-batch-size", 6]
TRAINING += ["--steps", 1, "--keep", 0]


def write(folder: Path, content: dict) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def of_transformers(folder: Path) -> dict:
    """Return what transformers reads from the folder, under the names of shapes.Config."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    rope = config.rope_parameters
    heads = config.num_attention_heads
    layer_types = getattr(config, "layer_types", None) or []
    kind = config.model_type
    has_window = kind in ("mistral", "mixtral", "qwen3_moe") or "sliding_attention" in layer_types
    window = getattr(config, "sliding_window", None) if has_window else None
    scaling = None
    if rope["rope_type"] == "llama3":
        scaling = {key: rope[key] for key in shapes.ROPE_SCALING}
    return {
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_hidden_layers,
        "num_attention_heads": heads,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": getattr(config, "head_dim", None) or config.hidden_size // heads,
        "max_position_embeddings": min(config.max_position_embeddings, window or math.inf),
        "rope_theta": rope["rope_theta"],
        "rope_scaling": scaling,
        "rms_norm_eps": config.rms_norm_eps,
        "tie_word_embeddings": config.tie_word_embeddings,
        "qkv_bias": config.model_type == "qwen2" or getattr(config, "attention_bias", False),
        "qk_norm": config.model_type in ("qwen3", "qwen3_moe"),
        "experts": experts_of_transformers(config),
    }


def experts_of_transformers(config) -> shapes.ExpertConfig | None:
    """Return what a config of transformers says about experts. Its code decides which layers."""
    if config.model_type not in EXPERTS:
        return None
    dense = ()
    size = config.intermediate_size
    if config.model_type == "qwen3_moe":
        size = config.moe_intermediate_size
        layers = range(config.num_hidden_layers)
        step = config.decoder_sparse_step
        dense = tuple(i for i in layers if i in config.mlp_only_layers or (i + 1) % step)
    return shapes.ExpertConfig(
        config.num_local_experts,
        config.num_experts_per_tok,
        size,
        getattr(config, "norm_topk_prob", True),
        dense,
        config.router_aux_loss_coef if config.output_router_logits else 0.0,
    )


def complete_config(family: str) -> dict:
    return {"model_type": family, **COMPLETE, **EXPERTS.get(family, {})}


def found(folder: Path) -> dict:
    return vars(shapes.read_config(str(folder)))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_missing_key_has_the_value_of_transformers(tmp_path, family):
    complete = complete_config(family)
    assert found(write(tmp_path, complete)) == of_transformers(tmp_path)
    for key in complete:
        if key == "model_type":
            continue
        write(tmp_path, {name: value for name, value in complete.items() if name != key})
        if key in SIZES:
            with pytest.raises(UserError, match=f"lacks {key}"):
                shapes.read_config(str(tmp_path))
        else:
            assert found(tmp_path) == of_transformers(tmp_path), key


@pytest.mark.parametrize("family", FAMILIES)
def test_null_has_the_value_of_transformers(tmp_path, family):
    nulls = ["sliding_window", "rope_scaling", "layer_types"]
    # Where these are missing here, null is an error in transformers.
    if family not in ("mistral", "mixtral", "qwen3_moe"):
        nulls.append("num_key_value_heads")
    if family not in ("qwen3", "qwen3_moe"):
        nulls.append("head_dim")
    for key in nulls:
        write(tmp_path, {**complete_config(family), key: None})
        if key == "head_dim" and family == "qwen2":  # transformers reads it, and cannot build it
            assert found(tmp_path)["head_dim"] == 8
        else:
            assert found(tmp_path) == of_transformers(tmp_path), key
    write(tmp_path, {"model_type": "qwen3", **COMPLETE, "head_dim": None})
    assert found(tmp_path)["head_dim"] == 128


def test_keys_of_rope_are_those_of_transformers(tmp_path):
    plain = {"rope_type": "default", "rope_theta": 7.0}
    without_length = {**ROPE}
    del without_length["original_max_position_embeddings"]
    for rope in (
        {"rope_parameters": plain, "rope_scaling": None},
        {"rope_parameters": plain, "rope_scaling": ROPE},
        {"rope_parameters": plain, "rope_scaling": {}},
        {"rope_parameters": {"rope_theta": 9.0}, "rope_scaling": None},
        {"rope_scaling": {**plain, "type": "default"}},
        {"rope_scaling": without_length},
        # a window is no limit of what the model was first trained on
        {"rope_scaling": without_length, "model_type": "mistral", "sliding_window": 32},
    ):
        write(tmp_path, {"model_type": "llama", **COMPLETE, **rope})
        assert found(tmp_path) == of_transformers(tmp_path), rope
    for key in ("factor", "low_freq_factor", "high_freq_factor"):
        lacking = {name: value for name, value in ROPE.items() if name != key}
        write(tmp_path, {"model_type": "llama", **COMPLETE, "rope_scaling": lacking})
        with pytest.raises(UserError, match=f"lacks {key} "):
            shapes.read_config(str(tmp_path))


def test_a_window_is_that_of_transformers(tmp_path):
    full = "full_attention"
    sliding = "sliding_attention"
    for family, used, window, first, layer_types in product(
        ("mistral", "qwen2", "qwen3"),
        (True, False),
        (32, None),
        (0, 1, 28),
        (None, [full, full], [full, sliding]),
    ):
        content = {"model_type": family, **COMPLETE, "use_sliding_window": used}
        content |= {"sliding_window": window, "max_window_layers": first}
        content["layer_types"] = layer_types
        write(tmp_path, content)
        no_window = window is None or not (used or family == "mistral")
        if no_window and sliding in (layer_types or []):
            with pytest.raises(UserError, match="sliding_window"):
                shapes.read_config(str(tmp_path))
        else:
            assert found(tmp_path) == of_transformers(tmp_path), content


def test_keys_that_a_family_does_not_read_are_no_reason_to_refuse_it(tmp_path):
    for family in ("mistral", "qwen2"):
        write(tmp_path, {"model_type": family, **COMPLETE, "attention_bias": True})
        assert found(tmp_path)["qkv_bias"] == (family == "qwen2")
    for family in ("llama", "qwen3"):
        write(tmp_path, {"model_type": family, **COMPLETE, "attention_bias": True})
        with pytest.raises(UserError, match="attention_bias"):
            shapes.read_config(str(tmp_path))


WRONG = ["x", "12", "", None, [], [1], {}, {"a": 1}, -1, 0, 1.5, True, math.inf, math.nan]
WRONG += [10**30, ["full_attention", 3], [["x"], ["y"]]]


@pytest.mark.parametrize("family", ["qwen3", *map(in_full, ("llama", "mistral", "qwen2"))])
def test_no_value_gives_more_than_a_line(tmp_path, family):
    """Any other exception than UserError fails the test."""
    windows = {"use_sliding_window": True, "partial_rotary_factor": 1.0}
    complete = {"model_type": family, **COMPLETE, **windows, "quantization_config": None}
    places = [(None, key) for key in complete] + [("rope_scaling", key) for key in ROPE]
    lines = []
    for (place, key), value in product(places, WRONG):
        content = json.loads(json.dumps(complete))
        (content[place] if place else content)[key] = value
        try:
            shapes.read_config(str(write(tmp_path, content)))
        except UserError as error:
            lines.append(str(error))
    assert len(lines) > len(places) * len(WRONG) / 2
    assert not [line for line in lines if "Error" in line or "\n" in line]


# --- what a user sees


@pytest.mark.parametrize("family", ["qwen2", in_full("qwen3")])
def test_a_window_that_no_layer_has_does_not_limit_training(tmp_path, family):
    sizes = {"vocab_size": 256, "hidden_size": 32, "num_attention_heads": 4, "head_dim": 8}
    sizes |= {"num_key_value_heads": 2, "rope_scaling": None, "layer_types": None}
    window = {"use_sliding_window": True, "sliding_window": 32}
    content = {"model_type": family, **COMPLETE, **sizes, **window}
    write(tmp_path / "no_layer", {**content, "max_window_layers": 2})
    write(tmp_path / "last_layer", {**content, "max_window_layers": 1})
    for name, seq_len in (("no_layer", 64), ("last_layer", 32)):
        flags = ["--model", name, "--seq-len", seq_len]
        result = run(BASELINE, tmp_path, *flags, *TRAINING)
        assert result.code == 0, result
    result = run(BASELINE, tmp_path, "--model", "last_layer", "--seq-len", 64, *TRAINING)
    assert_refused(result, "--seq-len 64", "--model last_layer", "32")


def test_a_folder_without_head_dim_and_original_length_computes_as_in_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

    sizes = {"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}
    torch.manual_seed(1)
    net = Qwen3ForCausalLM(Qwen3Config(**sizes, max_position_embeddings=64))
    net.save_pretrained(tmp_path / "model")
    file = tmp_path / "model/config.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    del content["head_dim"]
    rope = {**ROPE, "rope_theta": 1e4}
    del rope["original_max_position_embeddings"]
    content["rope_parameters"] = rope
    file.write_text(json.dumps(content), encoding="utf-8")

    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ours = build(str(tmp_path / "model"), shapes.read_config(str(tmp_path / "model")), seed=0)
    tokens = torch.randint(0, 256, (2, 40), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
    result = run(BASELINE, tmp_path, "--model", "model", "--seq-len", 64, *TRAINING)
    assert result.code == 0, result

    del content["rope_parameters"]["factor"]
    file.write_text(json.dumps(content), encoding="utf-8")
    result = run("09_inference/infer_70b.py", tmp_path, "--model", "model", "--device", "cpu")
    assert_refused(result, "--model model", "lacks factor")


def test_the_planner_has_the_defaults_too(tmp_path):
    """The same shape, whether a default is written out or not; wrong values are one line."""
    content = {"model_type": "qwen3", **COMPLETE, "head_dim": 128, "num_key_value_heads": 32}
    short = {**content}
    del short["head_dim"]
    del short["num_key_value_heads"]
    summaries = []
    for name, config in (("written", content), ("short", short)):
        write(tmp_path / name, config)
        flags = ["--model", name, "--gpus", 1, "--json", "summary.json"]
        result = run("07_memory_tricks/estimate.py", tmp_path, *flags)
        assert result.code == 0, result
        summaries.append({**result.summary, "model": None})
    assert summaries[0] == summaries[1]
    # Mixtral has a default for null
    odd = [("deepseek_v3", None), *product(("mixtral", "deepseek_v3"), ("4", -1))]
    for kind, value in odd:
        write(tmp_path / "odd", {**short, "model_type": kind, "num_experts_per_tok": value})
        result = run("07_memory_tricks/estimate.py", tmp_path, "--model", "odd")
        assert_refused(result, "--model odd")
