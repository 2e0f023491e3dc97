"""Expert parallelism by hand and with DTensor: a mixture of experts, and its experts on all ranks.

A mixture of experts replaces the MLP of each block by E MLPs, the experts, and a router. The router
gives each token to k experts and adds up their outputs. So the model has more weights, and a token
still uses few of them. Each of N ranks holds E/N of the experts and a copy of everything else. Each
layer then has four steps:

    route     a rank chooses k experts for each of its tokens
    dispatch  an all-to-all sends a row per choice, the token's hidden state, to the expert's rank
    compute   an expert computes the rows of all ranks
    combine   an all-to-all sends the results back, and each token adds up its k results

The router decides how many rows travel, so each rank sends and receives a different number.

torch 2.13 has no public tool for expert parallelism. The second version has the code that
train_3d.py trains with, lm/exchange.py: DTensor shards the experts' weights, so that a checkpoint
knows which experts a rank has, and torch's all-to-all has a backward.

    laptop    python 08_model_parallel/expert_parallel.py
              torchrun --standalone --nproc_per_node=3 08_model_parallel/expert_parallel.py \
                  --steps 4
    one node  torchrun --standalone --nproc_per_node=8 08_model_parallel/expert_parallel.py
    cluster   the same on each node, but in place of --standalone
              --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400 --rdzv-id=$JOB
              --experts 32 --global-batch-size 32

Everything is in fp32, to compare with one process, but for one table: the tokens that get other
experts if the router is in bf16. Comments say how a tensor lies over the ranks:
replicate (all hold the same), shard (each holds its own part), partial (each holds a summand).

What to look at: the busiest expert without a remedy, with the balance loss, and with a bias; how
many rows a capacity drops; the bytes sent, which follow from the router's choices.

On GPUs the default model is wide, with 256 tokens per sequence. Expected on 8 H100s from the data
sheet (67 TFLOP/s in fp32, NVLink 450 GB/s): the arithmetic of a step takes a rank at least 4.0 ms,
if all experts are equally busy. Its 8 all-to-alls send 66 MB, which takes at least 0.15 ms. All
ranks wait for the one with the busiest experts.

Previous: context_parallel.py. Next: train_3d.py.
"""

import dataclasses
import math
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _expert_parallel as helper
import torch
import torch.distributed as dist
import torch.nn.functional as F
from _expert_parallel import experts_per_rank, mixtures
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from common import lesson, measure, runtime
from common.torch_versions import all_gather_single
from lm import exchange, model, shapes, stdlib_text
from lm.weights import init_weights, load_config

GPU_DEFAULTS = {"model": "wide", "seq_len": 256}

# --- 1. a mixture of experts on one process


