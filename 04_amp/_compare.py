"""How compare.py multiplies in each number type, and what fp16 cannot hold: it reaches from 2^-24, its smallest
subnormal, to 65,504. What is under 2^-25 = 3.0e-8 becomes zero; a larger sum or exponential becomes infinite."""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.utils import clip_grad_norm_, get_total_norm, parameters_to_vector
from torch.utils._python_dispatch import TorchDispatchMode

from common import hardware
from common.exits import UserError

Batch = tuple[Tensor, Tensor]  # inputs and targets
NAMES = ["fp32", "tf32", "bf16", "fp16", "fp16-unscaled", "fp8"]
SINCE = {"fp16": (7, 0), "tf32": (8, 0), "bf16": (8, 0), "fp8": (8, 9)}  # compute capability of NVIDIA's GPUs
CPU_SETS = {"bf16": hardware.CPU_BF16, "fp16": {"avx512_fp16", "amx_fp16", "asimdhp"}}  # instruction sets
MICRO_BATCHES = 1024  # gradient accumulation divides the loss by their number, and so every gradient


@cache
def is_native(name: str, device: torch.device) -> bool:
    """Whether the device multiplies this type in hardware. Another may still work, by way of one that it has."""
    name = name.removesuffix("-unscaled")
    if name == "fp32":
        return True
    if name == "tf32" and os.environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        return False
    if device.type == "cuda" and torch.version.hip:  # ROCm answers with a "capability" that is not CUDA's
        return name in ("bf16", "fp16")
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= SINCE[name]
    if device.type == "mps":
        return name == "fp16"
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.is_file() and not CPU_SETS.get(name, set()).isdisjoint(cpuinfo.read_text().split())


def choose(asked: str, net: nn.Module, device: torch.device, tokens: int) -> list[str]:
    """The types to run, fp32 first; `tokens` are those of a batch. UserError if one was asked for that cannot run."""
    cannot = {}
    if not is_native("tf32", device):
        cannot["tf32"] = "needs an NVIDIA GPU of compute capability 8.0, without NVIDIA_TF32_OVERRIDE=0"
    if odd := {size for layer in linear_layers(net) for size in (tokens, *layer.weight.shape) if size % 16}:
        cannot["fp8"] = f"needs rows and columns in multiples of 16, not {', '.join(map(str, sorted(odd)))}"
    if device.type != "cpu" and not is_native("fp8", device):
        cannot["fp8"] = "needs an NVIDIA GPU of compute capability 8.9"
    if asked == "native":
        slow = [name for name in ("bf16", "fp8") if not is_native(name, device)]
        for name, reason in (dict.fromkeys(slow, "is not native here") | cannot).items():
            print(f"left out: {name} {reason}")
        return [name for name in NAMES if name not in (*slow, *cannot)]
    for name in asked.split(","):
        if name not in NAMES or name in cannot:
            raise UserError(f"--dtypes {asked}: {name} {cannot.get(name, 'is none of ' + ', '.join(NAMES))}")
    return [name for name in NAMES if name == "fp32" or name in asked.split(",")]


def linear_layers(net: nn.Module) -> list[nn.Linear]:
    """Those of all blocks. Not lm_head: its errors would go straight into the loss."""
    return [module for module in net.model.layers.modules() if isinstance(module, nn.Linear)]


