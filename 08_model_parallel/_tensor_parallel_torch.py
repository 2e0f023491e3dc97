"""tensor_parallel.py with torch's own tools: the same cuts, as a plan for parallelize_module."""

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from old import runtime


def parallelize_with_torch(net: nn.Module) -> None:
    """The same cuts, with sequence parallelism, as a plan: DTensors know how they are cut, and what follows from it."""
    mesh = runtime.device_mesh(net.lm_head.weight.device, {"tensor": dist.get_world_size()})
    positions = Shard(1)  # of [batch, length, hidden]
    whole = Replicate()
    attention_input = PrepareModuleInput(
        input_layouts=(positions, None, None),  # beside it, cos and sin for all positions
        desired_input_layouts=(whole, None, None),
    )
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=whole, output_layouts=positions),
        "model.layers.*.input_layernorm": SequenceParallel(),
        "model.layers.*.self_attn": attention_input,
        "model.layers.*.self_attn.[qkv]_proj": ColwiseParallel(),
        "model.layers.*.self_attn.o_proj": RowwiseParallel(output_layouts=positions),
        "model.layers.*.post_attention_layernorm": SequenceParallel(),
        "model.layers.*.mlp": PrepareModuleInput(input_layouts=positions, desired_input_layouts=whole),
        # plain tensors would not tell down_proj that the parts of the channels may be unequal
        "model.layers.*.mlp.gate_proj": ColwiseParallel(use_local_output=False),
        "model.layers.*.mlp.up_proj": ColwiseParallel(use_local_output=False),
        "model.layers.*.mlp.down_proj": RowwiseParallel(output_layouts=positions),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=positions, output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(net, mesh, plan, src_data_rank=None)  # or rank 0 would send its weights to all
    net.tie_weights()  # parallelize_module has made two parameters of one
