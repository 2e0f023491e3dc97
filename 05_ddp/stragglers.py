"""One slow rank slows all: how it shows, how it is found; and ranks that run out of batches before the others.

Ranks meet in every all-reduce, so the slowest sets the pace, and all report the same step time. The step time tells
that the job is slow, never who is. What tells is each rank's compute time, up to the first collective: the slow rank
computes while the others wait. Uneven inputs are the same trouble in the extreme: a rank that has no batch left never
comes to the all-reduce, and the others wait for ever. join() answers for it, with zeros, until the last rank is done.

    laptop    python 05_ddp/stragglers.py
    one node  torchrun --nproc_per_node=8 05_ddp/stragglers.py --slow-rank 5
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

Look for: equal step times beside unequal compute times, with a rank planted that does --slow-factor times the work;
the rank that is found; how much a sample counts under join(). train.py logs its slowest rank by the same comparison.
Before: collectives.py. Next: ../launch/, many machines.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _stragglers_uneven import show_balance, show_uneven

from old import cli, exits, hardware, report, runtime

SLOW = 2.0  # times the typical rank; on a quiet cluster 1.1 is worth a look
WARM_UP_STEPS = 3


def mark(device: torch.device) -> float | torch.cuda.Event:
    """Now, by the clock of whoever does the work; on a GPU without stopping it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def train(device: torch.device, steps: int, times_the_work: int) -> tuple[list[float], list[float]]:
    """The compute time of each step, before this rank met the others, and the time of the whole step.

    `times_the_work` plants slowness: the rank computes its gradients that many times over.
    """
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    inputs = torch.randn(128, 256, device=device)
    compute_seconds, step_seconds = [], []
    for _ in range(WARM_UP_STEPS + steps):
        start = mark(device)
        for _ in range(times_the_work):
            optimizer.zero_grad()
            net(inputs).square().mean().backward()
        computed = mark(device)
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)  # here the fast ranks wait
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        end = mark(device)
        if device.type == "cuda":
            end.synchronize()
        compute_seconds.append(seconds_between(start, computed))
        step_seconds.append(seconds_between(start, end))
    return compute_seconds[WARM_UP_STEPS:], step_seconds[WARM_UP_STEPS:]


def find_slow(compute_seconds: list[list[float]]) -> tuple[list[int], list[float]]:
    """The ranks that need SLOW times as long as the typical one, and each rank's multiple of it, from the compute times
    of every rank's steps. Fastest steps are compared: other work on a machine only adds time, and not to every step."""
    fastest = [min(seconds) for seconds in compute_seconds]
    typical = statistics.median_low(fastest)  # of two ranks, the faster
    lags = [seconds / typical for seconds in fastest]
    slow_ranks = [rank for rank, lag in enumerate(lags) if lag > SLOW]
    return slow_ranks, lags


def look(title: str, device: torch.device, steps: int, times_the_work: int) -> dict:
    """Train, show every rank's times, and say which ranks are slow."""
    ranks = runtime.gather(train(device, steps, times_the_work))
    slow_ranks, lags = find_slow([compute_seconds for compute_seconds, _ in ranks])
    rows = [["rank", "step, ms", "lowest", "highest", "compute time, ms", "lowest", "highest", "/ typical rank"]]
    for rank, (compute_seconds, step_seconds) in enumerate(ranks):
        cells = []
        for seconds in (step_seconds, compute_seconds):
            cells += [f"{1e3 * value:.1f}" for value in (statistics.median(seconds), min(seconds), max(seconds))]
        rows.append([f"{rank}", *cells, f"{lags[rank]:.1f}"])
    runtime.say(f"\n{title}: medians of {steps} steps\n{report.table(rows)}\nslow ranks found: {slow_ranks or 'none'}")
    return {
        "own_seconds_median": [statistics.median(compute_seconds) for compute_seconds, _ in ranks],
        "step_seconds_median": [statistics.median(step_seconds) for _, step_seconds in ranks],
        "lags": lags,
        "slow_ranks": slow_ranks,
    }


def show_slow_rank(device: torch.device, slow_rank: int, slow_factor: int, steps: int) -> dict:
    """Train with no rank slow and with one, and find it. AssertionError if another is found, or none."""
    healthy = look("Nothing planted", device, steps, 1)
    times_the_work = slow_factor if dist.get_rank() == slow_rank else 1
    planted = look(f"Rank {slow_rank} does {slow_factor} times the work", device, steps, times_the_work)
    assert healthy["slow_ranks"] == [], "a rank is slow that was not made so: has this machine other work?"
    assert planted["slow_ranks"] == [slow_rank], "not the rank that was made slow"
    cost = max(planted["step_seconds_median"]) / max(healthy["step_seconds_median"])
    runtime.say(f"checked: that rank alone was found; every rank's step became {cost:.1f} times as long")
    return {
        "slow_rank": slow_rank,
        "slow_factor": slow_factor,
        "healthy": healthy,
        "planted": planted,
        "step_ratio": cost,
    }


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--slow-rank", type=cli.natural, default=1, help="the rank that is made slow")
    add("--slow-factor", type=cli.positive_int, default=10, help="how many times the work it gets")
    add("--steps", type=cli.positive_int, default=20, help="of each of the two runs")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    if args.slow_factor < 2 * SLOW:
        raise exits.UserError(f"--slow-factor {args.slow_factor} is near what every rank shows: at least {2 * SLOW:g}")
    n = runtime.processes(args.device)
    if 1 < n <= args.slow_rank:
        raise exits.UserError(f"--slow-rank {args.slow_rank}: the last of {n} ranks is {n - 1}")
    runtime.relaunch(args.device)
    began = time.perf_counter()
    device = runtime.init_process_group(args.device)

    summary = {"device": hardware.device_name(device), "world_size": n, "dtype": "fp32", "steps": args.steps}
    if n > 1:
        summary |= show_slow_rank(device, args.slow_rank, args.slow_factor, args.steps)
        summary |= show_uneven(device)
    else:
        runtime.say("one rank waits for nobody: slow ranks and join() need torchrun --nproc_per_node=2 or more")
    summary |= show_balance()
    summary["peak_memory_bytes"] = max(runtime.gather(report.peak_memory_bytes(device)))
    summary["seconds"] = time.perf_counter() - began
    if runtime.is_rank0():
        report.write_json(summary, args.json)
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
