"""Compare DDP, ZeRO-1, 2 and 3, FSDP and HSDP: the bytes a rank holds and sends, and the speed.

All of them reach the same losses. They differ in what a rank holds between two uses. What it does
not hold, it must receive from other ranks:

    DDP     every rank holds everything
    ZeRO    shards of the optimizer state (1), the gradients (2) and the weights (3)
    FSDP    shards of all three: fully_shard, as in train_fsdp.py
    HSDP    several copies of the model, each of which is sharded over some of the ranks

DDP, FSDP and HSDP train the same model on the same batches for a few steps. Counters see the memory
that is in use, and each collective. The rows of ZeRO are computed by formulas, as in the paper;
zero_from_scratch.py checks them. DeepSpeed 0.19.8 all-reduces gradients at stages 1 and 2, where
the paper reduce-scatters them: two more rows have its bytes.

    laptop    python 06_fsdp_zero/compare.py
    one node  torchrun --standalone --nproc_per_node=8 06_fsdp_zero/compare.py
    cluster   python 06_fsdp_zero/compare.py --dry-run --world-size 64 --model llama-70b \
                  --checkpointing full

--dry-run needs no GPUs: one CPU process runs the same program as rank 0 of --world-size ranks, with
tensors that have shapes and no values. It finds the peak memory of eager kernels: torch.compile
keeps fewer activations.

Bytes sent assume a ring. For a tensor of S bytes on N ranks, a rank sends S (N-1)/N in an
all-gather or a reduce-scatter, and twice that in an all-reduce. Gradients are not clipped.

What to look at: which columns shrink with N, and what that costs in bytes sent.

On GPUs the default is --model wide in bf16, 16 x 1,024 tokens per rank. Expected on 8 H100s: DDP
holds 870 MiB of weights, gradients and optimizer state, and FSDP 109 MiB. Both send 0.40 GB per
step. By the data sheet's 450 GB/s for NVLink this takes at least 0.9 ms, and by its 989 TFLOP/s the
arithmetic of a step takes at least 6 ms: long enough to hide what is sent.

Previous: zero_from_scratch.py. Next: train_fsdp.py; 07_memory_tricks/estimate.py for seconds.
"""

import argparse
import gc
import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _compare as helper
import torch
import torch.distributed as dist
from _sharding import bytes_of_training, shard_groups
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from common import lesson, measure, runtime
from common.torch_versions import KEEP_BUFFERS
from lm import shapes, stdlib_text
from lm.activation_checkpointing import checkpoint_blocks
from lm.weights import build, materialize

GPU_DEFAULTS = {"model": "wide", "micro_batch_size": 16, "dtype": "bf16"}
COUNTED_STEP = 3  # DDP makes its final buckets after step 1, and sends them to all ranks in step 2

Batch = tuple[Tensor, Tensor]  # inputs and targets of this rank, each [micro-batch, tokens]


# --- the methods


def replicate(net: nn.Module, dry_run: bool) -> nn.Module:
    """Wrap a model in DDP: every rank holds all of it, and gradients are averaged in backward."""
    if not dry_run:
        return DistributedDataParallel(net, gradient_as_bucket_view=True, **KEEP_BUFFERS)
    # DDP reads values, which a dry run does not have. All-reduce each gradient in a hook instead:
    # as many bytes in more calls.
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(all_reduce_gradient)
    return net


def all_reduce_gradient(parameter: nn.Parameter) -> None:
    """Sum the gradient of a parameter over the ranks."""
    dist.all_reduce(parameter.grad)


def shard(net: nn.Module, copies: int, dtype: torch.dtype, device: torch.device) -> None:
    """Shard a model with FSDP, or with HSDP if there are several copies. See train_fsdp.py."""
    world_size = dist.get_world_size()
    sizes = {"shard": world_size}
    if copies > 1:
        sizes = {"replicate": copies, "shard": world_size // copies}
    options = {
        "mesh": init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes)),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
    }
    # The weights of a block are gathered for its forward, and again for its backward.
    shard_groups(net, options)


def train_step(
    method: str,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    dtype: torch.dtype,
    inputs: Tensor,
    targets: Tensor,
) -> Tensor:
    """Take one step, and return its loss. Weights are fp32, and matmuls run in `dtype`."""
    # fully_shard casts its shards before it gathers them. DDP needs autocast, which casts a weight
    # where it is used. Autocast's cache would keep this copy until the end of forward.
    autocast = torch.autocast(
        inputs.device.type,
        dtype,
        enabled=method == "DDP" and dtype != torch.float32,
        cache_enabled=False,
    )
    with autocast:
        loss = net(inputs, targets)
    loss.backward()
    optimizer.step()
    # The gradients of DDP are views of its buckets, which stay.
    optimizer.zero_grad(set_to_none=method != "DDP")
    return loss.detach()


# --- the counters


