"""What autograd keeps for backward: for several lessons of this chapter, and for your own models."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def is_of_a_weight(tensor: Tensor) -> bool:
    """Whether it is a parameter, or one that was only transposed or cast."""
    node = tensor.grad_fn
    while node is not None and node.name() in ("TBackward0", "ToCopyBackward0"):
        node = node.next_functions[0][0]
    return isinstance(tensor, nn.Parameter) or (
        node is not None and node.name().endswith("AccumulateGrad")
    )


@contextmanager
def saved_for_backward(net: nn.Module) -> Iterator[dict[str, dict[int, int]]]:
    """Notes what autograd saves inside the block: bytes by address, so that what is saved twice counts once."""
    saved: dict[str, dict[int, int]] = {"activations": {}, "weight copies": {}}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kind = "weight copies" if is_of_a_weight(tensor) else "activations"
        saved[kind][storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved
    # the weight itself is no copy, and no activation if it is frozen
    for weight in net.parameters():
        for kind in saved.values():
            kind.pop(weight.untyped_storage().data_ptr(), None)