class Experts(nn.Module):
    """The MLPs of all experts. Each weight is a stack with one matrix per expert."""

    def __init__(self, experts: int, config: shapes.Config) -> None:
        super().__init__()
        hidden = config.hidden_size
        intermediate = config.intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(experts, intermediate, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate))

    def matrices(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return the gate, up and down projection of each expert that this rank holds."""
        stacks = []
        for stack in (self.gate_proj, self.up_proj, self.down_proj):
            if isinstance(stack, DTensor):
                stack = stack.to_local()  # this rank's experts
            # Not stack[i] in a loop: the backward of each would fill a gradient of the full stack.
            stacks.append(stack.unbind())
        return list(zip(*stacks, strict=True))

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return [rows, hidden] for rows of this shape, which are ordered by expert.

        counts[i] rows are for expert i. An expert without rows gets a gradient of zeros, not None.
        """
        matrices_of_experts = self.matrices()
        # The last rank may have fewer experts. The counts of those that it has not are 0.
        rows_of_experts = rows.split(counts[: len(matrices_of_experts)].tolist())
        outputs = []
        for x, matrices in zip(rows_of_experts, matrices_of_experts, strict=True):
            outputs.append(mlp(x, *matrices))
        return torch.cat(outputs)

    def forward_grouped(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Do as forward, with three kernels in place of three per expert. All is in bf16.

        With the experts of a real model the loop would mostly launch kernels. lm/moe.py, which
        train_fsdp.py and train_3d.py train, has these lines.
        """
        ends = counts.cumsum(0).int()  # last row + 1, [experts]
        # grouped_mm multiplies rows up to ends[0] by matrix 0, rows up to ends[1] by matrix 1, ...
        gate = F.silu(F.grouped_mm(rows, self.gate_proj.mT, offs=ends))  # [rows, intermediate]
        up = F.grouped_mm(rows, self.up_proj.mT, offs=ends)
        return F.grouped_mm(gate * up, self.down_proj.mT, offs=ends)


def mlp(x: Tensor, gate_proj: Tensor, up_proj: Tensor, down_proj: Tensor) -> Tensor:
    """Compute one expert, as model.MLP does: [rows, hidden] in and out."""
    gate = F.silu(F.linear(x, gate_proj))  # [rows, intermediate]
    return F.linear(gate * F.linear(x, up_proj), down_proj)


class Routing(NamedTuple):
    """The choices of a router."""

    probabilities: Tensor  # of all experts, [tokens, experts]
    choices: Tensor  # the experts of each token, [tokens, k]
    weights: Tensor  # the factors of their outputs, [tokens, k]
    counts: Tensor  # how many choices fell on each expert, [experts]


class Mixture(nn.Module):
    """In place of a block's MLP: a router and all experts, on one process. This is the baseline."""

    def __init__(
        self, config: shapes.Config, experts: int, k: int, capacity_factor: float | None
    ) -> None:
        super().__init__()
        self.k = k
        self.capacity_factor = capacity_factor
        self.router = nn.Linear(config.hidden_size, experts, bias=False)
        self.register_buffer("bias", torch.zeros(experts), persistent=False)
        self.experts = Experts(experts, config)

    def route(self, tokens: Tensor) -> Routing:
        """Choose the experts of each token. `tokens` are hidden states, [tokens, hidden]."""
        # fp32, also if the model is bf16 or under autocast. Rounding swaps experts that are nearly
        # tied, and with more experts more of them are.
        with torch.autocast(tokens.device.type, enabled=False):
            scores = F.linear(tokens.float(), self.router.weight.float())
        probabilities = scores.softmax(-1)  # [tokens, experts]
        choices = self.choose(probabilities)  # [tokens, k]
        weights = probabilities.gather(-1, choices)  # [tokens, k]
        # With k = 1 this would make every weight 1, and the router would learn nothing.
        if self.k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        counts = torch.bincount(choices.flatten(), minlength=probabilities.shape[1])
        return Routing(probabilities, choices, weights, counts)

    def choose(self, probabilities: Tensor) -> Tensor:
        """Return the experts of each token, [tokens, k]: with a bias of 0 the most probable ones.

        The bias steers the choice only. The weights of the outputs do not have it.
        """
        return (probabilities + self.bias).topk(self.k).indices

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, hidden] in and out
        tokens = x.flatten(0, 1)  # [tokens, hidden]
        routing = self.route(tokens)
        self.routing = routing
        self.balance_loss = balance_loss(routing.probabilities, routing.counts, self.k)
        limit = capacity(routing.counts, self.capacity_factor)
        self.tokens_of_expert = []
        mixed = torch.zeros_like(tokens, dtype=torch.float32)  # a sum over the k experts
        for expert, matrices in enumerate(self.experts.matrices()):
            # The tokens that chose this expert, and at which of their k places: each [rows].
            token, place = (routing.choices == expert).nonzero(as_tuple=True)
            # Above the limit are the last tokens. A dropped choice adds nothing to its token.
            token = token[:limit]
            place = place[:limit]
            output = mlp(tokens[token], *matrices)  # [rows, hidden]
            weighted = output * routing.weights[token, place].unsqueeze(-1)
            mixed = mixed.index_add(0, token, weighted)
            self.tokens_of_expert.append(token)
        return mixed.to(x.dtype).view_as(x)


def balance_loss(probabilities: Tensor, counts: Tensor, k: int) -> Tensor:
    """Return E * sum(f * P) over the experts, which is 1 if all are equally busy.

    f is the share of the choices that fell on an expert, before any is dropped. P is the mean
    probability of the expert. Both are over the tokens of all ranks, and so are the `counts`.
    `probabilities`, [tokens, experts], may be of one rank's tokens. Then the result is partial: the
    loss is its sum over the ranks. Source: Fedus et al. 2021, equation 4.
    """
    share_of_choices = counts / counts.sum()  # [experts]
    tokens_of_all_ranks = counts.sum() / k
    mean_probability = probabilities.sum(0) / tokens_of_all_ranks  # [experts]
    return len(counts) * (share_of_choices * mean_probability).sum()


def capacity(counts: Tensor, factor: float | None) -> int | None:
    """Return how many rows an expert takes: `factor` times an equal share of all choices.

    Without a factor it takes all rows, and the result is None.
    """
    if factor is None:
        return None
    return math.ceil(factor * counts.sum().item() / counts.shape[-1])


# --- 2. by hand: the experts on all ranks


class AllToAll(torch.autograd.Function):
    """Send rows to other ranks. Backward sends the gradient of each row back to where it was.

    The first to_ranks[0] rows go to rank 0, the next to_ranks[1] rows to rank 1, and so on. The
    result starts with the from_ranks[0] rows that rank 0 has sent.
    """

    @staticmethod
    def forward(ctx, rows: Tensor, to_ranks: list[int], from_ranks: list[int]) -> Tensor:
        ctx.to_ranks = to_ranks
        ctx.from_ranks = from_ranks
        received = rows.new_empty(sum(from_ranks), rows.shape[1])
        dist.all_to_all_single(received, rows.contiguous(), from_ranks, to_ranks)
        return received

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None]:
        received = gradient.new_empty(sum(ctx.to_ranks), gradient.shape[1])
        dist.all_to_all_single(received, gradient.contiguous(), ctx.to_ranks, ctx.from_ranks)
        return received, None, None


