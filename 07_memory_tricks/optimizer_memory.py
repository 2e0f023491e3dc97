"""What an optimizer keeps, in fewer bytes: AdamW's two moments in 16 and 8 bits, or factored.

With fp32 weights and gradients AdamW takes 16 bytes per parameter: 4 + 4, and 8 for its two
moments. The moments can be kept in bf16, or in 8 bits, in blocks of 256 values with a scale each.
Adafactor keeps a row and a column instead of the second moment, and no first one. A step inside
backward uses each gradient as soon as it is complete, so that gradients need no memory of their
own. bf16 weights lose updates that are rounded to the nearest; stochastic rounding keeps them on
average.

    laptop    python 07_memory_tricks/optimizer_memory.py
    one GPU   python 07_memory_tricks/optimizer_memory.py --device cuda
              python 07_memory_tricks/optimizer_memory.py --steps 300 --batch-size 24
    cluster   it uses one process only: 06_fsdp_zero/ shards what is kept per parameter

What to look at: bytes per parameter; the loss curves; the share of weights that moved, above all at
--lr 3e-5, as in fine-tuning. Expected on an H100, where the model is wider: the same bytes per
parameter, 16 for AdamW to 8 with bf16 weights.
Previous: chunked_loss.py. Next: offload.py.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import islice
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _optimizer_memory as helper
import torch
from _optimizer_memory import BLOCK, INSIDE
from torch import Tensor, nn
from torch.optim import Optimizer

from common import lesson, runtime
from lm import data, shapes
from lm.weights import build, load_config
from training.batches import Batches

# --- 1. no gradients


def step_inside_backward(
    net: nn.Module, make: Callable[[list[Tensor]], Optimizer]
) -> list[Optimizer]:
    """Make an optimizer for each tensor. Autograd calls it when the tensor's gradient is complete.

    There is no moment at which all gradients exist, so they cannot be clipped by their norm.
    """

    def update(parameter: Tensor) -> None:
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()  # the gradient's memory is free for the next one

    optimizers = {parameter: make([parameter]) for parameter in net.parameters()}
    for parameter in optimizers:
        parameter.register_post_accumulate_grad_hook(update)
    return list(optimizers.values())


# --- 2. moments and weights in 16 bits, moments in 8


def stochastic_round(x: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Round fp32 to bf16, up or down by chance, so that the mean is x.

    A number 0.3 of the way up goes up three times in ten. bf16 is the upper half of the bits of
    fp32: add a random lower half, which carries into the upper one that often, and drop it.

    NaN and infinity stay what they are: the NaN of NVIDIA's arithmetic has all lower bits set, so
    the carry would make a zero of it. The carry would also make infinity of the largest fp32
    numbers. They become the largest bf16 number.
    """
    noise = torch.randint(1 << 16, x.shape, generator=generator, dtype=torch.int32, device=x.device)
    upper_half = (x.view(torch.int32) + noise) & -(1 << 16)
    largest = torch.finfo(torch.bfloat16).max
    rounded = upper_half.view(torch.float32).clamp(-largest, largest)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)  # the dropped bits are zero


