"""ZeRO stages 1, 2 and 3 by hand on reduce-scatter and all-gather: the weights of DDP, in a part of its memory.

In data parallelism every rank holds all weights, all gradients and all of AdamW's state, and all ranks hold the same.
ZeRO (Rajbhandari et al. 2020, section 5 and Figure 1) gives each rank a part of them instead, and no more: (1) of the
optimizer state, (2) of the gradients too, (3) of the weights too. What a rank lacks it asks the others for, just when
it is needed. Stages 1 and 2 send no more bytes than the all-reduce of (0) does; stage 3 sends half as many again.

    laptop    python 06_fsdp_zero/zero_from_scratch.py
              torchrun --nproc_per_node=3 06_fsdp_zero/zero_from_scratch.py --steps 5
    one node  torchrun --nproc_per_node=8 06_fsdp_zero/zero_from_scratch.py --model llama-124m --seq-len 512
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

All is in fp32: 4 bytes a parameter for weights, 4 for gradients, 8 for AdamW. The paper's mixed precision: 2, 2 and 12.

Look for: which column shrinks from stage to stage, and to what share; the bytes sent, in units of the weights; the
difference from DistributedDataParallel. Before: 05_ddp/ddp_from_scratch.py. Next: train_fsdp.py, (3) by torch.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from _shared import (
    Group,
    after_the_last_gradient,
    bytes_of_training,
    flatten,
    group_by_block,
    keep_all_gradients,
)
from _zero_from_scratch import check, compare

from common import exits, report, runtime
from common.measure import Traffic
from common.torch_versions import all_gather_single as all_gather
from common.torch_versions import reduce_scatter_single as reduce_scatter
from lm import data, shapes, weights

# what is sharded
STAGES = ["(0) data parallelism", "(1) optimizer state", "(2) and gradients", "(3) and weights"]

# In (1) to (3) a Group is some of the model's parameters. group.weights is one flat tensor with all of them, and
# group.my_weights is the part of it that this rank owns: AdamW updates nothing else here. _shared.py has the class.


def step_0(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """(0) Data parallelism: the gradients are averaged, then every rank makes the same update."""
    for parameter in net.parameters():
        dist.all_reduce(parameter.grad)
        parameter.grad /= dist.get_world_size()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


def step_1(group: Group, gradients: Tensor, optimizer: torch.optim.Optimizer) -> None:
    """(1) In (0) every rank holds all of AdamW's state. Here it holds that of its part, and updates only that part."""
    # my_weights is a view into weights, and its gradient one into gradients. So both collectives work in place.
    reduce_scatter(group.my_weights.grad, gradients)  # the sum over the ranks, of my part only
    group.my_weights.grad /= dist.get_world_size()
    optimizer.step()
    all_gather(group.weights, group.my_weights.detach())  # every rank's updated part, to every rank
    gradients.zero_()  # backward adds to it


def reduce_in_backward(group: Group, when_reduced: Callable[[], None] = lambda: None) -> None:
    """(2) In (1) a rank holds all gradients until the step ends, and uses a part. Here a group's gradients are reduced
    as soon as backward has computed the last of them, and freed at once. A rank keeps its part of the sum."""

    def reduce() -> None:
        gradients = flatten([parameter.grad for parameter in group.parameters])
        for parameter in group.parameters:
            parameter.grad = None
        my_gradients = torch.empty_like(group.my_weights, requires_grad=False)
        # Ranks match collectives by their order alone. Backward reaches the groups in the same order on all of them.
        reduce_scatter(my_gradients, gradients)
        group.my_weights.grad = my_gradients / dist.get_world_size()
        when_reduced()

    after_the_last_gradient(group.parameters, reduce)


def step_2(groups: list[Group], optimizer: torch.optim.Optimizer) -> None:
    """The rest of (2), after backward. All that is left of the gradients is the part that AdamW needs."""
    optimizer.step()
    for group in groups:
        all_gather(group.weights, group.my_weights.detach())


def gather_when_used(group: Group, module: nn.Module) -> None:
    """(3) In (2) a rank holds all weights, though it computes with one block at a time. Here it holds its part. A
    group is gathered before its module's forward, freed after it, and gathered again before its backward."""
    # no longer a view: the rest will go
    group.my_weights = nn.Parameter(group.my_weights.detach().clone())
    storage = group.weights.untyped_storage()

    def gather(*_) -> None:
        storage.resize_(group.weights.nbytes)
        all_gather(group.weights, group.my_weights.detach())

    def free() -> None:
        # the parameters, and what autograd has saved of them, are views into it and stay
        storage.resize_(0)

    def free_until_backward(_module: nn.Module, _inputs: tuple, output: Tensor) -> None:
        free()
        if output.requires_grad:  # it does not in evaluation, under no_grad
            output.register_hook(gather)  # runs as soon as backward has the gradient of the output

    free()
    module.register_forward_pre_hook(gather)
    module.register_forward_hook(free_until_backward)
    # A weight is last read where its gradient is computed. So the weights can go after the group's last gradient.
    reduce_in_backward(group, when_reduced=free)
    # What (3) lacks: every collective is waited for. fully_shard gathers the next block while this one computes.


