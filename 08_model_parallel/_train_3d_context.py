"""Context parallelism: each rank has a part of every sequence, and its queries look at the keys and values of all."""

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from old.runtime import all_gather, reduce_scatter


def sequence_part(seq_len: int, sequence: DeviceMesh) -> slice:
    """The columns of each batch that a context rank reads."""
    own = seq_len // sequence.size()
    return slice(sequence.get_local_rank() * own, (sequence.get_local_rank() + 1) * own)


class GatherSequence(torch.autograd.Function):
    """Forward: the parts of all ranks, one after the other along the sequence. Backward: each rank's keys were used on
    all ranks, so what they all have computed for its part is summed there."""

    @staticmethod
    def forward(context, part: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        ranks, batch = dist.get_world_size(group), len(part)
        parts = part.new_empty(ranks * batch, *part.shape[1:])  # the collective puts them one after the other in dim 0
        all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts.split(batch), dim=2)

    @staticmethod
    def backward(context, gradient: Tensor) -> tuple[Tensor, None]:
        parts = gradient.chunk(dist.get_world_size(context.group), dim=2)
        own = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
        reduce_scatter(own, torch.cat(parts), group=context.group)
        return own, None


class Context:
    """What the model asks of a cache: who may look at which token, and the keys and values to look at.

    Every rank computes attention of its queries with the whole sequence and masks the future, so all take equally long.
    """

    def __init__(self, group: dist.ProcessGroup, seq_len: int, dtype: torch.dtype) -> None:
        self.group, self.seq_len, self.dtype = group, seq_len, dtype

    def visible(self, positions: Tensor) -> Tensor:
        """[1 for all sequences, 1 for all heads, own tokens, all tokens]: 0, or -inf where a token is in the future.

        Attention adds it. Of True and False it would make such a mask in each layer anew, and keep them all.
        """
        future = torch.arange(self.seq_len, device=positions.device) > positions[:1, None, :, None]
        return torch.zeros_like(future, dtype=self.dtype).masked_fill_(future, -torch.inf)

    def extend(self, name: str, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, heads, all tokens, head_dim] from those of this rank's tokens."""
        return GatherSequence.apply(k, self.group), GatherSequence.apply(v, self.group)
