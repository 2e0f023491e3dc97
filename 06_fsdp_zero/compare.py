"""DDP, ZeRO-1, 2 and 3, FSDP and HSDP side by side: what each rank holds, what it sends, how fast it is.

All six train the same model on the same batches, and reach the same losses. They differ in what a rank keeps between
two uses, and so in what it must ask the others for. Here each is built and trains a few steps. A counter sees the
memory that is alive and every collective that is called. ZeRO-1, 2 and 3 are by hand, as in zero_from_scratch.py.
FSDP and HSDP are fully_shard, as in train_fsdp.py. HSDP keeps several copies and shards each over a part of the ranks.

    laptop    python 06_fsdp_zero/compare.py
    one node  torchrun --nproc_per_node=8 06_fsdp_zero/compare.py --model llama-124m --micro-batch-size 8
    cluster   python 06_fsdp_zero/compare.py --dry-run --world-size 64 --model llama-70b --checkpointing full

--dry-run needs no machines: one CPU process takes itself for rank 0 of --world-size, with tensors that hold no numbers.
The same program and counter run. Its peak is that of eager kernels: torch.compile keeps fewer activations.

Bytes sent are those of a ring. For a tensor of S bytes on N ranks, an all-gather or a reduce-scatter sends S (N-1)/N
per rank, and an all-reduce twice as many. Clipping, which all-reduces one number, is left out. Look for: what shrinks
with N, and what it costs in bytes sent. Before: zero_from_scratch.py. Next: train_fsdp.py; estimate.py for seconds.
"""

import argparse
import gc
import os
import statistics
import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _compare import expected, make_zero, parse, pretend_ddp, sizes
from _shared import StepMemory, bytes_of_training

from common import exits, fake_ranks, lesson, measure, model, runtime, shapes, traffic

warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # torch 2.11 does not have its successor
warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor|Mismatch dtype between input and weight")
METHODS = ["DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP", "HSDP"]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# What another order of the same sums may change in a loss; in bf16, also where each method rounds
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
COUNTED_STEP = 3  # DDP makes its final buckets after the first, and sends them to the other ranks in the second


@dataclass
class Trainer:
    """A model under one of the methods, and what the loop calls."""

    forward: Callable[[Tensor, Tensor], Tensor]  # to the loss
    update: Callable[[], None]  # what follows backward
    optimizer: torch.optim.Optimizer
    weights: list[Tensor]  # whatever of them is kept in memory


