"""Where does a step go: the phases of each rank, the rank that slows all, and ranks that run out of batches.

Ranks meet in every all-reduce, so the slowest sets the pace, and all report the same step time. The step time tells
that the job is slow, never who is. What tells is each rank's compute time, up to where it waits: the slow rank
computes while the others wait. Uneven inputs are the same trouble in the extreme: a rank that has no batch left never
comes to the all-reduce, and the others wait for ever. DDP's join() answers for it, with zeros, until the last is done.

    laptop    python 05_ddp/stragglers.py
              python 05_ddp/stragglers.py --trace traces       a file per rank, to open in ui.perfetto.dev
    one node  torchrun --nproc_per_node=8 05_ddp/stragglers.py --slow-rank 5 --model llama-124m --seq-len 512
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

Look for: equal step times beside unequal compute times, with a rank planted that gets --slow-factor times the work. The
wait is exposed communication, which no compute hides: much on the ranks that wait, little on the slow one. train.py
logs its slowest rank by the same comparison. Before: collectives.py. Next: ../launch/, many machines.
"""

import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from _stragglers import uneven_inputs

from common import cli, exits, report, runtime
from lm import data, shapes, weights

SLOW = 2.0  # times the typical rank; on a quiet cluster 1.1 is worth a look
WARM_UP_STEPS = 3
TRACED_STEPS = 3
PHASES = ("data", "forward", "backward", "wait", "optimizer")


def mark(device: torch.device) -> float | torch.cuda.Event:
    """Now, by the clock of whoever does the work; on a GPU without stopping it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def train(
    net: nn.Module, batch: tuple[Tensor, Tensor], work: int, device: torch.device, steps: int
) -> dict:
    """Seconds of each phase of each step. Gradients are averaged beside backward, as DDP does it, without buckets.

    `work` plants slowness: the rank computes the same loss that many times over, and its gradient stays what it was.
    """
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    under_way = []

    def send(parameter: nn.Parameter) -> None:
        parameter.grad /= dist.get_world_size()
        under_way.append(dist.all_reduce(parameter.grad, async_op=True))

    hooks = [parameter.register_post_accumulate_grad_hook(send) for parameter in net.parameters()]
    seconds = {phase: [] for phase in PHASES}
    for _ in range(steps):
        marks = [mark(device)]
        inputs, targets = (tensor.to(device, copy=True) for tensor in batch)
        marks.append(mark(device))
        loss = torch.stack([net(inputs, targets) for _ in range(work)]).mean()
        marks.append(mark(device))
        loss.backward()
        marks.append(mark(device))
        for message in under_way:
            message.wait()  # here the fast ranks wait
        under_way.clear()
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


def find_slow(compute_seconds: list[list[float]]) -> tuple[list[int], list[float]]:
    """The ranks that need SLOW times as long as the typical one, and each rank's multiple of it, from the compute times
    of every rank's steps. Fastest steps are compared: other work on a machine only adds time, and not to every step."""
    fastest = [min(seconds) for seconds in compute_seconds]
    typical = statistics.median_low(fastest)  # of two ranks, the faster
    lags = [seconds / typical for seconds in fastest]
    return [rank for rank, lag in enumerate(lags) if lag > SLOW], lags


def run(
    name: str, net: nn.Module, batch: tuple, work: int, device: torch.device, steps: int
) -> list[dict]:
    """Train; a row per rank. Every rank must call it."""
    seconds = train(net, batch, work, device, WARM_UP_STEPS + steps)
    ranks = runtime.all_gather({phase: values[WARM_UP_STEPS:] for phase, values in seconds.items()})
    compute = [
        [sum(phases) for phases in zip(*map(own.get, PHASES[:3]), strict=True)] for own in ranks
    ]
    slow_ranks, lags = find_slow(compute)
    rows = []
    for rank, own in enumerate(ranks):
        step_seconds = [sum(phases) for phases in zip(*own.values(), strict=True)]
        rows.append(
            {
                "name": name,
                "rank": rank,
                "n": steps,
                "step_seconds": statistics.median(step_seconds),
                "min_step_seconds": min(step_seconds),
                "max_step_seconds": max(step_seconds),
                **{f"{phase}_seconds": statistics.median(values) for phase, values in own.items()},
                "lag_ratio": lags[rank],
                "found_slow": rank in slow_ranks,
            }
        )
    return rows


