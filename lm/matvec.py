"""Multiply one or two rows of activations by int8 or int4 weights, in a Triton kernel.

No GPU has timed this kernel yet. 09_inference/quantized.py uses it with --kernel triton.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

try:
    import triton
    import triton.language as tl
except ModuleNotFoundError:  # torch's build for CPUs comes without Triton
    triton = None
    tl = None

MATVEC_ROWS = 2  # of activations. With more, the kernel takes longer to compute than to read.


def triton_jit(function: Callable) -> Callable:
    """Return the function as a Triton kernel, or as it is if there is no Triton."""
    if triton is None:
        return function
    return triton.jit(function)


def triton_operator(function: Callable) -> Callable:
    """Return the function, which launches a Triton kernel, as an operator of torch.

    torch.compile and the capture of a CUDA graph then see what is inside. Without Triton, return
    the function as it is.
    """
    if triton is None:
        return function
    return torch.library.triton_op(f"quantized::{function.__name__}", function, mutates_args=())


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


def triton_layer(codes: Tensor, scale: Tensor, zero: Tensor | None = None) -> TritonLinear:
    """Return a quantized matrix in the layout of matvec_kernel.

    Without `zero`, codes are int8 [out, in], and a row has a scale, bf16 [out]. With it, codes are
    int4, two to a byte, uint8 [out, in / 2], and scale and zero are bf16 [out, groups].
    """
    if zero is not None:
        codes = codes >> 4 | codes << 4  # the even columns in the low four bits
        scale_and_zero = torch.stack((scale, zero), -1)  # [out, groups, 2]
        scales = scale_and_zero.view(torch.int32).squeeze(-1)  # [out, groups]
        return TritonLinear(order_words(codes, 4), scales, 4)
    if codes.shape[1] % 16 != 0:
        codes = F.pad(codes, (0, -codes.shape[1] % 16))  # a thread reads 16 at once
    codes = codes.view(torch.uint8) ^ 128  # code + 128, because the kernel's are from 0 to 255
    return TritonLinear(order_words(codes, 8), scale, 8)


# --- one launch for several matrices


def add_bias(layer: nn.Module, bias: Tensor) -> None:
    """Add a bias to what a quantized layer returns (Qwen2 has some)."""
    layer.register_parameter("bias", nn.Parameter(bias, requires_grad=False))
    layer.register_forward_hook(lambda layer, inputs, y: y + layer.bias)


class Columns(nn.Module):
    """Take the outputs of one matrix out of those of several."""

    def __init__(self, first: int, last: int) -> None:
        super().__init__()
        self.first = first
        self.last = last

    def forward(self, y: Tensor) -> Tensor:
        return y[..., self.first : self.last]


def fuse(net: nn.Module) -> None:
    """Multiply q, k and v of a block by one launch, and gate and up by one.

    A row of weights gives the same bits, whatever rows are beside it.
    """
    for block in net.model.layers.values():
        fuse_projections(block.self_attn, ("q_proj", "k_proj", "v_proj"), "qkv_proj")
        fuse_projections(block.mlp, ("gate_proj", "up_proj"), "gate_up_proj")


def fuse_projections(module: nn.Module, names: tuple[str, ...], fused_name: str) -> None:
    """Concatenate the rows of layers that have the same input.

    A hook multiplies before the module's own forward. The layers that were there become Columns,
    which take their part of the product.
    """
    layers = [module.get_submodule(name) for name in names]
    fused = type(layers[0]).concatenate(layers)
    biases = [layer.bias for layer in layers if hasattr(layer, "bias")]
    if biases:
        add_bias(fused, torch.cat(biases))
    module.add_module(fused_name, fused)

    first = 0
    for name, layer in zip(names, layers, strict=True):
        last = first + layer.out_features
        module.set_submodule(name, Columns(first, last))
        first = last

    def multiply(module: nn.Module, inputs: tuple) -> tuple:
        x, *others = inputs
        return (fused(x), *others)

    module.register_forward_pre_hook(multiply)
