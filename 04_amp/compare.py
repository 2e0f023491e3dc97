"""Train the same model on the same batches in each dtype: fp32, tf32, bf16, and fp16 with a scaler.

Weights, gradients and AdamW's state are fp32 in all of them; the dtype is that of the matmuls. A
dtype that this device does not multiply in hardware is emulated: it has losses, and no speed.

fp16 needs care, because it reaches only from 2^-24, its smallest subnormal number, to 65,504.
Gradients of up to 2^-25 = 3.0e-8 become zero, and sums or exponentials above 65,504 become
infinite. The script provokes three failures of fp16, each beside its cure: gradients that overflow,
gradients that vanish, and gradients that are clipped before they are unscaled.

    laptop    python 04_amp/compare.py
    one GPU   python 04_amp/compare.py
    cluster   this script uses one process: run it on one GPU of the kind that the job will get

What to look at: speed, activations and losses by dtype. How many gradients become zero in fp16, and
the steps that are skipped while the scale is found.

On a GPU the default is --model wide with 12 x 1,024 tokens. Expected on an H100 from its data
sheet: the arithmetic of a step takes at least 70 ms in fp32, 9 ms in tf32, and 5 ms in bf16 and
fp16. The speeds differ less, because norms, additions and the optimizer are limited by memory
bandwidth. The losses are close to those of fp32, and fp16 keeps the activations of bf16.

Previous: train.py. Next: 05_ddp/train.py, with the --dtype chosen here.
"""

import argparse
import copy
import math
import sys
from contextlib import nullcontext
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _compare as helper
import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, get_total_norm, parameters_to_vector
from torch.optim import AdamW

from common import lesson, measure
from common.exits import UserError
from lm import data, weights
from training.batches import Batches

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
INITIAL_SCALE = 65536.0  # GradScaler's own default
MICRO_BATCHES = 1024  # gradient accumulation divides the loss, and so every gradient, by this
LR = 2e-3
WARMUP_STEPS = 10
CLIP_NORM = 1.0
ROUNDS = 6  # The dtypes take turns, so that a disturbance hits all of them. Round 0 warms up.
FEWEST_TOKENS = 256  # in a batch, for the failures of fp16: in a smaller one they may not occur
GPU_DEFAULTS = {"model": "wide", "seq_len": 1024, "batch_size": 12}

Batch = tuple[Tensor, Tensor]  # inputs and targets, each [batch, tokens]


# --- training in a dtype


class Run:
    """A copy of a model that is trained in one dtype."""

    def __init__(self, dtype: str, net: nn.Module, scale: float = INITIAL_SCALE) -> None:
        self.dtype = dtype
        self.net = copy.deepcopy(net)
        self.device = next(net.parameters()).device
        self.optimizer = AdamW(
            self.net.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.0, fused=True
        )
        # Without fp16 the scaler does nothing.
        self.scaler = GradScaler(self.device.type, init_scale=scale, enabled=dtype == "fp16")
        self.losses: list[Tensor] = []  # on the device: reading one would wait for it

    def forward_backward(self, batch: Batch, loss_divisor: float = 1.0) -> Tensor:
        """Compute the gradients of a batch, and return its loss."""
        # tf32 is not a dtype of autocast. It is how a GPU multiplies fp32 matrices.
        precision = "high" if self.dtype == "tf32" else "highest"
        torch.set_float32_matmul_precision(precision)
        autocast = torch.autocast(
            self.device.type, AUTOCAST.get(self.dtype), enabled=self.dtype in AUTOCAST
        )
        emulated = self.dtype == "fp16" and not helper.is_native(self.dtype, self.device)
        with helper.EmulatedFp16() if emulated else nullcontext():
            with autocast:  # matmuls in bf16 or fp16; norms and the loss in fp32
                loss = self.net(*batch)
            # The scaler multiplies the loss, and so every gradient: fewer of them become zero.
            self.scaler.scale(loss / loss_divisor).backward()
        return loss.detach()

    def train(self, batches: list[Batch], steps: int) -> None:
        """Train for the next `steps` steps, on the batches that follow the last one."""
        first = len(self.losses)
        for step in range(first, first + steps):
            warmup = min(1.0, (step + 1) / WARMUP_STEPS)
            self.optimizer.param_groups[0]["lr"] = LR * warmup

            loss = self.forward_backward(batches[step])
            self.losses.append(loss)
            self.scaler.unscale_(self.optimizer)  # clip the true gradients, not the scaled ones
            clip_grad_norm_(self.net.parameters(), CLIP_NORM)
            # Skipped if a gradient overflowed. Fused AdamW reads that on the GPU, without a wait.
            self.scaler.step(self.optimizer)
            # Half the scale after a skipped step, twice the scale after 2,000 good ones.
            self.scaler.update()
            self.optimizer.zero_grad()


