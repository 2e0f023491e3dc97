"""One model, one budget, every number type: what a narrower one gives, and what it takes.

The same weights read the same batches in fp32, tf32, bf16, fp16 with and without a scaler, and with fp8 linear layers:
in whatever this device multiplies in hardware (_compare_dtypes.py shows how). fp16 runs anyway, emulated if need be;
speed is given for native types only. Then the gradients show what fp16 loses, and four ways to break training in fp16
are provoked and cured (_compare_fp16_limits.py).

    laptop    python 04_amp/compare.py
    one GPU   python 04_amp/compare.py --model llama-124m --seq-len 1024 --batch-size 16 --steps 60
    cluster   one process is all it uses: compare on one GPU of the kind that the job will get

Look for: activations and losses by type; how many gradients fp16 turns into zero, and the steps that are skipped to
save them. Before: train.py. Next: 05_ddp/train.py, with the --dtype chosen here.
"""

import argparse
import copy
import math
import statistics
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _compare_dtypes import NAMES, Batch, backward, choose, is_native, native_types, saved_bytes, use_fp8
from _compare_fp16_limits import plot, show_limits

from common import cli, data, exits, hardware, model, report, runtime
from common.exits import UserError

ROUNDS = 6  # the types take turns, so that a disturbance hits all alike; the first round warms up
LR, WARMUP_STEPS, CLIP_NORM, SCALE = 2e-3, 10, 1.0, 65536.0  # the scale that GradScaler starts with
FIRST_LOSS_TOLERANCE = {"fp32": 0.0, "tf32": 1e-3, "bf16": 2e-3, "fp16": 1e-3, "fp16-unscaled": 1e-3, "fp8": 1e-2}


def new_run(name: str, net: nn.Module, batch: Batch) -> SimpleNamespace:
    """A copy of the model with all that it takes to train it in type `name`."""
    net = copy.deepcopy(net)
    if name == "fp8":
        use_fp8(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    scaler = GradScaler(batch[0].device.type, init_scale=SCALE, enabled=name == "fp16")
    parts = {"net": net, "optimizer": optimizer, "scaler": scaler, "saved": saved_bytes(net, batch, name)}
    return SimpleNamespace(name=name, **parts, losses=[], seconds=[], step_bytes=None)


def train(run: SimpleNamespace, batches: list[Batch]) -> None:
    for batch in batches:
        run.optimizer.param_groups[0]["lr"] = LR * min(1.0, (len(run.losses) + 1) / WARMUP_STEPS)
        run.losses.append(backward(run.net, batch, run.name, run.scaler))  # left on the device
        run.scaler.unscale_(run.optimizer)
        clip_grad_norm_(run.net.parameters(), CLIP_NORM)
        run.scaler.step(run.optimizer)  # nothing if a gradient overflowed: the fused optimizer reads that on the device
        run.scaler.update()
        run.optimizer.zero_grad(set_to_none=True)


def timed_round(run: SimpleNamespace, batches: list[Batch], device: torch.device) -> None:
    """Train and note the seconds; on CUDA also by how much a step exceeds what all runs keep on the device."""
    if device.type != "cuda":
        start = time.perf_counter()
        train(run, batches)
        run.losses[-1].item()  # mps works behind our back
        run.seconds.append(time.perf_counter() - start)
        return
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    train(run, batches)
    end.record()
    end.synchronize()
    run.seconds.append(start.elapsed_time(end) / 1e3)
    run.step_bytes = torch.cuda.max_memory_allocated(device) - before  # of the last round, when all is allocated


def skipped_steps(run: SimpleNamespace) -> int:
    """Those that the optimizer did not count. Asked at the end: asking in a step would wait for the device in fp16."""
    return len(run.losses) - int(next(iter(run.optimizer.state.values()))["step"])


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "n": len(values)}


def summarize(run: SimpleNamespace, fp32: SimpleNamespace, tokens: int) -> dict:
    """A run as --json has it; `tokens` are those of a round."""
    native = is_native(run.name, run.losses[0].device)
    losses = [loss if math.isfinite(loss) else None for loss in torch.stack(run.losses).tolist()]
    off = [abs(a - b.item()) for a, b in zip(losses, fp32.losses, strict=True) if a is not None]
    state = [t for tensors in run.optimizer.state.values() for t in tensors.values()]
    kept = sum(t.nbytes for t in (*run.net.parameters(), *state))
    speedups = [a / b for a, b in zip(fp32.seconds[1:], run.seconds[1:], strict=True)]
    return {
        "name": run.name,
        "dtype": run.name.removesuffix("-unscaled"),
        "scaler": run.scaler.is_enabled(),
        "native": native,
        "tokens_per_second": spread([tokens / seconds for seconds in run.seconds[1:]]) if native else None,
        "speedup": spread(speedups) if native else None,
        "kept_bytes": kept,
        "peak_memory_bytes": None if run.step_bytes is None else kept + run.step_bytes,
        "saved_activation_bytes": run.saved[0],
        "weight_copy_bytes": run.saved[1],
        "losses": losses,
        "largest_loss_difference": max(off, default=None),
        "skipped_steps": skipped_steps(run),
    }


