"""How a lesson starts, and how a script ends: its figures for people, and one JSON object for programs.

Without torch at import: 07_memory_tricks/estimate.py runs without it."""

import argparse
import json
import re
import resource
import sys
import time
from pathlib import Path

from common import cli

SUMMARY = [
    *("script", "torch", "device", "world_size", "dtype", "model", "parameters", "steps", "tokens"),
    *(
        "first_loss",
        "last_loss",
        "val_loss",
        "tokens_per_second",
        "mfu",
        "peak_memory_bytes",
        "seconds",
    ),
]
_began = time.perf_counter()
earlier_peaks: list[int] = []  # bytes, of GPU memory; to be filled by whoever resets torch's peak


def summary(summary: dict, json_path: Path | None) -> None:
    """End a training run: a line per value for people, and --json."""
    print()
    for name, value in write_json(summary, json_path).items():
        print(f"{name:<22} {for_people(name, value)}")


def write_json(summary: dict, json_path: Path | None) -> dict:
    """Add the keys of SUMMARY, null where this script does not know the value, and write all if a path is given."""
    script = "/".join(Path(sys.argv[0]).resolve().parts[-2:])
    # estimate.py runs without it
    torch_version = getattr(sys.modules.get("torch"), "__version__", None)
    summary = {**dict.fromkeys(SUMMARY), "script": script, "torch": torch_version, **summary}
    if json_path:
        json_path.write_text(json.dumps(summary, indent=1, allow_nan=False, default=str) + "\n")
    return summary


def for_people(name: str, value: object) -> str:
    """A value in the unit that its name ends with: 592 MiB, 4,538 tokens/s, 34.6 s, 1.31x, 45.7%."""
    if isinstance(value, list):
        return ", ".join(for_people(name, each) for each in value)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return "n/a" if value is None else str(value)
    if name.endswith("tokens_per_second"):
        return f"{value:,.0f} tokens/s"
    if name.endswith(("share", "mfu")):
        return f"{value:.1%}"
    if name.endswith("ratio"):
        return f"{value:.2f}x"
    if name.endswith("error"):
        return f"{value:.1e}" if value else "0"
    if name.endswith(("bytes", "bytes_per_rank")):
        return f"{value / 2**20:,.1f} MiB" if value < 100 * 2**20 else f"{value / 2**20:,.0f} MiB"
    if name.endswith("seconds"):
        return f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.1f} s"
    return f"{value:,}" if isinstance(value, int) else f"{value:.5g}"


def peak_memory_bytes(device) -> int:
    """The most this process has held: allocated by torch on a GPU, else the process's resident set."""
    if device.type == "cuda":
        import torch

        return max([*earlier_peaks, torch.cuda.max_memory_allocated(device)])
    if sys.platform == "darwin":
        # on Linux this counts what had started us, too
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(re.search(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[1]) * 1024


def table(rows: list[list[str]]) -> str:
    """The first row is the head, columns of figures are right-aligned."""
    columns = []
    for head, *cells in zip(*rows, strict=True):
        width = max(3, *map(len, (head, *cells)))
        figures = len(cells) > 0 and all(re.match(r"[-+]?[\d.]|n/a", cell) for cell in cells)
        align = str.rjust if figures else str.ljust
        rule = "-" * (width - 1) + ":" if figures else "-" * width
        columns.append([align(head, width), rule, *(align(cell, width) for cell in cells)])
    return "\n".join("| " + " | ".join(line) + " |" for line in zip(*columns, strict=True))


def lesson_flags(doc: str, **defaults) -> argparse.Namespace:
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


def start_lesson(name: str, seed: int = 0):
    """Begin a lesson of one process: every generator seeded, the device chosen."""
    from common import runtime

    runtime.seed_all(seed)
    return runtime.single_device(name)


def end_lesson(
    rows: list[dict], *, columns: dict[str, str], checked: list[str], args, device, **own
) -> None:
    """End a lesson: a table with these columns (key of a row: heading), what was checked, and --json, which has the
    keys of SUMMARY, the flags, `rows`, `checked` and `own`. Every rank must call it; rank 0 prints."""
    from common import hardware, runtime

    peaks = runtime.gather(peak_memory_bytes(device))
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
    write_json(summary, args.json)


def _cell(row: dict, key: str) -> str:
    """A value of a row, with its range where the row has that: 1.31x (1.25x to 1.39x)."""
    low, high = row.get(f"min_{key}"), row.get(f"max_{key}")
    text = for_people(key, row.get(key))
    return text if low is None else f"{text} ({for_people(key, low)} to {for_people(key, high)})"
