"""DDP, ZeRO-1, 2 and 3, FSDP and HSDP side by side: what each rank holds, what it sends, how fast it is.

They reach the same losses, and differ in what a rank keeps between two uses, and so in what it must ask the others
for. DDP, FSDP and HSDP train the same model on the same batches for a few steps here. A counter sees the memory that is
alive and every collective that is called. FSDP is fully_shard, as in train_fsdp.py; HSDP keeps several copies and
shards each over a part of the ranks. ZeRO's rows are computed by formulas, which zero_from_scratch.py tests.

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
import statistics
import sys
import warnings
from contextlib import nullcontext
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from _shared import bytes_of_training, of_fully_shard, of_zero, step_memory

from common import cli, exits, measure, report, runtime
from common.torch_versions import KEEP_BUFFERS
from lm import data, shapes
from lm.activation_checkpointing import checkpoint_blocks
from lm.weights import build, materialize

warnings.filterwarnings(
    "ignore", "Accessing the data pointer of FakeTensor|Mismatch dtype between input and weight"
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# What another order of the same sums may change in a loss; in bf16, also where each method rounds
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
# DDP makes its final buckets after the first, and sends them to the other ranks in the second
COUNTED_STEP = 3


def replicate(net: nn.Module, dry_run: bool) -> nn.Module:
    """DDP. It reads numbers, so a dry run sends each gradient as soon as it is there: the same bytes, in more calls."""
    if not dry_run:
        return DistributedDataParallel(net, gradient_as_bucket_view=True, **KEEP_BUFFERS)
    for parameter in net.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda parameter: dist.all_reduce(parameter.grad)
        )
    return net


def shard(net: nn.Module, args: argparse.Namespace, device: torch.device, copies: int) -> None:
    """FSDP and HSDP: as in train_fsdp.py. A block's weights are gathered for its forward and again for its backward."""
    shards = args.world_size // copies
    names = {"shard": shards} if copies == 1 else {"replicate": copies, "shard": shards}
    cut = partial(
        fully_shard,
        mesh=init_device_mesh(device.type, tuple(names.values()), mesh_dim_names=tuple(names)),
        mp_policy=MixedPrecisionPolicy(
            DTYPES[args.dtype], reduce_dtype=torch.float32, cast_forward_inputs=False
        ),
    )
    blocks = list(net.model.layers.values())
    for block in blocks:
        cut(block)
    cut(net)
    for block, next_block in pairwise(blocks):
        block.set_modules_to_forward_prefetch([next_block])
        next_block.set_modules_to_backward_prefetch([block])


def train_step(
    method: str,
    net: nn.Module,
    optimizer: torch.optim.Optimizer,
    dtype: str,
    inputs: Tensor,
    targets: Tensor,
) -> Tensor:
    """The same for all. The weights are kept in fp32, whatever --dtype is."""
    # fully_shard casts by itself, before it gathers. With DDP autocast makes a copy of a weight, which autograd keeps
    # until backward. (Its cache would keep it longer, and each weight is used only once.)
    casts = dtype != "fp32" and method == "DDP"
    with torch.autocast(inputs.device.type, DTYPES[dtype], enabled=casts, cache_enabled=False):
        loss = net(inputs, targets)
    loss.backward()
    optimizer.step()
    # DDP's gradients live in its buckets, which stay
    optimizer.zero_grad(set_to_none=method != "DDP")
    return loss.detach()


