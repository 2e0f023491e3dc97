"""Build ZeRO stages 1, 2 and 3 on reduce-scatter and all-gather, and compare them with DDP.

In data parallelism every rank holds all weights, all gradients and all of AdamW's state, and these
are the same on all ranks. ZeRO (Rajbhandari et al. 2020, section 5 and figure 1) gives each rank
one shard of them instead:

    (0) data parallelism: no shards
    (1) shards of the optimizer state
    (2) shards of the gradients, too
    (3) shards of the weights, too

In (1) and (2) a rank updates its shard of the weights, and an all-gather then sends every rank the
new weights. They send as many bytes as the all-reduce of (0). In (3) a rank gathers a block just
before it computes with it, in forward and in backward: half as many bytes again. With N ranks, (3)
holds 1/N of what (0) holds.

    laptop    python 06_fsdp_zero/zero_from_scratch.py
              torchrun --standalone --nproc_per_node=3 06_fsdp_zero/zero_from_scratch.py --steps 5
    one node  torchrun --standalone --nproc_per_node=8 06_fsdp_zero/zero_from_scratch.py
    cluster   the same on each node, but in place of --standalone
              --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

Everything is fp32: a parameter takes 4 bytes for its weight, 4 for its gradient and 8 for AdamW's
two moments. The paper trains in mixed precision, where these are 2, 2 and 12.

What to look at: which column shrinks from stage to stage, and to what fraction. The bytes sent. The
difference from the weights of DistributedDataParallel: 0 means that all bits are equal.

On GPUs the default is --model wide: 57 million parameters. Expected on 8 GPUs: (0) holds 870 MiB
and (3) holds 109 MiB. (0) to (2) send 381 MiB per step and (3) sends 571 MiB. Over the NVLink of
H100s (450 GB/s in one direction) that takes at least 0.9 and 1.3 ms.

Previous: 05_ddp/ddp_from_scratch.py. Next: train_fsdp.py, which does (3) with PyTorch.
"""

import copy
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _zero_from_scratch as helper
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from common import lesson, measure, runtime

# The names since torch 2.13. Before, they were all_gather_into_tensor and reduce_scatter_tensor.
from common.torch_versions import all_gather_single, reduce_scatter_single
from lm import shapes, stdlib_text, weights

GPU_DEFAULTS = {"model": "wide", "seq_len": 256}  # nano is too small to keep a GPU busy
BATCH_SIZE = 24  # sequences of all ranks together


# --- parameters, and their shards


class Group:
    """Parameters that are sharded and sent together, and the module that computes with them.

    weights     all parameters, one after the other, then zeros: [N * shard size] for N ranks. Each
                parameter becomes a view of it.
    my_weights  the shard of this rank: [shard size]. AdamW updates it. In (1) and (2) it is a view
                of `weights`, in (3) a copy.

    A shard of this flat tensor may begin or end inside a row of a matrix, as in FSDP1. fully_shard
    shards each parameter by itself, on dim 0.
    """

    def __init__(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        self.module = module
        self.parameters = parameters
        self.weights = flatten(parameters)
        for parameter, view in zip(parameters, self.split(self.weights), strict=True):
            parameter.data = view
        self.my_weights = nn.Parameter(my_shard(self.weights))

    def split(self, flat: Tensor) -> list[Tensor]:
        """Return a view of `flat`, [N * shard size], for each parameter and in its shape."""
        views = []
        start = 0
        for parameter in self.parameters:
            end = start + parameter.numel()
            views.append(flat[start:end].view_as(parameter))
            start = end
        return views


def flatten(tensors: list[Tensor]) -> Tensor:
    """Copy tensors into one, and add zeros until N ranks can divide it: [N * shard size]."""
    flat = torch.cat([tensor.detach().flatten() for tensor in tensors])
    padding = -len(flat) % dist.get_world_size()
    return F.pad(flat, (0, padding))


def my_shard(flat: Tensor) -> Tensor:
    """Return the shard of this rank, a view: [N * shard size] -> [shard size]."""
    return flat.chunk(dist.get_world_size())[dist.get_rank()]


@dataclass
class Stage:
    """A model under a stage. Call `step` after backward, in place of optimizer.step()."""

    net: nn.Module
    groups: list[Group]  # none in (0)
    optimizer: torch.optim.Optimizer
    step: Callable[[], None]


# --- (0) data parallelism


def data_parallel(net: nn.Module, lr: float) -> Stage:
    """Average the gradients, and then make the same update on every rank."""
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)

    def step() -> None:
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)  # in place: the sum over all ranks, on every rank
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)  # not None, so that `run` counts their bytes

    return Stage(net, [], optimizer, step)


