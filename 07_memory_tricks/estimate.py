"""Will it fit, and how long will a step take? Computed before anything is started, from shapes alone, without torch.

A rank holds weights, gradients and optimizer state, which ZeRO divides; what backward needs of each token, which
checkpointing and the parallel sizes divide; and for a moment the logits and the blocks that sharding gathers. The peak
is the largest sum of what is alive together: while the loss runs backward, while a block does, or at the last
gradient. Each line of the answer has its formula. GiB is 2^30 bytes.

    laptop    python 07_memory_tricks/estimate.py --model nano --gpus 1 --seq-len 64 --dtype fp32
    one node  python 07_memory_tricks/estimate.py --model llama-70b --gpus 8 --device "NVIDIA H100 80GB HBM3" \\
                  --zero 3 --seq-len 4096 --micro-batch-size 1 --dtype bf16 --checkpointing full --optimizer adamw
    cluster   python 07_memory_tricks/estimate.py --model llama-70b --gpus 64 --advise
    serving   python 07_memory_tricks/estimate.py --model llama-8b --inference --concurrency 16 --weights int8
    a claim   python 07_memory_tricks/estimate.py --model llama-8b --gpus 8 --is-my-mfu-right 6667 --seq-len 8192

Look for: the line that is largest, and the moment of the peak: a trick that shrinks another line does not help.
Before: 06_fsdp_zero/. Next: memory_profile.py measures the same lines, train_big.py trains what fits.
"""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
import _estimate_shapes as shapes
from _estimate_frameworks import FRAMEWORKS, LOSSES
from _estimate_peak import MOMENTS, InBlock, moments
from _estimate_plan import DTYPES, OPTIMIZERS, Plan, check
from _estimate_shapes import Shape
from _estimate_sharded import block_ahead_bytes, gathered_by_backward, gathered_bytes, reduced_bytes, root_parameters
from _estimate_stages import placeholder_bytes, stage_of
from _estimate_widths import (
    attention_gradients,
    end_bytes,
    feed_forward_gradients,
    gradient_size,
    latent_bytes,
    mask_bytes,
    norm_bytes,
    product_widths,
    residual_bytes,
    rotated_width,
    weights_before,
)

CONTEXT = 512 * 2**20  # CUDA's context with torch's kernels: assumed, nvidia-smi shows 400 to 600 MiB
WORKSPACE = 2 * 32 * 2**20  # cuBLAS on Hopper and Blackwell: 32 MiB for each thread's handle (torch's CublasHandlePool)
NCCL = 256 * 2**20  # per communicator: 32 channels x (send, receive) x NCCL_BUFFSIZE, 4 MiB


def weight_bytes(parameters: float, *, bytes_each: float, shards: int = 1) -> float:
    """N x bytes / shards. ZeRO-3 and FSDP divide by the ranks that share data (arXiv:1910.02054, section 5)."""
    return parameters * bytes_each / shards


def gradient_bytes(parameters: float, *, bytes_each: float, shards: int = 1) -> float:
    """N x bytes / shards, from ZeRO-2 on."""
    return parameters * bytes_each / shards


def optimizer_bytes(parameters: float, *, optimizer: str, master: int, shards: int = 1) -> float:
    """N x (master copy + state) / shards, from ZeRO-1 on; AdamW's state is two fp32 numbers."""
    return parameters * (master + OPTIMIZERS[optimizer]) / shards


def attention_bytes(shape: Shape, plan: Plan) -> dict[str, float]:
    """What backward needs of a token's attention part, for hidden h, queries q, keys k, values v and element size e."""
    framework = FRAMEWORKS[plan.framework]
    h, e = shape.hidden, DTYPES[plan.dtype]
    own_heads = framework.repeated_heads or shape.latent  # keys and values of every query head
    ranks = plan.cp if framework.gathered_keys else 1  # whose keys and values are kept
    k = ranks * (shape.q_width if own_heads else shape.kv_width)
    v = ranks * (shape.value_width if own_heads else shape.kv_width)
    mixed = framework.mixed_qkv and not shape.latent
    return {
        "its norm": norm_bytes(shape, plan),
        "normalised input": h * e,
        "whole input": h * e * (plan.tp - 1) if framework.gathered_inputs else 0,
        "unrotated q, k, v": (shape.q_width + 2 * shape.kv_width) * e if mixed else 0,
        "latents": latent_bytes(shape, e),
        "q, k, v": (shape.q_width + k + (0 if mixed else v)) * e,
        "output, log-sum-exp": shape.value_width * e + 4 * shape.heads,
    }