def count_step(
    method: str,
    args: argparse.Namespace,
    config: shapes.Config,
    device: torch.device,
    batches: list,
) -> tuple[partial, dict, Tensor]:
    """Build the model under a method and train a step per batch. What the last of them needs is counted."""
    net = build(args.model, config, seed=0, device="meta")  # shapes alone
    checkpoint_blocks(net, args.checkpointing)
    if method != "DDP":
        shard(net, args, device, args.replicate if method == "HSDP" else 1)
    held = {}
    fake = FakeTensorMode(allow_non_fake_inputs=True) if args.dry_run else nullcontext()
    with fake, step_memory(device) as memory:
        if args.dry_run:
            net.to_empty(device=device)
            net.tie_weights()
        else:
            materialize(net, args.model, seed=0, device=device)
        weights = list(net.parameters())
        # one kernel, which needs no memory of its own
        optimizer = torch.optim.AdamW(weights, lr=shapes.recipe(args.model).lr, fused=True)
        if method == "DDP":
            net = replicate(net, args.dry_run)
        # just after the update, while the gradients are still there
        hook = optimizer.register_step_post_hook(
            lambda *_: held.update(bytes_of_training(weights, optimizer))
        )
        step = partial(train_step, method, net, optimizer, args.dtype)
        for inputs, targets in batches:
            gc.collect()  # what only a cycle holds would count, or not, by chance
            memory.restart()
            with measure.Traffic() as sent:
                # copies, because the counter knows only what was made under its eyes
                loss = step(inputs.clone(), targets.clone())
    hook.remove()
    counts = {
        **held,
        "peak_memory_bytes": memory.peak,
        **{
            f"{kind}_per_step": sent.calls[kind]
            for kind in ("all_gathers", "reduce_scatters", "all_reduces")
        },
        "bytes_sent_per_rank_per_step": round(sum(sent.bytes_sent.values())),
    }
    return step, counts, loss


def run(method: str, args: argparse.Namespace, config: shapes.Config, device: torch.device) -> dict:
    """What rank 0 holds and sends. Of real ranks also the loss of the global batch, and tokens/s of the slowest."""
    if args.dry_run:
        tokens = torch.zeros(args.micro_batch_size, args.seq_len, dtype=torch.int64)
        # the first makes AdamW's state
        _, counts, _ = count_step(method, args, config, device, [[tokens, tokens]] * 2)
        return {"method": method, **counts}
    sequences = args.world_size * args.micro_batch_size
    # the same on every rank
    whole = data.one_batch(COUNTED_STEP * sequences, args.seq_len, device)
    steps = zip(*(tensor.split(sequences) for tensor in whole), strict=True)
    batches = [
        [tensor.chunk(args.world_size)[dist.get_rank()] for tensor in batch] for batch in steps
    ]
    step, counts, loss = count_step(method, args, config, device, batches)
    of_ranks = runtime.all_gather(counts)
    for key in counts.keys() - {"peak_memory_bytes"}:
        assert of_ranks[0][key] == max(of_rank[key] for of_rank in of_ranks), (
            f"{method}: {key} by rank: {of_ranks}"
        )
    seconds = measure.seconds_in_turns({method: partial(step, *batches[-1])}, device, args.steps)[
        method
    ]["seconds"]
    return {
        "method": method,
        **of_ranks[0],
        "loss": statistics.fmean(runtime.all_gather(loss.item())),
        "tokens_per_second": sequences * args.seq_len / max(runtime.all_gather(seconds)),
    }


def check(rows: list[dict], net: nn.Module, args: argparse.Namespace) -> list[str]:
    """`rows` are those of what was trained."""
    for row in rows:
        if row["method"] == "DDP":
            expected = of_zero(0, net, args.world_size)
            if not args.dry_run:
                # one per bucket, and DDP fills buckets as it likes
                del expected["all_reduces_per_step"]
        else:
            copies = args.replicate if row["method"] == "HSDP" else 1
            expected = of_fully_shard(
                net, args.world_size, copies, gathered_bytes=DTYPES[args.dtype].itemsize
            )
        for key, value in expected.items():
            assert row[key] == value, (
                f"{row['method']}: {key} is {row[key]:,}, and must be {value:,}"
            )
    checked = [
        "every state, call and byte sent that was counted is what its formula gives, on rank 0"
    ]
    if args.dry_run:
        return checked
    loss, tolerance = rows[0]["loss"], TOLERANCE[args.dtype]
    for row in rows:
        error = abs(row["loss"] / loss - 1)
        assert error <= tolerance, f"{row['method']}: its loss differs from DDP's by {error:.1e}"
    return [
        *checked,
        f"all that train have DDP's loss of step {COUNTED_STEP}, {loss:.4f}, within {tolerance:g}",
    ]


