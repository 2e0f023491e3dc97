"""Plant a hang in a small training loop, and find the rank and the collective that are missing.

Collectives have no names on the wire: a rank's n-th call meets the n-th call of every other rank.
If one rank leaves a call out, or never comes to it, all others wait: 100 % load on a GPU, a stack
inside all_reduce. That shows where they wait, and not why. So each rank numbers its calls and keeps
the last ones in a ring, with the line of code that made them. When a call takes too long, a
watchdog thread compares the rings of all ranks:

    call            6            7            8
    rank 0   ... all_gather   all_reduce   all_reduce (loss)    waits
    rank 1   ... all_gather   all_reduce   all_gather           left out the loss: if rank == 0: ...
    rank 2   ... all_gather   all_reduce   all_reduce (loss)    waits

The first number at which they differ names the rank and the call. PyTorch keeps such a ring, too,
the flight recorder. Both are read here and must agree.

    laptop    python launch/debug_hang.py
              python launch/debug_hang.py --plant stuck-loader --rank 2
    one node  torchrun --standalone --nproc_per_node=8 launch/debug_hang.py --rank 3
    cluster   the same on every node, but in place of --standalone
              --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB

What to look at: the call that the rank did not make, and what it does instead. The exit code is 0
only if the script names the rank and the collective that were planted. Without torchrun the script
starts 3 ranks through it.

A hang of your own job, cheapest first:
1. Is it a hang? metrics.jsonl has stopped growing, and the GPUs are at 100 % but far below their
   usual power (01_devices/monitor.py). A rank that is only slow was slowest_rank in the log before.
2. Stacks of all ranks, with no restart: pip install py-spy, then py-spy dump --pid PID for each
   rank (as root, or with CAP_SYS_PTRACE in a container). Most are in a collective, and the rank
   that is not is the lead. If all are in collectives, compare the lines: two different ones mean
   that a call was left out, or that two were swapped.
3. The flight recorder. For NCCL, set TORCH_FR_DUMP_TEMP_FILE to a path that all ranks can write.
   When a call times out, each rank writes its ring there, with its rank as suffix
   (TORCH_NCCL_DUMP_ON_TIMEOUT=1 and TORCH_FR_BUFFER_SIZE=2000 in versions where that is not the
   default). torchfrtrace FOLDER -p PREFIX compares them. For gloo nothing is written.
4. Next time, fail at the call: TORCH_DISTRIBUTED_DEBUG=DETAIL compares kind and shape of every
   call over the ranks before it runs. That is too slow to leave on. Not for DDP on gloo: there DDP
   crashes when it is built (exit code -11, in torch 2.11 and 2.13). FSDP on gloo works.
5. DDP on gloo: start it with PYTHONFAULTHANDLER=1. Then kill -ABRT PID ends a rank and prints its
   stacks, without py-spy. On gloo, dist.monitored_barrier names the rank that does not come.

Timeouts, from the inside out. Each must be longer than the one before it. Otherwise the outer one
hides the cause:
- A call: COLLECTIVE_TIMEOUT_SECONDS (600 here; torch's own: NCCL 600, else 1,800). It must be
  longer than one rank ever works alone: tokenizing, compilation, a save to a slow disk. If it is
  too short, it is a false alarm. If it is too long, all GPUs wait.
- torchrun's grace after SIGTERM, TORCH_ELASTIC_SHUTDOWN_TIMEOUT (30): a step and a save. Then the
  scheduler's grace.
"""

import argparse
import json
import os
import sys
import threading
import time
import traceback
from collections import deque
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _debug_hang_report as helper

from common import cli, exits, lesson, runtime

STEPS = 6
PLANTED_STEP = 3
RING: deque[dict] = deque(maxlen=64)  # this rank's last collectives


def collective(call, *tensors) -> None:
    """Note the number and the name of a collective, and the line that calls it. Then call it."""
    this_frame_and_caller = traceback.extract_stack(limit=2)
    RING.append(
        {
            "number": RING[-1]["number"] + 1 if RING else 1,
            "collective": call.__name__,
            "caller": helper.line_of(this_frame_and_caller[0]),
            "waiting_since": time.monotonic(),
        }
    )
    call(*tensors)
    if tensors[-1].is_cuda:
        torch.cuda.synchronize()  # NCCL only queues a call, and returns before it is done
    RING[-1]["waiting_since"] = None


def train(plant: str, planted_rank: int, device: torch.device) -> None:
    """Run a training loop, reduced to its collectives: of gradients, of the loss, of times."""
    for step in range(1, STEPS + 1):
        planted = step == PLANTED_STEP and dist.get_rank() == planted_rank
        gradients = load_batch(stuck=planted and plant == "stuck-loader").to(device)
        collective(dist.all_reduce, gradients)
        loss = gradients.mean()
        if planted and plant == "early-return":
            return  # in real code: its data has ended, or an exception was swallowed
        # in real code: `if rank == 0`, or `if loss.isfinite()`
        if not (planted and plant == "skipped-collective"):
            collective(dist.all_reduce, loss)
        times = [torch.zeros(1, device=device) for _ in range(dist.get_world_size())]
        collective(dist.all_gather, times, torch.ones(1, device=device))


