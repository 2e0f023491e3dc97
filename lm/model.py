"""A decoder-only transformer: the architecture of Llama, Mistral, Mixtral, Qwen2 and Qwen3.

    Transformer      Decoder, then a linear head to logits
      Decoder        embedding, Blocks, final norm
        Block        Attention and MLP, each after an RMSNorm and inside a residual connection.
                     In a mixture of experts, lm/moe.py has what is in place of the MLP

Parameter names and arithmetic match Hugging Face transformers, so that checkpoints load in either
without conversion. In the shapes below, `heads` are query heads and `kv_heads` are key and value
heads. With fewer kv_heads than heads, each serves a group of query heads (grouped-query attention).

Three details serve chapters 06 to 09. Parts of the model may be None (pipeline parallelism),
`attend` may be replaced (context parallelism), and a KVCache may hold past tokens (inference).
"""

import math
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common.runtime import full_tensor
from lm.moe import Load, Mixture
from lm.shapes import Config


class KVCache(Protocol):
    """The methods that a model calls of a cache of keys and values."""

    def mask(self, positions: Tensor) -> Tensor:
        """Return the attention mask, [batch, 1, tokens, keys], for positions [batch, tokens].

        It is True where a token sees a key, or it is added to the attention scores: see `attend`.
        """

    def updater(
        self, layer: str, positions: Tensor
    ) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """Return the function update_cache(k, v) of a layer.

        It stores k and v, [batch, kv_heads, tokens, head_dim], and returns the keys and values of
        all tokens so far, [batch, kv_heads, keys, head_dim].
        """


