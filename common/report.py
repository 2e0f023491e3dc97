"""How a script ends: its figures for people, and one JSON object for programs."""

import json
import re
import resource
import sys
from pathlib import Path

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
