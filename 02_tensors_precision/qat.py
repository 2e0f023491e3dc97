"""Train with the rounding in place (QAT), and compare fairly with rounding afterwards (PTQ).

Rounding has the gradient 0 almost everywhere, so nothing would be learned through it. The straight-through
estimator rounds in forward and ignores the rounding in backward. The weights that are trained stay fp32 and learn
to sit where rounding them hurts little. QAT also means more training, which alone lowers the loss. So the baseline
is a model that was trained on for as many steps, in the same order of the data, without rounding, and then rounded
(PTQ) in two ways: with the scale that fits the largest weight of a row, and with the scale that leaves the least
squared error, which lets a few large weights be clipped so that the others get finer steps. QAT clips in the one of
these two ways that loses less before its first step, on the calibration set.

    laptop    python 02_tensors_precision/qat.py
    figures   python 02_tensors_precision/qat.py --train-steps 300 --steps 50 --seeds 3 --bits 4 3 2
    real      python 02_tensors_precision/qat.py --model models/smollm2-135m --bits 4 3 --seeds 1
    one GPU   python 02_tensors_precision/qat.py --train-steps 300 --steps 50 --seeds 3 --bits 4 3 2 --device cuda
    cluster   one process is all it uses

Look for: the last lines. The gain is the loss of the better PTQ minus that of QAT, seed by seed. A gain that is not
seen on every seed, or that is less than twice its standard error over the sequences, was not shown. A seed decides a
whole model: its first weights, the order of the data it learned from, and the order of that for the steps after. The
model of a folder has its weights: there a seed decides the order of the steps after alone.
Before: quantize.py. Next: 03_linear_regression/.
"""

import copy
import statistics
import sys
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _shared
from _shared import (
    Batches,
    Forward,
    Quantized,
    dequantize,
    dequantizing,
    difference,
    linears,
    losses,
    quantize,
    train,
)

from common import cli, exits, report

LR = 2e-4  # where the model's schedule ended: a higher one would first undo some of its training
SHARES = [1 - i / 10 for i in range(8)]  # of a row's largest weight, tried as the end of its scale
Clips = dict[str, Tensor]  # by layer, the share for each row


class FakeQuantize(torch.autograd.Function):
    """What the integers will be worth, in fp32. The gradient passes straight to every weight that is not clipped."""

    @staticmethod
    def forward(ctx, weight: Tensor, bits: int, clip: Tensor) -> Tensor:
        w = quantize(weight, bits, "channel", clip)
        ctx.save_for_backward(inside(weight, w, bits))
        return dequantize(w)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        return gradient * ctx.saved_tensors[0], None, None


def inside(weight: Tensor, w: Quantized, bits: int) -> Tensor:
    """Which weights round to an integer that there is; the others are clipped to the last one."""
    return (weight / w.scale.float()).round().abs() < 2 ** (bits - 1)


@torch.no_grad()
def least_squares(net: nn.Module, bits: int) -> Clips:
    """For each row of each layer the share whose integers are nearest to the weights, by the sum of squared errors."""
    clips = {}
    for name, layer in linears(net).items():
        tried = [dequantize(quantize(layer.weight, bits, "channel", share)) for share in SHARES]
        errors = torch.stack([(t - layer.weight).square().sum(1) for t in tried])
        clips[name] = torch.tensor(SHARES, device=errors.device)[errors.argmin(0)].view(-1, 1, 1)
    return clips


def clips_to_train_with(net: nn.Module, bits: int, calibration_set: Batches) -> Clips:
    """Of both ways to choose a scale, the one that costs the model less as it is."""
    fitted = least_squares(net, bits)
    whole = {name: torch.ones_like(share) for name, share in fitted.items()}
    return min(
        whole,
        fitted,
        key=lambda clips: losses(net, export(net, bits, clips), calibration_set).mean().item(),
    )


def fake_linear(layer: nn.Linear, bits: int, clip: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, FakeQuantize.apply(layer.weight, bits, clip))


def with_rounding(net: nn.Module, bits: int, clips: Clips) -> nn.Module:
    for name, layer in linears(net).items():
        layer.forward = partial(fake_linear, layer, bits, clips[name])
    return net


def export(net: nn.Module, bits: int, clips: Clips | None = None) -> dict[str, Forward]:
    """The layers as they would be deployed: packed integers and scales, no fp32 weight left in them."""
    layers = linears(net)
    clips = clips or dict.fromkeys(layers, 1.0)
    return {
        name: dequantizing(quantize(layers[name].weight.detach(), bits, "channel", clips[name]))
        for name in layers
    }


