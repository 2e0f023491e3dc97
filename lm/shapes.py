"""The shapes of model.py: named sizes, the recipe that trains each, and Hugging Face's config.json. Without torch."""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from common.exits import UserError

ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
LLAMA = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
}
MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")


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
    rope_scaling: dict | None = None  # Llama 3.1's, with the keys ROPE_SCALING
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False
    qkv_bias: bool = False  # Qwen2's
    qk_norm: bool = False  # Qwen3's: each head's query and key are normalised


_LLAMA31_ROPE = dict(zip(ROPE_SCALING, (8.0, 1.0, 4.0, 8192), strict=True))
_LLAMA32_ROPE = dict(zip(ROPE_SCALING, (32.0, 1.0, 4.0, 8192), strict=True))
SIZES = {
    "nano": Config(256, 256, 688, 6, 8, 8, 32, 1024, tie_word_embeddings=True),
    "llama-124m": Config(50_304, 768, 2048, 12, 12, 12, 64, 1024, tie_word_embeddings=True),
    "llama-1b": Config(
        128_256, 2048, 8192, 16, 32, 8, 64, 131_072, 5e5, _LLAMA32_ROPE, tie_word_embeddings=True
    ),
    "llama-8b": Config(128_256, 4096, 14_336, 32, 32, 8, 128, 8192, 5e5),
    "llama-70b": Config(128_256, 8192, 28_672, 80, 64, 8, 128, 8192, 5e5),
    # Llama 3.1
    "llama-405b": Config(128_256, 16_384, 53_248, 126, 128, 8, 128, 131_072, 5e5, _LLAMA31_ROPE),
}


class Recipe(NamedTuple):
    """What trains a shape sensibly when no flag says otherwise."""

    seq_len: int
    lr: float  # peak, for AdamW
    # for the default run of 100 steps; published runs of a trillion tokens take 2,000
    warmup_steps: int


RECIPES = [  # up to so many parameters
    (2e7, Recipe(64, 2e-3, 10)),  # nano
    (4e8, Recipe(1024, 6e-4, 20)),
    (3e9, Recipe(2048, 3e-4, 20)),
    # Touvron et al. 2023 (Llama 2), section 2.2: 3e-4 for 7B and 13B
    (2e10, Recipe(4096, 3e-4, 20)),
    (1e11, Recipe(4096, 1.5e-4, 20)),  # and 1.5e-4 for 34B and 70B, all with sequences of 4,096
    # Grattafiori et al. 2024 (Llama 3), table 3 and section 3.4.1
    (math.inf, Recipe(8192, 8e-5, 20)),
]


def recipe(name: str) -> Recipe:
    """The recipe of the shape called `name`; a folder with trained weights takes a tenth of the learning rate."""
    config = read_config(name)
    found = next(found for limit, found in RECIPES if parameter_count(config) <= limit)
    seq_len = min(found.seq_len, config.max_position_embeddings)
    return found._replace(seq_len=seq_len, lr=found.lr / 10 if has_weights(name) else found.lr)


def has_weights(name: str) -> bool:
    """Whether `name` is a folder with trained weights, and not a size, whose weights are random."""
    return name not in SIZES and any(Path(name).glob("*.safetensors"))


def read_config(name: str, flag: str = "--model") -> Config:
    """The shape called `name`, or that of a config.json or of a folder with one; else UserError, which names `flag`."""
    if name in SIZES:
        return SIZES[name]
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise UserError(
            f"{flag} {name}: no such size (--help lists them), nor an HF config.json or a folder with one"
        )
    try:
        content = dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{flag} {path} is not a model's config: {error!r}") from None
    return parse_config(content, f"{flag} {name}")


