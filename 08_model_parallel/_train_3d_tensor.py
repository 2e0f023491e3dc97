"""Tensor parallelism with sequence parallelism: which way each matrix is cut, and what travels between the cuts."""

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

WHOLE, ROWS, COLUMNS = None, 0, 1
CUT = {  # the dimension of each weight that the tensor ranks divide; torch keeps a weight as [outputs, inputs]
    "embed_tokens": ROWS,
    "q_proj": ROWS,
    "k_proj": ROWS,
    "v_proj": ROWS,
    "o_proj": COLUMNS,
    "gate_proj": ROWS,
    "up_proj": ROWS,
    "down_proj": COLUMNS,
    "lm_head": ROWS,
    "input_layernorm": WHOLE,
    "post_attention_layernorm": WHOLE,
    "norm": WHOLE,
}


def cut_matrices(net: nn.Module, mesh: DeviceMesh, arguments_of_attention: int) -> None:
    """Each rank computes with its heads, its part of the MLP and its part of the vocabulary, for all tokens.

    Between them, where norms and residuals are, each rank has a part of the tokens instead. So an all-gather leads into
    attention and the MLP, and a reduce-scatter out of them: together the bytes of the all-reduce that they replace.
    """
    tokens, all_tokens = Shard(1), Replicate()  # of activations [batch, length, hidden]
    not_touched = (None,) * (arguments_of_attention - 1)
    into_attention = PrepareModuleInput(
        input_layouts=(tokens, *not_touched), desired_input_layouts=(all_tokens, *not_touched)
    )
    plan = {
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.self_attn": into_attention,
        "model.layers.*.self_attn.q_proj": ColwiseParallel(),  # its rows are whole heads
        "model.layers.*.self_attn.k_proj": ColwiseParallel(),
        "model.layers.*.self_attn.v_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=tokens),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=tokens, desired_input_layouts=all_tokens),
        "model.layers.*.mlp.gate_proj": ColwiseParallel(),
        "model.layers.*.mlp.up_proj": ColwiseParallel(),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=tokens),
    }
    if net.model.embed_tokens is not None:
        # a rank looks up what it has, and gives zeros for the rest
        plan["model.embed_tokens"] = RowwiseParallel(input_layouts=all_tokens, output_layouts=tokens)
    if net.lm_head is not None:
        plan["model.norm"] = SequenceParallel()
        # logits stay cut by vocabulary: loss_parallel() computes the loss from the parts
        plan["lm_head"] = ColwiseParallel(input_layouts=tokens, output_layouts=Shard(-1), use_local_output=False)
    parallelize_module(net, mesh, plan)
    net.tie_weights()  # parallelize_module has made two matrices of one


def own_shape(name: str, shape: torch.Size, rank: int, ranks: int) -> torch.Size:
    """The shape of a tensor rank's part of the weight of that name, as torch.chunk cuts it."""
    dimension = CUT[name.split(".")[-2]]
    if dimension is None:
        return shape
    parts = torch.empty(shape, device="meta").chunk(ranks, dimension)
    return parts[rank].shape if rank < len(parts) else torch.Size([0])  # none is left for the last ranks
