"""Add LoRA adapters to a model for 06_fsdp_zero/finetune.py, which shards, trains and saves them.

07_memory_tricks/lora.py explains LoRA and has the same layer, without what sharding needs.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.runtime import local_shard
from lm.model import Transformer

ATTENTION_MODULES = ("q_proj", "k_proj", "v_proj", "o_proj")
# The linear layers of a block, which peft calls "all-linear".
TARGET_MODULES = (*ATTENTION_MODULES, "gate_proj", "up_proj", "down_proj")


class LoRALinear(nn.Linear):
    """A frozen linear layer and its adapter: y = W x + (alpha / rank) B A x.

    The frozen `weight` W [out, in] keeps its name and its dtype. The adapter is trained in fp32:
    `lora_A` [rank, in] and `lora_B` [out, rank]. With FSDP all three can be sharded.
    """

    dropout = 0.0  # the share of x that the adapter does not see in training, as in peft

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        # Meta: nn.Linear allocates no weight here, since the layer takes over that of `linear`.
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.bias = linear.bias
        self.hold(linear.weight)

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

    def hold(self, weight: nn.Parameter) -> None:
        """Keep W. QLoRALinear overrides this to keep it in 4 bits."""
        self.weight = weight

    def base(self, x: Tensor) -> Tensor:
        """Apply the frozen layer: W x, [..., out]."""
        return super().forward(x)

    def merged_weight(self) -> Tensor:
        """Return W + (alpha / rank) B A, [out, in], for a plain linear layer without an adapter.

        The sum is fp32: in bf16, rounding could remove the small product from the sum.
        """
        return self.frozen_weight() + self.scaling * self.lora_B.detach() @ self.lora_A.detach()

    def frozen_weight(self) -> Tensor:
        """Return W in fp32, [out, in]."""
        return self.weight.detach().float()


GROUP = 64  # so many weights of a row share a scale and a minimum


class QLoRALinear(LoRALinear):
    """The same adapter beside a frozen W in 4.5 bits a weight, as 07_memory_tricks/lora.py has it.

    W is in three frozen parameters, which FSDP shards by rows and gathers: `codes`, uint8
    [out, groups * GROUP / 2], with two codes in a byte, and `scale` and `minimum`, bf16
    [out, groups]. No group has weights of two rows, so a rank can quantize its rows alone.
    """

    def hold(self, weight: nn.Parameter) -> None:
        """Allocate the 4 bits. Quantize `weight`, unless it is on the meta device."""
        groups = -(-self.in_features // GROUP)
        self.weight = None
        sizes = {"codes": groups * GROUP // 2, "scale": groups, "minimum": groups}
        for name, columns in sizes.items():
            dtype = torch.uint8 if name == "codes" else torch.bfloat16
            values = torch.empty(self.out_features, columns, dtype=dtype, device=weight.device)
            self.register_parameter(name, nn.Parameter(values, requires_grad=False))
        if not weight.is_meta:
            self.quantize(weight.detach())

    @torch.no_grad()
    def quantize(self, rows: Tensor) -> None:
        """Replace W. `rows` are those that this rank holds, [rows, in]."""
        held = (self.codes, self.scale, self.minimum)
        for parameter, values in zip(held, quantize_int4(rows), strict=True):
            local_shard(parameter).copy_(values)

    def base(self, x: Tensor) -> Tensor:
        output = Int4Matmul.apply(x, self.codes, self.scale, self.minimum)
        return output if self.bias is None else output + self.bias

    def frozen_weight(self) -> Tensor:
        """Return the dequantized W in fp32, [out, in], sharded as the codes are."""
        codes, scale, minimum = map(local_shard, (self.codes, self.scale, self.minimum))
        weight = dequantize_int4(codes, scale, minimum, self.in_features, torch.float32)
        if not hasattr(self.codes, "placements"):
            return weight
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            weight,
            self.codes.device_mesh,
            self.codes.placements,
            shape=torch.Size((self.out_features, self.in_features)),
            stride=(self.in_features, 1),
        )


def quantize_int4(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round each weight to one of 16 values between the smallest and the largest of its group.

    The weight is about minimum + code * scale. Return the codes, scale and minimum of QLoRALinear.
    """
    padding = -rows.size(1) % GROUP
    padded = F.pad(rows.float(), (0, padding))
    groups = padded.view(len(rows), padded.size(1) // GROUP, GROUP)
    minimum = groups.amin(2, keepdim=True).bfloat16()
    scale = ((groups.amax(2, keepdim=True) - minimum) / 15).bfloat16()
    scale = torch.where(scale > 0, scale, 1)  # in a group of equal weights: 0 / 1, not 0 / 0
    codes = ((groups - minimum) / scale).round().clamp(0, 15).to(torch.uint8).flatten(1)
    return codes[:, ::2] | codes[:, 1::2] << 4, scale.squeeze(2), minimum.squeeze(2)


def dequantize_int4(
    codes: Tensor, scale: Tensor, minimum: Tensor, in_features: int, dtype: torch.dtype
) -> Tensor:
    """Return the rows that quantize_int4 has rounded, [rows, in]."""
    pairs = torch.stack((codes & 15, codes >> 4), dim=-1)
    groups = pairs.view(*scale.shape, GROUP)
    values = groups * scale.to(dtype).unsqueeze(2)
    values += minimum.to(dtype).unsqueeze(2)
    return values.flatten(1)[:, :in_features]


class Int4Matmul(torch.autograd.Function):
    """Multiply by a frozen W of 4 bits. Backward dequantizes W again, so that none is kept.

    Under FSDP the saved tensors are the gathered ones. FSDP frees them after forward, and has
    gathered them again when backward reads them.
    """

    @staticmethod
    def forward(ctx, x: Tensor, codes: Tensor, scale: Tensor, minimum: Tensor) -> Tensor:
        ctx.save_for_backward(codes, scale, minimum)
        ctx.in_features = x.size(-1)
        return F.linear(x, dequantize_int4(codes, scale, minimum, x.size(-1), x.dtype))

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        codes, scale, minimum = ctx.saved_tensors
        weight = dequantize_int4(codes, scale, minimum, ctx.in_features, gradient.dtype)
        return gradient @ weight, None, None, None


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
    layers in a block. `kind` is the class of the adapted layers: LoRALinear or QLoRALinear.
    """
    net.requires_grad_(False)
    for block in net.model.layers.values():
        modules = list(block.named_modules())  # a list, because the loop replaces modules
        for name, module in modules:
            if name.rpartition(".")[2] in target_modules:
                adapted = kind(module, rank, alpha)
                adapted.dropout = dropout
                block.set_submodule(name, adapted)
