"""One decoder-only transformer and its named sizes.

Parameter names and arithmetic are those of transformers' LlamaForCausalLM (RMSNorm, rotary position
embedding, grouped-query attention, SwiGLU), so its checkpoints load here, and ours there, as they are.
"""

import dataclasses
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import hf
from common.exits import UserError


@dataclass(frozen=True)
class Config:
    """A shape, under the names of a Hugging Face config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    rope_theta: float = 10_000.0
    rope_scaling: dict | None = None  # None, or Llama 3.1's: factor, low_freq_factor, high_freq_factor, ...
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        sizes = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.type is int}
        wrong = [f"{name} {value}" for name, value in sizes.items() if type(value) is not int or value < 1]
        if not wrong and self.num_attention_heads % self.num_key_value_heads:
            wrong = [f"num_attention_heads {self.num_attention_heads} for {self.num_key_value_heads} key-value heads"]
        if not wrong and self.head_dim % 2:
            wrong = [f"head_dim {self.head_dim} (odd)"]
        if wrong:
            raise UserError(f"--model: the config has {', '.join(wrong)}")


_LLAMA32_ROPE = dict(zip(hf.ROPE_SCALING, (32.0, 1.0, 4.0, 8192), strict=True))
SIZES = {
    "nano": Config(256, 256, 688, 6, 8, 8, 32, 1024, tie_word_embeddings=True),
    "llama-124m": Config(50_304, 768, 2048, 12, 12, 12, 64, 1024, tie_word_embeddings=True),
    "llama-1b": Config(128_256, 2048, 8192, 16, 32, 8, 64, 131_072, 5e5, _LLAMA32_ROPE, tie_word_embeddings=True),
    "llama-8b": Config(128_256, 4096, 14_336, 32, 32, 8, 128, 8192, 5e5),
    "llama-70b": Config(128_256, 8192, 28_672, 80, 64, 8, 128, 8192, 5e5),
}


def load_config(name: str, tokenizer_size: int, seq_len: int) -> Config:
    """The shape called `name`, or that of an HF config.json or folder.

    nano takes the tokenizer's vocabulary, the others keep their own. UserError: unknown name, a file
    that is no Llama config, a tokenizer larger than the vocabulary, seq_len over the model's limit.
    """
    config = SIZES.get(name) or Config(**hf.read_config(name, [f.name for f in dataclasses.fields(Config)]))
    if name == "nano":
        config = dataclasses.replace(config, vocab_size=tokenizer_size)
    if tokenizer_size > config.vocab_size:
        raise UserError(f"--tokenizer has {tokenizer_size} tokens, --model {name} only {config.vocab_size}")
    if seq_len > config.max_position_embeddings:
        raise UserError(f"--seq-len {seq_len} is over the limit of --model {name}: {config.max_position_embeddings}")
    return config


def rope_tables(config: Config, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotation at each position, both [length, head_dim / 2], fp32 (Su et al. 2021,
    section 3.2). With rope_scaling, long wavelengths are stretched as in Llama 3.1."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    frequency = config.rope_theta**-exponents
    if (scaling := config.rope_scaling) is not None:
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / scaling["factor"]
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (x[i], x[i + head_dim / 2]) by its position's angle. x: [batch, heads, length, head_dim]."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


class RMSNorm(nn.RMSNorm):
    """Normalised in fp32; under autocast the result is rounded once, not again by each matmul that reads it."""

    def forward(self, x: Tensor) -> Tensor:
        y, device = super().forward(x), x.device.type
        return y.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else y


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.grouped = c.num_key_value_heads != c.num_attention_heads
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in projections)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.grouped)
        return self.o_proj(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.self_attn = Attention(c)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Decoder(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.layers = nn.ModuleList(Block(c) for _ in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        cos, sin = rope_tables(self.config, input_ids.shape[1], input_ids.device)
        for layer in self.layers:
            x = layer(x, cos, sin)
        return self.norm(x)


class Transformer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.model = Decoder(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        if c.tie_word_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)

    def forward(self, input_ids: Tensor, targets: Tensor | None = None) -> Tensor:
        """Logits [batch, length, vocab]; given targets [batch, length], their mean cross-entropy in nats."""
        logits = self.lm_head(self.model(input_ids))
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(name: str, config: Config) -> Transformer:
    """The model on the CPU, from the seeded generator: the same weights whatever it trains on.

    If `name` is a folder with .safetensors files, their weights replace the random ones.
    """
    net = Transformer(config)
    if name not in SIZES:
        hf.load_weights(net, Path(name), config.tie_word_embeddings)
    return net


def flops_per_token(net: Transformer, seq_len: int) -> int:
    """Floating-point operations to train on one token: 6(N - N_embedding) + 12·L·H·head_dim·seq_len.

    The model's own arithmetic, no recomputation (Chowdhery et al. 2022, appendix B). N_embedding is
    what is only looked up: 0 with tied embeddings, whose one matrix is multiplied with as lm_head.
    """
    c = net.config
    parameters = sum(p.numel() for p in net.parameters())
    looked_up = 0 if c.tie_word_embeddings else net.model.embed_tokens.weight.numel()
    return 6 * (parameters - looked_up) + 12 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * seq_len