def count_step(
    method: str,
    args: argparse.Namespace,
    config: shapes.Config,
    device: torch.device,
    batches: list[Batch],
) -> tuple[Callable[[Tensor, Tensor], Tensor], dict, Tensor]:
    """Build a model under a method, and train for one step per batch. Count the last step.

    Return a function that takes one more step, the counts, and the loss of the last step.
    """
    net = build(args.model, config, seed=0, device="meta")  # shapes without values
    checkpoint_blocks(net, args.checkpointing)
    if method == "FSDP":
        shard(net, 1, runtime.DTYPES[args.dtype], device)
    elif method == "HSDP":
        shard(net, args.replicate, runtime.DTYPES[args.dtype], device)

    fake_tensors = nullcontext()
    if args.dry_run:
        fake_tensors = FakeTensorMode(allow_non_fake_inputs=True)
    # The counter sees only memory that is allocated in this block.
    with fake_tensors, helper.step_memory(device) as memory:
        if args.dry_run:
            net.to_empty(device=device)
            net.tie_weights()  # to_empty has made two matrices of one
        else:
            materialize(net, args.model, seed=0, device=device)
        weights = list(net.parameters())
        # fused: one kernel for all weights, without temporary memory
        optimizer = torch.optim.AdamW(weights, lr=shapes.recipe(args.model).lr, fused=True)
        if method == "DDP":
            net = replicate(net, args.dry_run)

        held = {}

        def count_held(*_) -> None:  # after the update, before gradients are set to None
            held.update(bytes_of_training(weights, optimizer))

        hook = optimizer.register_step_post_hook(count_held)
        step = partial(train_step, method, net, optimizer, runtime.DTYPES[args.dtype])
        for inputs, targets in batches:
            gc.collect()  # or garbage in reference cycles would sometimes be counted
            memory.restart()
            with measure.Traffic() as sent:
                loss = step(inputs.clone(), targets.clone())  # clones are allocated in this block
    hook.remove()

    counts = {**held, "peak_memory_bytes": memory.peak}
    for kind in helper.COLLECTIVES:
        counts[f"{kind}_per_step"] = sent.calls[kind]
    counts["bytes_sent_per_rank_per_step"] = round(sum(sent.bytes_sent.values()))
    return step, counts, loss


def dry_run(
    method: str, args: argparse.Namespace, config: shapes.Config, device: torch.device
) -> dict:
    """Return the row of a method: the counts of rank 0, without ranks."""
    tokens = torch.zeros(args.micro_batch_size, args.seq_len, dtype=torch.int64)
    batches = [(tokens, tokens)] * 2  # the first step allocates the state of AdamW
    _, counts, _ = count_step(method, args, config, device, batches)
    return {"method": method, **counts}


def measure_ranks(
    method: str, args: argparse.Namespace, config: shapes.Config, device: torch.device
) -> dict:
    """Return the row of a method: the counts of rank 0, the loss, and the speed of all ranks.

    Every rank must call this.
    """
    rank = dist.get_rank()
    batch_size = args.world_size * args.micro_batch_size
    all_inputs, all_targets = stdlib_text.one_batch(COUNTED_STEP * batch_size, args.seq_len, device)
    batches = []
    for inputs, targets in zip(
        all_inputs.split(batch_size), all_targets.split(batch_size), strict=True
    ):
        my_inputs = inputs.chunk(args.world_size)[rank]  # [micro-batch, tokens]
        my_targets = targets.chunk(args.world_size)[rank]
        batches.append((my_inputs, my_targets))

    step, counts, loss = count_step(method, args, config, device, batches)
    counts_of_ranks = runtime.all_gather(counts)
    helper.check_rank0_holds_most(method, counts_of_ranks)
    one_more_step = partial(step, *batches[-1])
    timing = measure.seconds_in_turns({method: one_more_step}, device, args.steps)[method]
    slowest = max(runtime.all_gather(timing["seconds"]))
    return {
        "method": method,
        **counts_of_ranks[0],
        "loss": statistics.fmean(runtime.all_gather(loss.item())),
        "tokens_per_second": batch_size * args.seq_len / slowest,
    }


def main() -> int:
    args = helper.parse_flags(__doc__, GPU_DEFAULTS)
    # Check flags before relaunch. After it, every rank would print the error.
    config = shapes.load_config(args.model, 256, args.seq_len)
    if args.dry_run:
        runtime.single_device("cpu")
        device = runtime.join_fake_ranks(0, args.world_size)
        run = dry_run
    else:
        # Plain python becomes torchrun: a rank per GPU, or 4 on a CPU, 2 for each copy of HSDP.
        lesson.relaunch(args.device, on_cpu=4)
        runtime.seed_all(0)
        device = runtime.init_process_group(args.device)
        args.world_size = dist.get_world_size()
        run = measure_ranks

    args.replicate = helper.choose_copies(args.replicate, args.world_size)
    methods = helper.choose_methods(args.replicate, args.world_size)
    rows = []
    for method in methods:
        rows.append(run(method, args, config, device))
        gc.collect()  # free the model before the next one is built
    if args.dry_run:
        dist.destroy_process_group()  # from here on there is one rank
        runtime.print0(f"dry run: rank 0 of {args.world_size} ranks")
    if "HSDP" in methods:
        runtime.print0(f"HSDP: {args.replicate} copies of the model")

    net = build(args.model, config, seed=0, device="meta")
    checked = helper.check(rows, net, args, gathered_bytes=runtime.DTYPES[args.dtype].itemsize)
    lesson.end(
        helper.with_zero(rows, net, args.world_size),
        columns=helper.COLUMNS,
        checked=checked,
        args=args,
        device=device,
        parameters=shapes.parameter_count(config),
    )
    if not args.dry_run:
        runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
