"""Time the variants of one thing in one process: which is faster on this GPU, and by how much?

    laptop    python benchmarks/ab.py
    one GPU   python benchmarks/ab.py --case projections --model llama-1b
    one GPU   python benchmarks/ab.py --case micro_batch --model llama-124m

    case          variants, the baseline first
    projections   q, k, v and gate, up as separate matmuls, or merged into one
    loss          the loss compiled with the model, the eager loss, the chunked loss of 07
    attention     torch's choice in training: flash attention, or cuDNN's
    context       a context rank's attention: two causal calls (flash), or a mask (cuDNN's)
    prefetch      FSDP's own prefetch of the next block, or one that names the block
    moments       AdamW's moments in fp32 (torch's fused kernel), or in bf16 (a compiled update)
    micro_batch   the global batch at once, or in two or four micro-batches
    int4          torch's kernels for int4 and int8, or that of 09_inference/quantized.py

Each variant starts from the same weights and gets the same tokens. Its first results are compared
with those of the baseline. The variants run one after another, because together they do not fit;
the baseline runs again at the end. If its two runs differ as much as the variants do, the card has
changed, and the verdict is "equal within noise". Look for: the verdict, and the peak of memory.
"""

import gc
import statistics
import time
from collections.abc import Callable

import _ab
import _int4
import torch
from _measure import verdict
from torch import Tensor

from common import cli, exits, lesson, measure, runtime
from lm import shapes

CHECKED_STEPS = 3  # whose results are compared; the first of them compiles
WARM_UP_STEPS = 2
STEPS_PER_WINDOW = 5
CASES = {
    "projections": _ab.projections,
    "loss": _ab.loss,
    "attention": _ab.attention,
    "context": _ab.context,
    "prefetch": _ab.prefetch,
    "moments": _ab.moments,
    "micro_batch": _ab.micro_batch,
}
# model, sequence length and sequences per step, if --model is not given or has no entry here
SIZES = {
    "llama-124m": (1024, 64),
    "llama-1b": (4096, 4),
    "nano": (64, 8),
}


def measure_variant(
    prepare: Callable, device: torch.device, windows: int
) -> tuple[dict, list[Tensor]]:
    """Return a row of figures, and the results of the first steps. `prepare` returns the step."""
    free_memory(device)
    start = time.perf_counter()
    step = prepare()
    results = []
    for _ in range(CHECKED_STEPS):
        result = step().detach()
        results.append(result.float().cpu())
    compile_seconds = time.perf_counter() - start
    for _ in range(WARM_UP_STEPS):
        step()

    seconds = []
    for _ in range(windows):
        runtime.synchronize(device)
        start = time.perf_counter()
        for _ in range(STEPS_PER_WINDOW):
            step()
        runtime.synchronize(device)
        seconds.append((time.perf_counter() - start) / STEPS_PER_WINDOW)
    row = {
        "n": windows,
        "seconds": statistics.median(seconds),
        "min_seconds": min(seconds),
        "max_seconds": max(seconds),
        "first_steps_seconds": compile_seconds,
        "peak_bytes": None,
    }
    if device.type == "cuda":
        row["peak_bytes"] = torch.cuda.max_memory_allocated(device)
    return row, results


def free_memory(device: torch.device) -> None:
    """Forget the last variant: its memory, and what torch.compile remembers of its functions."""
    torch._dynamo.reset()
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


def compare(case: str, setting: _ab.Setting, windows: int) -> tuple[list[dict], list[str]]:
    """Run the variants of a case and the baseline again. Return rows, and what was checked."""
    variants, tolerance = CASES[case](setting)
    baseline = next(iter(variants))
    runs = [*variants.items(), (f"{baseline}, again", variants[baseline])]
    rows = []
    checked = []
    expected = None
    for name, prepare in runs:
        row, results = measure_variant(prepare, setting.device, windows)
        rows.append({"case": case, "variant": name, **row})
        figures = f"{1e3 * row['seconds']:.2f} ms a step"
        print(f"{case}: {name}: {figures}", flush=True)  # a run that is killed has shown it
        if expected is None:
            expected = results
            continue
        error = measure.relative_error(results, expected)
        assert error <= tolerance, f"{case}: {name} differs from {baseline} by {error:.0e}"
        line = f"the first {CHECKED_STEPS} results differ from the baseline's by {error:.0e}"
        checked.append(f"{name}: {line}")

    both = (rows[0], rows[-1])
    baseline_seconds = statistics.mean(row["seconds"] for row in both)
    fastest = min(row["min_seconds"] for row in both)
    slowest = max(row["max_seconds"] for row in both)
    for row in rows:
        row["time_ratio"] = row["seconds"] / baseline_seconds
        speeds = {
            "n": windows,
            "min": fastest / row["max_seconds"],
            "max": slowest / row["min_seconds"],
        }
        row["verdict"] = verdict(speeds)
    return rows, checked


def parse_args():
    """Parse the flags, and fill in what depends on the device and the model."""
    parser = cli.Parser(__doc__)
    add = parser.add_argument
    add("--case", choices=("all", *CASES, "int4"), default="all")
    add("--model", help="default: nano, on a GPU llama-124m")
    add("--dtype", choices=("fp32", "bf16"), help="of matmuls (default: fp32, on a GPU bf16)")
    add("--seq-len", type=cli.positive_int, help="default: the model's")
    add("--batch-size", type=cli.positive_int, help="sequences per step (default: the model's)")
    add("--layers", type=cli.positive_int, help="default: the model's")
    add("--rounds", type=cli.positive_int, default=5, help="windows of five steps per variant")
    add("--compile", action="store_true", default=None, help="default: on a GPU")
    add("--no-compile", dest="compile", action="store_false")
    cli.add_device_and_json(parser)
    args = parser.parse_args()
    device = lesson.start(args.device)

    on_gpu = device.type == "cuda"
    if args.model is None:
        args.model = "llama-124m" if on_gpu else "nano"
    if args.dtype is None:
        args.dtype = "bf16" if on_gpu else "fp32"
    if args.compile is None:
        args.compile = on_gpu
    recipe = shapes.recipe(args.model)
    seq_len, batch_size = SIZES.get(args.model, (recipe.seq_len, 4))
    args.seq_len = args.seq_len or seq_len
    args.batch_size = args.batch_size or batch_size
    if args.case in ("all", "micro_batch") and args.batch_size % 4:
        raise exits.UserError(f"--batch-size {args.batch_size}: a multiple of 4, for micro_batch")
    return args, device


def main() -> int:
    args, device = parse_args()
    columns = {"case": "case", "variant": "variant"}
    if args.case == "int4":
        args.dtype = "bf16"  # of the activations
        rows, checked = _int4.compare(args.model, device, args.rounds)
        columns = {"case": "case", "version": "variant"}
        columns |= {"time_us": "µs", "bandwidth_share": "of memory bandwidth"}
    else:
        setting = _ab.make_setting(args, device)
        names = [args.case]
        if args.case == "all":
            names = list(CASES)
        rows = []
        checked = []
        for name in names:
            of_case, lines = compare(name, setting, args.rounds)
            rows += of_case
            checked += [f"{name}: {line}" for line in lines]
        columns |= {"seconds": "a step", "peak_bytes": "peak", "first_steps_seconds": "start"}
    columns |= {"time_ratio": "time", "verdict": "verdict"}
    lesson.end(rows, columns=columns, checked=checked, args=args, device=device)
    return 0


if __name__ == "__main__":
    exits.run(main)
