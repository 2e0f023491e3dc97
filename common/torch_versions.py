"""Names that torch 2.13 has changed, so that every script runs on torch 2.11 and newer.

torch 2.13 warns when a script uses an old name, and torch 2.11 does not know the new ones. A script
takes these names from here.
"""

import inspect

import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel


def first_of(module, *names: str):
    """Return the first of these names that `module` has."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"{module.__name__} of this torch has none of {', '.join(names)}")


# Collectives of one tensor, which write into a tensor that the caller gives: (output, input).
all_gather_single = first_of(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = first_of(dist, "reduce_scatter_single", "reduce_scatter_tensor")

# The same as functions that return a new tensor. wait_tensor waits for it.
functional_all_gather = first_of(functional, "all_gather_single", "all_gather_tensor")
functional_reduce_scatter = first_of(functional, "reduce_scatter_single", "reduce_scatter_tensor")
# With a backward: the gradient is reduce-scattered.
all_gather_with_backward = first_of(
    functional, "all_gather_single_autograd", "all_gather_tensor_autograd"
)

# DistributedDataParallel(model, **KEEP_BUFFERS) does not send rank 0's buffers before each forward.
# Rotary tables, the only buffers of lm/model.py, never change.
if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
    KEEP_BUFFERS = {"forward_sync_buffers": False}
else:
    KEEP_BUFFERS = {"broadcast_buffers": False}
