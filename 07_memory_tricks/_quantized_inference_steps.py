"""A model of quantized_inference.py with its cache, and its steps: prefill, decode, verify; compiled or not."""

import argparse
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import NamedTuple

import torch
from _quantized_inference_cache import Int8Cache
from _quantized_inference_flags import DTYPES, activation_dtype, check_fits
from _quantized_inference_load import Loaded, Scheme, load
from _quantized_inference_products import attend
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from old import shapes
from old.generate import StaticCache


class Model(NamedTuple):
    """A loaded model with its cache, and its steps for common/generate.py."""

    loaded: Loaded
    cache: StaticCache
    prefill: Callable[[Tensor, Tensor, Tensor], Tensor]
    decode: Callable[[Tensor, Tensor], Tensor]
    verify: Callable[[Tensor, Tensor], Tensor]


def make_model(
    name: str,
    weights: str,
    layer: type[nn.Module],
    args: argparse.Namespace,
    device: torch.device,
    *,
    save: Path | None = None,
    **sizes: int,
) -> Model:
    flag = "--model" if name == args.model else "--draft"  # which of them an error names
    config = shapes.read_config(name, flag)
    dtype = DTYPES[activation_dtype(args, weights, device)]
    make_cache = Int8Cache if args.kv_cache == "int8" else StaticCache
    cache_bytes = make_cache(config, **sizes, dtype=dtype, device="meta").nbytes()
    check_fits(config, weights, args.group_size, cache_bytes, device)
    cache = make_cache(config, **sizes, dtype=dtype, device=device)
    scheme = Scheme(weights, layer, args.group_size)
    loaded = load(name, config, scheme, seed=args.seed, dtype=dtype, device=device, save=save, flag=flag)
    net = loaded.net

    def prefill(ids: Tensor, positions: Tensor, last: Tensor) -> Tensor:
        return net(ids, positions=positions, cache=cache, last=last)

    def decode(ids: Tensor, positions: Tensor) -> Tensor:
        return net(ids[:, None], positions=positions[:, None], cache=cache)[:, -1]

    def verify(ids: Tensor, positions: Tensor) -> Tensor:
        return net(ids, positions=positions, cache=cache)

    if args.compile:
        if device.type == "cpu":
            for block in net.model.layers.values():
                block.self_attn.attend = attend
        decode, verify = compile_step(decode, cache), compile_step(verify, cache)
    return Model(loaded, cache, prefill, decode, verify)


def compile_step(step: Callable[[Tensor, Tensor], Tensor], cache: StaticCache) -> Callable[[Tensor, Tensor], Tensor]:
    """A step that is compiled once: whatever the position, the cache keeps its shapes and its addresses."""
    # The compiler keeps what it has compiled with the code of a function. All steps are of the same few lines, so each
    # gets a copy of them: without guards on its weights, one model's step would be taken for another's.
    step = FunctionType(step.__code__.replace(), step.__globals__, step.__name__, None, step.__closure__)
    options = {"guard_filter_fn": guards_of_arguments}
    if not cache.slots.is_cuda:
        # What the SUMS parts of a product all read is computed once before them. By default the compiler computes a
        # norm or a gate inside the product, for each row of the weight anew.
        options |= {"realize_reads_threshold": 0}
        return torch.compile(step, dynamic=False, fullgraph=True, options=options)
    for tensor in cache.tensors():
        torch._dynamo.mark_static_address(tensor)  # else no CUDA graph may write to it
    # products of one row become loops over the weights like any other, with the dequantizing inside
    options |= {"triton.cudagraphs": True, "coordinate_descent_tuning": True}
    compiled = torch.compile(step, dynamic=False, fullgraph=True, options=options)

    def call(ids: Tensor, positions: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.MATH):  # attention of one token, written out, is fused as well
            return compiled(ids, positions)

    return call


def guards_of_arguments(guards: list) -> list[bool]:
    """Which of its guards a compiled step checks at each call: those of its arguments, by their names. To check all
    weights, which nobody changes, takes a CPU a millisecond for the 30 layers of smollm2-135m; a step takes 5 to 8."""
    return [guard.guard_type == "TENSOR_MATCH" and guard.name in ("ids", "positions") for guard in guards]
