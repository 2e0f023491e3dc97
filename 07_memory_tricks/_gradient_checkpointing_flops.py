"""How gradient_checkpointing.py counts the FLOP of attention."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from old import shapes

Batch = tuple[Tensor, Tensor]


def attention_forward_flops(q, k, v, *args, out_shape=None, **kwargs) -> int:
    """Of shapes [batch, heads, length, head_dim]; k and v may have fewer heads, which torch 2.11's formulas refuse."""
    batch, heads, length, width = q
    return 2 * batch * heads * length * k[2] * (width + v[3])


def attention_backward_flops(gradient, q, k, v, *args, out_shape=None, **kwargs) -> int:
    batch, heads, length, width = q
    return 2 * batch * heads * length * k[2] * (3 * width + 2 * v[3])


ATTENTION_FLOPS = {
    getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}_attention{end}"): formula
    for kernel in ("flash", "efficient", "cudnn")
    for end, formula in (("", attention_forward_flops), ("_backward", attention_backward_flops))
}


def attention_flops(config: shapes.Config, batch: Batch, dtype: torch.dtype) -> tuple[int, int]:
    """Of one forward in a block, as FlopCounterMode counts: it does not know the kernel for CPUs. And how many of them
    selective keeps: none where attention is no single kernel (fp32 with grouped heads on a GPU), but two products
    with the matrix of all pairs between them."""
    sequences, length = batch[0].shape
    heads, device = config.num_attention_heads, batch[0].device
    q = torch.zeros(sequences, heads, length, config.head_dim, dtype=dtype, device=device, requires_grad=True)
    k = q[:, : config.num_key_value_heads]
    with FlopCounterMode(display=False, custom_mapping=ATTENTION_FLOPS) as counter:
        F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=k.shape != q.shape)
    total = counter.get_total_flops()
    in_one_kernel = torch.ops.aten.bmm not in counter.get_flop_counts().get("Global", {})
    return total, total if in_one_kernel else 0
