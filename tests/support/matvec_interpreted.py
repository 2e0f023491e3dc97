"""Run the kernel of lm/matvec.py in Triton's interpreter, and compare with fp32.

TRITON_INTERPRET=1 must be set. The interpreter computes on the CPU, program by program, so the
matrices have few rows. Results are written in fp32, which shows the kernel's own rounding.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "09_inference"), str(ROOT)]
from quantized import Int4Linear, Int8Linear

from lm import matvec
from lm.matvec import TritonLinear, triton_layer

SHAPES = [(7, 288), (12, 1792), (2, 4384)]  # rows, columns: no block and no program divides them
GROUPS = (32, 64, 128)
ALLOWED_ERROR = 2e-6
ALLOWED_BF16_ERROR = 1e-2  # the interpreter truncates, where a GPU rounds


def check(found: Tensor, expected: Tensor, allowed: float, what: str) -> None:
    """Assert that the relative error is at most `allowed`."""
    error = ((found.double() - expected).norm() / expected.norm()).item()
    assert error <= allowed, f"{what}: off by {error:.1e}"


def matvec_in_fp32(x: Tensor, layer: TritonLinear, group: int) -> Tensor:
    """Return what matvec_kernel computes, before it is rounded to bf16."""
    tokens, columns = x.shape
    rows_at_once = 2
    programs = -(-layer.out_features // rows_at_once)
    padded = programs * rows_at_once - layer.out_features
    words = F.pad(layer.words, (0, 0, 0, padded))
    scales = layer.scales
    scales = F.pad(scales, (0,) * (2 * scales.ndim - 1) + (padded,))
    y = torch.full((tokens, len(words)), torch.nan)
    matvec.matvec_kernel[(programs,)](
        x, words, scales, y, len(words), tokens, columns, layer.bits, group, rows_at_once, 128, 1
    )
    return y[:, : layer.out_features]


def check_matrix(parts: tuple[Tensor, ...], kind: type, columns: int, group: int) -> None:
    """Compare a quantized matrix with its dequantized form, for 1 to 3 rows of activations."""
    layer = triton_layer(*parts)
    dequantized = kind.dequantize(*parts).double()  # [rows, padded columns]
    for tokens in (1, 2, 3):
        what = f"{kind.__name__}, {tuple(dequantized.shape)}, groups of {group}, {tokens} rows"
        x = torch.randn(tokens, columns) * 10 ** torch.randn(tokens, 1)
        x = x.bfloat16()
        expected = F.linear(x.double(), dequantized[:, :columns])
        check(layer(x), expected, ALLOWED_BF16_ERROR, what)
        padded = F.pad(x, (0, dequantized.shape[1] - columns))
        check(matvec_in_fp32(padded, layer, group), expected, ALLOWED_ERROR, f"{what}, in fp32")


def main() -> None:
    torch.manual_seed(0)
    for rows, columns in SHAPES:
        weight = torch.randn(rows, columns) * torch.rand(rows, 1) + 0.1
        for group in GROUPS:
            check_matrix(Int4Linear.quantize(weight, group), Int4Linear, columns, group)
        check_matrix(Int8Linear.quantize(weight, 0), Int8Linear, columns, columns)
        print(f"checked: {rows} x {columns}", flush=True)

    # 36 columns: filled up to 48 in int8, and to 64 in int4
    weight = torch.randn(5, 36)
    x = torch.randn(1, 36).bfloat16()
    for kind in (Int4Linear, Int8Linear):
        parts = kind.quantize(weight, 32)
        expected = F.linear(x.double(), kind.dequantize(*parts)[:, :36].double())
        check(triton_layer(*parts)(x), expected, ALLOWED_BF16_ERROR, kind.__name__)

        # the rows of two matrices in one launch are the same bits
        both = [triton_layer(*kind.quantize(each, 32)) for each in (weight, weight.flip(0))]
        together = TritonLinear.concatenate(both)(x)
        assert torch.equal(together, torch.cat([layer(x) for layer in both], dim=-1))

    x[0, 0] = torch.inf
    assert not both[0](x).isfinite().any()
    print("checked: padding, concatenated rows, infinity")


if __name__ == "__main__":
    main()
