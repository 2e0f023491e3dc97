"""The shape that a Hugging Face config.json gives, for the families of _estimate_shapes.py."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from _estimate_shapes import Experts, Latent, Shape, from_config, read_table

from old import shapes
from old.exits import UserError

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")


REQUIRED = object()


@dataclass(frozen=True)
class Content:
    """What a config.json says, each value checked. UserError names the key and the value that cannot be."""

    name: str
    raw: dict

    def refuse(self, reason: str) -> NoReturn:
        raise UserError(f"--model {self.name}: {reason}")

    def size(self, key: str, *, default: object = REQUIRED, least: int = 1) -> int:
        """A whole number. The default stands for a key that is absent or, if it has one, null."""
        value = self.raw.get(key)
        if value is None and default is not REQUIRED:
            return default
        if key not in self.raw:
            self.refuse(f"the config.json of a {self.raw['model_type']} lacks {key!r}")
        if type(value) is not int or value < least:  # not isinstance: true is an int
            self.refuse(f"{key} {json.dumps(value)} is not a whole number of at least {least}")
        return value

    def flag(self, key: str, *, default: bool = False) -> bool:
        value = self.raw.get(key, default)
        if not isinstance(value, bool):
            self.refuse(f"{key} {json.dumps(value)} is neither true nor false")
        return value

    def head_dim(self, hidden_key: str, heads_key: str) -> int:
        """The width of a head where nothing names it."""
        hidden, heads = self.size(hidden_key), self.size(heads_key)
        if hidden % heads:
            self.refuse(f"{hidden_key} {hidden} is no multiple of {heads_key} {heads}")
        return hidden // heads


def from_json(name: str, raw: dict) -> Shape:
    """The shape that a Hugging Face config.json gives. UserError names what is missing, impossible or not known."""
    kind = raw.get("model_type")
    config = Content(name, raw)
    if kind == "gpt2":
        return _gpt2(config)
    if kind not in LLAMA_LIKE:
        config.refuse(f"model_type {kind!r} is none of gpt2, {', '.join(LLAMA_LIKE)}")
    if config.flag("mlp_bias"):
        config.refuse("mlp_bias true: biases of the feed-forward part are not counted here; use one without them")
    heads = config.size("num_attention_heads")
    kv_heads = config.size("num_key_value_heads", default=heads)
    if heads % kv_heads:
        config.refuse(f"num_attention_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    head_dim = config.size("head_dim", default=None)
    latent = _latent_of(kind, config)
    if head_dim is None and latent:  # its heads have widths of their own
        head_dim = config.size("hidden_size") // heads
    elif head_dim is None:
        head_dim = config.head_dim("hidden_size", "num_attention_heads")
    return Shape(
        name=name,
        vocab=config.size("vocab_size"),
        hidden=config.size("hidden_size"),
        layers=config.size("num_hidden_layers"),
        heads=heads,
        kv_heads=kv_heads,
        ffn=config.size("intermediate_size"),
        head_dim=head_dim,
        tied=config.flag("tie_word_embeddings"),
        qkv_bias=kind == "qwen2" or config.flag("attention_bias"),
        qk_norm=kind in ("qwen3", "qwen3_moe"),
        positions=config.size("max_position_embeddings") if "max_position_embeddings" in raw else 0,
        experts=_experts_of(kind, config),
        latent=latent,
    )


def _gpt2(config: Content) -> Shape:
    hidden, heads = config.size("n_embd"), config.size("n_head")
    return Shape(
        name=config.name,
        vocab=config.size("vocab_size"),
        hidden=hidden,
        layers=config.size("n_layer"),
        heads=heads,
        kv_heads=heads,
        ffn=config.size("n_inner", default=4 * hidden),
        head_dim=config.head_dim("n_embd", "n_head"),
        tied=config.flag("tie_word_embeddings", default=True),
        gpt2=True,
        positions=config.size("n_positions"),
    )


def _experts_of(kind: str, config: Content) -> Experts | None:
    number_key = {"mixtral": "num_local_experts", "qwen3_moe": "num_experts"}.get(kind, "n_routed_experts")
    if kind.startswith("deepseek"):
        if not config.size(number_key, default=0, least=0):
            return None
    elif kind not in ("mixtral", "qwen3_moe"):
        return None
    number, active = config.size(number_key), config.size("num_experts_per_tok")
    if active > number:
        config.refuse(f"num_experts_per_tok {active} is more than {number_key} {number}")
    ffn = config.size("intermediate_size" if kind == "mixtral" else "moe_intermediate_size")
    if not kind.startswith("deepseek"):
        return Experts(number, active, ffn)
    layers, dense_layers = config.size("num_hidden_layers"), config.size("first_k_dense_replace", default=0, least=0)
    if dense_layers > layers:
        config.refuse(f"first_k_dense_replace {dense_layers} is more than num_hidden_layers {layers}")
    shared_ffn = config.size("n_shared_experts", default=0, least=0) * ffn
    return Experts(number, active, ffn, shared_ffn=shared_ffn, dense_layers=dense_layers)


def _latent_of(kind: str, config: Content) -> Latent | None:
    if not kind.startswith("deepseek"):
        return None
    return Latent(
        q_rank=config.size("q_lora_rank", default=0),
        kv_rank=config.size("kv_lora_rank"),
        nope=config.size("qk_nope_head_dim"),
        rope=config.size("qk_rope_head_dim"),
        value=config.size("v_head_dim"),
    )


def read_shape(name: str) -> Shape:
    """--model: one of our sizes, a name of model_shapes.csv, or a config.json (or a folder with one)."""
    if name in shapes.SIZES:
        return from_config(name, shapes.SIZES[name])
    if (published := read_table().get(name)) is not None:
        return published
    if not Path(name).exists():
        known = ", ".join([*shapes.SIZES, *read_table()])
        raise UserError(f"--model {name}: no such size, nor a config.json or a folder with one; sizes: {known}")
    return from_json(name, shapes.config_content(name))
