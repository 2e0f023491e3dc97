"""What one GPU reaches here: its measured ceilings, and how much of them training gets.

    make gpu                                       the GPU tests, then this
    python benchmarks/gpu_report.py --minutes 10   more rounds

First the ceilings: a large bf16 matrix product and a copy in the GPU's memory, against the data sheet's
peaks. Then llama-124m with torch.compile, 04_amp/train.py and transformers' Trainer in turns, each in a
process of its own: tokens/s over all wall time of the steps after warm-up, and model FLOP/s utilization
(MFU). Then the scripts of chapters 01, 02 and 04 that measure something, with what they print. Rounds go
on until --minutes are used up, less the chapters' share. A speed above a peak is a bug of the timing, and is
called so: the report then ends with exit code 1, as it does if our own run fails. No GPU: exit code 2.

Look for: the verdicts at the end; "missed" is a result too. Results go to benchmarks/results/.
"""

import json
import os
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path

import torch

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))  # common/, with nothing installed
from vs_trainer import (
    LOG_EVERY,
    WARMUP_STEPS,
    cpu,
    facts,
    number,
    spread,
    start,
    train,
    train_with_trainer,
    versions,
    write_results,
)

from common import cli, exits, hardware, model, nvml, runtime
from common.report import table

MFU_TARGET = 0.45
SEQ_LEN = 1024
STEPS = WARMUP_STEPS + 10 * LOG_EVERY
SAMPLES = 20  # of each ceiling
LARGE = ["--device", "cuda", "--model", "llama-124m", "--seq-len", "1024", "--batch-size", "16", "--steps", "18"]
# what the chapters measure for themselves, the most telling first: each runs if there is time left for it
CHAPTERS = [
    ["01_devices/benchmark.py", "--device", "cuda"],
    # nano would leave the GPU waiting for launches
    ["04_amp/compare.py", *LARGE],
    ["02_tensors_precision/precision.py", "--device", "cuda"],
    ["02_tensors_precision/quantize.py", "--device", "cuda"],
    ["02_tensors_precision/qat.py", "--device", "cuda"],
    ["02_tensors_precision/tensors.py", "--device", "cuda"],
    ["01_devices/show.py"],
    ["01_devices/doctor.py"],
]
CHAPTERS_SHARE = 0.45  # of the time
# what a run is thought to take before one has been seen: the first of each compiles
FIRST_GUESS_SECONDS = {"ours": 60, "trainer": 60, "eager": 30, "ddp": 60}
TITLES = {
    "ours": "04_amp/train.py --compile",
    "trainer": "transformers Trainer, torch_compile",
    "eager": "04_amp/train.py, eager",
    "ddp": "05_ddp/train.py --compile, torchrun, 1 process",
}


def ceilings(path: Path) -> int:
    """Measure this process's GPU and describe it, as JSON in `path`: a process of its own, so that what it
    allocates is gone when training starts."""
    device = runtime.pick_device("cuda")
    about = describe(device)
    size = 8192
    # random data: a GPU multiplies zeros faster than it can multiply anything real, for it draws less power
    a, b = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    out = torch.empty_like(a)
    matmul = [2 * size**3 * 5 / s for s in timed(lambda: [torch.mm(a, b, out=out) for _ in range(5)])]
    about |= under_load(device, lambda: torch.mm(a, b, out=out))
    source = torch.randint(256, (2**31,), dtype=torch.uint8, device=device)  # 2 GiB: far more than any cache
    target = torch.empty_like(source)
    copy = [2 * source.numel() * 5 / s for s in timed(lambda: [target.copy_(source) for _ in range(5)])]
    path.write_text(json.dumps({"about": about, "matmul": matmul, "copy": copy}))
    return 0


def timed(work) -> list[float]:
    """Seconds that the GPU takes for `work`, SAMPLES times after a warm-up, between its own events."""
    for _ in range(5):
        work()
    seconds = []
    for _ in range(SAMPLES):
        began, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        began.record()
        work()
        ended.record()
        ended.synchronize()
        seconds.append(began.elapsed_time(ended) / 1e3)
    return seconds


def nvml_gpu(device: torch.device) -> dict:
    """What NVML tells about this GPU, found by UUID because CUDA and NVML count differently; {} if nothing."""
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
    return next((gpu for gpu in nvml.gpus()[0] if gpu["uuid"] == uuid), {})


def describe(device: torch.device) -> dict:
    """The GPU as torch and, if it answers, NVML tell it."""
    properties = torch.cuda.get_device_properties(device)
    told = nvml_gpu(device)
    if not told:
        print(f"skipped: driver, power and clocks ({nvml.gpus()[1] or 'NVML does not list this GPU'})")
    return {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "multiprocessors": properties.multi_processor_count,
        "cuda": torch.version.cuda,
        **{name: told.get(name) for name in ("driver", "power_limit_watts", "sm_clock_max_mhz")},
        "other_processes": max(0, len(told["processes"]) - 1) if told.get("processes") else None,
    }


