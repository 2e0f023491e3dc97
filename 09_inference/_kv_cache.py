"""The table and the checks of kv_cache.py, and how soon an idle conversation can go on."""

import argparse
import dataclasses
import math
from functools import partial

import torch
from _prompts import Text
from torch import Tensor

from common import measure, report
from common.runtime import DTYPES
from lm import shapes
from lm.generate import generate
from planner import inference
from planner.shape import from_config

COLUMNS = {
    "name": "variant",
    "tokens_read": "tokens read",
    "cache_bytes": "cache",
    "idle_bytes": "on the device while idle",
    "equal_tokens": "equal new tokens",
    "logits_error": "logits' error",
    "seconds": "seconds",
    "n": "n",
}
TOLERANCE = 1e-4  # relative, of logits in fp32: the sums have another order
GPU_BYTES = 48e9  # of the card in check_70b


# --- figures of a row


def cache_figures(steps) -> dict:
    """Return the bytes that the sequences use at the end, and for a paged cache also its pages.

    Then release all sequences, and count the pages that are not free again.
    """
    cache = getattr(steps, "cache", None)
    if cache is None:
        return {"cache_bytes": 0, "idle_bytes": 0}
    if not hasattr(cache, "tables"):
        row_bytes = sum(tensor.nbytes for tensor in cache.tensors())
        return {"cache_bytes": row_bytes, "idle_bytes": row_bytes}

    row = {"cache_bytes": held_bytes(cache), "pages": len(cache.held_pages())}
    row["idle_bytes"] = row["cache_bytes"]
    row |= getattr(steps, "pause", {})
    for text in list(cache.tables):
        cache.release(text)
    different = set(cache.free)
    all_pages = len(cache.keys["0"]) - 1  # page 0 is never free
    row["lost_pages"] = all_pages - len(different)
    row["freed_twice"] = len(cache.free) - len(different)
    return row


def held_bytes(cache) -> int:
    """Return the bytes of the pages that the tables of a paged cache list.

    The cache itself holds more: its free pages stay allocated.
    """
    bytes_per_page = sum(tensor[0].nbytes for tensor in cache.tensors())
    return len(cache.held_pages()) * bytes_per_page


def measure_pause(cache, copies: dict[int, list[Tensor]]) -> dict:
    """Return the bytes that idle sequences have on the device and on the CPU."""
    cpu_bytes = 0
    for tensors in copies.values():
        cpu_bytes += sum(tensor.nbytes for tensor in tensors)
    return {"idle_bytes": held_bytes(cache), "cpu_bytes": cpu_bytes}


def common_pages(before: dict[int, list[int]], after: dict[int, list[int]]) -> int:
    """Return how many pages of the sequences are the same in both tables."""
    return sum(len(set(before[text]) & set(after[text])) for text in before)


# --- checks


def check(
    rows: list[dict], text: Text, args: argparse.Namespace, shared: int, page_size: int
) -> list[str]:
    """Assert that all variants have the same tokens, and that reads and bytes are as computed.

    Add to each row how many new tokens equal those without a cache, and the error of the logits of
    the last step, which depend on all that a cache holds. In 16 bits rounding can swap two likely
    tokens. Then the answers differ from there on, and only reads and bytes are checked.
    """
    none, static, paged, sharing, offloaded = rows
    lengths = [len(prompt) for prompt in text.prompts]
    compare_tokens(rows, exact=args.dtype == "fp32" and args.temperature == 0)
    for row in rows:
        expected = expected_reads(row, lengths, shared if row is sharing else 0)
        name = row["name"]
        assert row["tokens_read"] == expected, (
            f"{name}: {row['tokens_read']} tokens read, expected {expected}"
        )

    for row in (paged, sharing, offloaded):
        check_pages(row, lengths, shared if row is sharing else 0, page_size)
    slots = len(lengths) * text.length
    for row in (static, paged, sharing, offloaded):
        tokens = slots if row is static else row["pages"] * page_size
        expected = cache_bytes(text.config, tokens, args.dtype)
        assert row["cache_bytes"] == expected, (
            f"{row['name']}: {row['cache_bytes']} bytes, expected {expected}"
        )

    pages_of_prompts = sum(math.ceil(length / page_size) for length in lengths)
    waiting = cache_bytes(text.config, pages_of_prompts * page_size, args.dtype)
    assert offloaded["cpu_bytes"] == waiting, (
        f"{offloaded['cpu_bytes']} bytes wait, expected {waiting}"
    )
    assert offloaded["idle_bytes"] == 0, f"{offloaded['idle_bytes']} bytes stay on the device"
    assert offloaded["same_places"] == 0, (
        f"{offloaded['same_places']} pages came back to the places where they had been"
    )

    checked = [
        f"{none['tokens_read']:,} tokens read without a cache, {static['tokens_read']:,} with one, "
        "as computed",
        f"the static cache and pages of {page_size} tokens have the bytes of the planner",
        f"offloaded: {offloaded['cpu_bytes']:,} bytes wait on the CPU and none on the device, and "
        "return to other pages",
    ]
    if shared and len(lengths) > 1:
        checked.append(
            f"{len(lengths)} sequences share {shared // page_size} pages, whose {shared} tokens "
            "are read once"
        )
    if args.dtype == "fp32" and args.temperature == 0:
        checked.append(f"all variants have the same tokens and logits (tolerance {TOLERANCE:g})")
    return checked


