"""Expert parallelism by hand: a mixture of experts whose experts live on different ranks.

A mixture of experts replaces the MLP of each block by E MLPs and a router. The router gives each token to k of them
and adds up their outputs. So the model has more weights, and a token still uses few of them. Each rank holds E/N of the
experts and a copy of all else. A token travels to the rank of its expert and back in two all-to-alls. The router
decides how many tokens travel, so each rank sends and receives a different number.

    laptop    python 08_model_parallel/expert_parallel.py
              torchrun --nproc_per_node=3 08_model_parallel/expert_parallel.py --steps 10
    one node  torchrun --nproc_per_node=8 08_model_parallel/expert_parallel.py --model llama-124m --seq-len 512
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --experts 32
              --global-batch-size 32

All is in fp32, to compare with one process. Comments say how a tensor lies over the ranks: replicate (all hold the
same), shard (each holds a part), partial (each holds a term of the sum).

Look for: the busiest expert with and without the balance loss; the tokens that a capacity drops; the bytes sent, which
follow from the router's choices. Before: context_parallel.py. Next: train_3d.py.
"""

import dataclasses
import math
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
import _expert_parallel as helper
from _expert_parallel import mixtures

from common import exits, measure, report, runtime
from common.torch_versions import all_gather_single as all_gather
from lm import data, model, shapes
from lm.weights import init_weights


