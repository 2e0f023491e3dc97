"""One decoder-only transformer and its named sizes.

Parameter names and arithmetic are those of transformers' LlamaForCausalLM (RMSNorm, rotary position
embedding, grouped-query attention, SwiGLU), so its checkpoints load here, and ours there, as they are.
"""

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from common import hf
from common.exits import UserError
from common.runtime import gathered, shard_like


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


_LLAMA31_ROPE = dict(zip(hf.ROPE_SCALING, (8.0, 1.0, 4.0, 8192), strict=True))
_LLAMA32_ROPE = dict(zip(hf.ROPE_SCALING, (32.0, 1.0, 4.0, 8192), strict=True))
SIZES = {
    "nano": Config(256, 256, 688, 6, 8, 8, 32, 1024, tie_word_embeddings=True),
    "llama-124m": Config(50_304, 768, 2048, 12, 12, 12, 64, 1024, tie_word_embeddings=True),
    "llama-1b": Config(128_256, 2048, 8192, 16, 32, 8, 64, 131_072, 5e5, _LLAMA32_ROPE, tie_word_embeddings=True),
    "llama-8b": Config(128_256, 4096, 14_336, 32, 32, 8, 128, 8192, 5e5),
    "llama-70b": Config(128_256, 8192, 28_672, 80, 64, 8, 128, 8192, 5e5),
    "llama-405b": Config(128_256, 16_384, 53_248, 126, 128, 8, 128, 131_072, 5e5, _LLAMA31_ROPE),  # Llama 3.1
}


@dataclass(frozen=True)
class Recipe:
    """What trains a shape sensibly when nothing else is said."""

    seq_len: int
    lr: float  # peak, for AdamW
    warmup_steps: int  # for the default run of 100 steps; published runs of a trillion tokens take 2,000


RECIPES = {
    "nano": Recipe(64, 2e-3, 10),
    "llama-124m": Recipe(1024, 6e-4, 20),
    "llama-1b": Recipe(2048, 3e-4, 20),
    "llama-8b": Recipe(4096, 3e-4, 20),  # Touvron et al. 2023 (Llama 2), section 2.2: 3e-4 for 7B and 13B
    "llama-70b": Recipe(4096, 1.5e-4, 20),  # and 1.5e-4 for 34B and 70B, all with sequences of 4,096
    "llama-405b": Recipe(8192, 8e-5, 20),  # Grattafiori et al. 2024 (Llama 3), table 3 and section 3.4.1
}


def read_config(name: str) -> Config:
    """The shape called `name`, or that of an HF config.json or folder. UserError if it is none of these."""
    return SIZES.get(name) or Config(**hf.read_config(name, [f.name for f in dataclasses.fields(Config)]))


def recipe(name: str) -> Recipe:
    """The recipe of the shape called `name`. A path takes that of the named size nearest in parameters, with a tenth
    of its learning rate where the folder holds trained weights."""
    if name in RECIPES:
        return RECIPES[name]
    config = read_config(name)
    nearest = min(SIZES, key=lambda size: abs(math.log(parameter_count(config) / parameter_count(SIZES[size]))))
    found = RECIPES[nearest]
    return Recipe(
        seq_len=min(found.seq_len, config.max_position_embeddings),
        lr=found.lr / 10 if any(Path(name).glob("*.safetensors")) else found.lr,
        warmup_steps=found.warmup_steps,
    )


def load_config(name: str, tokenizer_size: int, seq_len: int) -> Config:
    """The shape called `name`, or that of an HF config.json or folder.

    nano takes the tokenizer's vocabulary, the others keep their own. UserError: unknown name, a file
    that is no Llama config, a tokenizer larger than the vocabulary, seq_len over the model's limit.
    """
    config = read_config(name)
    if name == "nano":
        config = dataclasses.replace(config, vocab_size=tokenizer_size)
    if tokenizer_size > config.vocab_size:
        raise UserError(f"--tokenizer has {tokenizer_size} tokens, --model {name} only {config.vocab_size}")
    if seq_len > config.max_position_embeddings:
        raise UserError(f"--seq-len {seq_len} is over the limit of --model {name}: {config.max_position_embeddings}")
    return config


def parameter_count(config: Config) -> int:
    """How many numbers the model holds; tied embeddings count once."""
    c = config
    heads = 2 * c.num_attention_heads + 2 * c.num_key_value_heads  # q and o, k and v
    attention = c.hidden_size * c.head_dim * heads
    mlp = 3 * c.hidden_size * c.intermediate_size
    norms = 2 * c.hidden_size
    embeddings = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    return c.num_hidden_layers * (attention + mlp + norms) + c.hidden_size + embeddings


def flops_per_token(config: Config, seq_len: int) -> int:
    """Floating-point operations to train on one token: 6(N - N_embedding) + 12·L·H·head_dim·seq_len.

    The model's own arithmetic, no recomputation (Chowdhery et al. 2022, appendix B). N_embedding is
    what is only looked up: 0 with tied embeddings, whose one matrix is multiplied with as lm_head.
    """
    c = config
    looked_up = 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size
    attention = 12 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * seq_len
    return 6 * (parameter_count(c) - looked_up) + attention