@dataclass
class Stage:
    """A model, and what makes a step of it after forward and backward."""

    net: nn.Module
    groups: list[Group]  # none at stage 0
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]


def make_stage(number: int, net: nn.Module, learning_rate: float) -> Stage:
    """The model, under the stage of that number."""
    adamw = partial(torch.optim.AdamW, lr=learning_rate)
    if number == 0:
        optimizer = adamw(net.parameters())
        return Stage(net, [], optimizer, partial(step_0, net, optimizer))
    if number == 1:
        group = Group(list(net.parameters()))
        optimizer = adamw([group.my_weights])
        return Stage(
            net, [group], optimizer, partial(step_1, group, keep_all_gradients(group), optimizer)
        )
    modules, groups = group_by_block(net)
    for group, module in zip(groups, modules, strict=True):
        if number == 2:
            reduce_in_backward(group)
        else:
            gather_when_used(group, module)
    optimizer = adamw([group.my_weights for group in groups])
    if number == 2:
        return Stage(net, groups, optimizer, partial(step_2, groups, optimizer))
    # the next forward gathers what AdamW has updated
    return Stage(net, groups, optimizer, optimizer.step)


def make_ddp(net: nn.Module, learning_rate: float) -> Stage:
    """What all stages are compared with: torch averages the gradients during backward."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=learning_rate)
    optimizer.register_step_post_hook(lambda *_: optimizer.zero_grad())
    return Stage(DistributedDataParallel(net), [], optimizer, optimizer.step)


def run(stage: Stage, batches: list[list[Tensor]]) -> dict:
    """A row: a step per batch, then the bytes that a rank holds and has sent. All ranks hold and send the same."""
    losses = torch.zeros(len(batches), device=batches[0][0].device)
    with Traffic() as sent:
        for i, (inputs, targets) in enumerate(batches):
            loss = stage.net(inputs, targets)
            loss.backward()
            stage.step()
            losses[i] = loss.detach()
    dist.all_reduce(losses)  # the mean over the ranks: each had an equal part of the batch
    flat_weights = [
        tensor for group in stage.groups for tensor in (group.my_weights, group.weights)
    ]
    sent_bytes = round(sum(sent.bytes_sent.values()) / len(batches))
    row = {
        **bytes_of_training([*stage.net.parameters(), *flat_weights], stage.optimizer),
        **{f"{kind}_per_step": count // len(batches) for kind, count in sent.calls.items()},
        "collectives": ", ".join(
            f"{count // len(batches)} {kind}" for kind, count in sent.calls.items()
        ),
        "bytes_sent_per_rank_per_step": sent_bytes,
        "sent_bytes": sent_bytes,
        "losses": (losses / dist.get_world_size()).tolist(),
    }
    assert all(other == row for other in runtime.all_gather(row)), f"ranks differ: {row}"
    return row


COLUMNS = {
    "sharded": "sharded",
    "parameter_bytes_per_rank": "weights",
    "gradient_bytes_per_rank": "gradients",
    "optimizer_bytes_per_rank": "AdamW state",
    "collectives": "collectives a step",
    "sent_bytes": "sent a step",
    "weights_error": "weights' difference from DDP",
}


def main() -> int:
    args = report.lesson_flags(__doc__, model="nano", seq_len=16, steps=20)
    # raises a UserError before any rank starts
    config = shapes.load_config(args.model, 256, args.seq_len)
    runtime.relaunch(args.device)
    runtime.seed_all(0, deterministic=True)  # before the group: NCCL reads variables when it starts
    device = runtime.init_process_group(args.device)
    rank, world_size = dist.get_rank(), dist.get_world_size()
    sequences = max(1, 24 // world_size) * world_size
    texts = data.one_batch(args.steps * sequences, args.seq_len, device)
    steps = zip(*(tensor.split(sequences) for tensor in texts), strict=True)
    batches = [[tensor.chunk(world_size)[rank] for tensor in step] for step in steps]
    start = weights.build(args.model, config, seed=0, device=device)
    learning_rate = shapes.recipe(args.model).lr
    ddp = make_ddp(copy.deepcopy(start), learning_rate)
    losses = run(ddp, batches)["losses"]
    rows = []
    for number in range(4):
        stage = make_stage(number, copy.deepcopy(start), learning_rate)
        rows.append(
            {
                "sharded": STAGES[number],
                **run(stage, batches),
                **compare(stage, ddp, start),
                "stage": number,
            }
        )
    about = {"dtype": "fp32", "parameters": shapes.parameter_count(config), "first_loss": losses[0]}
    about |= {"last_loss": losses[-1], "tokens": args.steps * sequences * args.seq_len}
    report.end_lesson(
        rows, columns=COLUMNS, checked=check(rows, start), args=args, device=device, **about
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
