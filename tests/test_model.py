"""lm/model.py: the arithmetic, the shapes, the figures derived from them."""

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
from support.harness import ROOT
from torch.nn.attention import SDPBackend, sdpa_kernel

from common import runtime
from common.exits import UserError
from lm import model, shapes
from lm.activation_checkpointing import checkpoint_blocks
from lm.weights import build, load_config, read_config
from planner.shape import from_config

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10_000.0}


def llama(tmp_path, kind="llama", **changes):
    """A random model of transformers, saved in the folder."""
    from transformers import AutoConfig, AutoModelForCausalLM

    shape = {
        "vocab_size": 300,
        "hidden_size": 48,
        "intermediate_size": 112,
        "num_hidden_layers": 3,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": PLAIN_ROPE,
        "tie_word_embeddings": False,
    }
    torch.manual_seed(1)
    net = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **{**shape, **changes})
    ).eval()
    with torch.no_grad():
        # norms start as ones, biases as zeros: a swapped pair would not show
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    net.save_pretrained(tmp_path)
    return net


@pytest.mark.parametrize(
    ("key_value_heads", "tied", "rope"),
    [
        (2, False, PLAIN_ROPE),
        (2, False, LLAMA3_ROPE),
        (1, True, PLAIN_ROPE),
        (6, False, LLAMA3_ROPE),
    ],
    ids=["plain", "llama3", "one key-value head, tied", "a key-value head for each"],
)
def test_logits_equal_those_of_transformers(tmp_path, key_value_heads, tied, rope):
    changes = {
        "num_key_value_heads": key_value_heads,
        "tie_word_embeddings": tied,
        "rope_parameters": rope,
    }
    theirs = llama(tmp_path, **changes)
    config = load_config(str(tmp_path), 256, 200)
    # refuses other names and other shapes than its own
    ours = build(str(tmp_path), config, seed=0)
    tokens = torch.randint(0, 300, (2, 200), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
        logits = theirs(tokens[:, :-1]).logits.flatten(0, 1)
        expected = F.cross_entropy(logits, tokens[:, 1:].flatten())
        torch.testing.assert_close(
            ours(tokens[:, :-1], tokens[:, 1:]), expected, rtol=1e-5, atol=1e-5
        )
        fresh = model.Transformer(config)
        theirs.load_state_dict(fresh.state_dict())
        torch.testing.assert_close(fresh(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "tied", "rope"),
    [
        ("mistral", True, LLAMA3_ROPE),
        ("qwen2", False, PLAIN_ROPE),
        ("qwen3", True, LLAMA3_ROPE),
    ],
    ids=["mistral", "qwen2", "qwen3"],
)
def test_other_families_are_those_of_transformers(tmp_path, kind, tied, rope):
    """Logits and gradients, and written back the same model. head_dim is another than hidden_size / heads."""
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM

    changes = {"tie_word_embeddings": tied, "rope_parameters": rope, "head_dim": 16}
    theirs = llama(tmp_path, kind, **changes if kind != "qwen2" else {**changes, "head_dim": 8})
    config = load_config(str(tmp_path), 256, 40)
    ours = build(str(tmp_path), config, seed=0)
    assert shapes.parameter_count(config) == sum(
        parameter.numel() for parameter in ours.parameters()
    )
    assert from_config("", config).parameter_count() == shapes.parameter_count(config)
    tokens = torch.randint(0, 300, (2, 40), generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(ours(tokens), theirs(tokens).logits, rtol=0, atol=1e-4)
    ours(tokens[:, :-1], tokens[:, 1:]).backward()
    F.cross_entropy(theirs(tokens[:, :-1]).logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in theirs.named_parameters()}
    for name, parameter in ours.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], rtol=1e-4, atol=1e-6)
    again = tmp_path / "again"
    again.mkdir()
    (again / "config.json").write_text(json.dumps(shapes.config_json(config)), encoding="utf-8")
    weights = {name: weight.detach().clone() for name, weight in ours.named_parameters()}
    save_file(weights, again / "model.safetensors", metadata={"format": "pt"})
    with torch.no_grad():
        written = AutoModelForCausalLM.from_pretrained(again)(tokens).logits
    torch.testing.assert_close(written, theirs(tokens).logits, rtol=0, atol=1e-4)
    assert read_config(str(again)) == config


def test_a_window_is_a_limit_of_positions_and_other_files_do_no_harm(tmp_path):
    from safetensors.torch import load_file, save_file

    llama(tmp_path, "mistral", sliding_window=64)
    assert read_config(str(tmp_path)).max_position_embeddings == 64
    (tmp_path / "training_args.bin").write_bytes(b"of a Trainer")
    file = tmp_path / "model.safetensors"
    save_file(
        {**load_file(file), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}, file
    )
    build(str(tmp_path), read_config(str(tmp_path)), seed=0)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"model.norm.weight": torch.ones(47)}, r"model.norm.weight .*\(47,\).*\(48,\)"),
        ({"model.norm.weight": None}, "model.norm.weight .*missing"),
        ({"model.other.weight": torch.ones(2)}, r"model.other.weight .*\(2,\).*missing"),
    ],
    ids=["shape", "missing", "superfluous"],
)
def test_weights_that_do_not_fit_are_named(tmp_path, change, told):
    from safetensors.torch import load_file, save_file

    llama(tmp_path)
    file = tmp_path / "model.safetensors"
    weights = {**load_file(file), **change}
    save_file({name: weight for name, weight in weights.items() if weight is not None}, file)
    with pytest.raises(UserError, match=told):
        build(str(tmp_path), load_config(str(tmp_path), 256, 64), seed=0)