class Mixture(nn.Module):
    """In place of a block's MLP: a router and all experts, on one process. This is the baseline."""

    # see use_choices_of_ranks
    choose = staticmethod(lambda probabilities, k: probabilities.topk(k).indices)

    def __init__(
        self, config: shapes.Config, experts: list[int], k: int, capacity_factor: float | None
    ) -> None:
        super().__init__()
        self.k, self.capacity_factor = k, capacity_factor
        self.router = nn.Linear(config.hidden_size, len(experts), bias=False)
        # Named by its number among all: an expert's initial weights follow from its name, on whichever rank it is.
        self.experts = nn.ModuleDict(
            {str(number): model.MLP(config) for number in self.part_of(experts)}
        )

    def part_of(self, experts: list[int]) -> list[int]:
        return experts

    def route(self, tokens: Tensor) -> Tensor:
        """Choose the experts of each token, [tokens, k]; returns what their outputs are multiplied by."""
        self.probabilities = self.router(tokens).softmax(-1)
        self.choices = self.choose(self.probabilities, self.k)
        # by expert
        self.counts = torch.bincount(self.choices.flatten(), minlength=self.router.out_features)
        weights = self.probabilities.gather(-1, self.choices)
        # Divided, the weight of a single choice is always 1, and the router learns nothing from the loss.
        return weights if self.k == 1 else weights / weights.sum(-1, keepdim=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights = self.route(tokens)
        self.balance_loss = balance_loss(self.probabilities, self.counts, self.k)
        most = capacity(self.counts, self.capacity_factor)
        self.tokens_of_expert = []
        mixed = torch.zeros_like(tokens)
        for number, expert in self.experts.items():
            token, place = (self.choices == int(number)).nonzero(as_tuple=True)  # place: which of k
            # a choice that is dropped adds nothing to the residual
            token, place = token[:most], place[:most]
            mixed = mixed.index_add(0, token, expert(tokens[token]) * weights[token, place, None])
            self.tokens_of_expert.append(token)
        return mixed.view_as(x)


class Exchange(torch.autograd.Function):
    """Rows to the ranks that need them. Backward sends the gradient of each row back the way the row came."""

    @staticmethod
    def forward(context, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        context.sent, context.received = sent, received
        return helper.all_to_all(rows, sent, received)

    @staticmethod
    def backward(context, gradients: Tensor) -> tuple[Tensor, None, None]:
        return helper.all_to_all(gradients, context.received, context.sent), None, None


class ParallelMixture(Mixture):
    """The same over all ranks. A rank has its own tokens, shard(tokens), and its own experts, shard(experts)."""

    # the first ranks have one more where they do not divide
    def part_of(self, experts: list[int]) -> list[int]:
        return (
            torch.tensor(experts, device="cpu")
            .tensor_split(dist.get_world_size())[dist.get_rank()]
            .tolist()
        )

    def forward(self, x: Tensor) -> Tensor:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        tokens = x.flatten(0, 1)
        weights = self.route(tokens)
        # 1. Sizes first: how many choices of each rank fell on each expert, [ranks, experts], replicate. The host must
        # know them before it can start an all-to-all, so here it waits for the GPU.
        counts = self.counts.new_empty(world_size, len(self.counts))
        all_gather(counts.view(-1), self.counts)
        self.balance_loss = balance_loss(self.probabilities, counts.sum(0), self.k)
        counts = counts.cpu()
        self.kept = keep_within_capacity(counts, self.capacity_factor)
        to_ranks = [of_rank.sum().item() for of_rank in self.kept[rank].tensor_split(world_size)]
        kept_for_me = self.kept.tensor_split(world_size, dim=1)[rank]  # [ranks, my experts]
        from_ranks = kept_for_me.sum(1).tolist()
        # 2. My choices as token * k + place, by expert and so by rank, then by token. Over capacity are the last ones.
        groups = self.choices.flatten().argsort(stable=True).split(counts[rank].tolist())
        rows = torch.cat(
            [group[:kept] for group, kept in zip(groups, self.kept[rank].tolist(), strict=True)]
        )
        token = rows // self.k
        # 3. There, through the experts, and back.
        arrived = Exchange.apply(tokens[token], to_ranks, from_ranks)
        returned = Exchange.apply(self.run_experts(arrived, kept_for_me), from_ranks, to_ranks)
        weighted = returned * weights.flatten()[rows, None]
        return torch.zeros_like(tokens).index_add(0, token, weighted).view_as(x)

    def run_experts(self, arrived: Tensor, kept: Tensor) -> Tensor:
        """Rows arrive ordered by rank, then by expert. An expert takes those of all ranks at once. It runs on no rows,
        too: its gradient is then zero, not None."""
        parts = list(arrived.split(kept.flatten().tolist()))
        for i, expert in enumerate(self.experts.values()):
            of_expert = parts[i :: len(self.experts)]
            computed = expert(torch.cat(of_expert))
            parts[i :: len(self.experts)] = computed.split([len(part) for part in of_expert])
        return torch.cat(parts)


def capacity(counts: Tensor, factor: float | None) -> int | None:
    """How many choices an expert takes: `factor` times an even share of all. Without a factor it takes all."""
    return None if factor is None else math.ceil(factor * counts.sum().item() / counts.shape[-1])


def keep_within_capacity(counts: Tensor, factor: float | None) -> Tensor:
    """What is kept of these choices, [ranks, experts]. Rank 0 has the first tokens of the batch, and a rank gets what
    the ranks before it have left. So the same choices are dropped on any number of ranks."""
    if factor is None:
        return counts
    of_ranks_before = counts.cumsum(0) - counts
    return (capacity(counts, factor) - of_ranks_before).clamp(min=0).minimum(counts)


def balance_loss(probabilities: Tensor, counts: Tensor, k: int) -> Tensor:
    """E · sum(f · P) over the experts: 1 where all are alike (Fedus et al. 2021, equation 4). f is the share of the
    choices that fell on an expert, before any is dropped; P is its mean probability. Both are over the tokens of all
    ranks. f multiplies P, so each rank needs the f of all. P may be partial: the losses of the ranks are summed."""
    share_of_choices = counts / counts.sum()
    tokens_of_all_ranks = counts.sum() / k
    mean_probability = probabilities.sum(0) / tokens_of_all_ranks
    return len(counts) * (share_of_choices * mean_probability).sum()


def sum_over_ranks(net: nn.Module, losses: Tensor) -> Tensor:
    """Make losses and gradients whole; returns the gradient's norm. An expert's gradient is complete: backward brought
    it the gradients of its tokens from all ranks. All else is partial: it has seen this rank's tokens alone."""
    named = list(net.named_parameters())
    # shard(experts)
    of_experts = [parameter.grad for name, parameter in named if ".experts." in name]
    # partial
    of_all_else = [parameter.grad for name, parameter in named if ".experts." not in name]
    # partial: each rank has other experts
    squares_of_experts = nn.utils.get_total_norm(of_experts).square()
    tensors = [losses, squares_of_experts, *of_all_else]
    flat = nn.utils.parameters_to_vector(tensors)  # for one call instead of many
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat, tensors)  # replicate
    # all else counts once
    return (squares_of_experts + nn.utils.get_total_norm(of_all_else).square()).sqrt()


def build(
    kind: type[Mixture], config: shapes.Config, args, capacity_factor: float | None, device
) -> nn.Module:
    """lm/model.py with mixtures. Experts are 1/k as wide as the MLP: a token uses as many weights as before."""
    expert = dataclasses.replace(config, intermediate_size=config.intermediate_size // args.top_k)
    with torch.device("meta"):
        net = model.Transformer(config)
        for block in net.model.layers.values():
            block.mlp = kind(expert, list(range(args.experts)), args.top_k, capacity_factor)
    net.to_empty(device=device)
    net.tie_weights()  # to_empty has made two matrices of one
    init_weights(net, seed=0)
    return net


def backward(
    net: nn.Module, inputs: Tensor, targets: Tensor, balance_weight: float, ranks: int
) -> Tensor:
    """Forward and backward of these tokens, as one of `ranks` equal parts of the batch. Returns its part of the mean
    losses, cross-entropy and balance: partial, and so gradients only ever add up."""
    cross_entropy = net(inputs, targets) / ranks
    balance = torch.stack([mixture.balance_loss for mixture in mixtures(net)]).sum()
    (cross_entropy + balance_weight * balance).backward()
    return torch.stack([cross_entropy, balance]).detach()


# The weight of the balance loss, and whether experts have a capacity.
WAYS = {
    "no balance loss": (0.0, False),
    "balance loss": (0.01, False),
    "balance loss, capacity": (0.01, True),
}


def run(
    way: str,
    config: shapes.Config,
    batches: list[tuple[Tensor, Tensor]],
    args,
    device: torch.device,
) -> dict:
    """Train over the ranks, and on this rank alone with all experts and all tokens: each step must be the same."""
    balance_weight, limited = WAYS[way]
    factor = args.capacity_factor if limited else None
    net, one_process = (
        build(kind, config, args, factor, device) for kind in (ParallelMixture, Mixture)
    )
    # SGD moves by the gradient itself. Adam divides by its size and would hide one that is N times too large.
    optimizers = [
        torch.optim.SGD(one.parameters(), lr=0.05, momentum=0.9) for one in (net, one_process)
    ]
    rank, world_size = dist.get_rank(), dist.get_world_size()
    steps, sent = [], measure.Traffic()
    for batch in batches:
        with sent:
            losses = backward(
                net,
                *(tensor.chunk(world_size)[rank] for tensor in batch),
                balance_weight,
                world_size,
            )
            norm = sum_over_ranks(net, losses)
        helper.use_choices_of_ranks(one_process, net)
        expected_losses = backward(one_process, *batch, balance_weight, ranks=1)
        expected_norm = nn.utils.get_total_norm(
            [parameter.grad for parameter in one_process.parameters()]
        )
        steps.append(
            helper.compare(net, one_process, [*losses, norm], [*expected_losses, expected_norm])
        )
        for one, its_norm, optimizer in zip(
            (net, one_process), (norm, expected_norm), optimizers, strict=True
        ):
            nn.utils.clip_grads_with_norm_(one.parameters(), 1.0, its_norm)
            optimizer.step()
            optimizer.zero_grad()
        steps[-1]["errors"].append(helper.make_equal(net, one_process))
    parameters = sum(parameter.numel() for parameter in one_process.parameters())
    return {"way": way, "parameters": parameters, **helper.summarize(steps, sent)}


def main() -> int:
    sizes = {
        "seq_len": 16,
        "global_batch_size": 24,
        "experts": 8,
        "top_k": 2,
        "capacity_factor": 1.0,
        "steps": 12,
    }
    args = report.lesson_flags(__doc__, model="nano", **sizes)
    # this and the next raise before any rank starts
    config = shapes.load_config(args.model, 256, args.seq_len)
    helper.check_sizes(args)
    runtime.relaunch(args.device)
    runtime.seed_all(0, deterministic=True)  # before the group: NCCL reads variables when it starts
    device = runtime.init_process_group(args.device)
    # the same on every rank
    whole = data.one_batch(args.steps * args.global_batch_size, args.seq_len, device)
    batches = [*zip(*(tensor.split(args.global_batch_size) for tensor in whole), strict=True)]
    rows = [run(way, config, batches, args, device) for way in WAYS]
    checked = helper.check(rows, config, args)
    about = {"dtype": "fp32", "parameters": rows[0]["parameters"], "tokens": whole[0].numel()}
    about |= {"first_loss": rows[1]["losses"][0], "last_loss": rows[1]["last_loss"]}
    report.end_lesson(
        rows, columns=helper.COLUMNS, checked=checked, args=args, device=device, **about
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
