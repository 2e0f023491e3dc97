"""Train with the rounding in place (QAT), and compare fairly with rounding afterwards (PTQ).

Rounding has the gradient 0 almost everywhere, so nothing would be learned through it. The straight-through
estimator lies: forward rounds, backward passes the gradient on as if it had not. The weights that are trained
stay fp32 and learn to sit where rounding them hurts little. QAT also means more training, which alone
lowers the loss, so the rival is a model that was trained on for as many steps, in the same order of the data,
without rounding, and then rounded (PTQ): with the scale that fits the largest weight of a row, and with the one
that leaves the least squared error, which lets a few large weights be clipped so that the others get finer steps.
QAT clips at the shares of the second kind, chosen before its first step.

    laptop    python 02_tensors_precision/qat.py
    figures   python 02_tensors_precision/qat.py --train-steps 300 --steps 50 --bits 4 3 2
    one GPU   python 02_tensors_precision/qat.py --train-steps 300 --steps 50 --bits 4 3 2 --device cuda
    cluster   one process is all it uses

Look for: the last table. "gain" is the loss of the better PTQ minus that of QAT, seed by seed; where its spread
crosses 0 nothing was shown. A seed decides a whole model: its first weights, the order of the data it learned from,
and the order of that for the steps after. The spread covers these, and neither other texts nor other sizes.
Before: quantize.py. Next: 03_linear_regression/.
"""

import argparse
import copy
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (0, 1)]  # neighbours; common/
import _quantize_workbench as workbench
from _quantize_workbench import linears, measure
from quantize import Quantized, dequantize, emulate, quantize

from common import cli, exits, model, runtime

LR = 2e-4  # where the base's schedule ended: a higher one would first undo some of its training
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
def least_squares(net: model.Transformer, bits: int) -> Clips:
    """For each row of each layer the share whose integers are nearest to the weights, by the sum of squared errors."""
    clips = {}
    for name, layer in linears(net).items():
        tried = [dequantize(quantize(layer.weight, bits, "channel", share)) for share in SHARES]
        errors = torch.stack([(t - layer.weight).square().sum(1) for t in tried])
        clips[name] = torch.tensor(SHARES, device=errors.device)[errors.argmin(0)].view(-1, 1, 1)
    return clips


def fake_linear(layer: nn.Linear, bits: int, clip: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, FakeQuantize.apply(layer.weight, bits, clip))


def with_rounding(net: model.Transformer, bits: int, clips: Clips) -> model.Transformer:
    for name, layer in linears(net).items():
        layer.forward = partial(fake_linear, layer, bits, clips[name])
    return net


def export(net: model.Transformer, bits: int, clips: Clips | None = None) -> dict[str, workbench.Forward]:
    """The layers as they would be deployed: packed integers and scales, no fp32 weight left in them."""
    layers = linears(net)
    clips = clips or dict.fromkeys(layers, 1.0)
    return {name: emulate(quantize(layers[name].weight.detach(), bits, "channel", clips[name])) for name in layers}


def check_gradient(base: model.Transformer, bits: int, clips: Clips, batch: tuple[Tensor, Tensor]) -> None:
    """Straight through: the gradient is that of a plain model whose weights are the rounded ones, 0 where clipped."""
    net, plain, passed = with_rounding(copy.deepcopy(base), bits, clips), copy.deepcopy(base), {}
    with torch.no_grad():
        for name, layer in linears(plain).items():
            w = quantize(layer.weight, bits, "channel", clips[name])
            passed[name] = inside(layer.weight, w, bits)
            layer.weight.copy_(dequantize(w))
    for one in (net, plain):
        one(*batch).backward()
    for name, layer in linears(plain).items():
        layer.weight.grad *= passed[name]
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-7), f"{name}: not the straight-through gradient"


@torch.no_grad()
def check_export(net: model.Transformer, bits: int, clips: Clips, inputs: Tensor) -> None:
    trained_with, layers = net(inputs), linears(net)
    for name, forward in export(net, bits, clips).items():
        layers[name].forward = forward
    assert torch.equal(net(inputs), trained_with), "the exported integers are not what was trained"
    with_rounding(net, bits, clips)


def loss(net: model.Transformer, forwards: dict[str, workbench.Forward], batches: workbench.Batches) -> float:
    return measure(net, forwards, batches)[0].mean().item()


def main() -> int:
    parser = workbench.flags(__doc__)
    parser.set_defaults(train_steps=30)
    parser.add_argument("--steps", type=cli.positive_int, default=8, help="steps of training on, of either kind")
    parser.add_argument("--seeds", type=cli.positive_int, default=3, help="models, from --seed on")
    parser.add_argument("--bits", type=int, nargs="+", choices=(2, 3, 4, 8), default=[2], help="of the weights")
    args = parser.parse_args()
    device, start, rows = runtime.single_device(args.device), time.perf_counter(), []
    for seed in range(args.seed, args.seed + args.seeds):
        base, corpus = workbench.trained_model(argparse.Namespace(**vars(args) | {"seed": seed}), device)
        _, shown = workbench.held_out(corpus, device)
        rival = copy.deepcopy(base)
        workbench.train(rival, corpus.train, args.steps, LR, seed + 1)  # the base has learned in the order of its seed
        before, after = loss(base, {}, shown), loss(rival, {}, shown)
        for bits in args.bits:
            clips = least_squares(base, bits)
            if seed == args.seed:
                check_gradient(base, bits, clips, shown[0])
            net = with_rounding(copy.deepcopy(base), bits, clips)
            workbench.train(net, corpus.train, args.steps, LR, seed + 1)
            check_export(net, bits, clips, shown[0][0])
            row = {
                "bits": bits,
                "seed": seed,
                "base_loss": before,
                "base_ptq_loss": loss(base, export(base, bits, clips), shown),
                "rival_loss": after,
                "ptq_largest_loss": loss(rival, export(rival, bits), shown),
                "ptq_least_squares_loss": loss(rival, export(rival, bits, least_squares(rival, bits)), shown),
                "qat_loss": loss(net, {}, shown),
            }
            row["gain"] = min(row["ptq_largest_loss"], row["ptq_least_squares_loss"]) - row["qat_loss"]
            rows.append(row)
            print(f"{bits} bits, seed {seed}: QAT gains {row['gain']:.4f}", flush=True)

    verdicts = []
    for bits in args.bits:
        mine = [row for row in rows if row["bits"] == bits]
        gains = [row["gain"] for row in mine]
        median = {f"median_{key}": statistics.median(row[key] for row in mine) for key in [*mine[0]][2:]}
        spread = {"lowest_gain": min(gains), "highest_gain": max(gains)}
        won = {"seeds_won": sum(gain > 0 for gain in gains), "seeds": len(gains)}
        verdicts.append({"bits": bits, **median, **spread, **won})
    workbench.finish(args, base, start, finetune_steps=args.steps, runs=rows, verdicts=verdicts)
    print("checked: gradients pass straight through; packed integers give QAT's logits, bit for bit")
    for v in verdicts:
        answer = {0: "no", v["seeds"]: "yes"}.get(v["seeds_won"], "not shown")
        print(
            f"QAT beats rounding afterwards at {v['bits']} bits: {answer}, {v['seeds_won']} of {v['seeds']} seeds "
            f"(median {v['median_qat_loss']:.4f}; rounded afterwards {v['median_ptq_largest_loss']:.4f} by the largest "
            f"weight, {v['median_ptq_least_squares_loss']:.4f} by least squares)"
        )
    return 0


if __name__ == "__main__":
    exits.run(main)
