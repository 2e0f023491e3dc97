"""What zero_from_scratch.py measures as memory: the tensors that are alive, not what a stage says it holds."""

import gc
from collections.abc import Iterable

from torch import Tensor


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Address and bytes of each piece of memory that these tensors look into."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() > 0:
            found[storage.data_ptr()] = storage.nbytes()
    return found


def live_storages() -> dict[int, int]:
    """The memory of every floating-point tensor that this process can reach."""
    gc.collect()  # what only a cycle holds is as good as freed
    tensors = [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]
    return storages(tensor for tensor in tensors if tensor.is_floating_point() and tensor.device.type != "meta")


def measure_memory(stage, live_before: dict[int, int]) -> dict[str, int]:
    """The bytes that are alive after a step, by what they are for."""
    parameters = [*stage.net.parameters(), *(group.my_weights for group in stage.groups)]
    gradients = storages(parameter.grad for parameter in parameters if parameter.grad is not None)
    states = stage.optimizer.state.values()
    optimizer_state = storages(tensor for state in states for tensor in state.values())
    weights = storages([*(parameter.detach() for parameter in parameters), *(group.weights for group in stage.groups)])
    known = {**live_before, **storages(stage.net.buffers()), **weights, **gradients, **optimizer_state}
    other = {address: size for address, size in live_storages().items() if address not in known}
    return {
        "parameter_bytes_per_rank": sum(weights.values()),
        "gradient_bytes_per_rank": sum(gradients.values()),
        "optimizer_bytes_per_rank": sum(optimizer_state.values()),
        "other_bytes_per_rank": sum(other.values()),
    }