def load_batch(stuck: bool) -> torch.Tensor:
    """Return the next batch. A loader that is stuck waits for a worker that has died."""
    if stuck:
        threading.Event().wait()
    return torch.ones(1000)


def first_difference(rings: list[list[dict]]) -> dict | None:
    """Return the first number at which the rings differ, the call, and the ranks that miss it.

    Return None if they do not differ.
    """
    calls = []  # of each rank: (collective, caller) by number
    for ring in rings:
        calls_of_rank = {}
        for entry in ring:
            calls_of_rank[entry["number"]] = (entry["collective"], entry["caller"])
        calls.append(calls_of_rank)

    # A ring has only the last calls. Start with the first number that all rings have.
    first_number = max((min(made) for made in calls if made), default=0)
    last_number = max(max(made, default=0) for made in calls)
    for number in range(first_number, last_number + 1):
        at_this_number = [made.get(number) for made in calls]  # None: this rank has made fewer
        if len(set(at_this_number)) == 1:
            continue
        expected = expected_call(number, calls)
        missing = [rank for rank, call in enumerate(at_this_number) if call != expected]
        return {
            "missing_ranks": missing,
            "number": number,
            "collective": expected[0],
            "called_at": expected[1],
        }
    return None


def expected_call(number: int, calls: list[dict]) -> tuple[str, str]:
    """Return the call that a healthy rank makes at this number.

    It is the call that followed the same previous call one step earlier. In the first step it is
    the call that most ranks have made.
    """
    agreed = calls[0]  # before `number` all ranks made the same calls
    for earlier in sorted(agreed, reverse=True):
        if earlier < number - 1 and agreed[earlier] == agreed.get(number - 1):
            return agreed[earlier + 1]
    made_here = [made[number] for made in calls if number in made]
    return max(made_here, key=made_here.count)


def wait_for_a_hang(store: dist.Store, world_size: int, timeout: float) -> bool:
    """Return True when a call of any rank has waited too long, False when all have finished."""
    # a rank that has left its loop too early is missing, too
    while store.add("finished", 0) < world_size:
        time.sleep(0.1)
        waiting_since = RING[-1]["waiting_since"] if RING else None
        if waiting_since and time.monotonic() - waiting_since > timeout:
            store.set("hang", "")
        if store.check(["hang"]):
            return True
    return False


def watch(store: dist.Store, device: torch.device, args: argparse.Namespace) -> None:
    """Wait for a hang, in a thread of each rank. Then rank 0 reports, and all ranks end."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    if not wait_for_a_hang(store, world_size, args.timeout):
        return
    exit_code = 1  # unless rank 0 says otherwise
    try:
        # get waits for the other ranks, and fails if one is dead or stopped
        store.set_timeout(timedelta(seconds=30))
        own_report = {"ring": list(RING), **helper.snapshot(device)}
        store.set(f"rank {rank}", json.dumps(own_report))
        if rank == 0:
            reports = [json.loads(store.get(f"rank {other}")) for other in range(world_size)]
            difference = first_difference([report["ring"] for report in reports])
            code = helper.report_hang(args, device, reports, difference)
            store.set("exit code", str(code))
        exit_code = int(store.get("exit code"))
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(exit_code)  # the main thread is inside a collective that will not return


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument(
        "--plant", choices=helper.PLANTS, default="skipped-collective", help="the mistake to make"
    )
    parser.add_argument("--rank", type=cli.natural, default=1, help="the rank that makes it")
    parser.add_argument(
        "--timeout", type=cli.positive, default=3.0, help="seconds a call may take, here few"
    )
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    world_size = lesson.world_size_after_relaunch(args.device, on_cpu=3)
    if args.rank >= world_size or world_size == 1:
        raise exits.UserError(
            f"--rank {args.rank} of {world_size} ranks: a hang needs two, and --rank is one of them"
        )
    lesson.relaunch(args.device, on_cpu=3)

    device = runtime.init_process_group(args.device)
    dist.barrier()  # sets up the connections, which may take longer than any call after it
    store = next(dist.rendezvous("env://"))[0]  # a connection of the watchdog's own
    watchdog = threading.Thread(target=watch, args=(store, device, args))
    watchdog.start()
    try:
        train(args.plant, args.rank, device)
    except RuntimeError:
        if not store.check(["hang"]):
            raise
        watchdog.join()  # it ends the process; others have left before
    store.add("finished", 1)
    watchdog.join()

    runtime.print0(
        f"{STEPS} steps, {len(RING)} collectives: no rank waited {args.timeout:g} s for another"
    )
    if runtime.is_rank0():
        helper.write(args, device, {"missing_ranks": []})
    runtime.shutdown()
    return 0 if args.plant == "none" else 1


if __name__ == "__main__":
    exits.run(main)
