"""One model, one budget, every number type: what a narrower one gives, and what it takes.

The same weights read the same batches in fp32, tf32, bf16, fp16 with and without a scaler, and with fp8 linear layers:
in every type that this device multiplies in hardware. fp16 runs anyway, emulated if need be; speed is given for native
types only. Then the gradients show what fp16 loses: values under half its smallest subnormal, 2^-25 = 3.0e-8, become
zero. Four ways to break training in fp16 are provoked and cured (_compare_fp16_limits.py).

    laptop    python 04_amp/compare.py
    one GPU   python 04_amp/compare.py --model llama-124m --seq-len 1024 --batch-size 16 --steps 60
    cluster   one process is all it uses: compare on one GPU of the kind that the job will get

Look for: activations and losses by type; how many gradients fp16 turns into zero, and the steps that are skipped to
save them. Before: train.py. Next: 05_ddp/train.py, with the --dtype chosen here.
"""

import copy
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _compare_dtypes import NAMES, Batch, choose, multiplying_in, use_fp8
from _compare_fp16_limits import show_limits
from _compare_report import check, plot, print_runs, summarize

from old import cli, data, exits, hardware, model, report, runtime, shapes
from old.exits import UserError
from old.step_cost import saved_for_backward

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp16-unscaled": torch.float16, "fp8": torch.bfloat16}
INITIAL_SCALE = 65536.0  # GradScaler's own default
LR = 2e-3
WARMUP_STEPS = 10
CLIP_NORM = 1.0
ROUNDS = 6  # the types take turns, so that a disturbance hits all alike; the first round warms up


def forward_backward(net: nn.Module, batch: Batch, name: str, scaler: GradScaler) -> Tensor:
    """Mixed precision: autocast runs matrix products in the narrow type, and norms and the loss in fp32."""
    device = batch[0].device
    with multiplying_in(name, device):  # switches tf32 on or off; emulates fp16 where the device has none
        with torch.autocast(device.type, AUTOCAST.get(name), enabled=name in AUTOCAST):
            loss = net(*batch)
        scaler.scale(loss).backward()  # fp16 only: a larger loss makes larger gradients, so that few become zero
    return loss.detach()


def training_step(
    net: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler, batch: Batch, name: str
) -> Tensor:
    """One step. Weights, gradients and optimizer state are fp32 in every type; without fp16 the scaler does nothing."""
    loss = forward_backward(net, batch, name, scaler)
    scaler.unscale_(optimizer)  # true gradients again: the clipping limit is meant for those
    clip_grad_norm_(net.parameters(), CLIP_NORM)
    scaler.step(optimizer)  # a gradient that overflowed skips the step: the fused optimizer sees it on the device
    scaler.update()  # halves the scale after a skipped step, doubles it after 2,000 good ones
    optimizer.zero_grad(set_to_none=True)
    return loss


@dataclass
class Run:
    """One number type: a copy of the model, what trains it, and what was measured."""

    name: str
    net: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: GradScaler
    saved_activation_bytes: int
    weight_copy_bytes: int
    losses: list[Tensor] = field(default_factory=list)  # left on the device: reading one would wait for it
    round_seconds: list[float] = field(default_factory=list)
    step_bytes: int | None = None  # CUDA only: by how much a step exceeds what is kept between steps


