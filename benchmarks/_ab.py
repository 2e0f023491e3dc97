"""Build the variants of ab.py: for each case a function that returns them by name.

A variant is a function that builds its own model, from the same weights, and returns a step. A step
takes no arguments and returns the tensor that must be equal in all variants.
"""

import argparse
import dataclasses
import sys
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _measure import REPO
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.utils import clip_grad_norm_

from lm import model, shapes, weights
from training import optim

sys.path.insert(0, str(REPO / "07_memory_tricks"))
from chunked_loss import chunked_cross_entropy

VOCABULARY = 256  # of nano, whose size is the tokenizer's
CHUNK_TOKENS = 2048
CONTEXT_CHUNKS = 4  # of a sequence on two context ranks
BETAS = (0.9, 0.95)
LEARNING_RATE = 1e-4
# of the first results. In bf16 another order of sums rounds differently.
TOLERANCES = {"fp32": 1e-4, "bf16": 2e-2}
MOMENTS_TOLERANCE = 2e-2  # of how far weights have moved: bf16 keeps 8 bits of a moment
SAMPLE_STEP = 97  # every 97th element of a large tensor is compared

Step = Callable[[], Tensor]
Variants = tuple[dict[str, Callable[[], Step]], float]  # and the tolerance


class Setting(NamedTuple):
    """The model, the tokens and the settings that all variants of a case have in common."""

    config: shapes.Config
    tokens: Tensor  # [batch, seq_len + 1]
    dtype: str  # of the matmuls
    compile: bool
    device: torch.device

    def build(self) -> model.Transformer:
        """Return the model with its random weights, which depend on the seed only."""
        return weights.build("random", self.config, seed=0, device=self.device)

    def compiled(self, function: Callable) -> Callable:
        """Return the function, compiled unless the flags say otherwise."""
        return torch.compile(function) if self.compile else function

    def autocast(self):
        """Return the context in which matmuls have the setting's dtype."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bf16")


def make_setting(args: argparse.Namespace, device: torch.device) -> Setting:
    """Read the config of --model and draw the tokens, the same at each step."""
    config = weights.load_config(args.model, VOCABULARY, args.seq_len)
    if args.layers:
        config = dataclasses.replace(config, num_hidden_layers=args.layers)
    size = (args.batch_size, args.seq_len + 1)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(config.vocab_size, size, generator=generator).to(device)
    return Setting(config, tokens, args.dtype, args.compile, device)


def training_step(
    setting: Setting, net: nn.Module, compute_loss: Callable, micro_batches: int = 1
) -> Step:
    """Return a training step like that of 04_amp/train.py, which returns the loss."""
    optimizer, _ = optim.adamw(net, lr=LEARNING_RATE, weight_decay=0.1, warmup_steps=1, steps=1000)
    inputs = setting.tokens[:, :-1].chunk(micro_batches)
    targets = setting.tokens[:, 1:].chunk(micro_batches)

    def step() -> Tensor:
        total = torch.zeros((), device=setting.device)
        for x, y in zip(inputs, targets, strict=True):
            with setting.autocast():
                loss = compute_loss(x, y) / micro_batches
            loss.backward()
            total += loss.detach()
        clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def sample(tensors: list[Tensor]) -> Tensor:
    """Return some elements of these tensors, in fp32, to be compared."""
    parts = [tensor.detach().flatten()[::SAMPLE_STEP].float() for tensor in tensors]
    return torch.cat(parts)


# --- projections


class MergedAttention(model.Attention):
    """Compute q, k and v by one matmul, with the weights of three."""

    def forward(self, x, cos, sin, mask=None, update_cache=None) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        merged = torch.cat([layer.weight for layer in layers])
        widths = [layer.out_features for layer in layers]
        q, k, v = F.linear(x, merged).split(widths, dim=-1)  # [batch, tokens, width]
        q = rotate_heads(self.q_norm, q, self.head_dim, cos, sin)
        k = rotate_heads(self.k_norm, k, self.head_dim, cos, sin)
        v = v.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        y = self.attend(q, k, v, None, is_causal=True, enable_gqa=self.grouped)
        return self.o_proj(y.transpose(1, 2).flatten(2))


def rotate_heads(norm: nn.Module, x: Tensor, head_dim: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Return rotated queries or keys, [batch, heads, tokens, head_dim]."""
    heads = norm(x.unflatten(-1, (-1, head_dim)))
    return model.rotate(heads, cos, sin).transpose(1, 2)


class MergedMLP(model.MLP):
    """Compute gate and up by one matmul, with the weights of two."""

    def forward(self, x: Tensor) -> Tensor:
        merged = torch.cat((self.gate_proj.weight, self.up_proj.weight))
        gate, up = F.linear(x, merged).chunk(2, dim=-1)  # [batch, tokens, intermediate]
        return self.down_proj(F.silu(gate) * up)


