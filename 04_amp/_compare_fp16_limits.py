"""What fp16 cannot hold: counted on real gradients, then four ways to break training with it, and their cures.

compare.py calls these with the model that it has trained. Each failure happens to a copy of that model, and `holds`
says whether it did and whether the cure worked. fp16 reaches from 6e-8 to 65504: a smaller gradient becomes zero, a
larger sum or exponential infinite.
"""

import copy
import math
from pathlib import Path
from types import SimpleNamespace

import torch
from _compare_dtypes import Batch, backward
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, get_total_norm, parameters_to_vector

from common.report import table

MICRO_BATCHES = 1024  # gradient accumulation divides the loss by their number, and so every gradient
FP16 = torch.finfo(torch.float16)


def underflow(gradients: Tensor, factor: float) -> dict[str, int]:
    """How many elements of fp32 gradients x factor fp16 turns into zero, keeps with fewer bits, makes infinite."""
    half = (gradients * factor).half()
    subnormal = (half != 0) & (half.abs() < FP16.smallest_normal)
    zero = (half == 0) & (gradients != 0)
    return {"zero": int(zero.sum()), "subnormal": int(subnormal.sum()), "infinite": int(half.isinf().sum())}


def attempt(net: nn.Module, batch: Batch, scale: float | None, divide: int = 1, name: str = "fp16") -> SimpleNamespace:
    """A copy of net after a backward pass in type `name`, with a fresh optimizer and, given a scale, a scaler."""
    net = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.0)
    scaler = GradScaler(batch[0].device.type, init_scale=scale or 1.0, enabled=scale is not None)
    backward(net, batch, name, scaler, divide)
    norm = get_total_norm([p.grad for p in net.parameters()]).item()
    return SimpleNamespace(net=net, optimizer=optimizer, scaler=scaler, norm=norm)


@torch.no_grad()
def changed(run: SimpleNamespace, net: nn.Module) -> Tensor:
    """By how much each weight of the copy differs from the original."""
    return parameters_to_vector(run.net.parameters()) - parameters_to_vector(net.parameters())


def overflowing_gradients(net: nn.Module, batch: Batch) -> dict:
    """Too large a scale makes gradients infinite, and a step with them ruins the weights: the scaler skips it."""
    scale = 2.0**16
    while all(p.grad.isfinite().all() for p in attempt(net, batch, scale).net.parameters()):
        scale *= 2
    scale *= 8
    run = attempt(net, batch, scale)
    for p in run.net.parameters():
        p.grad /= scale  # infinity stays infinity
    run.optimizer.step()
    ruined = int((~changed(run, net).isfinite()).sum())

    run, skipped = attempt(net, batch, scale), 0
    run.scaler.step(run.optimizer)
    while skipped < 50 and not changed(run, net).any():  # nothing has moved: the step was skipped
        skipped += 1
        run.scaler.update()  # halves the scale
        run.optimizer.zero_grad()
        backward(run.net, batch, "fp16", run.scaler)
        run.scaler.step(run.optimizer)
    fitting, left = run.scaler.get_scale(), int((~changed(run, net).isfinite()).sum())
    return {
        "name": "overflowing gradients",
        "provoked": {"scale": scale, "nan_weights": ruined},
        "cured": {"scale": fitting, "skipped_steps": skipped, "nan_weights": left},
        "holds": ruined > 0 and left == 0 and skipped > 0 and fitting == scale / 2**skipped,
        "text": f"at scale {scale:,.0f} a step with whatever comes makes {ruined:,} weights NaN; the scaler skips "
        f"{skipped} steps, halves the scale each time and goes on at {fitting:,.0f}, no weight NaN",
    }


def vanishing_gradients(net: nn.Module, batch: Batch, scale: float) -> dict:
    """A loss divided by 1,024 has gradients that fp16 rounds to zero, and weights stay where they are. More than the
    counts of their own gradients say: those of activations, which come before them, are zero already."""
    moves = []
    for name, init_scale in (("fp32", None), ("fp16", None), ("fp16", scale * MICRO_BATCHES)):
        run = attempt(net, batch, init_scale, MICRO_BATCHES, name)
        run.scaler.step(run.optimizer)
        moves.append(changed(run, net) != 0)
    unmoved = [(~moved[moves[0]]).float().mean().item() for moved in moves[1:]]
    return {
        "name": "vanishing gradients",
        "provoked": {"loss_divided_by": MICRO_BATCHES, "unmoved_weights_share": unmoved[0]},
        "cured": {"scale": scale * MICRO_BATCHES, "unmoved_weights_share": unmoved[1]},
        "holds": unmoved[0] > 0.01 and unmoved[1] < unmoved[0] / 10,
        "text": f"with the loss divided by {MICRO_BATCHES:,}, {unmoved[0]:.1%} of the weights that fp32 moves stay put "
        f"in fp16, with a scaler {unmoved[1]:.2%}",
    }


