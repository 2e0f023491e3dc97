"""What autograd keeps for backward, and LoRA's layer: for several lessons of this chapter, and for your own models."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks


def is_of_a_weight(tensor: Tensor) -> bool:
    """Whether it is a parameter, or one that was only transposed or cast."""
    node = tensor.grad_fn
    while node is not None and node.name() in ("TBackward0", "ToCopyBackward0"):
        node = node.next_functions[0][0]
    return isinstance(tensor, nn.Parameter) or (node is not None and node.name().endswith("AccumulateGrad"))


@contextmanager
def saved_for_backward(net: nn.Module) -> Iterator[dict[str, dict[int, int]]]:
    """Notes what autograd saves inside the block: bytes by address, so that what is saved twice counts once."""
    saved: dict[str, dict[int, int]] = {"activations": {}, "weight copies": {}}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kind = "weight copies" if is_of_a_weight(tensor) else "activations"
        saved[kind][storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved
    for weight in net.parameters():  # the weight itself is no copy, and no activation if it is frozen
        for kind in saved.values():
            kind.pop(weight.untyped_storage().data_ptr(), None)


class LoRALinear(nn.Linear):
    """A linear layer with an adapter: y = x W^T + (alpha / rank) (x A^T) B^T (Hu et al. 2021). Frozen: `weight` W
    [out, in], which keeps its name and its dtype. Trained, in fp32: lora_A [rank, in] and lora_B [out, rank]."""

    def __init__(self, linear: nn.Linear, rank: int, alpha: float) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.scaling = alpha / rank  # with it the same learning rate serves many ranks
        self.lora_A = nn.Parameter(torch.empty(rank, self.in_features, device=linear.weight.device))
        self.lora_B = nn.Parameter(torch.empty(self.out_features, rank, device=linear.weight.device))
        nn.init.kaiming_uniform_(self.lora_A, a=5**0.5)  # random: if both were zero, both would stay so
        nn.init.zeros_(self.lora_B)  # training starts from the model as it is

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


def adapt(net: nn.Module, *, rank: int, alpha: float, kind: type[LoRALinear] = LoRALinear) -> None:
    """Freeze a Transformer, and put adapters into all linear layers of its blocks: x [..., in] to y [..., out]."""
    net.requires_grad_(False)
    for block in net.model.layers.values():
        for name, module in [*block.named_modules()]:
            if isinstance(module, nn.Linear):
                block.set_submodule(name, kind(module, rank, alpha))


def merge(net: nn.Module) -> None:
    """Make plain linear layers of the adapted ones, same names and sizes: nothing is left to compute beside them."""
    for name, layer in [(name, module) for name, module in net.named_modules() if isinstance(module, LoRALinear)]:
        plain = nn.Linear(layer.in_features, layer.out_features, bias=False, device="meta")
        plain.weight, plain.bias = nn.Parameter(layer.merged_weight()), layer.bias
        net.set_submodule(name, plain)
