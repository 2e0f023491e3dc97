"""What is alive together, from the end of forward to the last gradient. Backward begins at the last block."""

from _estimate_plan import Plan
from _estimate_sharded import gradients_stay_whole, weights_stay_whole

MOMENTS = ("end of forward", "loss backward", "last block", "first block", "last gradients")


def moments(
    plan: Plan,
    lines: dict[str, float],
    *,
    head_cast: float,
    root_reduced: float,
    embedding_gradient: float,
    tied_gradients: float,
    gathered_by_backward: float,
    of_others_in_flight: float,
) -> dict[str, float]:
    """Bytes at each moment that may be the peak.

    Gradients that accumulate are there all the time, and so are DDP's, which are views of its buckets; else they come
    one by one, the embedding's last. A tied matrix has two, of head and of embedding, and for a moment their sum. Those
    that a pipeline keeps whole are among the gathered. There, when backward is at the first block, all blocks are
    gathered, and the other micro-batches wait."""
    kept = lines["weight_bytes"] + lines["optimizer_bytes"] + lines["buffer_bytes"]
    always = plan.micro_batches > 1 or plan.framework != "ours" or (plan.zero == 0 and plan.shards > 1)
    among_gathered = gradients_stay_whole(plan) and not weights_stay_whole(plan)
    gradients = 0 if among_gathered else lines["gradient_bytes"]
    waiting = kept + lines["activation_bytes"] + lines["gathered_bytes"] + (gradients if always else 0)
    cast = lines["cast_bytes"] if plan.checkpointing == "none" else head_cast  # else autocast casts again in backward
    logits_in_forward = lines["logits_bytes"]
    if plan.loss == "plain":  # of 12 bytes a logit: the logits, in 16 bits the same in fp32, and log-softmax
        logits_in_forward *= (8 if plan.dtype == "fp32" else 10) / 12
    recomputed = 0 if plan.checkpointing == "none" else lines["block_bytes"]
    nearly_all = kept + lines["gathered_bytes"] + gradients - (0 if always or among_gathered else embedding_gradient)
    return {
        "end of forward": waiting + lines["cast_bytes"] + logits_in_forward,
        "loss backward": waiting + cast + lines["logits_bytes"],
        "last block": waiting + recomputed + lines["reduced_bytes"],
        "first block": nearly_all + gathered_by_backward + of_others_in_flight + lines["block_bytes"],
        "last gradients": kept + lines["gathered_bytes"] + gradients + root_reduced + tied_gradients,
    }
