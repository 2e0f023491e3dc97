"""What compare.py does beside the concept: the formulas that its counts must meet, and DDP without machines."""

import argparse
import math
import weakref

import torch
import torch.distributed as dist
from _shared import of_zero
from torch import Tensor, nn

from common import cli, measure, shapes
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


class StepMemory(measure.LiveBytes):
    """Bytes alive, of which the peak can begin anew. They are kept as a sum that follows each piece of memory as it is
    made, resized and freed: to add up thousands of pieces after each operator would take minutes for 80 layers."""

    def __init__(self, device: torch.device) -> None:
        self._sizes: dict[int, int] = {}  # by address
        self._sum = 0
        super().__init__(device=device)

    def __enter__(self):
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, size: int):  # ZeRO-3 and fully_shard free and fill their memory so
            result = self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, storage.nbytes())
            return result

        torch.UntypedStorage.resize_ = resize
        return super().__enter__()

    def __exit__(self, *error) -> None:
        torch.UntypedStorage.resize_ = self._resize
        super().__exit__(*error)

    @property
    def now(self) -> int:
        return super().now if self.cuda else self._sum

    def _note(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._sizes:
            weakref.finalize(storage, self._set, storage._cdata, None)
        self._set(storage._cdata, storage.nbytes())

    def _set(self, address: int, size: int | None) -> None:
        self._sum += (size or 0) - self._sizes.pop(address, 0)
        if size is not None:
            self._sizes[address] = size

    def restart(self) -> None:
        self._peak = 0
        if self.cuda:
            torch.cuda.reset_peak_memory_stats(self.cuda)


def expected(method: str, net: nn.Module, ranks: int, copies: int, gathered_bytes: int) -> dict[str, int]:
    """What a method must hold, call and send on rank 0, which holds the largest part, from the shapes alone.
    `gathered_bytes` is the size of a weight as fully_shard gathers it."""
    if method in ("FSDP", "HSDP"):
        return of_fully_shard(net, ranks, copies, gathered_bytes)
    due = of_zero(int(method[-1]) if method.startswith("ZeRO") else 0, net, ranks)
    if method == "DDP":
        del due["all_reduces_per_step"]  # one per bucket, and DDP fills buckets as it likes
    return due


def of_fully_shard(net: nn.Module, ranks: int, copies: int, gathered_bytes: int) -> dict[str, int]:
    """FSDP, or HSDP with several copies: each tensor is cut by rows; for rows that a rank lacks it sends zeros."""
    shards = ranks // copies
    parts = {name: math.ceil(p.shape[0] / shards) * p.shape[1:].numel() for name, p in net.named_parameters()}
    part, part_of_blocks = sum(parts.values()), sum(parts[name] for name in parts if name.startswith("model.layers."))
    groups = len(net.model.layers) + 1
    gathered = gathered_bytes * (part + part_of_blocks)  # the root once, a block in forward and in backward
    between_copies = 2 * 4 * part * (copies - 1) / copies
    return {
        "parameter_bytes_per_rank": 4 * part,
        "gradient_bytes_per_rank": 4 * part,
        "optimizer_bytes_per_rank": 8 * part + 4 * len(parts),
        "all_gathers_per_step": 2 * groups - 1 if shards > 1 else 0,
        "reduce_scatters_per_step": groups if shards > 1 else 0,
        "all_reduces_per_step": groups if copies > 1 else 0,
        "bytes_sent_per_rank_per_step": round((gathered + 4 * part) * (shards - 1) + between_copies),
    }


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
