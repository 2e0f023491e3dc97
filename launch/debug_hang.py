"""Plant a hang in a small training loop, and find the rank and the collective that are missing.

Collectives have no names on the wire. A rank's n-th call meets the n-th call of every other rank, so a rank that
leaves one out, or never comes to it, makes all the others wait. What they then show (100 % load on a GPU, a stack
inside all_reduce) is where they wait, not why. So every rank numbers its calls and keeps the last ones in a ring,
with the line that made them. A watchdog thread notices that a call takes too long; the ranks' rings are laid side
by side, and the first number at which they differ names the culprit. PyTorch keeps such a ring too, the flight
recorder, which NCCL's watchdog writes to a file; here both are read and must agree.

    laptop    python launch/debug_hang.py
              python launch/debug_hang.py --plant stuck-loader --rank 2
    one node  torchrun --nproc_per_node=8 launch/debug_hang.py --rank 3
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

Look for: the call that the missing rank did not make, and what it does instead. The exit code is 0 only if the
rank and the collective named are those that were planted. Without torchrun the script starts 3 ranks through it.
Read launch/README.md for the same with a job of your own: py-spy, the flight recorder, how to size timeouts.
"""

import json
import os
import pickle
import queue
import sys
import threading
import time
import traceback
from argparse import Namespace
from collections import Counter, deque
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from common import cli, exits, hardware, report, runtime

STEPS, PLANTED_STEP = 6, 3
CALL = "collective(dist.all_reduce, {})"  # what is planted, and the call that is then missing:
LOSS, GRADIENTS = CALL.format("loss"), CALL.format("gradients")
PLANTS = {"skipped-collective": LOSS, "early-return": LOSS, "stuck-loader": GRADIENTS, "none": None}
RING: deque[dict] = deque(maxlen=64)  # this rank's last collectives
caught = threading.Event()  # the ranks agree that something does


def line_of(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"


def collective(call, *tensors) -> None:
    """Number a collective and note the line that called it; it is done when this returns."""
    number, caller = RING[-1]["number"] + 1 if RING else 1, line_of(traceback.extract_stack(limit=2)[0])
    RING.append({"number": number, "collective": call.__name__, "caller": caller, "waiting_since": time.monotonic()})
    call(*tensors)
    if tensors[-1].is_cuda:
        torch.cuda.synchronize()  # NCCL only queues a call: without this, returned would not mean done
    RING[-1]["waiting_since"] = None


def load_batch(stuck: bool) -> torch.Tensor:
    """The data loader; a stuck one waits for a worker that has died."""
    batches: queue.Queue = queue.Queue()
    if not stuck:
        batches.put(torch.ones(1000))
    return batches.get()


def train(plant: str, planted_rank: int, device: torch.device) -> None:
    """A training loop, as far as its ranks talk: gradients, loss, times."""
    for step in range(1, STEPS + 1):
        planted = step == PLANTED_STEP and dist.get_rank() == planted_rank
        gradients = load_batch(stuck=planted and plant == "stuck-loader").to(device)
        collective(dist.all_reduce, gradients)
        loss = gradients.mean()
        if planted and plant == "early-return":  # in the wild: its data is at an end, an exception is swallowed
            return
        if not (planted and plant == "skipped-collective"):  # in the wild: if rank == 0, if loss.isfinite()
            collective(dist.all_reduce, loss)
        times = [torch.zeros(1, device=device) for _ in range(dist.get_world_size())]
        collective(dist.all_gather, times, torch.ones(1, device=device))


def snapshot(device: torch.device) -> dict:
    """What this rank has called, by our ring and by PyTorch's, and the line of this file its main thread is in."""
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    ours = [f for f in stack if Path(f.filename).name == Path(__file__).name and f.name != "collective"]
    dump = getattr(torch._C._distributed_c10d, f"_dump_{'nccl' if device.type == 'cuda' else 'fr'}_trace", None)
    recorded = pickle.loads(dump()).get("entries") if dump else None
    last = recorded[-1]["profiling_name"].split(":")[-1] if recorded else None  # as in nccl:all_reduce
    return {"ring": [*RING.copy()], "at": line_of(ours[-1]), "flight_recorder": last}


def judge(rings: list[list[dict]]) -> dict | None:
    """Lay the rings side by side: the first number at which they differ, who is missing there and what; else None."""
    calls = [{e["number"]: (e["collective"], e["caller"]) for e in ring} for ring in rings]
    start = max((min(mine) for mine in calls if mine), default=0)  # a ring forgets what is long ago
    for number in range(start, max(max(mine, default=0) for mine in calls) + 1):
        made = [mine.get(number) for mine in calls]  # None: has not come to it
        if len(set(made)) == 1:
            continue
        # who is right: a rank that does what all did after the same call one round earlier, or else most of them
        before = calls[0].get(number - 1)
        earlier = [calls[0][past + 1] for past in range(start, number - 1) if calls[0][past] == before]
        right = earlier[-1] if earlier else Counter(call for call in made if call).most_common(1)[0][0]
        missing = [rank for rank, call in enumerate(made) if call != right]
        return {"missing_ranks": missing, "number": number, "collective": right[0], "called_at": right[1]}
    return None


def watch(args: Namespace, store: dist.Store, rank: int, world_size: int, device: torch.device) -> None:
    """Beside training: once a rank has waited too long, bring all rings together, name the missing one, end the job."""
    while store.add("over", 0) < world_size:  # a rank that has left the loop too early is missing, too
        time.sleep(0.1)
        since = RING[-1]["waiting_since"] if RING else None
        if since and time.monotonic() - since > args.timeout:
            store.set("hang", "")
        if store.check(["hang"]):
            break
    else:
        return
    caught.set()
    code = 1  # unless the verdict says otherwise
    try:
        store.set(f"rank {rank}", json.dumps(snapshot(device)))
        keys = [f"rank {other}" for other in range(world_size)]
        store.wait(keys, timedelta(seconds=30))  # names, by failing, a rank that cannot answer: dead or stopped
        if rank == 0:
            store.set("code", "0" if tell(args, [json.loads(store.get(key)) for key in keys], device) else "1")
        code = int(store.get("code"))
        store.set(f"leaving {rank}", "")
        store.wait([f"leaving {other}" for other in range(world_size)], timedelta(seconds=10))
    except Exception:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)  # the main thread is inside a collective that nobody will end