def under_load(device: torch.device, work) -> dict:
    """Clock and power while the GPU works: what it sustains, not what it could."""
    torch.cuda.synchronize()
    told = []
    for _ in range(10):
        for _ in range(50):
            work()
        told.append(nvml_gpu(device))
        torch.cuda.synchronize()
    clocks = [gpu["sm_clock_mhz"] for gpu in told if gpu.get("sm_clock_mhz")]
    watts = [gpu["power_watts"] for gpu in told if gpu.get("power_watts")]
    return {
        "sm_clock_under_matmul_mhz": statistics.median(clocks) if clocks else None,
        "power_under_matmul_watts": max(watts, default=None),
    }


def commands(batch_size: int) -> dict[str, list[str]]:
    """The flags of each kind of run, all of the same training."""
    shape = ["--model", "llama-124m", "--dtype", "bf16", "--seq-len", str(SEQ_LEN), "--steps", str(STEPS)]
    ours = [*shape, "--global-batch-size", str(batch_size), "--micro-batch-size", str(batch_size), "--device", "cuda"]
    return {
        "ours": [*ours, "--compile"],
        "trainer": [*shape, "--batch-size", str(batch_size), "--device", "cuda", "--compile"],
        "eager": ours,
        "ddp": [*ours, "--compile"],
    }


def run_one(kind: str, flags: list[str], env: dict[str, str], timeout: float) -> dict:
    if kind == "trainer":
        return train_with_trainer(flags, env, timeout)
    if kind == "ddp":
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=1"]
        return train("05_ddp/train.py", flags, env, timeout, launcher)
    return train("04_amp/train.py", flags, env, timeout)


def shown(kind: str, flags: list[str]) -> str:
    """The command as a reader would type it."""
    text = " ".join(flags)
    if kind == "trainer":
        return f"python benchmarks/vs_trainer.py --worker RESULT.json {text}"
    script = "torchrun --standalone --nproc_per_node=1 05_ddp/train.py" if kind == "ddp" else "python 04_amp/train.py"
    return f"{script} {text} --log-every {LOG_EVERY}"


def schedule(kinds: list[str]):
    """What to run, for ever: two rounds of ours and theirs in turns, the others once, then more rounds."""
    sides = [kind for kind in ("ours", "trainer") if kind in kinds]
    yield from sides * 2
    yield from (kind for kind in ("eager", "ddp") if kind in kinds)
    while True:
        yield from sides


def measure(kinds: dict[str, list[str]], env: dict[str, str], deadline: float) -> tuple[dict, dict]:
    """Run by the schedule until the time is up: results by kind, and what failed and why."""
    results: dict[str, list[dict]] = {kind: [] for kind in kinds}
    failed: dict[str, str] = {}
    takes = dict(FIRST_GUESS_SECONDS)
    for kind in schedule(list(kinds)):
        left = deadline - time.monotonic()
        if all(kind_ in failed for kind_ in ("ours", "trainer") if kind_ in kinds):
            break
        if kind in failed:
            continue
        if left < takes[kind]:
            if kind in ("eager", "ddp"):
                print(f"{TITLES[kind]}: no time left for it", flush=True)
                continue
            break
        began = time.monotonic()
        try:
            result = run_one(kind, kinds[kind], env, left + 45)
            results[kind].append(result)
            speed = number(result["tokens_per_second"])
            print(f"{TITLES[kind]:<48} {speed:>9} tokens/s  ({time.monotonic() - began:.0f} s in all)", flush=True)
        except RuntimeError as error:
            failed[kind] = str(error)
            print(f"{TITLES[kind]}: FAILED: {error}", flush=True)
        # the second run finds in the cache what the first compiled
        takes[kind] = (time.monotonic() - began) * (0.6 if len(results[kind]) == 1 else 1)
    return results, failed


def run_chapters(env: dict[str, str], deadline: float) -> list[dict]:
    """Each chapter script in turn: its command, what it printed, its --json, or why it did not run."""
    ran = []
    for command in CHAPTERS:
        chapter = {"command": f"python {' '.join(command)}", "output": None, "summary": None, "failed": None}
        left = deadline - time.monotonic()
        with tempfile.TemporaryDirectory(prefix="chapter-") as folder:
            file = Path(folder, "summary.json")
            try:
                if left < 5:
                    raise RuntimeError("no time left")
                chapter["output"] = start([sys.executable, *command, "--json", str(file)], env, left)
            except RuntimeError as error:
                chapter["failed"] = str(error)
            if file.exists():  # doctor.py writes it and ends with 1 where it finds a fault
                chapter["summary"] = json.loads(file.read_text())
        print(f"{chapter['command']}: {chapter['failed'] or 'done'}", flush=True)
        ran.append(chapter)
    return ran


