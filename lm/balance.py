"""Keep the experts of a mixture equally busy: a balance loss, a bias of the router, or both.

A router that prefers some experts trains them more, and prefers them more and more. Two remedies:

    loss    adds weight * experts * sum over experts e of f(e) * p(e) to the loss. f(e) is how often
            a token chooses e, p(e) the mean probability of e. transformers has this formula. It
            pools all layers, so an even load gives k, the number of experts of a token.
            Source: Fedus et al. 2021, Switch Transformers, section 2.2.
    bias    adds a number per expert to the probabilities when experts are chosen, and not to the
            weights of their outputs. After each step it falls by a fixed amount for the experts
            with more tokens than the mean, and rises for the others. Source: Wang et al. 2024,
            Auxiliary-Loss-Free Load Balancing.

f and the loads count the tokens of the global batch: of all ranks and all micro-batches. f
multiplies p, so backward of the first micro-batch needs the counts of the last. If there are
several micro-batches, `start_step` counts in a forward of its own.
"""

from argparse import Namespace
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from common import runtime
from common.exits import UserError
from lm.model import Transformer
from lm.moe import mixtures
from lm.shapes import Config
from training.batches import Batches


class Balance:
    """Balance the experts of a model during training.

    Create it before the model is sharded or compiled. A training step then calls

        start_step, forward and backward of each micro-batch, the optimizer, end_step
    """

    def __init__(
        self,
        net: Transformer,
        batches: Batches,
        device: torch.device,
        *,
        weight: float,
        bias_rate: float,
        unpack: Callable[[Tensor], tuple[Tensor, dict]] | None = None,
    ) -> None:
        """Attach the balance to `net`.

        Args:
            weight: The weight of the balance loss. 0: no such loss.
            bias_rate: How far the bias of an expert moves in a step. 0: there is no bias.
            unpack: Returns the token ids in a micro-batch's inputs, and more arguments of `net`.
                None: the inputs are token ids.
        """
        self.net = net
        self.batches = batches
        self.unpack = unpack
        self.weight = weight
        self.bias_rate = bias_rate
        self.mixtures = mixtures(net)
        if bias_rate > 0:
            for mixture in self.mixtures:
                mixture.add_bias()
        net.balance = self
        experts = self.mixtures[0].gate.out_features
        self.step_counts = torch.zeros(len(self.mixtures), experts, dtype=torch.long, device=device)
        self.step_loss = torch.zeros((), device=device)
        self.counted_ahead: Tensor | None = None
        self.my_tokens: Tensor | slice = slice(None)
        self.tensor_mesh: DeviceMesh | None = None

    def shard_tokens(self, my_tokens: Tensor, tensor_mesh: DeviceMesh | None) -> None:
        """Set the tokens of each sequence that this rank has, and the ranks that share a loss."""
        self.my_tokens = my_tokens
        self.tensor_mesh = tensor_mesh

    @torch.no_grad()
    def start_step(
        self, step: int, autocast: Callable[[], AbstractContextManager] = nullcontext
    ) -> None:
        """Count the choices of the global batch of a step, if they are needed before its forward.

        Every rank must call this. `autocast` is the context of forward in the training loop.
        """
        self.step_counts.zero_()
        self.step_loss.zero_()
        self.counted_ahead = None
        if self.weight == 0 or self.batches.accumulation_steps == 1:
            return
        counts = torch.zeros_like(self.step_counts)
        stream = self.batches.stream(step - 1)
        for inputs, targets in islice(stream, self.batches.accumulation_steps):
            inputs = inputs.to(counts.device)[:, self.my_tokens]
            targets = targets.to(counts.device)[:, self.my_tokens]
            arguments = {}
            if self.unpack is not None:
                inputs, arguments = self.unpack(inputs)
            with autocast():
                self.net(inputs, targets, **arguments)
            counts += self.last_counts()
        self.counted_ahead = over_ranks(counts)

    @torch.compiler.disable  # a collective and a few small sums: not worth a graph
    def loss(self) -> Tensor | float:
        """Return the balance loss of a micro-batch, times its weight. Count the choices.

        The mean over ranks and micro-batches is the balance loss of the global batch.
        """
        counts = self.last_counts()
        self.step_counts += counts
        if self.weight == 0:
            return 0.0
        micro_batches = runtime.ranks().world_size
        if self.counted_ahead is None:
            counts = over_ranks(counts)
        else:  # of all ranks and micro-batches
            counts = self.counted_ahead
            micro_batches *= self.batches.accumulation_steps
        choices = counts.sum(dim=0)  # of all layers, [experts]
        tokens = choices.sum() / self.mixtures[0].experts_per_token  # of all layers
        frequency = choices / tokens  # f
        probability = torch.stack([load.probability for load in self.net.model.loads])
        # p is a mean over the tokens of the global batch. Micro-batches may have unequal numbers of
        # tokens: this is the part of one of them, times their number.
        mean_probability = probability.sum(dim=0) / tokens * micro_batches
        mean_probability = self.over_tensor_ranks(mean_probability)
        loss = self.weight * len(choices) * (frequency * mean_probability).sum()
        self.step_loss += loss.detach()
        return loss

    @torch.no_grad()
    def end_step(self, *, skipped: bool = False) -> dict[str, Tensor]:
        """Move the biases. Return what metrics.jsonl has of the step. Every rank must call this.

        If the optimizer skipped the step, the biases stay, too.

        expert_tokens: how many tokens chose each expert in each layer, [layers, experts].
        balance_loss: what the loss has of it, times its weight, if the weight is not 0.
        """
        counts = over_ranks(self.step_counts)
        if self.bias_rate > 0 and not skipped:
            for mixture, load in zip(self.mixtures, counts.float(), strict=True):
                step = self.bias_rate * torch.sign(load.mean() - load)
                assert mixture.bias is not None
                mixture.bias += step.to(mixture.bias.device)
        values = {"expert_tokens": counts}
        if self.weight > 0:
            micro_batches = self.batches.accumulation_steps * runtime.ranks().world_size
            values["balance_loss"] = over_ranks(self.step_loss) / micro_batches
        return values

    def over_tensor_ranks(self, probability: Tensor) -> Tensor:
        """Return the mean over tensor ranks, which have other tokens and the same loss."""
        if self.tensor_mesh is None:
            return probability
        from torch.distributed.tensor import DTensor, Partial

        # Backward gives each rank the gradient of its own summand.
        summand = probability / self.tensor_mesh.size()
        return DTensor.from_local(summand, self.tensor_mesh, [Partial()]).full_tensor()

    def last_counts(self) -> Tensor:
        """Return the counts of the last forward on this rank, [layers, experts]."""
        return torch.stack([load.counts for load in self.net.model.loads])


