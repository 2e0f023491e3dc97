"""Expert parallelism by hand: a mixture of experts whose experts live on different ranks.

A mixture of experts replaces the MLP of each block by E MLPs and a router. The router sends each token to k of them
and adds up their outputs. The model has more weights, and a token still uses few of them. Each rank holds E/N of the
experts and a copy of all else. A token travels to the rank of its expert and back in two all-to-alls. How many tokens
travel is decided by the router, so every rank may receive a different number.

    laptop    python 08_model_parallel/expert_parallel.py
              torchrun --nproc_per_node=3 08_model_parallel/expert_parallel.py --steps 10
    one node  torchrun --nproc_per_node=8 08_model_parallel/expert_parallel.py --model llama-124m --seq-len 512
    cluster   the same on every node, with --nnodes=4 --rdzv-backend=c10d --rdzv-endpoint=$HEAD:29400

Each expert is 1/k as wide as the MLP that it replaces, so a token multiplies as many weights as before.

Look for: losses and gradients equal to those of one process, also where tokens are dropped; what an uneven router
costs; the balance loss of a whole batch beside that of its parts; the share of each expert after training with and
without that loss. Before: 06_fsdp_zero/zero_from_scratch.py. Next: README.md beside this, on which parallelism when.
"""

import dataclasses
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # old/, with nothing installed
from _expert_parallel_collectives import all_gather, all_reduce, all_to_all
from _expert_parallel_flags import parse_flags
from _expert_parallel_proof import LocalMixture, compare_balance, prove
from _expert_parallel_report import conclude
from _expert_parallel_runs import time_routings, train_and_count

from old import data, exits, model, runtime, shapes

PROOF_STEPS = 10
BALANCE_WEIGHT = 0.01  # as in Switch Transformer (Fedus et al. 2021), section 2.2


def top_k_experts(probabilities: Tensor, k: int) -> Tensor:
    """The experts of each token, [tokens, k]."""
    return probabilities.topk(k).indices


