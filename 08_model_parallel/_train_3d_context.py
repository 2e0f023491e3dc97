"""Context parallelism: each rank has a part of every sequence, and its queries look at the keys and values of all."""

import torch
import torch.distributed as dist
from torch import Tensor


class GatherSequence(torch.autograd.Function):
    """Forward: the parts of all ranks, one after the other along the sequence. Backward: each rank's keys were used on
    all ranks, so what they all have computed for its part is summed there."""

    @staticmethod
    def forward(context, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        parts = part.new_empty(dist.get_world_size(group), *part.shape)
        dist.all_gather_into_tensor(parts, part.contiguous(), group=group)
        return torch.cat(parts.unbind(), dim=2)

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None]:
        parts = torch.stack(gradient.chunk(dist.get_world_size(context.group), dim=2))
        own = torch.empty_like(parts[0])
        dist.reduce_scatter_tensor(own, parts, group=context.group)
        return own, None


class Context:
    """What the model asks of a cache: who may look at which token, and the keys and values to look at.

    Every rank computes attention of its queries with the whole sequence and masks the future, so all take equally long.
    """

    def __init__(self, group: dist.ProcessGroup, seq_len: int) -> None:
        self.group, self.seq_len = group, seq_len

    def visible(self, positions: Tensor) -> Tensor:
        """[batch, 1 for all heads, own tokens, all tokens]: True where a token is not in the future."""
        return torch.arange(self.seq_len, device=positions.device) <= positions[:, None, :, None]

    def extend(self, name: str, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, all tokens, head_dim] from those of this rank's tokens."""
        return GatherSequence.apply(k, self.group), GatherSequence.apply(v, self.group)
