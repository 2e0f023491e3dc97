"""07_memory_tricks/gradient_checkpointing.py, and --checkpointing: the same gradients, less memory."""

import importlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.harness import TINY, assert_refused, config_of, run
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import CheckpointPolicy

from lm import shapes
from lm.activation_checkpointing import checkpoint_blocks, selective_contexts
from lm.model import Transformer, attend
from lm.weights import build

SCRIPT = "07_memory_tricks/gradient_checkpointing.py"
ODD = {
    **TINY,
    "vocab_size": 259,
    "hidden_size": 36,
    "intermediate_size": 50,
    "head_dim": 10,
    "num_hidden_layers": 7,
}


def test_less_is_kept_and_no_gradient_moves(tmp_path: Path):
    (tmp_path / "odd.json").write_text(json.dumps(ODD), encoding="utf-8")
    flags = (
        "--model",
        "odd.json",
        "--seq-len",
        21,
        "--batch-size",
        3,
        "--rounds",
        2,
        "--device",
        "cpu",
    )
    result = run(SCRIPT, tmp_path, *flags, "--json", "summary.json")
    assert result.code == 0, result.err[-3000:]
    rows = {row["name"]: row for row in result.summary["rows"]}
    kept = {name: row["kept_bytes"] for name, row in rows.items()}
    assert kept["none"] > kept["selective"] > kept["full"]
    assert kept["full, by hand"] == pytest.approx(kept["full"], rel=0.01)
    assert {row["gradient_relative_error"] for row in rows.values()} == {0.0}
    assert result.summary["parameters"] == shapes.parameter_count(config_of(ODD))
    assert all(row["peak_bytes"] > row["kept_bytes"] for row in rows.values())


@pytest.mark.gpu(n=1)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_on_a_gpu(gpu_run, tmp_path, dtype):
    flags = ("--device", "cuda", "--dtype", dtype, "--rounds", 1, "--json", "summary.json")
    result = gpu_run(SCRIPT, tmp_path, *flags)
    assert result.code == 0, result.err[-3000:]
    rows = {row["name"]: row for row in result.summary["rows"]}
    assert rows["full"]["peak_bytes"] < rows["selective"]["peak_bytes"] < rows["none"]["peak_bytes"]


def test_bad_input_is_refused_in_one_line(tmp_path):
    for flags in (
        "--model nonsense",
        "--seq-len 2000",
        "--rounds 0",
        "--dtype fp16",
        "--json none/s.json",
    ):
        assert_refused(run(SCRIPT, tmp_path, *flags.split()), *flags.split())


KERNELS = (
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_efficient_attention_forward",  # of causal_lower_right in fp32, on a GPU
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",  # of packing.py, on a GPU
)


def test_selective_checkpointing_keeps_attention_of_each_kernel():
    importlib.import_module("torch.nn.attention.varlen")  # registers its operator
    importlib.import_module("torch.nn.attention.flex_attention")
    assert_kept(torch.ops.higher_order.flex_attention)
    for name in KERNELS:
        namespace, short_name = name.split("::")
        assert_kept(getattr(getattr(torch.ops, namespace), short_name).default)


def assert_kept(operator) -> None:
    in_forward, _ = selective_contexts((1, 1), set())
    assert in_forward.policy_fn(None, operator) == CheckpointPolicy.MUST_SAVE


def by_matmuls(q, k, v, mask=None, **options):
    """Attention without a fused kernel."""
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, mask, **options)


def by_hand(q, k, v, mask=None, *, is_causal, enable_gqa):
    """Attention by operators that nobody knows."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
    return (q @ k.mT).softmax(-1) @ v


def selective(attend: Callable) -> Transformer:
    net = build("nano", config_of(ODD), seed=0)
    checkpoint_blocks(net, "selective")
    for block in net.model.layers.values():
        block.self_attn.attend = attend
    return net


def test_attention_without_a_fused_kernel_is_computed_again():
    ids = torch.arange(42).view(2, 21)
    fused = selective(attend)
    fused(ids, ids).backward()
    net = selective(by_matmuls)
    net(ids, ids).backward()
    for ours, theirs in zip(net.parameters(), fused.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


def test_selective_checkpointing_fails_if_it_does_not_know_attention():
    ids = torch.arange(42).view(2, 21)
    net = selective(by_hand)
    with torch.no_grad():
        net(ids, ids)  # nothing is kept for a backward
    with pytest.raises(AssertionError, match="attention"):
        net(ids, ids)