def check(healthy: list[dict], planted: list[dict], slow_rank: int) -> list[str]:
    assert not any(row["found_slow"] for row in healthy), (
        "a rank is slow that was not made so: has it other work?"
    )
    found = [row["rank"] for row in planted if row["found_slow"]]
    assert found == [slow_rank], f"ranks {found} were found, not {slow_rank}, which was made slow"
    waits = [row["wait_seconds"] for row in planted]
    own = waits.pop(slow_rank)
    assert own < min(waits), (
        f"the others do not wait for rank {slow_rank}: {own:.2g} s against {waits}"
    )
    slower = max(row["step_seconds"] for row in planted) / max(
        row["step_seconds"] for row in healthy
    )
    return [
        f"rank {slow_rank} alone was found; every rank's step became {slower:.1f} times as long",
        f"rank {slow_rank} waits {own / planted[slow_rank]['step_seconds']:.0%} of a step, less than any other rank",
    ]


COLUMNS = {
    "name": "run",
    "rank": "rank",
    "step_seconds": "step",
    **{f"{phase}_seconds": "all-reduce wait" if phase == "wait" else phase for phase in PHASES},
    "lag_ratio": "compute / typical",
}


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "--slow-rank", type=cli.natural, default=1, help="the rank that is made slow"
    )
    parser.add_argument(
        "--slow-factor", type=cli.positive_int, default=10, help="how many times the work it gets"
    )
    parser.add_argument(
        "--steps", type=cli.positive_int, default=10, help="of each of the two runs"
    )
    parser.add_argument("--model", default="nano", help="as in train.py (default: nano)")
    parser.add_argument("--seq-len", type=cli.positive_int, default=32, help="default: 32")
    parser.add_argument(
        "--batch-size", type=cli.positive_int, default=2, help="sequences per rank (default: 2)"
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FOLDER",
        help="write rank-0.json ... for ui.perfetto.dev there",
    )
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    if args.slow_factor < 2 * SLOW:
        raise exits.UserError(
            f"--slow-factor {args.slow_factor} is near what every rank shows: at least {2 * SLOW:g}"
        )
    config = shapes.load_config(args.model, 256, args.seq_len)
    runtime.relaunch(args.device)
    runtime.seed_all(0)
    device = runtime.init_process_group(args.device)
    rank, n = dist.get_rank(), dist.get_world_size()
    if 1 < n <= args.slow_rank:
        raise exits.UserError(f"--slow-rank {args.slow_rank}: the last of {n} ranks is {n - 1}")

    net = weights.build(args.model, config, seed=0, device=device)
    batch = data.one_batch(args.batch_size, args.seq_len, torch.device("cpu"))
    rows = run("nothing planted", net, batch, 1, device, args.steps)
    work, checked = 1, []
    if n > 1:
        work = args.slow_factor if rank == args.slow_rank else 1
        planted = run(
            f"rank {args.slow_rank}: {args.slow_factor} x the work",
            net,
            batch,
            work,
            device,
            args.steps,
        )
        checked = [*check(rows, planted, args.slow_rank), *uneven_inputs(device)]
        rows += planted
    else:
        runtime.print0(
            "one rank waits for no other: slow ranks and join() need torchrun --nproc_per_node=2 or more"
        )
    if args.trace:
        args.trace.mkdir(parents=True, exist_ok=True)
        with profile() as profiler:  # of CPU operators and, where there is a GPU, of its kernels
            train(net, batch, work, device, TRACED_STEPS)
        profiler.export_chrome_trace(str(args.trace / f"rank-{rank}.json"))
    count = shapes.parameter_count(config)
    report.end_lesson(
        rows,
        columns=COLUMNS,
        checked=checked,
        args=args,
        device=device,
        dtype="fp32",
        parameters=count,
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
