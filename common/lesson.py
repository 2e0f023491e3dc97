"""The frame of a lesson: its flags, its start, and its end with a table and what was checked."""

import argparse
import os
import re
import shlex
import sys
import time

import torch

from common import cli, hardware, report, runtime
from common.exits import UserError

UNIT = re.compile(r"[^\d.]*$")  # of a figure: " ms" of 1.5 ms
_start = time.perf_counter()


def parse_flags(
    doc: str, gpu: dict | None = None, relaunches: bool = False, **defaults
) -> argparse.Namespace:
    """Parse the flags of a lesson: one flag per keyword, and --device and --json.

    The default value of a keyword says what the flag takes: a number takes a number above 0, a text
    takes a text, a tuple takes one of its items (by default the first), and False takes nothing.

    `gpu` has the defaults that are others on a GPU; runtime.device_type explains `relaunches`.
    """
    gpu = gpu or {}
    parser = cli.Parser(doc)
    number_types = {int: cli.positive_int, float: cli.positive}
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            first = default[0]
            parser.add_argument(flag, choices=default, default=first, help=f"default: {first}")
        else:
            flag_type = number_types.get(type(default), str)
            help_text = f"default: {default}"
            if name in gpu:
                help_text += f", on a GPU {gpu[name]}"
                default = None  # fill_defaults knows the device
            parser.add_argument(flag, type=flag_type, default=default, help=help_text)
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    fill_defaults(args, defaults, gpu, relaunches)
    return args


def fill_defaults(args: argparse.Namespace, cpu: dict, gpu: dict, relaunches: bool = False) -> None:
    """Give the flags that are None the default for the device of this script.

    `gpu` has the names of these flags, with their defaults on a GPU. `cpu` has those elsewhere.
    """
    if not gpu:
        return
    on_gpu = runtime.device_type(args.device, relaunches) == "cuda"
    for name, gpu_default in gpu.items():
        if getattr(args, name) is None:
            setattr(args, name, gpu_default if on_gpu else cpu[name])


def start(name: str, seed: int = 0):
    """Seed all generators and return the device of a lesson that runs in one process."""
    runtime.seed_all(seed)
    return runtime.single_device(name)


def relaunch(device: str, on_cpu: int = 2) -> None:
    """Restart this script under torchrun, so that plain `python script.py` has several ranks.

    There is one rank per GPU, or `on_cpu` ranks on the CPU. Call it before init_process_group.
    Under torchrun it returns at once. Otherwise it does not return: torchrun replaces this process.
    Raise UserError for `--device cuda` with fewer than two GPUs.
    """
    if "RANK" in os.environ:
        return
    runtime.refuse_tasks_without_rank()
    runtime.timeout()  # raises here, once, if its environment variable is wrong
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    if device == "cuda" and gpus < 2:
        raise UserError(f"--device cuda: two ranks need two GPUs, {gpus} visible: use --device cpu")
    processes = world_size_after_relaunch(device, on_cpu)
    device_flag = ["--device", "cuda" if gpus > 1 else "cpu"]
    # device_flag comes last: argparse takes the last --device of a command line
    arguments = [f"--nproc_per_node={processes}", "--standalone", *sys.argv, *device_flag]
    command_line = shlex.join(["torchrun", *arguments])
    print(f"This script needs several ranks; restarting as\n  {command_line}", flush=True)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun sets it too, but with a warning
    # --local-addr of torchrun, which would ask for the address of this machine's name: it may have
    # none, and is not needed here
    os.environ.setdefault("PET_LOCAL_ADDR", "127.0.0.1")
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *arguments])


def world_size_after_relaunch(device: str, on_cpu: int = 2) -> int:
    """Return how many ranks this job has, or will have when `relaunch` has started them.

    A script calls this before `relaunch`, to find out early that its flags do not fit the ranks.
    """
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        return runtime.ranks().world_size
    gpus = 0 if device == "cpu" else torch.cuda.device_count()
    return gpus if gpus > 1 else on_cpu


def end(
    rows: list[dict],
    *,
    columns: dict[str, str] | list[dict[str, str]],
    checked: list[str],
    args: argparse.Namespace,
    device,
    **own,
) -> None:
    """Print the table of a lesson and what it checked, and write --json.

    `columns` has the heading for each key of a row that the table shows. A list of such dicts makes
    several tables. The JSON has the keys of report.SUMMARY, the flags, `own`, `rows` and `checked`.
    Every rank must call this; rank 0 prints.
    """
    peaks = runtime.all_gather(report.peak_memory_bytes(device))
    if not runtime.is_rank0():
        return
    world_size = len(peaks)

    summary = vars(args).copy()
    del summary["json"]
    summary["device"] = hardware.device_name(device)
    summary["world_size"] = world_size
    summary["peak_memory_bytes"] = max(peaks)
    summary["seconds"] = time.perf_counter() - _start
    summary.update(own)
    summary["rows"] = rows
    summary["checked"] = checked

    title = [str(summary[key]) for key in ("model", "dtype", "device") if summary.get(key)]
    count = summary["world_size"]
    title.append("1 process" if count == 1 else f"{count} processes")
    print(f"\n{report.fold(', '.join(title))}\n")
    tables = columns if isinstance(columns, list) else [columns]
    for headings in tables:
        print_rows(rows, headings)
    for line in checked:
        print(report.fold(f"checked: {line}"))
    report.write_json(summary, args.json)


def print_rows(rows: list[dict], headings: dict[str, str]) -> None:
    """Print rows as a table. `headings` has the heading for each key of a row that is shown."""
    lines = [list(headings.values())]
    for row in rows:
        lines.append([_cell(row, key) for key in headings])
    report.print_table(lines)


def _cell(row: dict, key: str) -> str:
    """Format a value of a row, with its range if the row has one: 1.31x (1.25 to 1.39)."""
    text = report.for_people(key, row.get(key))
    if row.get(f"min_{key}") is None:
        return text
    low = report.for_people(key, row[f"min_{key}"])
    high = report.for_people(key, row[f"max_{key}"])
    unit = UNIT.findall(text)[0]
    if UNIT.findall(low)[0] == unit == UNIT.findall(high)[0]:
        low = low.removesuffix(unit)
        high = high.removesuffix(unit)
    return f"{text} ({low} to {high})"