def projections(setting: Setting) -> Variants:
    """Return a step with separate matmuls, as in lm/model.py, and one with merged matmuls."""

    def separate() -> Step:
        net = setting.build()
        return training_step(setting, net, setting.compiled(net))

    def merged() -> Step:
        net = setting.build()
        for layer in net.model.layers.values():
            assert layer.self_attn.q_proj.bias is None, "MergedAttention leaves out the bias"
            layer.self_attn.__class__ = MergedAttention
            layer.mlp.__class__ = MergedMLP
        return training_step(setting, net, setting.compiled(net))

    return {"separate": separate, "merged": merged}, TOLERANCES[setting.dtype]


# --- loss


def loss(setting: Setting) -> Variants:
    """Return steps with the loss inside the compiled model, after it, and after it in chunks."""

    def compiled() -> Step:
        net = setting.build()
        return training_step(setting, net, setting.compiled(net))

    def plain() -> Step:
        net = setting.build()
        decoder = setting.compiled(net.model)

        def compute_loss(x: Tensor, y: Tensor) -> Tensor:
            return net.loss(decoder(x), y, "mean")

        return training_step(setting, net, compute_loss)

    def chunked() -> Step:
        net = setting.build()
        decoder = setting.compiled(net.model)

        def compute_loss(x: Tensor, y: Tensor) -> Tensor:
            hidden = decoder(x).flatten(0, 1)  # [batch * tokens, hidden]
            return chunked_cross_entropy(hidden, net.lm_head.weight, y.flatten(), CHUNK_TOKENS)

        return training_step(setting, net, compute_loss)

    variants = {"compiled": compiled, "plain": plain, "chunked": chunked}
    return variants, TOLERANCES[setting.dtype]


# --- attention


def random_attention_inputs(setting: Setting, queries: int, keys: int) -> tuple[Tensor, ...]:
    """Return q, k and v of one layer, [batch, heads, queries or keys, head_dim]."""
    c = setting.config
    dtype = torch.bfloat16 if setting.dtype == "bf16" else torch.float32
    generator = torch.Generator(setting.device).manual_seed(0)
    kv_heads = c.num_key_value_heads
    tensors = []
    for heads, tokens in ((c.num_attention_heads, queries), (kv_heads, keys), (kv_heads, keys)):
        size = (len(setting.tokens), heads, tokens, c.head_dim)
        values = torch.randn(size, generator=generator, device=setting.device, dtype=dtype)
        tensors.append(values.requires_grad_())
    return tuple(tensors)


def attention(setting: Setting) -> Variants:
    """Return forward and backward of one layer's attention, by two kernels of torch."""
    c = setting.config
    tokens = setting.tokens.shape[1] - 1
    other = SDPBackend.CUDNN_ATTENTION if setting.device.type == "cuda" else SDPBackend.MATH

    def prepare(kernel: SDPBackend) -> Step:
        q, k, v = random_attention_inputs(setting, tokens, tokens)
        grouped = c.num_attention_heads != c.num_key_value_heads

        def step() -> Tensor:
            with sdpa_kernel(kernel):
                y = model.attend(q, k, v, is_causal=True, enable_gqa=grouped)
            gradients = torch.autograd.grad(y, (q, k, v), y)
            return sample([y, *gradients])

        return step

    variants = {}
    for kernel in (SDPBackend.FLASH_ATTENTION, other):
        variants[kernel.name] = partial(prepare, kernel)
    return variants, TOLERANCES[setting.dtype]


# --- context


