"""What debug_hang.py reads of a rank that hangs, and what it prints and writes of all of them."""

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

# what can be planted, and the line of debug_hang.py that the rank then does not come to
PLANTS = {
    "skipped-collective": "collective(dist.all_reduce, loss)",
    "early-return": "collective(dist.all_reduce, loss)",
    "stuck-loader": "collective(dist.all_reduce, gradients)",
    "none": None,
}


def line_of(frame: traceback.FrameSummary) -> str:
    return f"{Path(frame.filename).name}:{frame.lineno} {frame.line}"


def snapshot(device: torch.device) -> dict:
    """The line of the script that the main thread is in, and the last call that PyTorch's flight recorder has seen."""
    script = Path(sys.argv[0]).name
    stack = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident])
    own_frames = [
        frame
        for frame in stack
        if Path(frame.filename).name == script and frame.name != "collective"
    ]

    name = "_dump_nccl_trace" if device.type == "cuda" else "_dump_fr_trace"
    dump = getattr(torch._C._distributed_c10d, name, None)
    entries = pickle.loads(dump()).get("entries") if dump else None
    # as in nccl:all_reduce
    last_call = entries[-1]["profiling_name"].split(":")[-1] if entries else None
    return {"at": line_of(own_frames[-1]), "flight_recorder": last_call}


def report_hang(
    args: Namespace, device: torch.device, ranks: list[dict], found: dict | None
) -> int:
    """Print and write what was found. The exit code: 0 if it is what was planted."""
    assert found, "all ranks made the same calls: one is slow, none is missing; raise --timeout"
    rows = [["rank", "calls", "last call", "the main thread is at", "flight recorder's last call"]]
    for rank, seen in enumerate(ranks):
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
    for rank in found["missing_ranks"]:
        print(
            f"rank {rank} did not make call {found['number']}, {found['collective']} ({found['called_at']});"
        )
        print(f"    it is at {ranks[rank]['at']}")

    recorded = [seen for seen in ranks if seen["flight_recorder"]]
    agrees = all(seen["flight_recorder"] == seen["ring"][-1]["collective"] for seen in recorded)
    named_rank = found["missing_ranks"] == [args.rank]
    named_call = found["called_at"].endswith(str(PLANTS[args.plant]))
    more = {
        "at": [seen["at"] for seen in ranks],
        "flight_recorder_agrees": agrees if recorded else None,
        "named_what_was_planted": named_rank and named_call,
    }
    write(args, device, found | more)
    return 0 if named_rank and named_call and agrees else 1


def write(args: Namespace, device: torch.device, found: dict) -> None:
    run = {"plant": args.plant, "planted_rank": args.rank, "timeout_seconds": args.timeout}
    where = {"device": hardware.device_name(device), "world_size": dist.get_world_size()}
    report.write_json(where | run | found, args.json)
