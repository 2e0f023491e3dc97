"""Widths and element sizes that the formulas of estimate.py need of a shape and a plan."""

import _estimate_shapes as shapes
from _estimate_frameworks import FRAMEWORKS
from _estimate_plan import DTYPES, Plan
from _estimate_shapes import Shape


def residual_bytes(plan: Plan) -> int:
    """Bytes of an element between blocks: under autocast the weights are fp32, and so is what embedding yields."""
    return 4 if plan.framework == "ours" and plan.zero < 3 else DTYPES[plan.dtype]


def norm_bytes(shape: Shape, plan: Plan) -> float:
    """Per token, what a norm keeps: its input and 1/rms. A CPU keeps two tensors in fp32, the input and the normalised
    input before the weight; CUDA's kernel computes the second again."""
    return shape.hidden * (8 if plan.on_cpu else residual_bytes(plan)) + 4


def gradient_size(plan: Plan) -> int:
    """Bytes of an element of a gradient as backward makes it: that of the weight that forward found."""
    return 4 if plan.framework == "ours" and plan.zero < 3 else DTYPES[plan.dtype]


def feed_forward_gradients(shape: Shape, plan: Plan, *, experts: bool) -> float:
    """Per token, what is alive beside the block's activations where silu(gate) * up is differentiated: the gradient of
    its result, which is itself gone by then, and of both factors; and the gradient of the block's output."""
    mixture = shape.experts
    width = mixture.active * mixture.ffn + mixture.shared_ffn if experts else shape.ffn
    return (1 if shape.gpt2 else 2) * width * DTYPES[plan.dtype] + shape.hidden * residual_bytes(plan)


def attention_gradients(shape: Shape, plan: Plan) -> float:
    """The same where attention is: gradients of its output, queries, keys and values, and of the block's output."""
    widths = shape.value_width + shape.q_width + 2 * shape.kv_width
    return widths * DTYPES[plan.dtype] + shape.hidden * residual_bytes(plan)


def weights_before(shape: Shape) -> tuple[int, int]:
    """Parameters of a block that backward reaches after its attention; and after its last product, if it is dense."""
    attention = shapes.attention_matrices(shape)
    into_feed_forward = shapes.feed_forward_matrices(shape, shape.ffn)[:-1]
    return shapes.count(attention[:-1]), shapes.count(attention + into_feed_forward)


def latent_bytes(shape: Shape, e: int) -> float:
    """Latent attention: both latents before and after their norm, the shared key, queries and keys before rotation."""
    if not (mla := shape.latent):
        return 0.0
    latents = 2 * (mla.q_rank + mla.kv_rank) + mla.rope
    return (latents + shape.q_width + shape.heads * (mla.nope + mla.value)) * e


def product_widths(shape: Shape, plan: Plan, *, experts: bool) -> list[int]:
    """The widths of the products' results that selective checkpointing keeps, in the order in which they run."""
    framework = FRAMEWORKS[plan.framework]
    every = 2 if framework.every_second_product else 1
    # what each tensor rank has of a sum is as wide as the sum
    summand = shape.hidden * (plan.tp if framework.whole_summands else 1)
    attention = [outputs for _, outputs in shapes.attention_matrices(shape)[:-1]] + [summand]
    if not experts:
        into = [outputs for _, outputs in shapes.feed_forward_matrices(shape, shape.ffn)[:-1]]
        products = [*attention, *into, summand]
        return products[:-1] if framework.drops_last_product else products[::every]
    mixture = shape.experts
    routed = [mixture.active * outputs for _, outputs in shapes.feed_forward_matrices(shape, mixture.ffn)]
    routed = [] if every == 2 else routed  # torch._grouped_mm is not on torchtitan's list
    shared = [outputs for _, outputs in shapes.feed_forward_matrices(shape, mixture.shared_ffn)]
    return [*attention, *routed, *(shared if mixture.shared_ffn else [])][::every]


def end_bytes(shape: Shape, plan: Plan) -> float:
    """Per token: what the last norm keeps, and the head's input."""
    head_input = shape.hidden * DTYPES[plan.dtype]
    if FRAMEWORKS[plan.framework].gathered_inputs:
        head_input *= plan.tp
    return norm_bytes(shape, plan) + head_input


def mask_bytes(plan: Plan) -> float:
    """Context parallel by all-gather: which of all tokens the own ones may look at, one mask for all layers."""
    if plan.cp == 1 or not FRAMEWORKS[plan.framework].gathered_keys:
        return 0.0
    return plan.seq_len / plan.cp * plan.seq_len * DTYPES[plan.dtype]


def rotated_width(shape: Shape) -> int:
    return shape.latent.rope if shape.latent else shape.head_dim
