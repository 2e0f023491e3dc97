"""Shapes of the language model, and the training recipe of each.

A shape is a `Config`: the sizes that determine the model's weights and arithmetic. It has a name in
SIZES or comes from a Hugging Face config.json. This file does not import torch, so that the planner
can compute with shapes on any machine.
"""

import dataclasses
import json
import math
from argparse import Namespace
from dataclasses import dataclass, field
from pathlib import Path

from common.cli import did_you_mean
from common.exits import UserError
from lm.runs import refuse_run
from lm.weight_files import WEIGHT_SUFFIXES, weight_files
from training.defaults import SMALL, Recipe

# Values in a config.json that lm/model.py implements. It implements no others.
LLAMA = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "partial_rotary_factor": 1.0,
}
# Keys of LLAMA that transformers does not read in a family. Qwen2 always has biases in q, k and v.
NOT_READ = {
    "llama": (),
    "mistral": ("attention_bias", "mlp_bias"),
    "qwen2": ("attention_bias", "mlp_bias"),
    "qwen3": ("mlp_bias",),
    "qwen3_moe": ("mlp_bias",),
    "mixtral": ("attention_bias", "mlp_bias"),
}
MODEL_TYPES = tuple(NOT_READ)
MIXTURES = ("qwen3_moe", "mixtral")  # the families with mixtures of experts
# What transformers takes where a config.json lacks a key: in all families, and in each.
DEFAULTS = {
    **LLAMA,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "tie_word_embeddings": False,
}
QWEN_DEFAULTS = {
    "max_position_embeddings": 32_768,
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
}
FAMILY_DEFAULTS: dict[str, dict] = {
    "llama": {"max_position_embeddings": 2048},
    "mistral": {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "sliding_window": 4096,
    },
    "qwen2": QWEN_DEFAULTS,
    "qwen3": {**QWEN_DEFAULTS, "head_dim": 128},
    "qwen3_moe": {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": 4,
        "use_sliding_window": False,
        "sliding_window": 4096,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": False,
        "router_aux_loss_coef": 0.001,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
    },
    "mixtral": {
        "max_position_embeddings": 131_072,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1_000_000.0,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,  # its softmax over the chosen experts is the same
        "router_aux_loss_coef": 0.001,
        "router_jitter_noise": 0.0,
    },
}

# Keys without a default here. That of transformers is the size of a 7B model.
REQUIRED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# null is the default of the family, except for these keys: one key-value head for each query head,
# and no window.
NULL_IS_A_VALUE = ("num_key_value_heads", "sliding_window")
LAYER_TYPES = ("full_attention", "sliding_attention")
# The keys of Config.rope_scaling.
ROPE_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class ExpertConfig:
    """The mixtures of experts of a model, with the names of a config.json of Qwen3-MoE."""

    num_experts: int
    num_experts_per_tok: int  # the experts that a token passes
    moe_intermediate_size: int  # of one expert
    norm_topk_prob: bool  # the weights of a token's experts are divided by their sum
    dense_layers: tuple[int, ...] = ()  # the layers that have an MLP instead
    # The weight of the balance loss in training. 0: transformers trains without it.
    balance_weight: float = field(default=0.0, repr=False)