def test_config_of_an_older_transformers(tmp_path):
    file = tmp_path / "config.json"
    shape = {"vocab_size": 300, "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 3}
    shape |= {
        "num_attention_heads": 6,
        "max_position_embeddings": 64,
        "rope_theta": 5e5,
        "rope_scaling": None,
    }
    file.write_text(json.dumps({**shape, "model_type": "llama"}), encoding="utf-8")
    config = load_config(str(file), 256, 64)
    assert (config.rope_theta, config.num_key_value_heads, config.head_dim) == (5e5, 6, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_causal(dtype):
    net = build("nano", dataclasses.replace(shapes.SIZES["nano"], num_key_value_heads=2), seed=0)
    tokens = torch.randint(0, 256, (1, 40))
    changed = tokens.clone()
    changed[0, 25] = (changed[0, 25] + 1) % 256
    with torch.no_grad(), torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        before, after = net(tokens), net(changed)
    torch.testing.assert_close(before[:, :25], after[:, :25], rtol=0, atol=0)
    assert (before[:, 25:] != after[:, 25:]).any(-1).all()  # and every later position has seen it


def test_selective_checkpointing_keeps_what_matmuls_gave_and_not_the_last():
    config = dataclasses.replace(shapes.SIZES["nano"], num_hidden_layers=1, num_key_value_heads=4)
    net = build("nano", config, seed=0)
    checkpoint_blocks(net, "selective")
    compiled = torch.compile(net, backend="aot_eager", fullgraph=True)
    inputs = torch.randint(0, 256, (3, 20))
    targets = torch.randint(0, 256, (3, 20))
    kept = []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        compiled(inputs, targets)
    tokens = inputs.numel()
    widths = [
        tensor.numel() // tokens
        for tensor in kept
        if tensor.dtype == torch.bfloat16 and tokens in tensor.shape
    ]
    # k and v; q, o_proj and the head's input; gate and up. down_proj's output is computed again.
    assert sorted(widths) == [128, 128, 256, 256, 256, 688, 688]


PUBLISHED = {
    "llama-124m": 123_587_328,
    "llama-1b": 1_235_814_400,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
}


def test_named_sizes_have_the_published_parameter_counts():
    for name, parameters in PUBLISHED.items():
        with torch.device("meta"):
            net = model.Transformer(shapes.SIZES[name])
        assert sum(p.numel() for p in net.parameters()) == parameters, name
        assert shapes.parameter_count(shapes.SIZES[name]) == parameters, name


def test_flops_per_token():
    big, small = shapes.SIZES["llama-8b"], shapes.SIZES["llama-124m"]
    # by the closed form, input embedding left out
    assert shapes.flops_per_token(big, 8192) == 57_914_449_920
    # tied: the one matrix counts, as lm_head; published GPT-2 124M figures use 855,166,464 (biases, 50,257 tokens)
    assert shapes.flops_per_token(small, 1024) == pytest.approx(855_166_464, rel=0.002)


def test_the_device_is_the_local_rank_not_a_guess_from_the_rank(monkeypatch):
    """Rank 5 may well be the second process of its node."""
    launched = {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "1",
    }
    for name, value in launched.items():
        monkeypatch.setenv(name, value)
    assert runtime.ranks() == (5, 8, 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    assert runtime.pick_device("cuda") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "4")
    with pytest.raises(UserError, match=r"5 processes.* 4 GPUs"):
        runtime.pick_device("cuda")


def masked_and_grouped(dtype: torch.dtype = torch.float64, device: str = "cpu"):
    """Six query heads, two key-value heads and eleven keys."""
    positions = torch.tensor([[2, 3, 4], [8, 9, 10]])  # of the queries
    generator = torch.Generator().manual_seed(3)
    sizes = [(2, 3, 6, 8), (2, 11, 2, 8), (2, 11, 2, 8)]
    q, k, v = (
        torch.randn(size, generator=generator).transpose(1, 2).to(device, dtype) for size in sizes
    )
    seen = (torch.arange(11) <= positions[..., None])[:, None]
    return [part.requires_grad_() for part in (q, k, v)], seen.to(device)


def check_attention(dtype: torch.dtype, device: str) -> None:
    """With and without a mask: outputs and gradients are those of torch's own attention in fp64."""
    inputs, seen = masked_and_grouped(dtype, device)
    exact = [part.detach().double().requires_grad_() for part in inputs]
    tolerance = 1e-5 if dtype == torch.float32 else 0.02
    for mask in (seen, None):
        expected = F.scaled_dot_product_attention(*exact, mask, enable_gqa=True)
        # not the one with all scores
        with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]):
            found = model.attend(*inputs, mask, enable_gqa=True)
        gradients = [
            torch.autograd.grad(out.sum(), wrt) for out, wrt in ((found, inputs), (expected, exact))
        ]
        for ours, correct in zip([found, *gradients[0]], [expected, *gradients[1]], strict=True):
            torch.testing.assert_close(ours.double(), correct, rtol=tolerance, atol=tolerance)


def test_attention_with_grouped_heads_is_torchs():
    check_attention(torch.float32, "cpu")


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_gpu_takes_grouped_heads_without_holding_all_scores(gpu_run, tmp_path, dtype):
    code = f"import torch, test_model; test_model.check_attention(torch.{dtype}, 'cuda')"
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    result = gpu_run(tmp_path / "script.py", tmp_path, PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    assert result.code == 0, result
