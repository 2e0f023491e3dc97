"""Our decode beside transformers' `generate`: tokens per second of the same model on the same machine, batch 1.

Each side runs in a process of its own, with as many threads, after a call that is thrown away; rounds alternate, so
that a machine that slows down slows both. The clock runs from the first new token to the last: prefill is not in it.
On a GPU that of `generate` starts at the sixth, for it records its CUDA graph anew in each call.
A token needs every weight once, so GB/s are tokens/s times the bytes of the weights, and their limit is the bandwidth
with which the same process has just read as many bytes. On a CPU `generate` has its dynamic cache, which it takes by
itself; on a GPU the static one, with which it compiles. In fp32 both must give the same tokens.

    laptop    python benchmarks/vs_generate.py
    one case  python benchmarks/vs_generate.py --models nano --rounds 7
    one GPU   python benchmarks/vs_generate.py --models llama-1b --device cuda --max-new-tokens 256

Look for: the ratios, taken round by round, their spread, and the targets. Next: benchmarks/inference_gpu.py.
"""

import argparse
import os
import sys
from datetime import date
from pathlib import Path

import torch
from _generate import CLOCK_STARTS_AT, GENERATE, command_of, run_side
from _shared import REPO, Failed, cpu, end_children_at_sigterm, facts, number, spread_cells, versions, write_results

from old import cli, exits, runtime, shapes
from old.hardware import device_name
from old.report import spread, table

REAL_MODEL = "models/smollm2-135m"
Ratio = tuple[str, str, float]  # a side, the side it is held against, and the target
# the type that `generate` and our script compute in, our sides by their flags, and what is claimed of them
PLAIN = {"eager": [], "compiled": ["--compile"]}
QUANTIZED = {"int8 compiled": ["--weights", "int8", "--compile"], "int4 compiled": ["--weights", "int4", "--compile"]}
NEVER_SLOWER = ("eager", GENERATE, 1.0)
PLANS: dict[str, tuple[str, dict[str, list[str]], list[Ratio]]] = {
    "nano": ("fp32", PLAIN, [NEVER_SLOWER, ("compiled", GENERATE, 1.7)]),
    "llama-124m": ("bf16", PLAIN, [NEVER_SLOWER, ("compiled", GENERATE, 1.3)]),
    REAL_MODEL: (
        "bf16",
        PLAIN | QUANTIZED,
        [
            NEVER_SLOWER,
            ("compiled", GENERATE, 1.0),
            ("int8 compiled", "compiled", 1.35),
            ("int4 compiled", "compiled", 2.0),
        ],
    ),
}
OTHERS = ("bf16", PLAIN, [NEVER_SLOWER, ("compiled", GENERATE, 1.0)])  # for a model without a target of its own


def sides_of(args: argparse.Namespace, name: str) -> dict[str, list[str]]:
    """The flags of each side, `generate` first."""
    dtype, ours, _ = PLANS.get(name, OTHERS)
    shared = ["--model", name, "--dtype", dtype, "--device", args.device]
    shared += ["--max-new-tokens", str(args.max_new_tokens)]
    cache = "static" if args.device == "cuda" else "dynamic"
    sides = {GENERATE: [*shared, "--cache", cache]}
    for side, flags in ours.items():
        weights = [] if "--weights" in flags else ["--weights", dtype]
        sides[side] = [*shared, *weights, *flags]
    return sides


def compare(args: argparse.Namespace, name: str, env: dict[str, str]) -> dict:
    """Alternate rounds of all sides on one model; the first round of each is thrown away."""
    sides = sides_of(args, name)
    runs: dict[str, list[dict]] = {side: [] for side in sides}
    for round_ in range(args.rounds + 1):
        for side, flags in sides.items():
            found = run_side(side, flags, env, args.timeout)
            speed = number(found["decode_tokens_per_second"], ".1f")
            print(f"{name} {f'round {round_}' if round_ else 'warm-up':<8} {side:<14} {speed} tokens/s", flush=True)
            if round_:
                runs[side].append(found)
    return summarize(name, sides, runs)


def summarize(name: str, sides: dict[str, list[str]], runs: dict[str, list[dict]]) -> dict:
    """Spreads of each side, and the ratios round by round: neighbours in time had the same machine."""
    dtype, _, claims = PLANS.get(name, OTHERS)
    if dtype == "fp32":
        for side, own in runs.items():
            same = all(run["token_ids"] == runs[GENERATE][0]["token_ids"] for run in own)
            assert same, f"{name}, {side}: not the tokens of generate"
    figures = {}
    for side, own in runs.items():
        figures[side] = {
            "tokens_per_second": spread([run["decode_tokens_per_second"] for run in own]),
            "weight_bytes_read_per_second": spread([run["weight_bytes_read_per_second"] for run in own]),
            "bandwidth_share": spread([run["bandwidth_share"] for run in own if run["bandwidth_share"]]),
            "read_bandwidth_bytes_per_second": [run["read_bandwidth_bytes_per_second"] for run in own],
            "command": command_of(side, sides[side]),
        }
    ratios = []
    for side, against, target in claims:
        pairs = zip(runs[side], runs[against], strict=True)
        ratio = spread([a["decode_tokens_per_second"] / b["decode_tokens_per_second"] for a, b in pairs])
        verdict = "met" if ratio["median"] >= target else "missed"
        ratios.append({"side": side, "against": against, "target": target, "ratio": ratio, "verdict": verdict})
    return {"model": name, "dtype": dtype, "sides": figures, "ratios": ratios}