def new_run(name: str, net: nn.Module, batch: Batch) -> Run:
    net = copy.deepcopy(net)
    if name == "fp8":
        use_fp8(net)
    activation_bytes, copy_bytes = saved_bytes(net, batch, name)
    return Run(
        name=name,
        net=net,
        optimizer=torch.optim.AdamW(net.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
        scaler=GradScaler(batch[0].device.type, init_scale=INITIAL_SCALE, enabled=name == "fp16"),
        saved_activation_bytes=activation_bytes,
        weight_copy_bytes=copy_bytes,
    )


def saved_bytes(net: nn.Module, batch: Batch, name: str) -> tuple[int, int]:
    """What autograd keeps from forward to backward: bytes of activations, bytes of narrow copies of weights."""
    with saved_for_backward(net) as saved:
        forward_backward(net, batch, name, GradScaler(batch[0].device.type, enabled=False))
    net.zero_grad(set_to_none=True)
    return sum(saved.activations.values()), sum(saved.weight_copies.values())


def train(run: Run, batches: list[Batch]) -> None:
    for batch in batches:
        run.optimizer.param_groups[0]["lr"] = LR * min(1.0, (len(run.losses) + 1) / WARMUP_STEPS)
        run.losses.append(training_step(run.net, run.optimizer, run.scaler, batch, run.name))


def timed_round(run: Run, batches: list[Batch], device: torch.device) -> None:
    """Train and note the seconds; on CUDA also the peak of memory in a step."""
    if device.type != "cuda":
        start = time.perf_counter()
        train(run, batches)
        run.losses[-1].item()  # mps runs asynchronously: wait for it
        run.round_seconds.append(time.perf_counter() - start)
        return
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    train(run, batches)
    end.record()
    end.synchronize()
    run.round_seconds.append(start.elapsed_time(end) / 1e3)
    run.step_bytes = torch.cuda.max_memory_allocated(device) - before  # that of the last round stays


def parse_args():
    parser = cli.Parser(__doc__)
    parser.add_argument("--model", default="nano", help="as in train.py")
    parser.add_argument("--dtypes", help=f"comma-separated, of {', '.join(NAMES)} (default: the native ones and fp16)")
    parser.add_argument("--steps", type=cli.positive_int, default=30, help=f"of each type, a multiple of {ROUNDS}")
    parser.add_argument("--seq-len", type=cli.positive_int, default=64)
    parser.add_argument("--batch-size", type=cli.positive_int, default=4, help="sequences per step")
    parser.add_argument("--device", choices=("auto", "cuda", "mps", "cpu"), default="auto")
    parser.add_argument("--seed", type=cli.natural, default=0)
    parser.add_argument("--plot", type=cli.plot_file, metavar="PNG", default="runs/compare.png", help="(%(default)s)")
    parser.add_argument("--json", type=cli.writable_file, metavar="PATH", help="write the summary as one JSON object")
    args = parser.parse_args()
    if args.steps % ROUNDS:
        raise UserError(f"--steps {args.steps} is no multiple of {ROUNDS}: use {args.steps + -args.steps % ROUNDS}")
    return args


def load_batches(args, tokens, device: torch.device) -> list[Batch]:
    """One batch per step, and one more for measuring: read once, so that every type sees the same."""
    stream = data.train_batches(
        tokens,
        seq_len=args.seq_len,
        global_batch_size=args.batch_size,
        micro_batch_size=args.batch_size,
        seed=args.seed,
        device=device,
    )
    return [tuple(t.to(device) for t in next(stream)) for _ in range(args.steps + 1)]


def main() -> int:
    started = time.perf_counter()
    args = parse_args()
    device = runtime.single_device(args.device)
    runtime.seed(args.seed, deterministic=False)
    runtime.exact_fp32(device)  # or the baseline would be tf32 in some containers

    corpus = data.load_corpus("stdlib", "bytes")
    config = shapes.load_config(args.model, corpus.vocab_size, args.seq_len)
    net = model.build(args.model, config, seed=args.seed, device=device)
    batches = load_batches(args, corpus.train, device)
    tokens_per_step = args.batch_size * args.seq_len

    names, left_out = choose(args.dtypes, net, device, tokens_per_step)
    native, known_by = hardware.native_types(device)
    print(f"native on {device.type}: {', '.join(sorted(native.intersection(NAMES)))} ({known_by})")
    for name, reason in left_out.items():
        print(f"left out: {name} ({reason})")
    if device.type != "cuda":
        print("left out: peak memory (torch counts it on CUDA only)")

    runs = [new_run(name, net, batches[0]) for name in names]
    steps_per_round = args.steps // ROUNDS
    for first in range(0, args.steps, steps_per_round):
        for run in runs:
            timed_round(run, batches[first : first + steps_per_round], device)

    rows = [summarize(run, baseline=runs[0], tokens_per_round=steps_per_round * tokens_per_step) for run in runs]
    print_runs(rows)
    gradients, underflow, instabilities = show_limits(runs[0].net, batches[-1], INITIAL_SCALE)
    plot(rows, gradients, INITIAL_SCALE, args.plot)
    summary = {
        "device": hardware.device_name(device),
        "world_size": 1,
        "model": args.model,
        "parameters": gradients.numel(),
        "steps": args.steps,
        "tokens": args.steps * tokens_per_step,
        "seconds": time.perf_counter() - started,
        "left_out": left_out,
        "runs": rows,
        "underflow": underflow,
        "instabilities": instabilities,
    }
    report.write_json(summary, args.json)
    # what is rare in a few tokens, or in another model, need not show
    check(rows, instabilities, required=args.model == "nano" and args.batch_size * args.seq_len >= 4 * 64)
    return 0


if __name__ == "__main__":
    exits.run(main)
