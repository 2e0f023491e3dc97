"""Train with the rounding in place (QAT), and compare it fairly with rounding afterwards (PTQ).

Rounding has the gradient 0 almost everywhere, so nothing would be learned through it. The
straight-through estimator rounds in forward and ignores the rounding in backward. The weights that
are trained stay fp32, and learn to be where rounding hurts little.

QAT is also more training, which alone lowers the loss. So the baseline is the same model, trained
for as many steps more on the same data without rounding, and then rounded in two ways: with the
scale that fits the largest weight of a row, and with the scale that has the least squared error.
The latter clips a few large weights, and gives all others finer steps. QAT clips in the way that
costs the model less before its first step, on the calibration set.

    laptop    python 02_tensors_precision/qat.py
    figures   python 02_tensors_precision/qat.py --train-steps 300 --steps 50 --seeds 3 --bits 4 3 2
    real      python 02_tensors_precision/qat.py --model models/smollm2-135m --bits 4 3 --seeds 1
    one GPU   python 02_tensors_precision/qat.py --device cuda
    cluster   it uses one process only

What to look at: the last lines. The gain is the loss of the better PTQ minus the loss of QAT, seed
by seed. A gain that is not there on every seed, or that is below twice its standard error over the
sequences, is not shown. A seed decides the first weights, the order of the data, and the order of
the additional steps; for a folder's model only the last. On a GPU the steps have 48 times the
tokens. Expected there: QAT is better at 2 bits, because the trained model has more to lose.
Previous: quantize.py. Next: 03_linear_regression/.
"""

import copy
import statistics
import sys
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _trained_model
import torch
import torch.nn.functional as F
from _trained_model import Batches, Forward, linears, loss_difference, losses, train
from torch import Tensor, nn

from common import cli, lesson

LR = 2e-4  # where the model's schedule ended: a higher one would first undo some of its training
STEPS = {"cpu": 8, "cuda": 30}  # default of --steps
SHARES = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3]  # of a row's largest weight: where it is clipped
Clips = dict[str, Tensor]  # by the name of a layer, the share for each row, [out, 1]

# --- 1. rounding that lets gradients through


