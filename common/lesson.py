"""How a lesson starts and ends: its flags, its processes, its batch, its table and what it has checked."""

import argparse
import os
import shlex
import sys
import time

import torch
from torch import Tensor

from common import cli, data, hardware, report, runtime
from common.exits import UserError
from common.table import table

_began = time.perf_counter()


def flags(doc: str, **defaults) -> argparse.Namespace:
    """The flags of a lesson, one per keyword, and --device and --json. The default says what a flag takes: a number
    above 0, a text, a choice (a tuple, its first the default), or nothing (False)."""
    parser = cli.Parser(doc)
    for name, default in defaults.items():
        flag = f"--{name.replace('_', '-')}"
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, tuple):
            parser.add_argument(
                flag, choices=default, default=default[0], help=f"default: {default[0]}"
            )
        else:
            kind = {int: cli.positive_int, float: cli.positive}.get(type(default), str)
            parser.add_argument(flag, type=kind, default=default, help=f"default: {default}")
    cli.add_device_and_json(parser)
    return parser.parse_args()


def start(name: str, seed: int = 0) -> torch.device:
    """Begin a lesson of one process: every generator seeded, the device chosen."""
    runtime.seed_all(seed)
    return runtime.single_device(name)


def relaunch(device: str, on_cpu: int = 2) -> None:
    """Return under torchrun. Else become torchrun of the same script: a process per GPU, or `on_cpu` on the CPU."""
    if "RANK" in os.environ:
        return
    gpus = torch.cuda.device_count() if device != "cpu" else 0
    if device == "cuda" and gpus < 2:
        raise UserError(f"--device cuda: two ranks need two GPUs, {gpus} visible: use --device cpu")
    place, count = ("cuda", gpus) if gpus > 1 else ("cpu", on_cpu)
    # the last --device wins
    command = [f"--nproc_per_node={count}", "--standalone", *sys.argv, "--device", place]
    print(
        f"This script needs several ranks; restarting as: torchrun {shlex.join(command)}",
        flush=True,
    )
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torchrun's own choice, without its warning
    os.execv(sys.executable, [sys.executable, "-m", "torch.distributed.run", *command])


def one_batch(batch_size: int, seq_len: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """A batch of the default corpus for lessons that need only one: inputs and targets, int64 [batch_size, seq_len]."""
    sequences = data.Sequences(data.load_corpus("stdlib").train, seq_len)
    if (most := len(sequences)) < batch_size:
        raise UserError(
            f"{batch_size} sequences of {seq_len} tokens, the text has {most}: lower the steps or batch"
        )
    inputs, targets = zip(*(sequences[i] for i in range(batch_size)), strict=True)
    return torch.stack(inputs).to(device), torch.stack(targets).to(device)


def end(
    rows: list[dict], *, columns: dict[str, str], checked: list[str], args, device, **own
) -> None:
    """End a lesson: a table with these columns (key of a row: heading), what was checked, and --json, which has the
    keys of report.SUMMARY, the flags, `rows`, `checked` and `own`. Every rank must call it; rank 0 prints."""
    peaks = runtime.gather(report.peak_memory_bytes(device))
    if not runtime.is_rank0():
        return
    summary = {
        **{name: value for name, value in vars(args).items() if name not in ("device", "json")},
        "device": hardware.device_name(device),
        "world_size": len(peaks),
        "peak_memory_bytes": max(peaks),
        "seconds": time.perf_counter() - _began,
        **own,
        "rows": rows,
        "checked": checked,
    }
    known = [str(summary[name]) for name in ("model", "dtype", "device") if summary.get(name)]
    print(f"\n{', '.join([*known, f'{len(peaks)} process' + 'es' * (len(peaks) > 1)])}\n")
    print(
        table([[*columns.values()], *([_cell(row, key) for key in columns] for row in rows)]) + "\n"
    )
    for line in checked:
        print(f"checked: {line}")
    report.write_json(summary, args.json)


def _cell(row: dict, key: str) -> str:
    """A value of a row, with its range where the row has that: 1.31x (1.25x to 1.39x)."""
    low, high = row.get(f"min_{key}"), row.get(f"max_{key}")
    text = report.for_people(key, row.get(key))
    return (
        text
        if low is None
        else f"{text} ({report.for_people(key, low)} to {report.for_people(key, high)})"
    )