def clipping_scaled_gradients(net: nn.Module, batch: Batch, scale: float) -> dict:
    """Clipped before unscale_, gradients end up `scale` times too small; the right order clips true ones."""
    limit, norms, updates = attempt(net, batch, scale).norm / scale / 2, [], []
    for unscale_first in (False, True):
        run = attempt(net, batch, scale)
        if unscale_first:
            run.scaler.unscale_(run.optimizer)
        clip_grad_norm_(run.net.parameters(), limit)
        if not unscale_first:
            run.scaler.unscale_(run.optimizer)
        norms.append(get_total_norm([p.grad for p in run.net.parameters()]).item())
        run.scaler.step(run.optimizer)
        updates.append(changed(run, net).norm().item())
    return {
        "name": "clipping scaled gradients",
        "provoked": {"clip_norm": limit, "scale": scale, "gradient_norm": norms[0], "update_norm": updates[0]},
        "cured": {"clip_norm": limit, "scale": scale, "gradient_norm": norms[1], "update_norm": updates[1]},
        "holds": abs(norms[0] * scale / limit - 1) < 0.01 and abs(norms[1] / limit - 1) < 0.01,
        "text": f"clipped to {limit:.2f} before unscale_ gradients have norm {norms[0]:.1e}, sink into AdamW's eps "
        f"and move the weights {updates[1] / updates[0]:.1f} times less; clipped after it, {norms[1]:.2f}",
    }


@torch.no_grad()
def softmax_by_hand(net: nn.Module, batch: Batch) -> dict:
    """exp(12) is beyond fp16, and infinity / infinity is NaN: what sums or exponentiates belongs into fp32."""
    logits = net(batch[0][:1])
    scores = (logits * (20 / logits.max())).half()  # as of a model that is sure of itself

    def softmax(x: Tensor) -> Tensor:
        return x.exp() / x.exp().sum(-1, keepdim=True)

    nan = softmax(scores).isnan().any(-1).float().mean().item()
    error = (softmax(scores.float()) - torch.softmax(scores.float(), -1)).abs().max().item()
    return {
        "name": "softmax by hand in fp16",
        "provoked": {"largest_logit": 20.0, "nan_tokens_share": nan},
        "cured": {"largest_logit": 20.0, "largest_error": error},
        "holds": nan > 0 and error < 1e-5,
        "text": f"exp(x) / sum(exp(x)) in fp16 gives NaN for {nan:.1%} of the tokens with logits up to 20; "
        f"in fp32 it differs from torch.softmax by {error:.0e}",
    }


def show_limits(net: nn.Module, batch: Batch, scale: float) -> tuple[Tensor, dict, list[dict]]:
    """The model's fp32 gradients, what fp16 makes of them with and without `scale`, and the failures."""
    backward(net, batch, "fp32", GradScaler(batch[0].device.type, enabled=False))
    gradients = torch.cat([p.grad.flatten() for p in net.parameters()])
    net.zero_grad()
    factors = {"unscaled": 1.0, "scaled": scale, "divided": 1 / MICRO_BATCHES, "divided_scaled": scale / MICRO_BATCHES}
    cases = {case: underflow(gradients, factor) for case, factor in factors.items()}
    rows = [
        [f"x 2^{math.log2(factors[case]):.0f}", *(f"{n / gradients.numel():.2%}" for n in counts.values())]
        for case, counts in cases.items()
    ]
    print(f"{gradients.numel():,} gradients (fp32), rounded to fp16")
    print(table([["gradients", "become zero", "lose bits", "overflow"], *rows]) + "\n")
    overflow = overflowing_gradients(net, batch)
    fitting = overflow["cured"]["scale"] / 2  # as large as can be, with room for rounding that differs from run to run
    failures = [vanishing_gradients(net, batch, fitting), clipping_scaled_gradients(net, batch, fitting)]
    counted = {"elements": gradients.numel(), "scale": scale, "micro_batches": MICRO_BATCHES, **cases}
    return gradients, counted, [overflow, *failures, softmax_by_hand(net, batch)]


def plot(rows: list[dict], gradients: Tensor, scale: float, file: Path) -> None:
    """Loss curves beside the histogram of the gradients' magnitudes and of what fp16 can hold."""
    try:
        import matplotlib
    except ImportError:
        print("no plot (pip install matplotlib)")
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4), layout="constrained")
    for i, row in enumerate(rows):  # thinner and thinner: the curves lie on each other
        left.plot(range(1, len(row["losses"]) + 1), row["losses"], label=row["name"], linewidth=2 * (len(rows) - i))
    left.set(xlabel="step", ylabel="loss")
    exponents = gradients[gradients != 0].abs().log2()
    for factor, name in ((1 / MICRO_BATCHES, f"/ {MICRO_BATCHES:,}"), (1.0, "gradients"), (scale, f"x {scale:,.0f}")):
        counts = torch.histc(exponents + math.log2(factor), bins=90, min=-60, max=30).cpu()
        right.stairs(counts, range(-60, 31), fill=True, alpha=0.5, label=name)
    for exponent, name in ((-24, "smallest subnormal"), (-14, "smallest normal"), (16, "infinity")):
        right.axvline(exponent, color="black", linewidth=0.8)
        right.text(exponent, right.get_ylim()[1], f"{name} ", rotation=90, va="top", ha="right", fontsize=8)
    right.set(xlabel="log2 of the magnitude; lines: what fp16 can hold", ylabel="gradient elements")
    left.legend()
    right.legend()
    figure.savefig(file, dpi=120)
    print(f"plot: {file}")
