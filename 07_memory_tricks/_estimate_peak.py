"""What is alive together, from the end of forward to the last gradient. Backward begins at the last block."""

from dataclasses import dataclass

from _estimate_frameworks import FP32_LOG_SOFTMAX, LOSSES
from _estimate_plan import Plan
from _estimate_sharded import gradients_stay_whole, weights_stay_whole

MOMENTS = ("end of forward", "loss backward", "last block", "first block", "last gradients")


@dataclass(frozen=True)
class InBlock:
    """Backward inside a block, where most is alive: its feed-forward part, or its attention."""

    activations: float  # bytes that the block still needs, and gradients of activations
    gradients: float  # bytes of those of its weights that are still to come
    casts: float  # bytes of the 16-bit copies that autocast has made of these weights


def moments(
    plan: Plan,
    lines: dict[str, float],
    *,
    feed_forward: InBlock,
    attention: InBlock,
    kept_of_block: float,
    kept_of_end: float,
    head_cast: float,
    head_gradient: float,
    root_reduced: float,
    embedding_gradient: float,
    tied_gradients: float,
    block_ahead: float,
    gathered_by_backward: float,
    of_others_in_flight: float,
) -> dict[str, float]:
    """Bytes at each moment that may be the peak.

    A block's backward begins with what forward has kept of it, and computes the rest again. Gradients that accumulate
    are there all the time, and so are DDP's, which are views of its buckets; else they come one by one, the embedding's
    last. A tied matrix has two, of head and of embedding, and for a moment their sum. Those that a pipeline keeps whole
    are among the gathered. There, when backward is at the first block, all blocks are gathered, and the other
    micro-batches wait."""
    kept = lines["weight_bytes"] + lines["optimizer_bytes"] + lines["buffer_bytes"]
    always = plan.micro_batches > 1 or plan.framework != "ours" or (plan.zero == 0 and plan.shards > 1)
    among_gathered = gradients_stay_whole(plan) and not weights_stay_whole(plan)
    there = always or among_gathered
    gradients = 0 if among_gathered else lines["gradient_bytes"]
    waiting = kept + lines["activation_bytes"] + lines["gathered_bytes"] + (gradients if always else 0)
    cast = lines["cast_bytes"] if plan.checkpointing == "none" else head_cast  # else autocast casts again in backward
    logits_in_forward = lines["logits_bytes"]
    if plan.loss in FP32_LOG_SOFTMAX:  # bytes a logit: itself, in 16 bits the same in fp32, and log-softmax
        logits_in_forward *= (8 if plan.dtype == "fp32" else 10) / LOSSES[plan.loss]
    held = lines["logits_bytes"] * 4 / LOSSES[plan.loss] if plan.loss == "logits-held" else 0
    of_last_block = feed_forward.activations - kept_of_block - kept_of_end
    of_last_block += cast - head_cast if plan.checkpointing == "none" else feed_forward.casts
    first_parts = [
        part.activations + part.casts - (0 if there else part.gradients) for part in (feed_forward, attention)
    ]
    nearly_all = kept + lines["gathered_bytes"] + gradients - (0 if there else embedding_gradient)
    return {
        "end of forward": waiting - block_ahead + lines["cast_bytes"] + logits_in_forward,
        "loss backward": waiting - block_ahead + cast + lines["logits_bytes"],
        "last block": waiting + held + of_last_block + (0 if there else head_gradient) + lines["reduced_bytes"],
        "first block": nearly_all + held + gathered_by_backward + of_others_in_flight + max(first_parts),
        "last gradients": kept + held + lines["gathered_bytes"] + gradients + root_reduced + tied_gradients,
    }