def rope_tables(config: Config, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos and sin of the rotation at each position, as rotate takes them: [length, head_dim], fp32 (Su et al. 2021,
    section 3.2). With rope_scaling, long wavelengths are stretched as in Llama 3.1."""
    exponents = torch.arange(0, config.head_dim, 2, device=device, dtype=torch.float32) / config.head_dim
    frequency = config.rope_theta**-exponents
    if (scaling := config.rope_scaling) is not None:
        turns = scaling["original_max_position_embeddings"] * frequency / (2 * math.pi)
        low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
        keep = ((turns - low) / (high - low)).clamp(0, 1)
        frequency = keep * frequency + (1 - keep) * frequency / scaling["factor"]
    angle = torch.outer(torch.arange(length, device=device, dtype=torch.float32), frequency)
    return torch.cat((angle.cos(), angle.cos()), dim=-1), torch.cat((-angle.sin(), angle.sin()), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each pair (a, b) = (x[i], x[i + head_dim / 2]) by its position's angle: (a cos - b sin, b cos + a sin).

    x: [batch, length, heads, head_dim]; cos and sin: [length, 1, head_dim], or one such row per sequence of the batch.
    """
    exact = x.float()
    swapped = exact.roll(x.shape[-1] // 2, dims=-1)  # (b, a), and the first half of sin is negative
    return torch.addcmul(exact * cos, swapped, sin).to(x.dtype)


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
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)) for project in (self.q_proj, self.k_proj, self.v_proj))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)  # before the transpose, which q, k and v then share: no copies
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
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
        # by name, not by place: layer 7 is called 7 also where a pipeline stage holds only some
        self.layers = nn.ModuleDict({str(i): Block(c) for i in range(c.num_hidden_layers)})
        self.norm = RMSNorm(c.hidden_size, eps=c.rms_norm_eps)
        self._fill_rope_tables()

    def _fill_rope_tables(self) -> None:
        tables = rope_tables(self.config, self.config.max_position_embeddings, next(self.parameters()).device)
        for name, table in zip(("rope_cos", "rope_sin"), tables, strict=True):
            self.register_buffer(name, table, persistent=False)

    def _apply(self, fn, recurse: bool = True):
        super()._apply(fn, recurse)
        self._fill_rope_tables()  # to_empty() leaves them unset, and .to(bfloat16) would round the angles
        return self

    def forward(self, input_ids: Tensor, positions: Tensor | None = None) -> Tensor:
        """Hidden states [batch, length, hidden]; `positions` [batch, length] are 0, 1, 2, ... if not given.

        A pipeline stage sets to None what it does not hold. Without embed_tokens, input_ids are the hidden states of
        the stage before.
        """
        x = input_ids if self.embed_tokens is None else self.embed_tokens(input_ids)
        # the tables are loaded, not computed here: a compiler would compute them again in every kernel that reads them
        rows = slice(input_ids.shape[1]) if positions is None else positions
        # to(x.device): with weights offloaded to the CPU, the tables are there too
        cos, sin = (table[rows].unsqueeze(-2).to(x.device) for table in (self.rope_cos, self.rope_sin))
        for layer in self.layers.values():
            x = layer(x, cos, sin)
        return x if self.norm is None else self.norm(x)


class Transformer(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.model = Decoder(c)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        self.tie_weights()

    def tie_weights(self) -> None:
        if self.config.tie_word_embeddings and self.lm_head is not None and self.model.embed_tokens is not None:
            self.lm_head.weight = self.model.embed_tokens.weight

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Set every weight as a function of (seed, parameter name) alone.

        So a model that is built whole, materialised from the meta device, sharded or cut into stages starts equal to
        the bit. A shard takes its part of the whole matrix, which is drawn on the CPU.
        """
        for name, parameter in hf.named_weights(self):
            with gathered(parameter, to_set=True):
                whole = torch.ones(parameter.shape)  # norms
                if parameter.ndim >= 2:
                    key = hashlib.sha256(f"{seed} {name}".encode()).digest()
                    generator = torch.Generator().manual_seed(int.from_bytes(key[:8]) >> 1)
                    whole.normal_(std=0.02, generator=generator)
                parameter.copy_(shard_like(whole, parameter))

    def forward(self, input_ids: Tensor, targets: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        """Logits [batch, length, vocab]; given targets [batch, length], their mean cross-entropy in nats.

        Targets of -100 do not count; the mean of no target at all is NaN.
        """
        hidden = self.model(input_ids, positions)
        if self.lm_head is None:
            return hidden
        logits = self.lm_head(hidden)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def build(name: str, config: Config, *, seed: int, device: torch.device | str = "cpu") -> Transformer:
    """The model on `device`: the same weights whatever it trains on. On "meta" it holds no numbers yet.

    If `name` is a folder with .safetensors files, their weights replace the random ones.
    """
    with torch.device("meta"):
        net = Transformer(config)
    return net if str(device) == "meta" else materialize(net, name, seed=seed, device=device)


def materialize(net: Transformer, name: str, *, seed: int, device: torch.device | str) -> Transformer:
    """Give a model from the meta device, whole or sharded, its memory on `device` and its weights, as build does."""
    net.to_empty(device=device)
    net.tie_weights()  # to_empty has made two matrices of one
    set_weights(net, name, seed=seed)
    return net


def set_weights(net: Transformer, name: str, *, seed: int) -> None:
    """Give a model that has its memory its weights, as build does: those of folder `name`, else random ones."""
    if name in SIZES or not hf.load_weights(net, Path(name), net.config.tie_word_embeddings):
        net.init_weights(seed)
