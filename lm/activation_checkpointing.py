"""Activation checkpointing: backward computes activations again instead of reading kept ones."""

from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import (
    SAC_IGNORED_OPS,
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from common.torch_versions import KEPT_PASS_HOOKS
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
            # With experts keep the result of every matmul: () is the shape of none, and backward
            # reads the last result, too. torch.compile wants the same shape in all blocks.
            shape = down_proj_shape(block.mlp) if net.config.experts is None else ()
            block.forward = selectively_checkpointed(block.forward, shape)
        else:
            block.forward = checkpointed(block.forward)


def checkpointed(forward: Callable) -> Callable:
    """Return a forward that calls `forward` under torch's `checkpoint`.

    It is a function, because torch.compile finds no Python frame in a functools.partial.
    """

    def checkpointed_forward(*args, **kwargs):
        return checkpoint(forward, *args, use_reentrant=False, **kwargs)

    return checkpointed_forward


def selectively_checkpointed(forward: Callable, last_matmul: tuple[int, ...]) -> Callable:
    """Return a checkpointed forward that keeps the results of attention and of matmuls.

    If attention runs by an operator that is not in ATTENTION, its result would be computed again
    without a word. So assert that the policy has found attention, except in a compiled block, which
    runs no Python.
    """
    attention = set()
    contexts = partial(selective_contexts, last_matmul, attention)
    run = partial(checkpoint, use_reentrant=False, context_fn=contexts, **KEPT_PASS_HOOKS)

    def checkpointed_forward(*args, **kwargs):
        output = run(forward, *args, **kwargs)
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            assert attention, "selective checkpointing has not found the operator of attention"
        return output

    return checkpointed_forward


def down_proj_shape(mlp: nn.Module) -> tuple[int, ...]:
    """Return (inputs, outputs) of the last matmul of an MLP, which may be that of an adapter.

    Under DeepSpeed's ZeRO-3 a weight has no such shape before it is gathered. Then this returns a
    shape that no matmul has, and the result of the last matmul is kept, too.
    """
    *_, weight = mlp.parameters()
    return tuple(reversed(weight.shape))


ATTENTION = (  # how the operators' names begin
    "aten::_scaled_dot_product_",  # scaled_dot_product_attention, with any fused kernel
    "aten::_efficient_attention_forward",  # the same with a mask of torch.nn.attention.bias
    "aten::_flash_attention_forward",
    "torch_attn::_varlen_attn",  # varlen_attn
    "flex_attention",  # flex_attention, a higher-order operator
)
# The matmuls of experts, and the all-to-alls of lm/exchange.py.
OF_EXPERTS = ("aten::_grouped_mm", "_c10d_functional::all_to_all_single")
# FSDP marks its work for the profiler. If experts are sharded apart from their block, it has other
# work in recomputation than in forward, and torch would raise because it has kept no such mark.
SAC_IGNORED_OPS.add(torch.ops.profiler._record_function_enter_new.default)
SAC_IGNORED_OPS.add(torch.ops.profiler._record_function_exit._RecordFunction)
# Without a fused kernel torch computes attention by matmuls and this softmax. It has no result that
# stands for all of it, and everything is computed again.
ATTENTION_BY_MATMULS = "aten::_safe_softmax"


def selective_contexts(last_matmul: tuple[int, ...], attention: set[str]) -> tuple:
    """Return the two contexts that torch's `checkpoint` enters in forward and in recomputation.

    They keep the results of attention and of all matmuls but the last one of a block: no backward
    reads that result. Its weight is known by its shape, (inputs, outputs) = `last_matmul`. The name
    of attention's operator is added to `attention`.
    """

    def policy(context, operator, *args, **kwargs) -> CheckpointPolicy:
        name = operator.name()
        if name.startswith(ATTENTION):
            attention.add(name)
            return CheckpointPolicy.MUST_SAVE
        if name == ATTENTION_BY_MATMULS:
            attention.add(name)
        is_matmul = name in ("aten::mm", "aten::addmm")  # addmm is a matmul with a bias
        if is_matmul and args[-1].shape != last_matmul:
            return CheckpointPolicy.MUST_SAVE
        if name in OF_EXPERTS:
            return CheckpointPolicy.MUST_SAVE
        if name == "aten::_to_copy" and kwargs.get("device") == torch.device("cpu"):
            # The sizes of an exchange of rows. To copy them again, the CPU would wait for the GPU.
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)
