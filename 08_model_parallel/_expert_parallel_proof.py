"""The proof of expert_parallel.py: the same experts on one process, written another way, and what must be equal."""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _expert_parallel_collectives import counts
from torch import Tensor, nn

from old import metrics, model, runtime, shapes

LEARNING_RATE = 0.05  # of SGD. AdamW divides by the gradients' size, and so would hide that they are N times too large.


class LocalMixture(nn.Module):
    """All experts on one process: each takes its tokens by a mask. Nothing is sorted, and nothing is sent."""

    def __init__(self, config: shapes.Config, experts: int, k: int, capacity_factor: float | None) -> None:
        super().__init__()
        self.k, self.capacity_factor = k, capacity_factor
        self.router = nn.Linear(config.hidden_size, experts, bias=False)
        self.experts = nn.ModuleDict({str(i): model.MLP(config) for i in range(experts)})

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        self.probabilities = torch.softmax(self.router(tokens), dim=-1)
        weights, self.choices = self.probabilities.topk(self.k)
        if self.k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        chosen = F.one_hot(self.choices, len(self.experts)).sum(1)  # [tokens, experts]
        self.taken = chosen.bool()
        if self.capacity_factor is not None:
            capacity = math.ceil(self.capacity_factor * self.choices.numel() / len(self.experts))
            self.taken &= chosen.cumsum(0) <= capacity
        self.balance_loss = balance_of_parts(self.probabilities, self.choices, 1)
        mixed = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts.values()):
            of_expert = (self.choices == number) & self.taken[:, number, None]
            token, place = of_expert.nonzero(as_tuple=True)
            mixed = mixed.index_add(0, token, expert(tokens[token]) * weights[token, place, None])
        return mixed.view_as(x)


def balance_of_parts(probabilities: Tensor, choices: Tensor, parts: int) -> Tensor:
    """The mean of the balance losses that so many equal parts of the batch have, each from its own tokens."""
    losses = []
    for probabilities_of_part, choices_of_part in zip(probabilities.chunk(parts), choices.chunk(parts), strict=True):
        share_of_choices = F.one_hot(choices_of_part, probabilities.shape[1]).float().mean((0, 1))
        losses.append(probabilities.shape[1] * share_of_choices @ probabilities_of_part.mean(0))
    return torch.stack(losses).mean()


def mixtures(net: nn.Module) -> list[nn.Module]:
    return [block.mlp for block in net.model.layers.values()]


@contextmanager
def watch(net: nn.Module, look: Callable[[nn.Module], object]) -> Iterator[list]:
    """What `look` sees in each mixture after each of its forwards, in their order."""
    seen: list = []
    hooks = [mixture.register_forward_hook(lambda mixture, *_: seen.append(look(mixture))) for mixture in mixtures(net)]
    yield seen
    for hook in hooks:
        hook.remove()


def my_part(tensor: Tensor) -> Tensor:
    """This rank's sequences of those of all ranks."""
    return tensor.chunk(dist.get_world_size())[dist.get_rank()]


def prove(
    build_net: Callable[..., nn.Module],
    capacity_factor: float | None,
    compute_gradients: Callable[..., tuple[Tensor, Tensor]],
    steps: list[list[list[Tensor]]],
    clip_norm: float,
    balance_weight: float,
) -> dict:
    """Train over the ranks, and on this rank alone with all tokens and all experts. Returns what was found of both."""
    net = build_net(capacity_factor)
    one_process = build_net(capacity_factor, mixture=LocalMixture)
    optimizers = [torch.optim.SGD(one.parameters(), lr=LEARNING_RATE) for one in (net, one_process)]
    found: dict[str, list] = {"losses": [], "expected_losses": [], "norms": [], "expected_norms": []}
    gradient_differences, kept_by_ranks, taken = [], [], []
    counts.clear()
    for micro_batches in steps:
        with watch(net, lambda mixture: mixture.kept) as kept:
            my_micro_batches = [[my_part(tensor) for tensor in tensors] for tensors in micro_batches]
            losses, norm = compute_gradients(net, my_micro_batches, balance_weight=balance_weight)
        with watch(one_process, lambda mixture: mixture.taken) as routed:
            expected_losses = one_process_gradients(one_process, micro_batches, balance_weight)
        expected_norm = torch.nn.utils.clip_grad_norm_(one_process.parameters(), clip_norm)
        gradient_differences.append(largest_gradient_difference(net, one_process))
        for name, values in zip(found, (losses, expected_losses, norm, expected_norm), strict=True):
            found[name].append(values.tolist())
        kept_by_ranks.append(kept)
        taken.append(routed)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    seen = Counter(counts)
    expected = expected_calls(net, len(steps), len(steps[0]))
    held = mixtures(net)[0].held
    return {
        "capacity_factor": capacity_factor,
        "held": held,
        **found,
        "gradient_relative_difference": torch.tensor(runtime.gather(gradient_differences))
        .max()
        .item(),  # also if it is NaN
        "kept": [[table.tolist() for table in tables] for tables in kept_by_ranks],
        "expected_kept": [[kept_of_ranks(mask) for mask in routed] for routed in taken],
        "dropped_by_rank": dropped_by_rank(mixtures(net)[0].k, taken),
        "calls_per_rank": runtime.gather({name: seen[name] for name in expected}),
        "expected_calls": expected,
        "all_to_all_bytes_per_rank": runtime.gather(seen["all_to_all_bytes"]),
        "expected_all_to_all_bytes_per_rank": expected_bytes(taken, held, net.config.hidden_size),
    }


