"""LoRA (Hu et al. 2021, arXiv:2106.09685): two thin matrices beside each frozen one, whole or sharded."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.model import Transformer


class LoRALinear(nn.Linear):
    """A linear layer with an adapter: y = x W^T + (alpha / rank) (x A^T) B^T. Frozen: `weight` W
    [out, in], which keeps its name and its dtype. Trained, in fp32: lora_A [rank, in] and lora_B [out, rank]."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.scaling = alpha / rank  # with it the same learning rate serves many ranks
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, device=linear.weight.device))
        self.lora_B = nn.Parameter(
            torch.zeros(self.out_features, rank, device=linear.weight.device)
        )
        # with B zero, training starts from the model; not with both
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.lora_A), self.lora_B) * self.scaling

    def base(self, x: Tensor) -> Tensor:
        """x W^T [..., out]; QLoRA computes it from 4 bits."""
        return super().forward(x)

    def merged_weight(self) -> Tensor:
        """W + (alpha / rank) B A [out, in], in fp32: in bf16 the rounding of W could swallow the small matmul."""
        return self.frozen_weight() + self.scaling * self.lora_B.detach() @ self.lora_A.detach()

    def frozen_weight(self) -> Tensor:  # W [out, in], in fp32
        return self.weight.detach().float()


def adapt(
    net: Transformer, *, rank: int, alpha: float, kind: type[LoRALinear] = LoRALinear
) -> None:
    """Freeze a Transformer, and put adapters into all linear layers of its blocks: x [..., in] to y [..., out]."""
    net.requires_grad_(False)
    for block in net.model.layers.values():
        for name, module in [*block.named_modules()]:
            if isinstance(module, nn.Linear):
                block.set_submodule(name, kind(module, rank, alpha))