def shard(net: nn.Module, args: argparse.Namespace, device: torch.device, copies: int) -> None:
    """FSDP and HSDP: as in train_fsdp.py. A block's weights are gathered for its forward and again for its backward."""
    shards = args.world_size // copies
    names = {"shard": shards} if copies == 1 else {"replicate": copies, "shard": shards}
    cut = partial(
        fully_shard,
        mesh=init_device_mesh(device.type, tuple(names.values()), mesh_dim_names=tuple(names)),
        mp_policy=MixedPrecisionPolicy(DTYPES[args.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False),
    )
    blocks = list(net.model.layers.values())
    for block in blocks:
        cut(block)
    cut(net)
    for block, next_block in pairwise(blocks):
        block.set_modules_to_forward_prefetch([next_block])
        next_block.set_modules_to_backward_prefetch([block])


def prepare(method: str, net: nn.Module, args: argparse.Namespace, device: torch.device) -> Trainer:
    """Give the model its memory and weights, and wrap it. AdamW is one kernel, which needs no memory of its own."""
    if args.dry_run:
        net.to_empty(device=device)
        net.tie_weights()
    else:
        model.materialize(net, args.model, seed=0, device=device)
    learning_rate = shapes.recipe(args.model).lr
    if method.startswith("ZeRO"):
        groups, optimizer, update = make_zero(int(method[-1]), net, learning_rate)
        flat = [tensor for group in groups for tensor in (group.my_weights, group.weights)]
        return Trainer(net, update, optimizer, [*net.parameters(), *flat])
    optimizer = torch.optim.AdamW(net.parameters(), lr=learning_rate, fused=True)
    forward = net
    if method == "DDP":
        wrap = pretend_ddp if args.dry_run else DistributedDataParallel
        # a quarter of the gradients, so that some are reduced while backward runs
        bucket_mib = max(1, min(25, shapes.parameter_count(net.config) / 2**20))
        forward = wrap(net, bucket_cap_mb=bucket_mib, gradient_as_bucket_view=True, broadcast_buffers=False)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(forward, update, optimizer, list(net.parameters()))


def train_step(method: str, trainer: Trainer, dtype: str, inputs: Tensor, targets: Tensor) -> Tensor:
    """The same for all. The weights are kept in fp32, whatever --dtype is."""
    # fully_shard casts by itself, before it gathers. The others gather in fp32, and autocast makes a copy of a weight,
    # which autograd keeps until backward. (Its cache would keep it longer, and each weight is used only once.)
    casts = dtype != "fp32" and method not in ("FSDP", "HSDP")
    with torch.autocast(inputs.device.type, DTYPES[dtype], enabled=casts, cache_enabled=False):
        loss = trainer.forward(inputs, targets)
    loss.backward()
    trainer.update()
    return loss.detach()


def count_step(
    method: str, args: argparse.Namespace, config: shapes.Config, device: torch.device, batches: list[list[Tensor]]
) -> tuple[Trainer, dict, Tensor]:
    """Build the model under a method and train a step per batch. What the last of them needs is counted."""
    net = model.build(args.model, config, seed=0, device="meta")  # shapes alone
    model.checkpoint_blocks(net, args.checkpointing)
    if method in ("FSDP", "HSDP"):
        shard(net, args, device, args.replicate if method == "HSDP" else 1)
    held = {}
    with fake_ranks.tensors() if args.dry_run else nullcontext(), StepMemory(device=device) as memory:
        trainer = prepare(method, net, args, device)
        # just after the update, while the gradients are still there
        hook = trainer.optimizer.register_step_post_hook(
            lambda *_: held.update(bytes_of_training(trainer.weights, trainer.optimizer))
        )
        for inputs, targets in batches:
            gc.collect()  # what only a cycle holds would count, or not, by chance
            memory.restart()
            with traffic.Traffic() as sent:
                # copies, because the counter knows only what was made under its eyes
                loss = train_step(method, trainer, args.dtype, inputs.clone(), targets.clone())
    hook.remove()
    calls = {f"{kind}_per_step": sent.calls[kind] for kind in ("all_gathers", "reduce_scatters", "all_reduces")}
    counts = {
        "method": method,
        "world_size": args.world_size,
        **held,
        "peak_memory_bytes": memory.peak,
        **calls,
        "calls": " + ".join(map(str, calls.values())),
        "bytes_sent_per_rank_per_step": round(sum(sent.bytes_sent.values())),
    }
    return trainer, counts, loss


def run(method: str, args: argparse.Namespace, config: shapes.Config, device: torch.device) -> dict:
    """What rank 0 holds and sends. Of real ranks also the loss of the global batch, and tokens/s of the slowest."""
    if args.dry_run:
        tokens = torch.zeros(args.micro_batch_size, args.seq_len, dtype=torch.int64)
        _, counts, _ = count_step(method, args, config, device, [[tokens, tokens]] * 2)  # the first makes AdamW's state
        return {**counts, "loss": None, "tokens_per_second": None}
    sequences = args.world_size * args.micro_batch_size
    whole = lesson.one_batch(COUNTED_STEP * sequences, args.seq_len, device)  # the same on every rank
    steps = zip(*(tensor.split(sequences) for tensor in whole), strict=True)
    batches = [[tensor.chunk(args.world_size)[dist.get_rank()] for tensor in batch] for batch in steps]
    trainer, counts, loss = count_step(method, args, config, device, batches)
    of_ranks = runtime.gather(counts)
    for key in counts.keys() - {"peak_memory_bytes"}:
        assert of_ranks[0][key] == max(of_rank[key] for of_rank in of_ranks), f"{method}: {key} by rank: {of_ranks}"
    step = partial(train_step, method, trainer, args.dtype, *batches[-1])
    seconds = measure.seconds_in_turns({method: step}, device, args.steps)[method]["seconds"]
    return {
        **of_ranks[0],
        "loss": statistics.fmean(runtime.gather(loss.item())),
        "tokens_per_second": sequences * args.seq_len / max(runtime.gather(seconds)),
    }


def check(rows: list[dict], args: argparse.Namespace, config: shapes.Config) -> list[str]:
    net = model.build(args.model, config, seed=0, device="meta")
    for row in rows:
        copies = args.replicate if row["method"] == "HSDP" else 1
        for key, value in expected(row["method"], net, args.world_size, copies, DTYPES[args.dtype].itemsize).items():
            assert row[key] == value, f"{row['method']}: {key} is {row[key]:,}, and must be {value:,}"
    checked = ["every state, call and byte sent is what its formula gives, on rank 0"]
    if not args.dry_run:
        for row in rows:
            error = abs(row["loss"] / rows[0]["loss"] - 1)
            assert error <= TOLERANCE[args.dtype], f"{row['method']}: its loss differs from DDP's by {error:.1e}"
        checked.append(
            f"all have DDP's loss of step {COUNTED_STEP}, {rows[0]['loss']:.4f}, within {TOLERANCE[args.dtype]:g}"
        )
    return checked


COLUMNS = {
    "method": "method",
    "parameter_bytes_per_rank": "weights",
    "gradient_bytes_per_rank": "gradients",
    "optimizer_bytes_per_rank": "AdamW",
    "peak_memory_bytes": "peak",
    "calls": "gathers + scatters + reduces",
    "bytes_sent_per_rank_per_step": "bytes sent a step",
    "tokens_per_second": "speed",
}


def main() -> int:
    args = parse(__doc__)
    config = shapes.load_config(args.model, 256, args.seq_len)  # raises a UserError before any rank starts
    if args.dry_run:
        runtime.single_device("cpu")
        device = fake_ranks.join(0, args.world_size)
        sizes(args, args.world_size, ranks_per_node=8)
    else:
        lesson.relaunch(args.device, on_cpu=4)  # four, so that HSDP has two copies, each on two ranks
        runtime.seed_all(0)
        device = runtime.init_process_group(args.device)
        sizes(args, dist.get_world_size(), int(os.environ["LOCAL_WORLD_SIZE"]))
    rows = []
    for method in METHODS if 1 < args.replicate < args.world_size else METHODS[:-1]:  # else HSDP is DDP, or FSDP
        rows.append(run(method, args, config, device))
        gc.collect()  # the next one must not find this one's memory
    if args.dry_run:
        dist.destroy_process_group()  # from here on there is one rank
        runtime.say(f"rank 0 of {args.world_size} that are not there; HSDP: {args.replicate} copies")
    checked, count = check(rows, args, config), shapes.parameter_count(config)
    lesson.end(rows, columns=COLUMNS, checked=checked, args=args, device=device, parameters=count)
    if not args.dry_run:
        runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
