"""Figures, verdicts and text of gpu_report.py, from what has been measured so far."""

from dataclasses import dataclass, field

from _shared import LOG_EVERY, WARMUP_STEPS, facts, number, spread_cells

from old import hardware, shapes
from old.report import spread, table

MFU_TARGET = 0.45
RATIO_TARGET = 1.05  # ours over transformers' Trainer
SEQ_LEN = 1024
TITLES = {
    "ours": "04_amp/train.py, bf16, --compile",
    "trainer": "transformers Trainer, bf16, torch_compile",
    "eager": "04_amp/train.py, bf16, eager",
    "trainer_eager": "transformers Trainer, bf16, eager",
    "ddp": "05_ddp/train.py, bf16, --compile, torchrun, 1 process",
    "fp32": "04_amp/train.py, fp32, eager",
    "trainer_fp32": "transformers Trainer, fp32, eager",
}
RIVALS = {"ours": "trainer", "eager": "trainer_eager", "fp32": "trainer_fp32"}


@dataclass
class Report:
    """What has been measured so far; written anew after every finished part."""

    about: dict
    batch_size: int = 0
    commands: dict[str, str] = field(default_factory=dict)  # by kind of run, as are runs and failed
    runs: dict[str, list[dict]] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)  # why
    ceilings: dict[str, list[float]] = field(default_factory=dict)
    not_run: list[str] = field(default_factory=list)
    chapters: list[dict] = field(default_factory=list)


def summarize(report: Report) -> dict:
    """Every figure of the report, from the raw measurements."""
    name, clock = report.about["gpu"], report.about.get("sm_clock_max_mhz")
    per_token = shapes.flops_per_token(shapes.SIZES["llama-124m"], SEQ_LEN)
    training = {}
    for kind, runs in report.runs.items():
        dtype = "fp32" if kind.endswith("fp32") else "bf16"
        speeds = [run["tokens_per_second"] for run in runs if run["tokens_per_second"]]
        whole = spread(speeds)
        peak = hardware.peak_flops(name, dtype)
        highest = hardware.highest_flops(name, dtype, clock)
        training[kind] = {
            "dtype": dtype,
            "tokens_per_second": whole,
            "windows": spread([window for run in runs for window in run["windows"]]),
            "mfu": {
                key: whole[key] * per_token / peak if peak and speeds else None for key in ("median", "min", "max")
            },
            "tokens_per_second_at_peak": peak and peak / per_token,
            "tokens_per_second_limit": highest and highest / per_token,
            "peak_memory_bytes": max((run["peak_memory_bytes"] for run in runs), default=None),
            "last_loss": runs[-1]["last_loss"] if runs else None,
            "failed": report.failed.get(kind),
        }
    bandwidth = hardware.memory_bandwidth(name)
    figures = {
        "batch_size": report.batch_size,
        "seq_len": SEQ_LEN,
        "flops_per_token": per_token,
        "peaks": {"matmul": hardware.peak_flops(name, "bf16"), "copy": bandwidth},
        # the data sheet's rate at the highest clock that the driver allows: what a right timing cannot exceed
        "limits": {"matmul": hardware.highest_flops(name, "bf16", clock), "copy": bandwidth},
        "ceilings": {kind: spread(report.ceilings.get(kind, [])) for kind in ("matmul", "copy")},
        "training": training,
    }
    verdicts = [*ceiling_verdicts(figures), *training_verdicts(figures)]
    figures["verdicts"] = [{"claim": claim, "verdict": verdict} for claim, verdict in verdicts]
    return figures


def share_of_peak(tokens_per_second: float | None, flops_per_token: int, peak: float | None) -> float | None:
    """Model FLOP/s utilization; None where the speed or the peak is not known."""
    return tokens_per_second * flops_per_token / peak if peak and tokens_per_second else None


def ceiling_verdicts(figures: dict) -> list[tuple[str, str]]:
    """A ceiling above what the hardware can do is a bug of the timing."""
    found = []
    for name, unit, scale in (("matmul", "TFLOP/s", 1e12), ("copy", "GB/s", 1e9)):
        fastest, limit = figures["ceilings"][name]["max"], figures["limits"][name]
        claim = f"{name}: the fastest measured is not above what the hardware can do"
        if fastest is None:
            found.append((claim, "not measured"))
            continue
        claim += f": {number(fastest / scale)} {unit}"
        if limit is None:
            found.append((claim, "not measured: no peak known for this GPU"))
        else:
            found.append((f"{claim}, limit {number(limit / scale)}", "BUG" if fastest > limit else "ok"))
    return found


