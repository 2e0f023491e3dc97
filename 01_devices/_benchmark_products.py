"""A matrix product on the units for each type, and how wrong it may be. benchmark.py times these."""

from collections.abc import Callable

import torch
from torch import Tensor

from common import hardware

# torch's type; the largest relative error that rounding explains
TYPES = {
    "fp32": (torch.float32, 2**-16),  # 2^-24 per addition, thousands of them
    "tf32": (torch.float32, 2**-9),  # both operands cut to 10 bits
    "bf16": (torch.bfloat16, 2**-7),  # partial sums and result rounded to 8 bits
    "fp16": (torch.float16, 2**-10),  # to 11 bits
    "fp8": (torch.float8_e4m3fn, 2**-6),  # exact products, added up in less than fp32; the result is bf16
    "int8": (torch.int8, 0.0),  # added up in int32: exact
}


def not_native(dtype: str, device: torch.device) -> str | None:
    """Why `device` multiplies no matrices in `dtype`; None if it does."""
    if device.type == "cuda":
        has, needs = torch.cuda.get_device_capability(device), hardware.SINCE[dtype]
        if has < needs:
            return f"compute capability {has[0]}.{has[1]} is below {needs[0]}.{needs[1]}"
    elif dtype in ("tf32", "fp8"):  # torch computes them here, in fp32
        return f"{device.type} has no arithmetic in it"
    try:
        product(dtype, *operands(dtype, (64, 64, 64), device))()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def operands(dtype: str, shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Random x [M, K] and w [N, K]; zeros would switch fewer transistors and run at higher clocks."""
    m, n, k = shape
    if dtype == "int8":
        x, w = (torch.randint(-128, 128, (rows, k), device=device, dtype=torch.int8) for rows in (m, n))
    else:
        x, w = (torch.randn(rows, k, device=device).to(TYPES[dtype][0]) for rows in (m, n))
    return x, w


def product(dtype: str, x: Tensor, w: Tensor) -> Callable[[], Tensor]:
    """x @ w.T on the units for `dtype`: as nn.Linear has it, and the layout that every unit takes."""
    if dtype == "int8":
        return lambda: torch._int_mm(x, w.t())
    if dtype == "fp8":
        one = torch.ones((), device=x.device)  # the scale of either operand
        return lambda: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16)
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    return lambda: x @ w.t()


def relative_error(result: Tensor, x: Tensor, w: Tensor) -> float:
    """Of x @ w.T against float64, over about 16 x 16 of its entries, corner to corner."""
    rows, columns = (slice(None, None, max(1, n // 16)) for n in result.shape)
    exact = x[rows].cpu().double() @ w[columns].cpu().double().t()
    return ((result[rows, columns].cpu().double() - exact).norm() / exact.norm()).item()
