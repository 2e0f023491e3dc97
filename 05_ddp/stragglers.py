"""Where does a step go: the phases of each rank, the rank that slows all, and what the profiler sees of three steps.

Ranks meet in every all-reduce, so the slowest sets the pace, and all report the same step time. The step time tells
that the job is slow, never who is. What tells is each rank's compute time, up to where it waits: the slow rank
computes while the others wait. Uneven inputs are the same trouble in the extreme: a rank that has no batch left never
comes to the all-reduce, and the others wait for ever. join() answers for it, with zeros, until the last rank is done.

    laptop    python 05_ddp/stragglers.py
              python 05_ddp/stragglers.py --trace traces       a file per rank, to open in ui.perfetto.dev
    one node  torchrun --nproc_per_node=8 05_ddp/stragglers.py --slow-rank 5 --model llama-124m --seq-len 512
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

Look for: equal step times beside unequal compute times, with a rank planted that gets --slow-factor times the work;
exposed communication, which no compute hides: much on the ranks that wait, little on the slow one. train.py logs its
slowest rank by the same comparison. Before: collectives.py. Next: ../launch/, many machines.
"""

import statistics
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _stragglers import length_of, uneven_inputs, union, waiting_shares, without

from common import cli, exits, lesson, model, report, runtime, shapes
from common.table import table

SLOW = 2.0  # times the typical rank; on a quiet cluster 1.1 is worth a look
WARM_UP_STEPS = 3
TRACED_STEPS = 3
PHASES = ("data", "forward", "backward", "wait", "optimizer")
# By what the name of a CPU operator or a CUDA kernel contains; the first class that fits counts.
CLASSES = {
    "communication": ("nccl", "gloo:", "c10d::"),
    "attention": ("scaled_dot_product", "flash", "fmha", "sdpa", "attention"),
    "matmul": ("gemm", "nvjet", "cutlass", "xmma", "splitk", "cublas", "matmul", "aten::mm", "addmm", "bmm"),
    "elementwise": ("",),  # all other compute: norms, activations, sums, copies, the optimizer
}
TOLERANCE = 0.02  # of a step: how far the sum of its shares may be off


