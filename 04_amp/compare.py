"""One model, one budget, every number type: what a narrower one gives, and what it takes.

The same weights read the same batches in fp32, tf32, bf16, and fp16 with a scaler. A type that this device does
not multiply in hardware is emulated: it has losses, and no speed. Then the gradients show what fp16 loses: values under
half its smallest subnormal, 2^-25 = 3.0e-8, become zero. Three failures of fp16 are provoked and cured (_compare.py).

    laptop    python 04_amp/compare.py
    one GPU   python 04_amp/compare.py --model llama-124m --seq-len 1024 --batch-size 16 --steps 60
    cluster   one process is all it uses: compare on one GPU of the kind that the job will get

Look for: activations and losses by type; how many gradients fp16 turns into zero, and the steps that are skipped to
save them. Before: train.py. Next: 05_ddp/train.py, with the --dtype chosen here.
"""

import argparse
import copy
import math
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, parameters_to_vector
from torch.optim import AdamW

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _compare as helper

from common import exits, measure, report
from common.exits import UserError
from lm import data, shapes, weights

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
INITIAL_SCALE = 65536.0  # GradScaler's own default
LR, WARMUP_STEPS, CLIP_NORM = 2e-3, 10, 1.0
ROUNDS = 6  # the types take turns, so that a disturbance hits all alike; the first round warms up
FIRST_LOSS_TOLERANCE = {"tf32": 1e-3, "bf16": 2e-3, "fp16": 1e-3}


class Run:
    """One number type: a copy of the model, and what trains it. Weights, gradients and AdamW's state are fp32."""

    def __init__(self, name: str, net: nn.Module, scale: float = INITIAL_SCALE) -> None:
        self.name = name
        self.net = copy.deepcopy(net)
        self.device = next(net.parameters()).device
        self.optimizer = AdamW(
            self.net.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.scaler = GradScaler(self.device.type, init_scale=scale, enabled=name == "fp16")
        self.losses: list[Tensor] = []  # left on the device: reading one would wait for it

    def backward(self, batch: tuple[Tensor, Tensor], divide: float = 1.0) -> Tensor:
        """Mixed precision: autocast runs matmuls in the narrow type, and norms and the loss in fp32."""
        # autocast has no tf32
        torch.set_float32_matmul_precision("high" if self.name == "tf32" else "highest")
        emulated = self.name == "fp16" and not helper.is_native(self.name, self.device)
        with helper.EmulatedFp16() if emulated else nullcontext():
            with torch.autocast(
                self.device.type, AUTOCAST.get(self.name), enabled=self.name in AUTOCAST
            ):
                loss = self.net(*batch)
            # fp16: larger gradients, so that few become zero
            self.scaler.scale(loss / divide).backward()
        return loss.detach()

    def train(self, batches: list[tuple[Tensor, Tensor]], count: int) -> None:
        """The next `count` steps."""
        for batch in batches[len(self.losses) :][:count]:
            self.optimizer.param_groups[0]["lr"] = LR * min(
                1.0, (len(self.losses) + 1) / WARMUP_STEPS
            )
            self.losses.append(self.backward(batch))
            # true gradients again: the clipping limit is meant for those
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.net.parameters(), CLIP_NORM)
            # skipped if a gradient overflowed: fused AdamW sees it on the device
            self.scaler.step(self.optimizer)
            # halves the scale after a skipped step, doubles it after 2,000 good ones
            self.scaler.update()
            self.optimizer.zero_grad(set_to_none=True)


def summarize(run: Run, baseline: Run, activation_bytes: int, measured: dict, tokens: int) -> dict:
    """The row of a type, after its last step; `tokens` are those of a round."""
    losses = torch.stack(run.losses).tolist()
    native = helper.is_native(run.name, run.device)
    states = run.optimizer.state.values()
    row = {
        "name": run.name if native else f"{run.name} (emulated)",
        "dtype": run.name,
        "native": native,
        "n": measured["n"],
        "kept_bytes": sum(
            t.nbytes for t in (*run.net.parameters(), *(t for s in states for t in s.values()))
        ),
        "activation_bytes": activation_bytes,
        "losses": losses,
        "last_loss": losses[-1],
        "largest_loss_difference": (torch.stack(run.losses) - torch.stack(baseline.losses))
        .abs()
        .max()
        .item(),
        # those that the optimizer did not count. Asked at the end: in a step it would wait for the device
        "skipped_steps": len(losses) - int(next(iter(states))["step"]),
    }
    for ours, theirs in (("", ""), ("min_", "max_"), ("max_", "min_")) if native else ():
        row[f"{ours}tokens_per_second"] = tokens / measured[f"{theirs}seconds"]
        row[f"{ours}speed_ratio"] = 1 / measured[f"{theirs}time_ratio"]
    return row