def compare_tokens(rows: list[dict], exact: bool) -> None:
    """Compare tokens and logits with those of the first row; assert equality if `exact`."""
    expected_ids = rows[0]["token_ids"]
    expected_logits = rows[0]["logits"]
    for row in rows:
        pairs = zip(row["token_ids"], expected_ids, strict=True)
        row["equal_tokens"] = sum(equal_at_start(ids, expected) for ids, expected in pairs)
        logits = row.pop("logits")
        row["logits_error"] = None
        is_equal = row["token_ids"] == expected_ids
        if is_equal:
            row["logits_error"] = measure.relative_error(logits, expected_logits)
        if exact:
            assert is_equal, f"{row['name']}: other tokens than without a cache"
            assert row["logits_error"] <= TOLERANCE, (
                f"{row['name']}: logits differ by {row['logits_error']:.0e}"
            )


def equal_at_start(ids: list[int], expected: list[int]) -> int:
    """Return how many tokens are equal before the first one that differs."""
    count = 0
    for token, expected_token in zip(ids, expected, strict=False):
        if token != expected_token:
            break
        count += 1
    return count


def expected_reads(row: dict, lengths: list[int], shared: int) -> int:
    """Return how many tokens the model must have read, padding included."""
    sequences = len(lengths)
    longest = max(lengths)  # prompts are padded to it
    steps = row["decode_steps"]
    if row["name"] == "no cache":
        return sequences * sum(range(longest, longest + steps + 1))
    reads = shared + sequences * (longest - shared) + sequences * steps
    if "cpu_bytes" in row:
        reads += sequences  # the last token of each prompt, again after the pause
    return reads


def check_pages(row: dict, lengths: list[int], shared: int, page_size: int) -> None:
    """Assert how many pages the sequences have used, and that all of them became free once."""
    expected = sum(math.ceil((length + row["decode_steps"]) / page_size) for length in lengths)
    expected -= (len(lengths) - 1) * shared // page_size
    name = row["name"]
    assert row["pages"] == expected, f"{name}: {row['pages']} pages, expected {expected}"
    assert row["lost_pages"] == 0, f"{name}: {row['lost_pages']} pages are not free at the end"
    assert row["freed_twice"] == 0, f"{name}: {row['freed_twice']} pages are free twice"


def cache_bytes(config: shapes.Config, tokens: int, dtype: str) -> int:
    """Return the bytes of the keys and values of so many tokens, by the planner."""
    shape = from_config("", config)
    return inference.kv_cache_bytes(shape, tokens=tokens, bytes_each=DTYPES[dtype].itemsize)


def check_70b(cache_class: type) -> str:
    """Assert the bytes per token of a 70B model, whose query heads share key-value heads.

    The cache is on the meta device, where it takes no memory.
    """
    config = shapes.SIZES["llama-70b"]
    ungrouped = dataclasses.replace(config, num_key_value_heads=config.num_attention_heads)
    bytes_per_token = []
    for one_config in (config, ungrouped):
        cache = cache_class(one_config, batch=1, slots=1, dtype=torch.bfloat16, device="meta")
        found = sum(tensor.nbytes for tensor in cache.tensors())
        assert found == cache_bytes(one_config, 1, "bf16")
        bytes_per_token.append(found)
    grouped_bytes, ungrouped_bytes = bytes_per_token
    shape = from_config("llama-70b", config)
    weights = inference.weight_bytes(shape, weights="int4", group_size=128)
    tokens = int((GPU_BYTES - weights) / grouped_bytes)
    return (
        f"llama-70b in bf16: {grouped_bytes:,} bytes of cache per token, {ungrouped_bytes:,} with "
        f"a key for each query head; {GPU_BYTES / 1e9:.0f} GB hold {tokens:,} tokens beside int4 "
        "weights in groups of 128"
    )


# --- time


@torch.inference_mode()
def seconds_to_resume(
    steps, prompts: list[list[int]], device: torch.device, rounds: int
) -> dict[str, dict]:
    """Time two ways to go on with idle conversations, and print the times.

    Either the sequences are read again, or their pages are brought back from the CPU.
    """
    cache = steps.cache
    waiting = {}

    def offload() -> None:
        for text in list(cache.tables):
            waiting[text] = cache.offload(text)

    def bring_back() -> None:
        for text in list(waiting):
            cache.bring_back(text, waiting.pop(text))

    read_again = partial(
        generate,
        steps.prefill,
        steps.decode,
        prompts,
        max_new_tokens=1,
        choose=partial(torch.argmax, dim=-1),
        device=device,
    )
    variants = {"read again": read_again, "offload": offload, "bring back": bring_back}
    timings = measure.seconds_in_turns(variants, device, rounds)
    for name, timing in timings.items():
        median = report.for_people("seconds", timing["seconds"])
        low = report.for_people("seconds", timing["min_seconds"])
        high = report.for_people("seconds", timing["max_seconds"])
        print(f"to go on after a pause, {name}: {median} ({low} to {high}, n={rounds})")
    return timings