def training_verdicts(figures: dict) -> list[tuple[str, str]]:
    """No training is faster than the hardware; MFU and the Trainer's speed beside their targets."""
    found = []
    for kind, t in figures["training"].items():
        fastest, limit = t["windows"]["max"], t["tokens_per_second_limit"]
        if fastest is not None and limit is not None:
            claim = f"{TITLES[kind]}: the fastest window is not above what the hardware can do"
            claim += f": {number(fastest)} tokens/s, limit {number(limit)}"
            found.append((claim, "BUG" if fastest > limit else "ok"))

    claim = f"MFU of {TITLES['ours']}, is at least {MFU_TARGET:.0%}"
    mfu = figures["training"].get("ours", {}).get("mfu", {}).get("median")
    if mfu is None:
        found.append((claim, "not measured"))
    else:
        found.append((f"{claim}: {mfu:.1%}", "met" if mfu >= MFU_TARGET else "missed"))

    for ours, theirs in RIVALS.items():
        claim = f"{TITLES[ours]}, reaches at least {RATIO_TARGET:g} of the tokens/s of {TITLES[theirs]}"
        medians = []
        for kind in (ours, theirs):
            medians.append(figures["training"].get(kind, {}).get("tokens_per_second", {}).get("median"))
        if None in medians:
            found.append((claim, "not measured"))
        else:
            ratio = medians[0] / medians[1]
            found.append((f"{claim}: {ratio:.3f}", "met" if ratio >= RATIO_TARGET else "missed"))
    return found


def write_up(report: Report, figures: dict) -> str:
    """The report as Markdown."""
    per_token = figures["flops_per_token"]
    how = (
        f"llama-124m, {report.batch_size} sequences of {SEQ_LEN} tokens per step, the first {WARMUP_STEPS} steps not "
        f"timed, TF32 off. A run's figure is its tokens over the wall time of all its timed steps; a window is "
        f"{LOG_EVERY} steps. {per_token:,} FLOP per token, recomputation not counted (the published count for GPT-2 "
        f"124M at this length is 855,166,464). MFU is a share of the data sheet's rate; a speed above that rate at "
        f"the GPU's highest clock is a bug of the timing."
    )
    notes = [f"- not run: {line}" for line in report.not_run]
    notes += [f"- FAILED: {TITLES[kind]}: {reason}" for kind, reason in report.failed.items()]
    parts = [f"# Measured on {report.about['gpu']}", facts(report.about), ceilings_table(figures), how]
    parts.append(training_table(figures))
    if notes:
        parts.append("\n".join(notes))
    parts.append("\n".join(f"- **{v['verdict']}**: {v['claim']}" for v in figures["verdicts"]))
    parts.append("```\n" + "\n".join(report.commands[kind] for kind in report.runs) + "\n```")
    for chapter in report.chapters:
        parts.append(f"## `{chapter['command']}`")
        if chapter["failed"]:
            parts.append(f"FAILED: {chapter['failed']}")
        if chapter["output"]:
            parts.append(f"```\n{chapter['output'].rstrip()}\n```")
    return "\n\n".join(parts)


def ceilings_table(figures: dict) -> str:
    rows = [["ceiling", "n", "median", "min", "max", "peak", "share of peak"]]
    for kind, title, unit, scale in (
        ("matmul", "bf16 matrix product, 8192 cubed, random data", "TFLOP/s", 1e12),
        ("copy", "copy of 2 GiB, bytes read and written", "GB/s", 1e9),
    ):
        measured, peak = figures["ceilings"][kind], figures["peaks"][kind]
        cells = [str(measured["n"])]
        for key in ("median", "min", "max"):
            cells.append("n/a" if measured[key] is None else number(measured[key] / scale))
        share = number(measured["median"] / peak, ".1%") if peak and measured["n"] else "n/a"
        rows.append([f"{title}, {unit}", *cells, number(peak and peak / scale), share])
    return table(rows)


def training_table(figures: dict) -> str:
    rows = [["training", "runs", "median tokens/s", "min", "max", "windows", "min", "max", "MFU", "peak GiB"]]
    for kind, t in figures["training"].items():
        windows, memory = t["windows"], t["peak_memory_bytes"]
        window_cells = [str(windows["n"]), number(windows["min"]), number(windows["max"])]
        last_cells = [number(t["mfu"]["median"], ".1%"), number(memory and memory / 2**30, ".1f")]
        rows.append([TITLES[kind], *spread_cells(t["tokens_per_second"]), *window_cells, *last_cells])
    return table(rows)
