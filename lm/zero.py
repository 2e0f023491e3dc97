"""DeepSpeed's ZeRO: import it for this job, and fill a model of stage 3 with weights."""

import functools
import logging
import os
import warnings

import torch
from torch import nn

from common import runtime
from lm.weights import open_weights, random_weight


@functools.cache
def import_deepspeed(device: torch.device):
    """Import DeepSpeed for this device, let it use the process group of the job, and return it.

    The import takes seconds, so a script first checks its flags and reads its data.
    """
    os.environ["DS_ACCELERATOR"] = device.type  # or DeepSpeed would take a GPU if there is one
    os.environ.setdefault("LOCAL_RANK", "0")  # zero.Init reads it, also without torchrun
    # The import and each start print warnings to stdout. Leave out those, and no other library's.
    # A filter, because the import sets the level of this logger.
    logging.getLogger("DeepSpeed").addFilter(_is_error)
    import deepspeed

    # DeepSpeed uses names that torch has changed since.
    warnings.filterwarnings("ignore", "`torch.distributed.", FutureWarning)
    if device.type == "cpu":
        # For its inference engine, DeepSpeed has an all-reduce in shared memory, and compiles it at
        # the first start, for two minutes. It is not used here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    deepspeed.init_distributed("nccl" if device.type == "cuda" else "gloo")
    return deepspeed


def _is_error(record: logging.LogRecord) -> bool:
    """Return whether a record is more than a warning."""
    return record.levelno >= logging.ERROR


@torch.no_grad()
def fill_weights(model: nn.Module, name: str, seed: int) -> None:
    """Fill a model of stage 3 with the weights that weights.materialize gives to a full model.

    One parameter at a time is gathered. Rank 0 reads or draws it, and each rank keeps its shard.
    """
    import deepspeed

    stored = open_weights(name, model.config)
    for path, parameter in model.named_parameters():
        with deepspeed.zero.GatheredParameters([parameter], modifier_rank=0):
            if not runtime.is_rank0():
                continue
            if stored is None:
                weight = random_weight(path, parameter.ds_shape, seed)
            else:
                weight = stored.read(path)
            parameter.copy_(weight)
