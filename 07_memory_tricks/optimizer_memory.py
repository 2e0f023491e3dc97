"""What an optimizer keeps, in fewer bytes: AdamW's two moments in 16 and in 8 bits, factored, and no gradients at all.

With fp32 weights and gradients AdamW takes 16 bytes per parameter: 4 + 4, and 8 for its two moments. The moments can be
kept in bf16, with stochastic rounding, or in 8 bits, in blocks of 256 values with a scale each. Adafactor keeps a row
and a column instead of the second moment, and no first one. A step inside backward uses each gradient as soon as it is
there. The last rows keep bf16 weights, with an fp32 master copy and without.

    laptop    python 07_memory_tricks/optimizer_memory.py
    one GPU   python 07_memory_tricks/optimizer_memory.py --steps 300 --batch-size 24
    cluster   one process is all it uses: what is kept per parameter is divided by 06_fsdp_zero/, not changed

A step inside backward cannot clip by the norm of all gradients, which is known only at the end, nor accumulate. Look
for: bytes per parameter; loss curves; bf16 weights that never move. Before: chunked_loss.py. Next: offload.py.
"""

import sys
from argparse import Namespace
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # common/, with nothing installed
from _optimizer_memory import BASELINE, BF16_NEAREST, BF16_STOCHASTIC, RECIPES, check, measure_bytes, summarize

from common import data, exits, lesson, model, runtime, shapes

BLOCK = 256  # values that share a scale
LOW_LR = 3e-5  # of fine-tuning: an update is then smaller than the spacing of most bf16 weights


