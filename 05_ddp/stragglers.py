"""Find the rank that slows down all others, and train on ranks that run out of batches.

Ranks meet in every all-reduce, so the slowest rank sets the pace, and all ranks report the same
step time. The step time shows that a job is slow, but not which rank is. The time that a rank
computes before it waits does: the slow rank computes while the others wait.

Uneven inputs are the extreme case. A rank that has no batch left does not call the all-reduce, and
the others wait for it forever. In DDP's join(), such a rank answers with zeros until the last rank
is done.

    laptop    python 05_ddp/stragglers.py
              python 05_ddp/stragglers.py --trace traces    a file per rank for ui.perfetto.dev
    one node  torchrun --standalone --nproc_per_node=8 05_ddp/stragglers.py --slow-rank 5
    cluster   the same on each node, but in place of --standalone
              --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

What to look at: equal step times beside unequal compute times, when one rank is planted that gets
--slow-factor times the work. The wait is exposed communication, which is not hidden by backward: it
is long on the ranks that wait, and short on the slow one. train.py names its slowest rank by the
same comparison.

On GPUs the default is --model wide. Expected on H100s from their data sheets: data, forward and
backward take at least 5 ms, and 10 times as long on the planted rank. The others spend nine tenths
of a step waiting.

Previous: collectives.py. Next: survive.py.
"""

import statistics
import sys
import time
from contextlib import nullcontext
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _stragglers as helper
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import profile

from common import files, lesson, runtime
from lm import shapes, stdlib_text, weights

SLOW = 2.0  # times the typical rank; on a quiet cluster 1.1 is worth a look
WARMUP_STEPS = 3
TRACED_STEPS = 3
COMPUTE_PHASES = ("data", "forward", "backward")
PHASES = (*COMPUTE_PHASES, "wait", "optimizer")
HANG_TIMEOUT = timedelta(seconds=5)
CPU_DEFAULTS = {"model": "nano", "seq_len": 32}
GPU_DEFAULTS = {"model": "wide", "seq_len": 512}  # nano is too small to keep a GPU busy


# --- where a step goes


def train(
    net: nn.Module, batch: tuple[Tensor, Tensor], work: int, device: torch.device, steps: int
) -> dict[str, list[float]]:
    """Train, and return the seconds of each phase of each step.

    Gradients are averaged while backward runs, as in DDP, but without buckets.

    `work` makes this rank slow: it computes the same loss so many times, and its gradient is the
    same.
    """
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    running: list[dist.Work] = []

    def average(parameter: nn.Parameter) -> None:
        parameter.grad /= dist.get_world_size()
        running.append(dist.all_reduce(parameter.grad, async_op=True))

    hooks = []
    for parameter in net.parameters():
        hooks.append(parameter.register_post_accumulate_grad_hook(average))

    seconds = {phase: [] for phase in PHASES}
    for _ in range(steps):
        marks = [mark(device)]

        inputs, targets = (tensor.to(device, copy=True) for tensor in batch)
        marks.append(mark(device))

        losses = [net(inputs, targets) for _ in range(work)]
        loss = torch.stack(losses).mean()
        marks.append(mark(device))

        loss.backward()
        marks.append(mark(device))

        for all_reduce in running:
            all_reduce.wait()  # here the fast ranks wait for the slow one
        running.clear()
        marks.append(mark(device))

        optimizer.step()
        optimizer.zero_grad()
        marks.append(mark(device))

        runtime.synchronize(device)
        for phase, (start, end) in zip(PHASES, pairwise(marks), strict=True):
            seconds[phase].append(seconds_between(start, end))
    for hook in hooks:
        hook.remove()
    return seconds


def mark(device: torch.device) -> float | torch.cuda.Event:
    """Return the present time. On a GPU: an event, which records when the GPU gets here.

    Waiting for the GPU between the phases would end the overlap of backward and all-reduces.
    """
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    """Return the seconds between two marks."""
    if isinstance(start, float):
        return end - start
    return start.elapsed_time(end) / 1e3


# --- which rank is slow


def find_slow(compute_seconds: list[list[float]]) -> tuple[list[int], list[float]]:
    """Return the slow ranks, and the compute time of each rank as a multiple of the typical one.

    `compute_seconds` has a list per rank, with the seconds of each step. The fastest steps are
    compared: other work on a machine only adds time, and not to every step.
    """
    fastest = [min(seconds) for seconds in compute_seconds]
    typical = statistics.median_low(fastest)  # of two ranks, the faster one
    lags = [seconds / typical for seconds in fastest]
    slow_ranks = [rank for rank, lag in enumerate(lags) if lag > SLOW]
    return slow_ranks, lags


