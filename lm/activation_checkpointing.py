"""Activation checkpointing: compute activations again in backward instead of keeping them."""

from functools import partial

from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lm.model import Transformer


def checkpoint_blocks(net: Transformer, how: str) -> None:
    """What backward computes again: none; full: all but a block's input; selective: all but attention and matmuls, too.
    Call it before compile and fully_shard."""
    for block in net.model.layers.values() if how != "none" else ():
        # down_proj's, or that of its adapter
        last = tuple([*block.mlp.parameters()][-1].shape[::-1])
        context = {"context_fn": partial(selective_contexts, last)} if how == "selective" else {}
        again = partial(checkpoint, block.forward, use_reentrant=False, **context)
        # of Python: compile finds no frame in a partial
        block.forward = lambda *args, again=again: again(*args)


def selective_contexts(last: tuple[int, int]) -> tuple:
    """For torch's checkpoint, which calls it at each forward: keep what attention and matmuls gave, compute the rest
    again. That of the last matmul, known by its [in, out], is not kept: no backward reads it."""

    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        attention = operator.name().startswith("aten::_scaled_dot_product_")  # by whatever kernel
        # addmm has a bias
        matmul = operator.name() in ("aten::mm", "aten::addmm") and args[-1].shape != last
        return (
            CheckpointPolicy.MUST_SAVE if attention or matmul else CheckpointPolicy.PREFER_RECOMPUTE
        )

    return create_selective_checkpoint_contexts(policy)