class Transformer(nn.Module):
    """The language model: a decoder, and a head that turns hidden states into logits.

    Its weights are uninitialized: lm/weights.py fills them.
    """

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.model = Decoder(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.balance: Any = None  # of a mixture of experts in training: see lm/balance.py
        self.tie_weights()

    def tie_weights(self) -> None:
        """Make the head use the embedding's matrix, if the config says so.

        In pipeline parallelism, do so only if the stage has both.
        """
        if not self.config.tie_word_embeddings:
            return
        if self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        input_ids: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        reduction: str = "mean",
        mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return logits or, if targets are given, the loss.

        Logits are [batch, tokens, vocab]. targets are [batch, tokens], and targets[:, t] is the
        token that follows input_ids[:, t]. The loss is an fp32 scalar: see `loss`. A stage without
        a head returns hidden states. positions, cache and masks: see Decoder.

        In training, the mean includes the balance loss of a mixture of experts. The sum does not.
        """
        hidden = self.model(input_ids, positions, cache, mask, padding_mask)
        if self.lm_head is None:
            return hidden
        if targets is None:
            return self.lm_head(hidden)
        loss = self.loss(hidden, targets, reduction)
        if self.balance is not None and reduction == "mean" and torch.is_grad_enabled():
            loss = full_tensor(loss) + self.balance.loss()  # with tensor parallelism, a DTensor
        return loss

    def loss(self, hidden: Tensor, targets: Tensor, reduction: str) -> Tensor:
        """Return the cross-entropy in nats over targets other than -100, as a "mean" or a "sum".

        The mean is NaN if every target is -100.
        """
        # One expression: a variable for the 16-bit logits would keep them beside the fp32 ones.
        return F.cross_entropy(
            self.lm_head(hidden).flatten(0, 1).float(), targets.flatten(), reduction=reduction
        )


class Decoder(nn.Module):
    """Embedding, blocks and final norm: token ids in, hidden states out.

    In pipeline parallelism each GPU holds some consecutive layers, called a stage. The layers of
    other stages are deleted from `layers`, and `embed_tokens` and `norm` are None where another
    stage has them.
    """

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        # A dict, not a list: layer 7 keeps its name in a stage that has only some layers.
        self.layers = nn.ModuleDict({str(i): Block(c, i) for i in range(c.num_hidden_layers)})
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.loads: list[Load] = []  # of the last forward, for lm/balance.py
        self._fill_rope_tables()

    def _fill_rope_tables(self) -> None:
        # The tables are buffers. If forward computed them, torch.compile would compute the angles
        # again in each kernel that reads them. They are not part of a checkpoint.
        device = next(self.parameters()).device
        cos, sin = rope_tables(self.config, self.config.max_position_embeddings, device)
        self.register_buffer("rope_cos", cos, persistent=False)
        self.register_buffer("rope_sin", sin, persistent=False)

    def _apply(self, fn, recurse: bool = True):
        # torch calls this in to(), cuda() and to_empty(). Fill the tables again afterwards, because
        # to_empty() leaves them uninitialized and to(torch.bfloat16) rounds them.
        super()._apply(fn, recurse)
        self._fill_rope_tables()
        return self

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Return the hidden states, [batch, tokens, hidden].

        input_ids is [batch, tokens]; a stage without embedding takes hidden states instead.
        positions is [batch, tokens], below max_position_embeddings; the default is 0, 1, 2, ...
        With a cache they must be given. mask: see `attend`. Without one, attention is causal; a
        cache has its own. padding_mask, [batch, tokens], is True where a token is padding, which
        experts leave out. Attention does not: padding belongs behind all other tokens of a row.
        """
        assert cache is None or positions is not None, "with a cache, give positions"
        x = input_ids
        if self.embed_tokens is not None:
            x = self.embed_tokens(input_ids)
        rows = slice(input_ids.shape[1]) if positions is None else positions
        # unsqueeze(-2) adds a dimension for the heads. With weights that are offloaded to the CPU,
        # these buffers are on the CPU, too: .to(x.device) moves the rows to the GPU.
        cos = self.rope_cos[rows].unsqueeze(-2).to(x.device)
        sin = self.rope_sin[rows].unsqueeze(-2).to(x.device)
        loads = []
        padding = {} if padding_mask is None else {"padding_mask": padding_mask}
        if cache is None:
            masks = () if mask is None else (mask,)
            for layer in self.layers.values():
                x = layer(x, cos, sin, *masks, **padding)
                if isinstance(x, tuple):  # of a mixture of experts
                    x, load = x
                    loads.append(load)
        else:
            mask = cache.mask(positions)
            for name, layer in self.layers.items():
                x = layer(x, cos, sin, mask, cache.updater(name, positions))
                if isinstance(x, tuple):
                    x, _ = x
        self.loads = loads
        if self.norm is not None:
            x = self.norm(x)
        return x


class Block(nn.Module):
    """One layer: attention, then the MLP, each after a norm and inside a residual connection."""

    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        if c.experts is None or layer in c.experts.dense_layers:
            self.mlp = MLP(c)
        else:
            self.mlp = Mixture(c.hidden_size, c.experts)
        self.input_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def forward(
        self, x: Tensor, cos: Tensor, sin: Tensor, mask=None, update_cache=None, padding_mask=None
    ) -> Tensor | tuple[Tensor, Load]:
        """Return [batch, tokens, hidden] for x of the same shape. Arguments: see Attention.

        A layer with experts also returns their load. padding_mask: see Decoder.
        """
        x = x + self.self_attn(
            self.input_layernorm(x), cos, sin, mask=mask, update_cache=update_cache
        )
        y = self.post_attention_layernorm(x)
        if isinstance(self.mlp, Mixture):
            y, load = self.mlp(y, padding_mask=padding_mask)
            return x + y, load
        return x + self.mlp(y)


class Attention(nn.Module):
    """Causal self-attention with rotary position embeddings (RoPE) and grouped heads."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.attend = attend  # an attribute, so that context parallelism can replace it
        self.grouped = c.num_key_value_heads != c.num_attention_heads
        q_width = c.num_attention_heads * c.head_dim
        kv_width = c.num_key_value_heads * c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, q_width, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.hidden_size, kv_width, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.hidden_size, kv_width, bias=c.qkv_bias)
        self.o_proj = nn.Linear(q_width, c.hidden_size, bias=False)
        self.q_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps) if c.qk_norm else nn.Identity()
        self.k_norm = RMSNorm(c.head_dim, eps=c.rms_norm_eps) if c.qk_norm else nn.Identity()

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        mask: Tensor | None = None,
        update_cache: Callable | None = None,
    ) -> Tensor:
        """Return [batch, tokens, hidden] for x of the same shape.

        cos and sin are rows of rope_tables, [tokens, 1, head_dim] or [batch, tokens, 1, head_dim].
        Without a mask, attention is causal. With a cache, give both `mask` and `update_cache`, as
        KVCache describes them.
        """
        assert update_cache is None or mask is not None, "with update_cache, give a mask"
        q = self.q_proj(x).unflatten(-1, (-1, self.head_dim))  # [batch, tokens, heads, head_dim]
        k = self.k_proj(x).unflatten(-1, (-1, self.head_dim))  # [batch, tokens, kv_heads, head_dim]
        v = self.v_proj(x).unflatten(-1, (-1, self.head_dim))
        # Rotate before the transpose. Of transposed tensors, rotate would return q and k in another
        # memory layout than v has, which costs copies later.
        q = rotate(self.q_norm(q), cos, sin)
        k = rotate(self.k_norm(k), cos, sin)
        q = q.transpose(1, 2)  # [batch, heads, tokens, head_dim]
        k = k.transpose(1, 2)
        v = v.transpose(1, 2)
        if update_cache is not None:
            k, v = update_cache(k, v)
        y = self.attend(q, k, v, mask, is_causal=mask is None, enable_gqa=self.grouped)
        y = y.transpose(1, 2).flatten(2)  # [batch, tokens, heads * head_dim]
        return self.o_proj(y)


class MLP(nn.Module):
    """The feed-forward part of a block, with a gate (SwiGLU, Shazeer 2020)."""

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # [batch, tokens, hidden] in and out
        gate = F.silu(self.gate_proj(x))  # [batch, tokens, intermediate]
        return self.down_proj(gate * self.up_proj(x))


class RMSNorm(nn.RMSNorm):
    """RMS normalization.

    Under autocast nn.RMSNorm computes in fp32 and returns fp32. This class casts the result to the
    autocast dtype once. Otherwise q_proj, k_proj and v_proj would each cast it. It also casts the
    input, because torch has no fused kernel for a 16-bit input and fp32 weights.
    """

    def forward(self, x: Tensor) -> Tensor:
        device_type = x.device.type
        if torch.is_autocast_enabled(device_type):
            y = super().forward(x.float())
            return y.to(torch.get_autocast_dtype(device_type))
        return super().forward(x)


def rope_tables(config: Config, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the tables `cos` and `signed_sin` of rotary position embeddings (RoPE).

    Both are [length, head_dim] in fp32, a row per position. Columns i and i + head_dim / 2 belong
    to the same pair of numbers, which `rotate` rotates by one angle. In `signed_sin` the first half
    of the columns is multiplied by -1, as `rotate` needs it.

    Source: Su et al. 2021, section 3.2. With `rope_scaling`, low frequencies are lowered as in
    Llama 3.1, so that a model trained on short texts can read longer ones.
    """
    even = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32)
    frequency = config.rope_theta ** -(even / config.head_dim)  # [head_dim / 2]
    scaling = config.rope_scaling
    if scaling is not None:
        # Turns of each frequency within the length that the model was first trained on. With more
        # than `high` turns the frequency stays, with fewer than `low` it is divided by `factor`,
        # and in between it is interpolated.
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low = scaling["low_freq_factor"]
        high = scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / scaling["factor"]
    position = torch.arange(length, device=device, dtype=torch.float32)
    angle = torch.outer(position, frequency)  # [length, head_dim / 2]
    cos = torch.cat((angle.cos(), angle.cos()), dim=-1)
    signed_sin = torch.cat((-angle.sin(), angle.sin()), dim=-1)
    return cos, signed_sin


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    """Rotate each pair (a, b) = (x[i], x[i + head_dim / 2]) by the angle of its position.

    The result is (a cos - b sin, b cos + a sin), in the dtype of x, which is [batch, tokens, heads,
    head_dim]. cos and signed_sin are rows of rope_tables: [tokens, 1, head_dim], or
    [batch, tokens, 1, head_dim] if each sequence of the batch has its own positions.
    """
    x_fp32 = x.float()
    swapped = x_fp32.roll(x.shape[-1] // 2, dims=-1)  # (b, a)
    return torch.addcmul(x_fp32 * cos, swapped, signed_sin).to(x.dtype)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    enable_gqa: bool = False,
) -> Tensor:
    """Compute attention; return [batch, heads, queries, head_dim].

    q is [batch, heads, queries, head_dim], k and v are [batch, kv_heads, keys, head_dim]. `mask` is
    [queries, keys] or [batch, 1, queries, keys]. A boolean mask is True where a query sees a key; a
    floating-point mask is added to the scores.

    This is F.scaled_dot_product_attention, except where heads are grouped (enable_gqa) and there is
    a mask, or q is fp32 on CUDA. For these, torch has no fused kernel that takes groups. It would
    use the one that stores all scores, [batch, heads, queries, keys]. So we move kv_heads into the
    batch dimension: then all query heads of a sequence share one key and value head, which expand
    repeats without copying it.
    """
    fused_kernel_takes_groups = mask is None and not (q.is_cuda and q.dtype == torch.float32)
    if not enable_gqa or fused_kernel_takes_groups:
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, enable_gqa=enable_gqa
        )
    kv_heads = k.shape[1]
    # [batch, heads, queries, head_dim] -> [batch * kv_heads, group, queries, head_dim]
    q = q.unflatten(1, (kv_heads, -1)).flatten(0, 1)
    group = q.shape[1]
    # [batch, kv_heads, keys, head_dim] -> [batch * kv_heads, group, keys, head_dim]
    k = k.flatten(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    v = v.flatten(0, 1).unsqueeze(1).expand(-1, group, -1, -1)
    if mask is not None and mask.ndim == 4:
        # [batch, 1, queries, keys] -> [batch * kv_heads, 1, queries, keys]
        mask = mask.expand(-1, kv_heads, -1, -1).flatten(0, 1).unsqueeze(1)
    y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)
    return y.unflatten(0, (-1, kv_heads)).flatten(1, 2)
