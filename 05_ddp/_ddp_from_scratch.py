"""What ddp_from_scratch.py measures with: a clock, a picture of a step, and two hosts with a slow link between them."""

import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import model, runtime
from common.exits import UserError

warnings.filterwarnings("ignore", "`broadcast_buffers`", FutureWarning)  # torch 2.11 does not have its successor
WARMUP_STEPS = 2  # not counted: DDP rebuilds its buckets after the first step


@contextmanager
def watch(net: nn.Module) -> Iterator[dict]:
    """When forward starts and ends, the last gradient is computed, and each all-reduce as [bytes, start, end]. On a GPU
    these are the times at which work was queued: only their order means something. DDP's are not seen."""
    timeline: dict = {"all_reduces": []}
    real_all_reduce = dist.all_reduce

    def note(moment: str) -> Callable[..., None]:
        return lambda *_: timeline.update({moment: time.perf_counter()})

    def all_reduce(tensor: Tensor, *args, **flags):
        seen = [tensor.nbytes, time.perf_counter(), None]
        timeline["all_reduces"].append(seen)
        work = real_all_reduce(tensor, *args, **flags)
        if work is None:
            seen[2] = time.perf_counter()
        elif not tensor.is_cuda:
            work.get_future().then(lambda _: seen.__setitem__(2, time.perf_counter()))
        return work

    handles = [net.register_forward_pre_hook(note("start")), net.register_forward_hook(note("forward_end"))]
    # the last gradient to come overwrites the moments of the others
    handles += [parameter.register_hook(note("last_gradient")) for parameter in net.parameters()]
    dist.all_reduce = all_reduce
    try:
        yield timeline
    finally:
        dist.all_reduce = real_all_reduce
        for handle in handles:
            handle.remove()


def train(way, inputs: Tensor, targets: Tensor) -> None:
    """One training step, timed from the common start of all ranks until the slowest is done."""
    runtime.wait_for(inputs.device)
    dist.barrier()
    with watch(way.net) as step:
        start = time.perf_counter()
        loss = way.gradients(inputs, targets)
        runtime.wait_for(inputs.device)
        step["seconds"] = max(runtime.gather(time.perf_counter() - start))
    way.optimizer.step()
    way.optimizer.zero_grad()
    step["loss"] = statistics.fmean(runtime.gather(loss.item()))  # the ranks' parts are equal
    step["bucket_bytes"] = [size for size, _, _ in step["all_reduces"]]
    if way.called is not way.net:  # DDP makes buckets of its own, and makes them anew after its first step
        sizes = way.called._get_ddp_logging_data().get("rebuilt_bucket_sizes", "")
        step["bucket_bytes"] = [int(size) for size in sizes.split(",") if size]
    way.steps.append(step)


@torch.no_grad()
def summarize(ways: list, one_process: nn.Module, start: nn.Module) -> list[dict]:
    """A row per way, from its recorded steps. The first sends nothing: the control. All ranks must call it."""
    rows, letters = [], {}
    for way in ways:
        ours, whole, before = (nn.utils.parameters_to_vector(net.parameters()) for net in (way.net, one_process, start))
        digests, last = runtime.gather(model.digest(way.net)), way.steps[-1]
        in_backward = sum(sent_from < last["last_gradient"] for _, sent_from, _ in last["all_reduces"])
        row = {
            "name": way.name,
            "losses": [step["loss"] for step in way.steps],
            "weights_sha256": digests,
            "weights": letters.setdefault(digests[0], "ABCDEFGH"[len(letters)]),
            "relative_error": ((ours - whole).norm() / (whole - before).norm()).item(),
            "bucket_bytes": last["bucket_bytes"],
            "all_reduces": len(last["bucket_bytes"]),
            "started_in_backward": in_backward if way.called is way.net else None,  # DDP's start in C++, unseen
            "step_seconds": statistics.median(step["seconds"] for step in way.steps[WARMUP_STEPS:]),
        }
        if last["bucket_bytes"]:
            pairs = zip(way.steps, ways[0].steps, strict=True)
            exposed = [own["seconds"] - control["seconds"] for own, control in pairs][WARMUP_STEPS:]
            row["exposed_seconds"] = statistics.median(exposed)
            row["min_exposed_seconds"], row["max_exposed_seconds"] = min(exposed), max(exposed)
        rows.append(row)
    return rows


