"""What fp16 cannot hold: counted on real gradients, then four ways to break training with it, and their cures.

compare.py calls these with the model that it has trained. Each failure happens to a copy of that model, and `holds`
says whether it did and whether the cure worked. fp16 reaches from 2^-24 = 6.0e-8, its smallest subnormal, to 65,504.
What is under half of that smallest value, 2^-25 = 3.0e-8, becomes zero; a larger sum or exponential becomes infinite.
"""

import copy
import math
from dataclasses import dataclass

import torch
from _compare_dtypes import Batch, multiplying_in
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.nn.utils import clip_grad_norm_, get_total_norm, parameters_to_vector

from old import report

MICRO_BATCHES = 1024  # gradient accumulation divides the loss by their number, and so every gradient
SMALLEST_NORMAL = torch.finfo(torch.float16).smallest_normal  # 2^-14: below it each halving costs a bit
SMALLEST_KEPT = 2.0**-25  # half of the smallest subnormal: this and less rounds to zero


def underflow(gradients: Tensor, factor: float) -> dict[str, int]:
    """How many elements of fp32 gradients x factor fp16 turns into zero, keeps with fewer bits, makes infinite."""
    half = (gradients * factor).half()
    zero = (half == 0) & (gradients != 0)
    subnormal = (half != 0) & (half.abs() < SMALLEST_NORMAL)
    return {"zero": int(zero.sum()), "subnormal": int(subnormal.sum()), "infinite": int(half.isinf().sum())}


@dataclass
class Attempt:
    """A copy of the model after one backward pass, its optimizer, and its scaler."""

    net: nn.Module
    optimizer: torch.optim.Optimizer
    scaler: GradScaler


def attempt(net: nn.Module, batch: Batch, scale: float | None, divide: int = 1, name: str = "fp16") -> Attempt:
    """A backward pass on a copy of `net`, the loss divided by `divide`; no scaler if `scale` is None."""
    net = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), weight_decay=0.0)
    scaler = GradScaler(batch[0].device.type, init_scale=scale or 1.0, enabled=scale is not None)
    backward(net, batch, scaler, divide, name)
    return Attempt(net, optimizer, scaler)


def backward(net: nn.Module, batch: Batch, scaler: GradScaler, divide: int = 1, name: str = "fp16") -> None:
    """As compare.py does it, for "fp16" or "fp32"."""
    device = batch[0].device
    with multiplying_in(name, device):
        with torch.autocast(device.type, torch.float16, enabled=name == "fp16"):
            loss = net(*batch)
        scaler.scale(loss / divide).backward()


def gradient_norm(net: nn.Module) -> float:
    return get_total_norm([p.grad for p in net.parameters()]).item()


@torch.no_grad()
def change(tried: Attempt, net: nn.Module) -> Tensor:
    """By how much each weight of the copy differs from the original."""
    return parameters_to_vector(tried.net.parameters()) - parameters_to_vector(net.parameters())


def overflowing_gradients(net: nn.Module, batch: Batch) -> dict:
    """Too large a scale makes gradients infinite, and a step with them ruins the weights: the scaler skips it."""
    scale = 2.0**16
    while all(p.grad.isfinite().all() for p in attempt(net, batch, scale).net.parameters()):
        scale *= 2
    scale *= 8

    naive = attempt(net, batch, scale)
    for p in naive.net.parameters():
        p.grad /= scale  # infinity stays infinity
    naive.optimizer.step()
    ruined = int((~change(naive, net).isfinite()).sum())

    cured = attempt(net, batch, scale)
    cured.scaler.step(cured.optimizer)
    skipped = 0
    while skipped < 50 and not change(cured, net).any():  # nothing has moved: the step was skipped
        skipped += 1
        cured.scaler.update()  # halves the scale
        cured.optimizer.zero_grad()
        backward(cured.net, batch, cured.scaler)
        cured.scaler.step(cured.optimizer)
    fitting = cured.scaler.get_scale()
    left = int((~change(cured, net).isfinite()).sum())
    return {
        "name": "overflowing gradients",
        "provoked": {"scale": scale, "nan_weights": ruined},
        "cured": {"scale": fitting, "skipped_steps": skipped, "nan_weights": left},
        "holds": ruined > 0 and left == 0 and skipped > 0 and fitting == scale / 2**skipped,
        "text": f"at scale {scale:,.0f} a step makes {ruined:,} weights NaN; the scaler skips {skipped} steps, "
        f"halves the scale each time and goes on at {fitting:,.0f} with no weight NaN",
    }


def unmoved_share(tried: Attempt, net: nn.Module, moves_in_fp32: Tensor) -> float:
    """Of the weights that a step in fp32 moves, the share that this step leaves where it was."""
    unmoved = change(tried, net) == 0
    return unmoved[moves_in_fp32].float().mean().item()