def check_gradient(start: nn.Module, bits: int, clips: Clips, batch: tuple[Tensor, Tensor]) -> None:
    """Straight through: the gradient is that of a plain model whose weights are the rounded ones, 0 where clipped."""
    rounding = with_rounding(copy.deepcopy(start), bits, clips)
    rounding(*batch).backward()

    plain = copy.deepcopy(start)
    passed = {}
    with torch.no_grad():
        for name, layer in linears(plain).items():
            w = quantize(layer.weight, bits, "channel", clips[name])
            passed[name] = inside(layer.weight, w, bits)
            layer.weight.copy_(dequantize(w))
    plain(*batch).backward()
    for name, layer in linears(plain).items():
        layer.weight.grad *= passed[name]

    expected = dict(plain.named_parameters())
    for name, p in rounding.named_parameters():
        same = torch.allclose(p.grad, expected[name].grad, rtol=1e-4, atol=1e-7)
        assert same, f"{name}: not the straight-through gradient"


def run(
    start: nn.Module, baseline: nn.Module, qat: nn.Module, clips: Clips, bits: int, batches: Batches
) -> dict:
    """Losses of the model before, of the baseline rounded in both ways, and of QAT; and the gain over the better."""
    qat_losses = losses(qat, {}, batches)
    deployed = losses(qat, export(qat, bits, clips), batches)
    assert torch.equal(deployed, qat_losses), "the exported integers are not what was trained"
    by_largest = losses(baseline, export(baseline, bits), batches)
    by_least_squares = losses(
        baseline, export(baseline, bits, least_squares(baseline, bits)), batches
    )
    better_ptq = min(by_largest, by_least_squares, key=lambda found: found.mean().item())
    gain, standard_error = difference(better_ptq, qat_losses)
    return {
        "bits": bits,
        "base_loss": losses(start, {}, batches).mean().item(),
        "base_ptq_loss": losses(start, export(start, bits, clips), batches).mean().item(),
        "baseline_loss": losses(baseline, {}, batches).mean().item(),
        "ptq_largest_loss": by_largest.mean().item(),
        "ptq_least_squares_loss": by_least_squares.mean().item(),
        "qat_loss": qat_losses.mean().item(),
        "gain": round(gain, 5),
        "gain_standard_error": standard_error,
    }


def judge(rows: list[dict]) -> dict:
    """What the gain on several seeds shows: none is shown by one that changes its sign, or that is within chance."""
    gains = [row["gain"] for row in rows]
    median = statistics.median(gains)
    within_chance = abs(median) < 2 * statistics.median(row["gain_standard_error"] for row in rows)
    found = {
        "bits": rows[0]["bits"],
        "median_gain": median,
        "lowest_gain": min(gains),
        "highest_gain": max(gains),
    }
    if within_chance or min(gains) <= 0 <= max(gains):
        return {**found, "verdict": "no gain shown"}
    return {**found, "verdict": "QAT is better" if median > 0 else "QAT is worse"}


COLUMNS = {
    "bits": "bits",
    "seed": "seed",
    "base_ptq_loss": "rounded before training on",
    "ptq_largest_loss": "PTQ by largest",
    "ptq_least_squares_loss": "PTQ by least squares",
    "qat_loss": "QAT",
    "gain": "gain",
    "gain_standard_error": "± chance",
}


def main() -> int:
    parser = _shared.parser(__doc__)
    parser.add_argument(
        "--steps", type=cli.positive_int, default=8, help="steps of training on, of either kind"
    )
    parser.add_argument("--seeds", type=cli.positive_int, default=2, help="models")
    parser.add_argument(
        "--bits", type=int, nargs="+", choices=(2, 3, 4, 8), default=[2], help="of the weights"
    )
    args = parser.parse_args()
    device = report.start_lesson(args.device)
    rows = []
    for seed in range(args.seeds):
        net, corpus = _shared.starting_model(args, seed, device)
        calibration_set, evaluation_set = _shared.held_out_sets(corpus, device)
        baseline = copy.deepcopy(net)
        # the model has learned in the order of its seed
        train(baseline, corpus, args.steps, LR, seed + 1)
        for bits in args.bits:
            clips = clips_to_train_with(net, bits, calibration_set[:2])
            if seed == 0:
                check_gradient(net, bits, clips, evaluation_set[0])
            qat = with_rounding(copy.deepcopy(net), bits, clips)
            train(qat, corpus, args.steps, LR, seed + 1)
            rows.append({"seed": seed, **run(net, baseline, qat, clips, bits, evaluation_set)})
    verdicts = [judge([row for row in rows if row["bits"] == bits]) for bits in args.bits]
    for found in verdicts:
        line = "QAT against rounding afterwards at {bits} bits: {verdict}, median {median_gain:+.4f} nats"
        print((line + " ({lowest_gain:+.4f} to {highest_gain:+.4f})").format(**found))
    report.end_lesson(
        rows,
        columns=COLUMNS,
        checked=[
            "gradients pass straight through: they are those of a model with the rounded weights, 0 where clipped",
            "the exported integers give QAT's loss of every sequence, to the bit",
        ],
        args=args,
        device=device,
        dtype="fp32",
        parameters=sum(parameter.numel() for parameter in net.parameters()),
        val_loss=rows[-1]["qat_loss"],
        verdicts=verdicts,
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
