"""What kv_cache.py measures: one text without a cache and with each, many requests; and whether all is the same."""

import statistics
from collections.abc import Callable
from functools import partial

import torch
from _kv_cache_requests import Request, Served
from torch import Tensor

from old import report, step_cost

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 5e-2, torch.float16: 1e-2}  # of logits, relative (norms)


def check_same(found: Tensor, expected: Tensor) -> dict:
    """Logits of the new tokens, a row for each. In fp32 all tokens must be equal. In 16 bits rounding can swap two that
    are equally likely; from there on the texts differ, and logits are compared up to that token."""
    assert found.shape == expected.shape, f"{tuple(found.shape)} for {tuple(expected.shape)}"
    equal = int((found.argmax(-1) == expected.argmax(-1)).int().cumprod(0).sum())
    tolerance = TOLERANCES[expected.dtype]
    assert equal == len(found) or expected.dtype != torch.float32, f"new token {equal + 1} of {len(found)} differs"
    found, expected = found[: equal + 1].float(), expected[: equal + 1].float()
    error = ((found - expected).norm(dim=-1) / expected.norm(dim=-1)).max().item()
    assert error <= tolerance, f"logits are {error:.1e} apart (relative), more than {tolerance:.0e}"
    return {"equal_tokens": equal, "logits_relative_error": error}


def measure_ways(
    without_cache: Callable,
    with_cache: Callable,
    caches: dict[str, object],
    text: Request,
    device: torch.device,
    rounds: int,
) -> list[dict]:
    """A row for each way to go on with a text. A cache needs no clearing: what is stale is never seen."""
    logits = {}

    def run(name: str) -> None:
        if name in caches:
            logits[name] = with_cache(caches[name], text.prompt, text.new_tokens)
        else:
            logits[name] = without_cache(text.prompt, text.new_tokens)

    names = ("no cache", *caches)
    seconds = step_cost.time_in_turns({name: partial(run, name) for name in names}, device, rounds)
    first, last = len(text.prompt), len(text.prompt) + text.new_tokens - 1  # tokens read for the first and last new one
    rows = []
    for name in names:
        rows.append(
            {
                "cache": name,
                "prompt_tokens": first,
                "new_tokens": text.new_tokens,
                "tokens_read": last if name in caches else sum(range(first, last + 1)),
                "seconds": report.spread(seconds[name]),
                **check_same(logits[name], logits["no cache"]),
            }
        )
    return rows


def measure_serving(
    answer: Callable[..., Served],
    new_cache: Callable,
    policies: dict[str, tuple[int, dict]],
    requests: list[Request],
    expected: dict[int, Tensor],
    device: torch.device,
    rounds: int,
) -> tuple[list[dict], dict[str, Served]]:
    """A row for each policy (how many blocks, flags of serve), and its last run. Every request must get the tokens that
    it gets alone."""
    answered, runs = {}, {}

    def run(name: str) -> None:
        answered[name] = [request.again() for request in requests]
        blocks, how = policies[name]
        runs[name] = answer(new_cache(blocks=blocks), answered[name], **how)

    seconds = step_cost.time_in_turns({name: partial(run, name) for name in policies}, device, rounds)
    new_tokens = sum(request.new_tokens for request in requests)
    rows = []
    for name, served in runs.items():
        same = [check_same(torch.stack(request.logits), expected[request.key]) for request in answered[name]]
        rows.append(
            {
                "policy": name,
                "requests": len(requests),
                "new_tokens": new_tokens,
                "equal_tokens": sum(one["equal_tokens"] for one in same),
                "logits_relative_error": max(one["logits_relative_error"] for one in same),
                "steps": served.steps,
                "prompt_tokens_read": served.prompt_tokens_read,
                "preemptions": served.preemptions,
                "slots_filled_mean": statistics.fmean(served.slots_filled),
                "slots_reserved_mean": statistics.fmean(served.slots_reserved),
                "slots_reserved_most": max(served.slots_reserved),
                "seconds": report.spread(seconds[name]),
                "new_tokens_per_second": report.spread([new_tokens / each for each in seconds[name]]),
            }
        )
    return rows, runs
