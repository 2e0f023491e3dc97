"""What an optimizer keeps, in fewer bytes: AdamW's two moments in 16 and in 8 bits, factored, and no gradients at all.

With fp32 weights and gradients AdamW takes 16 bytes per parameter: 4 + 4, and 8 for its two moments. The moments can be
kept in bf16, or in 8 bits, in blocks of 256 values with a scale each. Adafactor keeps a row and a column instead of the
second moment, and no first one. A step inside backward uses each gradient as soon as it is there, and so can neither
clip nor accumulate. With bf16 weights a small update is lost, unless it is rounded by chance.

    laptop    python 07_memory_tricks/optimizer_memory.py
    one GPU   python 07_memory_tricks/optimizer_memory.py --steps 300 --batch-size 24
    cluster   one process is all it uses: what is kept per parameter is divided by 06_fsdp_zero/, not changed

Look for: bytes per parameter; loss curves; the share of weights that moved, at --lr 3e-5 above all, as in fine-tuning.
Before: chunked_loss.py. Next: offload.py.
"""

import math
import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits, report, runtime
from lm import data, shapes
from lm.weights import build

BLOCK = 256  # values that share a scale


def step_inside_backward(
    net: nn.Module, make: Callable[[list[Tensor]], Optimizer]
) -> list[Optimizer]:
    """An optimizer for each tensor, which autograd calls when that tensor's gradient is complete."""

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()  # the gradient's memory is free for the next one

    optimizers = {parameter: make([parameter]) for parameter in net.parameters()}
    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    return [*optimizers.values()]


