"""A matrix product on the units for each type, and how wrong it may be. benchmark.py times these."""

from collections.abc import Callable

import torch
from torch import Tensor

from old import hardware

# torch's type; the largest relative error that rounding explains
TYPES = {
    "fp32": (torch.float32, 2**-16),  # 2^-24 per addition, thousands of them
    "tf32": (torch.float32, 2**-9),  # both operands cut to 10 bits
    "bf16": (torch.bfloat16, 2**-7),  # partial sums and result rounded to 8 bits
    "fp16": (torch.float16, 2**-10),  # to 11 bits
    "fp8": (torch.float8_e4m3fn, 2**-6),  # exact products; the result is bf16
    "fp8_fast": (torch.float8_e4m3fn, 2**-5),  # added up in about 14 bits all along, not only for 128 products
    "int8": (torch.int8, 0.0),  # added up in int32: exact
}
LABELS = {"fp8": "fp8, use_fast_accum=False", "fp8_fast": "fp8, use_fast_accum=True"}
MODES = ("tf32", "fp8", "fp8_fast")  # without units torch computes these in fp32, so that nothing would be measured


def obstacle(dtype: str, device: torch.device) -> str | None:
    """Why products in `dtype` are not timed on `device`; None if they are.

    A GPU is timed in the types that it multiplies in hardware. Beside a GPU, types that are only emulated are timed,
    too: a type that works is not yet a type that is fast.
    """
    native, how = hardware.native_types(device)
    if dtype.removesuffix("_fast") not in native and (device.type == "cuda" or dtype in MODES):
        return f"no units for it ({how})"
    try:
        product(dtype, *operands(dtype, (64, 64, 64), device))()
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None


def operands(dtype: str, shape: tuple[int, int, int], device: torch.device) -> tuple[Tensor, Tensor]:
    """Random x [M, K] and w [N, K]; zeros would switch fewer transistors and run at higher clocks."""
    m, n, k = shape
    if dtype == "int8":
        x = torch.randint(-128, 128, (m, k), device=device, dtype=torch.int8)
        w = torch.randint(-128, 128, (n, k), device=device, dtype=torch.int8)
    else:
        x = torch.randn(m, k, device=device).to(TYPES[dtype][0])
        w = torch.randn(n, k, device=device).to(TYPES[dtype][0])
    return x, w


def product(dtype: str, x: Tensor, w: Tensor) -> Callable[[], Tensor]:
    """x @ w.T on the units for `dtype`: as nn.Linear has it, and the layout that every unit takes."""
    if dtype == "int8":
        return lambda: torch._int_mm(x, w.t())
    if dtype in ("fp8", "fp8_fast"):
        one = torch.ones((), device=x.device)  # the scale of either operand
        fast = dtype == "fp8_fast"
        return lambda: torch._scaled_mm(x, w.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=fast)
    # whatever the environment says (TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1 in NVIDIA's containers): fp32 means fp32
    torch.set_float32_matmul_precision("high" if dtype == "tf32" else "highest")
    return lambda: x @ w.t()


def limit_flops(name: str, dtype: str, sm_clock_max_mhz: float | None) -> float | None:
    """FLOP/s above which a measurement on device `name` is wrong; None if not known.

    GeForce cards add up fp8 products in fp32 at half rate, and so the data sheet counts them; without, they may
    reach the rate of int8.
    """
    limit = hardware.highest_flops(name, dtype.removesuffix("_fast"), sm_clock_max_mhz)
    if dtype == "fp8_fast" and limit:
        limit = max(limit, hardware.highest_flops(name, "int8", sm_clock_max_mhz) or 0.0)
    return limit


def relative_error(result: Tensor, x: Tensor, w: Tensor) -> float:
    """Of x @ w.T against float64, over about 16 x 16 of its entries, corner to corner."""
    rows, columns = (slice(None, None, max(1, n // 16)) for n in result.shape)
    exact = x[rows].cpu().double() @ w[columns].cpu().double().t()
    return ((result[rows, columns].cpu().double() - exact).norm() / exact.norm()).item()
