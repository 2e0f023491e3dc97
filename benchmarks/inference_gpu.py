"""Decode on one GPU against its memory's bandwidth: llama-8b in bf16, llama-70b in int8 and int4, batch 1.

    python benchmarks/inference_gpu.py --minutes 9                      all of it, or what fits into nine
    python benchmarks/inference_gpu.py --only llama-8b --minutes 4      as `make gpu` does
    python benchmarks/inference_gpu.py --only "llama-70b int4"

07_memory_tricks/quantized_inference.py with random weights, compiled, and for llama-8b transformers' `generate` with a
static cache, which it compiles, each in a process of its own. They run in turns; one starts if there is time for all
of it, and what had none is named. Compiled kernels are kept, so that a second call goes on where the first ended. The
clock runs from the first new token to the last of a second call, for `generate` from the sixth: it records its CUDA
graph anew. A step reads every weight once, so the roof is the data sheet's bandwidth over the bytes of the weights. A
model that the GPU has no room for is left out and named.

The results in benchmarks/results/ are written anew after every run: what a kill leaves is what was measured. No GPU:
exit code 2. Look for: the share of the roof and the verdicts; a share above 100 % is a bug of the timing.
"""

import argparse
import os
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import NamedTuple

import torch
from _generate import CLOCK_STARTS_AT, GENERATE, command_of, run_side
from _shared import (
    REPO,
    Failed,
    OutOfTime,
    cpu,
    end_children_at_sigterm,
    facts,
    number,
    spread_cells,
    versions,
    write_results,
)

from old import cli, exits, hardware, nvml, report, shapes
from old.report import spread, table


class Case(NamedTuple):
    model: str
    weights: str  # GENERATE: transformers' model in bf16
    share_of_roof: float | None  # to be reached; None for transformers
    first_guess_seconds: float  # start-up, loading, compiling with nothing kept, and generating twice

    @property
    def name(self) -> str:
        return f"{self.model} {self.weights}"


BITS = {"bf16": 16, "int8": 8, "int4": 5, GENERATE: 16}  # int4: with a scale and a zero for every 32
ABOVE_GENERATE = "llama-8b bf16"
CASES = [  # the most telling first; none of the guesses has been measured
    Case("llama-8b", "bf16", 0.70, 100),
    Case("llama-70b", "int8", 0.70, 260),
    Case("llama-70b", "int4", 0.55, 260),
    Case("llama-8b", GENERATE, None, 120),
]


def fits(case: Case, memory_bytes: int) -> bool:
    """Whether the weights leave a tenth of the GPU's memory to everything else."""
    return shapes.parameter_count(shapes.SIZES[case.model]) * BITS[case.weights] / 8 < 0.9 * memory_bytes


def flags_of(case: Case, new_tokens: int) -> list[str]:
    flags = ["--model", case.model, "--dtype", "bf16", "--device", "cuda", "--max-new-tokens", str(new_tokens)]
    if case.weights == GENERATE:
        return [*flags, "--cache", "static"]
    return [*flags, "--weights", case.weights, "--compile"]


def measure(about: dict, chosen: list[Case], new_tokens: int, env: dict[str, str], deadline: float) -> dict[str, dict]:
    """All cases in turns until the time is over; by name their runs, or why there are none."""
    found = {case.name: {"runs": [], "failed": None, "not_run": None} for case in chosen}
    takes = {case.name: case.first_guess_seconds for case in chosen}
    more = True
    while more:
        more = False
        for case in chosen:
            own = found[case.name]
            left = deadline - time.monotonic()
            if own["failed"]:
                continue
            if left < takes[case.name]:
                if not own["runs"] and not own["not_run"]:
                    own["not_run"] = f"no time left: {max(left, 0):.0f} s of about {takes[case.name]:.0f} s"
                continue
            began = time.monotonic()
            try:
                run = run_side(case.weights, flags_of(case, new_tokens), env, left)
            except OutOfTime as error:  # a wrong guess, no failure
                if not own["runs"]:
                    own["not_run"] = f"no time left: {error}"
                print(f"{case.name}: {error}\n{error.output[-3000:]}", flush=True)
            except Failed as error:
                own["failed"] = str(error)
                print(f"{case.name}: FAILED: {error}\n{error.output[-3000:]}", flush=True)
            else:
                own["runs"].append(run)
                takes[case.name] = time.monotonic() - began
                more = True
                speed = number(run["decode_tokens_per_second"], ".1f")
                print(f"{case.name:<16} {speed} tokens/s  ({takes[case.name]:.0f} s in all)", flush=True)
            save(about, chosen, found, new_tokens)
    return found


def summarize(chosen: list[Case], found: dict[str, dict]) -> dict:
    """Spreads and verdicts from the runs so far."""
    figures, verdicts = {}, []
    for case in chosen:
        runs = found[case.name]["runs"]
        share = spread([run["bandwidth_share"] for run in runs if run["bandwidth_share"]])
        figures[case.name] = {
            "tokens_per_second": spread([run["decode_tokens_per_second"] for run in runs]),
            "weight_bytes_read_per_second": spread([run["weight_bytes_read_per_second"] for run in runs]),
            "bandwidth_share": share,
            "peak_memory_bytes": max((run["peak_memory_bytes"] for run in runs), default=None),
            "failed": found[case.name]["failed"],
            "not_run": found[case.name]["not_run"],
        }
        if share["n"] and share["max"] > 1:
            verdicts.append({"claim": f"{case.name}: below the roof", "measured": share["max"], "verdict": "BUG"})
        if case.share_of_roof and share["n"]:
            verdict = "met" if share["median"] >= case.share_of_roof else "missed"
            claim = f"{case.name}: at least {case.share_of_roof:.0%} of the bandwidth roof"
            verdicts.append({"claim": claim, "measured": share["median"], "verdict": verdict})
    speeds = [figures.get(name, {}).get("tokens_per_second") for name in (ABOVE_GENERATE, f"llama-8b {GENERATE}")]
    if all(speed and speed["n"] for speed in speeds):
        ratio = speeds[0]["median"] / speeds[1]["median"]
        claim = f"{ABOVE_GENERATE}: faster than transformers' generate, as a ratio"
        verdicts.append({"claim": claim, "measured": ratio, "verdict": "met" if ratio > 1 else "missed"})
    return {"cases": figures, "verdicts": verdicts}


