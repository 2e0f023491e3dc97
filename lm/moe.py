"""A mixture of experts in place of a block's MLP: the arithmetic of Qwen3-MoE and Mixtral.

    Mixture     a router chooses k experts for each token, and adds up their outputs
      Experts   the MLPs of all experts, as three stacks of matrices

A mixture has the weights of all its experts, and a token passes k of them. The arithmetic is that
of Hugging Face transformers, with one exception: the router computes in fp32.
08_model_parallel/expert_parallel.py explains a mixture of experts step by step.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.shapes import ExpertConfig


class Mixture(nn.Module):
    """A router, and the experts that it chooses from."""

    def __init__(self, hidden: int, c: ExpertConfig) -> None:
        super().__init__()
        self.experts_per_token = c.num_experts_per_tok
        self.divide_by_sum = c.norm_topk_prob
        self.gate = nn.Linear(hidden, c.num_experts, bias=False)
        self.experts = Experts(hidden, c)
        self.bias: Tensor | None
        self.register_buffer("bias", None)  # None until add_bias: then a checkpoint has it

    def add_bias(self) -> None:
        """Add a bias, [experts], to the probabilities when experts are chosen. It starts at 0."""
        self.bias = torch.zeros(self.gate.out_features, device=self.gate.weight.device)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, "Load"]:
        """Return [batch, tokens, hidden] for x of the same shape, and the load of the experts.

        padding_mask, [batch, tokens], is True where a token is padding. Padding passes no expert
        and is not counted. Its output is 0.
        """
        tokens = x.flatten(0, 1)  # [tokens, hidden]
        padding = None
        if padding_mask is not None:
            padding = padding_mask.flatten().unsqueeze(-1)  # [tokens, 1]
            # Backward then sets the gradient of padding to 0. grouped_mm leaves it undefined.
            tokens = tokens.masked_fill(padding, 0)
        probabilities = self.route(tokens)
        scores = probabilities
        if self.bias is not None:
            scores = scores + self.bias.to(scores.device)  # weights that are offloaded: on the CPU
        choices = scores.topk(self.experts_per_token).indices  # [tokens, k]
        weights = probabilities.gather(-1, choices)
        if self.divide_by_sum:
            weights = weights / weights.sum(-1, keepdim=True)
        experts = self.gate.out_features
        if padding is not None:
            choices = choices.masked_fill(padding, experts)  # sorted last, and cut off
            probabilities = probabilities.masked_fill(padding, 0)
        counts = count(choices, experts + 1)[:experts]
        load = Load(counts, probabilities.sum(dim=0))

        # Give each choice a row, and order the rows by expert.
        order = choices.flatten().argsort(stable=True)  # choices are numbered token * k + place
        rows = tokens[order // self.experts_per_token]
        results = self.run_experts(rows, counts)
        # Back in the order of the tokens, the sum over k has a fixed order, without atomics.
        outputs = results[order.argsort()].unflatten(0, (-1, self.experts_per_token))
        if padding is not None:
            # grouped_mm leaves the last rows, those of padding, uninitialized. They must not reach
            # a sum, also not times 0: 0 * NaN is NaN.
            outputs = outputs.masked_fill(padding.unsqueeze(-1), 0)
        mixed = (outputs * weights.unsqueeze(-1).to(x.dtype)).sum(dim=1)
        return mixed.view_as(x), load

    def run_experts(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return the results of Experts. Expert parallelism replaces this: see lm/exchange.py."""
        return self.experts(rows, counts)

    def route(self, tokens: Tensor) -> Tensor:
        """Return the probability of each expert, [tokens, experts], in fp32.

        In bf16 two experts that are nearly tied change places more often. FSDP hands out the weight
        in its param_dtype, which may be bf16: it is then rounded, and the matmul is not.
        """
        with torch.autocast(tokens.device.type, enabled=False):
            return F.linear(tokens.float(), local_weight(self.gate.weight).float()).softmax(dim=-1)