def vanishing_gradients(net: nn.Module, batch: Batch, scale: float) -> dict:
    """A loss divided by 1,024 has gradients that fp16 rounds to zero, and weights stay where they are.

    More of them than their own gradients say: the gradients of activations, which come before, are zero already.
    """
    in_fp32 = attempt(net, batch, None, MICRO_BATCHES, "fp32")
    unscaled = attempt(net, batch, None, MICRO_BATCHES)
    scaled = attempt(net, batch, scale * MICRO_BATCHES, MICRO_BATCHES)
    for tried in (in_fp32, unscaled, scaled):
        tried.scaler.step(tried.optimizer)
    moves_in_fp32 = change(in_fp32, net) != 0
    without_scaler = unmoved_share(unscaled, net, moves_in_fp32)
    with_scaler = unmoved_share(scaled, net, moves_in_fp32)
    return {
        "name": "vanishing gradients",
        "provoked": {"loss_divided_by": MICRO_BATCHES, "unmoved_weights_share": without_scaler},
        "cured": {"scale": scale * MICRO_BATCHES, "unmoved_weights_share": with_scaler},
        "holds": without_scaler > 0.01 and with_scaler < without_scaler / 10,
        "text": f"with the loss divided by {MICRO_BATCHES:,}, {without_scaler:.1%} of the weights that fp32 moves stay "
        f"where they are in fp16; with a scaler {with_scaler:.2%}",
    }


def clipping_scaled_gradients(net: nn.Module, batch: Batch, scale: float) -> dict:
    """Clipped before unscale_, gradients end up `scale` times too small; the right order clips true ones."""
    wrong = attempt(net, batch, scale)
    limit = gradient_norm(wrong.net) / scale / 2  # half of the true norm, so that clipping has something to do
    clip_grad_norm_(wrong.net.parameters(), limit)
    wrong.scaler.unscale_(wrong.optimizer)

    right = attempt(net, batch, scale)
    right.scaler.unscale_(right.optimizer)
    clip_grad_norm_(right.net.parameters(), limit)

    measured = []
    for tried in (wrong, right):
        norm = gradient_norm(tried.net)
        tried.scaler.step(tried.optimizer)
        update = change(tried, net).norm().item()
        measured.append({"clip_norm": limit, "scale": scale, "gradient_norm": norm, "update_norm": update})
    provoked, cured = measured
    clipped_too_far = abs(provoked["gradient_norm"] * scale / limit - 1) < 0.01
    clipped_right = abs(cured["gradient_norm"] / limit - 1) < 0.01
    return {
        "name": "clipping scaled gradients",
        "provoked": provoked,
        "cured": cured,
        "holds": clipped_too_far and clipped_right,
        "text": f"clipped to {limit:.2f} before unscale_, gradients have norm {provoked['gradient_norm']:.1e}, sink "
        f"into AdamW's eps and move the weights {cured['update_norm'] / provoked['update_norm']:.1f} times less; "
        f"clipped after it, the norm is {cured['gradient_norm']:.2f}",
    }


@torch.no_grad()
def softmax_by_hand(net: nn.Module, batch: Batch) -> dict:
    """exp(12) is beyond fp16, and infinity / infinity is NaN: compute sums and exponentials in fp32."""
    logits = net(batch[0][:1])
    scores = (logits * (20 / logits.max())).half()  # as of a model that is sure of itself

    def softmax(x: Tensor) -> Tensor:
        return x.exp() / x.exp().sum(-1, keepdim=True)

    nan_share = softmax(scores).isnan().any(-1).float().mean().item()
    error = (softmax(scores.float()) - torch.softmax(scores.float(), -1)).abs().max().item()
    return {
        "name": "softmax by hand in fp16",
        "provoked": {"largest_logit": 20.0, "nan_tokens_share": nan_share},
        "cured": {"largest_logit": 20.0, "largest_error": error},
        "holds": nan_share > 0 and error < 1e-5,
        "text": f"exp(x) / sum(exp(x)) in fp16 gives NaN for {nan_share:.1%} of the tokens with logits up to 20; "
        f"in fp32 it differs from torch.softmax by {error:.0e}",
    }


def show_limits(net: nn.Module, batch: Batch, scale: float) -> tuple[Tensor, dict, list[dict]]:
    """The model's fp32 gradients, what fp16 makes of them with and without `scale`, and the failures."""
    net(*batch).backward()
    gradients = torch.cat([p.grad.flatten() for p in net.parameters()])
    net.zero_grad()

    factors = {
        "unscaled": 1.0,
        "scaled": scale,
        "divided": 1 / MICRO_BATCHES,
        "divided_scaled": scale / MICRO_BATCHES,
    }
    counted = {"elements": gradients.numel(), "scale": scale, "micro_batches": MICRO_BATCHES}
    rows = [["gradients multiplied by", "become zero", "lose bits", "overflow"]]
    for case, factor in factors.items():
        counts = underflow(gradients, factor)
        counted[case] = counts
        shares = [f"{count / gradients.numel():.2%}" for count in counts.values()]
        rows.append([f"2^{math.log2(factor):.0f}", *shares])
    print(f"{gradients.numel():,} gradients, computed in fp32 and rounded to fp16")
    print(report.table(rows) + "\n")

    overflow = overflowing_gradients(net, batch)
    fitting = overflow["cured"]["scale"] / 2  # as large as can be, with room for rounding that differs from run to run
    vanishing = vanishing_gradients(net, batch, fitting)
    clipping = clipping_scaled_gradients(net, batch, fitting)
    return gradients, counted, [overflow, vanishing, clipping, softmax_by_hand(net, batch)]
