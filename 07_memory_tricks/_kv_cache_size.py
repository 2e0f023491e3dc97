"""How large a KV cache is: by formula, and as it is allocated; and what grouped-query attention saves."""

import copy
from collections.abc import Callable
from dataclasses import replace

import torch
from _kv_cache_measure import check_same

from old import model, shapes
from old.generate import StaticCache
from planner import inference
from planner.shape import from_config

NAMED = ("llama-8b", "llama-70b", "llama-405b")
LONG = 8192  # tokens of a request in the table of named models
MANY = 32  # such requests
CARDS = (48e9, 80e9)  # bytes


def check_sizes(
    name: str, config: shapes.Config, *, seq_len: int, concurrency: int, dtype: torch.dtype, device: torch.device
) -> dict:
    """Caches of this model, allocated by length and concurrency, and those of named models. Each must have the bytes
    that planner/ computes, and so grow with both."""
    grown = []
    for length in (seq_len // 4, seq_len // 2, seq_len):
        for requests in (1, concurrency):
            cache = StaticCache(config, batch=requests, length=length, dtype=dtype, device=device)
            storages = [part.untyped_storage() for part in (*cache.keys.values(), *cache.values.values())]
            allocated = sum(storage.nbytes() for storage in storages)
            formula = inference.kv_cache_bytes(
                from_config(name, config), tokens=length * requests, bytes_each=dtype.itemsize
            )
            assert allocated == cache.nbytes() == formula, f"{allocated} bytes, by the formula {formula}"
            grown.append({"tokens": length, "concurrency": requests, "cache_bytes": allocated})
    named = [named_row(name, config), *(named_row(other, shapes.SIZES[other]) for other in NAMED)]
    shape = from_config("llama-70b", shapes.SIZES["llama-70b"])
    weights = inference.weight_bytes(shape, weights="int4", group_size=128)
    per_token = inference.kv_cache_bytes(shape, tokens=1)
    return {
        "allocated": grown,
        "named": named,
        "llama_70b_int4_weight_bytes": weights,
        "llama_70b_tokens_beside_them": {f"{card / 1e9:.0f} GB": int((card - weights) / per_token) for card in CARDS},
    }


def named_row(name: str, config: shapes.Config) -> dict:
    """In bf16. On the meta device a cache of any size is allocated without memory."""
    shape = from_config(name, config)

    def meta_bytes(of: shapes.Config, tokens: int, requests: int = 1) -> int:
        return StaticCache(of, batch=requests, length=tokens, dtype=torch.bfloat16, device="meta").nbytes()

    all_heads = replace(config, num_key_value_heads=config.num_attention_heads)
    row = {
        "model": name,
        "heads": config.num_attention_heads,
        "key_value_heads": config.num_key_value_heads,
        "bytes_per_token": meta_bytes(config, 1),
        "all_heads_bytes_per_token": meta_bytes(all_heads, 1),
        "tokens_per_request": LONG,
        "one_request_bytes": meta_bytes(config, LONG),
        "concurrency": MANY,
        "many_requests_bytes": meta_bytes(config, LONG, MANY),
        "weight_bytes": 2 * shapes.parameter_count(config),
    }
    assert row["many_requests_bytes"] == inference.kv_cache_bytes(shape, tokens=LONG * MANY)
    return row


@torch.inference_mode()
def check_grouped(
    config: shapes.Config, *, seq_len: int, seed: int, device: torch.device, with_cache: Callable
) -> dict:
    """In grouped-query attention the heads of a group have one key and value. Shown on two blocks of the model's width,
    in fp32: with all heads, those of a group having the same weights, the logits are equal and the cache is larger."""
    heads, shared = config.num_attention_heads, config.num_key_value_heads
    if shared == heads:  # a quarter as many, or the next fewer that divide
        shared = max(n for n in range(1, max(1, heads // 4) + 1) if heads % n == 0)
    few = replace(config, num_key_value_heads=shared, num_hidden_layers=2, vocab_size=256)
    grouped = model.build("nano", few, seed=seed, device=device).eval()
    every = model.build("nano", replace(few, num_key_value_heads=heads), seed=seed, device=device).eval()
    every.load_state_dict(with_all_heads(grouped, few))

    prompt = list(range(1, seq_len // 4))
    logits, nbytes = [], []
    for net in (grouped, every):
        cache = StaticCache(net.config, batch=1, length=seq_len, dtype=torch.float32, device=device)
        logits.append(with_cache(net, cache, prompt, seq_len // 4))
        nbytes.append(cache.nbytes())
    same = check_same(*logits)
    assert nbytes[1] == nbytes[0] * heads // shared
    return {
        "heads": heads,
        "key_value_heads": shared,
        "new_tokens": seq_len // 4,
        "cache_bytes": nbytes[0],
        "all_heads_cache_bytes": nbytes[1],
        **same,
    }


def with_all_heads(net: model.Transformer, config: shapes.Config) -> dict[str, torch.Tensor]:
    """The weights of the same model with a key and a value of its own for each query head."""
    group = config.num_attention_heads // config.num_key_value_heads
    state = copy.copy(net.state_dict())
    for name, weight in state.items():
        if "k_proj" in name or "v_proj" in name:
            of_heads = weight.unflatten(0, (-1, config.head_dim))
            state[name] = of_heads.repeat_interleave(group, dim=0).flatten(0, 1)
    return state