# What (0) wastes: all ranks hold the same optimizer state, and all compute the same update.


# --- (1) shards of the optimizer state


def shard_optimizer_state(net: nn.Module, lr: float) -> Stage:
    """Let each rank update its shard of the weights only, and then gather the other shards."""
    group = Group(net, list(net.parameters()))

    # If .grad is set before backward, autograd adds to it in place. So each gradient lands in its
    # view of one flat tensor, [N * shard size], which one reduce-scatter can read.
    gradients = torch.zeros_like(group.weights)
    for parameter, view in zip(group.parameters, group.split(gradients), strict=True):
        parameter.grad = view

    my_gradients = my_shard(gradients)  # [shard size], a view
    group.my_weights.grad = my_gradients
    optimizer = torch.optim.AdamW([group.my_weights], lr=lr)  # with 1/N of the state

    def step() -> None:
        # Neither collective needs extra memory: my_gradients is a view of `gradients`, and
        # my_weights of group.weights.
        reduce_scatter_single(my_gradients, gradients)  # the sum over the ranks, of my shard only
        my_gradients.div_(dist.get_world_size())
        optimizer.step()
        all_gather_single(group.weights, group.my_weights.detach())
        gradients.zero_()

    return Stage(net, [group], optimizer, step)


# What (1) wastes: each rank holds all gradients until the step, and needs only its shard.


# --- (2) shards of the gradients


def shard_gradients(net: nn.Module, lr: float) -> Stage:
    """Reduce the gradients of a group during backward, and free all but this rank's shard."""
    groups = group_by_block(net)
    for group in groups:
        after_last_gradient(group, partial(reduce_gradients, group))
    optimizer = torch.optim.AdamW([group.my_weights for group in groups], lr=lr)

    def step() -> None:
        optimizer.step()
        for group in groups:
            all_gather_single(group.weights, group.my_weights.detach())

    return Stage(net, groups, optimizer, step)


def group_by_block(net: nn.Module) -> list[Group]:
    """Return a group for each block, and one for the rest: embedding, final norm and head."""
    groups = []
    for block in net.model.layers.values():
        groups.append(Group(block, list(block.parameters())))
    rest = []
    for name, parameter in net.named_parameters():
        if not name.startswith("model.layers."):
            rest.append(parameter)
    groups.append(Group(net, rest))
    return groups


def reduce_gradients(group: Group) -> None:
    """Sum the gradients over the ranks, keep the shard of this rank, and free the others."""
    gradients = flatten([parameter.grad for parameter in group.parameters])  # [N * shard size]
    for parameter in group.parameters:
        parameter.grad = None

    # Collectives are matched by their order: every rank must call them in the same one. Backward
    # reaches the groups in the same order on all ranks.
    my_gradients = torch.empty_like(group.my_weights, requires_grad=False)  # [shard size]
    reduce_scatter_single(my_gradients, gradients)
    group.my_weights.grad = my_gradients / dist.get_world_size()


def after_last_gradient(group: Group, call: Callable[[], None]) -> None:
    """Register hooks that call `call` when backward has computed all gradients of the group."""
    missing = len(group.parameters)

    def on_gradient_ready(_: nn.Parameter) -> None:
        nonlocal missing
        missing -= 1
        if missing == 0:
            missing = len(group.parameters)  # for the next backward
            call()

    for parameter in group.parameters:
        parameter.register_post_accumulate_grad_hook(on_gradient_ready)


# What (2) wastes: each rank holds all weights, and computes with one block at a time.


# --- (3) shards of the weights


def shard_weights(net: nn.Module, lr: float) -> Stage:
    """Gather the weights of a group just before its module needs them, and free them afterwards."""
    groups = group_by_block(net)
    for group in groups:
        gather_when_used(group)
    optimizer = torch.optim.AdamW([group.my_weights for group in groups], lr=lr)
    # The step sends nothing: the next forward gathers the updated weights.
    return Stage(net, groups, optimizer, optimizer.step)