# --- what fp16 does to gradients


def round_to_fp16(gradients: Tensor, factor: float) -> dict[str, float]:
    """Return which shares of the fp32 gradients x `factor` fp16 cannot hold, and how it fails."""
    half = (gradients * factor).half()
    smallest_normal = torch.finfo(torch.float16).smallest_normal
    become_zero = (half == 0) & (gradients != 0)
    lose_bits = (half != 0) & (half.abs() < smallest_normal)  # subnormal numbers
    overflow = half.isinf()
    count = gradients.numel()
    return {
        "factor": factor,
        "zero_share": int(become_zero.sum()) / count,
        "fewer_bits_share": int(lose_bits.sum()) / count,
        "infinite_share": int(overflow.sum()) / count,
    }


def overflowing_gradients(net: nn.Module, batch: Batch) -> tuple[str, float]:
    """Show that a scale that is too large ruins the weights, and that the scaler skips such steps.

    Return what was checked, and a scale that fits.
    """
    scale = 2.0**32  # too large for any model

    # Naive: scale the loss, divide the gradients, step.
    naive = Run("fp16", net, scale=1.0)
    naive.forward_backward(batch, loss_divisor=1 / scale)
    for parameter in naive.net.parameters():
        parameter.grad /= scale  # infinity stays infinity
    naive.optimizer.step()

    # Cure: a scaler skips the step and halves the scale, until no gradient overflows.
    cured = Run("fp16", net, scale=scale)
    skipped_steps = 0
    while skipped_steps < 50:
        steps_before = len(cured.losses)
        cured.train([batch] * (steps_before + 1), steps=1)
        if cured.scaler.get_scale() == scale / 2**skipped_steps:
            break  # not halved: this step was not skipped
        skipped_steps += 1

    checked = helper.check_overflow(naive.net, cured.net, cured.scaler, scale, skipped_steps)
    # Rounding differs from run to run. Half of the scale leaves room for that.
    return checked, cured.scaler.get_scale() / 2


def vanishing_gradients(net: nn.Module, batch: Batch, scale: float) -> str:
    """Show that the gradients of a loss / 1,024 become zero in fp16, and that a scaler keeps them.

    More of them become zero than their own size explains: the gradients of activations, from which
    they are computed, have become zero before.
    """
    exact = Run("fp32", net)
    naive = Run("fp16", net, scale=1.0)
    cured = Run("fp16", net, scale=scale * MICRO_BATCHES)

    gradients = []
    for run in (exact, naive, cured):
        run.forward_backward(batch, loss_divisor=MICRO_BATCHES)
        of_parameters = [parameter.grad for parameter in run.net.parameters()]
        gradients.append(parameters_to_vector(of_parameters))

    exact_gradients, naive_gradients, cured_gradients = gradients
    not_zero = exact_gradients != 0
    naive_share = (naive_gradients == 0)[not_zero].float().mean().item()
    cured_share = (cured_gradients == 0)[not_zero].float().mean().item()
    return helper.check_vanishing(naive_share, cured_share, MICRO_BATCHES)


def clipping_scaled_gradients(net: nn.Module, batch: Batch, scale: float) -> str:
    """Show what clipping does before unscale_ and after it.

    Before, the limit applies to gradients that are `scale` times too large, and unscale_ then makes
    the clipped gradients `scale` times too small.
    """
    cured = Run("fp16", net, scale=scale)
    cured.forward_backward(batch)
    cured.scaler.unscale_(cured.optimizer)
    cured_gradients = [parameter.grad for parameter in cured.net.parameters()]
    true_norm = get_total_norm(cured_gradients).item()
    limit = true_norm / 2  # so that clipping has something to do
    clip_grad_norm_(cured.net.parameters(), limit)

    naive = Run("fp16", net, scale=scale)
    naive.forward_backward(batch)
    clip_grad_norm_(naive.net.parameters(), limit)
    naive.scaler.unscale_(naive.optimizer)
    naive_gradients = [parameter.grad for parameter in naive.net.parameters()]

    naive_norm = get_total_norm(naive_gradients).item()
    cured_norm = get_total_norm(cured_gradients).item()
    return helper.check_clipping(naive_norm, cured_norm, limit, scale)