def check(rows: list[dict], counts: list[dict]) -> list[str]:
    baseline = rows[0]
    checked = []
    for row in rows[1:]:
        name = row["dtype"]
        error = abs(row["losses"][0] / baseline["losses"][0] - 1)
        share = row["activation_bytes"] / baseline["activation_bytes"]
        assert error <= FIRST_LOSS_TOLERANCE[name], f"{name}: first loss off by {error:.0e}"
        # in memory tf32 is fp32
        assert share < 0.8 or name == "tf32", f"{name}: {share:.0%} of fp32's activations"
        checked.append(
            f"{name}: first loss within {error:.0e} of fp32's, {share:.0%} of its activations in bytes"
        )
    assert len({row["kept_bytes"] for row in rows}) == 1, (
        f"kept: {[row['kept_bytes'] for row in rows]} bytes"
    )
    checked.append(
        f"weights and AdamW's state: {baseline['kept_bytes'] / 2**20:.1f} MiB in every type, all in fp32"
    )
    text = "gradients x 2^{:.0f}, rounded to fp16: {:.2%} become zero, {:.2%} lose bits, {:.2%} overflow"
    for factor, *shares in (found.values() for found in counts):
        checked.append(text.format(math.log2(factor), *shares))
    return checked


COLUMNS = {
    "name": "type",
    "tokens_per_second": "speed",
    "speed_ratio": "against fp32",
    "activation_bytes": "activations",
    "last_loss": "last loss",
    "largest_loss_difference": "largest loss difference",
    "skipped_steps": "steps skipped",
}


def main() -> int:
    args = report.lesson_flags(__doc__, model="nano", steps=30, seq_len=64, batch_size=4)
    if args.steps % ROUNDS:
        raise UserError(
            f"--steps {args.steps} is no multiple of {ROUNDS}: use {args.steps + -args.steps % ROUNDS}"
        )
    device = report.start_lesson(args.device)
    corpus = data.load_corpus("stdlib", "bytes")
    config = shapes.load_config(args.model, corpus.vocab_size, args.seq_len)
    net = weights.build(args.model, config, seed=0, device=device)
    order = argparse.Namespace(
        seed=0, seq_len=args.seq_len, global_batch_size=args.batch_size, micro_batch_size=None
    )
    stream = data.Batches(
        *data.sequences(corpus, order.seq_len), order, rank=0, world_size=1
    ).stream(0)
    # and one for the failures
    batches = [tuple(t.to(device) for t in next(stream)) for _ in range(args.steps + 1)]
    tokens = args.batch_size * args.seq_len

    # without units for it, tf32 would be fp32
    names = [
        name
        for name in ("fp32", "tf32", "bf16", "fp16")
        if name != "tf32" or helper.is_native(name, device)
    ]
    runs = {name: Run(name, net) for name in names}
    kept = {name: helper.bytes_for_backward(run, batches[0]) for name, run in runs.items()}
    rounds = {name: partial(run.train, batches, args.steps // ROUNDS) for name, run in runs.items()}
    measured = measure.seconds_in_turns(rounds, device, ROUNDS - 1)
    size = args.steps // ROUNDS * tokens
    rows = [
        summarize(run, runs["fp32"], kept[name], measured[name], size) for name, run in runs.items()
    ]

    trained = runs["fp32"].net
    gradients = parameters_to_vector(
        torch.autograd.grad(trained(*batches[-1]), [*trained.parameters()])
    )
    factors = (1.0, INITIAL_SCALE, 1 / helper.MICRO_BATCHES)
    counts = [helper.underflow(gradients, factor) for factor in factors]
    checked = check(rows, counts)
    if tokens >= 4 * 64:  # what is rare need not show in a few tokens
        overflow, scale = helper.overflowing_gradients(Run, trained, batches[-1])
        vanishing = helper.vanishing_gradients(Run, trained, batches[-1], scale)
        clipping = helper.clipping_scaled_gradients(Run, trained, batches[-1], scale)
        checked += [overflow, vanishing, clipping]
    about = {"parameters": gradients.numel(), "tokens": args.steps * tokens, "underflow": counts}
    report.end_lesson(rows, columns=COLUMNS, checked=checked, args=args, device=device, **about)
    return 0


if __name__ == "__main__":
    exits.run(main)