def gather_when_used(group: Group) -> None:
    """Register hooks that gather a group before forward and before backward, and free it after."""
    # A copy, because the memory behind the view will be freed.
    group.my_weights = nn.Parameter(group.my_weights.detach().clone())
    storage = group.weights.untyped_storage()

    def gather(*_) -> None:
        storage.resize_(group.weights.nbytes)
        all_gather_single(group.weights, group.my_weights.detach())

    def free() -> None:
        # The parameters are views of this storage. Autograd has saved views of it, too. resize_(0)
        # frees the memory and keeps these tensor objects. After the next gather they have the full
        # values again.
        storage.resize_(0)

    def free_until_backward(_module: nn.Module, _inputs: tuple, output: Tensor) -> None:
        free()
        if output.requires_grad:  # not under torch.no_grad
            output.register_hook(gather)  # called when backward has the gradient of the output

    def reduce_and_free() -> None:
        reduce_gradients(group)
        free()

    free()
    group.module.register_forward_pre_hook(gather)
    group.module.register_forward_hook(free_until_backward)
    after_last_gradient(group, reduce_and_free)


# What (3) wastes: no collective overlaps with compute. fully_shard gathers the next block while
# this one computes. (3) also gathers the last group (embedding, final norm and head) twice per
# step. fully_shard keeps it gathered from forward to backward.


# --- the comparison

STAGES = {
    "(0) data parallelism": data_parallel,
    "(1) optimizer state": shard_optimizer_state,
    "(2) and gradients": shard_gradients,
    "(3) and weights": shard_weights,
}


def torch_ddp(net: nn.Module, lr: float) -> Stage:
    """Return the reference: PyTorch averages the gradients during backward."""
    ddp_net = DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Stage(ddp_net, [], optimizer, step)


def run(stage: Stage, batches: list[tuple[Tensor, Tensor]]) -> dict:
    """Train for one step per batch. Return the losses, and what a rank holds and sends."""
    losses = []
    with measure.Traffic() as sent:
        for inputs, targets in batches:
            loss = stage.net(inputs, targets)
            loss.backward()
            stage.step()
            losses.append(loss.detach())
    return helper.row_of(stage, losses, sent)


def main() -> int:
    args = lesson.parse_flags(
        __doc__, gpu=GPU_DEFAULTS, relaunches=True, model="nano", seq_len=16, steps=20
    )
    # Check flags before relaunch. After it, every rank would print the error.
    config = shapes.load_config(args.model, 256, args.seq_len)
    lesson.relaunch(args.device)  # plain python becomes torchrun: a rank per GPU, 2 on a CPU
    # This sets environment variables that NCCL reads in init_process_group.
    runtime.seed_all(0, deterministic=True)
    device = runtime.init_process_group(args.device)
    rank = dist.get_rank()
    world_size = dist.get_world_size()

    # Equal shares for all ranks: round the batch up to a multiple of the number of ranks.
    batch_size = -(-BATCH_SIZE // world_size) * world_size
    all_inputs, all_targets = stdlib_text.one_batch(args.steps * batch_size, args.seq_len, device)
    batches = []
    for inputs, targets in zip(
        all_inputs.split(batch_size), all_targets.split(batch_size), strict=True
    ):
        batches.append((inputs.chunk(world_size)[rank], targets.chunk(world_size)[rank]))

    start = weights.build(args.model, config, seed=0, device=device)
    lr = shapes.recipe(args.model).lr
    ddp = torch_ddp(copy.deepcopy(start), lr)
    losses = run(ddp, batches)["losses"]
    rows = []
    for number, (name, make_stage) in enumerate(STAGES.items()):
        stage = make_stage(copy.deepcopy(start), lr)
        row = {"sharded": name, "stage": number}
        row |= run(stage, batches)
        row |= helper.compare(stage, ddp, start)
        rows.append(row)
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=helper.check(rows, start),
        args=args,
        device=device,
        dtype="fp32",
        parameters=shapes.parameter_count(config),
        tokens=args.steps * batch_size * args.seq_len,
        first_loss=losses[0],
        last_loss=losses[-1],
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
