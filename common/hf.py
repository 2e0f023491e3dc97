"""Reading Hugging Face folders: a Llama's config.json and its .safetensors weights."""

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

from common.exits import UserError
from common.runtime import gathered, own_rows, say

ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_config(name: str, fields: list[str]) -> dict:
    """The values of `fields` (those of model.Config) in the config.json at path `name` or in folder `name`, with
    transformers' defaults. UserError if there is none, or it is not a Llama's."""
    path = Path(name) / "config.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise UserError(f"--model {name}: no such size (--help lists them), nor an HF config.json or a folder with one")
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"--model {path} is not a Llama config: {error!r}") from None
    return parse_config(content, fields, f"--model {path}")


def parse_config(content: dict, fields: list[str], where: str) -> dict:
    """As read_config, from the content of a config.json; an error begins with `where` it is."""
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
        config = {field: known[field] for field in fields}
    except (ArithmeticError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{where} is not a Llama config: {error!r}") from None
    if any(different.values()):
        raise UserError(f"{where}: {', '.join(k for k, v in different.items() if v)} is not Llama's")
    return config


def config_json(config: dict) -> dict:
    """The content of the config.json for a model.Config, given as a dict: transformers and read_config read it."""
    scaling = config["rope_scaling"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,  # transformers would take 1 and 2, which are letters to the byte tokenizer
        "eos_token_id": None,
        **config,
        "rope_scaling": None if scaling is None else {"rope_type": "llama3", **scaling},
    }


def named_weights(net: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters under their own names, also where activation checkpointing wraps a block; tied weights once."""
    for name, parameter in net.named_parameters():
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def load_weights(net: nn.Module, folder: Path, tied: bool) -> bool:
    """Replace the weights of `net` by those of the .safetensors files in `folder`; False if it has none.

    UserError if names or shapes do not fit.
    """
    files = sorted(folder.glob("*.safetensors"))
    if others := [file for suffix in ("*.bin", "*.pt*", "*.distcp") for file in folder.glob(suffix)]:
        raise UserError(
            f"--model {folder}: {others[0].name} is not .safetensors: save the weights as such "
            "(06_fsdp_zero/convert_checkpoint.py --to hf), or remove it"
        )
    if not files:
        return False
    say(f"weights from {len(files)} .safetensors file(s) in {folder}")
    from safetensors import SafetensorError, safe_open

    missing = dict(named_weights(net))  # tied weights once
    try:
        for file in files:
            with safe_open(file, "pt") as weights:
                for name in weights.keys():  # noqa: SIM118, it is no dict
                    if name in missing:
                        _copy(name, missing.pop(name), weights.get_slice(name))
                    elif not (name == "lm_head.weight" and tied):
                        raise RuntimeError(f"{name} is not a weight of this model")
    except (SafetensorError, RuntimeError) as error:
        raise UserError(f"--model {folder}: weights do not fit its config: {error}") from None
    if missing:
        raise UserError(f"--model {folder}: weights do not fit its config: {', '.join(missing)} missing")
    return True


@torch.no_grad()
def _copy(name: str, parameter: nn.Parameter, stored) -> None:
    """Read one tensor, and of a sharded model the rank's rows of it alone."""
    with gathered(parameter, to_set=True):
        if [*parameter.shape] != stored.get_shape():
            raise RuntimeError(f"{name} has shape {tuple(stored.get_shape())}, not {tuple(parameter.shape)}")
        mine = parameter.to_local() if hasattr(parameter, "to_local") else parameter
        if mine.numel():  # the last ranks may hold no row
            mine.copy_(stored[own_rows(parameter)])