def cells(row: dict) -> list[str]:
    speed, speedup, peak = row["tokens_per_second"], row["speedup"], row["peak_memory_bytes"]
    losses = row["losses"][0], row["losses"][-1], row["largest_loss_difference"]
    return [
        row["name"] + ("" if row["native"] else " (emulated)"),
        f"{speed['median']:,.0f}" if speed else "n/a",
        f"{speedup['median']:.2f} ({speedup['min']:.2f} to {speedup['max']:.2f})" if speedup else "n/a",
        f"{peak / 2**20:,.1f}" if peak else "n/a",
        f"{row['saved_activation_bytes'] / 2**20:,.1f}",
        *("NaN" if loss is None else f"{loss:.4f}" for loss in losses),
        str(row["skipped_steps"]),
    ]


HEAD = ["type", "tokens/s", "x fp32", "peak MiB", "activation MiB", "first loss", "last loss", "off fp32", "skipped"]


def checks(rows: list[dict], instabilities: list[dict]) -> list[tuple[bool, str]]:
    """What this script teaches, and whether it holds."""
    found, fp32 = [], rows[0]
    for row in rows[1:]:
        tolerance, error = FIRST_LOSS_TOLERANCE[row["name"]], abs((row["losses"][0] or 0) / fp32["losses"][0] - 1)
        share = row["saved_activation_bytes"] / fp32["saved_activation_bytes"]
        text = f"{row['name']}: first loss within {tolerance} of fp32's ({error:.0e}), {share:.0%} of its activations"
        less = row["name"] == "tf32" or share < 0.8  # tf32 is fp32 in memory
        found.append((error <= tolerance and less, text))
    text = f"every type keeps {fp32['kept_bytes']:,} bytes of weights and optimizer state: AMP does not halve these"
    found.append((len({row["kept_bytes"] for row in rows}) == 1, text))
    return found + [(entry["holds"], f"{entry['name']}: {entry['text']}") for entry in instabilities]


def main() -> int:
    started = time.perf_counter()
    parser = cli.Parser(__doc__)
    parser.add_argument("--model", default="nano", help="as in train.py")
    parser.add_argument("--dtypes", help=f"comma-separated, of {', '.join(NAMES)} (default: the native ones and fp16)")
    parser.add_argument("--steps", type=cli.positive_int, default=30, help=f"of each type, a multiple of {ROUNDS}")
    parser.add_argument("--seq-len", type=cli.positive_int, default=64)
    parser.add_argument("--batch-size", type=cli.positive_int, default=4, help="sequences per step")
    parser.add_argument("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    parser.add_argument("--seed", type=cli.seed, default=0)
    parser.add_argument("--plot", type=cli.plot_file, metavar="PNG", default="runs/compare.png", help="(%(default)s)")
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    if args.steps % ROUNDS:
        raise UserError(f"--steps {args.steps} is no multiple of {ROUNDS}: use {args.steps + -args.steps % ROUNDS}")
    device = runtime.single_device(args.device)
    runtime.seed(args.seed, False)

    corpus = data.load_corpus("stdlib", "bytes")
    net = model.build(args.model, model.load_config(args.model, corpus.vocab_size, args.seq_len)).to(device)
    order = argparse.Namespace(**vars(args), data="stdlib", global_batch_size=args.batch_size, num_workers=0)
    stream = data.train_batches(corpus.train, order, args.batch_size, 0, 0, 1, device)
    batches = [tuple(t.to(device) for t in next(stream)) for _ in range(args.steps + 1)]
    tokens = args.batch_size * args.seq_len
    names, left_out = choose(args.dtypes, net, device, tokens)
    print(f"native on {device.type}: {', '.join(sorted(native_types(device)[0]))} ({native_types(device)[1]})")
    unseen = left_out if device.type == "cuda" else {**left_out, "peak memory": "torch counts it on CUDA only"}
    print("".join(f"not here: {name} ({reason})\n" for name, reason in unseen.items()))

    runs = [new_run(name, net, batches[0]) for name in names]
    per_round = args.steps // ROUNDS
    for first in range(0, args.steps, per_round):
        for run in runs:
            timed_round(run, batches[first : first + per_round], device)
    rows = [summarize(run, runs[0], per_round * tokens) for run in runs]
    print(report.table([HEAD, *map(cells, rows)]) + "\n")

    gradients, underflow, instabilities = show_limits(runs[0].net, batches[-1], SCALE)
    plot(rows, gradients, SCALE, args.plot)
    summary = {
        **{"device": hardware.device_name(device), "world_size": 1, "model": args.model, "steps": args.steps},
        **{"parameters": gradients.numel(), "tokens": args.steps * tokens, "seconds": time.perf_counter() - started},
        **{"left_out": left_out, "runs": rows, "underflow": underflow, "instabilities": instabilities},
    }
    report.write_json(summary, args.json)
    for holds, text in checks(rows, instabilities):
        assert holds or args.model != "nano", f"does not hold: {text}"
        print(f"{'checked' if holds else 'not seen with this model'}: {text}")
    return 0


if __name__ == "__main__":
    exits.run(main)