class ParallelMixture(Mixture):
    """The same over all ranks: tokens are shard(tokens), and experts are shard(experts)."""

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, hidden] in and out
        rank = dist.get_rank()
        tokens = x.flatten(0, 1)  # [tokens, hidden], shard(tokens)
        routing = self.route(tokens)
        self.routing = routing

        # All ranks learn how many choices of each rank fell on each expert: [ranks, experts].
        counts = routing.counts.new_empty(dist.get_world_size(), len(routing.counts))
        all_gather_single(counts.view(-1), routing.counts)  # shard(ranks) to replicate
        self.balance_loss = balance_loss(routing.probabilities, counts.sum(0), self.k)
        # The CPU needs these numbers for the sizes of the all-to-alls, so it waits for the GPU.
        counts = counts.cpu()
        self.kept = keep_within_capacity(counts, self.capacity_factor)  # [ranks, experts]

        # The choices of this rank that are kept, ordered by expert and then by token. A choice is
        # the number token * k + place.
        order = routing.choices.flatten().argsort(stable=True)  # [tokens * k]
        choices_by_expert = order.split(counts[rank].tolist())
        kept_choices = []
        for choices, count in zip(choices_by_expert, self.kept[rank].tolist(), strict=True):
            kept_choices.append(choices[:count])
        kept_choices = torch.cat(kept_choices)  # [rows]
        token = kept_choices // self.k  # [rows]

        outputs = self.run_experts(tokens[token], self.kept)  # [rows, hidden]
        weighted = outputs * routing.weights.flatten()[kept_choices].unsqueeze(-1)
        mixed = torch.zeros_like(tokens, dtype=torch.float32).index_add(0, token, weighted)
        return mixed.to(x.dtype).view_as(x)

    def run_experts(self, rows: Tensor, kept: Tensor) -> Tensor:
        """Return the expert's output for each row, [rows, hidden]. The rows are ordered by expert.

        kept is [ranks, experts]: how many rows each rank has for each expert.
        """
        rows_for_ranks = exchange.by_owner(
            kept, len(kept)
        )  # [from rank, to rank, experts of a rank]
        rank = dist.get_rank()
        sizes = exchange.plan_exchange(rows_for_ranks[rank], rows_for_ranks[:, rank])
        received = AllToAll.apply(rows, sizes.to_ranks, sizes.from_ranks)  # dispatch
        # The rows come ordered by rank and then by expert. An expert takes its rows of all ranks.
        order = sizes.order.to(rows.device)
        outputs = self.experts(received[order], sizes.counts)
        outputs = outputs[order.argsort()]  # ordered by rank again
        return AllToAll.apply(outputs, sizes.from_ranks, sizes.to_ranks)  # combine


def keep_within_capacity(counts: Tensor, factor: float | None) -> Tensor:
    """Return how many of these choices the experts take. Both are [ranks, experts].

    Rank 0 has the first tokens of the batch. Each rank gets what the ranks before it have left, so
    the same choices are dropped on any number of ranks.
    """
    if factor is None:
        return counts
    of_ranks_before = counts.cumsum(0) - counts
    free = (capacity(counts, factor) - of_ranks_before).clamp(min=0)
    return counts.minimum(free)


