"""Count what autograd keeps for backward: for lessons of this chapter, and for your own models."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def is_of_a_weight(tensor: Tensor) -> bool:
    """Return whether a tensor is a parameter, or a parameter that was transposed or cast."""
    node = tensor.grad_fn
    while node is not None and node.name() in ("TBackward0", "ToCopyBackward0"):
        node = node.next_functions[0][0]
    if isinstance(tensor, nn.Parameter):
        return True
    return node is not None and node.name().endswith("AccumulateGrad")


@contextmanager
def saved_for_backward(net: nn.Module) -> Iterator[dict[str, dict[int, int]]]:
    """Record what autograd saves in the with block: the bytes of each piece by its address.

    There are two kinds, "activations" and "weight copies". The address makes a piece that is saved
    twice count once.
    """
    saved: dict[str, dict[int, int]] = {"activations": {}, "weight copies": {}}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kind = "weight copies" if is_of_a_weight(tensor) else "activations"
        saved[kind][storage.data_ptr()] = storage.nbytes()
        # Not the tensor itself: it may be the result of the operator that saves it. The two would
        # refer to each other, and never be freed.
        return tensor.detach()

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved
    # A weight itself is no copy. A frozen weight is no activation either.
    for weight in net.parameters():
        for pieces in saved.values():
            pieces.pop(weight.untyped_storage().data_ptr(), None)