def tell(args: Namespace, ranks: list[dict], device: torch.device) -> bool:
    """Print and write what was found; True if it is what was planted."""
    found = judge([seen["ring"] for seen in ranks])
    assert found, f"all ranks made the same calls: one is slow, none is missing; raise --timeout {args.timeout:g}"
    rows = [["rank", "calls", "last call", "the main thread is at", "flight recorder's last call"]]
    for rank, seen in enumerate(ranks):
        last = seen["ring"][-1]
        rows.append([str(rank), str(last["number"]), last["collective"], seen["at"], seen["flight_recorder"] or "n/a"])
    print(f"\nno progress for {args.timeout:g} s:\n\n{report.table(rows)}\n")
    for rank in found["missing_ranks"]:
        print(f"rank {rank} did not make call {found['number']}, {found['collective']} ({found['called_at']});")
        print(f"    it is at {ranks[rank]['at']}", flush=True)
    agrees = [seen["flight_recorder"] == seen["ring"][-1]["collective"] for seen in ranks if seen["flight_recorder"]]
    right = found["missing_ranks"] == [args.rank] and found["called_at"].endswith(str(PLANTS[args.plant]))
    at = {"at": [seen["at"] for seen in ranks], "flight_recorder_agrees": all(agrees) if agrees else None}
    write(args, device, len(ranks), found | at | {"named_what_was_planted": right})
    return right and all(agrees)


def write(args: Namespace, device: torch.device, world_size: int, found: dict) -> None:
    run = {"device": hardware.device_name(device), "world_size": world_size, "steps": STEPS, "plant": args.plant}
    report.write_json({**run, "planted_rank": args.rank, "timeout_seconds": args.timeout, **found}, args.json)


def main() -> int:
    parser = cli.Parser(__doc__)
    parser.add_argument("--plant", choices=PLANTS, default="skipped-collective", help="the mistake to make")
    parser.add_argument("--rank", type=cli.natural, default=1, help="the rank that makes it")
    parser.add_argument("--timeout", type=cli.positive, default=3.0, help="seconds a call may take, here few")
    parser.add_argument("--device", choices=("auto", "cuda", "cpu"), default="auto")
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write the finding as one JSON object")
    args = parser.parse_args()
    world_size = runtime.processes(args.device, on_cpu=3)
    if args.rank >= world_size or world_size == 1:
        raise exits.UserError(
            f"--rank {args.rank}, of {world_size}: a hang takes two ranks, and one below their number"
        )
    runtime.relaunch(args.device, on_cpu=3)
    device = runtime.init_process_group(args.device)
    rank = dist.get_rank()
    dist.barrier()  # sets up the connections, which may take longer than any call after it
    store = next(dist.rendezvous("env://"))[0]  # a connection of the watchdog's own
    watchdog = threading.Thread(target=watch, args=(args, store, rank, world_size, device))
    watchdog.start()
    try:
        train(args.plant, args.rank, device)
    except RuntimeError:
        if not caught.is_set():
            raise
        watchdog.join()  # it ends the process; others have left before
    store.add("over", 1)
    watchdog.join()
    runtime.say(f"{STEPS} steps, {len(RING)} collectives: no rank waited {args.timeout:g} s for another")
    runtime.on_rank0(lambda: write(args, device, world_size, {"missing_ranks": []}))
    runtime.shutdown()
    return 0 if args.plant == "none" else 1


if __name__ == "__main__":
    exits.run(main)