def mixtures(net: nn.Module) -> list[Mixture]:
    """Return the mixtures of a model, in the order of its layers."""
    return [module for module in net.modules() if isinstance(module, Mixture)]


class Load(NamedTuple):
    """The tokens and probabilities of the experts of a layer. lm/balance.py reads them.

    It is a result, not an attribute of the module: activation checkpointing runs forward twice.
    """

    counts: Tensor  # how many tokens chose each expert, int64 [experts]
    probability: Tensor  # the sum over the tokens, fp32 [experts]


class Experts(nn.Module):
    """The MLPs of all experts. Each weight is a stack with one matrix per expert."""

    def __init__(self, hidden: int, c: ExpertConfig) -> None:
        super().__init__()
        experts = c.num_experts
        intermediate = c.moe_intermediate_size
        self.gate_proj = nn.Parameter(torch.empty(experts, intermediate, hidden))
        self.up_proj = nn.Parameter(torch.empty(experts, intermediate, hidden))
        self.down_proj = nn.Parameter(torch.empty(experts, hidden, intermediate))
        self.gradient_factor = 1.0  # of the weights' gradients; expert parallelism sets it

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """Return [rows, hidden] for rows of this shape, which are ordered by expert.

        counts, [experts], are the rows of each expert. An expert without rows takes part: its
        gradient is 0, not None. Rows behind those of the last expert have an undefined result.
        """
        factor = self.gradient_factor
        gate_proj = local_weight(self.gate_proj, factor)
        up_proj = local_weight(self.up_proj, factor)
        down_proj = local_weight(self.down_proj, factor)
        gate = F.silu(multiply(rows, gate_proj, counts))  # [rows, intermediate]
        return multiply(gate * multiply(rows, up_proj, counts), down_proj, counts)


def multiply(rows: Tensor, stack: Tensor, counts: Tensor) -> Tensor:
    """Multiply each row by the matrix of its expert.

    rows, [rows, inputs], are ordered by expert, and counts says how many each has. stack is
    [experts, outputs, inputs]. Rows behind those of the last expert have an undefined result.
    """
    stack = stack.to(rows.dtype)  # autocast does not know grouped_mm
    # torch compiles and traces grouped_mm in bf16 only, and with rows of multiples of 16 bytes.
    if rows.dtype == torch.bfloat16 and stack.shape[1] % 8 == 0 and stack.shape[2] % 8 == 0:
        return F.grouped_mm(rows, stack.mT, offs=counts.cumsum(0).int())
    sizes = counts.tolist()
    *parts, rest = rows.split([*sizes, len(rows) - sum(sizes)])
    outputs = [F.linear(part, matrix) for part, matrix in zip(parts, stack.unbind(), strict=True)]
    outputs.append(rest.new_zeros(len(rest), stack.shape[1]))
    return torch.cat(outputs)


def local_weight(weight: Tensor, gradient_factor: float = 1.0) -> Tensor:
    """Return what this rank holds of a weight. Backward multiplies the gradient by a factor.

    A replicated DTensor, the router in tensor parallelism, meets other tokens on each rank. So the
    gradient of each rank is a summand (Partial), and DTensor adds them up. to_local() alone would
    say that all ranks have the same gradient.
    """
    if hasattr(weight, "placements"):
        from torch.distributed.tensor import Partial

        placements = []
        for placement in weight.placements:
            placements.append(Partial() if placement.is_replicate() else placement)
        weight = weight.to_local(grad_placements=placements)
    if gradient_factor != 1.0:
        weight = ScaleGradient.apply(weight, gradient_factor)
    return weight


class ScaleGradient(torch.autograd.Function):
    """Return a tensor as it is. Backward multiplies its gradient by a factor."""

    @staticmethod
    def forward(ctx, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.factor, None


def count(choices: Tensor, experts: int) -> Tensor:
    """Return how many choices fell on each expert, [experts]."""
    # bincount would make the CPU wait for the GPU.
    choices = choices.flatten()
    return choices.new_zeros(experts).scatter_add(0, choices, torch.ones_like(choices))
