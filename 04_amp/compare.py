"""One model, one budget, every number type: what a narrower one gives, and what it takes.

The same weights read the same batches in fp32, tf32, bf16, fp16 with and without a scaler, and with fp8 linear layers:
in every type that this device multiplies in hardware. fp16 runs anyway, emulated if need be; speed is given for native
types only. Then the gradients show what fp16 loses: values under half its smallest subnormal, 2^-25 = 3.0e-8, become
zero. Four ways to break training in fp16 are provoked and cured (_compare.py, which has the fp8 layer, too).

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
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
import _compare as types

from common import data, exits, lesson, measure, model, shapes
from common.exits import UserError

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp16-unscaled": torch.float16, "fp8": torch.bfloat16}
INITIAL_SCALE = 65536.0  # GradScaler's own default
LR = 2e-3
WARMUP_STEPS = 10
CLIP_NORM = 1.0
ROUNDS = 6  # the types take turns, so that a disturbance hits all alike; the first round warms up
FIRST_LOSS_TOLERANCE = {"tf32": 1e-3, "bf16": 2e-3, "fp16": 1e-3, "fp16-unscaled": 1e-3, "fp8": 1e-2}


def forward_backward(net: nn.Module, batch: types.Batch, name: str, scaler: GradScaler) -> Tensor:
    """Mixed precision: autocast runs matmuls in the narrow type, and norms and the loss in fp32."""
    device = batch[0].device
    with types.multiplying_in(name, device):  # switches tf32 on or off; emulates fp16 where the device has none
        with torch.autocast(device.type, AUTOCAST.get(name), enabled=name in AUTOCAST):
            loss = net(*batch)
        scaler.scale(loss).backward()  # fp16 only: a larger loss makes larger gradients, so that few become zero
    return loss.detach()


class Run:
    """One number type: a copy of the model, and what trains it. Weights, gradients and AdamW's state are fp32."""

    def __init__(self, name: str, net: nn.Module, batch: types.Batch) -> None:
        self.name, self.net = name, copy.deepcopy(net)
        if name == "fp8":
            types.use_fp8(self.net)
        self.optimizer = torch.optim.AdamW(
            self.net.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        self.scaler = GradScaler(batch[0].device.type, init_scale=INITIAL_SCALE, enabled=name == "fp16")
        self.losses: list[Tensor] = []  # left on the device: reading one would wait for it
        with measure.LiveBytes(self.net.parameters(), batch[0].device) as memory:
            before = memory.now
            with types.saved_activations(self.net) as saved:
                forward_backward(self.net, batch, name, self.scaler)
        self.activation_bytes = sum(saved.values())  # kept for backward, without weights and their narrow copies
        self.extra_bytes = memory.peak - before  # beside what lives from step to step
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, batch: types.Batch) -> Tensor:
        loss = forward_backward(self.net, batch, self.name, self.scaler)
        self.scaler.unscale_(self.optimizer)  # true gradients again: the clipping limit is meant for those
        clip_grad_norm_(self.net.parameters(), CLIP_NORM)
        self.scaler.step(self.optimizer)  # a gradient that overflowed skips the step: fused AdamW sees it on the device
        self.scaler.update()  # halves the scale after a skipped step, doubles it after 2,000 good ones
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def train(self, batches: list[types.Batch], count: int) -> None:
        """The next `count` steps."""
        done = len(self.losses)
        for batch in batches[done : done + count]:
            self.optimizer.param_groups[0]["lr"] = LR * min(1.0, (len(self.losses) + 1) / WARMUP_STEPS)
            self.losses.append(self.step(batch))


def summarize(run: Run, baseline: Run, measured: dict, tokens: int) -> dict:
    """The row of a type, after its last step; `tokens` are those of a round."""
    losses = [loss if math.isfinite(loss) else None for loss in torch.stack(run.losses).tolist()]
    pairs = zip(losses, torch.stack(baseline.losses).tolist(), strict=True)
    native = types.is_native(run.name, run.losses[0].device)
    row = {"name": run.name if native else f"{run.name} (emulated)", "dtype": run.name, "native": native}
    if run.name == "fp8":
        row["name"] += ", use_fast_accum=False"  # with True it would be faster and less exact
    for ours, theirs in (("", ""), ("min_", "max_"), ("max_", "min_")) if native else ():
        row[f"{ours}tokens_per_second"] = tokens / measured[f"{theirs}seconds"]
        row[f"{ours}speed_ratio"] = 1 / measured[f"{theirs}time_ratio"]
    kept = [*run.net.parameters(), *(t for state in run.optimizer.state.values() for t in state.values())]
    kept_bytes = sum(tensor.nbytes for tensor in kept)
    return row | {
        "n": measured["n"],
        "kept_bytes": kept_bytes,
        "peak_bytes": kept_bytes + run.extra_bytes,
        "activation_bytes": run.activation_bytes,
        "losses": losses,
        "last_loss": losses[-1],
        "largest_loss_difference": max((abs(a - b) for a, b in pairs if a is not None), default=None),
        # those that the optimizer did not count. Asked at the end: in a step it would wait for the device
        "skipped_steps": len(losses) - int(next(iter(run.optimizer.state.values()))["step"]),
    }


