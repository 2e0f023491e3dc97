"""The comparisons, the table and the checks of expert_parallel.py."""

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from common import lesson, runtime
from common.exits import UserError
from common.measure import Traffic, relative_error
from lm import shapes
from lm.weights import load_config

LAST_STEPS = 3  # of a run: they alone count for the busiest expert and rank
TOLERANCE = 1e-5  # relative; what another order of the same sums in fp32 may change
BF16_TOLERANCE = 2**-7  # two roundings of a number with 8 bits
COLUMNS = {
    "variant": "variant",
    "busiest_expert_ratio": "busiest expert / mean",
    "dropped_share": "dropped",
    "busiest_rank_ratio": "busiest rank / mean",
    "sent_bytes": "sent per step",
    "last_loss": "last loss",
    "gradient_error": "error of by hand against one process",
    "by_torch_error": "difference of DTensor and by hand",
}

BF16_COLUMNS = {
    "experts": "experts",
    "k": "k",
    "bf16_share": "router in bf16",
    "bf16_matmul_share": "matmul in bf16, softmax in fp32",
    "fp32_share": "both in fp32",
}


def experts_per_rank(experts: int, ranks: int) -> int:
    """Return how many experts a rank holds. The last may hold fewer, as with DTensor's Shard(0)."""
    return math.ceil(experts / ranks)


