"""What a GPU would compute. An operation is called on "cuda", where its kernel does nothing but its checks and its
allocations are real, and then once more on the CPU over the same bytes."""

import ctypes
import os
import sys
import threading
import traceback
from typing import Any, NamedTuple

import torch
from torch import Tensor, empty, empty_strided  # as they are: DeepSpeed replaces those in torch
from torch._decomp import get_decompositions
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

aten = torch.ops.aten
CPU = torch.device("cpu")
HALF = (torch.bfloat16, torch.float16)
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")
DONE = {  # by the call on "cuda" alone: these start no kernel, or read memory
    *(
        "empty",
        "empty_strided",
        "empty_like",
        "new_empty",
        "new_empty_strided",
        "resize_",
        "_resize_output_",
        "set_",
    ),
    *(
        "detach",
        "lift_fresh",
        "record_stream",
        "_pin_memory",
        "is_pinned",
        "_local_scalar_dense",
        "_fused_sdp_choice",
    ),
    *("_has_compatible_shallow_copy_type",),
}
SIZE_IS_A_RESULT = {  # how large the result is, only the CPU knows
    *("nonzero", "nonzero_numpy", "masked_select", "repeat_interleave", "bincount"),
    *("_unique2", "unique_dim", "unique_consecutive"),
}
COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "profiler", "prim")


class Step(NamedTuple):
    """An operation on the CPU, over the memory of the GPU's tensors."""

    func: Any
    args: tuple
    kwargs: dict
    outs: list  # what the call on "cuda" returned
    inputs: set  # the ids of its tensors
    seed: int | None


captured: list[Step] | None = None  # what a replay of the CUDA graph that is captured has to do


def over_same_memory(x):
    """A tensor of the GPU as one of the CPU, a generator as the CPU's default; everything else as it is."""
    if isinstance(x, torch.Generator) or (isinstance(x, torch.device) and x.type == "cuda"):
        return CPU if isinstance(x, torch.device) else None
    if not isinstance(x, Tensor) or not x.is_cuda:
        return x
    storage = x.untyped_storage()
    if storage.nbytes() == 0 or x.numel() == 0:
        return empty_strided(x.shape, x.stride(), dtype=x.dtype)
    memory = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), CPU, storage.nbytes()
    )
    out = empty(0, dtype=x.dtype).set_(memory, x.storage_offset(), x.shape, x.stride())
    return out.conj() if x.is_conj() else out


def on_gpu(value: Tensor) -> Tensor:
    made = empty(value.shape, dtype=value.dtype, device="cuda")
    if value.numel():
        over_same_memory(made).copy_(value)
    return made


def in_fp32(args):
    return [x.float() if isinstance(x, Tensor) else x for x in args]


# Operations that the CPU has not, or has in another form. Each is called with its arguments by name.
def attention(query, key, value, attn_bias=None, is_causal=False, scale=None, **_):
    q, k, v, bias = in_fp32((query, key, value, attn_bias))
    return aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
    )


def attention_backward(
    query,
    key,
    value,
    out,
    logsumexp,
    attn_bias=None,
    is_causal=False,
    scale=None,
    grad_out=None,
    grad_out_=None,
    **_,
):
    grad, q, k, v, o, bias = in_fp32(
        (grad_out if grad_out_ is None else grad_out_, query, key, value, out, attn_bias)
    )
    # padded, or with one dimension more
    lse = logsumexp.reshape(*logsumexp.shape[:2], -1)[:, :, : q.shape[2]]
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward
    return backward(grad, q, k, v, o, lse, 0.0, is_causal, attn_mask=bias, scale=scale)


def scaled_mm(self, mat2, scale_a, scale_b, bias=None, **_):
    out = (self.float() * scale_a) @ (mat2.float() * scale_b)
    return (out if bias is None else out + bias.float(),)


