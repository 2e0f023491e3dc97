"""A decoder-only transformer with names and arithmetic of transformers' Llama, Mistral, Qwen2 and Qwen3 (RMSNorm,
rotary embedding, grouped queries, SwiGLU): their checkpoints load here, and ours there, as they are."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lm.shapes import Config


def rope_tables(config: Config, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotation at each position, as rotate takes them: [length, head_dim], fp32 (Su et al. 2021,
    section 3.2). With rope_scaling, long wavelengths are stretched as in Llama 3.1."""
    even = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequency = config.rope_theta ** -(even / config.head_dim)
    if (scaling := config.rope_scaling) is not None:
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / scaling["factor"]
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return torch.cat((angle.cos(), angle.cos()), dim=-1), torch.cat(
        (-angle.sin(), angle.sin()), dim=-1
    )


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (a, b) = (x[i], x[i + head_dim / 2]) by its position's angle: (a cos - b sin, b cos + a sin).
    x: [batch, length, heads, head_dim]; cos and sin: [length, 1, head_dim], or a row per sequence of the batch."""
    exact = x.float()
    swapped = exact.roll(x.shape[-1] // 2, dims=-1)  # (b, a), and the first half of sin is negative
    return torch.addcmul(exact * cos, swapped, sin).to(x.dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seen: Tensor | None = None,
    *,
    is_causal=False,
    enable_gqa=False,
) -> Tensor:
    """torch's, `seen` [queries, keys] or [batch, 1, queries, keys]. CUDA's kernels that do not hold all scores refuse
    grouped heads in fp32 and with a mask: there each group becomes a sequence of its own."""
    if not enable_gqa or (seen is None and not (q.is_cuda and q.dtype == torch.float32)):
        return F.scaled_dot_product_attention(
            q, k, v, seen, is_causal=is_causal, enable_gqa=enable_gqa
        )
    groups = k.shape[1]
    # [batch x groups, query heads of a group, tokens, head_dim]
    q = q.unflatten(1, (groups, -1)).flatten(0, 1)
    k, v = (part.flatten(0, 1)[:, None].expand(-1, q.shape[1], -1, -1) for part in (k, v))
    seen = (
        seen
        if seen is None or seen.ndim == 2
        else seen.expand(-1, groups, -1, -1).flatten(0, 1)[:, None]
    )
    y = F.scaled_dot_product_attention(q, k, v, seen, is_causal=is_causal)
    return y.unflatten(0, (-1, groups)).flatten(1, 2)


class RMSNorm(nn.RMSNorm):
    """Normalised in fp32; under autocast the result is rounded once, not again by each matmul that reads it."""

    def forward(self, x: Tensor) -> Tensor:
        y, device = super().forward(x), x.device.type
        return y.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else y


class Attention(nn.Module):
    attend = staticmethod(attend)  # context parallelism puts another in its place

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.grouped = c.num_key_value_heads != c.num_attention_heads
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps) if c.qk_norm else nn.Identity()

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, extend: Callable | None = None, seen=None
    ) -> Tensor:
        """`extend` gives keys and values with those of past tokens before them; `seen` says who may look at which."""
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [batch, tokens, heads, head_dim]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        q = rotate(self.q_norm(q), cos, sin)  # before the transpose, which would cost a copy
        k = rotate(self.k_norm(k), cos, sin)
        q = q.transpose(1, 2)  # [batch, heads, tokens, head_dim]
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        k, v = (k, v) if extend is None else extend(k, v)
        y = self.attend(q, k, v, seen, is_causal=seen is None, enable_gqa=self.grouped)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate = F.silu(self.gate_proj(x))
        return self.down_proj(gate * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, *past) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, *past)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        # by name, not by place: layer 7 is called 7 also where a pipeline stage holds only some
        self.layers = nn.ModuleDict({str(i): Block(c) for i in range(c.num_hidden_layers)})
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self._fill_rope_tables()

    def _fill_rope_tables(self) -> None:
        cos, sin = rope_tables(
            self.config, self.config.max_position_embeddings, next(self.parameters()).device
        )
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        # to_empty() leaves them unset, and .to(bfloat16) would round the angles
        self._fill_rope_tables()
        return self

    def forward(self, input_ids: Tensor, positions: Tensor | None = None, cache=None) -> Tensor:
        """Hidden states [batch, length, hidden]; `positions` [batch, length] are 0, 1, 2, ... if not given, but a cache
        needs them. A pipeline stage has None for what it lacks, and takes the hidden states of the stage before."""
        x = input_ids if self.embed_tokens is None else self.embed_tokens(input_ids)
        # loaded, not computed here: a compiler would compute the angles again in every kernel that reads them
        rows = slice(input_ids.shape[1]) if positions is None else positions
        # to(x.device): with weights offloaded to the CPU, the tables are there too
        cos, sin = (
            table[rows].unsqueeze(-2).to(x.device) for table in (self.rope_cos, self.rope_sin)
        )
        seen = None if cache is None else cache.visible(positions)
        for name, layer in self.layers.items():
            past = () if cache is None else (cache.extend(name, positions), seen)
            x = layer(x, cos, sin, *past)
        return x if self.norm is None else self.norm(x)


class Transformer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.model = Decoder(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        if (
            self.config.tie_word_embeddings
            and self.lm_head is not None
            and self.model.embed_tokens is not None
        ):
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self, input_ids, targets: Tensor | None = None, positions=None, cache=None, reduction="mean"
    ) -> Tensor:
        """Logits [batch, length, vocab]; given targets [batch, length], their mean cross-entropy in nats, or its "sum":
        without those of -100, and the mean is NaN if no other is there. positions and cache as in Decoder."""
        hidden = self.model(input_ids, positions, cache)
        if self.lm_head is None:
            return hidden
        return self.lm_head(hidden) if targets is None else self.loss(hidden, targets, reduction)

    def loss(self, hidden: Tensor, targets: Tensor, reduction: str) -> Tensor:
        # no name for the 16-bit logits: they would live until the loss is there
        return F.cross_entropy(
            self.lm_head(hidden).flatten(0, 1).float(), targets.flatten(), reduction=reduction
        )
