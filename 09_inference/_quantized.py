"""For quantized.py: whether the weights fit, and loading matrix by matrix: read or draw, quantize, check, forget."""

from collections.abc import Callable
from pathlib import Path

import psutil
import torch
import torch.nn.functional as F
from _shared import DTYPES
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from common import hardware, measure, report
from common.exits import UserError
from lm import model, shapes
from lm.weights import build, load_weights, random_weight
from planner import inference
from planner.shape import from_config

ROOM = 0.95  # of the free memory; the rest is for activations and workspaces
DRAWN_ON_CPU = 2e9  # parameters; a CPU takes a quarter of an hour to draw those of llama-70b
CHUNK = 2**22  # weights that are quantized at once: what that takes beside them stays small


def activation_dtype(args, weights: str, device: torch.device) -> str:
    """Of activations and cache: fp32 or bf16. UserError for a --dtype that these weights cannot have."""
    if args.dtype == "fp16" or (
        args.weights in DTYPES and args.dtype not in ("auto", args.weights)
    ):
        raise UserError(
            f"--dtype {args.dtype}, --weights {args.weights}: leave --dtype out, or use --weights int8"
        )
    if weights in DTYPES:
        return weights
    if args.dtype != "auto":
        return args.dtype
    # torch's CPU kernels take bf16
    return "bf16" if device.type == "cpu" else hardware.choose_dtype("auto", device)


def planned_bytes(args, config: shapes.Config, weights: str) -> int:
    """What these weights take, by the planner. It leaves out two things: a tied matrix is held twice, as the head
    quantized and as the embedding in bf16, and in int4 zeros fill the last group of a row."""
    shape = from_config(args.model, config)
    planned = inference.weight_bytes(shape, weights=weights, group_size=args.group_size)
    if shape.tied and weights not in DTYPES:
        planned += 2 * shape.embedding
    if weights == "int4":
        matrices = (
            shape.attention_matrices() + shape.feed_forward_matrices(shape.ffn)
        ) * shape.layers
        filled = [
            outputs * (-inputs % args.group_size)
            for inputs, outputs in [*matrices, (shape.hidden, shape.vocab)]
        ]
        planned += sum(filled) * (1 / 2 + 4 / args.group_size)
    return round(planned)


def check_room(
    args, config: shapes.Config, weights: str, cache_bytes: int, device: torch.device
) -> int:
    """The planned bytes of the weights. UserError if they and the cache are more than is free."""
    free = psutil.virtual_memory().available
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what the model before this one took is free again
        free = torch.cuda.mem_get_info(device)[0]
    room = ROOM * free - cache_bytes
    planned = planned_bytes(args, config, weights)
    if planned <= room:
        return planned
    ways = [
        f"--weights {each}"
        for each in ("int8", "int4")
        if planned_bytes(args, config, each) <= room
    ]
    needs = " and ".join(report.for_people("bytes", each) for each in (planned, cache_bytes))
    raise UserError(
        f"--model {args.model} --weights {weights}: {needs} of cache are needed, {report.for_people('bytes', free)} "
        f"free: use {' or '.join([*ways, '09_inference/infer_70b.py on several GPUs'])}"
    )


def reader(args, config: shapes.Config, device: torch.device) -> Callable[[str], Tensor]:
    """A function that reads or draws a parameter, by its name. UserError if the folder's files do not fit the model."""
    net = build(args.model, config, seed=args.seed, device="meta")
    needed = {name: tuple(parameter.shape) for name, parameter in net.named_parameters()}
    folder = Path(args.model)
    stored = {}  # file by name
    for path in () if args.model in shapes.SIZES else sorted(folder.glob("*.safetensors")):
        try:
            file = safe_open(path, "pt")
        except SafetensorError as error:
            raise UserError(
                f"--model {folder}: {path.name} is truncated or damaged, download it again"
            ) from error
        stored |= {name: file for name in file.keys() if not name.endswith("rotary_emb.inv_freq")}  # noqa: SIM118
    found = {name: tuple(file.get_slice(name).get_shape()) for name, file in stored.items()}
    if config.tie_word_embeddings:
        found.pop("lm_head.weight", None)
    for name, _ in sorted(found.items() ^ needed.items()) if stored else ():
        there = f"{found.get(name, 'missing')} in its files and {needed.get(name, 'missing')} in the model"
        raise UserError(f"--model {folder}: {name} is {there}")
    if not stored and args.model not in shapes.SIZES:
        load_weights(net, folder)  # a UserError for weights in another format
    generator = torch.Generator(device).manual_seed(args.seed)

    def read(name: str) -> Tensor:
        if name == "lm_head.weight" and config.tie_word_embeddings:
            name = "model.embed_tokens.weight"
        if stored:
            return stored[name].get_tensor(name)
        if shapes.parameter_count(config) > DRAWN_ON_CPU and len(needed[name]) > 1:
            return torch.empty(needed[name], dtype=torch.bfloat16, device=device).normal_(
                std=0.02, generator=generator
            )
        return random_weight(name, needed[name], args.seed)

    return read