def check_sizes(args: argparse.Namespace) -> None:
    """Raise UserError for sizes that cannot be split over the ranks, before any rank starts."""
    ranks = lesson.world_size_after_relaunch(args.device)
    if (ranks - 1) * experts_per_rank(args.experts, ranks) >= args.experts:
        use = math.ceil(args.experts / ranks) * ranks
        raise UserError(
            f"--experts {args.experts} leaves the last of {ranks} ranks without one: use {use}"
        )
    if args.top_k > args.experts:
        raise UserError(
            f"--top-k {args.top_k} is more than --experts {args.experts}: "
            f"use at most {args.experts}"
        )
    size = args.global_batch_size
    if size % ranks > 0:
        use = max(size // ranks, 1) * ranks
        raise UserError(f"--global-batch-size {size} does not divide over {ranks} ranks: use {use}")


def mixtures(net: nn.Module) -> list[nn.Module]:
    """Return the mixtures of a model, one per layer."""
    return [block.mlp for block in net.model.layers.values()]


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    """Return SGD, whose step is proportional to the gradient.

    Adam divides by the gradient's size, which would hide a gradient that is N times too large.
    """
    return torch.optim.SGD(net.parameters(), lr=0.3, foreach=False)


# --- choices


def use_choices_of_ranks(one_process: nn.Module, net: nn.Module) -> None:
    """Make one process choose the experts that the ranks have chosen.

    A sum in another order rounds differently, which may swap two experts that are nearly tied. So
    one process takes the choices of the ranks, after it has found that they are the best, up to
    rounding.
    """
    my_choices = [mixture.routing.choices.cpu() for mixture in mixtures(net)]
    choices_of_ranks = runtime.all_gather(my_choices)
    for layer, mixture in enumerate(mixtures(one_process)):
        choices = torch.cat([choices[layer] for choices in choices_of_ranks])  # [tokens, k]
        mixture.choose = partial(confirm_choices, mixture, choices)


def confirm_choices(mixture: nn.Module, choices: Tensor, probabilities: Tensor) -> Tensor:
    """Return these choices, [tokens, k], if no others are better by more than rounding."""
    choices = choices.to(probabilities.device)
    scores = probabilities + mixture.bias
    best = scores.topk(mixture.k).values
    chosen = scores.gather(-1, choices)
    assert torch.allclose(chosen, best, rtol=TOLERANCE, atol=0), (
        "the ranks' choices are not the best on one process"
    )
    return choices


def kept_on_one_process(mixture: nn.Module, ranks: int) -> Tensor:
    """Return how many rows of each rank's tokens each expert took, [ranks, experts]."""
    tokens_per_rank = len(mixture.routing.choices) // ranks
    kept = []
    for token in mixture.tokens_of_expert:
        rank_of_token = token // tokens_per_rank
        kept.append(torch.bincount(rank_of_token, minlength=ranks))
    return torch.stack(kept, dim=1).cpu()


# --- what bf16 changes


def changed_in_bf16(make_mixture: Callable, device: torch.device) -> list[dict]:
    """Print how many tokens of a bf16 model get other experts than in fp64. Return the rows.

    A model learns which experts a token gets, so a change by rounding is noise.
    """
    tokens_count = 8192
    config = load_config("nano", 256, 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(tokens_count, config.hidden_size, generator=generator)
    tokens = tokens.to(device).bfloat16()
    rows = []
    for experts, k in ((8, 2), (128, 8)):
        mixture = make_mixture(config, experts, k, None).to(device)
        with torch.no_grad():
            weight = torch.randn(mixture.router.weight.shape, generator=generator)
            mixture.router.weight.copy_(weight / config.hidden_size**0.5)
        mixture.to(torch.bfloat16)
        weight = mixture.router.weight.detach()
        scores = F.linear(tokens, weight)
        exact = F.linear(tokens.double(), weight.double()).topk(k).indices
        choices = {
            "bf16": scores.softmax(-1).topk(k).indices,
            "bf16_matmul": scores.float().softmax(-1).topk(k).indices,
            "fp32": mixture.route(tokens).choices,
        }
        row = {"experts": experts, "k": k}
        for name, chosen in choices.items():
            is_equal = (chosen.sort().values == exact.sort().values).all(1)  # [tokens]
            row[f"{name}_share"] = 1 - is_equal.double().mean().item()
        rows.append(row)
    if runtime.is_rank0():
        print(f"\n{tokens_count:,} tokens of a bf16 model: the share that gets other experts\n")
        lesson.print_rows(rows, BF16_COLUMNS)
    return rows


@torch.no_grad()
def check_grouped(make_experts: Callable, device: torch.device) -> str:
    """Assert that the grouped matmuls give what the loop does, in bf16. Return the line for it."""
    config = load_config("nano", 256, 1)
    experts = make_experts(8, config).to(device, torch.bfloat16)
    generator = torch.Generator().manual_seed(0)
    for stack in experts.parameters():
        stack.copy_(0.02 * torch.randn(stack.shape, generator=generator))
    counts = torch.arange(8, device=device)  # the first expert gets no row
    rows = torch.randn(counts.sum().item(), config.hidden_size, generator=generator)
    rows = rows.to(experts.gate_proj)
    grouped = experts.forward_grouped(rows, counts)
    error = relative_error([grouped.float()], [experts(rows, counts).float()])
    assert error < BF16_TOLERANCE, f"grouped matmuls differ from the loop by {error:.1e}"
    return "grouped_mm gives the rows of the loop over experts, up to the rounding of bf16"


# --- comparisons


@dataclass
class Step:
    """The results of a training step."""

    values: list[float]  # cross-entropy, balance loss and norm of the gradients
    chosen: Tensor  # before any is dropped, [layers, experts]
    kept: Tensor  # [layers, ranks, experts]
    errors: dict[str, float]  # by hand, from one process
    torch_errors: dict[str, float]  # with DTensor, from by hand


def part_of_rank(name: str, full: Tensor) -> Tensor:
    """Return what this rank holds of a parameter of one process, or of its gradient."""
    if ".experts." not in name:
        return full
    return full.split(experts_per_rank(len(full), dist.get_world_size()))[dist.get_rank()]


def compare_step(
    one_process: nn.Module,
    by_hand: nn.Module,
    by_torch: nn.Module,
    full_values: list[Tensor],
    values: list[Tensor],
    torch_values: list[Tensor],
) -> Step:
    """Compare the gradients of three models, and their values as Step has them."""
    ranks = dist.get_world_size()
    kept = torch.stack([mixture.kept for mixture in mixtures(by_hand)])
    full_kept = [kept_on_one_process(mixture, ranks) for mixture in mixtures(one_process)]
    assert torch.equal(kept, torch.stack(full_kept)), (
        "the experts took other tokens than on one process"
    )
    gradients = [weight.grad for weight in by_hand.parameters()]
    full_gradients = []
    for name, parameter in one_process.named_parameters():
        full_gradients.append(part_of_rank(name, parameter.grad))
    torch_gradients = [runtime.local_shard(weight.grad) for weight in by_torch.parameters()]
    counts = [mixture.routing.counts for mixture in mixtures(one_process)]
    return Step(
        values=[value.item() for value in values],
        chosen=torch.stack(counts).cpu(),
        kept=kept,
        errors={
            "losses and norms": relative_error(values, full_values),
            "gradients": relative_error(gradients, full_gradients),
        },
        torch_errors={
            "losses and norms": relative_error(torch_values, values),
            "gradients": relative_error(torch_gradients, gradients),
        },
    )


@torch.no_grad()
def compare_weights(
    step: Step, one_process: nn.Module, by_hand: nn.Module, by_torch: nn.Module
) -> None:
    """Compare the new weights, and then copy those of one process to the other models.

    Rounding would grow from step to step, in a long run beyond any tolerance. So each step starts
    from equal weights.
    """
    weights = list(by_hand.parameters())
    full_weights = []
    for name, parameter in one_process.named_parameters():
        full_weights.append(part_of_rank(name, parameter))
    torch_weights = [runtime.local_shard(parameter) for parameter in by_torch.parameters()]
    step.errors["weights"] = relative_error(weights, full_weights)
    step.torch_errors["weights"] = relative_error(torch_weights, weights)
    for target in (weights, torch_weights):
        for weight, full_weight in zip(target, full_weights, strict=True):
            weight.copy_(full_weight)


# --- the results


def largest_errors(errors_of_steps: list[dict[str, float]]) -> dict[str, float]:
    """Return the largest error of all steps and ranks, by name. It is NaN if one is NaN."""
    largest = {}
    for name in errors_of_steps[0]:
        errors = [errors[name] for errors in errors_of_steps]
        largest[name] = torch.tensor(runtime.all_gather(errors)).max().item()
    return largest


def summarize(steps: list[Step], traffic: Traffic) -> dict:
    """Return the row of a variant from its steps. Every rank must call this."""
    chosen = torch.stack([step.chosen for step in steps])  # [steps, layers, experts]
    kept = torch.stack([step.kept for step in steps])  # [steps, layers, ranks, experts]
    ranks, experts = kept.shape[2:]

    rows_of_experts = chosen[-LAST_STEPS:].sum(0).float()  # [layers, experts]
    busiest_expert = rows_of_experts.amax(1) / rows_of_experts.mean(1)  # [layers]
    kept_of_experts = kept[-LAST_STEPS:].sum((0, 2))  # [layers, experts]
    kept_by_owner = kept_of_experts.split(experts_per_rank(experts, ranks), dim=1)
    rows_of_ranks = torch.stack([rows.sum(1) for rows in kept_by_owner], dim=1).float()
    busiest_rank = rows_of_ranks.amax(1) / rows_of_ranks.mean(1)  # [layers]

    cross_entropies, balance_losses, norms = zip(*[step.values for step in steps], strict=True)
    errors = largest_errors([step.errors for step in steps])
    torch_errors = largest_errors([step.torch_errors for step in steps])
    sent_bytes = runtime.all_gather(round(traffic.bytes_sent["all_to_alls"]))
    return {
        "losses": cross_entropies,
        "balance_losses": balance_losses,
        "gradient_norms": norms,
        "errors": errors,
        "gradient_error": errors["gradients"],
        "torch_errors": torch_errors,
        "by_torch_error": torch_errors["gradients"],
        "last_loss": cross_entropies[-1],
        "chosen": chosen.sum((0, 1)).tolist(),
        "kept": kept.sum((0, 1)).tolist(),
        "dropped_share": 1 - kept.sum().item() / chosen.sum().item(),
        "busiest_expert_ratio": busiest_expert.mean().item(),
        "busiest_rank_ratio": busiest_rank.mean().item(),
        "calls": dict(traffic.calls),
        "all_reduce_bytes": float(traffic.bytes_sent["all_reduces"]),
        "all_to_all_bytes_of_ranks": sent_bytes,
        "sent_bytes": round(max(sent_bytes) / len(steps)),
    }


def expected_bytes(kept: Tensor, hidden_size: int) -> list[int]:
    """Return the bytes that each rank sends in all-to-alls. kept is [ranks, experts].

    A rank sends each of its rows twice: in dispatch, and the gradient of its result in the backward
    of combine. It also sends each row that it receives twice: the result in combine, and the
    gradient of the row in the backward of dispatch. Rows that stay on their rank do not count.
    """
    ranks, experts = kept.shape
    kept_by_owner = kept.split(experts_per_rank(experts, ranks), dim=1)
    rows = torch.stack([part.sum(1) for part in kept_by_owner], dim=1)  # [from rank, to rank]
    rows.fill_diagonal_(0)
    bytes_per_row = hidden_size * 4
    return (2 * (rows.sum(1) + rows.sum(0)) * bytes_per_row).tolist()


def how_equal(error: float) -> str:
    """Return a text that says how far two results are apart."""
    if error == 0:
        return "to the bit"
    return f"up to a relative error of {error:.1g}"


def check(rows: list[dict], config: shapes.Config, args: argparse.Namespace) -> list[str]:
    """Assert that all variants train as on one process, and send what their choices require.

    Return a line for each thing that was checked.
    """
    layers = config.num_hidden_layers
    ranks = len(rows[0]["kept"])
    # The router replaces the MLP among the parameters that are all-reduced.
    router = config.hidden_size * args.experts
    mlp = 3 * config.hidden_size * config.intermediate_size
    all_reduced = shapes.parameter_count(config) + layers * (router - mlp)
    all_reduced += 3  # two losses, and the squares for the norm
    all_reduce_bytes = args.steps * 4 * all_reduced * 2 * (ranks - 1) / ranks

    largest_error = 0.0
    largest_torch_error = 0.0
    for row in rows:
        variant = row["variant"]
        for name, error in row["errors"].items():
            assert error <= TOLERANCE, f"{variant}: {name} differ from one process by {error:.0e}"
            largest_error = max(largest_error, error)
        for name, error in row["torch_errors"].items():
            assert error <= TOLERANCE, (
                f"{variant}: with DTensor {name} differ from by hand by {error:.0e}"
            )
            largest_torch_error = max(largest_torch_error, error)

        calls = row["calls"]
        assert calls["all_gathers"] == layers * args.steps, f"{variant}: calls are {calls}"
        assert calls["all_to_alls"] == 4 * layers * args.steps, f"{variant}: calls are {calls}"
        sent = row["all_reduce_bytes"]
        assert math.isclose(sent, all_reduce_bytes), (
            f"{variant}: all-reduces sent {sent} bytes, and must send {all_reduce_bytes}"
        )
        sent = row["all_to_all_bytes_of_ranks"]
        expected = expected_bytes(torch.tensor(row["kept"]), config.hidden_size)
        assert sent == expected, (
            f"{variant}: the ranks sent {sent} bytes in all-to-alls, and must send {expected}"
        )
    return [
        "by hand, each step has the losses, gradients, norm and new weights of one process, "
        + how_equal(largest_error),
        "with the exchange of train_3d.py, each step has those of the version by hand, "
        + how_equal(largest_torch_error),
        "the experts took the same tokens as on one process, and each rank sent the bytes that "
        "follow from these",
        f"by hand, a step has {4 * layers} all-to-alls, and {layers} all-gathers of counts",
    ]