class Exchange(torch.autograd.Function):
    """Rows to the ranks that need them. Backward sends each row's gradient back the way the row came."""

    @staticmethod
    def forward(context, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        context.sent, context.received = sent, received
        arrived = rows.new_empty(sum(received), rows.shape[1])
        all_to_all(arrived, rows, received, sent)
        return arrived

    @staticmethod
    def backward(context, gradients: Tensor) -> tuple[Tensor, None, None]:
        returned = gradients.new_empty(sum(context.sent), gradients.shape[1])
        all_to_all(returned, gradients.contiguous(), context.sent, context.received)
        return returned, None, None


class Mixture(nn.Module):
    """The MLP of a block: a router, which every rank holds, and this rank's experts."""

    def __init__(self, config: shapes.Config, experts: int, k: int, capacity_factor: float | None) -> None:
        super().__init__()
        self.k = k
        self.capacity_factor = capacity_factor
        self.choose = top_k_experts
        self.held = experts_per_rank(experts, dist.get_world_size())
        first = sum(self.held[: dist.get_rank()])
        self.mine = slice(first, first + self.held[dist.get_rank()])
        self.router = nn.Linear(config.hidden_size, experts, bias=False)
        # By their number among all: an expert's initial weights follow from its name, wherever it lives.
        self.experts = nn.ModuleDict({str(i): model.MLP(config) for i in range(experts)[self.mine]})

    def forward(self, x: Tensor) -> Tensor:
        rank = dist.get_rank()
        tokens = x.flatten(0, 1)
        # 1. Each token chooses k experts. Their weights add up to 1.
        probabilities = self.router(tokens).softmax(-1)
        choices = self.choose(probabilities, self.k)
        weights = probabilities.gather(-1, choices)
        if self.k > 1:  # of a single choice the weight would always be 1, and the router would learn nothing from it
            weights = weights / weights.sum(-1, keepdim=True)

        # 2. How many choices of each rank fell on each expert, [ranks, experts], known to all ranks. All sizes follow
        # from it. The host needs them before it can start the all-to-all, and so waits for the GPU here.
        of_mine = F.one_hot(choices, self.router.out_features).sum((0, 1))
        of_ranks = of_mine.new_empty(dist.get_world_size(), len(of_mine))
        all_gather(of_ranks, of_mine)
        self.balance_loss = balance_loss(probabilities, of_ranks, self.k)
        self.chosen = of_ranks.cpu()
        self.kept = self.up_to_capacity(self.chosen)

        # 3. The choices, grouped by expert, in the order of the tokens. Those over capacity are the last of a group.
        rows = choices.flatten().argsort(stable=True)
        groups = zip(rows.split(self.chosen[rank].tolist()), self.kept[rank].tolist(), strict=True)
        rows = torch.cat([group[:kept] for group, kept in groups])

        # 4. There, through the expert, and back. A choice that was dropped adds nothing: its token is left with the
        # residual connection, and with its other choices.
        to_ranks = [experts.sum().item() for experts in self.kept[rank].split(self.held)]
        from_ranks = self.kept[:, self.mine].sum(1).tolist()
        token_of_row = rows // self.k
        arrived = Exchange.apply(tokens[token_of_row], to_ranks, from_ranks)
        returned = Exchange.apply(self.run_experts(arrived), from_ranks, to_ranks)
        weighted = returned * weights.flatten()[rows, None]
        return torch.zeros_like(tokens).index_add(0, token_of_row, weighted).view_as(x)

    def run_experts(self, arrived: Tensor) -> Tensor:
        """Rows come ordered by rank, then by expert. Each expert takes all of its rows at once, in the order of the
        global batch. It runs on no rows, too: its gradient is then zero, not None."""
        parts = arrived.split(self.kept[:, self.mine].flatten().tolist())
        outputs = list(parts)
        for i, expert in enumerate(self.experts.values()):
            of_all_ranks = parts[i :: len(self.experts)]
            output = expert(torch.cat(of_all_ranks))
            outputs[i :: len(self.experts)] = output.split([len(part) for part in of_all_ranks])
        return torch.cat(outputs)

    def up_to_capacity(self, chosen: Tensor) -> Tensor:
        """What remains of these choices where an expert takes only its capacity: those of the first tokens among all
        ranks. Rank 0 has the first tokens, so a rank gets what the ranks before it have left."""
        if self.capacity_factor is None:
            return chosen
        capacity = math.ceil(self.capacity_factor * chosen.sum().item() / chosen.shape[1])
        of_ranks_before = chosen.cumsum(0) - chosen
        return (capacity - of_ranks_before).clamp(min=0).minimum(chosen)


def balance_loss(probabilities: Tensor, chosen: Tensor, k: int) -> Tensor:
    """This rank's part of E · sum(f · P) over the experts: 1 if all are alike (Fedus et al. 2021, equation 4). f is the
    share of the choices that fell on an expert, before any is dropped, and P its mean probability. Both are over the
    tokens of all ranks. Gradients pass through P alone. P is a mean, so the parts of the ranks add up. f multiplies P,
    so every rank needs the f of all ranks."""
    share_of_choices = chosen.sum(0) / chosen.sum()
    tokens_of_all_ranks = chosen.sum() / k
    return len(share_of_choices) * (share_of_choices * probabilities.sum(0)).sum() / tokens_of_all_ranks


def compute_gradients(
    net: nn.Module, micro_batches: list[list[Tensor]], clip_norm: float, balance_weight: float
) -> tuple[Tensor, Tensor]:
    """Forward and backward over this rank's micro-batches of a step. Returns the losses of the global batch,
    cross-entropy and balance, and the norm of the gradient before clipping."""
    losses = torch.zeros(2, device=micro_batches[0][0].device)
    for inputs, targets in micro_batches:
        # Each rank's loss is its part of the global mean, so that gradients only ever add up.
        cross_entropy = net(inputs, targets) / (dist.get_world_size() * len(micro_batches))
        balance = sum(block.mlp.balance_loss for block in net.model.layers.values()) / len(micro_batches)
        (cross_entropy + balance_weight * balance).backward()
        losses += torch.stack([cross_entropy, balance]).detach()
    all_reduce(losses)
    # An expert's gradient is complete: backward brought it the gradients of its tokens from all ranks. What every rank
    # holds has the gradient of this rank's tokens alone.
    experts, shared = split_parameters(net)
    for parameter in shared:
        all_reduce(parameter.grad)
    # One norm over all of the model: what is shared counts once, the experts of all ranks add up.
    squares_of_experts = torch.nn.utils.get_total_norm([parameter.grad for parameter in experts]) ** 2
    all_reduce(squares_of_experts)
    squares_of_shared = torch.nn.utils.get_total_norm([parameter.grad for parameter in shared]) ** 2
    norm = (squares_of_experts + squares_of_shared).sqrt()
    torch.nn.utils.clip_grads_with_norm_(net.parameters(), clip_norm, norm)
    return losses, norm


def split_parameters(net: nn.Module) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """This rank's experts, and what every rank holds."""
    named = list(net.named_parameters())
    experts = [parameter for name, parameter in named if ".experts." in name]
    return experts, [parameter for name, parameter in named if ".experts." not in name]


def experts_per_rank(experts: int, ranks: int) -> list[int]:
    """The first ranks hold one more where they do not divide."""
    return [experts // ranks + (rank < experts % ranks) for rank in range(ranks)]


def build(
    config: shapes.Config, mixture: Callable[[shapes.Config], nn.Module], k: int, *, seed: int, device: torch.device
) -> nn.Module:
    """The project's model with a mixture in place of each MLP. Its experts are 1/k as wide as that MLP."""
    of_expert = dataclasses.replace(config, intermediate_size=config.intermediate_size // k)
    with torch.device("meta"):
        net = model.Transformer(config)
        for block in net.model.layers.values():
            block.mlp = mixture(of_expert)
    net.to_empty(device=device)
    net.tie_weights()  # to_empty has made two matrices of one
    net.init_weights(seed)
    return net


def main() -> int:
    began = time.perf_counter()
    args, config = parse_flags(__doc__)  # raises a UserError before any rank starts
    runtime.relaunch(args.device)
    runtime.seed(args.seed, deterministic=True)  # before the group: NCCL reads variables when it starts
    device = runtime.init_process_group(args.device)
    runtime.exact_fp32(device)  # or some containers would multiply in tf32
    batches = data.train_batches(
        data.load_corpus().train,
        seq_len=args.seq_len,
        global_batch_size=args.global_batch_size,
        # Every rank reads the micro-batch of all ranks and takes its part. Capacity and balance loss are those of this
        # micro-batch: so they see the same tokens in the same order on any number of ranks.
        micro_batch_size=args.global_batch_size // args.micro_batches,
        seed=args.seed,
        device=device,
    )

    def next_step() -> list[list[Tensor]]:
        return [[tensor.to(device) for tensor in next(batches)] for _ in range(args.micro_batches)]

    def build_net(capacity_factor: float | None = None, mixture: type[nn.Module] = Mixture) -> nn.Module:
        make = partial(mixture, experts=args.experts, k=args.top_k, capacity_factor=capacity_factor)
        return build(config, make, args.top_k, seed=args.seed, device=device)

    gradients = partial(compute_gradients, clip_norm=args.clip_norm)
    batches_of_proof = [next_step() for _ in range(PROOF_STEPS)]
    proofs = [
        prove(build_net, factor, gradients, batches_of_proof, args.clip_norm, BALANCE_WEIGHT)
        for factor in (None, args.capacity_factor)
    ]
    routings = time_routings(build_net(), gradients, batches_of_proof[0])
    one_process = build_net(mixture=LocalMixture)
    parameters = sum(parameter.numel() for parameter in one_process.parameters())
    balance = compare_balance(one_process, batches_of_proof[0][0][0])
    batches_of_training = [next_step() for _ in range(args.steps)]
    learning_rate = shapes.recipe(args.model).lr
    trainings = [
        train_and_count(build_net(), gradients, weight, batches_of_training, learning_rate)
        for weight in (0, BALANCE_WEIGHT)
    ]
    conclude(args, proofs, routings, balance, trainings, parameters, device, began)
    runtime.shutdown()
    return 0


if __name__ == "__main__":
    exits.run(main)