def one_process_gradients(net: nn.Module, micro_batches: list[list[Tensor]], balance_weight: float) -> Tensor:
    """As compute_gradients, with nobody to talk to."""
    losses = torch.zeros(2, device=micro_batches[0][0].device)
    for inputs, targets in micro_batches:
        cross_entropy = net(inputs, targets)
        balance = torch.stack([mixture.balance_loss for mixture in mixtures(net)]).sum()
        ((cross_entropy + balance_weight * balance) / len(micro_batches)).backward()
        losses += torch.stack([cross_entropy, balance]).detach() / len(micro_batches)
    return losses


def largest_gradient_difference(net: nn.Module, one_process: nn.Module) -> float:
    """Over the parameters that this rank holds: the distance of the gradients, relative to that of one process."""
    expected = {name: parameter.grad for name, parameter in one_process.named_parameters()}
    least = metrics.least_norm(expected.values())
    differences = []
    for name, parameter in net.named_parameters():
        distance = (parameter.grad - expected[name]).norm()
        differences.append(distance / expected[name].norm().clamp_min(least))
    return torch.stack(differences).max().item()  # NaN if any is, which Python's max may drop


def by_rank(mask: Tensor) -> list[Tensor]:
    """The rows of each rank's tokens: its sequences are neighbours in the batch."""
    return list(mask.chunk(dist.get_world_size()))


def kept_of_ranks(taken: Tensor) -> list[list[int]]:
    """How many choices of each rank's tokens each expert takes, [ranks, experts]."""
    return [part.sum(0).tolist() for part in by_rank(taken)]


def dropped_by_rank(k: int, taken: list[list[Tensor]]) -> list[int]:
    """How many choices of its tokens each rank has lost, in all forwards together."""
    dropped = [0] * dist.get_world_size()
    for mask in (mask for routed in taken for mask in routed):
        for rank, part in enumerate(by_rank(mask)):
            dropped[rank] += len(part) * k - part.sum().item()
    return dropped


def expected_calls(net: nn.Module, steps: int, micro_batches: int) -> dict[str, int]:
    """What each rank must call in all steps together, and the bytes that it must put in.

    Four all-to-alls for each mixture and micro-batch: there and back, in forward and in backward (their bytes:
    expected_bytes). Before them, an all-gather of how many choices fell on each expert. After backward, the gradients
    of all that is shared are summed.
    """
    shared = [parameter for name, parameter in net.named_parameters() if ".experts." not in name]
    forwards = steps * micro_batches * len(mixtures(net))
    experts = mixtures(net)[0].router.out_features
    return {
        "all_to_alls": 4 * forwards,
        "all_gathers": forwards,
        "all_gather_bytes": forwards * experts * 8,  # of int64
        "all_reduces": steps * (len(shared) + 2),  # of the losses and of the norm's square
        "all_reduce_bytes": steps * 4 * (sum(parameter.numel() for parameter in shared) + 2 + 1),  # of fp32
    }


def expected_bytes(taken: list[list[Tensor]], held: list[int], hidden_size: int) -> list[int]:
    """What each rank sends to others, from what one process has chosen: 2 · (rows that leave + rows that arrive) ·
    hidden size · 4 bytes. A row that leaves is sent in forward, and its output's gradient in backward. A row that
    arrives is sent back as an output in forward, and as its gradient in backward."""
    rows = torch.zeros(len(held), len(held), dtype=torch.int64)  # [from, to]
    for mask in (mask for routed in taken for mask in routed):
        for rank, part in enumerate(by_rank(mask)):
            rows[rank] += torch.tensor([experts.sum().item() for experts in part.split(held, dim=1)])
    rows.fill_diagonal_(0)
    return [2 * 4 * hidden_size * (rows[rank].sum() + rows[:, rank].sum()).item() for rank in range(len(held))]


def compare_balance(net: nn.Module, inputs: Tensor) -> list[dict]:
    """The balance loss of one batch, as a whole and as the mean of its parts, and how far the routers' gradients are
    apart. The net is that of one process."""
    net(inputs)
    routers = [mixture.router.weight for mixture in mixtures(net)]
    whole = None
    rows = []
    for parts in (1, 2, 4, 8, 16):
        if inputs.numel() % parts:
            continue
        losses = [balance_of_parts(mixture.probabilities, mixture.choices, parts) for mixture in mixtures(net)]
        gradient = torch.cat([g.flatten() for g in torch.autograd.grad(sum(losses), routers, retain_graph=True)])
        if whole is None:
            whole = gradient
        rows.append(
            {
                "parts": parts,
                "balance_loss": torch.stack(losses).mean().item(),
                "gradient_relative_difference": ((gradient - whole).norm() / whole.norm()).item(),
            }
        )
    return rows