def feed_forward_bytes(shape: Shape, plan: Plan, *, experts: bool = False) -> dict[str, float]:
    """What backward needs of a token's feed-forward part; of experts, the copies of its `active` ones."""
    framework = FRAMEWORKS[plan.framework]
    h, e = shape.hidden, DTYPES[plan.dtype]
    tensors = 2 if shape.gpt2 else framework.ffn_tensors  # GPT-2: before and after its GELU
    found = {
        "its norm": norm_bytes(shape, plan),
        "normalised input": h * e,
        "whole input": h * e * (plan.tp - 1) if framework.gathered_inputs else 0,
    }
    if not experts:
        return {**found, "gate, up, silu, product": tensors * shape.ffn * e}
    mixture = shape.experts
    return {
        **found,
        "router": 2 * 4 * mixture.number,  # logits and probabilities in fp32
        "copies for experts": mixture.active * h * e,
        "in the experts": tensors * (mixture.active * mixture.ffn + mixture.shared_ffn) * e,
    }


def kept_bytes(shape: Shape, plan: Plan, *, experts: bool) -> float:
    """Per token and block, what lies between forward and backward under --checkpointing: all of it; the block's input
    (Chen et al. 2016, arXiv:1604.06174); or that, the results of its products, and attention."""
    e = DTYPES[plan.dtype]
    block_input = shape.hidden * residual_bytes(plan)
    if plan.checkpointing == "full":
        return block_input + plan.kept_besides * e
    if plan.checkpointing == "none":
        everything = attention_bytes(shape, plan), feed_forward_bytes(shape, plan, experts=experts)
        return sum(sum(part.values()) for part in everything)
    products = sum(product_widths(shape, plan, experts=experts))
    return block_input + (products + shape.value_width + plan.kept_besides) * e + 4 * shape.heads


def logits_bytes(*, tokens: float, vocab: int, loss: str, tp: int = 1) -> float:
    """tokens x vocabulary x bytes: at the peak of a plain cross-entropy 12, of which forward leaves 4 (log-softmax)."""
    return tokens * vocab * LOSSES[loss] / tp


def cast_bytes(parameters: float, plan: Plan) -> float:
    """Under autocast each product keeps a 16-bit copy of its weight until backward; fully_shard gathers them so."""
    autocast = plan.framework == "ours" and plan.dtype != "fp32" and plan.zero < 3
    return parameters * DTYPES[plan.dtype] if autocast else 0.0


def kv_cache_bytes(shape: Shape, *, tokens: int, bytes_each: float = 2, tp: int = 1) -> float:
    """2 (keys, values) x layers x key-value heads x head_dim x bytes x tokens, over the tp ranks that have a head.

    Latent attention keeps one latent and one rotated key per token and layer, whole on each rank."""
    if mla := shape.latent:
        return shape.layers * (mla.kv_rank + mla.rope) * bytes_each * tokens
    return 2 * shape.layers * shape.kv_width * bytes_each * tokens / min(tp, shape.kv_heads)


def flops_per_token(shape: Shape, *, seq_len: int, count_embedding: bool = False, causal: bool = False) -> float:
    """6 N + 12 L heads head_dim seq_len (Chowdhery et al. 2022, appendix B): forward 2 and backward 4 per weight.

    N without what is only looked up, or with it; of a mixture, the experts of one token. causal: half the attention."""
    n = shapes.parameter_count(shape, active=True)
    if not count_embedding:
        n -= shapes.learned_positions(shape) + (0 if shape.tied else shapes.embedding_parameters(shape))
    attention = 6 * shape.layers * (shape.q_width + shape.value_width) * seq_len
    return 6 * n + attention / (2 if causal else 1)


def mfu(*, tokens_per_second: float, flops_per_token: float, peak_flops: float) -> float:
    """The share of the peak that the model's own arithmetic takes; tokens per second and device."""
    return tokens_per_second * flops_per_token / peak_flops


