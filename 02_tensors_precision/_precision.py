"""The number types of training: what their bits allow, and how precision.py rounds a number to fewer of them."""

import torch
from torch import Tensor

FORMATS = {  # type, exponent bits, mantissa bits
    "fp64": (torch.float64, 11, 52),
    "fp32": (torch.float32, 8, 23),
    "tf32": (None, 8, 10),  # nothing is stored in it
    "bf16": (torch.bfloat16, 8, 7),
    "fp16": (torch.float16, 5, 10),
    "fp8 e5m2": (torch.float8_e5m2, 5, 2),
    "fp8 e4m3fn": (torch.float8_e4m3fn, 4, 3),  # "fn": finite, and NaN
}


def limits(exponent_bits: int, mantissa_bits: int, infinity: bool) -> dict[str, float]:
    """What the bits allow. Without infinity the largest exponent holds numbers too, but for one pattern, NaN."""
    bias = 2 ** (exponent_bits - 1) - 1
    epsilon = 2.0**-mantissa_bits
    return {
        "max": (2 - epsilon) * 2.0**bias if infinity else (2 - 2 * epsilon) * 2.0 ** (bias + 1),
        "epsilon": epsilon,  # from 1 to the next number
        "smallest_normal": 2.0 ** (1 - bias),
        "smallest_subnormal": 2.0 ** (1 - bias) * epsilon,  # the exponent's bits are 0: no leading one
        "counts_by_1_to": 2 ** (mantissa_bits + 1),  # the next whole number is not there
    }


def add_and_cut(x: Tensor, addend: Tensor, cut: int) -> Tensor:
    """fp32 with something added to its bits before the last of them are cut: a carry rounds up. inf and NaN stay."""
    bits = (x.view(torch.int32) + addend) & -(1 << cut)
    return torch.where(x.isfinite(), bits.view(torch.float32), x)


def round_to_tf32(x: Tensor) -> Tensor:
    """To nearest, ties to even: add just under half of the last bit that stays, and one more if that bit is set."""
    return add_and_cut(x, 0xFFF + (x.view(torch.int32) >> 13 & 1), cut=13)


def round_stochastically(x: Tensor) -> Tensor:
    """To bf16: add random bits below its mantissa, so that what is cut off is the chance of rounding up."""
    return add_and_cut(x, torch.randint(0, 1 << 16, x.shape, dtype=torch.int32), cut=16).to(torch.bfloat16)


def scale_to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x in fp8, its largest value there the type's largest, and the scale to multiply it with to have x again."""
    scale = x.abs().max() / torch.finfo(dtype).max
    return (x / scale).to(dtype), scale


def multiply_fp8(x: Tensor, x_scale: Tensor, y: Tensor, y_scale: Tensor) -> Tensor:
    """On tensor cores for fp8, result in fp32; RuntimeError or ValueError where these types are not supported."""
    y = y.t().contiguous().t()  # column by column, as they read their second operand
    return torch._scaled_mm(x, y, x_scale, y_scale, out_dtype=torch.float32, use_fast_accum=False)


def check_limits(name: str, own: dict) -> None:
    """What the bits allow is what torch says."""
    dtype = FORMATS[name][0]
    info = torch.finfo(dtype)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    last_bit = torch.tensor(1, dtype=integers[dtype.itemsize]).view(dtype).item()
    found = [own[key] for key in ("max", "epsilon", "smallest_normal", "smallest_subnormal")]
    assert found == [info.max, info.eps, info.smallest_normal, last_bit], f"{name}: torch's limits are {info}"


def check_roundings() -> str:
    """tf32 against rounding in fp64; the mean of 10,000 stochastic roundings against the number itself."""
    x = torch.randn(65_536) * torch.logspace(-30, 30, 65_536)
    ties = torch.arange(1, 4096, 2) * 2.0**-11  # halfway between two neighbours, or exact
    for values in (x, 1 + ties, -1 - ties):
        step = torch.ldexp(torch.ones(len(values), dtype=torch.float64), torch.frexp(values.double()).exponent - 11)
        nearest_even = torch.round(values.double() / step) * step
        assert torch.equal(round_to_tf32(values).double(), nearest_even), "tf32 does not round to nearest, ties to even"
    values = 1 + torch.arange(128) / 2**14  # from 1 up to the next bf16, 1 + 2^-7
    mean = round_stochastically(values.repeat(10_000, 1)).double().mean(0)
    bias = (mean - values).abs().max().item() * 2**7
    assert bias < 5 * 0.5 / 100, f"stochastic rounding is biased by {bias:.1%} of a step"  # five standard errors
    return f"stochastic rounding is unbiased: {bias:.1%} of a step over 10,000 roundings, 2.5% allowed"