def context(setting: Setting) -> Variants:
    """Return forward and backward of one layer's attention on one of two context ranks.

    Each sequence has four chunks, and the rank has the queries of the first and the last one. Two
    causal calls, as in 08_model_parallel/train_3d.py, compute half of the scores; on a GPU torch
    takes flash attention for them. One call with a mask computes all scores; for it torch chooses
    among its kernels, on an H100 cuDNN's first.
    """
    c = setting.config
    chunk = (setting.tokens.shape[1] - 1) // CONTEXT_CHUNKS
    keys = CONTEXT_CHUNKS * chunk
    grouped = c.num_attention_heads != c.num_key_value_heads
    positions = torch.arange(keys, device=setting.device)

    def with_gradients(compute: Callable) -> Step:
        q, k, v = random_attention_inputs(setting, 2 * chunk, keys)

        def step() -> Tensor:
            y = compute(q, k, v)
            gradients = torch.autograd.grad(y, (q, k, v), y)
            return sample([y, *gradients])

        return step

    def causal() -> Step:
        masks = [causal_lower_right(chunk, chunk), causal_lower_right(chunk, keys)]

        def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            outputs = []
            for queries, mask in zip(q.chunk(2, dim=2), masks, strict=True):
                end = mask.seq_len_kv
                output = F.scaled_dot_product_attention(
                    queries, k[:, :, :end], v[:, :, :end], mask, enable_gqa=grouped
                )
                outputs.append(output)
            return torch.cat(outputs, dim=2)

        return with_gradients(compute)

    def masked() -> Step:
        own_positions = torch.cat((positions[:chunk], positions[-chunk:]))
        is_future = positions > own_positions[:, None]  # [queries, keys]
        dtype = torch.bfloat16 if setting.dtype == "bf16" else torch.float32
        mask = torch.zeros(is_future.shape, dtype=dtype, device=setting.device)
        mask.masked_fill_(is_future, -torch.inf)

        def compute(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return model.attend(q, k, v, mask, enable_gqa=grouped)

        return with_gradients(compute)

    return {"two causal calls": causal, "a mask": masked}, TOLERANCES[setting.dtype]


# --- prefetch


def prefetch(setting: Setting) -> Variants:
    """Return steps with FSDP's own prefetch, and with one that names the next block.

    There is one rank: a gather is a copy on the GPU, on another stream than the matmuls.
    """
    if not dist.is_initialized():
        backend = "nccl" if setting.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    dtype = torch.bfloat16 if setting.dtype == "bf16" else torch.float32
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    without_autocast = setting._replace(dtype="fp32")  # the policy casts

    def sharded(*, named: bool) -> Step:
        net = setting.build()
        blocks = list(net.model.layers.values())
        for block in blocks:
            if setting.compile:
                block.compile(fullgraph=True)
            fully_shard(block, mp_policy=policy)
        fully_shard(net, mp_policy=policy)
        if named:
            for block, next_block in pairwise(blocks):
                block.set_modules_to_forward_prefetch([next_block])
                next_block.set_modules_to_backward_prefetch([block])
        return training_step(without_autocast, net, net)

    variants = {"by itself": partial(sharded, named=False), "named": partial(sharded, named=True)}
    return variants, TOLERANCES[setting.dtype]


# --- moments


def update_bf16(
    parameter: Tensor, gradient: Tensor, m: Tensor, v: Tensor, scale: Tensor, root: Tensor
) -> None:
    """Update a parameter by AdamW. The moments are read and written in bf16, computed in fp32.

    `scale` is the learning rate over 1 - beta1^t, and `root` the square root of 1 - beta2^t.
    """
    m_fp32 = torch.lerp(m.float(), gradient, 1 - BETAS[0])
    v_fp32 = torch.lerp(v.float(), gradient * gradient, 1 - BETAS[1])
    parameter.sub_(scale * m_fp32 / (v_fp32.sqrt() / root + 1e-8))
    m.copy_(m_fp32)
    v.copy_(v_fp32)


class BF16MomentsAdamW:
    """AdamW without weight decay, with both moments in bf16."""

    def __init__(self, parameters: list[Tensor], update: Callable) -> None:
        self.parameters = parameters
        self.update = update
        self.moments = []
        for parameter in parameters:
            m = torch.zeros_like(parameter, dtype=torch.bfloat16)
            self.moments.append((m, torch.zeros_like(m)))
        self.steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Update all parameters."""
        self.steps += 1
        device = self.parameters[0].device
        scale = torch.tensor(LEARNING_RATE / (1 - BETAS[0] ** self.steps), device=device)
        root = torch.tensor((1 - BETAS[1] ** self.steps) ** 0.5, device=device)
        for parameter, (m, v) in zip(self.parameters, self.moments, strict=True):
            self.update(parameter, parameter.grad, m, v, scale, root)


def moments(setting: Setting) -> Variants:
    """Return the optimizer's step alone, with gradients that stay.

    The result is how far the weights have moved.
    """

    def parameters_with_gradients() -> list[Tensor]:
        generator = torch.Generator(setting.device).manual_seed(0)
        parameters = list(setting.build().parameters())
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter).normal_(std=1e-3, generator=generator)
        return parameters

    def step_of(parameters: list[Tensor], optimizer) -> Step:
        start = sample(parameters)

        def step() -> Tensor:
            optimizer.step()
            return sample(parameters) - start

        return step

    def fp32() -> Step:
        parameters = parameters_with_gradients()
        optimizer = torch.optim.AdamW(
            parameters, lr=LEARNING_RATE, betas=BETAS, weight_decay=0.0, fused=True
        )
        return step_of(parameters, optimizer)

    def bf16() -> Step:
        parameters = parameters_with_gradients()
        update = torch.compile(update_bf16, dynamic=False) if setting.compile else update_bf16
        return step_of(parameters, BF16MomentsAdamW(parameters, update))

    return {"fp32": fp32, "bf16": bf16}, MOMENTS_TOLERANCE


# --- micro-batches


def micro_batch(setting: Setting) -> Variants:
    """Return steps that take the whole batch at once, or in two or four parts.

    The mean over parts of equal size is the mean over the batch.
    """

    def prepare(parts: int) -> Step:
        net = setting.build()
        return training_step(setting, net, setting.compiled(net), micro_batches=parts)

    batch = len(setting.tokens)
    variants = {}
    for parts in (1, 2, 4):
        variants[f"{batch // parts} sequences"] = partial(prepare, parts)
    return variants, TOLERANCES[setting.dtype]
