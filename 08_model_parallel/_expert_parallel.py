"""What expert_parallel.py stands on: its collectives, the comparison with one process, what each rank must send."""

import argparse
import math
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from common import measure, runtime
from common.exits import UserError
from common.measure import Traffic
from lm import shapes

LAST_STEPS = 5  # of a run: they alone count for the busiest expert and rank
TOLERANCE = 1e-5  # relative; what another order of the same sums in fp32 may change
COLUMNS = {
    "way": "way",
    "busiest_expert_ratio": "busiest expert / mean",
    "dropped_share": "dropped",
    "busiest_rank_ratio": "busiest rank / mean",
    "sent_bytes": "sent a step",
    "last_loss": "last loss",
    "gradient_error": "gradients' error",
}


def all_to_all(rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    """The first sent[0] rows go to rank 0, the next sent[1] to rank 1, and so on; received[r] rows come from rank r."""
    arrived = rows.new_empty(sum(received), rows.shape[1])
    dist.all_to_all_single(arrived, rows.contiguous(), received, sent)
    return arrived


def mixtures(net: nn.Module) -> list[nn.Module]:
    return [block.mlp for block in net.model.layers.values()]


def check_sizes(args: argparse.Namespace) -> None:
    """UserError for what so many ranks cannot divide, before any of them starts."""
    ranks = runtime.world_size_after_relaunch(args.device)
    if args.experts < ranks:
        raise UserError(
            f"--experts {args.experts} leaves some of {ranks} ranks without one: use at least {ranks}"
        )
    if args.top_k > args.experts:
        raise UserError(
            f"--top-k {args.top_k} is more than --experts {args.experts}: use at most {args.experts}"
        )
    if (size := args.global_batch_size) % ranks:
        use = max(size // ranks, 1) * ranks
        raise UserError(f"--global-batch-size {size} does not divide over {ranks} ranks: use {use}")


def use_choices_of_ranks(one_process: nn.Module, net: nn.Module) -> None:
    """Another order of a sum rounds differently, which may swap two experts that are nearly tied. So one process takes
    the choices of the ranks, after it has found that they are the best, up to rounding."""
    of_ranks = runtime.all_gather([mixture.choices.cpu() for mixture in mixtures(net)])
    for mixture, *choices in zip(mixtures(one_process), *of_ranks, strict=True):
        mixture.choose = partial(confirm_choices, torch.cat(choices))


def confirm_choices(choices: Tensor, probabilities: Tensor, k: int) -> Tensor:
    choices = choices.to(probabilities.device)
    best, chosen = probabilities.topk(k).values, probabilities.gather(-1, choices)
    assert torch.allclose(chosen, best, rtol=TOLERANCE, atol=0), (
        "the ranks' choices are not the best on one process"
    )
    return choices


def kept_of_ranks(mixture: nn.Module, ranks: int) -> Tensor:
    """From what one process has computed: the choices of each rank's tokens that each expert took, [ranks, experts]."""
    tokens_of_rank = len(mixture.choices) // ranks
    kept = [
        torch.bincount(token // tokens_of_rank, minlength=ranks)
        for token in mixture.tokens_of_expert
    ]
    return torch.stack(kept, dim=1).cpu()


def compare(
    net: nn.Module, one_process: nn.Module, found: list[Tensor], expected: list[Tensor]
) -> dict:
    """A step of both. `found` and `expected` are cross-entropy, balance loss and norm of the gradient."""
    kept = torch.stack([mixture.kept for mixture in mixtures(net)])
    expected_kept = torch.stack(
        [kept_of_ranks(mixture, dist.get_world_size()) for mixture in mixtures(one_process)]
    )
    assert torch.equal(kept, expected_kept), "the experts took other tokens than on one process"
    whole = dict(one_process.named_parameters())
    # of my experts, and of all else
    mine = {name: parameter.grad for name, parameter in net.named_parameters()}
    gradient_error = measure.relative_error([*mine.values()], [whole[name].grad for name in mine])
    return {
        "values": [value.item() for value in found],
        "errors": [measure.relative_error(found, expected), gradient_error],
        "chosen": torch.stack([mixture.counts for mixture in mixtures(one_process)]).cpu(),
        "kept": kept,
    }


@torch.no_grad()
def make_equal(net: nn.Module, one_process: nn.Module) -> float:
    """The relative error of the weights after a step. Rounding would grow from step to step, in a long run beyond any
    tolerance. So each step starts from equal weights: those of one process."""
    whole = dict(one_process.named_parameters())
    mine = dict(net.named_parameters())
    error = measure.relative_error([*mine.values()], [whole[name] for name in mine])
    for name, parameter in mine.items():
        parameter.copy_(whole[name])
    return error


def summarize(steps: list[dict], sent: Traffic) -> dict:
    """The steps of a way as a row of the table. Every rank must call it."""
    # [steps, layers, experts], before any is dropped
    chosen = torch.stack([step["chosen"] for step in steps])
    kept = torch.stack([step["kept"] for step in steps])  # [steps, layers, ranks, experts]
    of_experts = chosen[-LAST_STEPS:].sum(0).float()  # [layers, experts]
    of_ranks = kept[-LAST_STEPS:].sum((0, 2)).tensor_split(kept.shape[2], dim=1)
    # [layers, ranks]
    of_ranks = torch.stack([experts.sum(1) for experts in of_ranks], dim=1).float()
    cross_entropies, balance_losses, norms = zip(*(step["values"] for step in steps), strict=True)
    # NaN if one is
    errors = (
        torch.tensor(runtime.all_gather([step["errors"] for step in steps])).amax((0, 1)).tolist()
    )
    sent_bytes = runtime.all_gather(round(sent.bytes_sent["all_to_alls"]))
    return {
        "losses": cross_entropies,
        "balance_losses": balance_losses,
        "gradient_norms": norms,
        "errors": dict(zip(("losses and norms", "gradients", "weights"), errors, strict=True)),
        "gradient_error": errors[1],
        "last_loss": cross_entropies[-1],
        "chosen": chosen.sum((0, 1)).tolist(),
        "kept": kept.sum((0, 1)).tolist(),
        "dropped_share": 1 - kept.sum().item() / chosen.sum().item(),
        # the mean of the layers
        "busiest_expert_ratio": (of_experts.amax(1) / of_experts.mean(1)).mean().item(),
        "busiest_rank_ratio": (of_ranks.amax(1) / of_ranks.mean(1)).mean().item(),
        "calls": dict(sent.calls),
        "all_reduce_bytes": float(sent.bytes_sent["all_reduces"]),
        "all_to_all_bytes_of_ranks": sent_bytes,
        "sent_bytes": round(max(sent_bytes) / len(steps)),
    }


def bytes_of_ranks(kept: Tensor, hidden_size: int) -> list[int]:
    """What each rank sends in all-to-alls, by the choices of each rank that each expert has taken. Twice each row that
    leaves, there in forward and the gradient of its output in backward. Twice each that comes, back in both."""
    ranks = len(kept)
    # [from, to]
    rows = torch.stack([experts.sum(1) for experts in kept.tensor_split(ranks, dim=1)], dim=1)
    rows.fill_diagonal_(0)
    return (2 * (rows.sum(0) + rows.sum(1)) * hidden_size * 4).tolist()


def check(rows: list[dict], config: shapes.Config, args: argparse.Namespace) -> list[str]:
    layers, ranks, largest = config.num_hidden_layers, len(rows[0]["kept"]), 0.0
    calls = {
        "all_gathers": layers * args.steps,
        "all_to_alls": 4 * layers * args.steps,
        "all_reduces": args.steps,
    }
    # numbers more in each layer
    router_for_mlp = config.hidden_size * (args.experts - 3 * config.intermediate_size)
    # two losses, and squares for the norm
    all_reduced = shapes.parameter_count(config) + layers * router_for_mlp + 3
    for row in rows:
        for what, error in row["errors"].items():
            # NaN fails, too
            assert error <= TOLERANCE, (
                f"{row['way']}: {what} differ from one process by {error:.0e}"
            )
            largest = max(largest, error)
        assert row["calls"] == calls, f"{row['way']}: calls are {row['calls']}, and must be {calls}"
        found, must = (
            row["all_reduce_bytes"],
            args.steps * 4 * all_reduced * 2 * (ranks - 1) / ranks,
        )
        assert math.isclose(found, must), (
            f"{row['way']}: all-reduces sent {found} bytes, and must send {must}"
        )
        found, must = (
            row["all_to_all_bytes_of_ranks"],
            bytes_of_ranks(torch.tensor(row["kept"]), config.hidden_size),
        )
        assert found == must, (
            f"{row['way']}: the ranks sent {found} bytes in all-to-alls, and must send {must}"
        )
    return [
        f"from equal weights, each step has losses, gradients, norm and new weights of one process ({largest:.0e})",
        f"experts took the tokens that they take on one process; from these follow the bytes that {ranks} ranks sent",
        f"a step has {4 * layers} all-to-alls, {layers} all-gathers of counts, and an all-reduce of all but experts",
    ]