def shard_by_hand(net: nn.Module) -> None:
    """Keep the experts of this rank only. The last rank may have fewer than the others."""
    rank = dist.get_rank()
    for mixture in mixtures(net):
        for name, stack in list(mixture.experts.named_parameters()):
            shards = stack.detach().split(experts_per_rank(len(stack), dist.get_world_size()))
            setattr(mixture.experts, name, nn.Parameter(shards[rank].clone()))


# --- 3. as train_3d.py does


class MixtureOfDTensors(ParallelMixture):
    """ParallelMixture with the exchange that train_3d.py trains with."""

    def run_experts(self, rows: Tensor, kept: Tensor) -> Tensor:
        """Return the expert's output for each row, [rows, hidden]."""
        counts = kept[dist.get_rank()].to(rows.device)  # [experts]
        return exchange.run_experts(self.experts, dist.group.WORLD, rows, counts)


def shard_by_torch(net: nn.Module, device: torch.device) -> None:
    """Shard the experts of every layer with DTensor."""
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for mixture in mixtures(net):
        exchange.shard_experts(mixture.experts, mesh)


# --- 4. a training step


def forward_backward(
    net: nn.Module, inputs: Tensor, targets: Tensor, balance_weight: float, ranks: int
) -> Tensor:
    """Compute gradients from one of `ranks` equal parts of a batch.

    Return its share of the mean cross-entropy and of the balance loss, [2]. The losses and the
    gradients are partial: those of the batch are the sums over the ranks.
    """
    cross_entropy = net(inputs, targets) / ranks
    balance = torch.stack([mixture.balance_loss for mixture in mixtures(net)]).sum()
    (cross_entropy + balance_weight * balance).backward()
    return torch.stack([cross_entropy, balance]).detach()


def sum_over_ranks(net: nn.Module, losses: Tensor) -> Tensor:
    """Sum losses and gradients over the ranks, in place. Return the norm of all gradients.

    The gradient of an expert is complete: backward has brought it the gradients of its rows from
    all ranks. Other gradients are partial: they are of this rank's tokens.
    """
    dist.all_reduce(losses)
    of_experts = []
    of_others = []
    for name, parameter in net.named_parameters():
        if ".experts." in name:
            of_experts.append(parameter.grad)  # shard(experts)
        else:
            dist.all_reduce(parameter.grad)  # partial to replicate
            of_others.append(parameter.grad)

    norm_of_experts = nn.utils.get_total_norm(of_experts)
    if isinstance(norm_of_experts, DTensor):
        squares_of_experts = norm_of_experts.full_tensor().square()  # of the experts of all ranks
    else:
        squares_of_experts = norm_of_experts.square()  # of this rank's experts: partial
        dist.all_reduce(squares_of_experts)
    squares_of_others = nn.utils.get_total_norm(of_others).square()  # replicate, so it counts once
    return (squares_of_experts + squares_of_others).sqrt()


def update(net: nn.Module, optimizer: torch.optim.Optimizer, norm: Tensor) -> None:
    """Clip the gradients by the norm of all of them, and take a step."""
    # foreach=False, here and in the optimizer: no kernel takes DTensors and other tensors together.
    nn.utils.clip_grads_with_norm_(net.parameters(), 1.0, norm, foreach=False)
    optimizer.step()
    optimizer.zero_grad()


# --- 5. the comparison

# The weight of the balance loss, the step of the bias, and whether experts have a capacity.
VARIANTS = {
    "neither": (0.0, 0.0, False),
    "balance loss": (0.01, 0.0, False),
    "bias": (0.0, 0.01, False),
    "balance loss, capacity": (0.01, 0.0, True),
}


def build(
    kind: type[Mixture], config: shapes.Config, args, capacity_factor: float | None, device
) -> model.Transformer:
    """Build lm/model.py with a mixture in place of each MLP. Its weights are not initialized.

    An expert is 1/k as wide as the MLP, so a token uses as many weights as before.
    """
    config_of_expert = dataclasses.replace(
        config, intermediate_size=config.intermediate_size // args.top_k
    )
    with torch.device("meta"):
        net = model.Transformer(config)
        for block in net.model.layers.values():
            block.mlp = kind(config_of_expert, args.experts, args.top_k, capacity_factor)
    net.to_empty(device=device)
    net.tie_weights()  # to_empty has made two matrices of one
    for mixture in mixtures(net):
        mixture.bias.zero_()
    return net