def step_inside_backward(net: nn.Module, make: Callable[[list[dict]], torch.optim.Optimizer]) -> list:
    """An optimizer for each tensor, which autograd calls when that tensor's gradient is complete."""
    optimizers = []
    for number, parameter in enumerate(net.parameters()):
        optimizer = make([{"params": [parameter], "number": number}])

        def update(_: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()  # the gradient's memory is free for the next one

        parameter.register_post_accumulate_grad_hook(update)
        optimizers.append(optimizer)
    return optimizers


def stochastic_round(x: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 to bf16, up or down by chance, so that the mean is x: 0.3 of the way up goes up three times in ten.

    bf16 is the upper half of an fp32 number's bits. Add a random lower half, which carries with just that probability,
    and cut the lower half off.
    """
    noise = torch.randint(1 << 16, x.shape, generator=generator, dtype=torch.int32, device=x.device)
    upper_half = (x.view(torch.int32) + noise) & -(1 << 16)
    return upper_half.view(torch.float32).to(torch.bfloat16)  # exact: what bf16 lacks is zero


def quantize(x: Tensor, book: Tensor) -> tuple[Tensor, Tensor]:
    """Codes [blocks, 256] in uint8, and the scale of each block: its largest magnitude."""
    blocks = nn.functional.pad(x.flatten(), (0, -x.numel() % BLOCK)).view(-1, BLOCK)
    scales = blocks.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
    between = (book[1:] + book[:-1]) / 2
    places = torch.bucketize(blocks / scales, between, out_int32=True)  # of the nearest values in the book
    return places.to(torch.uint8), scales


def dequantize(codes: Tensor, scales: Tensor, book: Tensor, shape: torch.Size) -> Tensor:
    return (book[codes.int()] * scales).flatten()[: shape.numel()].view(shape)


class CompactAdamW(torch.optim.Optimizer):
    """AdamW that computes in fp32, one tensor at a time, and keeps its moments as fp32, bf16 or 8bit between steps.

    bf16 weights are kept by fp32 `master` copies, or by stochastic rounding.
    """

    def __init__(self, parameters: Iterable[Tensor], lr: float, moments: str, master: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "number": 0})
        self.moments, self.master = moments, master
        self.books = {name: book.to(self.param_groups[0]["params"][0].device) for name, book in BOOKS.items()}

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for number, parameter in enumerate(group["params"], start=group["number"]):
                if parameter.grad is not None:
                    self.update(parameter, number, group)

    def update(self, parameter: Tensor, number: int, group: dict) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = 0
            for name in BOOKS:
                self.keep(state, name, torch.zeros_like(parameter, dtype=torch.float32), generator=None)
            if self.master:
                state["master"] = parameter.float()
        state["step"] += 1
        # seeded anew by step and tensor, so that a resumed run draws the same, and one inside backward
        generator = torch.Generator(parameter.device).manual_seed(1_000_003 * state["step"] + number)
        weights = state["master"] if self.master else parameter.float()  # an fp32 parameter is itself
        first, second = (self.kept(state, name, parameter) for name in BOOKS)
        adamw(weights, parameter.grad.float(), first, second, state["step"], group)
        self.keep(state, "first", first, generator)
        self.keep(state, "second", second, generator)
        if parameter.dtype == torch.bfloat16:
            parameter.copy_(weights if self.master else stochastic_round(weights, generator))

    def keep(self, state: dict, name: str, moment: Tensor, generator: torch.Generator | None) -> None:
        if self.moments == "8bit":
            state[f"{name}_codes"], state[f"{name}_scales"] = quantize(moment, self.books[name])
        elif self.moments == "bf16":  # to the nearest, a change of 0.1 % (beta2 = 0.999) would be lost
            state[name] = moment.bfloat16() if generator is None else stochastic_round(moment, generator)
        else:
            state[name] = moment

    def kept(self, state: dict, name: str, parameter: Tensor) -> Tensor:
        if self.moments == "8bit":
            codes, scales = state[f"{name}_codes"], state[f"{name}_scales"]
            return dequantize(codes, scales, self.books[name], parameter.shape)
        return state[name].float()

    def load_state_dict(self, state_dict: dict) -> None:
        """As saved: torch casts an optimizer's state to its parameter's type, and would make fp32 of 8-bit codes."""
        super().load_state_dict(state_dict)
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=True):
            for parameter, number in zip(group["params"], saved["params"], strict=True):
                for name, value in state_dict["state"].get(number, {}).items():
                    kept = value.to(parameter.device, copy=True) if isinstance(value, Tensor) else value
                    self.state[parameter][name] = kept


def adamw(weights: Tensor, gradient: Tensor, first: Tensor, second: Tensor, step: int, group: dict) -> None:
    """Loshchilov and Hutter 2019, algorithm 2: all in fp32 and in place."""
    lr, (beta1, beta2) = group["lr"], group["betas"]
    weights.mul_(1 - lr * group["weight_decay"])
    first.lerp_(gradient, 1 - beta1)
    second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    root = (second / (1 - beta2**step)).sqrt_().add_(group["eps"])
    weights.addcdiv_(first, root, value=-lr / (1 - beta1**step))


def code_book(signed: bool) -> Tensor:
    """The values that 8 bits can name, up to 1: dense where values are large, and still there at a millionth.

    Dynamic (Dettmers et al. 2022, section 2): each decade from 1e-6 to 1 is cut evenly, and each has twice the values
    of the one below it. Evenly spaced codes would make zeros of all second moments under a 500th of the largest, and
    AdamW divides by their root. For the same reason the unsigned book, which is for second moments, has no zero.
    """
    values = [1.0, 0.0] if signed else [1.0]
    for decade in range(7):
        count = 2**decade if signed else 2 ** (decade + 1)
        edges = torch.linspace(0.1, 1, count + 1)
        middles = 10.0 ** (decade - 6) * (edges[:-1] + edges[1:]) / 2
        values += [*middles.tolist(), *((-middles).tolist() if signed else ())]
    return torch.tensor(sorted(values))


BOOKS = {"first": code_book(signed=True), "second": code_book(signed=False)}


def make_optimizers(recipe: str, net: nn.Module, lr: float) -> list[torch.optim.Optimizer]:
    """What trains the net. The last three recipes want its weights in bf16."""

    def torch_adamw(parameters: Iterable[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    parameters = list(net.parameters())
    match recipe:
        case "AdamW" | "bf16 weights":
            return [torch_adamw(parameters)]
        case "moments in bf16" | "bf16 weights, stochastic rounding":
            return [CompactAdamW(parameters, lr, moments="bf16")]
        case "moments in 8 bits":
            return [CompactAdamW(parameters, lr, moments="8bit")]
        case "Adafactor":  # its rate is a share of the weights' root mean square, which is about 0.02
            return [torch.optim.Adafactor(parameters, lr=25 * lr, weight_decay=0.1 / 25)]
        case "step inside backward":
            return step_inside_backward(net, torch_adamw)
        case "bf16 weights, fp32 master":
            return [CompactAdamW(parameters, lr, moments="fp32", master=True)]
    raise ValueError(recipe)


def run(recipe: str, seed: int, lr: float, config: shapes.Config, corpus: data.Corpus, args, device) -> dict:
    """Train for --steps from the weights of this seed, on its batches."""
    net = model.build(args.model, config, seed=seed, device=device)
    if recipe.startswith("bf16 weights"):
        net.to(torch.bfloat16)
    start = [parameter.detach().clone() for parameter in net.parameters()]
    optimizers = make_optimizers(recipe, net, lr)
    sizes = Namespace(seed=seed, seq_len=args.seq_len, global_batch_size=args.batch_size, micro_batch_size=None)
    batches = data.Batches(corpus, sizes, rank=0, world_size=1).stream(0)

    def step(inputs: Tensor, targets: Tensor) -> Tensor:
        loss = net(inputs, targets)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()  # those inside backward find no gradient any more, and do nothing
            optimizer.zero_grad()
        return loss.detach()

    losses = [step(*(tensor.to(device) for tensor in next(batches))) for _ in range(args.steps)]
    moved = sum((now != before).sum() for now, before in zip(net.parameters(), start, strict=True)).item()
    start.clear()  # on a GPU it would count in the peak
    return {
        "recipe": recipe,
        "losses": [loss.item() for loss in losses],
        "moved_share": moved / shapes.parameter_count(config),
        **(measure_bytes(net, optimizers, step, args.seq_len) if seed == 0 else {}),
    }


def main() -> int:
    args = lesson.flags(__doc__, model="nano", seq_len=64, batch_size=1, steps=4, seeds=3, lr=2e-3)
    config = shapes.load_config(args.model, 256, args.seq_len)
    device = runtime.single_device(args.device)
    runtime.seed_all(0, deterministic=device.type == "cuda")  # or AdamW's curve would not come out twice alike
    lesson.one_batch(args.batch_size, args.seq_len, device)  # raises a UserError if the text is too short
    job = (config, data.load_corpus("stdlib"), args, device)
    runs = [run(recipe, seed, args.lr, *job) for seed in range(args.seeds) for recipe in RECIPES]
    low = [run(recipe, 0, LOW_LR, *job) for recipe in (BASELINE, BF16_NEAREST, BF16_STOCHASTIC)]
    parameters = shapes.parameter_count(config)
    rows = [summarize(recipe, runs, parameters) for recipe in RECIPES]
    checked = check(rows, low, config)
    columns = {
        "recipe": "recipe",
        "formula": "weights + gradients + state",
        "bytes_per_parameter": "bytes per parameter",
        "peak_bytes": "peak of a step",
        "last_loss": "last loss",
        "largest_distance": "largest distance from AdamW",
        "spread_over_seeds_there": "spread over seeds there",
    }
    own = {
        "dtype": "fp32",
        "parameters": parameters,
        "tokens": args.steps * args.batch_size * args.seq_len,
        "low_lr_runs": low,
    }
    own |= {"low_lr": LOW_LR, "first_loss": rows[0]["first_loss"], "last_loss": rows[0]["last_loss"]}
    lesson.end(rows, columns=columns, checked=checked, args=args, device=device, **own)
    return 0


if __name__ == "__main__":
    exits.run(main)
