"""The schedules of pipeline_parallel.py in torch.distributed.pipelining, and one that splits the backward in two."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from _pipeline_parallel_batches import Batch
from _pipeline_parallel_record import Record
from _pipeline_parallel_stages import Pipeline
from _pipeline_parallel_whole import summed_loss
from torch import Tensor

TORCH = "torch.distributed.pipelining"
NAMES = {
    "FORWARD": "Forward",
    "FULL_BACKWARD": "Backward",
    "BACKWARD_INPUT": "BackwardInput",
    "BACKWARD_WEIGHT": "BackwardWeight",
}


def torch_pipelines(build: Callable[..., Pipeline], micro_batches: int, chunks: int) -> list[Pipeline]:
    """One for each schedule, with a copy of the model of its own: two that share stages give wrong gradients."""
    from torch.distributed import pipelining  # a second that unstaged training need not wait for

    schedules = {"GPipe": (pipelining.ScheduleGPipe, 1), "1F1B": (pipelining.Schedule1F1B, 1)}
    if chunks > 1:
        schedules["interleaved 1F1B"] = (pipelining.ScheduleInterleaved1F1B, chunks)
        schedules["interleaved zero-bubble"] = (pipelining.ScheduleInterleavedZeroBubble, chunks)
    pipelines = []
    for name, (schedule_class, stages_per_rank) in schedules.items():
        pipeline = build(name, stages_per_rank, by=TORCH)
        tokens = torch.ones((), device=pipeline.record.device)  # of the batch; set at each step
        torch_stages = []
        for chunk, stage in enumerate(pipeline.stages):
            count = dist.get_world_size() * stages_per_rank
            torch_stage = pipelining.PipelineStage(stage.net, stage.number, count, pipeline.record.device)
            record_computing(torch_stage, chunk, pipeline.record)
            torch_stages.append(torch_stage)
        schedule = schedule_class(
            torch_stages if stages_per_rank > 1 else torch_stages[0],
            n_microbatches=micro_batches,
            loss_fn=partial(mean_over_batch, tokens),
            scale_grads=False,  # the default divides the gradients by the micro-batches, as a mean of means would
        )
        if stages_per_rank > 1:  # in the order of the others, torch 2.13 numbers the last rank's micro-batches from 1
            pipeline.orders = read_orders(schedule)
        pipeline.train_step = partial(train_step, schedule, pipeline, tokens)
        pipelines.append(pipeline)
    return pipelines


def mean_over_batch(tokens: Tensor, logits: Tensor, targets: Tensor) -> Tensor:
    """The micro-batch's part of the mean over the whole batch."""
    return summed_loss(logits, targets) / tokens


def train_step(schedule, pipeline: Pipeline, tokens: Tensor, batch: Batch) -> Tensor:
    """Forward, backward and update under one of torch's schedules; returns this rank's part of the loss."""
    tokens.fill_(batch.tokens)
    losses = [torch.zeros((), device=pipeline.record.device)]
    inputs = [torch.cat(batch.inputs)] if pipeline.stages[0].number == 0 else []
    if pipeline.stages[-1].is_last:
        schedule.step(*inputs, target=torch.cat(batch.targets), losses=losses)  # replaces what is in losses
    else:
        schedule.step(*inputs)
    pipeline.update()
    return torch.stack(losses).sum().detach()


def read_orders(schedule) -> list[list[tuple]]:
    """What each rank computes, as (name, micro-batch, chunk); torch's empty slots are left out."""
    ranks = len(schedule.pipeline_order)
    orders = []
    for rank in range(ranks):
        actions = [action for action in schedule.pipeline_order[rank] if action is not None]
        orders.append([(NAMES[a.computation_type.name], a.microbatch_index, a.stage_index // ranks) for a in actions])
    return orders


def record_computing(torch_stage, chunk: int, record: Record) -> None:
    """Note when the stage computes: its three methods, which take the micro-batch first."""
    forward = torch_stage.forward_one_chunk
    backward = torch_stage.backward_one_chunk
    backward_weight = torch_stage.backward_weight_one_chunk

    def timed_forward(micro_batch: int, *args, **kwargs):
        with record.compute(("Forward", micro_batch, chunk)):
            return forward(micro_batch, *args, **kwargs)

    def timed_backward(micro_batch: int, *args, full_backward: bool = True, **kwargs):
        with record.compute(("Backward" if full_backward else "BackwardInput", micro_batch, chunk)):
            return backward(micro_batch, *args, full_backward=full_backward, **kwargs)

    def timed_backward_weight(micro_batch: int, *args, **kwargs):
        with record.compute(("BackwardWeight", micro_batch, chunk)):
            return backward_weight(micro_batch, *args, **kwargs)

    torch_stage.forward_one_chunk = timed_forward
    torch_stage.backward_one_chunk = timed_backward
    torch_stage.backward_weight_one_chunk = timed_backward_weight
