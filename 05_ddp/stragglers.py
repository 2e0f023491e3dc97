"""One slow rank slows all: how it shows, how it is found; and ranks that run out of batches before the others.

Ranks meet in every all-reduce, so the slowest sets the pace, and all report the same step time: the step time tells
that the job is slow, never who. What tells is each rank's own time, up to the first collective: the slow rank works
while the others wait. Uneven inputs are the same trouble in the extreme: a rank that has no batch left never comes
to the all-reduce, and the others wait for ever. join() answers for it, with zeros, until the last rank is done.

    laptop    python 05_ddp/stragglers.py
    one node  torchrun --nproc_per_node=8 05_ddp/stragglers.py --slow-rank 5
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

Look for: equal step times beside unequal own times, with a rank planted that does --slow-factor times the work; the
rank that is found; what a sample weighs under join(). train.py logs its slowest rank by the same comparison.
Before: collectives.py. Next: ../06_fsdp_zero/.
"""

import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _stragglers_uneven import show_balance, show_uneven

from common import cli, exits, hardware, report, runtime

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


def train(device: torch.device, steps: int, repeat: int) -> tuple[list[float], list[float]]:
    """Seconds of each step that this rank worked before it met the others, and of the whole step. `repeat` plants
    slowness: the rank computes its gradients that many times over."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
    inputs, own, whole = torch.randn(128, 256, device=device), [], []
    for _ in range(WARM_UP_STEPS + steps):
        start = mark(device)
        for _ in range(repeat):
            optimizer.zero_grad()
            net(inputs).square().mean().backward()
        worked = mark(device)
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)  # here the fast ranks wait
            parameter.grad /= dist.get_world_size()
        optimizer.step()
        end = mark(device)
        if device.type == "cuda":
            end.synchronize()
        own.append(seconds_between(start, worked))
        whole.append(seconds_between(start, end))
    return own[WARM_UP_STEPS:], whole[WARM_UP_STEPS:]


def find_slow(ranks: list[list[float]]) -> tuple[list[int], list[float]]:
    """The ranks that need SLOW times as long as the typical one, and each rank's multiple of it, from the own times
    of every rank's steps. Fastest steps are compared: other work on a machine only adds time, and not to every step."""
    fastest = [min(own) for own in ranks]
    lags = [seconds / statistics.median_low(fastest) for seconds in fastest]  # of two ranks against the faster
    return [rank for rank, lag in enumerate(lags) if lag > SLOW], lags


def look(title: str, device: torch.device, steps: int, repeat: int) -> dict:
    """Train, show every rank's times, and say which ranks are slow."""
    ranks = runtime.gather(train(device, steps, repeat))
    found, lags = find_slow([own for own, _ in ranks])
    rows = [["rank", "step ms", "lowest", "highest", "own work ms", "lowest", "highest", "of the typical"]]
    for rank, (own, whole) in enumerate(ranks):
        cells = [f"{1e3 * f(times):.1f}" for times in (whole, own) for f in (statistics.median, min, max)]
        rows.append([f"{rank}", *cells, f"{lags[rank]:.1f}"])
    runtime.say(f"\n{title}: medians of {steps} steps\n{report.table(rows)}\nslow ranks found: {found or 'none'}")
    own, whole = ([statistics.median(times[i]) for times in ranks] for i in (0, 1))
    return {"own_seconds_median": own, "step_seconds_median": whole, "lags": lags, "slow_ranks": found}


def show_slow_rank(device: torch.device, slow_rank: int, slow_factor: int, steps: int) -> dict:
    """Train with no rank slow and with one, and find it. AssertionError if another is found, or none."""
    healthy = look("Nothing planted", device, steps, 1)
    repeat = slow_factor if dist.get_rank() == slow_rank else 1
    planted = look(f"Rank {slow_rank} does {slow_factor} times the work", device, steps, repeat)
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
    if runtime.is_rank0():
        report.write_json({**summary, "seconds": time.perf_counter() - began}, args.json)
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
