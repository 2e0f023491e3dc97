"""Ranks that are not there: one process takes itself for a rank of many, whose collectives return at once."""

import warnings

import torch
import torch.distributed as dist


def join(rank: int, world_size: int) -> torch.device:
    """From here on this process is that rank. It cannot be another one later: DTensor remembers process groups."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    warnings.filterwarnings("ignore", "Set timeout is now only supported for either nccl or gloo")
    # or to_empty() would put a fake tensor's shape into a real parameter, and each use would look like new memory
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    return torch.device("cpu")
