"""What kv_cache.py asserts of its rows, what a cache takes by formula, and how soon an idle conversation goes on."""

import argparse
import dataclasses
from collections.abc import Callable
from itertools import takewhile

import torch
from _generate import DTYPES, StaticCache, Text

from common import measure, report
from lm import shapes
from planner import inference
from planner.shape import from_config

COLUMNS = {
    "name": "way",
    "tokens_read": "tokens read",
    "cache_bytes": "cache",
    "idle_bytes": "on the device while idle",
    "equal_tokens": "equal new tokens",
    "logits_error": "logits' error",
    "seconds": "seconds",
    "n": "n",
}
TOLERANCE = 1e-4  # of logits in fp32, relative: sums in another order


def shared_tokens(prompts: list[list[int]], block: int) -> int:
    """How many tokens all prompts share at the start, in full blocks. Each keeps one to read, for its logits."""
    common = min(equal_at_start(prompts[0], prompt) for prompt in prompts)
    shortest = min(map(len, prompts))
    return min(common, shortest - 1) // block * block


def equal_at_start(one: list[int], other: list[int]) -> int:
    """How many tokens are equal before the first that differs."""
    return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))))


def held_at_the_end(cache) -> dict:
    """What a paged cache's texts hold, and how many blocks are not free after all texts are released."""
    row = {"cache_bytes": cache.held_bytes(), "blocks": len(cache.held_blocks())}
    for text in list(cache.tables):
        cache.release(text)
    free = set(cache.free)
    return row | {
        "lost_blocks": len(cache.tensors[0]) - 1 - len(free),
        "freed_twice": len(cache.free) - len(free),
    }


def check(rows: list[dict], text: Text, args: argparse.Namespace, block: int) -> list[str]:
    """Assert tokens, tokens read and bytes. The rows get equal_tokens and the error of the last step's logits, which
    depend on all that a cache holds. In 16 bits rounding can swap two likely tokens, and then the texts differ."""
    none, static, paged, sharing, offloaded = rows
    exact = args.dtype == "fp32" and args.temperature == 0
    baseline = none["logits"]
    lengths = [len(prompt) for prompt in text.prompts]
    shared = shared_tokens(text.prompts, block)
    for row in rows:
        row["equal_tokens"] = sum(map(equal_at_start, row["token_ids"], none["token_ids"]))
        same = row["token_ids"] == none["token_ids"]
        row["logits_error"] = measure.relative_error(row.pop("logits"), baseline) if same else None
        if exact:
            assert same, f"{row['name']}: other tokens than without a cache"
            assert row["logits_error"] <= TOLERANCE, (
                f"{row['name']}: logits differ by {row['logits_error']:.0e}"
            )
        expected = expected_reads(row, lengths, shared if row is sharing else 0)
        found = row["tokens_read"]
        assert found == expected, f"{row['name']}: {found} tokens read, and must be {expected}"

    slots = {"static cache": len(lengths) * text.length}
    for row in (paged, sharing, offloaded):
        blocks = sum(-(-(length + row["decode_steps"]) // block) for length in lengths)
        if row is sharing:
            blocks -= (len(lengths) - 1) * shared // block
        assert row["blocks"] == blocks, (
            f"{row['name']}: {row['blocks']} blocks, and must be {blocks}"
        )
        assert row["lost_blocks"] == 0, (
            f"{row['name']}: {row['lost_blocks']} blocks are not free at the end"
        )
        assert row["freed_twice"] == 0, (
            f"{row['name']}: {row['freed_twice']} blocks are twice among the free ones"
        )
        slots[row["name"]] = blocks * block
    for row in rows[1:]:
        expected = cache_bytes(text.config, slots[row["name"]], args.dtype)
        assert row["cache_bytes"] == expected, (
            f"{row['name']}: {row['cache_bytes']} bytes, and must be {expected}"
        )

    waiting = sum(-(-length // block) for length in lengths) * block
    assert offloaded["cpu_bytes"] == cache_bytes(text.config, waiting, args.dtype)
    assert offloaded["idle_bytes"] == 0, f"{offloaded['idle_bytes']} bytes stay on the device"
    assert offloaded["same_places"] == 0, (
        f"{offloaded['same_places']} blocks came back to where they had been"
    )
    checked = [
        f"{none['tokens_read']:,} tokens read without a cache, {static['tokens_read']:,} with one, as computed",
        f"caches have the bytes of planner/inference.kv_cache_bytes, in blocks of {block} tokens and in rows",
        f"offloaded, {offloaded['cpu_bytes']:,} bytes wait on the CPU, none on the device; they return to other blocks",
    ]
    if shared and len(lengths) > 1:
        checked.append(
            f"{len(lengths)} texts share {shared // block} blocks: their {shared} tokens are read once"
        )
    if exact:
        checked.append(f"all rows have the same tokens and logits (tolerance {TOLERANCE:g})")
    return [*checked, check_70b()]


def expected_reads(row: dict, lengths: list[int], shared: int) -> int:
    """Tokens that the model reads, padding included: the padded prompts, then in each step one a text, or all again."""
    texts, longest, steps = len(lengths), max(lengths), row["decode_steps"]
    if row["name"] == "no cache":
        return texts * sum(range(longest, longest + steps + 1))
    again = texts if "cpu_bytes" in row else 0  # the last token of each prompt, after the pause
    return shared + texts * (longest - shared + steps) + again


def cache_bytes(config: shapes.Config, tokens: int, dtype: str) -> int:
    return inference.kv_cache_bytes(
        from_config("", config), tokens=tokens, bytes_each=DTYPES[dtype].itemsize
    )


def check_70b() -> str:
    """Grouped-query attention: several heads have one key and one value. On the meta device a cache takes no memory."""
    config = shapes.SIZES["llama-70b"]
    all_heads = dataclasses.replace(config, num_key_value_heads=config.num_attention_heads)
    found = []
    for one in (config, all_heads):
        cache = StaticCache(one, batch=1, length=1, dtype=torch.bfloat16, device="meta")
        found.append(sum(tensor.nbytes for tensor in cache.tensors))
        assert found[-1] == cache_bytes(one, 1, "bf16")
    per_token, with_all_heads = found
    weights = inference.weight_bytes(
        from_config("llama-70b", config), weights="int4", group_size=128
    )
    fits = int((48e9 - weights) / per_token)
    return (
        f"llama-70b in bf16: {per_token:,} bytes of cache a token, {with_all_heads:,} with a key for each query head; "
        f"48 GB hold {fits:,} tokens beside int4 weights in groups of 128"
    )


@torch.inference_mode()
def seconds_to_resume(cache, read_again: Callable, device: torch.device, rounds: int) -> dict:
    """An idle conversation goes on: its text is read again, or its blocks are brought back. Prints both times."""
    waiting = {}

    def offload() -> None:
        for text in list(cache.tables):
            waiting[text] = cache.offload(text)

    def bring_back() -> None:
        for text in list(waiting):
            cache.bring_back(text, waiting.pop(text))

    steps = {"read again": read_again, "offload": offload, "bring back": bring_back}
    found = measure.seconds_in_turns(steps, device, rounds)
    for name, row in found.items():
        median, low, high = (
            report.for_people(key, row[key]) for key in ("seconds", "min_seconds", "max_seconds")
        )
        print(f"to go on after a pause, {name}: {median} ({low} to {high}, n={rounds})")
    return found
