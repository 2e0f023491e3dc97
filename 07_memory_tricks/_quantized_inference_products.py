"""The products behind quantized_inference.py: one row of activations times a weight, by what each device does best.

A decode step multiplies one row by every matrix. It takes as long as the matrices take to be read.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from old import model
from old.exits import UserError

CHUNK = 2**24  # weights that are rounded, packed or checked at once: what that needs beside them stays small
AMX = torch.cpu._is_amx_tile_supported()
SUMS = 8  # that are under way at once in a compiled product: an addition takes four cycles, and two start in each


def rows_at_once(columns: int) -> int:
    """Of a matrix: about CHUNK weights, in whole blocks of the 64 rows that a CPU's int4 product reads together."""
    return max(1, CHUNK // columns // 64) * 64


def is_one_row_on_cpu(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.numel() == x.shape[-1]


def one_row(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., in] with a single row times weight [out, in], on a CPU; compiled, the weight may be codes of one byte.

    On a CPU with AMX, F.linear hands a row to a kernel made for matrices, which reads bf16 weights at two thirds of
    torch.mv's speed; on one without, at twice that speed. A compiler reads faster still, and converts on the way. One
    sum alone would wait for each of its additions (a compiled torch.mv does), so there are SUMS independent ones, each
    of a part of the rows.
    """
    if torch.compiler.is_compiling():
        return sums_of_rows(x, weight)
    if not AMX:
        return F.linear(x, weight)
    return torch.mv(weight, x.flatten()).view(*x.shape[:-1], -1)


def sums_of_rows(x: Tensor, weight: Tensor) -> Tensor:
    row = x.flatten().float()
    parts = weight.chunk(SUMS) if weight.shape[0] % SUMS == 0 else (weight,)
    sums = torch.cat([(part.float() * row).sum(-1) for part in parts])
    return sums.to(x.dtype).view(*x.shape[:-1], -1)


def attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, *, is_causal: bool, enable_gqa: bool) -> Tensor:
    """The model's attention; compiled, for one token a sequence, what a compiler fuses with its neighbours."""
    if torch.compiler.is_compiling() and q.shape[2] == 1:
        return attention_of_a_token(q, k, v, seen)
    return model.attend(q, k, v, seen, is_causal=is_causal, enable_gqa=enable_gqa)


def attention_of_a_token(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Written as two sums. On a CPU torch's kernel calls two products of matrices per head, however small they are."""
    queries = q.unflatten(1, (k.shape[1], -1)).float() * q.shape[-1] ** -0.5  # by the key-value head that they share
    scores = (queries * k[:, :, None].float()).sum(-1).masked_fill(~seen, -torch.inf)
    summed = (scores.softmax(-1)[..., None] * v[:, :, None].float()).sum(-2, keepdim=True)
    return summed.flatten(1, 2).to(q.dtype)


def pack_int4(codes: Tensor) -> Tensor:
    """Codes of 0 to 15 [out, in] -> uint8 [out, in / 2]: even columns in the high four bits, odd ones in the low."""
    return codes[:, ::2] << 4 | codes[:, 1::2]


def unpack_int4(packed: Tensor) -> Tensor:
    return torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1)


def int4_product(packed: Tensor, scale: Tensor, zero: Tensor) -> tuple[dict[str, Tensor], Callable]:
    """torch's int4 product for the device of `packed`: the tensors in the order that its kernel reads, and a function
    of a matrix of activations and these tensors.

    That order depends on the instruction set, so it is made at each load and never saved.
    """
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    group = columns // scale.shape[1]
    scale_and_zero = torch.stack((scale, zero), dim=-1).transpose(0, 1)
    if packed.is_cuda:
        if torch.cuda.get_device_capability(packed.device) < (8, 0):
            raise UserError("--weights int4: torch's kernel needs compute capability 8.0; use --weights int8")
        tiles = next(tiles for tiles in (8, 4, 2) if columns % (16 * tiles) == 0)  # the widest loads that fit
        multiple = 8
        product = torch.ops.aten._weight_int4pack_mm
    else:
        multiple = 16
        product = torch.ops.aten._weight_int4pack_mm_for_cpu

    def convert(padded: Tensor) -> Tensor:
        if padded.is_cuda:
            return torch.ops.aten._convert_weight_to_int4pack(padded, tiles)
        blocks = padded.split(rows_at_once(columns))  # it takes codes of four bytes: eight times the packed ones
        return torch.cat([torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack_int4(b).int(), 1) for b in blocks])

    missing = -rows % multiple  # rows that are all zero make up what the kernel wants
    tensors = {
        "packed": convert(F.pad(packed, (0, 0, 0, missing))),
        "scale_and_zero": F.pad(scale_and_zero, (0, 0, 0, missing)).contiguous(),
    }

    def multiply(x: Tensor, packed: Tensor, scale_and_zero: Tensor) -> Tensor:
        x = F.pad(x, (0, columns - x.shape[1]))  # to whole groups
        return product(x, packed, group, scale_and_zero)[:, :rows]

    return tensors, multiply


def fp8_product(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
    """x [rows, in] times fp8 codes [out, in], on units that multiply fp8: the activations are rounded as well, each row
    by a scale of its own."""
    if codes.shape[0] % 16 or codes.shape[1] % 16:  # not for torch's kernel: converted, as for a single row
        return F.linear(x, codes.to(x.dtype)) * scale.to(x.dtype)
    x_scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / torch.finfo(codes.dtype).max
    x_codes = (x.float() / x_scale).to(codes.dtype)
    return torch._scaled_mm(x_codes, codes.t(), scale_a=x_scale, scale_b=scale.float()[None, :], out_dtype=x.dtype)
