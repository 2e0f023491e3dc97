"""What quantized.py needs beside its ideas: flags, the plan of loading, packed codes and checks."""

import os
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import hardware, measure, report, runtime
from common.exits import UserError
from common.runtime import DTYPES
from lm import matvec, shapes
from lm.weight_files import EMBEDDING, HEAD
from lm.weights import DRAWN_ON_CPU, build, open_weights, random_weight
from planner import inference
from planner.shape import from_config

ROOM = 0.95  # of the free memory; the rest is for activations and workspaces

# Quantizing takes this many bytes for each weight of a chunk. Its largest moment is in
# Int4Linear.quantize: the chunk in fp32 (4 bytes), the same padded to whole groups (4), codes in
# fp32 (4), in 8 bits (1) and while two are packed into one byte (1). quantize_rows holds the chunk
# (4), its codes (1), the dequantized chunk (4) and its error (4). The rest is for scales and zeros
# of groups of 32 (1), and for what the allocator rounds up.
TEMPORARY_BYTES = 16
SHARE_FOR_CHUNK = 0.5  # of the memory that stays free
# Weights. On a GPU, operators on the smallest chunk are so short that launching them takes longer.
# On the largest, launches no longer count, and a larger chunk would only take memory.
SMALLEST_CHUNK = 2**22
LARGEST_CHUNK = 2**27
MATMUL_WORKSPACE = 2**26  # bytes, on a GPU

# Of a matmul with dequantized weights in fp32: relative error of all outputs, and of one output to
# the norm of its weights. Inputs are normal, so an output is up to 6 norms, which bf16 rounds by
# 2**-9: 0.012. Kernels round twice.
ALLOWED_MATMUL_ERROR = {"fp32": 1e-5, "bf16": 1e-2}
ALLOWED_OUTPUT_ERROR = {"fp32": 1e-4, "bf16": 5e-2}


def activation_dtype(args, weights: str, device: torch.device) -> str:
    """Return the type of activations and cache: fp32 or bf16.

    UserError for a --dtype that these weights cannot have.
    """
    is_other = args.weights in DTYPES and args.dtype not in ("auto", args.weights)
    if args.dtype == "fp16" or is_other:
        raise UserError(
            f"--dtype {args.dtype}, --weights {args.weights}: "
            "leave --dtype out, or use --weights int8"
        )
    if weights in DTYPES:
        return weights
    if args.dtype != "auto":
        return args.dtype
    if device.type == "cpu":
        return "bf16"  # torch's CPU kernels take bf16
    return hardware.choose_dtype("auto", device)


def check_kernel(args, device: torch.device, prompts: int, most_prompts: int) -> None:
    """Raise UserError if --kernel triton cannot be used here."""
    if args.kernel != "triton":
        return
    if prompts > most_prompts:
        raise UserError(
            f"--kernel triton multiplies at most {most_prompts} rows of activations, and a decode "
            f"step of {prompts} prompts has {prompts}: leave --kernel out"
        )
    if args.weights in DTYPES:
        raise UserError(
            f"--kernel triton, --weights {args.weights}: use --weights int8 or int4, "
            "or leave --kernel out"
        )
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if device.type != "cuda" and not interpreted:
        raise UserError(f"--kernel triton needs a GPU, and this is {device}: leave --kernel out")
    if matvec.triton is None:
        raise UserError(
            "--kernel triton: Triton is not installed: install torch's build for CUDA, "
            "or leave --kernel out"
        )
    dtype = activation_dtype(args, "int4", device)
    if dtype != "bf16":
        raise UserError(
            f"--kernel triton multiplies activations in bf16, and these are {dtype}: "
            "leave --kernel out"
        )


def planned_bytes(args, config: shapes.Config, weights: str) -> int:
    """Return what these weights take, by the planner.

    The planner leaves out two things, which are added here. A tied matrix is held twice: as the
    head quantized, and as the embedding in bf16. And zeros fill rows up to whole groups in int4,
    and for --kernel triton up to 16 columns in int8.
    """
    shape = from_config(args.model, config)
    planned = inference.weight_bytes(shape, weights=weights, group_size=args.group_size)
    if shape.tied and weights not in DTYPES:
        planned += 2 * shape.embedding
    layer = shape.attention_matrices() + shape.feed_forward_matrices(shape.ffn)
    all_matrices = [*layer * shape.layers, (shape.hidden, shape.vocab)]
    if weights == "int4":
        filled = sum(outputs * (-inputs % args.group_size) for inputs, outputs in all_matrices)
        planned += filled * (1 / 2 + 4 / args.group_size)
    if weights == "int8" and args.kernel == "triton":
        planned += sum(outputs * (-inputs % 16) for inputs, outputs in all_matrices)
    return round(planned)


