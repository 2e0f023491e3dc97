"""Add LoRA adapters to a model for 06_fsdp_zero/finetune.py, which shards, trains and saves them.

07_memory_tricks/lora.py explains LoRA and has the same layer, without what sharding needs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.model import Transformer

# The linear layers of a block, which peft calls "all-linear".
TARGET_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class LoRALinear(nn.Linear):
    """A frozen linear layer and its adapter: y = W x + (alpha / rank) B A x.

    The frozen `weight` W [out, in] keeps its name and its dtype. The adapter is trained in fp32:
    `lora_A` [rank, in] and `lora_B` [out, rank]. With FSDP all three can be sharded.
    """

    dropout = 0.0  # the share of x that the adapter does not see in training, as in peft

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        # Meta: nn.Linear allocates no weight here, since the layer takes over that of `linear`.
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight = linear.weight
        self.bias = linear.bias

        # Dividing by the rank lets one learning rate serve many ranks.
        self.scaling = alpha / rank

        device = linear.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, device=device))
        self.lora_B = nn.Parameter(torch.zeros(self.out_features, rank, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:  # [..., in]
        output = self.base(x)  # [..., out]
        if self.dropout > 0:
            x = F.dropout(x, self.dropout, self.training)
        low_rank = F.linear(x, self.lora_A)  # [..., rank]
        return output + F.linear(low_rank, self.lora_B) * self.scaling

    def base(self, x: Tensor) -> Tensor:
        """Apply the frozen layer: W x, [..., out]. QLoRA overrides this to read W from 4 bits."""
        return super().forward(x)

    def merged_weight(self) -> Tensor:
        """Return W + (alpha / rank) B A, [out, in], for a plain linear layer without an adapter.

        The sum is fp32: in bf16, rounding could remove the small product from the sum.
        """
        return self.frozen_weight() + self.scaling * self.lora_B.detach() @ self.lora_A.detach()

    def frozen_weight(self) -> Tensor:
        """Return W in fp32, [out, in]."""
        return self.weight.detach().float()


def adapt(
    net: Transformer,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    target_modules: tuple[str, ...] = TARGET_MODULES,
    kind: type[LoRALinear] = LoRALinear,
) -> None:
    """Freeze a Transformer and add an adapter to the linear layers of its blocks, in place.

    Embedding, norms and head stay frozen and get no adapter. `target_modules` are the names of the
    layers in a block. `kind` is the class of the adapted layers: LoRALinear or a subclass of it,
    such as QLoRA's.
    """
    net.requires_grad_(False)
    for block in net.model.layers.values():
        modules = list(block.named_modules())  # a list, because the loop replaces modules
        for name, module in modules:
            if name.rpartition(".")[2] in target_modules:
                adapted = kind(module, rank, alpha)
                adapted.dropout = dropout
                block.set_submodule(name, adapted)