@dataclass(frozen=True)
class Config:
    """The shape of a model, with the names of a Hugging Face config.json."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int  # of the MLP
    num_hidden_layers: int
    num_attention_heads: int  # query heads
    num_key_value_heads: int  # each serves an equal group of query heads
    head_dim: int
    max_position_embeddings: int  # the longest sequence
    rope_theta: float = 10_000.0
    rope_scaling: dict | None = None  # of Llama 3.1 and 3.2, with the keys ROPE_SCALING
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = False  # the input embedding is also the output matrix
    qkv_bias: bool = False  # as in Qwen2
    qk_norm: bool = False  # as in Qwen3: normalize each head's query and key
    experts: ExpertConfig | None = None  # in place of the MLPs

    def __repr__(self) -> str:
        """Return the fields. Those that came after version 0.3.0 are left out at their default.

        Runs keep a hash of this string, and resume only with the same one.
        """
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        if self.experts is None:
            del values["experts"]
        return f"Config({', '.join(f'{name}={value!r}' for name, value in values.items())})"


# The types of the values in a config.json.
TYPES: dict = {field.name: field.type for field in dataclasses.fields(Config)}
for name_here_only in ("rope_scaling", "qkv_bias", "qk_norm", "experts"):
    del TYPES[name_here_only]
TYPES["sliding_window"] = int
TYPES["use_sliding_window"] = bool
TYPES["max_window_layers"] = int
for number in ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size"):
    TYPES[number] = int
TYPES["decoder_sparse_step"] = int
TYPES["norm_topk_prob"] = bool
TYPES["router_aux_loss_coef"] = float
TYPES["factor"] = float
TYPES["low_freq_factor"] = float
TYPES["high_freq_factor"] = float
TYPES["original_max_position_embeddings"] = int
MAY_BE_ZERO = (
    "max_position_embeddings",
    "rms_norm_eps",
    "max_window_layers",
    "router_aux_loss_coef",
)
LARGEST = {int: 2**31, float: 1e30}  # no model has more, and torch's integers and fp32 hold them

SIZES = {
    "nano": Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=688,
        num_hidden_layers=6,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    ),
    # Few layers and wide matrices: on a GPU a matmul takes longer than its launch, where nano's
    # kernels end before the CPU has launched the next.
    "wide": Config(
        vocab_size=256,
        hidden_size=1536,
        intermediate_size=4096,
        num_hidden_layers=2,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=128,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    ),
    "llama-124m": Config(
        vocab_size=50_304,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=12,
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    ),
    "llama-1b": Config(  # Llama 3.2 1B
        vocab_size=128_256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling={
            "factor": 32.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        tie_word_embeddings=True,
    ),
    "nano-moe": Config(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=352,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        qk_norm=True,
        experts=ExpertConfig(
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=176, norm_topk_prob=True
        ),
    ),
    "llama-8b": Config(  # Llama 3 8B
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rope_theta=500_000.0,
    ),
    "moe-30b-a3b": Config(  # Qwen3-30B-A3B
        vocab_size=151_936,
        hidden_size=2048,
        intermediate_size=6144,
        num_hidden_layers=48,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        max_position_embeddings=40_960,
        rope_theta=1_000_000.0,
        rms_norm_eps=1e-6,
        qk_norm=True,
        experts=ExpertConfig(
            num_experts=128, num_experts_per_tok=8, moe_intermediate_size=768, norm_topk_prob=True
        ),
    ),
    "llama-70b": Config(  # Llama 3 70B
        vocab_size=128_256,
        hidden_size=8192,
        intermediate_size=28_672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=8192,
        rope_theta=500_000.0,
    ),
    "llama-405b": Config(  # Llama 3.1 405B
        vocab_size=128_256,
        hidden_size=16_384,
        intermediate_size=53_248,
        num_hidden_layers=126,
        num_attention_heads=128,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=131_072,
        rope_theta=500_000.0,
        rope_scaling={
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
    ),
}


# (most parameters, recipe), from small to large
RECIPES = [
    (2e7, SMALL),  # nano
    (4e8, Recipe(seq_len=1024, lr=6e-4, warmup_steps=20)),
    (3e9, Recipe(seq_len=2048, lr=3e-4, warmup_steps=20)),
    # Llama 2 (Touvron et al. 2023, section 2.2) trained 7B and 13B with 3e-4, and 34B and 70B with
    # 1.5e-4, all with sequences of 4,096 tokens.
    (2e10, Recipe(seq_len=4096, lr=3e-4, warmup_steps=20)),
    (1e11, Recipe(seq_len=4096, lr=1.5e-4, warmup_steps=20)),
    # Llama 3 405B: Grattafiori et al. 2024, table 3 and section 3.4.1
    (math.inf, Recipe(seq_len=8192, lr=8e-5, warmup_steps=20)),
]


def recipe(name: str) -> Recipe:
    """Return the recipe for a model: a name in SIZES, a config.json, or a folder with one.

    Sequences are at most as long as the model allows. A model with trained weights gets a tenth of
    the learning rate: larger steps would destroy what it has learned.
    """
    config = read_config(name)
    size_recipe = _recipe_for_size(parameter_count(config))
    lr = size_recipe.lr
    if has_weights(name):
        lr = lr / 10
    seq_len = min(size_recipe.seq_len, config.max_position_embeddings)
    return Recipe(seq_len, lr, size_recipe.warmup_steps)


def use_recipe(args: Namespace) -> None:
    """Set --seq-len, --lr and --warmup-steps to the recipe of --model, if they were not given.

    A resumed run has those of the run. Raise UserError if there is no such model.
    """
    for name, value in recipe(args.model)._asdict().items():
        if name not in args.given:
            setattr(args, name, value)


def _recipe_for_size(parameters: int) -> Recipe:
    """Return the first recipe in RECIPES that is for so many parameters."""
    for most_parameters, size_recipe in RECIPES:
        if parameters <= most_parameters:
            return size_recipe
    raise AssertionError("the last recipe has no limit")


def has_weights(name: str) -> bool:
    """Tell whether `name` is a folder with trained weights. A named size has random weights.

    Raise UserError if the folder has weights that cannot be read.
    """
    return name not in SIZES and len(weight_files(Path(name))) > 0


def read_config(name: str, flag: str = "--model") -> Config:
    """Return the shape of a model: a name in SIZES, a config.json, or a folder with one.

    Raise UserError, with the name of `flag`, if there is no such model, if lm/model.py does not
    implement it, or if `name` is the folder of a run: then the line says how to convert it.
    """
    if name in SIZES:
        return SIZES[name]
    refuse_run(name, flag)
    return parse_config(read_config_json(name, flag), f"{flag} {name}")


def read_config_json(name: str, flag: str = "--model") -> dict:
    """Return the content of a config.json, or of the one in a folder.

    Raise UserError, with the name of `flag`, if there is none, or if it is no JSON object.
    """
    path = Path(name)
    if path.is_dir():
        path = path / "config.json"
    if not path.is_file():
        raise UserError(
            f"{flag} {name}: no such size ({', '.join(SIZES)}), "
            f"nor an HF config.json or a folder with one{did_you_mean(name, SIZES)}"
        )
    if path.suffix in WEIGHT_SUFFIXES:
        raise UserError(
            f"{flag} {name} is a file of weights: name the folder with it and its config.json, "
            f"{flag} {path.parent}"
        )
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(
            f"{flag} {name} is not a model's config.json, nor a folder with one: {error}"
        ) from None
    if not isinstance(content, dict):
        raise UserError(f"{flag} {name} is not a model's config.json: it is no JSON object")
    return content


def parse_config(content: dict, where: str) -> Config:
    """Return the shape in the content of a Hugging Face config.json.

    Raise UserError, with a message that starts with `where`, if the content is not a model's config
    or if lm/model.py does not implement the model.
    """
    model_type = content.get("model_type", "llama")
    if model_type not in MODEL_TYPES:
        known = ", ".join(MODEL_TYPES)
        raise UserError(f"{where}: model_type {model_type!r} is not known here: {known}")

    given = {**DEFAULTS, **FAMILY_DEFAULTS[model_type]}
    for key, value in content.items():
        if value is not None:
            given[key] = value
        elif key in NULL_IS_A_VALUE:
            given.pop(key, None)
    for key in REQUIRED:
        if key not in given:
            raise UserError(f"{where}: its config.json lacks {key}")
    _check_types(given, where)
    rope = _rope_parameters(given, where)

    unsupported = _unsupported_values(given, rope, model_type)
    if unsupported:
        raise UserError(
            f"{where} is not a shape that is computed here: it has {', '.join(unsupported)}"
        )
    config = _make_config(given, rope, model_type, where)
    heads = config.num_attention_heads
    key_value_heads = config.num_key_value_heads
    if heads % key_value_heads or config.head_dim % 2 or config.head_dim == 0:
        raise UserError(
            f"{where}: needed are heads in equal groups and an even head_dim, not {heads} "
            f"num_attention_heads, {key_value_heads} num_key_value_heads, "
            f"head_dim {config.head_dim}"
        )
    return config


def _check_types(values: dict, where: str) -> None:
    """Raise UserError for a value of a config.json of the wrong type, such as "512" for 512."""
    for key, value in values.items():
        kind = TYPES.get(key)
        if kind is None:
            continue
        if kind is bool:
            is_right = isinstance(value, bool)
            needed = "true or false"
        else:
            numbers = int if kind is int else int | float
            is_number = isinstance(value, numbers) and not isinstance(value, bool)
            lowest_is_right = is_number and (value > 0 or (value == 0 and key in MAY_BE_ZERO))
            is_right = lowest_is_right and value < LARGEST[kind]
            needed = "a whole number above 0" if kind is int else "a number above 0"
            if lowest_is_right:
                needed = f"below {LARGEST[kind]:g}"
        if not is_right:
            raise UserError(f"{where}: {key} in its config.json is {value!r}, and not {needed}")


def _rope_parameters(given: dict, where: str) -> dict:
    """Return what a config.json says about rotary position embeddings, with the defaults.

    transformers 5 writes rope_parameters, transformers 4 wrote rope_scaling. Where a file has both,
    transformers reads rope_scaling alone.
    """
    source = "rope_scaling" if given.get("rope_scaling") else "rope_parameters"
    content = given.get(source) or {}
    if not isinstance(content, dict):
        raise UserError(f"{where}: its {source} are no JSON object, but {content!r}")
    rope = {key: value for key, value in content.items() if value is not None}
    for key, value in rope.items():
        if isinstance(value, dict):
            raise UserError(f"{where}: {key} in its {source} is for some layers only: {value!r}")
    _check_types(rope, where)
    for key in ("rope_theta", "partial_rotary_factor"):
        rope.setdefault(key, given[key])
    rope.setdefault("rope_type", rope.get("type", "default"))
    if rope["rope_type"] == "llama3":
        rope.setdefault("original_max_position_embeddings", given["max_position_embeddings"])
        for key in ROPE_SCALING:
            if key not in rope:
                raise UserError(f"{where}: its config.json lacks {key} in {source}")
        if rope["low_freq_factor"] >= rope["high_freq_factor"]:
            raise UserError(
                f"{where}: low_freq_factor {rope['low_freq_factor']} in its {source} is not "
                f"below high_freq_factor {rope['high_freq_factor']}"
            )
    return rope


def _unsupported_values(given: dict, rope: dict, model_type: str) -> list[str]:
    """List the values of a config.json that lm/model.py does not implement."""
    unsupported = []
    for key, implemented in LLAMA.items():
        if key in NOT_READ[model_type]:
            continue
        value = rope.get(key, given[key])  # transformers 5 has partial_rotary_factor in rope
        if value != implemented:
            unsupported.append(f"{key} {value!r}")
    if rope["rope_type"] not in ("default", "llama3"):
        unsupported.append(f"rope_type {rope['rope_type']!r}")
    if "quantization_config" in given:
        unsupported.append("quantization_config")
    if given.get("router_jitter_noise", 0) != 0:
        unsupported.append(f"router_jitter_noise {given['router_jitter_noise']!r}")
    return unsupported


def _window(given: dict, model_type: str, where: str) -> float:
    """Return how many tokens a layer sees, in the layer that sees fewest. inf: all.

    The rules are those of transformers. layer_types says which layers have the window. Where it is
    missing, all layers of Mistral have it, and those from max_window_layers on of Qwen2 and Qwen3.
    In these two, there is no window without use_sliding_window.
    """
    layers = given["num_hidden_layers"]
    layer_types = given.get("layer_types")
    if model_type in MIXTURES:
        layer_types = None  # transformers does not read it
    if layer_types is not None:
        if not isinstance(layer_types, list) or len(layer_types) != layers:
            raise UserError(f"{where}: its layer_types are no list of {layers}: {layer_types!r}")
        for layer_type in layer_types:
            if layer_type not in LAYER_TYPES:
                known = ", ".join(LAYER_TYPES)
                raise UserError(f"{where}: its layer_types have {layer_type!r}, not of {known}")

    if layer_types is not None:
        has_window = "sliding_attention" in layer_types
    elif model_type in ("mistral", "mixtral"):
        has_window = True
    elif model_type == "qwen3_moe":
        has_window = given["use_sliding_window"]  # in all layers
    elif model_type in ("qwen2", "qwen3"):
        has_window = given["use_sliding_window"] and given["max_window_layers"] < layers
    else:
        has_window = False
    if not has_window:
        return math.inf

    window = given.get("sliding_window", math.inf)
    if model_type in ("qwen2", "qwen3") and not given["use_sliding_window"]:
        window = math.inf
    if window == math.inf and "sliding_attention" in (layer_types or []):
        raise UserError(
            f"{where}: its layer_types have sliding_attention, and it has no sliding_window"
        )
    return window


def _make_config(given: dict, rope: dict, model_type: str, where: str) -> Config:
    """Make a Config from the values of a config.json, all of which have been checked."""
    values = {
        "num_key_value_heads": given["num_attention_heads"],
        "head_dim": given["hidden_size"] // given["num_attention_heads"],
    }
    values.update(given)
    values["rope_theta"] = rope["rope_theta"]
    values["rope_scaling"] = None
    if rope["rope_type"] == "llama3":
        values["rope_scaling"] = {key: rope[key] for key in ROPE_SCALING}
    values["qkv_bias"] = model_type == "qwen2"
    values["qk_norm"] = model_type in ("qwen3", "qwen3_moe")
    values["experts"] = None
    if model_type in MIXTURES:
        values["experts"] = _experts(given, model_type, where)

    # lm/model.py has no sliding window. Sequences that fit into the window do not need one.
    window = _window(given, model_type, where)
    values["max_position_embeddings"] = min(values["max_position_embeddings"], window)

    names = [field.name for field in dataclasses.fields(Config)]
    return Config(**{name: values[name] for name in names})


def _experts(given: dict, model_type: str, where: str) -> ExpertConfig:
    """Return what a config.json says about its mixtures of experts."""
    # transformers 5 writes num_local_experts, Qwen's files on the hub have num_experts
    number = given.get("num_local_experts", given["num_experts"])
    chosen = given["num_experts_per_tok"]
    if chosen > number:
        raise UserError(f"{where}: num_experts_per_tok is {chosen}, and there are {number} experts")
    size = given["intermediate_size"] if model_type == "mixtral" else given["moe_intermediate_size"]
    dense_layers = []
    if model_type == "qwen3_moe":
        listed = given["mlp_only_layers"]
        if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
            raise UserError(f"{where}: its mlp_only_layers are no list of numbers: {listed!r}")
        for layer in range(given["num_hidden_layers"]):
            if layer in listed or (layer + 1) % given["decoder_sparse_step"]:
                dense_layers.append(layer)
    if len(dense_layers) == given["num_hidden_layers"]:
        raise UserError(f"{where}: its mlp_only_layers and decoder_sparse_step leave no experts")
    weight = given["router_aux_loss_coef"] if given.get("output_router_logits") else 0.0
    norm = given["norm_topk_prob"] or model_type == "mixtral"
    return ExpertConfig(number, chosen, size, norm, tuple(dense_layers), weight)


def config_json(config: Config) -> dict:
    """Return the content of a config.json that transformers and read_config read as this shape."""
    if config.experts:
        family = "Qwen3Moe" if config.qk_norm else "Mixtral"
    elif config.qk_norm:
        family = "Qwen3"
    elif config.qkv_bias:
        family = "Qwen2"
    else:
        family = "Llama"

    content = {
        "architectures": [f"{family}ForCausalLM"],
        "model_type": "qwen3_moe" if family == "Qwen3Moe" else family.lower(),
        "hidden_act": LLAMA["hidden_act"],
        "attention_bias": LLAMA["attention_bias"],
        "mlp_bias": LLAMA["mlp_bias"],
        # The defaults of transformers are 1 and 2, which the byte tokenizer uses for text.
        "bos_token_id": None,
        "eos_token_id": None,
    }
    content.update(dataclasses.asdict(config))
    # The family implies these two.
    del content["qkv_bias"]
    del content["qk_norm"]
    del content["experts"]
    if config.experts:
        content.update(_experts_json(config.experts, family))
    if config.rope_scaling:
        content["rope_scaling"] = {"rope_type": "llama3", **config.rope_scaling}
    return content


def _experts_json(experts: ExpertConfig, family: str) -> dict:
    """Return the keys of a config.json that describe mixtures of experts."""
    content: dict = {
        "num_experts_per_tok": experts.num_experts_per_tok,
        "output_router_logits": experts.balance_weight > 0,
    }
    if experts.balance_weight > 0:
        content["router_aux_loss_coef"] = experts.balance_weight
    if family == "Mixtral":
        # The family has no key for the size of an expert, nor for what follows.
        content["num_local_experts"] = experts.num_experts
        content["intermediate_size"] = experts.moe_intermediate_size
        assert experts.norm_topk_prob, "Mixtral divides by the sum"
        assert not experts.dense_layers, "Mixtral has no dense layers"
    else:
        content["num_experts"] = experts.num_experts
        content["moe_intermediate_size"] = experts.moe_intermediate_size
        content["norm_topk_prob"] = experts.norm_topk_prob
        content["mlp_only_layers"] = list(experts.dense_layers)
    return content


def parameter_count(config: Config, *, active: bool = False) -> int:
    """Return the number of parameters. A tied embedding counts once.

    active: of the experts, count only those that one token passes.
    """
    c = config
    query_size = c.num_attention_heads * c.head_dim
    key_value_size = c.num_key_value_heads * c.head_dim

    attention = 2 * c.hidden_size * query_size  # q_proj, o_proj
    attention += 2 * c.hidden_size * key_value_size  # k_proj, v_proj
    if c.qkv_bias:
        attention += query_size + 2 * key_value_size
    mlp = 3 * c.hidden_size * c.intermediate_size  # gate_proj, up_proj, down_proj
    norms = 2 * c.hidden_size  # one before attention, one before the MLP
    if c.qk_norm:
        norms += 2 * c.head_dim
    blocks = c.num_hidden_layers * (attention + mlp + norms)
    if c.experts:
        experts = c.experts
        number = experts.num_experts_per_tok if active else experts.num_experts
        mixture = number * 3 * c.hidden_size * experts.moe_intermediate_size
        mixture += experts.num_experts * c.hidden_size  # the router
        blocks += (c.num_hidden_layers - len(experts.dense_layers)) * (mixture - mlp)

    embeddings = c.vocab_size * c.hidden_size
    if not c.tie_word_embeddings:
        embeddings *= 2  # input embedding and lm_head
    final_norm = c.hidden_size
    return blocks + final_norm + embeddings


def flops_per_token(config: Config, seq_len: int) -> int:
    """Return the floating-point operations (FLOPs) of training on one token.

        6 (N - N_embedding) + 12 layers heads head_dim seq_len

    MFU is defined with this formula (Chowdhery et al. 2022, PaLM, appendix B). Its two terms:

    - Matmuls with parameters. In forward, each parameter takes part in one multiplication and one
      addition per token: 2 FLOPs. Backward takes twice as many, for the gradients of the input and
      of the parameter. The sum is 6 FLOPs per parameter. N is the number of all parameters.
      Of experts, only those count that a token passes.
      N_embedding is the size of the input embedding, which is looked up and not multiplied. If the
      embedding is tied, N_embedding is 0, because lm_head multiplies by the same matrix.
    - Attention. In forward, each head multiplies the token's query by seq_len keys, and then its
      attention weights by seq_len values, each of head_dim numbers: 2 + 2 = 4 head_dim seq_len
      FLOPs. Backward takes twice as many. The sum is 12 head_dim seq_len per head. The causal mask
      would save half of it, but by convention all of it counts.

    FLOPs that activation checkpointing adds in backward do not count.
    """
    c = config
    input_embedding = 0
    if not c.tie_word_embeddings:
        input_embedding = c.vocab_size * c.hidden_size
    attention = 12 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * seq_len
    return 6 * (parameter_count(c, active=True) - input_embedding) + attention
