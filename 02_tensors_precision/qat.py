"""Train with the rounding in place (QAT), and compare fairly with rounding afterwards (PTQ).

Rounding has the gradient 0 almost everywhere, so nothing would be learned through it. The straight-through
estimator lies: forward rounds, backward passes the gradient on as if it had not. The weights that are trained
stay fp32 and learn to sit where rounding them hurts little. QAT also means more training, which alone
lowers the loss, so the rival is a model that was trained on for as many steps, in the same order of the data,
without rounding, and then rounded.

    laptop    python 02_tensors_precision/qat.py
    figures   python 02_tensors_precision/qat.py --train-steps 1000 --steps 50 --bits 4 3 2
    one GPU   python 02_tensors_precision/qat.py --train-steps 1000 --steps 50 --bits 4 3 2 --device cuda
    cluster   one process is all it uses

Look for: the last table. "gain" is the loss of the rival minus that of QAT, seed by seed; where its spread
crosses 0 nothing was shown. Before: quantize.py. Next: 03_linear_regression/.
"""

import copy
import statistics
import sys
import time
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path[:0] = [str(Path(__file__).resolve().parents[i]) for i in (0, 1)]  # quantize.py, workbench.py; common/
import workbench
from quantize import dequantize, emulate, quantize
from workbench import linears, measure

from common import cli, exits, model, runtime

LR = 2e-4  # where the base's schedule ended: a higher one would first undo some of its training


class FakeQuantize(torch.autograd.Function):
    """What the integers will be worth, in fp32. The scale follows the largest weight, so none is clipped and
    the gradient passes to all."""

    @staticmethod
    def forward(ctx, weight: Tensor, bits: int) -> Tensor:
        return dequantize(quantize(weight, bits, "channel"))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def fake_linear(layer: nn.Linear, bits: int, x: Tensor) -> Tensor:
    return F.linear(x, FakeQuantize.apply(layer.weight, bits))


def with_rounding(net: model.Transformer, bits: int) -> model.Transformer:
    for layer in linears(net).values():
        layer.forward = partial(fake_linear, layer, bits)
    return net


def export(net: model.Transformer, bits: int) -> dict[str, workbench.Forward]:
    """The layers as they would be deployed: packed integers and scales, no fp32 weight left in them."""
    return {name: emulate(quantize(layer.weight.detach(), bits, "channel")) for name, layer in linears(net).items()}


def check_gradient(base: model.Transformer, bits: int, batch: tuple[Tensor, Tensor]) -> None:
    """Straight through: the gradient is that of a plain model whose weights are the rounded ones."""
    net, plain = with_rounding(copy.deepcopy(base), bits), copy.deepcopy(base)
    with torch.no_grad():
        for layer in linears(plain).values():
            layer.weight.copy_(dequantize(quantize(layer.weight, bits, "channel")))
    for one in (net, plain):
        one(*batch).backward()
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert torch.allclose(p.grad, q.grad, rtol=1e-4, atol=1e-7), f"{name}: not the straight-through gradient"


@torch.no_grad()
def check_export(net: model.Transformer, bits: int, inputs: Tensor) -> None:
    trained_with, layers = net(inputs), linears(net)
    for name, forward in export(net, bits).items():
        layers[name].forward = forward
    assert torch.equal(net(inputs), trained_with), "the exported integers are not what was trained"
    with_rounding(net, bits)


def main() -> int:
    parser = workbench.flags(__doc__)
    parser.add_argument("--steps", type=cli.positive_int, default=8, help="steps of training on, of either kind")
    parser.add_argument("--seeds", type=cli.positive_int, default=3, help="orders of the data for these steps")
    parser.add_argument("--bits", type=int, nargs="+", choices=(2, 3, 4, 8), default=[4, 2], help="of the weights")
    args = parser.parse_args()
    device, start = runtime.single_device(args.device), time.perf_counter()
    base, corpus = workbench.trained_model(args, device)
    _, shown = workbench.held_out(corpus, device)

    def loss(net: model.Transformer, forwards: dict[str, workbench.Forward]) -> float:
        return measure(net, forwards, shown)[0].mean().item()

    rows = []
    for bits in args.bits:
        check_gradient(base, bits, shown[0])
    for seed in range(args.seed + 1, args.seed + 1 + args.seeds):  # the base was trained in the order of --seed
        rival = copy.deepcopy(base)
        workbench.train(rival, corpus.train, args.steps, LR, seed)
        rival_loss = loss(rival, {})
        for bits in args.bits:
            net = with_rounding(copy.deepcopy(base), bits)
            workbench.train(net, corpus.train, args.steps, LR, seed)
            check_export(net, bits, shown[0][0])
            ptq_loss, qat_loss = loss(rival, export(rival, bits)), loss(net, {})
            row = {"bits": bits, "seed": seed, "rival_loss": rival_loss, "ptq_loss": ptq_loss, "qat_loss": qat_loss}
            rows.append({**row, "gain": ptq_loss - qat_loss})
            print(f"{bits} bits, seed {seed}: rounded afterwards {ptq_loss:.4f}, QAT {qat_loss:.4f}", flush=True)

    base_loss, verdicts = loss(base, {}), []
    for bits in args.bits:
        mine = [row for row in rows if row["bits"] == bits]
        gains = [row["gain"] for row in mine]
        median = {f"median_{key}": statistics.median(row[key] for row in mine) for key in [*mine[0]][2:]}
        summary = {"bits": bits, "base_loss": base_loss, "base_ptq_loss": loss(base, export(base, bits)), **median}
        spread = {"lowest_gain": min(gains), "highest_gain": max(gains)}
        verdicts.append({**summary, **spread, "seeds_won": sum(gain > 0 for gain in gains), "seeds": len(gains)})
    workbench.finish(args, base, start, finetune_steps=args.steps, runs=rows, verdicts=verdicts)
    print("checked: gradients pass straight through; packed integers give QAT's logits, bit for bit")
    for v in verdicts:
        answer = {0: "no", v["seeds"]: "yes"}.get(v["seeds_won"], "not shown")
        print(
            f"QAT beats rounding afterwards at {v['bits']} bits: {answer}, {v['seeds_won']} of {v['seeds']} seeds "
            f"(median {v['median_qat_loss']:.4f} against {v['median_ptq_loss']:.4f}; "
            f"rounded with no training on {v['base_ptq_loss']:.4f})"
        )
    return 0


if __name__ == "__main__":
    exits.run(main)