def stochastic_round(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """fp32 to bf16, up or down by chance: 0.3 of the way up goes up three times in ten, so the mean is x. bf16 is the
    upper half of an fp32 number's bits: add a random lower half, which carries that often, and cut it off."""
    noise = torch.randint(1 << 16, x.shape, generator=generator, dtype=torch.int32, device=x.device)
    upper_half = (x.view(torch.int32) + noise) & -(1 << 16)
    return upper_half.view(torch.float32).to(torch.bfloat16)  # exact: what bf16 lacks is zero


def quantize(x: Tensor, book: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [blocks, 256] in uint8, and the scale of each block: its largest magnitude."""
    blocks = nn.functional.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    between = (book[1:] + book[:-1]) / 2
    # of the nearest values in the book
    places = torch.bucketize(blocks / scales, between, out_int32=True)
    return places.to(torch.uint8), scales


class CompactAdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) in fp32, a tensor at a time. Between steps its moments are kept
    in 16 or 8 bits, and bf16 weights by stochastic rounding."""

    def __init__(self, parameters: Iterable[Tensor], lr: float, bits: int) -> None:
        super().__init__(
            parameters, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        )
        self.bits = bits

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                self.update(parameter, number, group)

    def update(self, parameter: Tensor, number: int, group: dict) -> None:
        state, lr, (beta1, beta2) = self.state[parameter], group["lr"], group["betas"]
        state["step"] = step = state.get("step", 0) + 1
        # seeded anew by step and tensor, so that a resumed run draws the same
        generator = torch.Generator(parameter.device).manual_seed(1_000_003 * step + number)
        weights, gradient = parameter.float(), parameter.grad.float()  # an fp32 parameter is itself
        first, second = (self.moment(state, name, parameter) for name in ("first", "second"))

        weights.mul_(1 - lr * group["weight_decay"])
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weights.addcdiv_(first, root, value=-lr / (1 - beta1**step))

        for name, moment in (("first", first), ("second", second)):
            if self.bits == 8:
                state[f"{name}_codes"], state[f"{name}_scales"] = quantize(
                    moment, code_book(name, moment.device)
                )
            else:  # to the nearest, a change of 0.1 % (beta2 = 0.999) would be lost
                state[name] = stochastic_round(moment, generator)
        if parameter.dtype == torch.bfloat16:
            parameter.copy_(stochastic_round(weights, generator))

    def moment(self, state: dict, name: str, parameter: Tensor) -> Tensor:
        """The first or second moment, in fp32."""
        if state["step"] == 1:
            return torch.zeros_like(parameter, dtype=torch.float32)
        if self.bits == 16:
            return state[name].float()
        values = (
            code_book(name, parameter.device)[state[f"{name}_codes"].int()]
            * state[f"{name}_scales"]
        )
        return values.flatten()[: parameter.numel()].view_as(parameter)


@cache
def code_book(moment: str, device: torch.device) -> Tensor:
    """The values that 8 bits can name, up to 1 (Dettmers et al. 2022, section 2): each decade from 1e-6 on is cut
    evenly, with twice the values of the one below. Evenly spaced values would make zeros of all second moments under a
    500th of the largest, and AdamW divides by their root. So the book of second moments has no zero, and no signs."""
    signed = moment == "first"
    values = [1.0, 0.0] if signed else [1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, count + 1)
        middles = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*middles.tolist(), *((-middles).tolist() if signed else ())]
    return torch.tensor(sorted(values), device=device)


def adafactor(parameters: Iterable[Tensor], lr: float) -> Optimizer:
    """Its rate is a share of the weights' root mean square, which is about 0.02."""
    return torch.optim.Adafactor(parameters, lr=25 * lr, weight_decay=0.1 / 25)


torch_adamw = partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
INSIDE = "step inside backward"
RECIPES = {  # an optimizer, and by formula the bytes of its state for a tensor of this shape
    "AdamW": (torch_adamw, lambda shape: 8 * shape.numel()),
    "moments in bf16": (partial(CompactAdamW, bits=16), lambda shape: 4 * shape.numel()),
    "moments in 8 bits": (
        partial(CompactAdamW, bits=8),
        lambda shape: 2 * 260 * math.ceil(shape.numel() / BLOCK),
    ),
    "Adafactor": (adafactor, lambda shape: 4 * (sum(shape) if len(shape) > 1 else shape.numel())),
    INSIDE: (torch_adamw, lambda shape: 8 * shape.numel()),
    "bf16 weights": (torch_adamw, lambda shape: 4 * shape.numel()),
    "bf16 weights, stochastic rounding": (
        partial(CompactAdamW, bits=16),
        lambda shape: 4 * shape.numel(),
    ),
}


def run(recipe: str, seed: int, config: shapes.Config, corpus: data.Corpus, args, device) -> dict:
    """Train for --steps from the weights of this seed, on its batches; count what is held when backward has ended."""
    net = build(args.model, config, seed=seed, device=device)
    if recipe.startswith("bf16 weights"):
        net.to(torch.bfloat16)
    start = [parameter.detach().clone() for parameter in net.parameters()]
    make = partial(RECIPES[recipe][0], lr=args.lr)
    optimizers = step_inside_backward(net, make) if recipe == INSIDE else [make(net.parameters())]
    sizes = Namespace(
        seed=seed, seq_len=args.seq_len, global_batch_size=args.batch_size, micro_batch_size=None
    )
    losses = []
    for inputs, targets in islice(
        data.Batches(*data.sequences(corpus, sizes.seq_len), sizes, rank=0, world_size=1).stream(0),
        args.steps,
    ):
        loss = net(inputs.to(device), targets.to(device))
        loss.backward()
        gradient_bytes = sum(
            weight.grad.nbytes for weight in net.parameters() if weight.grad is not None
        )
        for optimizer in optimizers:
            optimizer.step()  # those inside backward find no gradient any more, and do nothing
            optimizer.zero_grad()
        losses.append(loss.detach())
    moved = sum(
        (now != before).sum() for now, before in zip(net.parameters(), start, strict=True)
    ).item()
    states = [
        value for one in optimizers for state in one.state.values() for value in state.values()
    ]
    held_bytes = {
        "weight_bytes": sum(weight.nbytes for weight in net.parameters()),
        "gradient_bytes": gradient_bytes,
        # no counts of steps
        "optimizer_bytes": sum(value.nbytes for value in states if getattr(value, "ndim", 0)),
    }
    count = shapes.parameter_count(config)
    return {
        "recipe": recipe,
        **held_bytes,
        "parts": " + ".join(f"{size / count:.4g}" for size in held_bytes.values()),
        "bytes_per_parameter": sum(held_bytes.values()) / count,
        "optimizer_bytes_by_formula": sum(
            RECIPES[recipe][1](weight.shape) for weight in net.parameters()
        ),
        "moved_share": moved / count,
        "losses": torch.stack(losses).tolist(),
    }


def summarize(runs: list[dict], baseline_runs: list[dict]) -> dict:
    """Mean losses over the seeds; where they are farthest from AdamW's, and how far apart its seeds are there."""
    losses = torch.tensor([run["losses"] for run in runs], dtype=torch.float64)  # [seeds, steps]
    baseline_losses = torch.tensor([run["losses"] for run in baseline_runs], dtype=torch.float64)
    curve = losses.mean(0)
    distances = (curve - baseline_losses.mean(0)).abs()
    farthest = distances.argmax().item()
    there = baseline_losses[:, farthest]
    return {
        **runs[0],
        "losses": losses.tolist(),
        "first_loss": curve[0].item(),
        "last_loss": curve[-1].item(),
        "largest_distance": distances[farthest].item(),
        "spread_over_seeds_there": (there.max() - there.min()).item() if len(there) > 1 else None,
    }


def check(rows: list[dict]) -> list[str]:
    for row in rows:
        recipe, found, expected = (
            row["recipe"],
            row["optimizer_bytes"],
            row["optimizer_bytes_by_formula"],
        )
        assert found == expected, f"{recipe}: state of {found:,} bytes, by formula {expected:,}"
        gradient_bytes = 0 if recipe == INSIDE else row["weight_bytes"]
        assert row["gradient_bytes"] == gradient_bytes, (
            f"{recipe}: {row['gradient_bytes']:,} bytes of gradients"
        )
        assert recipe != INSIDE or row["losses"] == rows[0]["losses"], (
            f"{recipe}: losses are not AdamW's"
        )
    nearest = by_chance = torch.ones(10_000, dtype=torch.bfloat16)
    for _ in range(100):
        nearest = nearest + 0.001
        by_chance = stochastic_round(by_chance.float() + 0.001)
    mean = by_chance.float().mean().item()
    assert (nearest == 1).all(), "rounding to the nearest has lost no update"
    assert abs(mean - 1.1) < 0.01, f"rounded by chance, 100 updates of 0.001 make {mean} of 1"
    return [
        "the state of each optimizer has the bytes of its formula",
        "a step inside backward has AdamW's losses to the bit, and leaves no byte of a gradient",
        f"bf16 weights of 1 after 100 updates of 0.001: 1 if rounded to the nearest, by chance {mean:.4f} on average",
    ]


def main() -> int:
    args = report.lesson_flags(
        __doc__, model="nano", seq_len=64, batch_size=1, steps=4, seeds=2, lr=2e-3
    )
    config = shapes.load_config(args.model, 256, args.seq_len)
    device = runtime.single_device(args.device)
    # or AdamW's curve would not come out twice alike
    runtime.seed_all(0, deterministic=device.type == "cuda")
    corpus = data.load_corpus("stdlib")
    seeds = range(args.seeds)
    runs = [
        [run(recipe, seed, config, corpus, args, device) for seed in seeds] for recipe in RECIPES
    ]
    rows = [summarize(of_recipe, baseline_runs=runs[0]) for of_recipe in runs]
    columns = {
        "recipe": "recipe",
        "parts": "weights + gradients + state",
        "bytes_per_parameter": "bytes per parameter",
        "moved_share": "weights that moved",
        "last_loss": "last loss",
        "largest_distance": "largest distance from AdamW",
        "spread_over_seeds_there": "spread over seeds there",
    }
    own = {
        "dtype": "fp32",
        "parameters": shapes.parameter_count(config),
        "tokens": args.steps * args.batch_size * args.seq_len,
        "first_loss": rows[0]["first_loss"],
        "last_loss": rows[0]["last_loss"],
    }
    report.end_lesson(rows, columns=columns, checked=check(rows), args=args, device=device, **own)
    return 0


if __name__ == "__main__":
    exits.run(main)