def parse_config(content: dict, where: str) -> Config:
    """The shape in the content of a config.json; UserError, that begins with `where`, for what is not computed here."""
    if (kind := content.get("model_type", "llama")) not in MODEL_TYPES:
        raise UserError(f"{where}: model_type {kind!r} is not known here: {', '.join(MODEL_TYPES)}")
    given = {key: value for key, value in {**LLAMA, **content}.items() if value is not None}
    # transformers 5, transformers 4
    rope = given.get("rope_parameters") or given.get("rope_scaling") or {}
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    wrong = [
        f"{key} {found!r}"
        for key, value in LLAMA.items()
        if (found := rope.get(key, given[key])) != value
    ]
    wrong += [f"rope_type {rope_type!r}"] if rope_type not in ("default", "llama3") else []
    wrong += ["quantization_config"] if "quantization_config" in given else []
    wrong += (
        ["layer_types with a sliding window"]
        if "sliding_attention" in given.get("layer_types", [])
        else []
    )
    if wrong:
        raise UserError(f"{where} is not a shape that is computed here: it has {', '.join(wrong)}")
    try:
        values = {
            "num_key_value_heads": given["num_attention_heads"],
            "head_dim": given["hidden_size"] // given["num_attention_heads"],
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
            **given,
            **rope,
            "rope_scaling": {key: rope[key] for key in ROPE_SCALING}
            if rope_type == "llama3"
            else None,
            "qkv_bias": kind == "qwen2",
            "qk_norm": kind == "qwen3",
        }
        # within its window, attention is the usual one
        if kind == "mistral" or given.get("use_sliding_window"):
            window = given.get("sliding_window", math.inf)
            values["max_position_embeddings"] = min(values["max_position_embeddings"], window)
        config = Config(**{field.name: values[field.name] for field in dataclasses.fields(Config)})
        ungrouped = config.num_attention_heads % config.num_key_value_heads
        if ungrouped or config.head_dim % 2 or config.num_hidden_layers < 1:
            raise UserError(
                f"{where}: needed are heads in equal groups, an even head_dim and layers, not {config}"
            )
        return config
    except (KeyError, ArithmeticError, TypeError, AttributeError) as error:
        raise UserError(f"{where} is not a model's config: {error!r}") from None


def config_json(config: Config) -> dict:
    """The content of a config.json for this shape, as transformers and read_config read it."""
    kind = "Qwen3" if config.qk_norm else "Qwen2" if config.qkv_bias else "Llama"
    sizes = {
        key: value
        for key, value in dataclasses.asdict(config).items()
        if key not in ("qkv_bias", "qk_norm")
    }
    return {
        "architectures": [f"{kind}ForCausalLM"],
        "model_type": kind.lower(),
        **{key: value for key, value in LLAMA.items() if key != "partial_rotary_factor"},
        "bos_token_id": None,  # transformers' defaults, 1 and 2, are letters to the byte tokenizer
        "eos_token_id": None,
        **sizes,
        "rope_scaling": config.rope_scaling and {"rope_type": "llama3", **config.rope_scaling},
    }


def load_config(name: str, tokenizer_size: int, seq_len: int) -> Config:
    """The shape to train: as read_config, and nano takes the vocabulary of the tokenizer. UserError: as read_config; a
    tokenizer with more tokens than the vocabulary; seq_len over the model's limit."""
    config = read_config(name)
    if name == "nano":
        config = dataclasses.replace(config, vocab_size=tokenizer_size)
    # what we train on bytes has about 256
    if has_weights(name) and tokenizer_size == 256 and config.vocab_size > 1000:
        raise UserError(
            f"--tokenizer bytes: the weights of --model {name} know other tokens: leave it out"
        )
    if tokenizer_size > config.vocab_size:
        raise UserError(
            f"--tokenizer has {tokenizer_size} tokens, --model {name} only {config.vocab_size}"
        )
    if seq_len > config.max_position_embeddings:
        raise UserError(
            f"--seq-len {seq_len} is over the limit of --model {name}: {config.max_position_embeddings}"
        )
    return config


def parameter_count(config: Config) -> int:
    """How many numbers the model holds; tied embeddings count once."""
    c = config
    # q and o, k and v
    attention = c.hidden_size * c.head_dim * 2 * (c.num_attention_heads + c.num_key_value_heads)
    attention += c.qkv_bias * c.head_dim * (c.num_attention_heads + 2 * c.num_key_value_heads)
    mlp, norms = (
        3 * c.hidden_size * c.intermediate_size,
        2 * c.hidden_size + 2 * c.head_dim * c.qk_norm,
    )
    embeddings = c.vocab_size * c.hidden_size * (1 if c.tie_word_embeddings else 2)
    return c.num_hidden_layers * (attention + mlp + norms) + c.hidden_size + embeddings


def flops_per_token(config: Config, seq_len: int) -> int:
    """Floating-point operations to train on one token, no recomputation: 6(N - N_embedding) + 12·L·H·head_dim·seq_len
    (Chowdhery et al. 2022, appendix B). N_embedding is a matrix that is only looked up: 0 with tied embeddings."""
    c = config
    looked_up = 0 if c.tie_word_embeddings else c.vocab_size * c.hidden_size
    attention = 12 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * seq_len
    return 6 * (parameter_count(c) - looked_up) + attention