def memory_of_stage(shape: Shape, plan: Plan, number: int = 0) -> dict[str, float]:
    """Bytes by line for a rank of pipeline stage `number`, and at each moment that may be the peak."""
    framework, stage = FRAMEWORKS[plan.framework], stage_of(shape, plan, number)
    expert_ranks = plan.gpus // (plan.pp * plan.ep)  # that hold the same experts
    parts = [(stage.parameters, plan.shards), (stage.expert_parameters, expert_ranks)]

    def sharded(from_stage: int, ranks: int) -> int:
        return ranks if plan.zero >= from_stage else 1

    weights = sum(weight_bytes(n, bytes_each=framework.weight, shards=sharded(3, r)) for n, r in parts)
    gradients = sum(gradient_bytes(n, bytes_each=framework.gradient, shards=sharded(2, r)) for n, r in parts)
    state = {"optimizer": plan.optimizer, "master": framework.master}
    optimizer = sum(optimizer_bytes(n, **state, shards=sharded(1, r)) for n, r in parts)
    dense = kept_bytes(shape, plan, experts=False) * stage.dense_layers
    mixture = kept_bytes(shape, plan, experts=True) * stage.expert_layers if stage.expert_layers else 0
    per_token = (dense + mixture) * stage.in_flight + (end_bytes(shape, plan) if stage.last else 0)
    token_ids = 16 * stage.first  # inputs and targets, int64
    activations = plan.tokens * (per_token / plan.tp + token_ids) + mask_bytes(plan) * stage.in_flight
    has_experts, own_tokens = stage.expert_layers > 0, plan.tokens / plan.tp
    block = kept_bytes(shape, replace(plan, checkpointing="none"), experts=has_experts) * own_tokens
    tables = 0 if shape.gpt2 else 2 * 4 * shape.positions * rotated_width(shape)  # cos and sin in fp32
    placeholders = placeholder_bytes(shape, plan, stage)
    buckets = framework.bucket * stage.parameters if plan.shards > 1 else 0
    lines = {
        "weight_bytes": weights,
        "gradient_bytes": gradients,
        "optimizer_bytes": optimizer,
        "activation_bytes": activations,
        "block_bytes": block,
        "logits_bytes": logits_bytes(tokens=plan.tokens, vocab=shape.vocab, loss=plan.loss, tp=plan.tp) * stage.last,
        "gathered_bytes": gathered_bytes(shape, plan, stage),
        "reduced_bytes": reduced_bytes(shapes.largest_layer(shape) / plan.ep, plan),
        "cast_bytes": cast_bytes(stage.matrix_parameters, plan),
        "buffer_bytes": tables + placeholders + buckets + (0 if plan.on_cpu else WORKSPACE),
    }
    gradient_each = gradients / stage.all_parameters

    def in_block(activations: float, *, weights_left: float) -> InBlock:
        left = weights_left / plan.tp
        return InBlock(activations, gradients=left * gradient_each, casts=cast_bytes(left, plan))

    in_feed_forward = block + feed_forward_gradients(shape, plan, experts=has_experts) * own_tokens
    in_attention = sum(attention_bytes(shape, plan).values()) + attention_gradients(shape, plan)
    before_attention, before_down = weights_before(shape)
    embedding = shapes.embedding_parameters(shape) / plan.tp
    both_ends = stage.first and stage.last and shape.tied
    of_backward = {
        "feed_forward": in_block(in_feed_forward, weights_left=before_down),
        "attention": in_block(in_attention * own_tokens, weights_left=before_attention),
        "kept_of_block": kept_bytes(shape, plan, experts=has_experts) * own_tokens,
        "kept_of_end": end_bytes(shape, plan) * own_tokens * stage.last,
        "head_gradient": embedding * gradient_each * stage.last,
        "head_cast": cast_bytes(embedding * stage.last, plan),
        "root_reduced": reduced_bytes(root_parameters(shape, stage), plan),
        "embedding_gradient": 0 if both_ends else embedding * gradient_each * stage.first,
        "tied_gradients": 2 * embedding * gradient_size(plan) if both_ends else 0,
        "block_ahead": block_ahead_bytes(shape, plan),
        "gathered_by_backward": gathered_by_backward(shape, plan, stage),
        "of_others_in_flight": activations * (1 - 1 / stage.in_flight),
    }
    return {**lines, **moments(plan, lines, **of_backward)}


def memory(shape: Shape, plan: Plan, *, stages: Sequence[int] | None = None) -> dict[str, float]:
    """Bytes by line for the rank that needs most: total_bytes is what the device must have."""
    check(shape, plan)
    found = [memory_of_stage(shape, plan, number) for number in stages or range(plan.pp)]
    lines = max(found, key=lambda lines: max(lines[moment] for moment in MOMENTS))
    allocated = max(lines[moment] for moment in MOMENTS)
    long_lived = sum(lines[name] for name in ("weight_bytes", "gradient_bytes", "optimizer_bytes", "buffer_bytes"))
    groups = sum(size > 1 for size in (plan.dp, plan.tp, plan.pp, plan.cp, plan.ep))
    context, nccl = (0, 0) if plan.on_cpu else (CONTEXT, groups * NCCL)
    fragments = FRAMEWORKS[plan.framework].reserved * max(0.0, allocated - long_lived)
    return {
        **lines,
        "allocated_bytes": allocated,
        "fragmentation_bytes": fragments,
        "reserved_bytes": allocated + fragments,
        "context_bytes": context,
        "nccl_bytes": nccl,
        "total_bytes": allocated + fragments + context + nccl,
    }


def main() -> int:
    from _estimate_report import answer

    return answer(__doc__)


if __name__ == "__main__":
    from old import exits

    exits.run(main)