COLUMNS = {
    "method": "method",
    "parameter_bytes_per_rank": "weights",
    "gradient_bytes_per_rank": "gradients",
    "optimizer_bytes_per_rank": "AdamW",
    "peak_memory_bytes": "peak",
    "calls": "gathers, scatters, reduces",
    "bytes_sent_per_rank_per_step": "bytes sent a step",
    "tokens_per_second": "speed",
}


def parse() -> argparse.Namespace:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--model", default="nano", help="as in train_fsdp.py")
    add(
        "--seq-len",
        type=cli.positive_int,
        help="tokens per sequence (default: from the model, nano 64)",
    )
    add(
        "--micro-batch-size",
        type=cli.positive_int,
        default=1,
        help="sequences per rank (default: 1)",
    )
    add(
        "--dtype",
        choices=DTYPES,
        help="what matrices are multiplied in (default: fp32; dry run: bf16)",
    )
    add(
        "--checkpointing",
        choices=("none", "full"),
        default="none",
        help="full: recompute in backward",
    )
    add(
        "--replicate",
        type=cli.positive_int,
        help="copies of the model in HSDP (default: one for each 8 ranks, or 2)",
    )
    add(
        "--steps",
        type=cli.positive_int,
        default=5,
        help="of each method for tokens/s, after the counted one",
    )
    add(
        "--dry-run", action="store_true", help="one process takes itself for rank 0 of --world-size"
    )
    add("--world-size", type=cli.positive_int, help="with --dry-run: how many ranks")
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    if args.dry_run == (args.world_size is None):
        raise exits.UserError(
            "--dry-run and --world-size go together; without them torchrun gives the number of ranks"
        )
    args.seq_len = args.seq_len or shapes.recipe(args.model).seq_len
    args.dtype = args.dtype or ("bf16" if args.dry_run else "fp32")
    return args


def main() -> int:
    args = parse()
    # raises a UserError before any rank starts
    config = shapes.load_config(args.model, 256, args.seq_len)
    if args.dry_run:
        runtime.single_device("cpu")
        device = runtime.join_fake_ranks(0, args.world_size)
    else:
        # four, so that HSDP has two copies, each on two ranks
        runtime.relaunch(args.device, on_cpu=4)
        runtime.seed_all(0)
        device = runtime.init_process_group(args.device)
        args.world_size = dist.get_world_size()
    if args.replicate and args.world_size % args.replicate:
        raise exits.UserError(
            f"--replicate {args.replicate} does not divide {args.world_size} processes"
        )
    args.replicate = args.replicate or max(2, args.world_size // 8)
    methods = ["DDP", "FSDP"]
    # else it is DDP, or FSDP
    if 1 < args.replicate < args.world_size and args.world_size % args.replicate == 0:
        methods.append("HSDP")
    rows = []
    for method in methods:
        rows.append(run(method, args, config, device))
        gc.collect()  # the next one must not find this one's memory
    if args.dry_run:
        dist.destroy_process_group()  # from here on there is one rank
        runtime.print0(
            f"rank 0 of {args.world_size} that are not there; HSDP: {args.replicate} copies"
        )
    net = build(args.model, config, seed=0, device="meta")
    checked, count = check(rows, net, args), shapes.parameter_count(config)
    rows[1:1] = [
        {"method": f"ZeRO-{n} (formula)", **of_zero(n, net, args.world_size)} for n in (1, 2, 3)
    ]
    for row in rows:
        calls = [
            row[f"{kind}_per_step"] for kind in ("all_gathers", "reduce_scatters", "all_reduces")
        ]
        row |= {"calls": ", ".join(map(str, calls)), "world_size": args.world_size}
    report.end_lesson(
        rows, columns=COLUMNS, checked=checked, args=args, device=device, parameters=count
    )
    if not args.dry_run:
        runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
