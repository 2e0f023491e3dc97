"""What tensor_parallel.py counts: the collectives that are really called, whoever calls them, and what they must be."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from old.shapes import Config

FP32_BYTES = 4
TRIPS = {"all_reduces": 2, "reduce_scatters": 1, "all_gathers": 1}  # how often a ring sends the whole tensor round
# Calls of torch.distributed come under the first operator, those of DTensor under the second.
OPERATORS = {
    "c10d::allreduce_": "all_reduces",
    "_c10d_functional::all_reduce": "all_reduces",
    "c10d::_reduce_scatter_base_": "reduce_scatters",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatters",
    "c10d::_allgather_base_": "all_gathers",
    "_c10d_functional::all_gather_into_tensor": "all_gathers",
}
SEND_NOTHING = {"_c10d_functional::wait_tensor", "_c10d_functional::_wrap_tensor_autograd"}


@dataclass
class Traffic:
    """Calls by name, and the bytes of the whole tensors, once for each trip round the ring."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes_round: int = 0

    def add(self, name: str, calls: int, elements: int) -> None:
        self.calls[name] += calls
        self.bytes_round += calls * TRIPS[name] * elements * FP32_BYTES

    def bytes_sent(self, ranks: int) -> int:
        """By each rank: a tensor is cut into as many parts as there are ranks, and of these it sends all but one."""
        return round(Fraction(self.bytes_round * (ranks - 1), ranks))


class CountCollectives(TorchDispatchMode):
    """Sees every operator that runs inside it, in forward and in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.traffic = Traffic()

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # a DTensor then does the same with its part, which is a plain tensor
        result = operator(*args, **(kwargs or {}))
        if "c10d" in operator.namespace and operator.name() not in SEND_NOTHING:
            name = OPERATORS[operator.name()]
            tensors = [leaf for leaf in tree_leaves((args, result)) if isinstance(leaf, Tensor)]
            self.traffic.calls[name] += 1
            whole = max(tensor.nbytes for tensor in tensors)  # the other one is a part
            self.traffic.bytes_round += TRIPS[name] * whole
        return result


def expect(way: str, config: Config, tokens: int, micro_batches: int, ranks: int) -> Traffic:
    """What forward and backward must send, from the shape alone. `tokens`: of a micro-batch."""
    pairs = 2 * config.num_hidden_layers
    activations = tokens * config.hidden_size
    traffic = Traffic()
    if way == "one process":
        return traffic
    for _ in range(micro_batches):
        # f and g of each pair of matrices, g of the embedding and f of the head, each of them in one direction
        if way == "by hand":
            traffic.add("all_reduces", 2 * pairs + 2, activations)
        elif ranks > 1 or way.startswith("by hand"):  # on one rank DTensor calls nobody
            traffic.add("reduce_scatters", 2 * pairs + 2, activations)
            traffic.add("all_gathers", 2 * pairs + 2, activations)
        # of each token the largest logit, the sum and the logit of the target
        if way.startswith("by hand"):
            traffic.add("all_reduces", 1, tokens)
            traffic.add("all_reduces", 1, 2 * tokens)
        else:
            traffic.add("all_reduces", 3, tokens)
    return traffic


def expect_after_backward(way: str, config: Config) -> Traffic | None:
    """What gradients and clipping must send once per step. None: torch decides that, release by release."""
    traffic = Traffic()
    if way == "by torch, sequence parallel":
        return None
    if way == "by hand, sequence parallel":
        norms = 2 * config.num_hidden_layers + 1
        traffic.add("all_reduces", 1, norms * config.hidden_size)
    if way != "one process":
        traffic.add("all_reduces", 1, 1)  # of the squares
    return traffic


def held_parameters(parameters: Iterable[Tensor]) -> int:
    """How many numbers of the weights this rank holds."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in parameters]
    return sum(tensor.numel() for tensor in local)


def assert_equal(what: str, found: Traffic, expected: Traffic) -> None:
    assert found == expected, f"{what} is {found}, and must be {expected}, on rank {dist.get_rank()}"
