"""The shape that a Hugging Face config.json gives, for the families of _estimate_shapes.py."""

from dataclasses import replace
from pathlib import Path

from _estimate_shapes import Experts, Latent, Shape, from_config, read_table

from common import shapes
from common.exits import UserError

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe", "deepseek_v2", "deepseek_v3")


def from_json(name: str, raw: dict) -> Shape:
    """The shape that a Hugging Face config.json gives. UserError names what is missing or not known."""
    kind = raw.get("model_type")
    try:
        if kind == "gpt2":
            h = raw["n_embd"]
            heads = raw["n_head"]
            return Shape(
                name=name,
                vocab=raw["vocab_size"],
                hidden=h,
                layers=raw["n_layer"],
                heads=heads,
                kv_heads=heads,
                ffn=raw.get("n_inner") or 4 * h,
                head_dim=h // heads,
                tied=raw.get("tie_word_embeddings", True),
                gpt2=True,
                positions=raw["n_positions"],
            )
        if kind not in LLAMA_LIKE:
            raise UserError(f"--model {name}: model_type {kind!r} is none of gpt2, {', '.join(LLAMA_LIKE)}")
        heads = raw["num_attention_heads"]
        shape = Shape(
            name=name,
            vocab=raw["vocab_size"],
            hidden=raw["hidden_size"],
            layers=raw["num_hidden_layers"],
            heads=heads,
            kv_heads=raw.get("num_key_value_heads") or heads,
            ffn=raw["intermediate_size"],
            head_dim=raw.get("head_dim") or raw["hidden_size"] // heads,
            tied=bool(raw.get("tie_word_embeddings")),
            qkv_bias=kind == "qwen2" or bool(raw.get("attention_bias")),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            positions=raw.get("max_position_embeddings", 0),
        )
        return replace(shape, experts=_experts_of(kind, raw), latent=_latent_of(kind, raw))
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        raise UserError(f"--model {name}: the config.json of a {kind} lacks {error}") from None


def _experts_of(kind: str, raw: dict) -> Experts | None:
    if kind == "mixtral":
        return Experts(raw["num_local_experts"], raw["num_experts_per_tok"], raw["intermediate_size"])
    if kind == "qwen3_moe":
        return Experts(raw["num_experts"], raw["num_experts_per_tok"], raw["moe_intermediate_size"])
    if kind.startswith("deepseek") and raw.get("n_routed_experts"):
        return Experts(
            raw["n_routed_experts"],
            raw["num_experts_per_tok"],
            raw["moe_intermediate_size"],
            shared_ffn=(raw.get("n_shared_experts") or 0) * raw["moe_intermediate_size"],
            dense_layers=raw.get("first_k_dense_replace", 0),
        )
    return None


def _latent_of(kind: str, raw: dict) -> Latent | None:
    if not kind.startswith("deepseek"):
        return None
    return Latent(
        q_rank=raw.get("q_lora_rank") or 0,
        kv_rank=raw["kv_lora_rank"],
        nope=raw["qk_nope_head_dim"],
        rope=raw["qk_rope_head_dim"],
        value=raw["v_head_dim"],
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
