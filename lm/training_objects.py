"""What `load_training_objects` of a training script returns."""

from collections.abc import Callable
from typing import NamedTuple

from torch import nn

from lm.data import Batches


class TrainingObjects(NamedTuple):
    """The model and the data of a training script. The first three are required.

    The training scripts call `model(inputs, targets)`, which returns the mean loss over the targets
    of a micro-batch, a scalar. `model(inputs, targets, reduction="sum")` returns the sum, and
    leaves out targets that are lm.data.PADDING.

    All training samples must have the same number of targets. Only then is the mean over
    micro-batches and ranks the mean over all targets. 06_fsdp_zero/finetune.py shows what to do if
    the numbers differ.
    """

    model: nn.Module
    batches: Batches
    # Texts that a resumed run must have, too, by the name of their flag, such as
    # {"data": "the SHA-256 of all samples", "model": repr(model)}.
    must_match: dict[str, str]
    # Floating-point operations to train on one target. None: no MFU is printed.
    flops_per_token: float | None = None
    # The content of config.json in each checkpoint, which convert_checkpoint.py reads.
    config_json: dict | None = None
    # Returns a text to print at each evaluation. All ranks call it.
    sample: Callable[[], str] | None = None
