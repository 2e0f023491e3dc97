"""What compare.py does beside the concept: flags, formulas, DDP without machines, and the ZeRO rows by hand."""

import argparse
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from _shared import (
    Group,
    after_the_last_gradient,
    all_gather,
    flatten,
    group_by_block,
    keep_all_gradients,
    of_fully_shard,
    of_zero,
    reduce_scatter,
    unflatten,
)
from torch import Tensor, nn

from common import cli, shapes
from common.exits import UserError


def parse(docstring: str) -> argparse.Namespace:
    """The flags. UserError for what does not fit."""
    parser = cli.Parser(docstring)
    add = parser.add_argument
    add("--model", default="nano", help="as in train_fsdp.py")
    add("--seq-len", type=cli.positive_int, help="tokens per sequence (default: from the model, nano 64)")
    add("--micro-batch-size", type=cli.positive_int, help="sequences per rank (default: about 8 / ranks; dry run: 1)")
    add("--dtype", choices=("fp32", "bf16"), help="what matrices are multiplied in (default: fp32; dry run: bf16)")
    add("--checkpointing", choices=("none", "full"), default="none", help="full: recompute in backward")
    add("--replicate", type=cli.positive_int, help="copies of the model in HSDP (default: one for each node, or 2)")
    add("--steps", type=cli.positive_int, default=5, help="of each method for tokens/s, after the counted one")
    add("--dry-run", action="store_true", help="one process takes itself for rank 0 of --world-size")
    add("--world-size", type=cli.positive_int, help="with --dry-run: how many ranks, 8 on each node")
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    if args.dry_run == (args.world_size is None):
        raise UserError("--dry-run and --world-size go together; without them torchrun says how many ranks there are")
    args.seq_len = args.seq_len or shapes.recipe(args.model).seq_len
    args.dtype = args.dtype or ("bf16" if args.dry_run else "fp32")
    return args


def sizes(args: argparse.Namespace, ranks: int, ranks_per_node: int) -> None:
    """Fill in what depends on the number of ranks. UserError for copies that do not divide them."""
    args.world_size = ranks
    args.micro_batch_size = args.micro_batch_size or (1 if args.dry_run else max(1, 8 // ranks))
    usual = [copies for copies in (ranks // ranks_per_node, 2) if 1 < copies < ranks and ranks % copies == 0]
    args.replicate = args.replicate or next(iter(usual), 1)  # one for each node, or two, or none
    if ranks % args.replicate:
        raise UserError(f"--replicate {args.replicate} does not divide {ranks} processes into equal parts")


def expected(method: str, net: nn.Module, ranks: int, copies: int, gathered_bytes: int) -> dict[str, int]:
    """What a method must hold, call and send on rank 0, which holds the largest part, from the shapes alone.
    `gathered_bytes` is the size of a weight as fully_shard gathers it."""
    if method in ("FSDP", "HSDP"):
        return of_fully_shard(net, ranks, copies, gathered_bytes)
    due = of_zero(int(method[-1]) if method.startswith("ZeRO") else 0, net, ranks)
    if method == "DDP":
        del due["all_reduces_per_step"]  # one per bucket, and DDP fills buckets as it likes
    return due


def pretend_ddp(net: nn.Module, bucket_cap_mb: float, **_) -> nn.Module:
    """What DistributedDataParallel does from its second step on: a bucket is all-reduced when its last gradient is
    there. Buckets are filled in the order in which the first step's gradients came. (DDP itself reads numbers.)"""
    order: list[nn.Parameter] = []
    hooks = [parameter.register_post_accumulate_grad_hook(order.append) for parameter in net.parameters()]

    def make_buckets(*_) -> None:
        if not order:
            return  # before the first step
        for hook in (*hooks, before_forward):
            hook.remove()
        for members in dist._compute_bucket_assignment_by_size(order, [int(bucket_cap_mb * 2**20)])[0]:
            reduce_together([order[i] for i in members])

    before_forward = net.register_forward_pre_hook(make_buckets)
    return net


def reduce_together(parameters: list[nn.Parameter]) -> None:
    bucket = torch.empty(sum(parameter.numel() for parameter in parameters))
    views = dict(zip(parameters, unflatten(bucket, parameters), strict=True))

    def copy_into_bucket(parameter: nn.Parameter) -> None:
        parameter.grad = views[parameter].copy_(parameter.grad)

    for parameter in parameters:
        parameter.register_post_accumulate_grad_hook(copy_into_bucket)
    after_the_last_gradient(parameters, lambda: dist.all_reduce(bucket))


def make_zero(stage: int, net: nn.Module, learning_rate: float) -> tuple[list[Group], torch.optim.Optimizer, Callable]:
    """ZeRO as in zero_from_scratch.py, which explains each line: the groups, AdamW, and what follows backward."""
    if stage == 1:
        groups = [Group(list(net.parameters()))]
        gradients = keep_all_gradients(groups[0])
    else:
        modules, groups = group_by_block(net)
        for group, module in zip(groups, modules, strict=True):
            if stage == 3:
                gather_when_used(group, module)
            else:
                after_the_last_gradient(group.parameters, partial(reduce_and_free, group))
    optimizer = torch.optim.AdamW([group.my_weights for group in groups], lr=learning_rate, fused=True)

    def update() -> None:
        if stage == 1:
            reduce_scatter(groups[0].my_weights.grad, gradients)
            groups[0].my_weights.grad /= dist.get_world_size()
        optimizer.step()
        if stage < 3:
            for group in groups:
                all_gather(group.weights, group.my_weights.detach())
        if stage == 1:
            gradients.zero_()

    return groups, optimizer, update


def reduce_and_free(group: Group) -> None:
    gradients = flatten([parameter.grad for parameter in group.parameters])
    for parameter in group.parameters:
        parameter.grad = None
    my_gradients = torch.empty_like(group.my_weights, requires_grad=False)
    reduce_scatter(my_gradients, gradients)
    group.my_weights.grad = my_gradients / dist.get_world_size()


def gather_when_used(group: Group, module: nn.Module) -> None:
    group.my_weights = nn.Parameter(group.my_weights.detach().clone())
    storage = group.weights.untyped_storage()

    def gather(*_) -> None:
        storage.resize_(group.weights.nbytes)
        all_gather(group.weights, group.my_weights.detach())

    def free_until_backward(_module: nn.Module, _inputs: tuple, output: Tensor) -> None:
        storage.resize_(0)
        if output.requires_grad:
            output.register_hook(gather)

    def reduce_and_free_weights() -> None:
        reduce_and_free(group)
        storage.resize_(0)

    storage.resize_(0)
    module.register_forward_pre_hook(gather)
    module.register_forward_hook(free_until_backward)
    after_the_last_gradient(group.parameters, reduce_and_free_weights)