def mark(device: torch.device) -> float | torch.cuda.Event:
    """Now, by the clock of whoever does the work; on a GPU without stopping it."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: float | torch.cuda.Event, end: float | torch.cuda.Event) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


def train(net: nn.Module, sequences: list, work: int, device: torch.device, steps: int, after_step=None) -> dict:
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
        inputs, targets = (torch.stack(tensors).to(device) for tensors in zip(*sequences, strict=True))
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
        if device.type == "cuda":
            marks[-1].synchronize()
        if after_step:
            after_step()
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


def run(name: str, net: nn.Module, sequences: list, work: int, device: torch.device, steps: int) -> list[dict]:
    """Train; a row per rank. Every rank must call it."""
    seconds = train(net, sequences, work, device, WARM_UP_STEPS + steps)
    ranks = runtime.gather({phase: values[WARM_UP_STEPS:] for phase, values in seconds.items()})
    compute = [[sum(phases) for phases in zip(*map(own.get, PHASES[:3]), strict=True)] for own in ranks]
    slow_ranks, lags = find_slow(compute)
    rows = []
    for rank, own in enumerate(ranks):
        row = {"name": name, "rank": rank, "n": steps, "lag_ratio": lags[rank], "found_slow": rank in slow_ranks}
        row |= {f"{phase}_seconds": statistics.median(values) for phase, values in own.items()}
        whole = [sum(phases) for phases in zip(*own.values(), strict=True)]
        for key, values in (("step_seconds", whole), ("compute_seconds", compute[rank])):
            row |= {key: statistics.median(values), f"min_{key}": min(values), f"max_{key}": max(values)}
        rows.append(row)
    return rows


def trace(net: nn.Module, sequences: list, work: int, device: torch.device, folder: Path | None) -> list[dict]:
    """Profile TRACED_STEPS steps; a row of shares of a step per rank. Every rank must call it."""
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    plan = schedule(wait=0, warmup=1, active=TRACED_STEPS, repeat=1)
    with profile(activities=activities, schedule=plan) as profiler:
        train(net, sequences, work, device, 1 + TRACED_STEPS, profiler.step)
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"rank-{dist.get_rank()}.json"))
    return runtime.gather({"rank": dist.get_rank(), **shares_of_step(profiler.events(), device.type)})


def shares_of_step(events: list, device_type: str) -> dict[str, float]:
    """What the device did in the traced steps. On a GPU: its kernels. On a CPU: operators, each without those that it
    calls; the rest of the time Python runs, or the rank waits."""
    steps = [event.time_range for event in events if event.name.startswith("ProfilerStep")]
    first, last = min(step.start for step in steps), max(step.end for step in steps)
    compute, communication = [], []
    seconds = dict.fromkeys(["matmul", "attention", "elementwise"], 0.0)
    for event in events:
        start, end = max(event.time_range.start, first), min(event.time_range.end, last)
        a_label = device_type == "cuda" and event.is_user_annotation  # around kernels, which count themselves
        if event.device_type.name != device_type.upper() or start >= end or a_label:
            continue
        kind = next(kind for kind, parts in CLASSES.items() if any(part in event.name.lower() for part in parts))
        if kind == "communication":
            communication.append((start, end))
        elif device_type == "cuda" or event.name.startswith("aten::"):  # what calls those, as autograd, is no compute
            compute.append((start, end))
            seconds[kind] += event.self_cpu_time_total if device_type == "cpu" else end - start
    step = last - first
    seconds["communication"] = length_of(union(communication))
    seconds["exposed"] = length_of(without(union(communication), union(compute)))
    seconds["idle"] = step - length_of(union(compute + communication))
    return {"traced_step_seconds": step / TRACED_STEPS / 1e6} | {f"{k}_share": v / step for k, v in seconds.items()}


def check(rows: list[dict], traced: list[dict], slow_rank: int) -> list[str]:
    for row in traced:
        assert row["matmul_share"] > 0, f"rank {row['rank']}: the profiler saw no kernels: may this user read counters?"
        total = sum(row[f"{kind}_share"] for kind in ("matmul", "attention", "elementwise", "exposed", "idle"))
        assert abs(total - 1) <= TOLERANCE, f"rank {row['rank']}: the shares of a step add up to {total:.1%}"
    checked = ["traced: on every rank matmul, attention, elementwise, exposed and idle add up to the step"]
    if len(traced) == 1:
        return checked
    healthy, planted = ([row for row in rows if (row["name"] == "nothing planted") == yes] for yes in (True, False))
    assert not any(row["found_slow"] for row in healthy), "a rank is slow that was not made so: has it other work?"
    found = [row["rank"] for row in planted if row["found_slow"]]
    assert found == [slow_rank], f"ranks {found} were found, not {slow_rank}, which was made slow"
    cost = max(row["step_seconds"] for row in planted) / max(row["step_seconds"] for row in healthy)
    exposed = [row["exposed_share"] for row in traced]
    own = exposed.pop(slow_rank)
    assert own < min(exposed), f"the others do not wait for rank {slow_rank}: exposed {own:.1%}, {exposed}"
    return [
        f"rank {slow_rank} alone was found; every rank's step became {cost:.1f} times as long",
        f"traced: rank {slow_rank} waits for {own:.0%} of a step, the others for {min(exposed):.0%} or more",
        *checked,
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
    parser.add_argument("--slow-rank", type=cli.natural, default=1, help="the rank that is made slow")
    parser.add_argument("--slow-factor", type=cli.positive_int, default=10, help="how many times the work it gets")
    parser.add_argument("--steps", type=cli.positive_int, default=10, help="of each of the two runs")
    parser.add_argument("--model", default="nano", help="as in train.py (default: nano)")
    parser.add_argument("--seq-len", type=cli.positive_int, default=32, help="default: 32")
    parser.add_argument("--batch-size", type=cli.positive_int, default=2, help="sequences per rank (default: 2)")
    parser.add_argument("--trace", type=Path, metavar="FOLDER", help="write rank-0.json ... for ui.perfetto.dev there")
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    if args.slow_factor < 2 * SLOW:
        raise exits.UserError(f"--slow-factor {args.slow_factor} is near what every rank shows: at least {2 * SLOW:g}")
    config = shapes.load_config(args.model, 256, args.seq_len)
    lesson.relaunch(args.device)
    runtime.seed_all(0)
    device = runtime.init_process_group(args.device)
    n = dist.get_world_size()
    if 1 < n <= args.slow_rank:
        raise exits.UserError(f"--slow-rank {args.slow_rank}: the last of {n} ranks is {n - 1}")

    net = model.build(args.model, config, seed=0, device=device)
    sequences = [*zip(*lesson.one_batch(args.batch_size, args.seq_len, torch.device("cpu")), strict=True)]
    rows = run("nothing planted", net, sequences, 1, device, args.steps)
    uneven, uneven_checked = None, []
    work = args.slow_factor if n > 1 and dist.get_rank() == args.slow_rank else 1
    if n > 1:
        rows += run(f"rank {args.slow_rank}: {args.slow_factor} x the work", net, sequences, work, device, args.steps)
        uneven, uneven_checked = uneven_inputs(device)
    else:
        runtime.say("one rank waits for no other: slow ranks and join() need torchrun --nproc_per_node=2 or more")
    traced = trace(net, sequences, work, device, args.trace)
    heads = [key.removesuffix("_share").removesuffix("_seconds").replace("_", " ") for key in traced[0]]
    cells = [[report.for_people(key, value) for key, value in row.items()] for row in traced]
    title = f"Shares of {TRACED_STEPS} traced steps of the last run; exposed: communication beside no compute"
    runtime.say(f"\n{title}\n\n{table([heads, *cells])}")
    lesson.end(
        rows,
        columns=COLUMNS,
        checked=[*check(rows, traced, args.slow_rank), *uneven_checked],
        args=args,
        device=device,
        dtype="fp32",
        parameters=shapes.parameter_count(config),
        traced=traced,
        uneven=uneven,
        waiting_share=waiting_shares(),
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
