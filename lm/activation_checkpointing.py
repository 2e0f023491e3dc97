"""Activation checkpointing: backward computes activations again instead of reading kept ones."""

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from lm.model import Transformer


def checkpoint_blocks(net: Transformer, method: str) -> None:
    """Make each block of the model keep fewer activations for backward.

    "none" changes nothing, "full" keeps only the input of each block, "selective" also keeps what
    attention and the matmuls returned. Call it before compile and before fully_shard.
    """
    if method == "none":
        return
    for block in net.model.layers.values():
        if method == "selective":
            contexts = partial(selective_contexts, down_proj_shape(block.mlp))
            run = partial(checkpoint, use_reentrant=False, context_fn=contexts)
        else:
            run = partial(checkpoint, use_reentrant=False)
        block.forward = checkpointed(run, block.forward)


def checkpointed(run: Callable, forward: Callable) -> Callable:
    """Return a forward that calls `forward` under torch's `checkpoint`.

    It is a function, because torch.compile finds no Python frame in a functools.partial.
    """

    def checkpointed_forward(*args, **kwargs):
        return run(forward, *args, **kwargs)

    return checkpointed_forward


def down_proj_shape(mlp: nn.Module) -> tuple[int, ...]:
    """Return (inputs, outputs) of the last matmul of an MLP, which may be that of an adapter.

    Under DeepSpeed's ZeRO-3 a weight has no such shape before it is gathered. Then this returns a
    shape that no matmul has, and the result of the last matmul is kept, too.
    """
    *_, weight = mlp.parameters()
    return tuple(reversed(weight.shape))


# Attention: any kernel of scaled_dot_product_attention, the one that causal_lower_right of
# torch.nn.attention.bias calls in fp32 on CUDA, and varlen_attn.
ATTENTION = (
    "aten::_scaled_dot_product_",
    "aten::_efficient_attention_forward",
    "torch_attn::_varlen_attn",
)


def selective_contexts(last_matmul: tuple[int, ...]) -> tuple:
    """Return the two contexts that torch's `checkpoint` enters in forward and in recomputation.

    They keep the results of attention and of all matmuls but the last one of a block: no backward
    reads that result. Its weight is known by its shape, (inputs, outputs) = `last_matmul`.
    """

    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        name = operator.name()
        if name.startswith(ATTENTION):
            return CheckpointPolicy.MUST_SAVE
        is_matmul = name in ("aten::mm", "aten::addmm")  # addmm is a matmul with a bias
        if is_matmul and args[-1].shape != last_matmul:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
