"""The formula of each line that estimate.py prints, with this model's numbers in it."""

import argparse

import _estimate_shapes as shapes
import estimate
from _estimate_frameworks import FRAMEWORKS, LOSSES
from _estimate_inference import CACHE_DTYPES
from _estimate_plan import DTYPES, OPTIMIZERS, Plan
from _estimate_shapes import Shape
from _estimate_sharded import gradients_stay_whole, weights_stay_whole
from _estimate_widths import mask_bytes, residual_bytes


def training_formulas(shape: Shape, plan: Plan) -> dict[str, str]:
    framework = FRAMEWORKS[plan.framework]
    n = f"{shapes.parameter_count(shape):,}"
    tp, ep = (f" / {name} {size}" if size > 1 else "" for name, size in (("tp", plan.tp), ("ep", plan.ep)))
    parallel = tp + (f" / pp {plan.pp}" if plan.pp > 1 else "")
    parallel += f", experts / ep {plan.ep}" if plan.ep > 1 else ""

    def shards(since: int) -> str:
        return f" / {plan.shards} ranks" if plan.zero >= since and plan.shards > 1 else ""

    state = framework.master + OPTIMIZERS[plan.optimizer]
    master = f" (master weights {framework.master}, {plan.optimizer} {OPTIMIZERS[plan.optimizer]:g})"
    tokens = f"{plan.seq_len} x {plan.micro_batch_size} tokens" + (f" / cp {plan.cp}" if plan.cp > 1 else "")
    what = {
        "none": "norms, q, k, v, attention, gate, up, silu, product",
        "full": f"its input: {shape.hidden} x {residual_bytes(plan)}",
        "selective": "its input, products, attention",
    }
    kept = estimate.kept_bytes(shape, plan, experts=shape.expert_layers > 0)
    kept_of_a_layer = f"{kept:,.0f} bytes ({what[plan.checkpointing]})"
    cast = "0: nothing is cast, or it is gathered so"
    if plan.framework == "ours" and plan.zero < 3 and plan.dtype != "fp32":
        cast = f"matrices x {DTYPES[plan.dtype]} bytes{parallel}, kept by autocast"
    mask = " + a mask of all tokens for the own ones" if mask_bytes(plan) else ""
    in_flight = f" x {min(plan.pp, plan.micro_batches)} micro-batches in flight" if plan.pp > 1 else ""
    gathered = "0: nothing is sharded"
    if plan.zero == 3:
        ends = " + embedding" if shape.tied else " + embedding + head"
        root = ends if framework.gathers_root else ""
        gathered = f"(2 blocks{ep}{root}) x {DTYPES[plan.dtype]} bytes{tp}"
    reduced = f"a block's whole gradient{ep} x ({DTYPES[plan.dtype]} + 4) bytes{tp}" if plan.zero == 3 else "0"
    if weights_stay_whole(plan):
        gathered = f"the stage's weights x {DTYPES[plan.dtype]} + gradients x 4 bytes"
    elif gradients_stay_whole(plan):
        gathered += " + the stage's gradients x 4"
        reduced = f"a block's gradient{ep} x {DTYPES[plan.dtype]} bytes{tp}, before it is added to those"
    buffers = "cos and sin of every position, fp32" if not shape.gpt2 else "0"
    buffers += "" if plan.on_cpu else " + cuBLAS workspaces"
    buffers += " + placeholder gradients" if framework.placeholders else ""
    buffers += " + all-reduce buckets" if framework.bucket else ""
    block = "part of the activations" if plan.checkpointing == "none" else "recomputed in backward"
    return {
        "weight_bytes": f"{n} x {framework.weight} bytes{shards(3)}{parallel}",
        "gradient_bytes": f"{n} x {framework.gradient} bytes{shards(2)}{parallel}",
        "optimizer_bytes": f"{n} x {state:g} bytes{master}{shards(1)}{parallel}",
        "activation_bytes": f"{tokens} x {shape.layers} layers{parallel} x {kept_of_a_layer}{mask}{in_flight}",
        "block_bytes": f"{tokens} x one block: {block}",
        "logits_bytes": f"{tokens} x {shape.vocab:,} x {LOSSES[plan.loss]:g} bytes{tp} ({plan.loss} cross-entropy)",
        "gathered_bytes": gathered,
        "cast_bytes": cast,
        "reduced_bytes": reduced,
        "buffer_bytes": buffers,
        "allocated_bytes": "the peak, as torch.cuda.max_memory_allocated counts it",
        "fragmentation_bytes": f"{framework.reserved:.0%} of what changes within a step: assumed",
        "context_bytes": "CUDA context and kernels: assumed",
        "nccl_bytes": "256 MiB for each group of ranks: 32 channels x 2 x 4 MiB",
        "total_bytes": "allocated + fragmentation + context + NCCL",
    }


def inference_formulas(args: argparse.Namespace, shape: Shape, seq_len: int) -> dict[str, str]:
    tp = f" / tp {args.tp}" if args.tp > 1 else ""
    scales = {"int8": " + a scale per row", "int4": f" + a scale and a zero per {args.group_size}"}
    values = 2 * shape.layers * shape.kv_width
    each = f"{values:,} values"
    ranks_with_a_head = min(args.tp, shape.kv_heads)
    cut = f" / {ranks_with_a_head} ranks" if ranks_with_a_head > 1 else ""
    if shape.latent:  # whole on each rank
        each, cut = f"{shape.layers * (shape.latent.kv_rank + shape.latent.rope):,} latent values", ""
    cache = f"{each} x {CACHE_DTYPES[args.kv_cache_dtype]} bytes x {seq_len} tokens x {args.concurrency}"
    return {
        "weight_bytes": f"{shapes.parameter_count(shape):,} in {args.weights}{scales.get(args.weights, '')}{tp}",
        "kv_cache_bytes": f"{cache}{cut}",
        "activation_bytes": "one prompt through one block: 2 hidden + 3 ffn values per token",
        "logits_bytes": f"{args.concurrency} x {shape.vocab:,} x ({DTYPES[args.dtype]} + 4) bytes, last token only",
        "context_bytes": "CUDA context and kernels: assumed",
        "nccl_bytes": "256 MiB for each group of ranks",
        "total_bytes": "the sum",
    }