def quantize_rows(weight: Tensor, bits: int, clip: float | Tensor) -> tuple[Tensor, Tensor]:
    """Quantize a matrix [out, in] with one scale per row, as quantize.py does per channel.

    Weights above the share `clip` of the row's largest weight get the largest integer. Return the
    integers, int8 [out, in], and the scales, bf16 [out, 1].
    """
    limit = 2 ** (bits - 1) - 1
    largest = weight.abs().amax(1, keepdim=True)  # [out, 1]
    scale = (largest * clip / limit).bfloat16()
    scale = torch.where(scale > 0, scale, 1)  # a row of zeros: 0 / 1 and not 0 / 0
    codes = (weight / scale.float()).round().clamp(-limit, limit).to(torch.int8)
    return codes, scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Return the values that the integers stand for, fp32 [out, in]."""
    return codes * scale.float()


class FakeQuantize(torch.autograd.Function):
    """Round the weights in forward. In backward, pass the gradient of every weight not clipped."""

    @staticmethod
    def forward(ctx, weight: Tensor, bits: int, clip: Tensor) -> Tensor:
        codes, scale = quantize_rows(weight, bits, clip)
        ctx.save_for_backward(not_clipped(weight, scale, bits))
        return dequantize(codes, scale)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        [passed] = ctx.saved_tensors
        return gradient * passed, None, None


def not_clipped(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    """Return which weights round to one of the integers, bool [out, in]."""
    return (weight / scale.float()).round().abs() < 2 ** (bits - 1)


def rounding_linear(layer: nn.Linear, bits: int, clip: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, FakeQuantize.apply(layer.weight, bits, clip))


def with_rounding(net: nn.Module, bits: int, clips: Clips) -> nn.Module:
    """Make every linear layer of the blocks round its weights in forward. Return the model."""
    for name, layer in linears(net).items():
        layer.forward = partial(rounding_linear, layer, bits, clips[name])
    return net


# --- 2. the scale of a row


def no_clips(net: nn.Module) -> Clips:
    """Return the share 1 for each row: the scale fits its largest weight."""
    clips = {}
    for name, layer in linears(net).items():
        rows = len(layer.weight)
        clips[name] = torch.ones(rows, 1, device=layer.weight.device)
    return clips


@torch.no_grad()
def least_squares_clips(net: nn.Module, bits: int) -> Clips:
    """Return for each row the share in SHARES with the least sum of squared errors."""
    clips = {}
    for name, layer in linears(net).items():
        errors = []
        for share in SHARES:
            rounded = dequantize(*quantize_rows(layer.weight, bits, share))
            errors.append((rounded - layer.weight).square().sum(1))
        best = torch.stack(errors).argmin(0)  # [out]
        shares = torch.tensor(SHARES, device=best.device)
        clips[name] = shares[best].view(-1, 1)
    return clips


def clips_to_train_with(net: nn.Module, bits: int, calibration_set: Batches) -> Clips:
    """Return those of the two clips that cost the model less as it is."""
    best = None
    lowest = float("inf")
    for clips in (no_clips(net), least_squares_clips(net, bits)):
        loss = losses(net, export(net, bits, clips), calibration_set).mean().item()
        if loss < lowest:
            best = clips
            lowest = loss
    return best


def integer_linear(codes: Tensor, scale: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, dequantize(codes, scale))


def export(net: nn.Module, bits: int, clips: Clips) -> dict[str, Forward]:
    """Return the layers as they would be deployed: integers and scales, and no fp32 weights."""
    forwards = {}
    for name, layer in linears(net).items():
        codes, scale = quantize_rows(layer.weight.detach(), bits, clips[name])
        forwards[name] = partial(integer_linear, codes, scale)
    return forwards


# --- 3. the comparison


def run(
    start: nn.Module, baseline: nn.Module, qat: nn.Module, clips: Clips, bits: int, batches: Batches
) -> dict:
    """Return the losses of all models, and the gain of QAT over the better PTQ.

    `start` is the model before the additional steps. `baseline` and `qat` had as many.
    """
    qat_losses = losses(qat, {}, batches)
    deployed = losses(qat, export(qat, bits, clips), batches)
    assert torch.equal(deployed, qat_losses), "the exported integers are not what was trained"

    by_largest = losses(baseline, export(baseline, bits, no_clips(baseline)), batches)
    fitted_clips = least_squares_clips(baseline, bits)
    by_least_squares = losses(baseline, export(baseline, bits, fitted_clips), batches)
    better_ptq = by_largest
    if by_least_squares.mean() < by_largest.mean():
        better_ptq = by_least_squares
    gain, standard_error = loss_difference(better_ptq, qat_losses)
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
    """Return what the gains of several seeds show. One that changes its sign shows nothing."""
    gains = [row["gain"] for row in rows]
    median = statistics.median(gains)
    standard_error = statistics.median(row["gain_standard_error"] for row in rows)
    within_chance = abs(median) < 2 * standard_error
    changes_sign = min(gains) <= 0 <= max(gains)
    if within_chance or changes_sign:
        verdict = "no gain shown"
    elif median > 0:
        verdict = "QAT is better"
    else:
        verdict = "QAT is worse"
    return {
        "bits": rows[0]["bits"],
        "median_gain": median,
        "lowest_gain": min(gains),
        "highest_gain": max(gains),
        "verdict": verdict,
    }


def check_gradient(start: nn.Module, bits: int, clips: Clips, batch: tuple[Tensor, Tensor]) -> None:
    """Assert that gradients are those of a model with the rounded weights, and 0 where clipped."""
    rounding = with_rounding(copy.deepcopy(start), bits, clips)
    rounding(*batch).backward()

    plain = copy.deepcopy(start)
    passed = {}
    with torch.no_grad():
        for name, layer in linears(plain).items():
            codes, scale = quantize_rows(layer.weight, bits, clips[name])
            passed[name] = not_clipped(layer.weight, scale, bits)
            layer.weight.copy_(dequantize(codes, scale))
    plain(*batch).backward()
    for name, layer in linears(plain).items():
        layer.weight.grad *= passed[name]

    expected = dict(plain.named_parameters())
    for name, parameter in rounding.named_parameters():
        gradient = expected[name].grad
        same = torch.allclose(parameter.grad, gradient, rtol=1e-4, atol=1e-7)
        assert same, f"{name}: not the straight-through gradient"


COLUMNS = {
    "bits": "bits",
    "seed": "seed",
    "base_ptq_loss": "rounded first",
    "ptq_largest_loss": "PTQ, largest",
    "ptq_least_squares_loss": "PTQ, least squares",
    "qat_loss": "QAT",
    "gain": "gain",
    "gain_standard_error": "its error",
}


def main() -> int:
    parser = cli.Parser(__doc__)
    _trained_model.add_flags(parser)
    add = parser.add_argument
    add(
        "--steps",
        type=cli.positive_int,
        help=f"additional steps, with and without rounding (default: {STEPS['cpu']}; "
        f"on a GPU {STEPS['cuda']})",
    )
    add("--seeds", type=cli.positive_int, default=2, help="models")
    add(
        "--bits",
        type=int,
        nargs="+",
        choices=(2, 3, 4, 8),
        default=[2],
        help="of the weights",
    )
    args = parser.parse_args()
    device = lesson.start(args.device)
    sizes = _trained_model.sizes_for(args.model, device)
    args.train_steps = args.train_steps or sizes.train_steps
    args.steps = args.steps or STEPS.get(device.type, STEPS["cpu"])

    rows = []
    for seed in range(args.seeds):
        net, corpus = _trained_model.starting_model(args, sizes, seed, device)
        calibration_set, evaluation_set = _trained_model.held_out_sets(corpus, sizes, device)
        order = seed + 1  # the model has read the data in the order of its seed
        baseline = copy.deepcopy(net)
        train(baseline, corpus, sizes, args.steps, LR, order)
        for bits in args.bits:
            clips = clips_to_train_with(net, bits, calibration_set[:2])
            if seed == 0:
                check_gradient(net, bits, clips, evaluation_set[0])
            qat = with_rounding(copy.deepcopy(net), bits, clips)
            train(qat, corpus, sizes, args.steps, LR, order)
            rows.append({"seed": seed, **run(net, baseline, qat, clips, bits, evaluation_set)})

    verdicts = []
    for bits in args.bits:
        verdict = judge([row for row in rows if row["bits"] == bits])
        verdicts.append(verdict)
        print(
            f"QAT against rounding afterwards at {bits} bits: {verdict['verdict']}, "
            f"median {verdict['median_gain']:+.4f} nats "
            f"({verdict['lowest_gain']:+.4f} to {verdict['highest_gain']:+.4f})"
        )
    lesson.end(
        rows,
        columns=COLUMNS,
        checked=[
            "gradients are those of a model with the rounded weights, and 0 where clipped",
            "the exported integers give exactly QAT's loss of every sequence",
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