def verdicts(figures: dict) -> list[tuple[str, str]]:
    """(claim, met / missed / BUG / not measured) for every target and every sanity check."""
    found = []
    for name, unit, scale in (("matmul", "TFLOP/s", 1e12), ("copy", "GB/s", 1e9)):
        ceiling, peak = figures["ceilings"][name], figures["peaks"][name]
        claim = f"{name}: {number(ceiling['max'] / scale)} {unit}, the fastest measured, is not above the peak"
        if peak is None:
            found.append((claim, "not measured: no peak known for this GPU"))
        else:
            found.append((f"{claim} of {number(peak / scale)}", "BUG" if ceiling["max"] > peak else "ok"))
    ours, trainer = (figures["training"].get(kind, {}).get("tokens_per_second") for kind in ("ours", "trainer"))
    ours_median, limit = ours and ours["median"], figures["tokens_per_second_limit"]
    fastest = max((t["windows"]["max"] for t in figures["training"].values() if t["windows"]["n"]), default=None)
    claim = "no training is faster than the peak allows"
    if limit is None or fastest is None:
        found.append((claim, "not measured"))
    else:
        claim += f": {number(fastest)} tokens/s in the fastest window, limit {number(limit)}"
        found.append((claim, "BUG" if fastest > limit else "ok"))
    claim = f"MFU of 04_amp/train.py, llama-124m bf16 --compile, is at least {MFU_TARGET:.0%}"
    if ours_median is None or limit is None:
        found.append((claim, "not measured"))
    else:
        found.append((f"{claim}: {ours_median / limit:.1%}", "met" if ours_median / limit >= MFU_TARGET else "missed"))
    claim = "04_amp/train.py is faster than transformers' Trainer"
    if ours_median is None or trainer is None or trainer["median"] is None:
        found.append((claim, "not measured"))
    else:
        ratio = ours_median / trainer["median"]
        found.append((f"{claim}: {ratio:.3f} of its tokens/s", "met" if ratio > 1 else "missed"))
    return found


def summarize(measured: dict, results: dict, failed: dict, batch_size: int) -> dict:
    """Every figure of the report, from the raw measurements."""
    name = measured["about"]["gpu"]
    with torch.device("meta"):
        per_token = model.flops_per_token(model.Transformer(model.SIZES["llama-124m"]), SEQ_LEN)
    flops, bandwidth = hardware.peak_flops(name, "bf16"), hardware.memory_bandwidth(name)
    limit = flops and flops / per_token
    training = {}
    for kind, runs in results.items():
        windows = spread([window for run in runs for window in run["windows"]])
        whole = spread([run["tokens_per_second"] for run in runs])
        training[kind] = {
            "tokens_per_second": whole,
            "windows": windows,
            "mfu": {key: whole[key] / limit if limit and whole[key] else None for key in ("median", "min", "max")},
            "peak_memory_bytes": max((run["peak_memory_bytes"] for run in runs), default=None),
            "last_loss": runs[-1]["last_loss"] if runs else None,
            "failed": failed.get(kind),
        }
    figures = {
        "batch_size": batch_size,
        "seq_len": SEQ_LEN,
        "steps": STEPS,
        "flops_per_token": per_token,
        "peaks": {"matmul": flops, "copy": bandwidth},
        "tokens_per_second_limit": limit,
        "ceilings": {kind: spread(measured[kind]) for kind in ("matmul", "copy")},
        "training": training,
    }
    return {**figures, "verdicts": [{"claim": claim, "verdict": verdict} for claim, verdict in verdicts(figures)]}