def check_room(
    args, config: shapes.Config, weights: str, cache_bytes: int, device: torch.device
) -> tuple[int, float]:
    """Return the planned bytes of the weights, and the bytes that weights and cache leave free.

    UserError if weights and cache need more than is free.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the model before this one took is free again
    free = hardware.free_bytes(device)
    room = ROOM * free - cache_bytes
    planned = planned_bytes(args, config, weights)
    if planned <= room:
        return planned, room - planned
    ways = [
        f"--weights {each}"
        for each in ("int8", "int4")
        if planned_bytes(args, config, each) <= room
    ]
    ways.append("09_inference/infer_70b.py on several GPUs")
    needs = " and ".join(report.for_people("bytes", each) for each in (planned, cache_bytes))
    raise UserError(
        f"--model {args.model} --weights {weights}: {needs} of cache are needed, "
        f"{report.for_people('bytes', free)} free: use {' or '.join(ways)}"
    )


def matrices(config: shapes.Config) -> list[tuple[int, int]]:
    """Return outputs and inputs of the different matrices that are quantized."""
    hidden = config.hidden_size
    queries = config.num_attention_heads * config.head_dim
    keys = config.num_key_value_heads * config.head_dim
    return [
        (queries, hidden),
        (keys, hidden),
        (hidden, queries),
        (config.intermediate_size, hidden),
        (hidden, config.intermediate_size),
        (config.vocab_size, hidden),
    ]


def largest_matrix(config: shapes.Config, group_size: int) -> int:
    """Return the number of weights of the largest matrix, its rows filled up to whole groups."""
    return max(outputs * (inputs + -inputs % group_size) for outputs, inputs in matrices(config))


def matrix_bytes_per_weight(
    config: shapes.Config, weights: str, dtype: str, device: torch.device
) -> int:
    """Return the bytes that loading takes for a whole matrix, beside its final form and the chunk
    at hand.

    2 on a GPU: the matrix in bf16 as it was drawn, and later, in int8, its codes in bf16. Else up
    to 6: the matrix in fp32; int4 codes in 32 bits, from which torch's kernel on a CPU is made; or,
    where torch has no kernel, the matrix dequantized in fp32 and in the type of the activations.
    """
    if device.type != "cuda" or dtype != "bf16":
        return 6
    if weights == "int4" and not all(
        cuda_has_int4_kernel(outputs) for outputs, _ in matrices(config)
    ):
        return 6
    return 2


def weights_at_once(free_bytes: float, device: torch.device) -> int:
    """Return how many weights quantize_matrix takes at once.

    `free_bytes` is what the device has free, without what is planned for all weights, the cache and
    the matrix at hand. The chunk takes SHARE_FOR_CHUNK of them on a GPU. On a CPU, which launches
    nothing, it is always the smallest.
    """
    if device.type != "cuda":
        return SMALLEST_CHUNK
    affordable = int(SHARE_FOR_CHUNK * free_bytes / TEMPORARY_BYTES)
    return max(SMALLEST_CHUNK, min(affordable, LARGEST_CHUNK))


def plan_loading(
    args, config: shapes.Config, weights: str, dtype: str, device: torch.device, free_bytes: float
) -> tuple[int, int]:
    """Return how many weights are quantized at once, and the bytes that loading may take.

    Loading takes these bytes beside the loaded weights: one matrix, and one chunk of it.
    `free_bytes` is what weights and cache leave free.
    """
    largest = largest_matrix(config, args.group_size)
    beside = matrix_bytes_per_weight(config, weights, dtype, device) * largest
    chunk = weights_at_once(free_bytes - beside, device)
    if weights not in DTYPES:
        beside += TEMPORARY_BYTES * min(chunk, largest)
    if device.type == "cuda":
        beside += MATMUL_WORKSPACE
    return chunk, beside


def reader(args, config: shapes.Config, device: torch.device) -> Callable[[str], Tensor]:
    """Return a function that reads or draws a parameter, by its name.

    UserError if the folder's files do not fit the model.
    """
    net = build(args.model, config, seed=args.seed, device="meta")
    needed = {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
    stored = open_weights(args.model, config)
    generator = torch.Generator(device).manual_seed(args.seed)

    def read(name: str) -> Tensor:
        if name == HEAD and config.tie_word_embeddings:
            name = EMBEDDING
        if stored is not None:
            return stored.read(name)
        if shapes.parameter_count(config) > DRAWN_ON_CPU and len(needed[name]) > 1:
            weight = torch.empty(needed[name], dtype=torch.bfloat16, device=device)
            return weight.normal_(std=0.02, generator=generator)
        return random_weight(name, needed[name], args.seed)

    return read


def facts_of_loading(net: nn.Module, peak: int, beside: int) -> dict:
    """Return what a row of the table says of a loaded model.

    Assert that loading took at most `beside` more bytes than the weights.
    """
    held = list(net.parameters())
    held += [buffer for name, buffer in net.named_buffers() if "rope" not in name]
    weight_bytes = runtime.held_bytes(held)
    allowed = weight_bytes + beside
    assert peak <= allowed, (
        f"loading took {peak:,} bytes, {weight_bytes:,} are held, {allowed:,} were planned"
    )
    bytes_per_step = weight_bytes
    embedding = net.model.embed_tokens.weight
    if getattr(net.lm_head, "weight", None) is not embedding:
        bytes_per_step -= embedding.nbytes  # a step reads one row of it
    return {
        "weight_bytes": weight_bytes,
        "bytes_per_step": bytes_per_step,
        "loading_peak_bytes": peak,
        "allowed_loading_peak_bytes": allowed,
    }


def quantize_rows(
    exact: Tensor, x: Tensor, layer: type[nn.Module], group_size: int
) -> tuple[tuple[Tensor, ...], Tensor, Tensor]:
    """Quantize rows of a matrix, [rows, in] in fp32, and check each weight.

    Return codes, scales and zeros; and of the dequantized rows the product with x,
    [1, tokens, rows], and the norm of each, [rows].
    """
    parts = layer.quantize(exact, group_size)
    dequantized = layer.dequantize(*parts)  # [rows, in], in int4 padded to whole groups
    check_weights(layer, exact, dequantized, parts)
    dequantized = dequantized[:, : exact.shape[1]]
    return parts, F.linear(x.float(), dequantized), dequantized.norm(dim=1)


def check_weights(
    layer: type[nn.Module], exact: Tensor, dequantized: Tensor, parts: tuple[Tensor, ...]
) -> None:
    """Assert that no weight is off by more than rounding to its codes allows."""
    allowed = layer.allowed_error(*parts)  # [rows, groups]
    errors = dequantized.clone()  # [rows, in]; what fills the last group should be 0
    errors[:, : exact.shape[1]].sub_(exact)
    errors.abs_()
    largest_errors = errors.unflatten(1, (allowed.shape[1], -1)).amax(-1)  # [rows, groups]
    share = (largest_errors / allowed).max().item()
    assert share <= 1, f"{layer.__name__}: a weight is off by {share:.3f} of what rounding allows"


def check_matmul(
    layer: type[nn.Module], found: list[Tensor], expected: list[Tensor], norms: Tensor, dtype: str
) -> tuple[float, float]:
    """Return two errors of a matmul, and assert that both are within rounding.

    The first is the relative error of all outputs. The second is the largest error of one output,
    relative to the norm of its row of weights: it shows a single wrong row, which the first
    averages over all rows.
    """
    of_all = measure.relative_error(found, expected)
    assert of_all <= ALLOWED_MATMUL_ERROR[dtype], (
        f"{layer.__name__}: its matmul is off by {of_all:.1e}"
    )
    norms = norms.clamp_min(torch.finfo(torch.float32).tiny)  # a row of zeros has outputs of zero
    errors = []
    for outputs, exact_outputs in zip(found, expected, strict=True):
        errors.append(((outputs - exact_outputs).abs() / norms).max())
    of_one = torch.stack(errors).max().item()
    assert of_one <= ALLOWED_OUTPUT_ERROR[dtype], (
        f"{layer.__name__}: an output is off by {of_one:.1e} of its weights"
    )
    return of_all, of_one


def dequantize_layers(net: nn.Module, layer: type[nn.Module], group_size: int, chunk: int) -> None:
    """Give each nn.Linear of a model in fp32 the weights that `layer` stands for."""
    for module in net.modules():
        if not isinstance(module, nn.Linear):
            continue
        columns = module.weight.shape[1]
        dequantized = torch.empty_like(module.weight, requires_grad=False)
        rows_at_once = max(1, chunk // columns)
        for first in range(0, len(dequantized), rows_at_once):
            rows = slice(first, first + rows_at_once)
            parts = layer.quantize(module.weight[rows], group_size)
            dequantized[rows] = layer.dequantize(*parts)[:, :columns]
        # a new tensor, because a tied embedding stays as it is
        module.weight = nn.Parameter(dequantized, requires_grad=False)


def pack_int4(codes: Tensor) -> Tensor:
    """Pack codes of 0 to 15 [out, in] into uint8 [out, in / 2].

    Even columns are in the high four bits, odd ones in the low.
    """
    return codes[:, ::2] << 4 | codes[:, 1::2]


def unpack_int4(packed: Tensor) -> Tensor:
    """Return the codes [out, in] of uint8 [out, in / 2]."""
    return torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1)


def cuda_has_int4_kernel(rows: int) -> bool:
    """Return whether torch has an int4 matmul in bf16 on this GPU for a matrix of so many rows."""
    return rows % 8 == 0 and torch.cuda.get_device_capability() >= (8, 0)


def int4_kernel(packed: Tensor, dtype: torch.dtype) -> tuple[Callable | None, Tensor]:
    """Return torch's int4 matmul, and the codes in the order that it reads.

    Where torch has none, return None and the plain codes. The order depends on the device and on a
    CPU's instruction set, so files should have plain codes.
    """
    rows = packed.shape[0]
    columns = 2 * packed.shape[1]
    if dtype == torch.bfloat16 and packed.device.type == "cpu" and rows % 16 == 0:
        ordered = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack_int4(packed).int(), 1)
        return torch.ops.aten._weight_int4pack_mm_for_cpu, ordered
    if dtype == torch.bfloat16 and packed.is_cuda and cuda_has_int4_kernel(rows):
        tiles = next(
            tiles for tiles in (8, 4, 2) if columns % (16 * tiles) == 0
        )  # the widest loads that fit
        return torch.ops.aten._weight_int4pack_mm, torch.ops.aten._convert_weight_to_int4pack(
            packed, tiles
        )
    return None, packed