def run(
    name: str, net: nn.Module, batch: tuple, work: int, device: torch.device, steps: int
) -> list[dict]:
    """Train, and return a row for each rank. Every rank must call this."""
    own_seconds = train(net, batch, work, device, WARMUP_STEPS + steps)
    for phase in PHASES:
        own_seconds[phase] = own_seconds[phase][WARMUP_STEPS:]
    seconds_of_ranks = runtime.all_gather(own_seconds)

    compute_seconds = []
    for seconds in seconds_of_ranks:
        compute_seconds.append(helper.add_phases(seconds, COMPUTE_PHASES))
    slow_ranks, lags = find_slow(compute_seconds)

    rows = []
    for rank, seconds in enumerate(seconds_of_ranks):
        row = helper.row_of(name, rank, seconds)
        row["lag_ratio"] = lags[rank]
        row["found_slow"] = rank in slow_ranks
        rows.append(row)
    return rows


# --- ranks that run out of batches


def train_on_uneven_inputs(
    device: torch.device, group: dist.ProcessGroup | None, join: bool
) -> list[float]:
    """Train on a different number of batches on each rank, and return the weights.

    There is a weight per rank. A sample of rank r has input 1 at weight r and 0 elsewhere, and the
    learning rate is 1. So weight r becomes the sum of what the samples of rank r count in the mean.
    """
    rank = dist.get_rank()
    n = dist.get_world_size()
    net = nn.Linear(n, 1, bias=False, device=device)
    nn.init.zeros_(net.weight)
    ddp_net = DistributedDataParallel(net, process_group=group)
    sample = nn.functional.one_hot(torch.tensor(rank, device=device), n).float()
    optimizer = torch.optim.SGD(ddp_net.parameters(), lr=1.0)
    with ddp_net.join() if join else nullcontext():
        for _ in range(helper.batches_of(rank)):
            optimizer.zero_grad()
            loss = -ddp_net(sample).sum()
            loss.backward()
            optimizer.step()
    return net.weight.flatten().tolist()


# join() makes the weights equal at the end. The optimizer state and the learning rate schedule of a
# rank that ran out of batches early are not updated.


def uneven_inputs(device: torch.device) -> list[str]:
    """Train on uneven inputs with join() and without it. Every rank must call this.

    Return a line for each thing that was checked.
    """
    with_join = runtime.all_gather(train_on_uneven_inputs(device, None, join=True))

    # Without join() the ranks hang. gloo reports a timeout as an error; NCCL would end the process.
    group = dist.new_group(backend="gloo", timeout=HANG_TIMEOUT)
    error = ""
    try:
        train_on_uneven_inputs(torch.device("cpu"), group, join=False)
    except RuntimeError as caught:
        error = str(caught)
    errors = runtime.all_gather(error)
    return helper.check_uneven_inputs(with_join, errors)


# --- the program


def main() -> int:
    parser = helper.parser(__doc__)
    args = parser.parse_args()
    lesson.fill_defaults(args, CPU_DEFAULTS, GPU_DEFAULTS, relaunches=True)
    if args.slow_factor < 2 * SLOW:
        raise exits.UserError(
            f"--slow-factor {args.slow_factor} is near what every rank shows: at least {2 * SLOW:g}"
        )
    config = weights.load_config(args.model, 256, args.seq_len)
    lesson.relaunch(args.device)  # plain python becomes torchrun: a rank per GPU, 2 on a CPU
    runtime.seed_all(0)
    device = runtime.init_process_group(args.device)
    if args.trace:
        runtime.on_rank0(partial(files.open_folder, args.trace, "traces of stragglers.py"))
    rank = dist.get_rank()
    n = dist.get_world_size()
    if 1 < n <= args.slow_rank:
        raise exits.UserError(f"--slow-rank {args.slow_rank}: the last of {n} ranks is {n - 1}")

    net = weights.build(args.model, config, seed=0, device=device)
    batch = stdlib_text.one_batch(args.batch_size, args.seq_len, torch.device("cpu"))
    rows = run("nothing planted", net, batch, 1, device, args.steps)
    work = 1
    checked = []
    if n == 1:
        runtime.print0(
            "a single rank waits for no other: "
            "slow ranks and join() need torchrun --standalone --nproc_per_node=2 or more"
        )
    else:
        if rank == args.slow_rank:
            work = args.slow_factor
        name = f"rank {args.slow_rank}: {args.slow_factor} x the work"
        planted_rows = run(name, net, batch, work, device, args.steps)
        checked += helper.check(rows, planted_rows, args.slow_rank)
        checked += uneven_inputs(device)
        rows += planted_rows

    if args.trace:
        with profile() as profiler:  # of the CPU, and of the GPU if there is one
            train(net, batch, work, device, TRACED_STEPS)
        profiler.export_chrome_trace(str(args.trace / f"rank-{rank}.json"))

    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=checked,
        args=args,
        device=device,
        dtype="fp32",
        parameters=shapes.parameter_count(config),
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