def int4_mm(self, mat2, qGroupSize, qScaleAndZeros):
    n, k = qScaleAndZeros.shape[1], qScaleAndZeros.shape[0] * qGroupSize
    raw = mat2.contiguous().view(torch.uint8).reshape(n, k // 2)
    w = torch.stack((raw >> 4, raw & 15), -1).reshape(n, -1, qGroupSize).float() - 8
    scale, zero = (qScaleAndZeros[..., i].float().T.unsqueeze(-1) for i in (0, 1))
    return (self.float() @ (w * scale + zero).reshape(n, k).T,)


def rms_norm_backward(output_mask, **named):
    decomposed = get_decompositions([aten._fused_rms_norm_backward])[
        aten._fused_rms_norm_backward.default
    ]
    return decomposed(
        **dict(zip(named, in_fp32(named.values()), strict=True)), output_mask=output_mask
    )


OWN = {
    aten._scaled_dot_product_flash_attention.default: attention,
    aten._scaled_dot_product_efficient_attention.default: attention,
    aten._scaled_dot_product_cudnn_attention.default: attention,
    aten._scaled_dot_product_flash_attention_backward.default: attention_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: attention_backward,
    aten._scaled_dot_product_cudnn_attention_backward.default: attention_backward,
    aten._scaled_mm.default: scaled_mm,
    # what alone reads the packed weights: they are kept as they come
    aten._weight_int4pack_mm.default: int4_mm,
    aten._convert_weight_to_int4pack.default: lambda self, innerKTiles: (
        self.contiguous().view(torch.int32),
    ),
    aten._fused_rms_norm_backward.default: rms_norm_backward,
    aten.mm.dtype: lambda self, mat2, out_dtype: (self.float() @ mat2.float(),),
}


def tf32(x):
    bits = x.contiguous().view(torch.int32)
    return ((bits + 0x0FFF + ((bits >> 13) & 1)) & ~0x1FFF).view(torch.float32)


def value_of(step: Step):
    func, args, kwargs = step.func, step.args, step.kwargs
    name = func.overloadpacket.__name__
    if func in OWN:
        names = [argument.name for argument in func._schema.arguments]
        return OWN[func](**dict(zip(names, args, strict=False)), **kwargs)
    if name in (*PRODUCTS, "convolution") and args[0].dtype in HALF and "out" not in kwargs:
        # summed in fp32, as on a GPU; on most CPUs it is much faster, too
        return func(*in_fp32(args), **kwargs).to(args[0].dtype)
    if (
        name in PRODUCTS
        and args[0].dtype == torch.float32
        and torch.get_float32_matmul_precision() != "highest"
    ):
        return func(*[tf32(x) if isinstance(x, Tensor) else x for x in args], **kwargs)
    if name in ("_softmax", "_log_softmax") and args[2]:  # half to float, which CUDA alone has
        return func(args[0].float(), args[1], False)
    return func(*args, **kwargs)


def compute(step: Step) -> dict[int, Tensor]:
    """The values, into the memory of step.outs; what has another shape there than on the CPU is returned, by place."""
    others = {}
    try:
        with torch.random.fork_rng(devices=(), enabled=step.seed is not None):
            if step.seed is not None:
                torch.random.default_generator.manual_seed(step.seed)
            results = tree_flatten(value_of(step))[0]
    except Exception as error:
        print(f"nogpu: no value for {step.func}: {error}", file=sys.stderr)
        traceback.print_stack()
        return others
    for place, (out, value) in enumerate(zip(step.outs, results, strict=False)):
        if not isinstance(out, Tensor) or not isinstance(value, Tensor) or id(out) in step.inputs:
            continue
        if out.device == CPU:  # a copy to the host of what is not contiguous
            if out is not value and out.shape == value.shape:
                out.copy_(value)
        elif out.shape == value.shape:
            over_same_memory(out).copy_(value)
        elif step.func not in OWN:
            others[place] = on_gpu(value.to(out.dtype))
        elif out.numel() == value.numel():
            over_same_memory(out).reshape(-1).copy_(value.reshape(-1))
        elif out.numel() > value.numel() > 0:  # padded
            over_same_memory(out)[..., : value.shape[-1]].copy_(value)
    return others


def seed_of(func, generators: list[torch.Generator]) -> int | None:
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    generator = (
        generators[0] if generators else torch.cuda.default_generators[torch.cuda.current_device()]
    )
    try:
        return (generator.initial_seed() * 1000003 + generator.get_offset() * 7919) % 2**63
    except RuntimeError:  # in a capture
        return 0


def size_is_a_result(func, args) -> bool:
    name = func.overloadpacket.__name__
    if not name.startswith(("index", "_index_put", "_unsafe_index")):
        return name in SIZE_IS_A_RESULT
    return any(
        isinstance(x, Tensor) and x.dtype in (torch.bool, torch.uint8)
        for x in tree_flatten(args[1])[0]
    )


def shares_memory(outs: list, tensors: list[Tensor]) -> bool:
    held = {x.untyped_storage().data_ptr() for x in tensors}
    return all(
        x.untyped_storage().data_ptr() in held for x in outs if isinstance(x, Tensor) and x.numel()
    )


class Values(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls):
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tracing = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if tracing or any(t.__name__ in ("FakeTensor", "FunctionalTensor") for t in types):
            return func(*args, **kwargs)
        if any(t not in (Tensor, torch.nn.Parameter, torch.nn.Buffer) for t in types):
            return NotImplemented  # a DTensor: its parts come here
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        flat = tree_flatten((args, kwargs))[0]
        tensors = [x for x in flat if isinstance(x, Tensor)]
        generators = [x for x in flat if isinstance(x, torch.Generator) and x.device.type == "cuda"]
        to_gpu = any(isinstance(x, torch.device) and x.type == "cuda" for x in flat)
        from_meta = any(x.is_meta for x in tensors) and not name.endswith("_like")
        if getattr(func, "namespace", "") in COLLECTIVES or name in DONE or from_meta:
            return func(*args, **kwargs)
        if not (to_gpu or generators or any(x.is_cuda for x in tensors)):
            return func(*args, **kwargs)
        own_args, own_kwargs = tree_map(over_same_memory, (args, kwargs))
        if name in ("equal", "allclose"):  # a number that they read back themselves
            func(*args, **kwargs)
            return func(*own_args, **own_kwargs)
        own_kwargs.pop("pin_memory", None)
        returns = func._schema.returns
        if size_is_a_result(func, args):
            value = func(*own_args, **own_kwargs)
            if returns and returns[0].alias_info is not None:
                return args[0]
            return tree_map(lambda x: on_gpu(x) if isinstance(x, Tensor) else x, value)

        seed = seed_of(func, generators)  # before the call moves it on
        out = func(*args, **kwargs)
        outs, spec = tree_flatten(out)
        view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        # in inference mode reshape and contiguous may copy
        if view and shares_memory(outs, tensors):
            return out
        step = Step(func, own_args, own_kwargs, outs, {id(x) for x in tensors}, seed)
        if captured is not None and torch.cuda.is_current_stream_capturing():
            captured.append(step)
            return out
        others = compute(step)
        return (
            tree_unflatten([others.get(i, x) for i, x in enumerate(outs)], spec) if others else out
        )


def install() -> None:
    """torch calls this at the end of its import. Values are for the main thread, those that Python starts, and replays
    of CUDA graphs; torch.compile does nothing."""
    # libcuda writes it when the process ends, but not where os._exit ends it
    if os.environ.get("NOGPU_REPORT"):
        report, leave = ctypes.CDLL("libcuda.so.1").nogpu_report, os._exit
        os._exit = lambda code: (report(), leave(code))
    if os.environ.get("NOGPU") != "values":
        return
    Values().__enter__()
    run_thread = threading.Thread.run

    def run(self):
        with Values():
            run_thread(self)

    threading.Thread.run = run

    graph = torch.cuda.graphs.CUDAGraph
    capture_begin, capture_end, replay = graph.capture_begin, graph.capture_end, graph.replay

    def begin(self, *args, **kwargs):
        global captured
        captured = self.steps = []
        return capture_begin(self, *args, **kwargs)

    def end(self):
        global captured
        captured = None
        return capture_end(self)

    def replay_with_values(self):
        replay(self)
        with _disable_current_modes(), torch.no_grad():
            for step in self.steps:
                compute(step)

    graph.capture_begin, graph.capture_end, graph.replay = begin, end, replay_with_values
    torch.compile = lambda model=None, **how: (
        model if model is not None else lambda function: function
    )
    torch.nn.Module.compile = lambda self, *args, **how: None