def check(rows: list[dict], counts: list[dict]) -> list[str]:
    baseline = rows[0]
    checked = []
    for row in rows[1:]:
        name = row["dtype"]
        error = abs((row["losses"][0] or 0) / baseline["losses"][0] - 1)  # None if it was not finite
        share = row["activation_bytes"] / baseline["activation_bytes"]
        text = f"{name}: first loss within {FIRST_LOSS_TOLERANCE[name]} of fp32's ({error:.0e}), {share:.0%} of its "
        assert error <= FIRST_LOSS_TOLERANCE[name], f"{name}: first loss off by {error:.0e}"
        assert share < 0.8 or name == "tf32", f"{name}: {share:.0%} of fp32's activations"  # in memory tf32 is fp32
        checked.append(f"{text}activations in bytes")
    assert len({row["kept_bytes"] for row in rows}) == 1, f"kept: {[row['kept_bytes'] for row in rows]} bytes"
    kept = baseline["kept_bytes"] / 2**20
    checked.append(f"weights and optimizer state take {kept:.1f} MiB in every type: AMP keeps fp32")
    for found in counts:
        shares = [found[key] for key in ("zero_share", "fewer_bits_share", "infinite_share")]
        text = "gradients x 2^{:.0f}, rounded to fp16: {:.2%} become zero, {:.2%} lose bits, {:.2%} overflow"
        checked.append(text.format(math.log2(found["factor"]), *shares))
    return checked


COLUMNS = {
    "name": "type",
    "tokens_per_second": "speed",
    "speed_ratio": "against fp32",
    "peak_bytes": "peak",
    "activation_bytes": "activations",
    "last_loss": "last loss",
    "largest_loss_difference": "largest loss difference",
    "skipped_steps": "steps skipped",
}


def main() -> int:
    args = lesson.flags(__doc__, model="nano", dtypes="native", steps=30, seq_len=64, batch_size=4)
    if args.steps % ROUNDS:
        raise UserError(f"--steps {args.steps} is no multiple of {ROUNDS}: use {args.steps + -args.steps % ROUNDS}")
    device = lesson.start(args.device)
    corpus = data.load_corpus("stdlib", "bytes")
    config = shapes.load_config(args.model, corpus.vocab_size, args.seq_len)
    net = model.build(args.model, config, seed=0, device=device)
    order = argparse.Namespace(seed=0, seq_len=args.seq_len, global_batch_size=args.batch_size, micro_batch_size=None)
    stream = data.Batches(corpus, order, rank=0, world_size=1).stream(0)
    batches = [tuple(t.to(device) for t in next(stream)) for _ in range(args.steps + 1)]  # and one for the failures
    tokens = args.batch_size * args.seq_len

    Run("fp32", net, batches[0])  # the first one also pays for what libraries set aside
    runs = {name: Run(name, net, batches[0]) for name in types.choose(args.dtypes, net, device, tokens)}
    in_a_round = args.steps // ROUNDS
    steps = {name: partial(run.train, batches, in_a_round) for name, run in runs.items()}
    measured = measure.seconds_in_turns(steps, device, ROUNDS - 1)
    rows = [summarize(run, runs["fp32"], measured[name], in_a_round * tokens) for name, run in runs.items()]

    trained = runs["fp32"].net
    trained(*batches[-1]).backward()
    gradients = torch.cat([p.grad.flatten() for p in trained.parameters()])
    trained.zero_grad()
    factors = (1.0, INITIAL_SCALE, 1 / types.MICRO_BATCHES, INITIAL_SCALE / types.MICRO_BATCHES)
    counts = [types.underflow(gradients, factor) for factor in factors]
    checked = check(rows, counts)
    if tokens >= 4 * 64:  # what is rare need not show in a few tokens
        checked += types.provoke(trained, batches[-1])
    own = {"parameters": gradients.numel(), "tokens": args.steps * tokens, "underflow": counts}
    lesson.end(rows, columns=COLUMNS, checked=checked, args=args, device=device, **own)
    return 0


if __name__ == "__main__":
    exits.run(main)