def write_up(about: dict, figures: dict, skipped: list[str], flags: dict[str, list[str]]) -> str:
    """The report as Markdown."""
    rows = [["ceiling", "n", "median", "min", "max", "peak", "share of peak"]]
    for kind, title, unit, scale in (
        ("matmul", "bf16 matrix product, 8192 cubed, random data", "TFLOP/s", 1e12),
        ("copy", "copy of 2 GiB, bytes read and written", "GB/s", 1e9),
    ):
        c, peak = figures["ceilings"][kind], figures["peaks"][kind]
        cells = [number(c[key] / scale) for key in ("median", "min", "max")]
        share = number(c["median"] / peak, ".1%") if peak else "n/a"
        rows.append([f"{title}, {unit}", str(c["n"]), *cells, number(peak and peak / scale), share])
    training = [["training", "runs", "median tokens/s", "min", "max", "windows", "min", "max", "MFU", "peak GiB"]]
    for kind, t in figures["training"].items():
        if not t["tokens_per_second"]["n"]:
            training.append([TITLES[kind], "0", *["n/a"] * 8])
            continue
        whole, windows, memory = t["tokens_per_second"], t["windows"], t["peak_memory_bytes"]
        training.append(
            [
                *(TITLES[kind], str(whole["n"]), *(number(whole[key]) for key in ("median", "min", "max"))),
                *(str(windows["n"]), number(windows["min"]), number(windows["max"])),
                *(number(t["mfu"]["median"], ".1%"), number(memory and memory / 2**30, ".1f")),
            ]
        )
    notes = [f"- not run: {line}" for line in skipped]
    notes += [f"- FAILED: {TITLES[kind]}: {t['failed']}" for kind, t in figures["training"].items() if t["failed"]]
    return "\n\n".join(
        [
            f"# Measured on {about['gpu']}",
            facts(about),
            table(rows),
            f"llama-124m, bf16, {figures['batch_size']} sequences of {SEQ_LEN} tokens per step, {STEPS} steps a run, "
            f"the first {WARMUP_STEPS} not timed. A run's figure is its tokens over the wall time of all its timed "
            f"steps; a window is {LOG_EVERY} steps. {figures['flops_per_token']:,} FLOP per token, recomputation not "
            f"counted (the published count for GPT-2 124M at this length is 855,166,464): at the peak that is "
            f"{number(figures['tokens_per_second_limit'])} tokens/s, and a speed above it is a bug of the timing.",
            table(training),
            *(["\n".join(notes)] if notes else []),
            "\n".join(f"- **{v['verdict']}**: {v['claim']}" for v in figures["verdicts"]),
            "```\n" + "\n".join(shown(kind, flags[kind]) for kind in figures["training"]) + "\n```",
        ]
    )


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--minutes", type=cli.positive, default=4.5, help="no round is started that would not end in this time")
    add("--batch-size", type=cli.positive_int, help="sequences per step (default: 8, 16 or 32 by the GPU's memory)")
    add("--ceilings", type=cli.writable_file, metavar="PATH", help="only measure the ceilings, and write them here")
    args = parser.parse_args()
    deadline = time.monotonic() + args.minutes * 60
    if not torch.cuda.is_available():
        raise runtime.UserError(f"no GPU to measure: torch {torch.__version__} sees none, look at the driver")
    if args.ceilings:
        return ceilings(args.ceilings)

    with tempfile.TemporaryDirectory(prefix="gpu-report-") as folder:
        # one cache: the first round of each side compiles, the later ones load what it compiled
        env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor", "TOKENIZERS_PARALLELISM": "false"}
        env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]  # one, for all sides
        file = Path(folder, "ceilings.json")
        try:
            said = start([sys.executable, __file__, "--ceilings", str(file)], env, 120)
        except RuntimeError as error:
            raise runtime.UserError(f"the ceilings could not be measured: {error}") from None
        print(said, end="")
        measured = json.loads(file.read_text())
        about = {
            **measured["about"],
            **cpu(),
            **versions("transformers", "accelerate"),
            "date": date.today().isoformat(),
        }
        about["command"] = f"python benchmarks/gpu_report.py {' '.join(sys.argv[1:])}".strip()
        print(facts(about), flush=True)

        gib = about["memory_bytes"] / 2**30
        batch_size = args.batch_size or (32 if gib > 70 else 16 if gib > 35 else 8)
        flags, skipped = commands(batch_size), []
        if missing := [name for name in ("transformers", "accelerate") if about[name] is None]:
            skipped.append(f"{TITLES['trainer']}: {' and '.join(missing)} not installed")
            print(f"skipped: {skipped[0]}", flush=True)
            del flags["trainer"]
        results, failed = measure(flags, env, deadline - CHAPTERS_SHARE * args.minutes * 60)
        chapters = run_chapters(env, deadline)

    figures = summarize(measured, results, failed, batch_size)
    skipped += [f"{TITLES[kind]}: no time left" for kind in flags if not results[kind] and kind not in failed]
    text = write_up(about, figures, skipped, flags)
    for chapter in chapters:
        text += f"\n\n## `{chapter['command']}`\n\n"
        text += f"```\n{chapter['output'].rstrip()}\n```" if chapter["output"] else f"FAILED: {chapter['failed']}"
    result = {"about": about, **figures, "not_run": skipped, "chapters": chapters, "raw": measured}
    written = write_results(about["gpu"], "", result, text)
    print(f"\n{text}\n\nwritten: {written.relative_to(REPO)} and .json")
    bugs = [v["claim"] for v in figures["verdicts"] if v["verdict"] == "BUG"]
    return 1 if bugs or not results["ours"] else 0


if __name__ == "__main__":
    exits.run(main)