def plot(ways: list, args) -> None:
    """The fastest step of each way as this rank lived through it: above what it computed, below what was sent."""
    from matplotlib.figure import Figure

    axes = Figure(figsize=(9, 4.2)).subplots()
    for place, way in enumerate(ways):
        step = min(way.steps[WARMUP_STEPS:], key=lambda step: step["seconds"])
        forward, computed = (1e3 * (step[moment] - step["start"]) for moment in ("forward_end", "last_gradient"))
        end = 1e3 * step["seconds"]
        axes.barh(-place, forward, 0.3, color="tab:blue", alpha=0.5)
        axes.barh(-place, computed - forward, 0.3, forward, color="tab:blue")
        axes.barh(-place, end - computed, 0.3, computed, color="lightgrey")
        axes.text(end, -place, f" {end:.0f} ms, {end - computed:.0f} of them waiting", va="center")
        for _, sent_from, sent_until in step["all_reduces"]:
            left, width = 1e3 * (sent_from - step["start"]), 1e3 * (sent_until - sent_from)
            axes.barh(-place - 0.32, width, 0.22, left, color="tab:orange", edgecolor="white")
    kinds = ("forward", "backward", "only waiting", "all-reduce")
    axes.legend(axes.containers[:4], kinds, ncols=4, loc="lower center", bbox_to_anchor=(0.5, -0.32))
    axes.set_yticks([-place - 0.1 for place in range(len(ways))], [way.name for way in ways])
    title = f"{args.model}, link of {args.link_mbit or 'no limit in'} Mbit/s, the fastest of {args.steps} steps each"
    axes.set(xlabel="ms since the step began, on rank 0", title=title, xlim=(0, 1.45 * axes.get_xlim()[1]))
    axes.figure.savefig(args.plot, format="png", dpi=100, bbox_inches="tight")


def run_on_two_hosts(mbit_per_second: int) -> int:
    """Start this script again, one rank on each of two hosts, and return the first exit code that is not 0. A host is a
    network namespace, the cable a veth pair; tc's token bucket (tbf) lets so many bits a second through it."""
    if os.geteuid() != 0 or not shutil.which("tc"):
        raise UserError("--link-mbit makes network namespaces: it needs Linux, root, ip and tc (Debian's iproute2)")
    hosts = [f"ddp{rank}-{os.getpid()}" for rank in range(2)]
    commands = [f"ip netns add {host}" for host in hosts]
    commands.append(f"ip link add eth0 netns {hosts[0]} type veth peer name eth0 netns {hosts[1]}")
    queue = f"tbf rate {mbit_per_second}mbit burst 256kb limit 64mb"  # so long that no packet is dropped
    for rank, host in enumerate(hosts):
        commands.append(f"ip -n {host} address add 10.78.0.{rank + 1}/24 dev eth0")
        commands.append(f"ip -n {host} link set lo up")
        commands.append(f"ip -n {host} link set eth0 up")
        commands.append(f"tc -n {host} qdisc add dev eth0 root {queue}")
    meet = {"WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "10.78.0.1"}
    meet |= {"MASTER_PORT": "29500", "GLOO_SOCKET_IFNAME": "eth0", "OMP_NUM_THREADS": "1"}
    meet |= {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # these hosts have no names, of which torch warns
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # through what stands under finally
    ranks = []
    try:
        for command in commands:
            subprocess.run(command.split(), check=True, timeout=20)
        for rank, host in enumerate(hosts):
            command = ["ip", "netns", "exec", host, sys.executable, *sys.argv]
            ranks.append(subprocess.Popen(command, env={**os.environ, **meet, "RANK": str(rank)}))
        while None in (codes := [rank.poll() for rank in ranks]) and not any(codes):  # one that fails ends both
            time.sleep(0.2)
        return next((code for code in codes if code), 0)
    finally:
        for rank in ranks:
            rank.terminate()
            rank.wait(timeout=60)
        for host in hosts:
            subprocess.run(["ip", "netns", "delete", host], capture_output=True, timeout=20)
