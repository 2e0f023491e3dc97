"""The shapes of the model in model.py: named sizes, the recipe that trains each, and Hugging Face's config.json.

Nothing here imports torch: a script that only computes with shapes starts at once.
"""

import dataclasses
import json
import math
from dataclasses import dataclass
from pathlib import Path

from old.exits import UserError

ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


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
        wrong = []
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is int:
                right = type(value) is int and value >= 1
            elif field.type is float:
                right = _is_number_above_0(value)
            elif field.type is bool:
                right = type(value) is bool
            else:
                right = value is None or all(map(_is_number_above_0, value.values()))
            if not right:
                wrong.append(f"{field.name} {value!r}")
        if not wrong and self.num_attention_heads % self.num_key_value_heads:
            wrong = [f"num_attention_heads {self.num_attention_heads} for {self.num_key_value_heads} key-value heads"]
        if not wrong and self.head_dim % 2:
            wrong = [f"head_dim {self.head_dim} (odd)"]
        if wrong:
            raise ValueError(", ".join(wrong))


def _is_number_above_0(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < math.inf


_LLAMA31_ROPE = dict(zip(ROPE_SCALING, (8.0, 1.0, 4.0, 8192), strict=True))
_LLAMA32_ROPE = dict(zip(ROPE_SCALING, (32.0, 1.0, 4.0, 8192), strict=True))
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


def config_content(name: str, flag: str = "--model") -> dict:
    """The content of the config.json at path `name`, in folder `name`, or of the size of that name. UserError, which
    names the `flag` that has given it, if it is none of these."""
    if name in SIZES:
        return config_json(SIZES[name])
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise UserError(f"{flag} {name}: no such size (--help lists them), nor an HF config.json or a folder with one")
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{flag} {path} is not a Llama config: {error!r}") from None


def read_config(name: str, flag: str = "--model") -> Config:
    """The shape called `name`, or that of an HF config.json or folder. UserError, which names the `flag` that has given
    it, if it is none of these."""
    return SIZES.get(name) or parse_config(config_content(name, flag), f"{flag} {name}")


def parse_config(content: dict, where: str) -> Config:
    """The shape that a config.json with this content gives, with transformers' defaults.

    UserError, which begins with `where` it is, if it is not a Llama's.
    """
    try:
        raw = {key: value for key, value in content.items() if value is not None}
        rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}  # transformers 5, transformers 4
        rope_type = rope.get("rope_type", rope.get("type", "default"))
        different = {
            "model_type": raw["model_type"] != "llama",
            "rope_type": rope_type not in ("default", "llama3"),
            "hidden_act": raw.get("hidden_act", "silu") != "silu",
            "attention_bias": raw.get("attention_bias", False),
            "mlp_bias": raw.get("mlp_bias", False),
        }
        known = {
            "num_key_value_heads": raw["num_attention_heads"],
            "head_dim": raw["hidden_size"] // raw["num_attention_heads"],
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10_000.0,
            "tie_word_embeddings": False,
            **raw,
            **rope,
            "rope_scaling": {key: rope[key] for key in ROPE_SCALING} if rope_type == "llama3" else None,
        }
        fields = {field.name: known[field.name] for field in dataclasses.fields(Config)}
    except KeyError as error:
        raise UserError(f"{where} is not a Llama config: it has no {error}") from None
    except (ArithmeticError, ValueError, TypeError, AttributeError) as error:
        raise UserError(f"{where} is not a Llama config: {error!r}") from None
    if any(different.values()):
        raise UserError(f"{where}: {', '.join(k for k, v in different.items() if v)} is not Llama's")
    try:
        return Config(**fields)
    except ValueError as error:
        raise UserError(f"{where} has {error}") from None


def config_json(config: Config) -> dict:
    """The content of a config.json for this shape: transformers and read_config read it."""
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,  # transformers would take 1 and 2, which are letters to the byte tokenizer
        "eos_token_id": None,
        **dataclasses.asdict(config),
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **scaling},
    }


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