def write_up(about: dict, comparisons: list[dict]) -> tuple[str, str]:
    """The tables with their verdicts, and the whole report, as Markdown."""
    rows = [["model", "side", "n", "tokens/s", "min", "max", "GB/s", "share of read bandwidth", "min", "max"]]
    ratios = [["model", "side", "against", "target", "n", "ratio", "min", "max", "verdict"]]
    commands = []
    for comparison in comparisons:
        model = f"{comparison['model']}, {comparison['dtype']}"
        for side, own in comparison["sides"].items():
            bytes_per_second = own["weight_bytes_read_per_second"]["median"]
            share = spread_cells(own["bandwidth_share"], ".0%")[1:]
            speeds = spread_cells(own["tokens_per_second"], ".1f")
            rows.append([model, side, *speeds, number(bytes_per_second and bytes_per_second / 1e9, ".1f"), *share])
            commands.append(own["command"])
        for found in comparison["ratios"]:
            cells = [found["side"], found["against"], f"{found['target']:g}", *spread_cells(found["ratio"], ".2f")]
            ratios.append([model, *cells, found["verdict"]])
    text = f"{table(rows)}\n\n{table(ratios)}"
    how = (
        "n processes of each side, alternating, after one of each that was thrown away. Each generates twice, and the "
        "second time counts, from the first new token to the last (`generate` with a static cache: from the sixth). "
        "GB/s: bytes of the weights times tokens/s. Read bandwidth: a buffer as large as the weights, summed up in the "
        "same process."
    )
    shell = "\n".join(commands)
    title = "# Decode beside transformers' generate, batch 1"
    return text, f"{title}\n\n{facts(about)}\n\n{text}\n\n{how}\n\n```\n{shell}\n```\n"


def main() -> int:
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--models", default=",".join(PLANS), help="named sizes with random weights, or folders, with commas between")
    add("--max-new-tokens", type=cli.positive_int, default=64)
    add("--rounds", type=cli.positive_int, default=5, help="timed runs of each side, after one thrown away")
    add("--threads", type=cli.positive_int, default=cpu()["cores"], help="CPU threads of each side")
    add("--device", choices=("auto", "cuda", "cpu"), default="auto")
    add("--timeout", type=cli.positive_int, default=900, help="seconds that one run may take")
    args = parser.parse_args()
    if args.max_new_tokens <= (least := CLOCK_STARTS_AT["static"]):
        raise exits.UserError(f"--max-new-tokens {args.max_new_tokens} leaves nothing to time: at least {least + 1}")
    end_children_at_sigterm()
    installed = versions("transformers")
    if installed["transformers"] is None:
        raise exits.UserError("the comparison needs transformers: pip install transformers")
    names = args.models.split(",")
    if args.models == parser.get_default("models") and not Path(REPO, REAL_MODEL).exists():
        names.remove(REAL_MODEL)
        print(f"skipped: {REAL_MODEL} is not there (make model)")
    for name in names:
        shapes.read_config(name)

    device = runtime.pick_device(args.device)
    args.device = device.type
    env = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "TOKENIZERS_PARALLELISM": "false"}
    hardware = cpu()["cpu"] if device.type == "cpu" else device_name(device)
    about = {
        "device": hardware,
        **cpu(),
        "threads": args.threads,
        **installed,
        "CUDA": torch.version.cuda,
        "date": date.today().isoformat(),
        "command": f"python benchmarks/vs_generate.py {' '.join(sys.argv[1:])}".strip(),
        "new tokens": args.max_new_tokens,
    }
    print(facts(about), flush=True)
    comparisons = []
    for name in names:
        try:
            comparisons.append(compare(args, name, env))
        except Failed as error:
            raise exits.UserError(f"a run failed: {error}") from None
        text, report = write_up(about, comparisons)  # anew after each model: what a kill leaves is what was measured
        kind = "-vs-generate" if len(names) > 1 else f"-vs-generate-{Path(names[0]).name}"
        file = write_results(hardware, kind, {**about, "comparisons": comparisons}, report)
    print(f"\n{text}\n\nwritten: {file.relative_to(REPO)} and .json")
    return 0


if __name__ == "__main__":
    exits.run(main)
