"""What a rank sends: each collective that is really called, whoever calls it: DDP's reducer in C++, FSDP, DTensor."""

from collections import Counter
from fractions import Fraction

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# By what the operator's name contains, without underscores. To receive, to wait and a barrier send nothing.
KINDS = {"reducescatter": "reduce_scatters", "allreduce": "all_reduces", "allgather": "all_gathers"}
KINDS |= {"alltoall": "all_to_alls", "broadcast": "broadcasts", "::send": "sends"}


class Traffic(TorchDispatchMode):
    """This rank's calls and bytes, by kind, while entered. Of S bytes on n ranks, a rank of a ring sends S (n-1)/n
    in an all-gather, a reduce-scatter or a broadcast, twice that in an all-reduce; in an all-to-all all but its own
    part. NCCL may choose a tree or the switch. gather, scatter and reduce to one rank are not seen."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()
        self.bytes_sent: Counter[str] = Counter()  # exact fractions, so that they add up

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(hasattr(kind, "full_tensor") for kind in types):
            # a DTensor then does the same with its part, which is a plain tensor
            return NotImplemented
        # calls of torch.distributed, and those of DTensor
        if operator.namespace in ("c10d", "_c10d_functional"):
            name = operator.name().replace("_", "")
            if kind := next((KINDS[part] for part in KINDS if part in name), None):
                self.calls[kind] += 1
                self.bytes_sent[kind] += bytes_on_the_wire(kind, args)
        return operator(*args, **(kwargs or {}))


def bytes_on_the_wire(kind: str, args: tuple) -> Fraction:
    """Sent by this rank, from an operator's arguments: [outputs,] inputs, then the group, sizes of parts, flags."""
    tensors = [
        [leaf for leaf in tree_leaves(arg) if isinstance(leaf, torch.Tensor)] for arg in args
    ]
    inputs = [tensor.nbytes for tensor in [found for found in tensors if found][-1]]
    group = _group_of(args)
    n, size = group.size(), sum(inputs)
    if kind == "all_to_alls":
        sizes = [
            arg for arg in args if isinstance(arg, list | tuple) and arg and isinstance(arg[0], int)
        ]
        parts = sizes[-1] if sizes else inputs if len(inputs) > 1 else [1] * n
        return size - Fraction(size * parts[group.rank()], sum(parts) or 1)
    # inputs are whole, but those of an all-gather are the rank's part: it sends its own, and all others' but the last
    trips = {"all_gathers": n - 1, "all_reduces": Fraction(2 * (n - 1), n), "sends": 1}
    return Fraction(size * trips.get(kind, Fraction(n - 1, n)))


def _group_of(args: tuple) -> dist.ProcessGroup:
    if boxed := [arg for arg in args if isinstance(arg, torch.ScriptObject)]:
        return dist.ProcessGroup.unbox(boxed[0])
    # a functional collective knows its group by name
    name = [arg for arg in args if isinstance(arg, str)][-1]
    return dist.distributed_c10d._resolve_process_group(name)
