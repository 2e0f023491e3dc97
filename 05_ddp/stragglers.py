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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _stragglers import uneven_inputs, waiting_shares

from common import cli, exits, lesson, runtime

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


def run(name: str, device: torch.device, steps: int, times_the_work: int) -> list[dict]:
    """Train; a row per rank. Every rank must call it."""
    ranks = runtime.gather(train(device, steps, times_the_work))
    slow_ranks, lags = find_slow([compute_seconds for compute_seconds, _ in ranks])
    rows = []
    for rank, (compute_seconds, step_seconds) in enumerate(ranks):
        row = {"name": name, "rank": rank, "n": steps, "lag_ratio": lags[rank], "found_slow": rank in slow_ranks}
        for key, values in (("step_seconds", step_seconds), ("compute_seconds", compute_seconds)):
            row |= {key: statistics.median(values), f"min_{key}": min(values), f"max_{key}": max(values)}
        rows.append(row)
    return rows


def check(rows: list[dict], slow_rank: int) -> list[str]:
    healthy, planted = ([row for row in rows if (row["name"] == "nothing planted") == yes] for yes in (True, False))
    assert not any(row["found_slow"] for row in healthy), "a rank is slow that was not made so: has it other work?"
    found = [row["rank"] for row in planted if row["found_slow"]]
    assert found == [slow_rank], f"ranks {found} were found, not {slow_rank}, which was made slow"
    cost = max(row["step_seconds"] for row in planted) / max(row["step_seconds"] for row in healthy)
    return [f"rank {slow_rank} alone was found; every rank's step became {cost:.1f} times as long"]


COLUMNS = {
    "name": "run",
    "rank": "rank",
    "step_seconds": "step",
    "compute_seconds": "compute time",
    "lag_ratio": "fastest step / typical rank's",
    "found_slow": "found slow",
}


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--slow-rank", type=cli.natural, default=1, help="the rank that is made slow")
    parser.add_argument("--slow-factor", type=cli.positive_int, default=10, help="how many times the work it gets")
    parser.add_argument("--steps", type=cli.positive_int, default=20, help="of each of the two runs")
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    if args.slow_factor < 2 * SLOW:
        raise exits.UserError(f"--slow-factor {args.slow_factor} is near what every rank shows: at least {2 * SLOW:g}")
    lesson.relaunch(args.device)
    runtime.seed_all(0)
    device = runtime.init_process_group(args.device)
    n = dist.get_world_size()
    if 1 < n <= args.slow_rank:
        raise exits.UserError(f"--slow-rank {args.slow_rank}: the last of {n} ranks is {n - 1}")

    rows = run("nothing planted", device, args.steps, 1)
    uneven, checked = None, []
    if n > 1:
        times_the_work = args.slow_factor if dist.get_rank() == args.slow_rank else 1
        name = f"rank {args.slow_rank} does {args.slow_factor} times the work"
        rows += run(name, device, args.steps, times_the_work)
        uneven, uneven_checked = uneven_inputs(device)
        checked = [*check(rows, args.slow_rank), *uneven_checked]
    else:
        runtime.say("one rank waits for nobody: slow ranks and join() need torchrun --nproc_per_node=2 or more")
    waiting = waiting_shares()
    runtime.say(
        "64 sequences of uneven length on 8 ranks, computed: ranks wait "
        f"{waiting['as they come']:.1%} of the time as they come, {waiting['balanced']:.1%} balanced by tokens"
    )
    lesson.end(
        rows,
        columns=COLUMNS,
        checked=checked,
        args=args,
        device=device,
        dtype="fp32",
        uneven=uneven,
        waiting_share=waiting,
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
