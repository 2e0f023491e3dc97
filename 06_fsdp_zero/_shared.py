"""What several lessons of this chapter need: the bytes that tensors hold, and what ZeRO by hand must hold and send."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def held_bytes(tensors: Iterable[Tensor]) -> int:
    """The memory that these tensors look into, each piece once; of a DTensor, this rank's part."""
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in (t.untyped_storage() for t in local)}.values())


def bytes_of_training(weights: list[Tensor], optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What weights, gradients and optimizer state hold on this rank."""
    states = optimizer.state.values()
    return {
        "parameter_bytes_per_rank": held_bytes(weights),
        "gradient_bytes_per_rank": held_bytes(weight.grad for weight in weights if weight.grad is not None),
        "optimizer_bytes_per_rank": held_bytes(tensor for state in states for tensor in state.values()),
    }


def of_zero(stage: int, net: nn.Module, ranks: int) -> dict[str, int]:
    """From the model's shape alone, in fp32 with AdamW. Stage 0 is data parallelism, an all-reduce per parameter."""
    parameters = [parameter.numel() for parameter in net.parameters()]
    whole = sum(parameters)
    blocks = [sum(parameter.numel() for parameter in block.parameters()) for block in net.model.layers.values()]
    groups = [whole] if stage == 1 else [*blocks, whole - sum(blocks)]  # what is cut in one piece
    part = sum(math.ceil(size / ranks) for size in groups)
    padded = part * ranks if stage else whole
    updated_tensors = len(groups) if stage else len(parameters)
    trips = 3 if stage == 3 else 2  # of all weights round the ring
    return {
        "parameter_bytes_per_rank": 4 * (part if stage == 3 else padded),
        "gradient_bytes_per_rank": 4 * (part if stage >= 2 else padded),
        # two moments of each element, and of each tensor the number of steps so far
        "optimizer_bytes_per_rank": 8 * (part if stage else whole) + 4 * updated_tensors,
        "all_gathers_per_step": (0, 1, len(groups), 2 * len(groups))[stage],
        "reduce_scatters_per_step": (0, 1, len(groups), len(groups))[stage],
        "all_reduces_per_step": 0 if stage else updated_tensors,
        "bytes_sent_per_rank_per_step": round(trips * 4 * padded * (ranks - 1) / ranks),
    }
