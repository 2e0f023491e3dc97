"""What quantized_inference.py proves of its weights: how far rounding may move them, and that products use them."""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from _quantized_inference_products import rows_at_once
from torch import Tensor, nn

if TYPE_CHECKING:
    from _quantized_inference_load import Loaded


def rounding_share(weight: Tensor, error: Tensor, parts: dict[str, Tensor], weights: str) -> float:
    """The largest error of a weight, as a share of what rounding allows it."""
    scale = parts["scale"].float()
    if weights == "int8":
        allowed = scale[:, None] / 2
    elif weights == "fp8":  # three bits after the first; below the smallest normal number a fixed step
        allowed = torch.maximum(weight.abs() / 16, scale[:, None] * 2**-10)
    else:
        # half a step, and what the rounding of scale and zero to bf16 moves the ends of the group by
        zero = parts["zero"].float()
        ends = (15 * scale + zero.abs()) * 2**-8
        group = 2 * parts["codes"].shape[1] // scale.shape[1]
        allowed = (scale / 2 + ends).repeat_interleave(group, 1)[:, : weight.shape[1]]
    # fp32 rounds, too
    return (error.abs() / (allowed + 1e-6 * weight.abs() + 1e-30)).max().item()


@torch.no_grad()
def product_error(layer: nn.Module, parts: dict[str, Tensor], dtype: torch.dtype) -> float:
    """Relative error of the packed product, with one row and with several, against the dequantized weights in fp32."""
    codes = parts["codes"]
    columns = codes.shape[1] * (2 if "zero" in parts else 1)  # int4: two in a byte
    generator = torch.Generator(codes.device).manual_seed(1)
    inputs = [torch.randn(rows, columns, generator=generator, device=codes.device).to(dtype) for rows in (1, 5)]
    expected = [[], []]
    for some_rows in zip(*(part.split(rows_at_once(columns)) for part in parts.values()), strict=True):
        exact = layer.dequantize(**dict(zip(parts, some_rows, strict=True)))
        for x, products in zip(inputs, expected, strict=True):
            products.append(F.linear(x.float(), exact))
    errors = []
    for x, products in zip(inputs, expected, strict=True):
        product = torch.cat(products, dim=1)
        errors.append(((layer(x).float() - product).norm() / product.norm()).item())
    # activations and results in bf16 round by 2^-9 each, fp8 rounds several rows of activations by 2^-4
    allowed = 0.05 if layer.__class__.__name__ == "Fp8" else 1e-2 if dtype != torch.float32 else 1e-5
    assert max(errors) <= allowed, f"the product of {layer.__class__.__name__} is off by {max(errors)}"
    return max(errors)


def print_checks(weights: str, loaded: "Loaded") -> None:
    if not loaded.rounding_shares:
        return
    count, most = len(loaded.rounding_shares), max(loaded.rounding_shares)
    print(f"checked: {weights}: no weight of {count} matrices is off by more than rounding allows ({most:.0%} of it)")
    most = max(loaded.product_errors)
    print(f"checked: {weights}: products equal those of the dequantized weights in fp32 to {most:.0e}", flush=True)


def check_logits(logits: Tensor, reference: Tensor, loaded: "Loaded", dtype: str) -> float:
    """Their relative error. Each matrix is off by a share of itself; errors without a common cause add as squares."""
    error = ((logits - reference).norm() / reference.norm()).item()
    # bf16 rounds what goes into each product and what comes out of it
    activations = 0.0 if dtype == "fp32" else loaded.matrices * (2 * 2**-9) ** 2
    if loaded.net.lm_head.__class__.__name__ == "Fp8":  # it rounds the activations of a prompt too, by 2^-5 on average
        activations += loaded.matrices * 2**-10
    allowed = (sum(share**2 for share in loaded.relative_weight_errors) + activations) ** 0.5
    assert error <= allowed, f"logits are off by {error:.4f}, where rounding allows {allowed:.4f}"
    print(f"checked: logits are off by {error:.2%} of fp32's, where rounding allows {allowed:.2%}", flush=True)
    return error