def move_biases(net: nn.Module, chosen: Tensor, rate: float) -> None:
    """Lower the bias of each expert that was busier than the mean, and raise that of the others.

    chosen is [layers, experts]: how many tokens of all ranks chose each expert in this step. The
    loss has no part in this. Source: Wang et al. 2024, Auxiliary-Loss-Free Load Balancing.
    """
    for mixture, counts in zip(mixtures(net), chosen.float(), strict=True):
        mixture.bias += rate * torch.sign(counts.mean() - counts).to(mixture.bias.device)


def run(
    variant: str,
    config: shapes.Config,
    batches: list[tuple[Tensor, Tensor]],
    args,
    device: torch.device,
) -> dict:
    """Train by hand, with DTensor and on one process, and compare each step. Return the row.

    One process has all experts and all tokens. Every rank must call this.
    """
    balance_weight, bias_rate, has_capacity = VARIANTS[variant]
    capacity_factor = args.capacity_factor if has_capacity else None
    one_process = build(Mixture, config, args, capacity_factor, device)
    by_hand = build(ParallelMixture, config, args, capacity_factor, device)
    by_torch = build(MixtureOfDTensors, config, args, capacity_factor, device)
    init_weights(one_process, seed=0)
    for net in (by_hand, by_torch):
        net.load_state_dict(one_process.state_dict())
    shard_by_hand(by_hand)
    shard_by_torch(by_torch, device)
    optimizers = [helper.make_optimizer(net) for net in (one_process, by_hand, by_torch)]

    rank = dist.get_rank()
    world_size = dist.get_world_size()
    steps = []
    traffic = measure.Traffic()
    for inputs, targets in batches:
        my_inputs = inputs.chunk(world_size)[rank]
        my_targets = targets.chunk(world_size)[rank]
        with traffic:
            losses = forward_backward(by_hand, my_inputs, my_targets, balance_weight, world_size)
            norm = sum_over_ranks(by_hand, losses)
        torch_losses = forward_backward(by_torch, my_inputs, my_targets, balance_weight, world_size)
        torch_norm = sum_over_ranks(by_torch, torch_losses)
        helper.use_choices_of_ranks(one_process, by_hand)
        full_losses = forward_backward(one_process, inputs, targets, balance_weight, ranks=1)
        full_norm = nn.utils.get_total_norm([weight.grad for weight in one_process.parameters()])

        step = helper.compare_step(
            one_process,
            by_hand,
            by_torch,
            full_values=[*full_losses, full_norm],
            values=[*losses, norm],
            torch_values=[*torch_losses, torch_norm],
        )
        update(one_process, optimizers[0], full_norm)
        update(by_hand, optimizers[1], norm)
        update(by_torch, optimizers[2], torch_norm)
        helper.compare_weights(step, one_process, by_hand, by_torch)
        for net in (one_process, by_hand, by_torch):
            move_biases(net, step.chosen, bias_rate)
        steps.append(step)
    parameters = sum(parameter.numel() for parameter in one_process.parameters())
    return {"variant": variant, "parameters": parameters, **helper.summarize(steps, traffic)}


def main() -> int:
    args = lesson.parse_flags(
        __doc__,
        gpu=GPU_DEFAULTS,
        relaunches=True,
        model="nano",
        seq_len=16,
        global_batch_size=24,
        experts=8,
        top_k=2,
        capacity_factor=1.0,
        steps=8,
    )
    # Before relaunch, a wrong flag raises one UserError. After it, every rank would raise it.
    config = load_config(args.model, 256, args.seq_len)
    helper.check_sizes(args)
    lesson.relaunch(args.device)  # plain python becomes torchrun: a rank per GPU, 2 on a CPU
    runtime.seed_all(0, deterministic=True)  # before the group: NCCL reads variables when it starts
    device = runtime.init_process_group(args.device)

    # Every rank reads the full batches, and trains on its own sequences.
    size = args.global_batch_size
    inputs, targets = stdlib_text.one_batch(args.steps * size, args.seq_len, device)
    batches = list(zip(inputs.split(size), targets.split(size), strict=True))
    rows = [run(variant, config, batches, args, device) for variant in VARIANTS]
    bf16_rows = helper.changed_in_bf16(Mixture, device)
    checked = helper.check(rows, config, args)
    checked.append(helper.check_grouped(Experts, device))
    lesson.end(
        rows,
        columns=helper.COLUMNS,
        checked=checked,
        args=args,
        device=device,
        dtype="fp32",
        parameters=rows[0]["parameters"],
        tokens=inputs.numel(),
        first_loss=rows[1]["losses"][0],
        last_loss=rows[1]["last_loss"],
        bf16_rows=bf16_rows,
    )
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