# --- the comparison


def make_batches(args: argparse.Namespace, device: torch.device) -> list[Batch]:
    """Return a batch for each step, and one more for the failures of fp16."""
    corpus = data.load_corpus("stdlib", "bytes")
    train_set, held_out_set = data.sequences(corpus, args.seq_len)
    options = argparse.Namespace(
        seed=0, seq_len=args.seq_len, global_batch_size=args.batch_size, micro_batch_size=None
    )
    batches = Batches(train_set, held_out_set, options, rank=0, world_size=1)
    stream = batches.stream(0)
    result = []
    for _ in range(args.steps + 1):
        inputs, targets = next(stream)
        result.append((inputs.to(device), targets.to(device)))
    return result


def compare_dtypes(
    net: nn.Module, batches: list[Batch], args: argparse.Namespace, device: torch.device
) -> tuple[list[dict], nn.Module]:
    """Train a copy of the model in each dtype. Return a row per dtype, and the model of fp32."""
    # On a device without tf32 units, tf32 would be fp32.
    dtypes = ["fp32", "tf32", "bf16", "fp16"]
    if not helper.is_native("tf32", device):
        dtypes.remove("tf32")
    runs = {dtype: Run(dtype, net) for dtype in dtypes}

    activation_bytes = {}
    for dtype, run in runs.items():
        activation_bytes[dtype] = helper.bytes_for_backward(run, batches[0])

    steps_per_round = args.steps // ROUNDS
    rounds = {dtype: partial(run.train, batches, steps_per_round) for dtype, run in runs.items()}
    timings = measure.seconds_in_turns(rounds, device, ROUNDS - 1)
    tokens_per_step = args.batch_size * args.seq_len
    rows = []
    for dtype, run in runs.items():
        row = helper.row_of(
            run,
            baseline=runs["fp32"],
            activation_bytes=activation_bytes[dtype],
            timing=timings[dtype],
            tokens_per_round=steps_per_round * tokens_per_step,
        )
        rows.append(row)
    return rows, runs["fp32"].net


def main() -> int:
    args = lesson.parse_flags(
        __doc__, gpu=GPU_DEFAULTS, model="nano", steps=30, seq_len=64, batch_size=4
    )
    if args.steps % ROUNDS:
        next_multiple = math.ceil(args.steps / ROUNDS) * ROUNDS
        raise UserError(f"--steps {args.steps} is no multiple of {ROUNDS}: use {next_multiple}")
    device = lesson.start(args.device)
    config = weights.load_config(args.model, 256, args.seq_len)
    net = weights.build(args.model, config, seed=0, device=device)
    batches = make_batches(args, device)

    rows, trained = compare_dtypes(net, batches, args, device)

    # What fp16 does to the gradients of the trained model.
    batch = batches[-1]
    loss = trained(*batch)
    gradients = parameters_to_vector(torch.autograd.grad(loss, list(trained.parameters())))
    factors = (1.0, INITIAL_SCALE, 1 / MICRO_BATCHES)
    rounded = [round_to_fp16(gradients, factor) for factor in factors]
    checked = helper.check(rows, rounded)
    tokens_per_step = args.batch_size * args.seq_len
    if tokens_per_step >= FEWEST_TOKENS:
        overflow, fitting_scale = overflowing_gradients(trained, batch)
        checked.append(overflow)
        checked.append(vanishing_gradients(trained, batch, fitting_scale))
        checked.append(clipping_scaled_gradients(trained, batch, fitting_scale))

    lesson.end(
        rows,
        columns=[helper.SPEEDS, helper.LOSSES],
        checked=checked,
        args=args,
        device=device,
        parameters=gradients.numel(),
        tokens=args.steps * tokens_per_step,
        underflow=rounded,
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