def callbacks(
    args: Namespace, net: Transformer, batches: Batches, device: torch.device
) -> dict[str, Callable]:
    """Return the callbacks of TrainingObjects that balance the experts as the flags say.

    They are {} for a model without experts. Raise UserError if it is given one of the flags.
    """
    check_flags(args, net.config)
    if net.config.experts is None:
        return {}
    balance = Balance(net, batches, device, weight=args.balance_loss, bias_rate=args.balance_bias)
    return {"start_step": balance.start_step, "end_step": balance.end_step}


def check_flags(args: Namespace, config: Config) -> None:
    """Raise UserError if the flags are given and the model has no experts.

    If it has experts, --balance-loss that is not given becomes the weight of the model's folder.
    """
    if config.experts is None:
        if args.balance_loss or args.balance_bias:
            raise UserError(
                f"--balance-loss and --balance-bias are for a mixture of experts, and --model "
                f"{args.model} has none"
            )
    elif args.balance_loss is None:
        args.balance_loss = config.experts.balance_weight


def setting(args: Namespace) -> dict[str, str]:
    """Return what a resumed run must have, too, for TrainingObjects.must_match."""
    if not (args.balance_loss or args.balance_bias):
        return {}
    return {"balance": f"--balance-loss {args.balance_loss} --balance-bias {args.balance_bias}"}


def over_ranks(counts: Tensor) -> Tensor:
    """Return the sum over all ranks."""
    total = counts.clone()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total
