"""What `load_training_objects` of a training script returns."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor, nn

from training.batches import Batches


class TrainingObjects(NamedTuple):
    """The model and the data of a training script. The first four are required.

    Arguments:
        model: The training loop calls `model(inputs, targets)`, which returns the mean loss over
            the targets of a micro-batch, a scalar. The evaluation calls
            `model(inputs, targets, reduction="sum")`, which returns the sum over the targets that
            are not training.batches.PADDING.
        batches: The batches of this rank. All training samples must have the same number of
            targets, or the mean over ranks would not be the mean over all targets.
            06_fsdp_zero/finetune.py shows what to do if the numbers differ.
        name: The name of the model, in the output and in --json.
        must_match: What a resumed run must have, too, in addition to the flags: texts by name, such
            as {"data": "the SHA-256 of all samples", "model": repr(model)}.
        flops_per_token: Floating-point operations to train on one target. None: no MFU is printed.
        config_json: The content of config.json in each checkpoint, for convert_checkpoint.py.
        sample: Called at each evaluation on all ranks, to return a text, which rank 0 prints. It
            must turn gradients and dropout off itself.
        start_step: Called before the first micro-batch of a step, on all ranks, with the number of
            the step and, if it has one, the context of forward.
        end_step: Called after each optimizer step on all ranks, to return tensors by name, which
            metrics.jsonl then has. In fp16 it gets skipped=True if GradScaler skipped the step.
    """

    model: nn.Module
    batches: Batches
    name: str
    must_match: dict[str, str]
    flops_per_token: float | None = None
    config_json: dict | None = None
    sample: Callable[[], str | None] | None = None
    start_step: Callable[..., None] | None = None
    end_step: Callable[..., dict[str, Tensor]] | None = None
