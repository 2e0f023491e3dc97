"""For debug_hang.py: read where a rank hangs, and report all ranks."""

import pickle
import sys
import threading
import traceback
from argparse import Namespace
from pathlib import Path

import torch
import torch.distributed as dist

from common import hardware, report
from common.report import table

# What can be planted, and the line of debug_hang.py that the rank then does not reach.
PLANTS = {
    "skipped-collective": "collective(dist.all_reduce, loss)",
    "early-return": "collective(dist.all_reduce, loss)",
    "stuck-loader": "collective(dist.all_reduce, gradients)",
    "none": None,
}


def line_of(frame: traceback.FrameSummary) -> str:
    """Return file, line number and source of a frame."""
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"


def snapshot(device: torch.device) -> dict:
    """Return the script line of the main thread, and the last call in the flight recorder.

    The flight recorder is PyTorch's own ring of calls. The last call is None if it has none.
    """
    script = Path(sys.argv[0]).name
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    own_frames = [
        frame
        for frame in stack
        if Path(frame.filename).name == script and frame.name != "collective"
    ]

    name = "_dump_nccl_trace" if device.type == "cuda" else "_dump_fr_trace"
    dump = getattr(torch._C._distributed_c10d, name, None)
    last_call = None
    if dump is not None:
        entries = pickle.loads(dump()).get("entries")
        if entries:
            last_call = entries[-1]["profiling_name"].split(":")[-1]  # as in nccl:all_reduce
    return {"at": line_of(own_frames[-1]), "flight_recorder": last_call}


def report_hang(
    args: Namespace, device: torch.device, reports: list[dict], difference: dict | None
) -> int:
    """Print and write which rank misses which call. Return 0 if these are the planted ones.

    reports: for each rank its ring and its snapshot. difference: see debug_hang.first_difference.
    """
    assert difference, (
        "all ranks made the same calls: one is slow, none is missing; raise --timeout"
    )
    rows = [["rank", "calls", "last call", "the main thread is at", "flight recorder's last call"]]
    for rank, seen in enumerate(reports):
        last = seen["ring"][-1]
        rows.append(
            [
                str(rank),
                str(last["number"]),
                last["collective"],
                seen["at"],
                seen["flight_recorder"] or "n/a",
            ]
        )
    print(f"\nno progress for {args.timeout:g} s:\n\n{table(rows)}\n")
    call = f"{difference['collective']} ({difference['called_at']})"
    for rank in difference["missing_ranks"]:
        print(f"rank {rank} did not make call {difference['number']}, {call};")
        print(f"    it is at {reports[rank]['at']}")

    recorded = [seen for seen in reports if seen["flight_recorder"]]
    agrees = all(seen["flight_recorder"] == seen["ring"][-1]["collective"] for seen in recorded)
    named_rank = difference["missing_ranks"] == [args.rank]
    named_call = difference["called_at"].endswith(str(PLANTS[args.plant]))
    more = {
        "at": [seen["at"] for seen in reports],
        "flight_recorder_agrees": agrees if recorded else None,
        "named_what_was_planted": named_rank and named_call,
    }
    write(args, device, difference | more)
    return 0 if named_rank and named_call and agrees else 1


def write(args: Namespace, device: torch.device, result: dict) -> None:
    """Write the result as JSON, with what was planted and where."""
    run = {"plant": args.plant, "planted_rank": args.rank, "timeout_seconds": args.timeout}
    where = {"device": hardware.device_name(device), "world_size": dist.get_world_size()}
    report.write_json(where | run | result, args.json)
