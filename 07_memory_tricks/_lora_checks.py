"""What lora.py promises of adapters, checked on the trained layers themselves: one at a time, in fp32, on the CPU."""

import copy
import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor, nn

TOKENS = 32
TOLERANCE = 1e-5  # relative; sums of thousands of products in fp32 came out 7e-7 apart on one CPU


def adapted_layers(net: nn.Module) -> dict[str, nn.Module]:
    return {name: module for name, module in net.named_modules() if hasattr(module, "lora_A")}


def frozen_digest(net: nn.Module) -> str:
    """SHA-256 over all that is not an adapter: weights, or codes, scales and zeros."""
    sha = hashlib.sha256()
    for name, tensor in net.state_dict().items():
        if "lora_" not in name:
            sha.update(name.encode())
            sha.update(tensor.cpu().contiguous().view(torch.uint8).numpy())
    return sha.hexdigest()


def relative_error(found: Tensor, expected: Tensor) -> float:
    difference, size = (found - expected).norm().item(), expected.norm().item()
    return difference / size if size else difference  # a tiny --alpha: squares of both may be rounded to zero


def merged_errors(layer: nn.Module) -> dict[str, float]:
    """How far an adapted layer is from one with the merged matrix W', for random inputs and gradients.

    If G is the gradient of W' = W + s B A, the chain rule gives s B^T G for A and s G A^T for B.
    """
    layer = copy.deepcopy(layer).float().cpu()  # bf16 values are fp32 values: nothing is rounded
    x = torch.randn(TOKENS, layer.lora_A.in_features, requires_grad=True)
    gradient = torch.randn(TOKENS, layer.lora_B.out_features)
    output = layer(x)
    output.backward(gradient)

    merged_weight = layer.merged_weight().requires_grad_()
    merged_x = x.detach().clone().requires_grad_()
    merged_output = F.linear(merged_x, merged_weight)
    merged_output.backward(gradient)
    a, b = layer.lora_A.weight, layer.lora_B.weight
    with torch.no_grad():
        return {
            "output": relative_error(output, merged_output),
            "gradient of the input": relative_error(x.grad, merged_x.grad),
            "gradient of A": relative_error(a.grad, layer.scaling * b.T @ merged_weight.grad),
            "gradient of B": relative_error(b.grad, layer.scaling * merged_weight.grad @ a.T),
        }


def check_layers(net: nn.Module) -> float:
    """The largest of these errors over all layers, none of which is above the tolerance."""
    largest = 0.0
    for name, layer in adapted_layers(net).items():
        for what, error in merged_errors(layer).items():
            assert error <= TOLERANCE, f"{name}: {what} differs from the merged layer's by {error:.1e}"
            largest = max(largest, error)
    return largest
