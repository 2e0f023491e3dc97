"""compare.py without the machines: as rank 0 of N fake ones, for any N and any model, under the same counters."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable

import torch
import torch.distributed as dist
from _compare_count import Counts
from _compare_report import Result
from torch import Tensor, nn

from old import hf, model, shapes

SHALLOW = 4  # blocks: two at each end of backward


def bucket_mib(config: shapes.Config) -> float:
    """As in 05_ddp/train.py: a quarter of the gradients, so that some are reduced while backward runs."""
    return max(1, min(25, shapes.parameter_count(config) / 2**20))


def pretend_ddp(net: nn.Module, bucket_cap_mb: float, **_) -> nn.Module:
    """What DistributedDataParallel does from its second step on: a bucket is all-reduced when its last gradient is
    there. Buckets are filled in the order in which the first step's gradients came. (DDP itself reads numbers.)
    """
    order: list[nn.Parameter] = []
    hooks = [parameter.register_post_accumulate_grad_hook(order.append) for parameter in net.parameters()]

    def make_buckets(*_) -> None:
        if not order:
            return  # before the first step
        for hook in (*hooks, before_forward):
            hook.remove()
        net.gradient_order = order
        for members in buckets(order, bucket_cap_mb):
            reduce_together([order[i] for i in members])

    before_forward = net.register_forward_pre_hook(make_buckets)
    return net


def buckets(order: list[Tensor], bucket_cap_mb: float) -> list[list[int]]:
    """Which of these gradients DistributedDataParallel puts into one bucket."""
    return dist._compute_bucket_assignment_by_size(order, [int(bucket_cap_mb * 2**20)])[0]


def reduce_together(parameters: list[nn.Parameter]) -> None:
    bucket = torch.empty(sum(parameter.numel() for parameter in parameters))
    views = dict(zip(parameters, bucket.split([parameter.numel() for parameter in parameters]), strict=True))
    missing = len(parameters)

    def gradient_is_ready(parameter: nn.Parameter) -> None:
        nonlocal missing
        view = views[parameter].view_as(parameter)
        view.copy_(parameter.grad)
        parameter.grad = view
        missing -= 1
        if missing == 0:
            missing = len(parameters)
            dist.all_reduce(bucket)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(gradient_is_ready)


def mark_ends_of_backward(blocks: list[nn.Module], enter: Callable[[str], None]) -> None:
    """Tell when backward leaves the last two blocks, and when it reaches the first two.

    From block to block activations go and gradients come, by equal steps: so memory peaks at one end or the other. At
    which one may change with the depth, and so each end is extrapolated by itself.
    """
    if len(blocks) < SHALLOW:
        return

    def at_output_of(block: nn.Module, phase: str) -> None:
        def when_its_gradient_comes(_module: nn.Module, _inputs: tuple, output: Tensor) -> None:
            output.register_hook(lambda _: enter(phase))

        block.register_forward_hook(when_its_gradient_comes)

    at_output_of(blocks[-3], "middle of backward")
    at_output_of(blocks[1], "end of backward")


def dry_run(method: str, job, count: Callable) -> Result:
    """What count(method, job, batches) would give for all of a deep model. Two shallow ones tell, because all blocks
    are alike, so that each adds the same."""
    config = job.config
    tokens = torch.zeros(job.micro_batch_size, job.seq_len, dtype=torch.int64)
    batches = [[tokens, tokens]] * 2  # the first step makes AdamW's state

    def counts_with(layers: int) -> tuple[nn.Module, Counts]:
        shallow = dataclasses.replace(config, num_hidden_layers=layers)
        trainer, counts, _ = count(method, dataclasses.replace(job, config=shallow), batches)
        return trainer.forward, counts

    layers = config.num_hidden_layers
    # ZeRO-1 has one flat tensor, padded for the ranks: the two depths differ by so many blocks as change no padding
    apart = blocks_without_padding(config, dist.get_world_size()) if method == "ZeRO-1" else 1
    near = SHALLOW + (layers - SHALLOW) % apart
    if near + apart >= layers:
        return Result(method, counts_with(layers)[1])
    _, of_shallow = counts_with(near)
    net, of_deeper = counts_with(near + apart)
    counts = extrapolate(of_shallow, of_deeper, times=(layers - near) // apart)
    if method == "DDP":  # buckets do not end where blocks do
        [kind] = counts.traffic.calls
        counts.traffic.calls[kind] = bucket_count(net, config)
    return Result(method, counts)


def extrapolate(near, far, times: int):
    """near + times * (far - near), in every number."""
    if isinstance(near, int):
        return near + times * (far - near)
    if isinstance(near, Counter):
        # backward of the shallow one has no middle
        return Counter({key: extrapolate(near[key], far[key], times) for key in far if key in near})
    names = [field.name for field in dataclasses.fields(near)]
    return type(near)(**{name: extrapolate(getattr(near, name), getattr(far, name), times) for name in names})


def blocks_without_padding(config: shapes.Config, world_size: int) -> int:
    """The least number of blocks whose weights the ranks divide: so many more leave a flat tensor's padding alone."""
    of_one, of_two = (shapes.parameter_count(dataclasses.replace(config, num_hidden_layers=depth)) for depth in (1, 2))
    return world_size // math.gcd(world_size, of_two - of_one)


def bucket_count(net: nn.Module, config: shapes.Config) -> int:
    """How many buckets DDP fills for the whole model, after pretend_ddp has seen the gradients of a shallow one."""
    names = {parameter: name for name, parameter in hf.named_weights(net)}
    order = [names[parameter] for parameter in net.gradient_order]
    of_one_block = [name for name in order if name.startswith("model.layers.1.")]
    begin = next(i for i, name in enumerate(order) if name.startswith("model.layers."))
    end = len(order) - next(i for i, name in enumerate(reversed(order)) if name.startswith("model.layers."))
    of_blocks = []
    for i in reversed(range(config.num_hidden_layers)):
        of_blocks += [name.replace("layers.1.", f"layers.{i}.") for name in of_one_block]
    weights = dict(model.build("", config, seed=0, device="meta").named_parameters())
    return len(buckets([weights[name] for name in (*order[:begin], *of_blocks, *order[end:])], bucket_mib(config)))