def load(
    args, config: shapes.Config, layer, dtype: str, device: torch.device
) -> tuple[model.Transformer, dict]:
    """The model with its matrices in `layer`, or in `dtype` if that is None; and what a row says of it. Asserts that
    loading takes no more beside the result than some copies of one matrix: never the whole model unquantized."""
    read = reader(args, config, device)
    net = build(args.model, config, seed=args.seed, device="meta").eval()
    weight_errors, matmul_errors = [], []
    with torch.no_grad(), measure.LiveBytes(device=device) as live:
        before = live.now
        for name, module in list(net.named_modules()):
            if getattr(module, "weight", None) is None:
                continue
            weight = read(f"{name}.weight")
            if isinstance(module, nn.Linear) and layer is not None:
                quantized, weight_error, matmul_error = quantize_matrix(
                    weight, layer, args.group_size, dtype, device
                )
                net.set_submodule(name, quantized)
                weight_errors.append(weight_error)
                matmul_errors.append(matmul_error)
            else:  # embedding and norms are never quantized
                module.weight = nn.Parameter(weight.to(device, DTYPES[dtype]), requires_grad=False)
            if getattr(module, "bias", None) is not None:  # Qwen2's
                bias = nn.Parameter(
                    read(f"{name}.bias").to(device, DTYPES[dtype]), requires_grad=False
                )
                net.get_submodule(name).register_parameter("bias", bias)
                if layer is not None:
                    quantized.register_forward_hook(lambda layer, inputs, y: y + layer.bias)
            del weight  # or it would still be there while the next is read
        if layer is None:
            net.tie_weights()
    net.model._fill_rope_tables()
    held = [
        *net.parameters(),
        *(buffer for name, buffer in net.named_buffers() if "rope" not in name),
    ]
    weight_bytes = sum({tensor.data_ptr(): tensor.nbytes for tensor in held}.values())
    peak = live.peak - before
    # bytes of a matrix in fp32
    largest = 4 * max(config.intermediate_size, config.vocab_size) * config.hidden_size
    spare = 10 * largest + 2**26 * (device.type == "cuda")  # which is a workspace of matmuls
    assert peak - weight_bytes <= spare, f"loading took {peak:,} bytes, {weight_bytes:,} are held"
    # Each matrix is off by a share of itself, and bf16 rounds what goes in and out. Independent errors add as squares;
    # attention makes some larger, so twice that is allowed.
    of_activations = (
        (7 * config.num_hidden_layers + 1) * (2 * 2**-9) ** 2 if dtype == "bf16" else 0.0
    )
    looked_up = net.model.embed_tokens.weight  # by a step one row, unless it is the head as well
    return net, {
        "weight_bytes": weight_bytes,
        "bytes_per_step": weight_bytes
        - (0 if getattr(net.lm_head, "weight", None) is looked_up else looked_up.nbytes),
        "loading_peak_bytes": peak,
        "largest_matmul_error": max(matmul_errors, default=0.0),
        "allowed_logits_relative_error": 2
        * (sum(error**2 for error in weight_errors) + of_activations) ** 0.5,
    }


def quantize_matrix(
    weight: Tensor, layer: type[nn.Module], group_size: int, dtype: str, device: torch.device
) -> tuple:
    """(layer, relative error of the weights, of a matmul) for a matrix, quantized some rows at a time. Asserts that no
    weight is off by more than rounding allows, and that the layer multiplies as the dequantized matrix does."""
    x = torch.randn(5, weight.shape[1], device=device).to(DTYPES[dtype])
    all_parts, expected, weight_error = [], [], 0.0
    for rows in weight.split(max(1, CHUNK // weight.shape[1])):
        exact = rows.to(device, torch.float32)
        parts = layer.quantize(exact, group_size)
        dequantized = layer.dequantize(*parts)[:, : exact.shape[1]]
        # fp32 rounds as well
        allowed = layer.allowed_error(*parts)[:, : exact.shape[1]] + 1e-6 * exact.abs() + 1e-30
        share = ((dequantized - exact).abs() / allowed).max()
        assert share <= 1, (
            f"{layer.__name__}: a weight is off by {share:.3f} of what rounding allows"
        )
        all_parts.append(parts)
        expected.append(F.linear(x.float(), dequantized))
        weight_error = max(weight_error, measure.relative_error(dequantized, exact))
    multiply = layer(*map(torch.cat, zip(*all_parts, strict=True)), DTYPES[dtype])
    expected = torch.cat(expected, dim=1)
    # with one row, some kernels are other ones
    found = [multiply(x).float(), multiply(x[:1]).float()]
    matmul_error = measure.relative_error(found, [expected, expected[:1]])
    assert matmul_error <= (1e-2 if dtype == "bf16" else 1e-5), (
        f"{layer.__name__}: its matmul is off by {matmul_error}"
    )
    return multiply, weight_error, matmul_error


def pack_int4(codes: Tensor) -> Tensor:
    """Codes of 0 to 15 [out, in] -> uint8 [out, in / 2]: even columns in the high four bits, odd ones in the low."""
    return codes[:, ::2] << 4 | codes[:, 1::2]


def unpack_int4(packed: Tensor) -> Tensor:
    return torch.stack((packed >> 4, packed & 15), dim=-1).flatten(1)


def int4_kernel(packed: Tensor, dtype: torch.dtype) -> tuple[Callable | None, Tensor]:
    """torch's int4 matmul, and the codes in the order that it reads; None and the plain codes where torch has none. The
    order depends on the device and on a CPU's instruction set, so files should have plain codes."""
    rows, columns = packed.shape[0], 2 * packed.shape[1]
    if dtype == torch.bfloat16 and packed.device.type == "cpu" and rows % 16 == 0:
        ordered = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unpack_int4(packed).int(), 1)
        return torch.ops.aten._weight_int4pack_mm_for_cpu, ordered
    if (
        dtype == torch.bfloat16
        and packed.is_cuda
        and rows % 8 == 0
        and torch.cuda.get_device_capability() >= (8, 0)
    ):
        # the widest loads that fit
        tiles = next(tiles for tiles in (8, 4, 2) if columns % (16 * tiles) == 0)
        return torch.ops.aten._weight_int4pack_mm, torch.ops.aten._convert_weight_to_int4pack(
            packed, tiles
        )
    return None, packed
