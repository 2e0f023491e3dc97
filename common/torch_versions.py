"""Names that torch 2.13 and 2.14 have changed, so that every script runs on torch 2.11 and newer.

A new torch warns when a script uses an old name, and an old torch does not know the new ones. A
script takes these names from here.
"""

import inspect

import torch.distributed as dist
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint


def first_of(module, *names: str):
    """Return the first of these names that `module` has."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise AttributeError(f"{module.__name__} of this torch has none of {', '.join(names)}")


# Collectives of one tensor, which write into a tensor that the caller gives: (output, input).
all_gather_single = first_of(dist, "all_gather_single", "all_gather_into_tensor")
reduce_scatter_single = first_of(dist, "reduce_scatter_single", "reduce_scatter_tensor")

# Collectives with a backward. This is the only file that imports torch's private module of them.
# They return a new tensor. Arguments: all_gather_with_backward(tensor, gather_dim, group), whose
# backward is a reduce-scatter, and all_to_all_with_backward(tensor, output_split_sizes,
# input_split_sizes, group), whose backward is an all-to-all. None: equal splits.
all_gather_with_backward = first_of(
    functional, "all_gather_single_autograd", "all_gather_tensor_autograd"
)
all_to_all_with_backward = first_of(functional, "all_to_all_single_autograd", "all_to_all_single")

# DistributedDataParallel(model, **KEEP_BUFFERS) does not send rank 0's buffers before each forward.
# Rotary tables never change, and the bias of a router changes alike on all ranks.
if "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters:
    KEEP_BUFFERS = {"forward_sync_buffers": False}
else:
    KEEP_BUFFERS = {"broadcast_buffers": False}

# set_timeout(timedelta, group) changes the timeout of a process group. It is public since 2.14.
if hasattr(dist, "set_timeout"):
    set_timeout = dist.set_timeout
else:
    set_timeout = dist.distributed_c10d._set_pg_timeout

# checkpoint(..., **KEPT_PASS_HOOKS): what selective checkpointing keeps passes saved_tensors_hooks,
# such as those that offload. This will be the default. torch 2.14 warns if hooks meet a checkpoint
# that does not say it; older ones do not know it, and what is kept passes no hooks.
KEPT_PASS_HOOKS = {}
if "respect_saved_tensors_hooks" in inspect.signature(checkpoint).parameters:
    KEPT_PASS_HOOKS = {"respect_saved_tensors_hooks": True}
