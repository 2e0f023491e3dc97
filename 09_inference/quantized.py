"""Quantized inference: 70B on one GPU, with weights of 8 or 4 bits, dequantized as they are read.

A decode step multiplies one row of activations by every weight. It takes as long as the weights
take to be read. At one or half a byte per weight the 141 GB of a 70B model become 72 or 46, and a
step takes a half or a quarter of the time at best. Only weights are quantized: in int8 a row shares
a scale, in int4 a group of 32 to 256 weights shares a scale and a zero. Activations and cache stay
in bf16.

A matmul is torch's weight-only kernel where there is one, else dequantize and F.linear. On a GPU
--kernel triton uses `matvec_kernel` below instead. Each matrix is read, quantized in chunks and
checked before the next, so the whole model is never in memory in bf16.

    laptop    python 09_inference/quantized.py
    answers   python 09_inference/quantized.py --model models/smollm2-135m --chat --weights int8 \\
                  --compile --prompt "What is the capital of France?"   (the folder: make model)
    one GPU   python 09_inference/quantized.py --model llama-70b --weights int4 --compile
    cluster   one GPU is all it uses: infer_70b.py divides a model over several

Look for: the bytes held and the error of the logits, which move in opposite directions; the share
of the memory bandwidth. With --dtype fp32, int8 and int4 run without torch's kernels. Previous:
parity.py. Next: speculative.py.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # so that `import common` works
from common import exits  # before torch: it says what to do without it

# isort: split

import _quantized
import torch
import torch.nn.functional as F
from _prompts import Text, check_tokens, parser, say_if_random
from _quantized import tl, triton_jit, triton_operator
from torch import Tensor, nn

from common import lesson, measure, report
from common.runtime import DTYPES
from lm import shapes
from lm.generate import StaticCache, compiled, generate, sample, speed, steps_of

MATVEC_ROWS = 2  # of activations. With more, the kernel takes longer to compute than to read.

# A few fp32 operations, each off by at most 6e-8, relative to the largest weight of a group.
FP32_ROUNDING = 1e-6
# Of the logits. Where bf16 weights cost more than this, the checks below say nothing about fewer
# bits.
ALLOWED_BF16_ERROR = 0.2
# Quantized layers against their dequantized weights: as many times what bf16 costs the logits. With
# equal activations this would be about 1; kernels round a little more than F.linear.
ALLOWED_ARITHMETIC_FACTOR = 3


class Int8Linear(nn.Module):
    """Hold weight = codes * scale, with codes from -127 to 127 and a scale per row.

    No weight is off by more than scale / 2.
    """

    def __init__(self, codes: Tensor, scale: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.register_buffer("codes", codes)  # int8 [out, in]
        self.register_buffer("scale", scale)  # bf16 [out]
        # on a CPU the kernel reads beyond rows that are no multiple of 16; on a GPU it is slower
        # than what follows
        on_cpu = codes.device.type == "cpu"
        self.has_kernel = on_cpu and dtype == torch.bfloat16 and codes.shape[1] % 16 == 0

    @staticmethod
    def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor]:
        scale = (weight.abs().amax(1) / 127).bfloat16()
        scale = torch.where(scale > 0, scale, 1)  # a row of zeros: 0 / 1, not 0 / 0
        codes = weight / scale.float()[:, None]  # [out, in], fp32
        codes.round_().clamp_(-127, 127)  # in place: see TEMPORARY_BYTES
        return codes.to(torch.int8), scale

    @staticmethod
    def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
        return codes * scale.float()[:, None]

    @staticmethod
    def allowed_error(codes: Tensor, scale: Tensor) -> Tensor:
        """Return the largest error that rounding a weight of each row may make, [out, 1].

        Half a step, and what the fp32 arithmetic rounds.
        """
        step = scale.float()[:, None]
        return step / 2 + 127 * step * FP32_ROUNDING

    @staticmethod
    def for_triton(codes: Tensor, scale: Tensor) -> TritonLinear:
        """Return the same matrix in the layout of matvec_kernel, whose codes are from 0 to 255."""
        if codes.shape[1] % 16 != 0:
            codes = F.pad(codes, (0, -codes.shape[1] % 16))  # a thread reads 16 at once
        codes = codes.view(torch.uint8) ^ 128  # code + 128
        return TritonLinear(order_words(codes, 8), scale, 8)

    def forward(self, x: Tensor) -> Tensor:
        scale = self.scale.to(x.dtype)
        if self.has_kernel:
            y = torch.ops.aten._weight_int8pack_mm(x.flatten(0, -2), self.codes, scale)
            return y.unflatten(0, x.shape[:-1])
        # The scale of a row is the same for all its weights, so it can wait until after the sum.
        # Without a compiler the codes are written to memory once more in x's type; with one they
        # are converted as they are read.
        return F.linear(x, self.codes.to(x.dtype)) * scale


class Int4Linear(nn.Module):
    """Hold weight = (code - 8) * scale + zero, with codes from 0 to 15, two to a byte.

    A scale for a row is too coarse for sixteen values. So each group of a row has its own scale,
    and a zero that puts the values between its ends.
    """

    def __init__(self, codes: Tensor, scale: Tensor, zero: Tensor, dtype: torch.dtype) -> None:
        super().__init__()
        self.group_size = 2 * codes.shape[1] // scale.shape[1]
        self.kernel, codes = _quantized.int4_kernel(codes, dtype)
        self.register_buffer("codes", codes)  # uint8 [out, in / 2], or as the kernel reads them
        scale_and_zero = torch.stack((scale, zero), -1)  # [out, groups, 2]
        self.register_buffer("scale_and_zero", scale_and_zero.transpose(0, 1).contiguous())

    @staticmethod
    def quantize(weight: Tensor, group_size: int) -> tuple[Tensor, Tensor, Tensor]:
        if weight.shape[1] % group_size != 0:
            weight = F.pad(weight, (0, -weight.shape[1] % group_size))
        groups = weight.unflatten(1, (-1, group_size))  # [out, groups, group_size]
        low, high = groups.aminmax(dim=2)
        scale = ((high - low) / 15).bfloat16()
        scale = torch.where(scale > 0, scale, 1)  # all weights of a group are equal
        zero = (low + 8 * scale.float()).bfloat16()
        codes = groups - zero.float()[..., None]
        codes.div_(scale.float()[..., None])  # in place: see TEMPORARY_BYTES
        codes.round_().add_(8).clamp_(0, 15)
        codes = codes.to(torch.uint8).flatten(1)  # [out, in]
        return _quantized.pack_int4(codes), scale, zero

    @staticmethod
    def dequantize(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        weight = _quantized.unpack_int4(codes).float()  # [out, in]
        groups = weight.unflatten(1, (scale.shape[1], -1))  # a view: the next line writes to weight
        groups.sub_(8).mul_(scale.float()[..., None]).add_(zero.float()[..., None])
        return weight

    @staticmethod
    def allowed_error(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
        """Return the largest error that rounding a weight of each group may make, [out, groups].

        Half a step, what rounding scale and zero to bf16 moves the ends of the group, and what the
        fp32 arithmetic rounds.
        """
        step = scale.float()
        largest = 15 * step + zero.float().abs()
        return step / 2 + largest * (2**-8 + FP32_ROUNDING)

    @staticmethod
    def for_triton(codes: Tensor, scale: Tensor, zero: Tensor) -> TritonLinear:
        """Return the same matrix in the layout of matvec_kernel."""
        codes = codes >> 4 | codes << 4  # the even columns in the low four bits
        scale_and_zero = torch.stack((scale, zero), -1)  # [out, groups, 2]
        scales = scale_and_zero.view(torch.int32).squeeze(-1)  # [out, groups]
        return TritonLinear(order_words(codes, 4), scales, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.pad(x, (0, len(self.scale_and_zero) * self.group_size - x.shape[-1]))
        if self.kernel is not None:
            y = self.kernel(x.flatten(0, -2), self.codes, self.group_size, self.scale_and_zero)
            return y.unflatten(0, x.shape[:-1])
        scale, zero = self.scale_and_zero.transpose(0, 1).unbind(-1)
        return F.linear(x, self.dequantize(self.codes, scale, zero).to(x.dtype))


# --- the kernel of --kernel triton


@triton_jit
def times_code(words, first_bit: tl.constexpr, BITS: tl.constexpr, x):
    """Multiply x / 2**59 by the code that starts at `first_bit` of each word.

    To convert an integer to fp32 costs a slow instruction. It is not needed: the bits of an integer
    below 2**24, read as fp32, are the number integer * 2**-149, a subnormal number for integers
    below 2**23. So a code costs one mask, which leaves code * 2**first_bit, and one multiplication
    by x * 2**(90 - first_bit). The rest of the power, 2**59, follows once for the whole sum. x has
    to stay below 2**38.
    """
    # The codes of the top byte would reach beyond 2**24: they are shifted down first.
    shift: tl.constexpr = 8 if first_bit + BITS > 24 else 0
    low: tl.constexpr = first_bit - shift
    mask: tl.constexpr = ((1 << BITS) - 1) << low
    code = (words >> shift & mask).to(tl.float32, bitcast=True)
    return code * (x * (2.0**90 / (1 << low)))


@triton_jit
def first_of_two(pairs):
    """Return the bf16 in the low 16 bits, as fp32: a bf16 is the upper half of an fp32."""
    return (pairs << 16).to(tl.float32, bitcast=True)


@triton_jit
def second_of_two(pairs):
    """Return the bf16 in the high 16 bits, as fp32."""
    return (pairs & -65536).to(tl.float32, bitcast=True)


@triton_jit
def matvec_kernel(
    x,  # bf16 [M, K]
    words,  # int32 [N, K * BITS / 32]: codes from 0, in the order of `order_words`
    scales,  # int4: int32 [N, K / GROUP], two bf16, scale and zero; int8: bf16 [N]
    y,  # bf16 [M, N]
    N,
    M: tl.constexpr,  # rows of activations, 1 or 2: another M is another kernel
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,  # rows of weights of a program
    THREADS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Multiply M rows of activations by ROWS rows of weights, reading each code once.

    A thread reads 128 bits of a row at a time, the widest load that there is: 32 columns in int4,
    16 in int8. That is at most one group. So the thread multiplies by its scale once for 32 codes,
    and needs no other thread for it:

        sum of ((code - 8) * scale + zero) * x = scale * sum(code * x) + (zero - 8 * scale) * sum(x)
    """
    COLUMNS: tl.constexpr = 128 // BITS
    row = tl.arange(0, ROWS)[:, None, None]
    block = tl.arange(0, THREADS)[None, :, None]  # of 128 bits
    word = tl.arange(0, 4)[None, None, :]
    x = x.to(tl.pointer_type(tl.int32))  # two bf16 at once
    first_row = tl.program_id(0).to(tl.int64) * ROWS

    # The hints choose the layout: the lanes of a warp lie along the blocks, and a thread has all
    # rows and words of its block, in every tensor alike. Without them some versions of Triton move
    # each tensor through shared memory.
    words += first_row * (K * BITS // 32)
    word_offsets = row * (K * BITS // 32) + block * 4 + word
    word_offsets = tl.max_contiguous(word_offsets, [1, 2, 4])
    if BITS == 4:
        group_scales = scales + first_row * (K // GROUP)
        scale_offsets = row * (K // GROUP) + block // (GROUP // COLUMNS)
        scale_offsets = tl.max_contiguous(scale_offsets, [1, 2, 1])
        scale_offsets = tl.multiple_of(scale_offsets, [1, 1, 1])

    totals = ()
    for _ in tl.static_range(M):
        totals += (tl.zeros([ROWS, THREADS, 1], tl.float32),)
    for first_block in tl.range(0, K // COLUMNS, THREADS, num_stages=STAGES):
        is_whole: tl.constexpr = K // COLUMNS % THREADS == 0
        inside = None if is_whole else block < K // COLUMNS - first_block
        other = None if is_whole else 0
        codes = tl.load(
            words + first_block * 4 + word_offsets, inside, other, eviction_policy="evict_first"
        )  # [ROWS, THREADS, 4]
        if BITS == 4:
            first_group = first_block // (GROUP // COLUMNS)
            pairs = tl.load(group_scales + first_group + scale_offsets, inside, other)
            scale = first_of_two(pairs)  # [ROWS, THREADS, 1]
            zero = second_of_two(pairs) - 8 * scale
        else:  # code - 128; the scale of the row can wait
            scale = 1.0
            zero = -128.0

        new_totals = ()
        for m in tl.static_range(M):
            dot = tl.zeros([ROWS, THREADS, 4], tl.float32)
            sum_x = tl.zeros([1, THREADS, 4], tl.float32)
            for eighth in tl.static_range(COLUMNS // 8):  # eight columns, two for each word
                x_offsets = block * (COLUMNS // 2) + eighth * 4 + word
                first_x = m * (K // 2) + first_block * (COLUMNS // 2)
                two = tl.load(x + first_x + x_offsets, inside, other)
                dot += times_code(codes, 2 * eighth * BITS, BITS, first_of_two(two))
                dot += times_code(codes, (2 * eighth + 1) * BITS, BITS, second_of_two(two))
                sum_x += first_of_two(two)
                sum_x += second_of_two(two)
            dot = tl.sum(dot, 2, keep_dims=True)
            sum_x = tl.sum(sum_x, 2, keep_dims=True)
            new_totals += (totals[m] + dot * (scale * 2.0**59) + sum_x * zero,)
        totals = new_totals

    rows = first_row + tl.arange(0, ROWS)
    for m in tl.static_range(M):
        total = tl.sum(tl.sum(totals[m], 2), 1)  # [ROWS]
        if BITS == 8:
            total *= tl.load(scales + rows).to(tl.float32)
        tl.store(y + m * N + rows, total.to(y.dtype.element_ty))


@triton_jit
def dequantize_kernel(
    words,  # as matvec_kernel reads them
    scales,
    weight,  # bf16 [N, K]
    word_count,
    K: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the codes of BLOCK words as bf16: for the matmul of a prompt, which has many rows."""
    COLUMNS: tl.constexpr = 128 // BITS
    WORDS: tl.constexpr = K * BITS // 32  # of a row
    word = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = word < word_count
    codes = tl.load(words + word, inside, 0)
    row = word // WORDS
    first_column = word % WORDS // 4 * COLUMNS + word % 4 * 2
    if BITS == 4:
        pairs = tl.load(scales + row * (K // GROUP) + first_column // GROUP, inside, 0)
        scale = first_of_two(pairs)
        zero = second_of_two(pairs)
    else:
        scale = tl.load(scales + row, inside, 0).to(tl.float32)
        zero = 0.0
    for i in tl.static_range(32 // BITS):
        code = ((codes >> i * BITS) & ((1 << BITS) - 1)).to(tl.float32)
        value = (code - (1 << (BITS - 1))) * scale + zero
        column = first_column + i // 2 * 8 + i % 2
        tl.store(weight + row * K + column, value.to(weight.dtype.element_ty), inside)


def order_words(codes: Tensor, bits: int) -> Tensor:
    """Reorder codes as matvec_kernel reads them, 128 bits at a time.

    uint8 [N, K * bits / 8], in int4 with even columns in the low four bits, becomes int32
    [N, K * bits / 32]. Of eight columns, whose activations are 16 bytes, each of four words gets
    two. So a thread reads activations by 16 bytes as well.
    """
    bytes_of_two = bits // 4
    eighths = codes.unflatten(1, (-1, 4 // bytes_of_two, 4, bytes_of_two))
    return eighths.transpose(2, 3).contiguous().flatten(1).view(torch.int32)


@triton_operator
def matvec(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bits: int,
    rows: int = 8,
    warps: int = 4,
    stages: int = 1,
) -> Tensor:
    """Return x [M, K] times the transposed matrix, [M, N], by one launch of matvec_kernel.

    As an operator it is seen by torch.compile. Each sum has a fixed order.
    """
    M, K = x.shape
    N = words.shape[0]
    group = K
    if bits == 4:
        group = K // scales.shape[1]
    while N % rows != 0:
        rows //= 2
    y = x.new_empty(M, N)
    launch = torch.library.wrap_triton(matvec_kernel)[(N // rows,)]
    threads = 32 * warps
    launch(x, words, scales, y, N, M, K, bits, group, rows, threads, stages, num_warps=warps)
    return y


@triton_operator
def dequantize_words(words: Tensor, scales: Tensor, bits: int) -> Tensor:
    """Return the matrix [N, K] in bf16."""
    N = words.shape[0]
    K = words.shape[1] * 32 // bits
    group = K
    if bits == 4:
        group = K // scales.shape[1]
    weight = words.new_empty(N, K, dtype=torch.bfloat16)
    block = 1024
    launch = torch.library.wrap_triton(dequantize_kernel)[(-(-words.numel() // block),)]
    launch(words, scales, weight, words.numel(), K, bits, group, block)
    return weight


class TritonLinear(nn.Module):
    """Hold an int8 or int4 matrix for matvec_kernel, which multiplies one or two rows.

    More rows, as in a prompt, multiply the dequantized matrix: arithmetic takes most of their time.
    """

    def __init__(self, words: Tensor, scales: Tensor, bits: int) -> None:
        super().__init__()
        self.bits = bits
        self.register_buffer("words", words)  # int32 [out, in * bits / 32], by order_words
        self.register_buffer("scales", scales)  # int8: bf16 [out]; int4: int32 [out, groups]

    @property
    def out_features(self) -> int:
        return len(self.words)

    @classmethod
    def concatenate(cls, layers: list[TritonLinear]) -> TritonLinear:
        """Return one layer with the rows of several, for which a single launch is enough."""
        words = torch.cat([layer.words for layer in layers])
        scales = torch.cat([layer.scales for layer in layers])
        return cls(words, scales, layers[0].bits)

    def forward(self, x: Tensor) -> Tensor:
        columns = self.words.shape[1] * 32 // self.bits
        if x.shape[-1] < columns:
            x = F.pad(x, (0, columns - x.shape[-1]))
        rows = x.flatten(0, -2)
        if len(rows) > MATVEC_ROWS:
            return F.linear(x, dequantize_words(self.words, self.scales, self.bits))
        y = matvec(rows.contiguous(), self.words, self.scales, self.bits)
        return y.unflatten(0, x.shape[:-1])


# None: nn.Linear in that type
LAYERS = {"fp32": None, "bf16": None, "int8": Int8Linear, "int4": Int4Linear}


def run(
    weights: str, text: Text, args: argparse.Namespace, device: torch.device
) -> tuple[dict, Tensor]:
    """Load with these weights, generate and measure.

    Return a row of the table, and the logits of the prompts.
    """
    dtype = _quantized.activation_dtype(args, weights, device)
    shape = {"batch": len(text.prompts), "length": text.length, "dtype": DTYPES[dtype]}
    cache_bytes = sum(
        tensor.nbytes for tensor in StaticCache(text.config, **shape, device="meta").tensors
    )
    planned, free_bytes = _quantized.check_room(args, text.config, weights, cache_bytes, device)
    net, facts = _quantized.load(
        args, text.config, weights, LAYERS[weights], dtype, device, free_bytes
    )
    cache = StaticCache(text.config, **shape, device=device)
    prefill, decode = steps_of(net, cache)
    if args.compile:
        (decode,) = compiled(net, cache, decode)

    def answer(new_tokens: int):
        generator = torch.Generator(device).manual_seed(args.seed)
        how = {"max_new_tokens": new_tokens, "device": device, "stop": text.stop}
        how["model"] = f"--model {args.model}"
        return generate(
            prefill,
            decode,
            text.prompts,
            choose=lambda logits: sample(logits, args, generator),
            **how,
        )

    answer(args.max_new_tokens if args.compile else min(4, args.max_new_tokens))
    result = answer(args.max_new_tokens)
    row = {
        "weights": weights,
        "dtype": dtype,
        "planned_weight_bytes": planned,
        "cache_bytes": cache_bytes,
        **facts,
        "token_ids": result.token_ids,
        "texts": [text.decode(ids) for ids in result.token_ids],
        **speed(
            result,
            device,
            weight_bytes=facts["bytes_per_step"],
            bytes_per_slot=cache_bytes / (len(text.prompts) * text.length),
        ),
    }
    return row, logits_of(net, text, device)


@torch.inference_mode()
def logits_of(net: nn.Module, text: Text, device: torch.device) -> Tensor:
    """Return the logits of all prompt tokens, [tokens, vocab], on the CPU in fp32."""
    all_logits = []
    for ids in text.prompts:
        logits = net(torch.tensor([ids], device=device))[0]  # [tokens, vocab]
        all_logits.append(logits.float().cpu())
    return torch.cat(all_logits)


def error_of_arithmetic(
    weights: str, logits: Tensor, text: Text, args, device: torch.device
) -> float:
    """Return how far the logits are from those of the dequantized weights in nn.Linear and fp32.

    The weights' own rounding is in both, so only arithmetic is left. What that rounding costs
    depends on the model.
    """
    _, free_bytes = _quantized.check_room(args, text.config, "fp32", 0, device)
    net = _quantized.dequantized_model(args, text.config, LAYERS[weights], device, free_bytes)
    return measure.relative_error(logits, logits_of(net, text, device))


def check(rows: list[dict]) -> list[str]:
    """Check what has not been checked while loading, and return lines that say what was checked."""
    checked = []
    for row in rows:
        weights = row["weights"]
        held = row["weight_bytes"]
        planned = row["planned_weight_bytes"]
        # else the planner counts embedding and norms in 16 bits
        if row["dtype"] == "bf16" or weights == "fp32":
            assert held == planned, f"{weights}: {held:,} bytes are held, planned were {planned:,}"
        if LAYERS[weights] is not None:
            error = f"{row['largest_matmul_error']:.0e}"
            output_error = f"{row['largest_output_error']:.0e}"
            checked.append(
                f"{weights}: no weight is off by more than rounding allows, "
                f"no matmul by more than {error}, no output by more than {output_error}"
            )
            spare = report.for_people("bytes", row["allowed_loading_peak_bytes"] - held)
            checked.append(
                f"{weights}: loading took less than {spare} beside the weights, as planned"
            )
    if len(rows) > 1:
        checked += check_logits(rows)
    return checked


def check_logits(rows: list[dict]) -> list[str]:
    """Hold the logits of quantized layers against those of the dequantized weights in fp32.

    In fp32 they are equal but for the order of sums. In bf16 the rounding of activations is left.
    What that costs this model, bf16 weights have shown: their logits are the measure.
    """
    checked = []
    by_weights = {row["weights"]: row for row in rows}
    bf16_error = by_weights["bf16"]["logits_relative_error"]
    assert bf16_error <= ALLOWED_BF16_ERROR, f"bf16: logits are off by {bf16_error:.2%}"
    for weights in ("int8", "int4"):
        row = by_weights[weights]
        error = row["arithmetic_logits_relative_error"]
        allowed = 1e-3 if row["dtype"] == "fp32" else ALLOWED_ARITHMETIC_FACTOR * bf16_error
        row["allowed_arithmetic_logits_relative_error"] = allowed
        line = f"{weights}: logits are those of the dequantized weights in fp32 within {error:.2g}"
        line += f", allowed {allowed:.2g}"
        assert error <= allowed, line
        checked.append(line)
    return checked


def main() -> int:
    flags = parser(__doc__)
    flags.add_argument(
        "--weights",
        choices=("all", *LAYERS),
        default="all",
        help="default: all, one after the other",
    )
    flags.add_argument(
        "--group-size", type=int, choices=(32, 64, 128, 256), default=32, help="in int4"
    )
    flags.add_argument(
        "--kernel",
        choices=("torch", "triton"),
        default="torch",
        help="of int8 and int4 on a GPU: torch's, or matvec_kernel in this file (default: torch)",
    )
    flags.add_argument(
        "--compile", action="store_true", help="compile the decode step; on a GPU one CUDA graph"
    )
    args = flags.parse_args()
    config = shapes.read_config(args.model)
    text = Text(args, config)
    device = lesson.start(args.device, args.seed)
    _quantized.check_kernel(args, device, len(text.texts), MATVEC_ROWS)
    say_if_random(args.model)

    kinds = [*LAYERS] if args.weights == "all" else [args.weights]
    rows = []
    checked = []
    for weights in kinds:
        row, logits = run(weights, text, args, device)
        torch._dynamo.reset()  # a compiled step holds the model that it was compiled for
        for prompt, answer in zip(text.texts, row["texts"], strict=True):
            print(f"{weights}: {prompt!r} goes on: {answer!r}")
        if weights == "fp32":
            in_fp32 = argparse.Namespace(**vars(args) | {"dtype": "fp32"})
            checked += check_tokens(row["token_ids"], text, in_fp32, device)
            baseline_logits = logits
            baseline_token_ids = row["token_ids"]
        if args.weights == "all":
            row["logits_relative_error"] = measure.relative_error(logits, baseline_logits)
            if LAYERS[weights] is not None:
                error = error_of_arithmetic(weights, logits, text, args, device)
                row["arithmetic_logits_relative_error"] = error
            row["equal_tokens"] = 0
            for ids, baseline_ids in zip(row["token_ids"], baseline_token_ids, strict=True):
                row["equal_tokens"] += sum(a == b for a, b in zip(ids, baseline_ids, strict=False))
        rows.append(row)
    columns = {
        "weights": "weights",
        "weight_bytes": "held",
        "loading_peak_bytes": "while loading",
        "time_to_first_token_seconds": "first token",
        "decode_tokens_per_second": "decode",
        "bandwidth_share": "of memory bandwidth",
        "copy_rate_share": "of copy rate",
    }
    if len(rows) > 1:
        columns["logits_relative_error"] = "error of logits"
        columns["equal_tokens"] = f"tokens as in fp32, of {sum(map(len, rows[0]['token_ids']))}"
    checked += check(rows)
    own = rows[0] if len(rows) == 1 else {"dtype": None}  # each row has its own
    own["parameters"] = shapes.parameter_count(config)
    lesson.end(rows, columns=columns, checked=checked, args=args, device=device, **own)
    return 0


if __name__ == "__main__":
    exits.run(main)