def to_fp8(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x / scale in fp8, and the scale: one per tensor, from its values now, so that the largest just fits."""
    largest = x.abs().amax().float()
    scale = (largest / torch.finfo(dtype).max).clamp(min=1e-30)
    return (x.float() / scale).to(dtype), scale


def multiply_fp8(a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, result: torch.dtype) -> Tensor:
    """On tensor cores for fp8: a is stored row by row, b column by column. use_fast_accum=True is less exact."""
    return torch._scaled_mm(a, b, a_scale, b_scale, out_dtype=result, use_fast_accum=False)


class Fp8Linear(torch.autograd.Function):
    """x @ weight.T: activations and weights in e4m3 (3 bits of fraction), gradients in e5m2 (2, but more range).
    Each maximum, division, cast and transpose here reads and writes memory once more; libraries fuse them."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        x8, x_scale = to_fp8(x, torch.float8_e4m3fn)
        w8, w_scale = to_fp8(weight, torch.float8_e4m3fn)
        ctx.save_for_backward(x8, x_scale, weight)  # one byte per activation; the weight is there anyway
        return multiply_fp8(x8, x_scale, w8.t(), w_scale, x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor]:
        x8, x_scale, weight = ctx.saved_tensors
        g8, g_scale = to_fp8(grad.contiguous(), torch.float8_e5m2)
        w8, w_scale = to_fp8(weight, torch.float8_e4m3fn)
        grad_x = multiply_fp8(g8, g_scale, column_by_column(w8), w_scale, grad.dtype)
        grad_weight = multiply_fp8(g8.t().contiguous(), g_scale, column_by_column(x8), x_scale, torch.float32)
        return grad_x, grad_weight


def column_by_column(x: Tensor) -> Tensor:
    return x.t().contiguous().t()


def use_fp8(net: nn.Module) -> None:
    """Linear layers of the blocks take and return bf16, as under autocast, and multiply in fp8."""

    def forward(weight: Tensor, x: Tensor) -> Tensor:
        tokens = x.bfloat16().flatten(0, -2)
        return Fp8Linear.apply(tokens, weight).unflatten(0, x.shape[:-1])

    for layer in linear_layers(net):
        layer.forward = partial(forward, layer.weight)


class EmulatedFp16(TorchDispatchMode):
    """fp16 matmuls as tensor cores make them: summed in fp32, rounded once at the end."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.mm.default and args[0].dtype is torch.float16:
            return torch.mm(args[0].float(), args[1].float()).half()
        return func(*args, **(kwargs or {}))


@contextmanager
def multiplying_in(name: str, device: torch.device) -> Iterator[None]:
    """What autocast does not do: tf32 is a switch for fp32 matmuls, and fp16 needs help where the device has none."""
    emulated = name.startswith("fp16") and not is_native(name, device)
    torch.set_float32_matmul_precision("high" if name == "tf32" else "highest")
    with EmulatedFp16() if emulated else nullcontext():
        yield
    torch.set_float32_matmul_precision("highest")


@contextmanager
def saved_activations(net: nn.Module) -> Iterator[dict[int, int]]:
    """Bytes that autograd saves inside, by address: what is saved twice counts once; weights and copies do not."""
    saved, weights = {}, {weight.untyped_storage().data_ptr() for weight in net.parameters()}

    def note(tensor: Tensor) -> Tensor:
        node = tensor.grad_fn
        while node is not None and node.name() in ("TBackward0", "ToCopyBackward0"):  # transposed or cast
            node = node.next_functions[0][0]
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and not (node is not None and node.name().endswith("AccumulateGrad")):
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        yield saved


def underflow(gradients: Tensor, factor: float) -> dict[str, float]:
    """Shares of fp32 gradients x factor that fp16 turns into zero, keeps with fewer bits, makes infinite."""
    half = (gradients * factor).half()
    zero = (half == 0) & (gradients != 0)
    subnormal = (half != 0) & (half.abs() < torch.finfo(torch.float16).smallest_normal)
    counts = {"zero_share": zero, "fewer_bits_share": subnormal, "infinite_share": half.isinf()}
    return {"factor": factor, **{key: int(found.sum()) / half.numel() for key, found in counts.items()}}


class Attempt:
    """A copy of the model after a backward pass, the loss divided by `divide`; no scaler if `scale` is None."""

    def __init__(
        self, net: nn.Module, batch: Batch, scale: float | None, divide: float = 1, name: str = "fp16"
    ) -> None:
        self.original, self.net = net, copy.deepcopy(net)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), weight_decay=0.0)
        self.scaler = GradScaler(batch[0].device.type, init_scale=scale or 1.0, enabled=scale is not None)
        self.backward(batch, divide, name)

    def backward(self, batch: Batch, divide: float = 1, name: str = "fp16") -> None:
        device = batch[0].device
        with multiplying_in(name, device):
            with torch.autocast(device.type, torch.float16, enabled=name == "fp16"):
                loss = self.net(*batch)
            self.scaler.scale(loss / divide).backward()

    @torch.no_grad()
    def step(self) -> Tensor:
        """Take it, and return by how much each weight of the copy differs from the original."""
        self.scaler.step(self.optimizer)
        return parameters_to_vector(self.net.parameters()) - parameters_to_vector(self.original.parameters())


def overflowing_gradients(net: nn.Module, batch: Batch) -> tuple[str, float]:
    """Too large a scale makes gradients infinite, and a step with them ruins the weights: the scaler skips it."""
    scale = 2.0**32  # more than fp16 can bear of any model
    naive = Attempt(net, batch, None, divide=1 / scale)
    for p in naive.net.parameters():
        p.grad /= scale  # infinity stays infinity
    ruined = int((~naive.step().isfinite()).sum())
    cured, skipped = Attempt(net, batch, scale), 0
    while not (change := cured.step()).any() and skipped < 50:  # nothing has moved: the step was skipped
        skipped += 1
        cured.scaler.update()  # halves the scale
        cured.optimizer.zero_grad()
        cured.backward(batch)
    fitting = cured.scaler.get_scale()
    text = (
        f"at scale {scale:,.0f} a step makes {ruined:,} weights NaN; the scaler skips {skipped} steps, halves the scale"
    )
    text += f" each time and goes on at {fitting:,.0f} with {int((~change.isfinite()).sum())} weights NaN"
    assert ruined > 0, text
    assert change.isfinite().all(), text
    assert fitting == scale / 2**skipped < scale, text
    return f"overflowing gradients: {text}", fitting


def vanishing_gradients(net: nn.Module, batch: Batch, scale: float) -> str:
    """A loss divided by 1,024 has gradients that fp16 rounds to zero, and weights stay where they are. More than
    their own gradients say: the gradients of activations, which come before, are zero already."""
    moves_in_fp32 = Attempt(net, batch, None, MICRO_BATCHES, "fp32").step() != 0
    unmoved = []
    for factor in (None, scale * MICRO_BATCHES):
        change = Attempt(net, batch, factor, MICRO_BATCHES).step()
        unmoved.append((change == 0)[moves_in_fp32].float().mean().item())
    text = (
        f"with the loss divided by {MICRO_BATCHES:,}, {unmoved[0]:.1%} of the weights that fp32 moves stay where they "
    )
    text += f"are in fp16; with a scaler {unmoved[1]:.2%}"
    assert max(0.01, 10 * unmoved[1]) < unmoved[0], text
    return f"vanishing gradients: {text}"


def clipping_scaled_gradients(net: nn.Module, batch: Batch, scale: float) -> str:
    """Clipped before unscale_, gradients end up `scale` times too small; the right order clips true ones."""
    norms, updates = [], []
    for right in (False, True):
        tried = Attempt(net, batch, scale)
        gradients = [p.grad for p in tried.net.parameters()]
        limit = get_total_norm(gradients).item() / scale / 2  # half of the true norm: clipping has something to do
        if right:
            tried.scaler.unscale_(tried.optimizer)
        clip_grad_norm_(tried.net.parameters(), limit)
        if not right:
            tried.scaler.unscale_(tried.optimizer)
        norms.append(get_total_norm(gradients).item())
        updates.append(tried.step().norm().item())
    text = f"clipped to {limit:.2f} before unscale_, gradients have norm {norms[0]:.1e}, sink into AdamW's eps and "
    text += f"move the weights {updates[1] / updates[0]:.1f} times less; clipped after it, the norm is {norms[1]:.2f}"
    for found, wanted in zip(norms, (limit / scale, limit), strict=True):
        assert abs(found / wanted - 1) < 0.01, text
    return f"clipping scaled gradients: {text}"


@torch.no_grad()
def softmax_by_hand(net: nn.Module, batch: Batch, _scale: float) -> str:
    """exp(12) is beyond fp16, and infinity / infinity is NaN: compute sums and exponentials in fp32."""
    logits = net(batch[0][:1])
    scores = (logits * (20 / logits.max())).half()  # as of a model that is sure of itself
    wrong, right = (x.exp() / x.exp().sum(-1, keepdim=True) for x in (scores, scores.float()))
    nan_share = wrong.isnan().any(-1).float().mean().item()
    error = (right - torch.softmax(scores.float(), -1)).abs().max().item()
    text = f"exp(x) / sum(exp(x)) in fp16 gives NaN for {nan_share:.1%} of the tokens with logits up to 20; in fp32 it "
    text += f"differs from torch.softmax by {error:.0e}"
    assert nan_share > 0, text
    assert error < 1e-5, text
    return f"softmax by hand: {text}"


def provoke(net: nn.Module, batch: Batch) -> list[str]:
    """The four failures, and their cures."""
    text, fitting = overflowing_gradients(net, batch)
    scale = fitting / 2  # rounding differs from run to run: with room for that
    others = (vanishing_gradients, clipping_scaled_gradients, softmax_by_hand)
    return [text, *(failure(net, batch, scale) for failure in others)]