def save(about: dict, chosen: list[Case], found: dict[str, dict], new_tokens: int) -> tuple[Path, str, dict]:
    """Write the report as far as it has come; the file, its text and its figures."""
    figures = summarize(chosen, found)
    rows = [["case", "n", "tokens/s", "min", "max", "GB/s", "share of roof", "min", "max", "peak GiB"]]
    for name, own in figures["cases"].items():
        bytes_per_second, memory = own["weight_bytes_read_per_second"]["median"], own["peak_memory_bytes"]
        cells = spread_cells(own["tokens_per_second"], ".1f")
        share = spread_cells(own["bandwidth_share"], ".1%")[1:]
        gb = number(bytes_per_second and bytes_per_second / 1e9)
        rows.append([name, *cells, gb, *share, number(memory and memory / 2**30, ".1f")])
    lines = [f"- **{v['verdict']}**: {v['claim']}: {v['measured']:.3f}" for v in figures["verdicts"]]
    lines += [f"- FAILED: {name}: {own['failed']}" for name, own in figures["cases"].items() if own["failed"]]
    lines += [f"- not run: {name}: {own['not_run']}" for name, own in figures["cases"].items() if own["not_run"]]
    text = table(rows) + "\n\n" + "\n".join(lines)
    commands = "\n".join(command_of(case.weights, flags_of(case, new_tokens)) for case in chosen)
    whole = f"# Decode on one GPU, batch 1\n\n{facts(about)}\n\n{text}\n\n```\n{commands}\n```\n"
    result = {**about, **figures, "raw": found}
    return write_results(about["gpu"], "-inference", result, whole), text, figures


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--minutes", type=cli.positive, default=10, help="all of it ends within this time")
    add("--only", metavar="WORDS", help="the cases whose names hold these")
    add("--max-new-tokens", type=cli.positive_int, default=200)
    add("--json", type=cli.writable_file, metavar="PATH", help="write the results as one JSON object, too")
    args = parser.parse_args()
    deadline = time.monotonic() + args.minutes * 60
    end_children_at_sigterm()
    if not torch.cuda.is_available():
        raise exits.UserError(f"no GPU to measure: torch {torch.__version__} sees none, look at the driver")
    if args.max_new_tokens <= (least := CLOCK_STARTS_AT["static"]):
        raise exits.UserError(f"--max-new-tokens {args.max_new_tokens} leaves nothing to time: at least {least + 1}")

    about = describe(args)
    chosen = [case for case in CASES if args.only is None or args.only in case.name]
    if not chosen:
        raise exits.UserError(f"--only {args.only}: there are {', '.join(case.name for case in CASES)}")
    if without := [case.name for case in chosen if not fits(case, about["memory_bytes"])]:
        about["left out, too large for this GPU"] = ", ".join(without)
        chosen = [case for case in chosen if case.name not in without]
    if about["transformers"] is None:
        about["left out, transformers is missing"] = GENERATE
        chosen = [case for case in chosen if case.weights != GENERATE]
    kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR") or f"{tempfile.gettempdir()}/decode-kernels-{os.getuid()}"
    about["compiled kernels are kept in"] = kept  # found there already or not: it decides how long a case takes
    print(facts(about), flush=True)
    env = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "TORCHINDUCTOR_CACHE_DIR": kept}
    env["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
    found = measure(about, chosen, args.max_new_tokens, env, deadline)
    written, text, figures = save(about, chosen, found, args.max_new_tokens)
    report.write_json({"device": about["gpu"], **figures}, args.json)
    print(f"\n{text}\n\nwritten: {written.relative_to(REPO)} and .json")
    bugs = [v for v in figures["verdicts"] if v["verdict"] == "BUG"]
    broken = [case.name for case in chosen if case.weights != GENERATE and found[case.name]["failed"]]
    return 1 if bugs or broken else 0


def describe(args: argparse.Namespace) -> dict:
    """The GPU as torch and, if it answers, NVML tell it."""
    device = torch.device("cuda", 0)
    told = nvml.gpu_of(device)
    name = hardware.device_name(device)
    return {
        "gpu": name,
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
        "bandwidth by the data sheet, bytes per second": hardware.memory_bandwidth(name),
        "driver": told.get("driver"),
        "sm_clock_max_mhz": told.get("sm_clock_max_mhz"),
        "power_limit_watts": told.get("power_limit_watts"),
        **cpu(),
        **versions("transformers"),
        "CUDA": torch.version.cuda,
        "date": date.today().isoformat(),
        "new tokens": args.max_new_tokens,
        "command": f"python benchmarks/inference_gpu.py {' '.join(sys.argv[1:])}".strip(),
    }


if __name__ == "__main__":
    exits.run(main)