def quantize(x: Tensor, book: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes, uint8 [blocks, 256], and the largest magnitude of each block, its scale."""
    padding = -x.numel() % BLOCK
    blocks = nn.functional.pad(x.flatten(), (0, padding)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    middles = (book[1:] + book[:-1]) / 2
    codes = torch.bucketize(blocks / scales, middles, out_int32=True)  # the nearest in the book
    return codes.to(torch.uint8), scales


@cache
def code_book(moment: str, device: torch.device) -> Tensor:
    """Return the values that 8 bits can name, up to 1 (Dettmers et al. 2022, section 2).

    Each decade from 1e-6 on has evenly spaced values, twice as many as the one below. With even
    spacing throughout, all second moments under a 500th of the largest would become zero, and
    AdamW divides by their root. So the book of second moments has no zero, and no signs.
    """
    signed = moment == "first"
    values = [1.0, 0.0] if signed else [1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, count + 1)
        middles = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += middles.tolist()
        if signed:
            values += (-middles).tolist()
    return torch.tensor(sorted(values), device=device)


class CompactAdamW(Optimizer):
    """AdamW (Loshchilov and Hutter 2019, algorithm 2) in fp32, a tensor at a time.

    Between steps its moments are kept in 16 or 8 bits. bf16 moments and bf16 weights are rounded
    stochastically.

    torch has bf16 moments, too: on CUDA the fused AdamW of torch 2.13 keeps moments in bf16 if they
    are created before its first step. It then takes 12 bytes per parameter instead of 16, without
    this class (torch 2.11 and the CPU raise an error):

        for parameter in model.parameters():
            zeros = torch.zeros_like(parameter, dtype=torch.bfloat16)
            step = torch.zeros((), device=parameter.device)
            optimizer.state[parameter] = dict(step=step, exp_avg=zeros, exp_avg_sq=zeros.clone())

    It rounds to the nearest, and a change of less than 0.2 % is then lost. With beta2 = 0.95 the
    second moment falls by 5 % a step without new gradients, which is kept. With beta2 = 0.999 it
    falls by 0.1 %, which is lost: the moment never falls. Stochastic rounding keeps both.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, bits: int) -> None:
        super().__init__(
            parameters, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
        )
        self.bits = bits

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """Update all parameters that have a gradient. Return the loss of `closure`, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"]):
                if parameter.grad is not None:  # it is None if frozen or not used
                    self.update(parameter, number, group)
        return loss

    def load_state_dict(self, state_dict: dict) -> None:
        """Load the state in its own dtypes. torch casts it to the dtype of the parameters."""
        super().load_state_dict(state_dict)
        parameters = []
        saved_numbers = []
        for group, saved_group in zip(self.param_groups, state_dict["param_groups"], strict=True):
            parameters += group["params"]
            saved_numbers += saved_group["params"]
        for parameter, number in zip(parameters, saved_numbers, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                if name != "step":
                    self.state[parameter][name] = value.to(parameter.device, copy=True)

    def update(self, parameter: Tensor, number: int, group: dict) -> None:
        """Update one parameter, the one with this number in its group."""
        lr = group["lr"]
        beta1, beta2 = group["betas"]
        state = self.state[parameter]
        step = state.get("step", 0) + 1
        state["step"] = step
        # The seed depends on step and tensor, so that a resumed run draws the same numbers.
        generator = torch.Generator(parameter.device).manual_seed(1_000_003 * step + number)
        weights = parameter.float()  # of an fp32 parameter this is the parameter itself
        gradient = parameter.grad.float()
        first = self.load_moment(state, "first", parameter)
        second = self.load_moment(state, "second", parameter)

        weights.mul_(1 - lr * group["weight_decay"])
        first.lerp_(gradient, 1 - beta1)
        second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        root = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
        weights.addcdiv_(first, root, value=-lr / (1 - beta1**step))

        self.store_moment(state, "first", first, generator)
        self.store_moment(state, "second", second, generator)
        if parameter.dtype == torch.bfloat16:
            parameter.copy_(stochastic_round(weights, generator))

    def load_moment(self, state: dict, name: str, parameter: Tensor) -> Tensor:
        """Return the first or second moment in fp32. Before the first step it is 0."""
        if state["step"] == 1:
            return torch.zeros_like(parameter, dtype=torch.float32)
        if self.bits == 16:
            return state[name].float()
        book = code_book(name, parameter.device)
        values = book[state[f"{name}_codes"].int()] * state[f"{name}_scales"]  # [blocks, BLOCK]
        return values.flatten()[: parameter.numel()].view_as(parameter)

    def store_moment(
        self, state: dict, name: str, moment: Tensor, generator: torch.Generator
    ) -> None:
        """Keep a moment in 16 or 8 bits."""
        if self.bits == 16:
            state[name] = stochastic_round(moment, generator)
            return
        codes, scales = quantize(moment, code_book(name, moment.device))
        state[f"{name}_codes"] = codes
        state[f"{name}_scales"] = scales


# --- 3. the recipes


def adafactor(parameters: Iterable[Tensor], lr: float) -> Optimizer:
    """Return Adafactor. Its rate is a share of the weights' root mean square, which is about 0.02.

    So it takes 25 times AdamW's rate, and a 25th of its decay.
    """
    return torch.optim.Adafactor(parameters, lr=25 * lr, weight_decay=0.1 / 25)


torch_adamw = partial(torch.optim.AdamW, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
RECIPES = {
    "AdamW": torch_adamw,
    "moments in bf16": partial(CompactAdamW, bits=16),
    "moments in 8 bits": partial(CompactAdamW, bits=8),
    "Adafactor": adafactor,
    INSIDE: torch_adamw,
    "bf16 weights": torch_adamw,
    "bf16 weights, stochastic rounding": partial(CompactAdamW, bits=16),
}


def run(recipe: str, seed: int, config: shapes.Config, corpus: data.Corpus, args, device) -> dict:
    """Train from the weights of this seed, on its batches. Count what exists after backward."""
    net = build(args.model, config, seed=seed, device=device)
    if recipe.startswith("bf16 weights"):
        net.to(torch.bfloat16)
    start = [parameter.detach().clone() for parameter in net.parameters()]
    make = partial(RECIPES[recipe], lr=args.lr)
    optimizers = []
    if recipe == INSIDE:
        optimizers += step_inside_backward(net, make)
    else:
        optimizers.append(make(net.parameters()))

    sizes = Namespace(
        seed=seed, seq_len=args.seq_len, global_batch_size=args.batch_size, micro_batch_size=None
    )
    batches = Batches(*data.sequences(corpus, sizes.seq_len), sizes, rank=0, world_size=1)
    losses = []
    for inputs, targets in islice(batches.stream(0), args.steps):
        loss = net(inputs.to(device), targets.to(device))
        loss.backward()
        gradients = [weight.grad for weight in net.parameters() if weight.grad is not None]
        gradient_bytes = sum(gradient.nbytes for gradient in gradients)
        del gradients
        for optimizer in optimizers:
            optimizer.step()  # one inside backward finds no gradient any more, and does nothing
            optimizer.zero_grad()
        losses.append(loss.detach())

    moved = 0
    for weight, before in zip(net.parameters(), start, strict=True):
        moved += (weight != before).sum().item()
    count = shapes.parameter_count(config)
    held = helper.held_bytes(net, optimizers, gradient_bytes)
    formulas = [helper.state_bytes_by_formula(recipe, weight.shape) for weight in net.parameters()]
    return {
        "recipe": recipe,
        **held,
        "parts": " + ".join(f"{size / count:.4g}" for size in held.values()),
        "bytes_per_parameter": sum(held.values()) / count,
        "optimizer_bytes_by_formula": sum(formulas),
        "moved_share": moved / count,
        "losses": torch.stack(losses).tolist(),
    }


def main() -> int:
    args = lesson.parse_flags(
        __doc__,
        gpu={"model": "wide", "seq_len": 1024, "batch_size": 8, "steps": 10, "lr": 6e-4},
        model="nano",
        seq_len=64,
        batch_size=1,
        steps=4,
        seeds=2,
        lr=2e-3,
    )
    config = load_config(args.model, 256, args.seq_len)
    device = runtime.single_device(args.device)
    # Without this, AdamW's curve on a GPU would differ from run to run.
    runtime.seed_all(0, deterministic=device.type == "cuda")
    corpus = data.load_corpus("stdlib")

    rows = []
    for recipe in RECIPES:
        runs = [run(recipe, seed, config, corpus, args, device) for seed in range(args.seeds)]
        if recipe == "AdamW":
            baseline_runs = runs
        rows.append(helper.summarize(runs, baseline_runs))
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=helper.check(rows, stochastic_round),
        args=args,
        device=device,
        dtype="fp32",
        parameters=shapes.parameter_count(config),
        tokens=args.steps * args.batch_size * args.seq_len,
        first_loss=rows[0]["first_loss"],
        last_loss=rows[0]["last_loss"],
    )
    return 0


if __name__ == "__main__":
    exits.run(main)
